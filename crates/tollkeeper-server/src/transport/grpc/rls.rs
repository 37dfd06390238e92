//! Envoy's rate limit service: turns each descriptor into facts, decides all of them as one request, and reports for each
//! the status of its binding limit.

use std::borrow::Cow;
use std::str;
use std::sync::Arc;
use std::time::Instant;

use prost_types::Duration;
use tollkeeper::LimitDecision;
use tollkeeper::facts::DeclaredFacts;
use tollkeeper::{
    CheckedQuota, Correction, Decision, Facts, InvalidRequest, MatchedLimits, MultiRequest, OnStoreFailure,
    Outcome, Retry, Span, Unavailable, Verdict,
};
use tollkeeper_tower::headers::Field;
use tonic::Status;

use super::decoder::{Descriptor, Question};
use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use crate::service::Service;
use crate::telemetry::metrics::{Ended, RouteLabel};
use crate::telemetry::trace::{Parent, SpanOutcome};
use crate::transport::response_headers::Headers;

/// The rate limit service.
#[derive(Debug)]
pub struct Rls {
    service: Arc<Service>,
}

impl Rls {
    /// Decides by the limits of this service.
    pub fn new(service: Arc<Service>) -> Rls {
        Rls { service }
    }

    /// Decides an encoded `RateLimitRequest`, and traces it if it has a parent span.
    pub async fn answer(&self, message: &[u8], parent: Option<Parent>) -> Result<RateLimitResponse, Status> {
        let began = Instant::now();
        let answered = self.decide_all(message, parent, began).await;
        let ended = answered.as_ref().map_or(Ended::Error, |(ended, _)| *ended);
        self.service.metrics.grpc.record(ended, began.elapsed());
        answered.map(|(_, response)| response)
    }

    async fn decide_all(
        &self,
        message: &[u8],
        parent: Option<Parent>,
        began: Instant,
    ) -> Result<(Ended, RateLimitResponse), Status> {
        let question =
            Question::read(message).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let asked = understand(&question, self.service.limiter.policy().declared())?;
        let Decisions { looked, charged, given } = if asked.iter().all(|asked| asked.hits.charge().is_some())
        {
            let charged = self.join(&asked, Hits::charge)?.check().await;
            Decisions { charged, ..Decisions::default() }
        } else {
            // Boxed, because this rare case would make the future of every call larger, and futures are moved.
            Box::pin(self.decide_mixed(&asked)).await?
        };
        let allowed = looked.allowed() && charged.allowed();

        let mut statuses = vec![DescriptorStatus::default(); asked.len()];
        given.tell(&mut statuses);
        // A refund is never refused, even if its limit is exhausted.
        statuses.iter_mut().for_each(|status| status.code = Code::Ok.into());
        looked.tell(&mut statuses);
        charged.tell(&mut statuses);
        let degraded = [&looked, &charged, &given].iter().any(|decided| decided.degraded());
        let ended = match (degraded, allowed) {
            (true, _) => Ended::Degraded,
            (false, true) => Ended::Allowed,
            (false, false) => Ended::Refused,
        };
        let overall_code = if allowed { Code::Ok } else { Code::OverLimit };
        let telling = if looked.allowed() { [&charged, &looked] } else { [&looked, &charged] };
        if let (Some(traces), Some(parent)) = (self.service.traces(), parent) {
            traces.record(parent, "ShouldRateLimit", began, || told(telling, &given));
        }
        let telling = telling.into_iter().find_map(|decided| decided.decision.as_ref());
        if let Some(decision) = telling {
            self.service.log_refusal("grpc", RouteLabel::NONE, decision);
        }
        let response = RateLimitResponse {
            overall_code: overall_code.into(),
            statuses,
            response_headers_to_add: telling
                .map(|told| tell(&self.service.headers.load(), told))
                .unwrap_or_default(),
        };
        Ok((ended, response))
    }

