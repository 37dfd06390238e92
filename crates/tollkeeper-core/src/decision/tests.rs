use std::sync::Arc;

use super::*;
use crate::algorithm::{StoredState, meter};
use crate::facts;
use crate::limit::{Limit, Mode};
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

pub(crate) const NOW: Time = Time::from_micros(1_760_000_000_000_000);

fn allow(remaining: u64, limit: u64) -> Outcome {
    Outcome { allowed: true, limit, remaining, ..Outcome::default() }
}

fn delayed(secs: u64) -> Outcome {
    Outcome { delay: Span::from_secs(secs), ..allow(5, 10) }
}

fn after(secs: u64) -> Outcome {
    Outcome { limit: 10, retry: Some(Retry::After(Span::from_secs(secs))), ..Outcome::default() }
}

fn never() -> Outcome {
    Outcome { limit: 10, remaining: 10, retry: Some(Retry::Never), ..Outcome::default() }
}

/// The decision for limits `0`, `1`, … with these outcomes. `true` marks a limit in shadow mode.
fn decided(verb: Verb, limits: &[(bool, Outcome)]) -> Decision {
    let limit = |(index, (shadow, _)): (usize, &(bool, Outcome))| {
        let mode = if *shadow { Mode::Shadow } else { Mode::Enforce };
        Limit::new(index.to_string(), Quota::per_minute(10)).mode(mode)
    };
    let policy = Policy::new(limits.iter().enumerate().map(limit).collect()).expect("valid");
    let toll = Arc::new(policy).toll(verb, &facts! {}, 1).expect("valid");
    let mut reply = Reply::new(NOW, 7);
    for (index, (_, outcome)) in limits.iter().enumerate() {
        reply.push(LimitReply::Outcome { outcome: *outcome, mark: 100 + index as u64 });
    }
    Decision::new(toll, reply)
}

fn check(limits: &[(bool, Outcome)], expected: Verdict, binding: Option<&str>) {
    let decision = decided(Verb::Check, limits);
    assert_eq!(decision.verdict(), expected, "{limits:?}");
    assert_eq!(decision.binding().map(|limit| limit.name()), binding, "{limits:?}");
    let (allowed, retry_after, delay) = match expected {
        Verdict::Allow { delay } => (true, None, delay),
        Verdict::Deny { retry: Retry::After(span) } => (false, Some(span), Span::ZERO),
        Verdict::Deny { retry: Retry::Never } => (false, None, Span::ZERO),
    };
    assert_eq!((decision.allowed(), decision.retry_after(), decision.delay()), (allowed, retry_after, delay));
    assert_eq!(decision.limits().map(|limit| limit.outcome()).collect::<Vec<_>>(), outcomes(limits));
}

fn outcomes(limits: &[(bool, Outcome)]) -> Vec<Outcome> {
    limits.iter().map(|(_, outcome)| *outcome).collect()
}

const PASS: Verdict = Verdict::Allow { delay: Span::ZERO };
const NEVER: Verdict = Verdict::Deny { retry: Retry::Never };

fn wait(secs: u64) -> Verdict {
    Verdict::Deny { retry: Retry::After(Span::from_secs(secs)) }
}

#[test]
fn request_without_limits_has_no_binding_limit() {
    check(&[], PASS, None);
}

#[test]
fn longest_wait_binds_a_refusal() {
    check(&[(false, after(1))], wait(1), Some("0"));
    check(&[(false, after(1)), (false, after(3)), (false, after(2))], wait(3), Some("1"));
    check(&[(false, allow(0, 10)), (false, after(1)), (false, allow(0, 10))], wait(1), Some("1"));
    check(&[(false, after(0)), (false, allow(9, 10))], wait(0), Some("0"));
}

#[test]
fn never_binds_before_any_number() {
    check(&[(false, never())], NEVER, Some("0"));
    check(&[(false, after(u64::MAX)), (false, never())], NEVER, Some("1"));
    check(&[(false, never()), (false, after(u64::MAX))], NEVER, Some("0"));
}

