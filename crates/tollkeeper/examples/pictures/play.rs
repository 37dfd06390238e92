//! Plays traffic against the product, on a clock that is turned by hand.

use tollkeeper::{
    Algorithm, Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Quota, SlotGuard, Span, Time, facts,
};

use crate::Result;

/// The edge of a window of 10 s.
const START: Time = Time::from_micros(1_760_000_000_000_000);
/// How finely what remains is drawn, in milliseconds. Every request arrives on such a step.
const STEP: usize = 50;
/// How long a slot is held, in milliseconds.
const HELD: u64 = 3_000;

/// What became of the traffic.
pub(crate) struct Played {
    pub(crate) requests: Vec<Request>,
    /// What remained, and since which millisecond.
    levels: Vec<(u64, u64)>,
    end: u64,
}

pub(crate) struct Request {
    /// When it arrived, in milliseconds.
    pub(crate) at: u64,
    /// How long it is held before it goes on, if it was admitted.
    pub(crate) delay: Option<Span>,
}

/// Sends a request at each of these milliseconds, under 10 per 10 s.
pub(crate) async fn play(algorithm: Algorithm, arrivals: &[u64], end: u64) -> Result<Played> {
    let limit = match algorithm {
        Algorithm::Concurrency => Limit::new("limit", Quota::slots(10)),
        _ => Limit::new("limit", Quota::per(10, std::time::Duration::from_secs(10))),
    };
    let hand = ManualClock::new(START);
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&hand));
    let limiter = Limiter::builder().limit(limit.algorithm(algorithm)).store(store).build()?;

    let mut played = Played { requests: Vec::new(), levels: Vec::new(), end };
    let mut held: Vec<(u64, Option<SlotGuard>)> = Vec::new();
    for now in (0..=end).step_by(STEP) {
        hand.set(START + Span::from_millis(now));
        held.retain(|(until, _)| *until > now);
        played.note(now, remaining(&limiter).await?);
        for _ in arrivals.iter().filter(|at| **at == now) {
            let acquired = limiter.acquire(&facts! {}).await?;
            let delay = acquired.decision.allowed().then(|| acquired.decision.delay());
            played.requests.push(Request { at: now, delay });
            held.push((now + HELD, acquired.slot));
        }
        played.note(now, remaining(&limiter).await?);
    }
    assert_eq!(played.requests.len(), arrivals.len(), "every request arrives on a step");
    Ok(played)
}

async fn remaining(limiter: &Limiter) -> Result<u64> {
    let peek = limiter.peek(&facts! {}).await?;
    Ok(peek.limit("limit").ok_or("the limit applies to all")?.outcome().remaining)
}

impl Played {
    fn note(&mut self, now: u64, remaining: u64) {
        if self.levels.last().is_none_or(|(_, last)| *last != remaining) {
            self.levels.push((now, remaining));
        }
    }

    /// What remained, as corners of a line of steps.
    pub(crate) fn levels(&self) -> Vec<(u64, u64)> {
        let (_, last) = self.levels.last().copied().unwrap_or_default();
        let changes = self.levels.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
        changes.chain(self.levels.last().copied()).chain([(self.end, last)]).collect()
    }

    pub(crate) fn admitted(&self) -> usize {
        self.requests.iter().filter(|request| request.delay.is_some()).count()
    }

    /// The most that was admitted in any interval of so many milliseconds, its end not included.
    pub(crate) fn most_within(&self, millis: u64) -> usize {
        let admitted = self.requests.iter().filter(|request| request.delay.is_some());
        most_within(&admitted.map(|request| request.at).collect::<Vec<_>>(), millis)
    }

    /// The same of departures.
    pub(crate) fn departures_within(&self, millis: u64) -> usize {
        most_within(&self.departures(), millis)
    }

    /// When admitted requests go on, in milliseconds.
    pub(crate) fn departures(&self) -> Vec<u64> {
        let departure = |request: &Request| Some(request.at + request.delay?.as_micros() / 1_000);
        self.requests.iter().filter_map(departure).collect()
    }
}

fn most_within(times: &[u64], millis: u64) -> usize {
    let from = |start: u64| times.iter().filter(|at| (start..start + millis).contains(*at)).count();
    times.iter().map(|start| from(*start)).max().unwrap_or(0)
}
