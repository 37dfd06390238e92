//! The calls of the API: what each reads from its body, and what it answers.

use std::borrow::Cow;
use std::sync::Arc;

use http::StatusCode;
use tollkeeper::{Acquired, Correction, Costs, Decision, Facts, Limiter, Unavailable};

use crate::api::active_limits::ActiveLimits;
use crate::api::error::{ApiError, Code};
use crate::api::redact::Redactor;
use crate::api::request::{CheckBody, Correct, Forget, Reserve, read_explain, read_slot};
use crate::api::{decision_json, operator_facts};
use crate::json::{Reader, Writer};

/// Initial capacity of an answer: fits a decision about one or two limits.
const TYPICAL_ANSWER: usize = 1 << 10;

/// A call of the API that every client can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the calls")]
pub enum ApiCall {
    Check,
    Peek,
    Usage,
    Reserve,
    Settle,
    Refund,
    Acquire,
    Release,
    Renew,
    Forget,
    Limits,
    Explain,
}

impl ApiCall {
    /// Every call.
    pub const ALL: [ApiCall; 12] = [
        ApiCall::Check,
        ApiCall::Peek,
        ApiCall::Usage,
        ApiCall::Reserve,
        ApiCall::Settle,
        ApiCall::Refund,
        ApiCall::Acquire,
        ApiCall::Release,
        ApiCall::Renew,
        ApiCall::Forget,
        ApiCall::Limits,
        ApiCall::Explain,
    ];

    /// Its name, such as `check`.
    pub const fn name(self) -> &'static str {
        match self {
            ApiCall::Check => "check",
            ApiCall::Peek => "peek",
            ApiCall::Usage => "usage",
            ApiCall::Reserve => "reserve",
            ApiCall::Settle => "settle",
            ApiCall::Refund => "refund",
            ApiCall::Acquire => "acquire",
            ApiCall::Release => "release",
            ApiCall::Renew => "renew",
            ApiCall::Forget => "forget",
            ApiCall::Limits => "limits",
            ApiCall::Explain => "explain",
        }
    }

    /// The call of this name.
    pub fn of(name: &str) -> Option<ApiCall> {
        ApiCall::ALL.into_iter().find(|call| call.name() == name)
    }
}

/// What calls are answered from.
pub struct Api<'a> {
    /// Makes the decisions.
    pub limiter: &'a Limiter,
    /// Redacts hashed facts in answers.
    pub redactor: &'a Redactor,
    /// The active limits, for `limits`.
    pub limits: &'a dyn ShowLimits,
}

/// A source of the active limits, for `limits`.
pub trait ShowLimits: Sync {
    /// The active limits.
    fn active_limits(&self) -> Arc<ActiveLimits>;
}

/// The answer to a call.
#[derive(Clone, Debug)]
pub struct ApiAnswer {
    /// 200, or 429 for a refusal.
    pub status: StatusCode,
    /// The JSON.
    pub text: Cow<'static, str>,
    /// The decision whose rate-limit headers belong to the answer: of `check`, `reserve` and `acquire`.
    pub decision: Option<Decision>,
}

