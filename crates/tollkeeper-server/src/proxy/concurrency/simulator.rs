//! Simulates an upstream behind the adaptive limit, in virtual time: workers that take one request each, and a queue.
//!
//! It runs the shipped [`Slots`] and step function. The same seed gives the same run.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use tollkeeper::{Percent, Span, Time};

use super::slots::{ConcurrencyLimit, Slots, TakenSlot};
use super::step::{Bounds, Ending};

/// At most one request arrives in a slot of this length. It is short enough for arrivals that are nearly Poisson.
const ARRIVAL_SLOT: Span = Span::from_micros(50);
/// How often the run is measured.
const PERIOD: Span = Span::from_secs(1);

/// An upstream.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedUpstream {
    /// How many requests it works on at once.
    pub(super) workers: usize,
    /// How long it works on one: uniformly from 0.75 to 1.25 times this.
    pub(super) work: Span,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    /// The upstream at the start.
    pub(super) upstream: SimulatedUpstream,
    /// What it becomes, and when.
    pub(super) changes: Vec<(Time, SimulatedUpstream)>,
    /// Requests per second.
    pub(super) arrivals: u64,
    /// The share of the limit that each priority may fill, and its share of the requests.
    pub(super) priorities: Vec<(Percent, Percent)>,
    /// The bounds of the limit.
    pub(super) bounds: Bounds,
    /// When the run ends.
    pub(super) end: Time,
    /// Of all random numbers.
    pub(super) seed: u64,
}

/// What happened in a second.
#[derive(Clone, Debug, Default)]
pub(super) struct Second {
    /// The limit at its end, without the effect of a probe.
    pub(super) limit: u32,
    /// The floor at its end, in microseconds.
    pub(super) floor: u64,
    /// The median latency, in microseconds.
    pub(super) latency: u64,
    /// How many requests were answered.
    pub(super) answered: u64,
    /// How many were shed, for each priority.
    pub(super) shed: Vec<u64>,
    latencies: Vec<u64>,
}

/// Runs a scenario; the result has one entry for each second.
pub(super) fn run(scenario: &Scenario) -> Vec<Second> {
    Run::new(scenario).seconds()
}

struct Run<'a> {
    scenario: &'a Scenario,
    slots: Slots,
    upstream: SimulatedUpstream,
    /// The next completions.
    working: BinaryHeap<Reverse<(Time, u64)>>,
    /// The requests in the upstream, by number.
    requests: VecDeque<Option<(TakenSlot, Time)>>,
    first_request: u64,
    waiting: VecDeque<u64>,
    random: u64,
    second: Second,
}

impl<'a> Run<'a> {
    fn new(scenario: &'a Scenario) -> Run<'a> {
        let limit = ConcurrencyLimit::adaptive(scenario.bounds, Time::from_micros(0), scenario.seed);
        let shares = scenario.priorities.iter().map(|(share, _)| *share).collect();
        Run {
            scenario,
            slots: Slots::new(limit, shares),
            upstream: scenario.upstream,
            working: BinaryHeap::new(),
            requests: VecDeque::new(),
            first_request: 0,
            waiting: VecDeque::new(),
            random: scenario.seed | 1,
            second: Second { shed: vec![0; scenario.priorities.len()], ..Second::default() },
        }
    }

    fn seconds(mut self) -> Vec<Second> {
        let mut seconds = Vec::new();
        let mut changes = self.scenario.changes.iter().peekable();
        let chance = self.scenario.arrivals * ARRIVAL_SLOT.as_micros();
        let mut now = Time::from_micros(0);
        while now < self.scenario.end {
            now = now + ARRIVAL_SLOT;
            while let Some((_, upstream)) = changes.next_if(|(at, _)| *at <= now) {
                self.upstream = *upstream;
                self.start(now);
            }
            while let Some(Reverse((done, request))) = self.working.peek().copied()
                && done <= now
            {
                self.working.pop();
                self.answer(request, done);
                self.start(done);
            }
            if self.below(1_000_000) < chance {
                self.arrive(now);
            }
            if now.as_micros().is_multiple_of(PERIOD.as_micros()) {
                seconds.push(self.measured());
            }
        }
        seconds
    }

    fn arrive(&mut self, now: Time) {
        let mut drawn = self.below(10_000);
        let priorities = &self.scenario.priorities;
        let mut shares = priorities.iter().map(|(_, share)| u64::from(share.basis_points()));
        let priority = shares.position(|share| {
            let found = drawn < share;
            drawn = drawn.saturating_sub(share);
            found
        });
        let priority = priority.unwrap_or(0);
        match self.slots.enter(priority, now) {
            None => self.second.shed[priority] += 1,
            Some(slot) => {
                self.waiting.push_back(self.first_request + self.requests.len() as u64);
                self.requests.push_back(Some((slot, now)));
                self.start(now);
            }
        }
    }

    /// Lets free workers take waiting requests.
    fn start(&mut self, now: Time) {
        while self.working.len() < self.upstream.workers
            && let Some(request) = self.waiting.pop_front()
        {
            let work = self.upstream.work.as_micros() * (750 + self.below(501)) / 1_000;
            self.working.push(Reverse((now + Span::from_micros(work), request)));
        }
    }

    fn answer(&mut self, request: u64, now: Time) {
        let index = usize::try_from(request - self.first_request).expect("few requests are in flight");
        let (slot, began) = self.requests[index].take().expect("answered once");
        while let Some(None) = self.requests.front() {
            self.requests.pop_front();
            self.first_request += 1;
        }
        let latency = now.since(began);
        self.slots.report(slot, latency, Ending::Answered, now);
        self.slots.leave();
        self.second.latencies.push(latency.as_micros());
    }

    fn measured(&mut self) -> Second {
        let fresh = Second { shed: vec![0; self.second.shed.len()], ..Second::default() };
        let mut second = std::mem::replace(&mut self.second, fresh);
        second.limit = self.slots.limit().limit();
        second.floor = self.slots.limit().floor().map_or(0, Span::as_micros);
        second.answered = second.latencies.len() as u64;
        second.latencies.sort_unstable();
        second.latency = second.latencies.get(second.latencies.len() / 2).copied().unwrap_or(0);
        second.latencies = Vec::new();
        second
    }

    /// A number below `end`, by xorshift.
    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) % end
    }
}
