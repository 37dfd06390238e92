//! Explains a refusal in one sentence that can be pasted into a ticket.

use core::fmt;

use crate::decision::{DecidedToll, LimitDecision, Retry};
use crate::limit::{Missing, OnStoreFailure};
use crate::policy::UtcTime;
use crate::quota::{Algorithm, CheckedQuota};
use crate::time::Span;

/// The sentence for a refusal: what the binding limit allows, and when a retry can pass.
#[derive(Clone, Copy, Debug)]
pub struct Reason<'d> {
    limit: LimitDecision<'d>,
    /// Whether an override at run time applies, and when it ends.
    overridden: Option<Option<u64>>,
}

impl DecidedToll {
    /// Why the request was refused; `None` if it was admitted.
    ///
    /// ```text
    /// `per-user` allows 100 per minute with bursts of 20; the next request of cost 1 fits in 0.6 s
    /// ```
    pub fn reason(&self) -> Option<Reason<'_>> {
        let limit = if self.allowed() { None } else { self.binding() }?;
        Some(Reason { limit, overridden: self.toll().policy().override_until(limit.key()) })
    }
}

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (due, outcome) = (self.limit.due(), self.limit.outcome());
        write!(f, "`{}` ", self.limit.name())?;
        if self.overridden.is_some() && due.quota.count() == 0 {
            return write!(f, "blocks this key by an override{}", Until(self.overridden));
        }
        if let Some(fact) = self.absent() {
            return write!(f, "needs the fact `{fact}`, which this request does not have");
        }
        if self.limit.degraded() == Some(OnStoreFailure::Deny) {
            f.write_str("refuses while the store does not answer")?;
            return match outcome.retry {
                Some(Retry::After(wait)) => write!(f, "; try again in {}", wait.readable()),
                _ => Ok(()),
            };
        }
        if due.quota.count() == 0 {
            return f.write_str("allows nothing here, and waiting does not help");
        }
        write!(f, "allows {}; ", Allowed(due.quota))?;
        match outcome.retry {
            Some(Retry::Never) => {
                write!(f, "a request of cost {} never fits (at most {})", due.cost, outcome.limit)?;
            }
            Some(Retry::After(wait)) if due.is_slot() => {
                write!(f, "all of them are taken, so try again in {}", wait.readable())?;
            }
            Some(Retry::After(wait)) => {
                write!(f, "the next request of cost {} fits in {}", due.cost, wait.readable())?;
            }
            None => f.write_str("it is not the limit that refused")?,
        }
        if self.overridden.is_some() {
            write!(f, " (by an override{})", Until(self.overridden))?;
        }
        if self.limit.degraded().is_some() {
            write!(f, " (degraded: the store does not answer, and this node's share is {})", outcome.limit)?;
        }
        if outcome.overflow {
            f.write_str(
                " (overflow: the store is full, so this key shares its count with others; raise memory.max_keys)",
            )?;
        }
        Ok(())
    }
}

impl Reason<'_> {
    /// The absent fact that made a limit with `missing: deny` refuse the request.
    fn absent(&self) -> Option<&str> {
        let rule = self.limit.rule();
        let absent = self.limit.key().values().position(|value| value.is_none())?;
        (rule.missing == Missing::Deny).then(|| &*rule.by[absent])
    }
}

/// The end of an override, if it has one: ` until 2026-11-25T00:00:00Z`.
struct Until(Option<Option<u64>>);

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.flatten().map_or(Ok(()), |until| write!(f, " until {}", UtcTime(until)))
    }
}

/// What a quota allows, in words: `100 per minute with bursts of 20`, `5 at the same time`.
#[derive(Clone, Copy, Debug)]
pub struct Allowed<'q>(pub &'q CheckedQuota);

impl fmt::Display for Allowed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quota = self.0;
        match quota.algorithm() {
            _ if quota.count() == 0 => f.write_str("nothing"),
            Algorithm::Concurrency => write!(f, "{} at the same time", quota.count()),
            Algorithm::TokenBucket => {
                write!(f, "{} per {} with bursts of {}", quota.count(), Period(quota.period()), quota.burst())
            }
            Algorithm::LeakyBucket => {
                write!(
                    f,
                    "{} per {} with a queue of {}",
                    quota.count(),
                    Period(quota.period()),
                    quota.burst()
                )
            }
            Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => {
                write!(f, "{} per {}", quota.count(), Period(quota.period()))
            }
        }
    }
}