impl Api<'_> {
    /// Answers a call. `decided` sees the decision of `check`, `peek`, `reserve` and `acquire` before it is written.
    pub async fn answer(
        &self,
        call: ApiCall,
        body: &mut [u8],
        decided: impl FnOnce(&Facts<'_>, &Decision),
    ) -> Result<ApiAnswer, ApiError> {
        let limiter = self.limiter;
        match call {
            ApiCall::Check => {
                let check = CheckBody::read(Reader::new(body)?)?;
                let decision = limiter.check(&check.facts).cost(check.cost).await?;
                decided(&check.facts, &decision);
                Ok(self.decision(decision))
            }
            ApiCall::Peek => {
                let check = CheckBody::read(Reader::new(body)?)?;
                let decision = limiter.peek(&check.facts).cost(check.cost).await?;
                decided(&check.facts, &decision);
                Ok(ApiAnswer { status: StatusCode::OK, decision: None, ..self.decision(decision) })
            }
            ApiCall::Reserve => {
                let Reserve { check, ttl } = Reserve::read(Reader::new(body)?)?;
                let decision = limiter.reserve(&check.facts, ttl).cost(check.cost).await?;
                decided(&check.facts, &decision);
                Ok(self.decision(decision))
            }
            ApiCall::Acquire => {
                let check = CheckBody::read(Reader::new(body)?)?;
                let Acquired { decision, slot } = limiter.acquire(&check.facts).cost(check.cost).await?;
                decided(&check.facts, &decision);
                // From here on the slot belongs to the client. A client that disconnects earlier drops this future, and
                // with it the slot.
                let slot = slot.map(|slot| limiter.seal_slot(&slot.keep()));
                let mut out = Writer::with_capacity(TYPICAL_ANSWER);
                decision_json::write_acquired(&mut out, limiter, self.redactor, &decision, slot.as_deref());
                Ok(decided_as(decision, out))
            }
            ApiCall::Settle => {
                let settle = Correct::read(Reader::new(body)?)?;
                let charge = limiter.open_charge(settle.charge).await?.ok_or_else(unknown_charge)?;
                corrected(limiter.settle(&charge, settle.actual()?).await?)
            }
            ApiCall::Refund => {
                let refund = Correct::read(Reader::new(body)?)?;
                let charge = limiter.open_charge(refund.charge).await?.ok_or_else(unknown_charge)?;
                corrected(limiter.refund_part(&charge, refund.costs().unwrap_or(Costs::All)).await?)
            }
            ApiCall::Release | ApiCall::Renew => {
                let text = read_slot(Reader::new(body)?)?;
                let slot = limiter.open_slot(text).await?.ok_or_else(unknown_slot)?;
                let held = match call {
                    ApiCall::Release => limiter.release(&slot).await?,
                    _ => limiter.renew(&slot).await?,
                };
                if held { Ok(done(true)) } else { Err(unknown_slot()) }
            }
            ApiCall::Usage => {
                let facts = read_explain(Reader::new(body)?)?;
                self.usage(&operator_facts::resolve(&facts, &limiter.policy(), self.redactor)?).await
            }
            ApiCall::Forget => {
                let Forget { limit, facts } = Forget::read(Reader::new(body)?)?;
                let facts = operator_facts::resolve(&facts, &limiter.policy(), self.redactor)?;
                self.forget(limit, &facts).await
            }
            ApiCall::Limits => Ok(ok(self.limits.active_limits().to_json())),
            ApiCall::Explain => {
                let policy = limiter.policy();
                let facts = read_explain(Reader::new(body)?)?;
                let facts = operator_facts::resolve(&facts, &policy, self.redactor)?;
                let mut out = Writer::default();
                decision_json::write_explained(&mut out, &policy, &facts, self.redactor)?;
                Ok(ok(out.finish()))
            }
        }
    }

    /// The state of each limit that applies to these facts: `{"limits":[…]}`.
    pub async fn usage(&self, facts: &Facts<'_>) -> Result<ApiAnswer, ApiError> {
        let decision = self.limiter.usage(facts).await?;
        let mut out = Writer::default();
        out.raw("{\"limits\":");
        decision_json::write_limits(&mut out, self.redactor, &decision);
        out.raw("}");
        Ok(ok(out.finish()))
    }

    /// Forgets a key: `{"done":true}`, or false if it had no state.
    pub async fn forget(&self, limit: &str, facts: &Facts<'_>) -> Result<ApiAnswer, ApiError> {
        Ok(done(self.limiter.forget(limit, facts).await?))
    }

    fn decision(&self, decision: Decision) -> ApiAnswer {
        let mut out = Writer::with_capacity(TYPICAL_ANSWER);
        decision_json::write_decision(&mut out, self.limiter, self.redactor, &decision);
        decided_as(decision, out)
    }
}

fn decided_as(decision: Decision, out: Writer) -> ApiAnswer {
    let status = if decision.allowed() { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    ApiAnswer { status, text: out.finish().into(), decision: Some(decision) }
}

fn ok(text: impl Into<Cow<'static, str>>) -> ApiAnswer {
    ApiAnswer { status: StatusCode::OK, text: text.into(), decision: None }
}

/// `{"done":true}` or `{"done":false}`.
pub fn done(done: bool) -> ApiAnswer {
    ok(if done { "{\"done\":true}" } else { "{\"done\":false}" })
}

fn corrected(correction: Correction) -> Result<ApiAnswer, ApiError> {
    match correction {
        Correction::Done => Ok(done(true)),
        Correction::Repeated => Ok(done(false)),
        Correction::Failed => Err(Unavailable.into()),
        Correction::Full => {
            let message = "the store is full and cannot record this correction: the charge stays valid, so retry later, or \
                           raise `memory.max_keys`";
            Err(ApiError::new(Code::StoreUnavailable, message))
        }
        Correction::Unknown => Err(unknown_charge()),
    }
}

fn unknown_charge() -> ApiError {
    let message = "unknown charge: not issued by this store, expired, or already corrected completely";
    ApiError::new(Code::UnknownCharge, message).at("charge")
}

fn unknown_slot() -> ApiError {
    let message = "unknown slot: not issued by this store, released, or expired";
    ApiError::new(Code::UnknownSlot, message).at("slot")
}
