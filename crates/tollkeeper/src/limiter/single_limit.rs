//! The only limit of a policy, prepared for who asks of every request.
//!
//! Where one limit is in force and the value of one fact decides, a request needs neither facts nor a toll nor
//! a decision to be let pass: a [`Handle`](crate::Handle) shows how little it takes. This is the same for who
//! reads requests under a policy and must decide them by no other: it does not follow the limiter.

use std::sync::Arc;

use tollkeeper_core::decision::LimitDecision;
use tollkeeper_core::facts::{self, MAX_VALUE};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{Decision, Due, Facts, Key, LimitReply, Mode, Policy, Reply, Time, Toll, Value, Verb};

use crate::limiter::Limiter;

/// The only limit of a policy.
#[derive(Clone, Debug)]
pub struct Lone {
    policy: Arc<Policy>,
    place: usize,
    fact: Box<str>,
    is_address: bool,
}

impl Lone {
    /// The only limit that this policy has in force; nothing if there are others, or if more decides there than the
    /// value of one fact.
    pub fn of(policy: &Arc<Policy>) -> Option<Lone> {
        let mut in_force = policy.rules().iter().enumerate().filter(|(_, rule)| rule.mode() != Mode::Off);
        let (Some((place, rule)), None) = (in_force.next(), in_force.next()) else { return None };
        rule.plain_quota()?;
        let fact = rule.only_fact()?;
        Some(Lone { policy: Arc::clone(policy), place, fact: fact.into(), is_address: fact == facts::IP })
    }

    /// The fact that decides.
    #[inline]
    pub fn fact(&self) -> &str {
        &self.fact
    }

    /// Whether this limiter can be asked: its state is kept in this process, and nobody observes it, who would want
    /// every decision.
    #[inline]
    pub fn can_ask(&self, limiter: &Limiter) -> bool {
        limiter.is_embedded() && !limiter.is_observed()
    }

    /// Has this limiter decide and charge `cost`, for this value of the fact. `told` hears what the limit says, if it
    /// lets the request pass, else the whole decision.
    ///
    /// Nothing, and nothing is charged, if the limiter [cannot be asked](Lone::can_ask), or if facts would have
    /// something to say against the value or the cost: then it has to be asked as always.
    #[inline]
    pub fn check<T>(
        &self,
        limiter: &Limiter,
        value: &Value<'_>,
        cost: u64,
        told: impl FnOnce(Result<LimitDecision<'_>, Decision>) -> T,
    ) -> Option<T> {
        let memory = limiter.inner.memory.as_ref().filter(|_| self.can_ask(limiter))?;
        let mut scratch = [0; 48];
        let keyed = self.policy.keyed(&self.fact, value, &mut scratch);
        let fits = (1..=MAX_VALUE).contains(&keyed.len()) && (1..=MAX_COST).contains(&cost);
        if !fits || self.is_address != matches!(value, Value::Ip(_)) {
            return None;
        }
        let rule = &self.policy.rules()[self.place];
        let (quota, family) = rule.plain_quota().expect("a limit that grants something");
        let due = Due::prepared(rule, quota, Key::of_keyed(family, keyed), cost);
        let mut said = LimitReply::Nothing;
        let now = memory.decide_one(&due, memory.prints().key(due.key), true, &mut said);
        match said.allowed() || !due.enforced() {
            true => Some(told(Ok(LimitDecision::new(due, &said, now)))),
            false => self.decision(value, cost, said, now).map(|decision| told(Err(decision))),
        }
    }

    /// What was decided, whole.
    #[cold]
    fn decision(&self, value: &Value<'_>, cost: u64, said: LimitReply, now: Time) -> Option<Decision> {
        let mut toll = Toll::new(Arc::clone(&self.policy), Verb::Acquire);
        toll.add(&Facts::new().with(&self.fact, value.clone()), cost).ok()?;
        // A refusal has no receipt that would carry a number.
        let mut ruling = Reply::new(now, 0);
        ruling.push(said);
        Some(Decision::new(toll, ruling))
    }
}