#[test]
fn smallest_remaining_share_binds_an_admission() {
    check(&[(false, allow(5, 10))], PASS, Some("0"));
    check(&[(false, allow(5, 10)), (false, allow(40, 100)), (false, allow(9, 10))], PASS, Some("1"));
    check(&[(false, allow(1, 3)), (false, allow(333, 1000))], PASS, Some("1"));
    check(&[(false, allow(1, 3)), (false, allow(334, 1000))], PASS, Some("0"));
    let (some, most) = ((1 << 50) - 2, (1 << 50) - 1);
    check(&[(false, allow(most, 1 << 50)), (false, allow(some, 1 << 50))], PASS, Some("1"));
}

#[test]
fn first_defined_limit_wins_ties() {
    check(&[(false, allow(1, 2)), (false, allow(2, 4)), (false, allow(1, 2))], PASS, Some("0"));
    check(&[(false, allow(0, 2)), (false, allow(0, 4))], PASS, Some("0"));
    check(&[(false, allow(9, 9)), (false, after(2)), (false, after(2))], wait(2), Some("1"));
    check(&[(false, after(2)), (false, never()), (false, never())], NEVER, Some("1"));
}

#[test]
fn shadow_limits_never_bind() {
    check(&[(true, never())], PASS, None);
    check(&[(true, after(9)), (true, delayed(9))], PASS, None);
    check(&[(true, never()), (false, allow(5, 10))], PASS, Some("1"));
    check(&[(true, allow(0, 10)), (false, allow(10, 10))], PASS, Some("1"));
    check(&[(true, never()), (false, after(1)), (true, after(9))], wait(1), Some("1"));
    check(
        &[(true, delayed(9)), (false, delayed(1))],
        Verdict::Allow { delay: Span::from_secs(1) },
        Some("1"),
    );
}

#[test]
fn decision_has_longest_delay_and_refusal_has_none() {
    let delay = Verdict::Allow { delay: Span::from_secs(3) };
    check(&[(false, delayed(1)), (false, delayed(3)), (false, delayed(2))], delay, Some("0"));
    check(&[(false, delayed(3)), (false, after(1))], wait(1), Some("1"));
}

#[test]
fn charge_exists_only_if_units_were_charged() {
    let charged = |verb, limits: &[(bool, Outcome)]| {
        let marks = |charge: Charge| charge.items().iter().map(|item| item.mark).collect::<Vec<_>>();
        decided(verb, limits).charge().map(marks)
    };
    let both = [(false, allow(1, 10)), (false, allow(2, 10))];
    let reserve = Verb::Reserve(Span::from_secs(60));
    assert_eq!(charged(Verb::Check, &both), Some(vec![100, 101]));
    assert_eq!(charged(reserve, &both), Some(vec![100, 101]));
    assert_eq!(charged(Verb::Acquire, &both), Some(vec![100, 101]));
    assert_eq!(charged(Verb::Peek, &both), None);
    assert_eq!(charged(Verb::Usage, &both), None);
    assert_eq!(charged(Verb::Check, &[]), None);
    assert_eq!(charged(Verb::Check, &[(false, allow(1, 10)), (false, after(1))]), None);
    assert_eq!(charged(Verb::Check, &[(false, allow(1, 10)), (false, never())]), None);
    // A shadow limit is charged if it allows. If it refuses, the enforced limits are charged all the same.
    assert_eq!(charged(Verb::Check, &[(true, allow(1, 10))]), Some(vec![100]));
    assert_eq!(charged(Verb::Check, &[(true, after(1)), (false, allow(1, 10))]), Some(vec![101]));
    assert_eq!(charged(Verb::Check, &[(true, after(1))]), None);
    assert_eq!(charged(Verb::Check, &[(true, allow(1, 10)), (false, after(1))]), None);
}