    /// Decides descriptors of which some only look or refund.
    async fn decide_mixed(&self, asked: &[Asked<'_>]) -> Result<Decisions, Status> {
        // Validate all descriptors before the first is decided: an invalid call charges nothing.
        let looks = self.join(asked, |hits| matches!(hits, Hits::Look).then_some(1))?;
        let charges = self.join(asked, Hits::charge)?;
        let gives = self.join(asked, Hits::give_back)?;
        let given = self.join(asked, |hits| hits.give_back().map(|_| 1))?;

        let looked = looks.look().await;
        // If a look is refused, nothing is charged.
        let charged = if looked.allowed() { charges.check().await } else { charges.look().await };
        if let (true, Some(gives)) = (looked.allowed() && charged.allowed(), gives.joint) {
            let only_gives = looked.decision.is_none() && charged.decision.is_none();
            // The decisions are final, even if the refund failed.
            if gives.give_back().await == Correction::Failed && only_gives {
                return Err(Status::unavailable(format!("store_unavailable: {Unavailable}")));
            }
        }
        Ok(Decisions { looked, charged, given: given.look().await })
    }

    /// Joins the descriptors for which `cost` is `Some` into one request.
    fn join(&self, asked: &[Asked<'_>], cost: impl Fn(Hits) -> Option<u64>) -> Result<Joined<'_>, Status> {
        let mut joined = Joined::default();
        for (index, asked) in asked.iter().enumerate() {
            let Some(cost) = cost(asked.hits) else { continue };
            // No delays: Envoy cannot hold a request until it has left a leaky bucket.
            let joint =
                joined.joint.get_or_insert_with(|| self.service.limiter.multi_request().hold(Span::ZERO));
            joined.met.push((index, joint.add(&asked.facts, cost).map_err(invalid)?));
        }
        Ok(joined)
    }
}

/// A validated descriptor.
struct Asked<'a> {
    facts: Facts<'a>,
    hits: Hits,
}

/// What a descriptor asks for.
#[derive(Clone, Copy)]
enum Hits {
    /// Charge so many units.
    Charge(u64),
    /// Only report whether one unit would be admitted.
    Look,
    /// Refund so many units.
    GiveBack(u64),
}

impl Hits {
    fn charge(self) -> Option<u64> {
        if let Hits::Charge(cost) = self { Some(cost) } else { None }
    }

    fn give_back(self) -> Option<u64> {
        if let Hits::GiveBack(cost) = self { Some(cost) } else { None }
    }
}

fn understand<'a>(question: &'a Question<'a>, declared: &DeclaredFacts) -> Result<Vec<Asked<'a>>, Status> {
    if question.domain.is_empty() {
        return Err(Status::invalid_argument(
            "the domain is empty (set `domain` in Envoy's rate limit filter)",
        ));
    }
    if question.descriptors.is_empty() {
        return Err(Status::invalid_argument(
            "there are no descriptors (add `rate_limits` to a route in Envoy)",
        ));
    }
    let usual = u64::from(question.hits_addend.max(1));
    let asked = |descriptor| {
        let facts = facts(question.domain, descriptor, declared).map_err(invalid)?;
        Ok(Asked { facts, hits: hits(descriptor, usual) })
    };
    question.descriptors.iter().map(asked).collect()
}

fn hits(descriptor: &Descriptor<'_>, usual: u64) -> Hits {
    match (descriptor.is_negative_hits, descriptor.hits_addend.unwrap_or(usual)) {
        (_, 0) => Hits::Look,
        (false, hits) => Hits::Charge(hits),
        (true, hits) => Hits::GiveBack(hits),
    }
}

/// The entries of a descriptor and the domain, as facts.
///
/// A value may come from the client, and Envoy admits a request if the call about it fails. So a value that is too long or
/// not UTF-8 is replaced by its hash instead of failing the call.
fn facts<'a>(
    domain: &'a str,
    descriptor: &'a Descriptor<'a>,
    declared: &DeclaredFacts,
) -> Result<Facts<'a>, InvalidRequest> {
    let mut facts = Facts::new();
    let mut put = |name: &'a str, raw: &'a [u8]| {
        facts.insert(name, declared.read(name, Cow::Borrowed(raw))).map_err(InvalidRequest::Fact)
    };
    // The first entry of a name wins, so they are inserted in reverse order.
    for (key, value) in descriptor.entries.iter().rev() {
        put(key, value)?;
    }
    let find = |name| descriptor.entries.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    if let (Some(remote), None) = (find("remote_address"), find("ip")) {
        put("ip", remote)?;
    }
    put("domain", domain.as_bytes())?;
    Ok(facts)
}

fn invalid(error: InvalidRequest) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Some of the descriptors, to be decided together.
#[derive(Default)]
struct Joined<'a> {
    /// `None` if there are no such descriptors.
    joint: Option<MultiRequest<'a>>,
    /// The index of each descriptor in the call, and its limits.
    met: Vec<(usize, MatchedLimits)>,
}

impl Joined<'_> {
    async fn check(self) -> Decided {
        let decision = if let Some(joint) = self.joint { Some(joint.check().await) } else { None };
        Decided { decision, met: self.met }
    }

    async fn look(self) -> Decided {
        let decision = if let Some(joint) = self.joint { Some(joint.peek().await) } else { None };
        Decided { decision, met: self.met }
    }
}

