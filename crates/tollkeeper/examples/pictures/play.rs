//! Sends simulated traffic through a limiter on a manual clock, and records the decisions.

use tollkeeper::{
    Algorithm, Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Quota, SlotGuard, Span, Time, facts,
};

use crate::Result;

/// The edge of a window of 10 s.
const START: Time = Time::from_micros(1_760_000_000_000_000);
/// Time step of the simulation, in milliseconds. Every request arrives on a step.
const STEP: usize = 50;
/// How long a slot is held, in milliseconds.
const HELD: u64 = 3_000;

/// The decisions for the traffic, and the remaining units over time.
pub(crate) struct Played {
    pub(crate) requests: Vec<Request>,
    /// Each change of the remaining units: the millisecond, and what remains from then on.
    levels: Vec<(u64, u64)>,
    end: u64,
}

pub(crate) struct Request {
    /// When it arrived, in milliseconds.
    pub(crate) at: u64,
    /// The delay before it continues; `None` if it was refused.
    pub(crate) delay: Option<Span>,
}

/// Sends a request at each of these milliseconds, under 10 per 10 s.
pub(crate) async fn play(algorithm: Algorithm, arrivals: &[u64], end: u64) -> Result<Played> {
    let limit = match algorithm {
        Algorithm::Concurrency => Limit::new("limit", Quota::slots(10)),
        _ => Limit::new("limit", Quota::per(10, std::time::Duration::from_secs(10))),
    };
    let clock = ManualClock::new(START);
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    let limiter = Limiter::builder().limit(limit.algorithm(algorithm)).store(store).build()?;

    let mut played = Played { requests: Vec::new(), levels: Vec::new(), end };
    let mut held: Vec<(u64, Option<SlotGuard>)> = Vec::new();
    for now in (0..=end).step_by(STEP) {
        clock.set(START + Span::from_millis(now));
        held.retain(|(until, _)| *until > now);
        played.record_level(now, remaining(&limiter).await?);
        for _ in arrivals.iter().filter(|at| **at == now) {
            let acquired = limiter.acquire(&facts! {}).await?;
            let delay = acquired.decision.allowed().then(|| acquired.decision.delay());
            played.requests.push(Request { at: now, delay });
            held.push((now + HELD, acquired.slot));
        }
        played.record_level(now, remaining(&limiter).await?);
    }
    assert_eq!(played.requests.len(), arrivals.len(), "every request arrives on a step");
    Ok(played)
}

async fn remaining(limiter: &Limiter) -> Result<u64> {
    let peek = limiter.peek(&facts! {}).await?;
    Ok(peek.limit("limit").ok_or("the limit applies to every request")?.outcome().remaining)
}

impl Played {
    fn record_level(&mut self, now: u64, remaining: u64) {
        if self.levels.last().is_none_or(|(_, last)| *last != remaining) {
            self.levels.push((now, remaining));
        }
    }

    /// The remaining units as the corners of a step line.
    pub(crate) fn levels(&self) -> Vec<(u64, u64)> {
        let (_, last) = self.levels.last().copied().unwrap_or_default();
        let changes = self.levels.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
        changes.chain(self.levels.last().copied()).chain([(self.end, last)]).collect()
    }

    pub(crate) fn admitted(&self) -> usize {
        self.requests.iter().filter(|request| request.delay.is_some()).count()
    }

    /// The largest number of requests admitted in any interval of this many milliseconds, its end excluded.
    pub(crate) fn most_within(&self, millis: u64) -> usize {
        let admitted = self.requests.iter().filter(|request| request.delay.is_some());
        most_within(&admitted.map(|request| request.at).collect::<Vec<_>>(), millis)
    }

    /// The largest number of departures in any such interval.
    pub(crate) fn departures_within(&self, millis: u64) -> usize {
        most_within(&self.departures(), millis)
    }

    /// Departure times of the admitted requests, in milliseconds.
    pub(crate) fn departures(&self) -> Vec<u64> {
        let departure = |request: &Request| Some(request.at + request.delay?.as_micros() / 1_000);
        self.requests.iter().filter_map(departure).collect()
    }
}

fn most_within(times: &[u64], millis: u64) -> usize {
    let from = |start: u64| times.iter().filter(|at| (start..start + millis).contains(*at)).count();
    times.iter().map(|start| from(*start)).max().unwrap_or(0)
}
