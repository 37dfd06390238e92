//! A world: a policy with a store and a clock of its own, which decides the requests of a log.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use tollkeeper::store::StoreFuture;
use tollkeeper::{
    Algorithm, Capacity, Charge, Clock, DecidedToll, Limiter, ManualClock, MemoryStore, Policy, Slot, Time,
};
use tollkeeper_tower::facts::CompleteFacts;

use super::batch::BatchEntry;
use super::tally::{Detail, LimitResult, Tally};
use super::time::SECOND;
use super::timeline::Timeline;

/// A policy and what it decided.
#[derive(Debug)]
pub struct World {
    policy: Arc<Policy>,
    limiter: Limiter,
    store: MemoryStore,
    clock: ManualClock,
    has_slots: bool,
    awaits_response: bool,
    returns: BinaryHeap<Reverse<Return>>,
    counts: RequestCounts,
    span: Option<(u64, u64)>,
    timeline: Option<Timeline>,
    tallies: Vec<Tally>,
}

/// The verdicts of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Requests that pass, also those that no limit applies to.
    pub allowed: u64,
    /// Requests that a limit refuses.
    pub refused: u64,
    /// Requests that the middleware would answer with 400 before any limit is asked.
    pub invalid: u64,
}

impl RequestCounts {
    /// All requests.
    pub fn total(&self) -> u64 {
        self.allowed + self.refused + self.invalid
    }
}

/// The result of a world.
#[derive(Clone, Debug)]
pub struct WorldResult {
    /// The verdicts.
    pub requests: RequestCounts,
    /// The seconds of the first and of the last request.
    pub span: Option<(u64, u64)>,
    /// All requests over time.
    pub timeline: Timeline,
    /// Each limit.
    pub limits: Vec<LimitResult>,
    /// How many requests shared the states of others because there were too many keys.
    pub overflows: u64,
}

/// What the limiter decided, and what is given back when the request ends.
#[derive(Debug)]
struct Answered {
    is_allowed: bool,
    slot: Option<Slot>,
    /// The charge, and the limits that give it back.
    refund: Option<(Charge, Vec<String>)>,
}

/// What is given back when a request ends.
#[derive(Debug)]
struct Return {
    at: u64,
    /// Keeps the order of returns at the same time.
    number: u64,
    what: Returned,
}

#[derive(Debug)]
enum Returned {
    Slot(Slot),
    Charge(Charge, Vec<String>),
}