/// A period in the longest unit of which it is a multiple: `minute`, `15 minutes`, `500 ms`; in several units if
/// that number would be hard to read: `1 d 3 h 46 min 40 s`. A period is part of a contract, so it is never rounded.
struct Period(Span);

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAY: Span = Span::from_secs(86_400);
        const UNITS: [(Span, &str); 5] = [
            (Span::from_secs(604_800), "week"),
            (DAY, "day"),
            (Span::from_secs(3_600), "hour"),
            (Span::from_secs(60), "minute"),
            (Span::from_secs(1), "second"),
        ];
        let micros = self.0.as_micros();
        match UNITS.iter().find(|(unit, _)| micros.is_multiple_of(unit.as_micros())) {
            Some((unit, name)) if *unit == self.0 => f.write_str(name),
            Some((unit, name)) if *unit >= DAY || micros / unit.as_micros() <= 120 => {
                write!(f, "{} {name}s", micros / unit.as_micros())
            }
            _ if self.0 > Span::from_secs(120) => write!(f, "{}", self.0.exact()),
            _ if micros.is_multiple_of(1_000) => write!(f, "{} ms", micros / 1_000),
            _ => write!(f, "{micros} µs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::decision::Decision;
    use std::sync::Arc;

    use super::*;
    use crate::decision::{LimitReply, Outcome, Reply};
    use crate::facts;
    use crate::facts::Facts;
    use crate::limit::Limit;
    use crate::policy::Policy;
    use crate::quota::{Allowance, Quota};
    use crate::time::Time;
    use crate::toll::Verb;

    /// Checks the sentence for a request of this cost that got this outcome.
    fn check(limit: Limit, facts: &Facts<'_>, cost: u64, outcome: Outcome, expected: &str) {
        let toll = Arc::new(Policy::new(vec![limit]).unwrap()).toll(Verb::Acquire, facts, cost).unwrap();
        let mut reply = Reply::new(Time::from_micros(0), 1);
        reply.push(LimitReply::Outcome { outcome, mark: 0 });
        let decision = Decision::new(toll, reply);
        assert_eq!(decision.reason().map(|reason| reason.to_string()).as_deref(), Some(expected));
    }

    fn wait(span: Span) -> Outcome {
        Outcome { retry: Some(Retry::After(span)), limit: 20, ..Outcome::default() }
    }

    fn never() -> Outcome {
        Outcome { retry: Some(Retry::Never), limit: 20, ..Outcome::default() }
    }

    fn rate(count: u64, seconds: u64) -> Quota {
        Quota::every(count, Span::from_secs(seconds))
    }

    #[test]
    fn a_reason_names_the_quota_and_the_retry_time() {
        let alice = facts! { "user" => "alice" };
        let by_user = |name: &str, allowance: Allowance| Limit::new(name, allowance).by("user");
        check(
            by_user("per-user", rate(100, 60).burst(20).into()),
            &alice,
            1,
            wait(Span::from_millis(600)),
            "`per-user` allows 100 per minute with bursts of 20; the next request of cost 1 fits in 0.6 s",
        );
        check(
            by_user("login", rate(5, 900).into()).algorithm(Algorithm::SlidingLog),
            &alice,
            2,
            wait(Span::from_micros(121_000_001)),
            "`login` allows 5 per 15 minutes; the next request of cost 2 fits in 2 min 2 s",
        );
        check(
            by_user("queue", rate(10, 1).burst(4).into()).algorithm(Algorithm::LeakyBucket),
            &alice,
            1,
            wait(Span::from_micros(1)),
            "`queue` allows 10 per second with a queue of 4; the next request of cost 1 fits in 0.000001 s",
        );
        check(
            by_user("exports", Quota::slots(5).into()),
            &alice,
            1,
            wait(Span::from_secs(1)),
            "`exports` allows 5 at the same time; all of them are taken, so try again in 1 s",
        );
    }

    #[test]
    fn a_reason_says_if_waiting_does_not_help() {
        let alice = facts! { "user" => "alice" };
        check(
            Limit::new("per-user", rate(100, 60).burst(20)).by("user"),
            &alice,
            30,
            never(),
            "`per-user` allows 100 per minute with bursts of 20; a request of cost 30 never fits (at most 20)",
        );
        check(
            Limit::new("closed", Allowance::Nothing).by("user"),
            &alice,
            1,
            never(),
            "`closed` allows nothing here, and waiting does not help",
        );
        check(
            Limit::new("per-user", rate(100, 60)).by("user").missing(Missing::Deny),
            &facts! {},
            1,
            never(),
            "`per-user` needs the fact `user`, which this request does not have",
        );
    }

    #[test]
    fn a_reason_mentions_a_shared_count() {
        check(
            Limit::new("per-user", rate(100, 60)).by("user"),
            &facts! { "user" => "alice" },
            1,
            Outcome { overflow: true, ..wait(Span::from_secs(3)) },
            "`per-user` allows 100 per minute; the next request of cost 1 fits in 3 s \
             (overflow: the store is full, so this key shares its count with others; raise memory.max_keys)",
        );
    }

    #[test]
    fn a_reason_mentions_a_store_failure() {
        let refused = |by, outcome: Outcome| {
            let limit = Limit::new("per-user", rate(100, 60)).by("user");
            let policy = Arc::new(Policy::new(vec![limit]).unwrap());
            let toll = policy.toll(Verb::Check, &facts! { "user" => "alice" }, 1).unwrap();
            let mut reply = Reply::new(Time::from_micros(0), 1);
            reply.push(LimitReply::Degraded { by, outcome });
            Decision::new(toll, reply).reason().unwrap().to_string()
        };
        assert_eq!(
            refused(OnStoreFailure::Deny, wait(Span::from_secs(1))),
            "`per-user` refuses while the store does not answer; try again in 1 s"
        );
        assert_eq!(
            refused(OnStoreFailure::Local, wait(Span::from_secs(3))),
            "`per-user` allows 100 per minute; the next request of cost 1 fits in 3 s \
             (degraded: the store does not answer, and this node's share is 20)"
        );
    }

    #[test]
    fn periods_are_exact_in_readable_units() {
        for (micros, expected) in [
            (1_000_000, "second"),
            (60_000_000, "minute"),
            (900_000_000, "15 minutes"),
            (604_800_000_000, "week"),
            (1_209_600_000_000, "2 weeks"),
            (500_000, "500 ms"),
            (1_500_000, "1500 ms"),
            (1_001, "1001 µs"),
            (129_600_000_000, "36 hours"),
            (31_622_400_000_000, "366 days"),
            (100_000_000_000, "1 d 3 h 46 min 40 s"),
            (86_401_000_000, "1 d 1 s"),
            (86_400_500_000, "1 d 0.5 s"),
            (25_920_000_000, "7 h 12 min"),
        ] {
            assert_eq!(Period(Span::from_micros(micros)).to_string(), expected, "{micros} µs");
        }
    }
}