#[test]
fn charge_has_the_costs_and_the_time() {
    let shared = Outcome { overflow: true, ..allow(1, 10) };
    let charge = decided(Verb::Check, &[(false, allow(1, 10)), (false, shared)]).charge().expect("charged");
    assert_eq!((charge.id(), charge.time()), (7, NOW));
    let items: Vec<_> = charge.items().iter().map(|item| (item.cost, item.mark, item.shared)).collect();
    assert_eq!(items, [(1, 100, false), (1, 101, true)]);
}

/// The decision of real limits, without any state, for a first request.
pub(crate) fn first(limits: Vec<Limit>, verb: Verb, facts: &facts::Facts<'_>, cost: u64) -> Decision {
    let toll = Arc::new(Policy::new(limits).expect("valid")).toll(verb, facts, cost).expect("valid");
    let steps: Vec<_> = toll.dues().map(|due| due.step(StoredState::Nothing, NOW)).collect();
    let pass = toll.dues().zip(&steps).all(|(due, step)| step.allowed || !due.enforced());
    let mut reply = Reply::new(NOW, 7);
    for step in &steps {
        let charged = pass && step.allowed && verb.charges();
        reply.push(LimitReply::Step { step: *step, charged });
    }
    Decision::new(toll, reply)
}

/// Whether each limit allows, what remains, and when to retry.
fn said(decision: &Decision) -> Vec<(bool, u64, Option<Retry>)> {
    let of = |outcome: Outcome| (outcome.allowed, outcome.remaining, outcome.retry);
    decision.limits().map(|limit| of(limit.outcome())).collect()
}

#[test]
fn allowing_limit_of_a_refusal_is_not_charged() {
    let limits = || {
        vec![
            Limit::new("wide", Quota::per_minute(10)),
            Limit::new("narrow", Quota::per_minute(2)).algorithm(Algorithm::TokenBucket),
            Limit::new("shadow", Quota::per_minute(1)).mode(Mode::Shadow),
        ]
    };
    let passed = first(limits(), Verb::Check, &facts! {}, 2);
    assert_eq!(said(&passed), [(true, 8, None), (true, 0, None), (false, 1, Some(Retry::Never))]);
    let items = passed.charge().expect("charged").items().len();
    assert_eq!(
        (passed.allowed(), passed.binding().map(|limit| limit.name()), items),
        (true, Some("narrow"), 2)
    );

    let refused = first(limits(), Verb::Check, &facts! {}, 3);
    assert_eq!(
        said(&refused),
        [(true, 10, None), (false, 2, Some(Retry::Never)), (false, 1, Some(Retry::Never)),]
    );
    assert_eq!((refused.allowed(), refused.charge()), (false, None));
    assert_eq!(refused.limit("narrow").map(|limit| limit.outcome().allowed), Some(false));
    assert_eq!(refused.limit("other").map(|limit| limit.name()), None);

    let peeked = first(limits(), Verb::Peek, &facts! {}, 2);
    assert_eq!(said(&peeked), [(true, 10, None), (true, 2, None), (false, 1, Some(Retry::Never))]);
    assert_eq!((peeked.allowed(), peeked.charge()), (true, None));
}

#[test]
fn cost_fact_of_zero_is_listed_without_a_charge() {
    let llm = || Limit::new("llm", Quota::per_minute(10)).cost("tokens");
    let facts = facts! { "tokens" => 0 };
    let alone = first(vec![llm()], Verb::Check, &facts, 1);
    assert_eq!((said(&alone), alone.charge()), (vec![(true, 10, None)], None));
    let other = Limit::new("all", Quota::per_minute(10));
    let both = first(vec![llm(), other], Verb::Check, &facts, 1);
    assert_eq!(both.charge().expect("charged").items().len(), 1);
}

/// Otherwise the request would be charged to the other limits although it is refused.
#[test]
fn cost_of_zero_is_refused_by_a_zero_quota() {
    let limits = vec![
        Limit::new("all", Quota::per_minute(10)),
        Limit::new("llm", crate::quota::Allowance::Nothing).cost("tokens"),
    ];
    let decision = first(limits, Verb::Check, &facts! { "tokens" => 0 }, 1);
    assert_eq!(said(&decision), [(true, 10, None), (false, 0, Some(Retry::Never))]);
    assert_eq!((decision.verdict(), decision.charge()), (NEVER, None));
}