impl PartialEq for Return {
    fn eq(&self, other: &Return) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for Return {}

impl PartialOrd for Return {
    fn partial_cmp(&self, other: &Return) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Return {
    fn cmp(&self, other: &Return) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl World {
    /// A world in which nothing has happened yet.
    pub fn new(policy: Policy, max_keys: usize, detail: Detail) -> World {
        let clock = ManualClock::new(Time::from_micros(0));
        let capacity = Capacity { max_keys, ..Capacity::default() };
        let store = MemoryStore::new(capacity, Clock::manual(&clock));
        let tallies = policy.rules().iter().map(|rule| Tally::new(rule, detail)).collect();
        let any = |test: fn(&tollkeeper::Rule) -> bool| policy.rules().iter().any(test);
        let has_slots = any(|rule| rule.algorithm() == Algorithm::Concurrency);
        let awaits_response = any(tollkeeper::Rule::awaits_response);
        let limiter = Limiter::embedded(policy.clone(), store.clone());
        World {
            policy: Arc::new(policy),
            limiter,
            store,
            clock,
            has_slots,
            awaits_response,
            returns: BinaryHeap::new(),
            counts: RequestCounts::default(),
            span: None,
            timeline: (detail == Detail::Full).then(Timeline::default),
            tallies,
        }
    }

    /// The policy.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// Counts a request that the middleware would not have decided.
    pub fn reject(&mut self, entry: &BatchEntry) {
        self.arrive(entry);
        self.counts.invalid += 1;
    }

    /// Decides a request.
    pub fn decide(&mut self, entry: &BatchEntry, facts: CompleteFacts<'_, '_>) {
        self.arrive(entry);
        let Some(Answered { is_allowed, slot, refund }) = self.ask(entry, facts) else {
            self.counts.invalid += 1;
            return;
        };
        if let Some(timeline) = &mut self.timeline {
            timeline.add(entry.arrival / SECOND, !is_allowed);
        }
        self.counts.allowed += u64::from(is_allowed);
        self.counts.refused += u64::from(!is_allowed);
        let end = entry.arrival.saturating_add(entry.duration.unwrap_or(0));
        let returned = slot.map(Returned::Slot).into_iter();
        for what in returned.chain(refund.map(|(charge, names)| Returned::Charge(charge, names))) {
            let number = self.counts.total();
            self.returns.push(Reverse(Return { at: end, number, what }));
        }
        if entry.duration.is_none() {
            self.settle(entry.arrival);
        }
    }

    /// Asks the limiter; `None` if the request is invalid, such as one whose cost is not a number.
    fn ask(&mut self, entry: &BatchEntry, facts: CompleteFacts<'_, '_>) -> Option<Answered> {
        let World { limiter, policy, tallies, has_slots, awaits_response, .. } = self;
        let status = entry.status.filter(|_| *awaits_response);
        let read = |decided: &DecidedToll| {
            for (limit, rule) in decided.limits().zip(decided.toll().rule_indices()) {
                tallies[rule].add(&limit);
            }
            let is_allowed = decided.allowed();
            let slot = if *has_slots { decided.slot() } else { None };
            let refund = status.filter(|_| is_allowed).and_then(|status| {
                let given_back = decided.limits().filter(|limit| limit.rule().gives_back(status));
                let names: Vec<String> = given_back.map(|limit| limit.name().to_owned()).collect();
                if names.is_empty() { None } else { decided.charge().map(|charge| (charge, names)) }
            });
            Answered { is_allowed, slot, refund }
        };
        let decided = match has_slots {
            true => limiter.acquire(facts.facts).also(facts.also).under(policy).decide_with(read),
            false => limiter.check(facts.facts).also(facts.also).under(policy).decide_with(read),
        };
        match decided {
            Ok(StoreFuture::Ready(answered)) => Some(answered),
            Ok(_) => unreachable!("the memory store answers at once"),
            Err(_) => None,
        }
    }

    /// Sets the clock to the arrival of a request, after everything that ended before it.
    fn arrive(&mut self, entry: &BatchEntry) {
        self.settle(entry.arrival);
        self.clock.set(Time::from_micros(entry.arrival));
        let second = entry.arrival / SECOND;
        self.span = Some((self.span.map_or(second, |(first, _)| first), second));
    }

    /// Gives back what requests held that have ended by now.
    fn settle(&mut self, now: u64) {
        while self.returns.peek().is_some_and(|Reverse(next)| next.at <= now) {
            let Some(Reverse(Return { at, what, .. })) = self.returns.pop() else { return };
            self.clock.set(Time::from_micros(at));
            match what {
                Returned::Slot(slot) => {
                    let _ = self.limiter.release(&slot).wait();
                }
                Returned::Charge(charge, names) => {
                    self.limiter.refund_of(&charge, |name| names.iter().any(|other| other == name)).wait();
                }
            }
        }
    }

    /// The result, with the `most` top keys of each limit.
    pub fn finish(&self, most: usize) -> WorldResult {
        let rules = self.policy.rules().iter().zip(&self.tallies);
        let limits = rules.filter(|(rule, _)| rule.mode() != tollkeeper::Mode::Off);
        WorldResult {
            requests: self.counts,
            span: self.span,
            timeline: self.timeline.clone().unwrap_or_default(),
            limits: limits.map(|(rule, tally)| tally.finish(rule, self.policy.declared(), most)).collect(),
            overflows: self.store.overflows(),
        }
    }
}