/// The decisions for each kind of descriptor.
#[derive(Default)]
struct Decisions {
    looked: Decided,
    charged: Decided,
    /// The state of refunded limits, after the refund.
    given: Decided,
}

/// The decision for the descriptors of one kind.
#[derive(Default)]
struct Decided {
    decision: Option<Decision>,
    met: Vec<(usize, MatchedLimits)>,
}

impl Decided {
    fn allowed(&self) -> bool {
        self.decision.as_ref().is_none_or(|decision| decision.allowed())
    }

    fn degraded(&self) -> bool {
        self.decision.as_ref().is_some_and(|decision| decision.degraded().is_some())
    }

    /// Writes the status of each descriptor at its index.
    fn tell(&self, statuses: &mut [DescriptorStatus]) {
        let Some(decision) = &self.decision else { return };
        for (index, met) in &self.met {
            let (verdict, binding) = decision.of(met);
            let code = if let Verdict::Allow { .. } = verdict { Code::Ok } else { Code::OverLimit };
            let status =
                binding.map(|(answer, outcome)| descriptor_status(&answer, &outcome)).unwrap_or_default();
            statuses[*index] = DescriptorStatus { code: code.into(), ..status };
        }
    }
}

/// The attributes of the span, from the most informative decision first.
fn told(telling: [&Decided; 2], given: &Decided) -> SpanOutcome {
    let decided = telling.into_iter().filter_map(|decided| decided.decision.as_ref()).map(SpanOutcome::of);
    let all = decided.chain(given.decision.as_ref().map(SpanOutcome::of_given)).reduce(SpanOutcome::and);
    all.expect("a call has at least one descriptor")
}

/// The status of the binding limit, as an Envoy message.
fn descriptor_status(answer: &LimitDecision<'_>, outcome: &Outcome) -> DescriptorStatus {
    let until = match outcome.retry {
        Some(Retry::After(retry)) => Some(retry),
        Some(Retry::Never) => None,
        None => outcome.reset_after,
    };
    let seconds = |span: Span| i64::try_from(span.as_secs_ceil()).unwrap_or(i64::MAX);
    let duration_until_reset = until.map(|span| Duration { seconds: seconds(span), nanos: 0 });
    match answer.degraded() {
        // This node refused by another limit, without asking the store about this one.
        None if !answer.asked() => DescriptorStatus::default(),
        // The failure policy decided without counting, so the rest is unknown.
        Some(OnStoreFailure::Allow) => DescriptorStatus::default(),
        Some(OnStoreFailure::Deny) => {
            DescriptorStatus { duration_until_reset, ..DescriptorStatus::default() }
        }
        Some(OnStoreFailure::Local) | None => DescriptorStatus {
            code: Code::Unknown.into(),
            current_limit: current_limit(answer),
            limit_remaining: u32::try_from(outcome.remaining).unwrap_or(u32::MAX),
            duration_until_reset,
        },
    }
}

/// The rate, if Envoy has a unit for its period. Hidden limits have none, because Envoy can put the rate into headers.
fn current_limit(answer: &LimitDecision<'_>) -> Option<RateLimit> {
    if !answer.rule().shown() {
        return None;
    }
    let quota: &CheckedQuota = answer.due().quota;
    let unit = UNITS.iter().find(|(span, _)| *span == quota.period())?.1;
    let requests_per_unit = u32::try_from(quota.count()).unwrap_or(u32::MAX);
    Some(RateLimit { requests_per_unit, unit: unit.into(), name: answer.name().to_owned() })
}

/// Envoy's units and their lengths.
const UNITS: [(Span, Unit); 7] = [
    (Span::from_secs(1), Unit::Second),
    (Span::from_secs(60), Unit::Minute),
    (Span::from_secs(3_600), Unit::Hour),
    (Span::from_secs(86_400), Unit::Day),
    (Span::from_secs(7 * 86_400), Unit::Week),
    (Span::from_secs(30 * 86_400), Unit::Month),
    (Span::from_secs(365 * 86_400), Unit::Year),
];

/// The headers that Envoy should add to its response.
fn tell(headers: &Headers, decision: &Decision) -> Vec<HeaderValue> {
    let text = |value: &[u8]| String::from_utf8(value.to_vec()).expect("ASCII");
    let header =
        |(field, value): (Field, &[u8])| HeaderValue { key: field.name().to_owned(), value: text(value) };
    headers.for_envoy(decision).iter().map(header).collect()
}