#[test]
fn cost_of_zero_is_never_delayed() {
    let limit = Limit::new("x", Quota::per_second(1).burst(3)).algorithm(Algorithm::LeakyBucket).cost("n");
    let policy = Arc::new(Policy::new(vec![limit]).expect("valid"));
    for (cost, delay) in [(0, Span::ZERO), (1, Span::from_secs(2))] {
        let toll = policy.toll(Verb::Check, &facts! { "n" => cost }, 1).expect("valid");
        let due = toll.get(0);
        // Two requests are waiting.
        let state = meter::State { level: 2_000_000, at: due.quota.tick().number(NOW) };
        let step = due.step(StoredState::Meter(state), NOW);
        let mut reply = Reply::new(NOW, 7);
        reply.push(LimitReply::Step { step, charged: true });
        let decision = Decision::new(toll, reply);
        assert_eq!(decision.verdict(), Verdict::Allow { delay }, "cost {cost}");
        assert_eq!(decision.charge().is_some(), cost > 0);
        let limit = decision.limits().next().expect("one limit");
        assert_eq!(limit.remaining(), limit.outcome().remaining, "cost {cost}");
    }
}

#[test]
fn step_and_reported_numbers_agree() {
    let limits = [
        (Quota::per_minute(10), Algorithm::TokenBucket),
        (Quota::per_minute(1), Algorithm::LeakyBucket),
        (Quota::per_minute(10), Algorithm::FixedWindow),
        (Quota::per_minute(2), Algorithm::SlidingWindow),
    ];
    for (rate, algorithm) in limits {
        let policy = Policy::new(vec![Limit::new("x", rate).algorithm(algorithm)]).expect("valid");
        let toll = Arc::new(policy).toll(Verb::Check, &facts! {}, 2).expect("valid");
        let due = toll.get(0);
        let step = due.step(StoredState::Nothing, NOW);
        let reply = LimitReply::Step { step, charged: step.allowed };
        let outcome = due.outcome(StoredState::Nothing, NOW, &step, step.allowed);
        let numbers = LimitReply::Outcome { outcome, mark: step.effect.mark() };
        assert_eq!((reply.allowed(), reply.mark()), (numbers.allowed(), numbers.mark()), "{algorithm}");
        assert_eq!(reply.outcome(due.quota, &due.request(NOW)), outcome, "{algorithm}");
    }
    assert!(!LimitReply::Pending.allowed());
}

#[test]
fn acquisition_has_a_slot_and_a_charge() {
    let limits = || {
        vec![
            Limit::new("exports", Quota::slots(2)),
            Limit::new("all", Quota::per_minute(10)),
            Limit::new("imports", Quota::slots(9)).mode(Mode::Shadow),
        ]
    };
    let decision = first(limits(), Verb::Acquire, &facts! {}, 5);
    let (slot, charge) = (decision.slot().expect("a slot"), decision.charge().expect("a charge"));
    assert_eq!((slot.id(), slot.items().len()), (7, 2));
    assert_eq!((charge.id(), charge.items().len()), (7, 1));
    // One slot of each concurrency limit, whatever the cost.
    assert_eq!(said(&decision), [(true, 1, None), (true, 5, None), (true, 8, None)]);
    let none = first(limits(), Verb::Peek, &facts! {}, 5);
    assert_eq!((none.slot(), none.charge()), (None, None));
    assert_eq!(first(limits(), Verb::Check, &facts! {}, 5).slot(), None);
}

#[test]
#[should_panic(expected = "a store replies for every limit")]
fn incomplete_reply_of_a_store_panics() {
    let policy = Policy::new(vec![Limit::new("x", Quota::per_minute(10))]).expect("valid");
    let toll = Arc::new(policy).toll(Verb::Check, &facts! {}, 1).expect("valid");
    Decision::new(toll, Reply::new(NOW, 7));
}

#[test]
fn decision_exposes_limit_rule_due_key_and_time() {
    let limits = vec![Limit::new("per-user", Quota::per_minute(10)).by("user")];
    let decision = first(limits, Verb::Check, &facts! { "user" => "alice" }, 3);
    let limit = decision.limit("per-user").expect("it applied");
    assert_eq!((limit.name(), limit.rule().name(), limit.due().cost), ("per-user", "per-user", 3));
    assert_eq!(limit.key().to_string(), "per-user:sliding-window:1m:alice");
    assert_eq!((decision.time(), decision.toll().len()), (NOW, 1));
}

#[test]
fn headers_show_the_binding_limit_or_the_next_visible() {
    let shown = |replies: &[(bool, Outcome)]| {
        // The second of three limits is hidden.
        let limit = |index: usize| Limit::new(index.to_string(), Quota::per_minute(10));
        let limits = vec![limit(0), limit(1).hidden(), limit(2)];
        let toll = Arc::new(Policy::new(limits).expect("valid")).toll(Verb::Check, &facts! {}, 1);
        let mut reply = Reply::new(NOW, 7);
        for (degraded, outcome) in replies {
            reply.push(match degraded {
                true => LimitReply::Degraded { by: OnStoreFailure::Allow, outcome: *outcome },
                false => LimitReply::Outcome { outcome: *outcome, mark: 0 },
            });
        }
        let decision = Decision::new(toll.expect("valid"), reply);
        decision.shown().map(|(limit, _)| limit.name().to_owned())
    };
    let shown_of = |outcomes: [Outcome; 3]| shown(&outcomes.map(|outcome| (false, outcome)));
    assert_eq!(shown_of([after(1), allow(1, 10), after(2)]).as_deref(), Some("2"));
    assert_eq!(shown_of([after(1), after(9), after(2)]).as_deref(), Some("2"));
    assert_eq!(shown_of([allow(3, 10), after(9), allow(2, 10)]).as_deref(), Some("2"));
    assert_eq!(shown_of([allow(1, 10), allow(0, 10), allow(2, 10)]).as_deref(), Some("0"));
    let uncounted = [(true, allow(0, 10)), (false, allow(0, 10)), (true, allow(0, 10))];
    assert_eq!(shown(&uncounted), None, "no number of a degraded limit is shown");
}

/// The box of a dropped decision is reused, and nothing of that decision is left in it.
#[test]
fn reused_decision_equals_a_fresh_one() {
    let by = |name: &str, fact: &str| Limit::new(name, Quota::per_minute(10)).by(fact);
    let tiered =
        Limit::tiered("plan", "plan").by("user").tier("free", Quota::per_minute(6)).default_tier("free");
    let full = Arc::new(
        Policy::new(vec![by("user", "user"), by("absent", "absent"), by("again", "user"), tiered])
            .expect("valid"),
    );
    let small = Arc::new(Policy::new(vec![by("user", "user")]).expect("valid"));
    let decide = |policy: &Arc<Policy>, verb: Verb, users: &[&str]| {
        let mut decision = Decision::undecided(policy, verb);
        for user in users {
            decision.toll_mut().add(&facts! { "user" => *user }, 1).expect("valid");
        }
        decision.decide(|toll, reply| {
            for due in toll.dues() {
                reply.push(LimitReply::Step { step: due.step(StoredState::Nothing, NOW), charged: true });
            }
            reply.set(NOW, 7);
        });
        decision
    };
    // Each test has its own thread, so the first decision finds no box to reuse.
    let fresh = format!("{:?}", decide(&small, Verb::Check, &["carol"]));
    drop(decide(&full, Verb::Peek, &["alice", "bob"]));
    let reused = decide(&small, Verb::Check, &["carol"]);
    assert_eq!(format!("{reused:?}"), fresh);
    assert_eq!(reused.toll().skipped().count() + reused.toll().unknown_tiers().count(), 0);
    // While it is in use, another decision has its own.
    let other = decide(&full, Verb::Check, &["dave"]);
    assert_eq!((reused.toll().len(), other.toll().len()), (1, 3));
}
