//! Adapts the number of requests in flight to an upstream by its latency: floor and probe.
//!
//! The *floor* is the latency of the upstream when nothing queues there. While the median latency stays below 1.5
//! times the floor, the limit grows, if it is in use; above that, it shrinks. An estimate of the floor alone drifts
//! upwards under sustained overload, because the proxy only ever sees latencies that include the queue. So every 10 s
//! a *probe* lowers the limit for a moment, which drains the queue, and measures the floor anew.
//! docs/adr/0023-adaptive-concurrency.md has the comparison with other algorithms.
//!
//! `step` is a pure function on integers: microseconds, and thousandths of a request. `step.trace` is its table of
//! cases.

use tollkeeper::{Span, Time};

/// A window ends after this time, once it has [`WINDOW_RESPONSES`].
const WINDOW: Span = Span::from_millis(100);
const WINDOW_RESPONSES: usize = 10;
/// Of a longer window, only this many of the last latencies count.
const WINDOW_LATENCIES: usize = 1_000;
/// The limit shrinks if the median latency is more than this many thousandths of the floor.
const TOLERATED_LATENCY: u64 = 1_500;
/// What a window can shrink the limit to, in thousandths, before smoothing: at most to a half; to 0.9 if it fails.
const STRONGEST_SHRINK: u64 = 500;
const SHRINK_ON_FAILURES: u64 = 900;
/// A window fails if more than this many thousandths of its responses do.
const TOLERATED_FAILURES: usize = 50;
/// The limit grows only if this many thousandths of it are in use.
const BUSY_SHARE: u32 = 800;
/// One window moves the limit by a fifth of the way.
const SMOOTHING: u64 = 5;
/// The time between probes, which varies by 15 % in both directions, so that several proxies do not probe together.
const PROBE_EVERY: Span = Span::from_secs(10);
const PROBE_JITTER: u64 = 150;
/// A probe lowers the limit for this long at most, or until it has so many responses.
const PROBE_TIME: Span = Span::from_secs(1);
const PROBE_RESPONSES: usize = 30;
/// A probe without this many responses waits for more of them, with the limit restored.
const PROBE_MIN_RESPONSES: usize = 3;
/// The limit during a probe: this many thousandths of itself, and at least 3 requests.
const PROBE_SHARE: u64 = 300;
const PROBE_MIN_LIMIT: u64 = 3;
/// The limit before anything has been measured.
const START: u32 = 20;

/// Between which values the limit moves, in requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The smallest limit, such as 8. Only a probe goes below it.
    pub min: u32,
    /// The largest limit, such as 512.
    pub max: u32,
}

/// The limit, and what it is derived from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptiveLimit {
    bounds: Bounds,
    /// In thousandths: 46,200 is 46.2 requests.
    limit: u64,
    /// The smallest median since the last probe, which measured the first of them.
    floor: Option<Span>,
    window: Window,
    probe: Option<Probe>,
    next_probe: Time,
    /// Whether the limit has been in use since the last probe. Otherwise it neither caused a queue nor kept requests out,
    /// and a probe would only shed requests.
    needs_probe: bool,
    /// The state of the generator that spreads probes.
    random: u64,
}

/// The responses since the limit last moved.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Window {
    since: Time,
    latencies: Vec<Span>,
    responses: usize,
    failures: usize,
    /// The largest use of the limit that a request has seen, in thousandths.
    used: u32,
}

/// The responses to requests that began while the limit was lowered.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Probe {
    since: Time,
    /// When the limit was restored, if it was before enough responses had arrived.
    restored: Option<Time>,
    latencies: Vec<Span>,
}

/// The end of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When the request took its slot.
    pub began: Time,
    /// The time from sending the request to the head of its response.
    pub latency: Span,
    /// How much of the limit was in use when it began, in thousandths: 900 if it took the 27th of 30 slots.
    pub used: u32,
    /// How it ended.
    pub ending: Ending,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With a response.
    Answered,
    /// With 502, 503, 504 or a timeout.
    Failed,
    /// The client left. The response would have taken longer than `latency`, so that a latency above the floor counts
    /// and a shorter one says nothing. Without them, clients that give up on a slow upstream would hide that it is slow.
    Left,
}

impl AdaptiveLimit {
    /// The state before anything has been measured. `seed` spreads the probes of several proxies.
    pub fn new(bounds: Bounds, now: Time, seed: u64) -> AdaptiveLimit {
        let limit = thousandths(START);
        let mut state = AdaptiveLimit {
            bounds,
            limit,
            floor: None,
            window: Window::new(now),
            probe: None,
            next_probe: now,
            needs_probe: false,
            random: seed,
        };
        state.schedule_probe(now);
        state.with_bounds(bounds)
    }

    /// The same state within other bounds.
    #[must_use]
    pub fn with_bounds(self, bounds: Bounds) -> AdaptiveLimit {
        let limit = self.limit.clamp(thousandths(bounds.min), thousandths(bounds.max.max(bounds.min)));
        AdaptiveLimit { bounds, limit, ..self }
    }

    /// The limit, in requests: 46 of 46.2.
    pub fn limit(&self) -> u32 {
        u32::try_from(self.limit / 1_000).expect("at most `max`")
    }

    /// The limit in force: during a probe, less than [`AdaptiveLimit::limit`].
    pub fn in_force(&self) -> u32 {
        let limit = match self.is_probing() {
            true => (self.limit * PROBE_SHARE / 1_000_000).max(PROBE_MIN_LIMIT).min(self.limit / 1_000),
            false => self.limit / 1_000,
        };
        u32::try_from(limit).expect("at most `max`")
    }

    /// The latency of the upstream without a queue; `None` before the first window.
    pub fn floor(&self) -> Option<Span> {
        self.floor
    }

    /// Whether a probe lowers the limit.
    pub fn is_probing(&self) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.restored.is_none())
    }

    fn schedule_probe(&mut self, now: Time) {
        // A step of Knuth's MMIX generator, whose high bits are well mixed.
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let share = 1_000 - PROBE_JITTER + (self.random >> 33) % (2 * PROBE_JITTER + 1);
        self.next_probe = now + Span::from_micros(PROBE_EVERY.as_micros() * share / 1_000);
    }

    /// Takes the median of a probe as the new floor, and starts a window.
    fn conclude(&mut self, mut probe: Probe, now: Time) {
        self.floor = median(&mut probe.latencies).or(self.floor);
        self.window = Window::new(now);
    }
}

impl Window {
    fn new(since: Time) -> Window {
        Window { since, latencies: Vec::new(), responses: 0, failures: 0, used: 0 }
    }

    fn add(&mut self, sample: &Sample) {
        self.used = self.used.max(sample.used);
        self.responses += 1;
        if sample.ending == Ending::Failed {
            self.failures += 1;
        } else if self.latencies.len() < WINDOW_LATENCIES {
            self.latencies.push(sample.latency);
        } else {
            self.latencies[self.responses % WINDOW_LATENCIES] = sample.latency;
        }
    }

    fn is_complete(&self, now: Time) -> bool {
        self.responses >= WINDOW_RESPONSES && now.since(self.since) >= WINDOW
    }
}

impl Probe {
    /// Whether a request that began at this time was sent under the lowered limit.
    fn covers(&self, began: Time) -> bool {
        began >= self.since && self.restored.is_none_or(|restored| began < restored)
    }
}

/// Starts and ends probes that are due.
pub fn advance(mut state: AdaptiveLimit, now: Time) -> AdaptiveLimit {
    if let Some(probe) = &mut state.probe
        && probe.restored.is_none()
        && now.since(probe.since) >= PROBE_TIME
    {
        probe.restored = Some(now);
        state.window = Window::new(now);
    }
    if let Some(probe) =
        state.probe.take_if(|probe| probe.restored.is_some() && probe.latencies.len() >= PROBE_MIN_RESPONSES)
    {
        state.conclude(probe, now);
    }
    if now >= state.next_probe {
        if let Some(unfinished) = state.probe.take() {
            state.conclude(unfinished, now);
        }
        if std::mem::take(&mut state.needs_probe) {
            state.probe = Some(Probe { since: now, restored: None, latencies: Vec::new() });
        }
        state.schedule_probe(now);
    }
    state
}

/// The state after the end of one request.
pub fn step(state: AdaptiveLimit, sample: &Sample, now: Time) -> AdaptiveLimit {
    let mut state = advance(state, now);
    if sample.ending == Ending::Left && state.floor.is_none_or(|floor| sample.latency <= floor) {
        return state;
    }
    match &mut state.probe {
        Some(probe) if probe.covers(sample.began) => {
            if sample.ending == Ending::Answered {
                probe.latencies.push(sample.latency);
            }
            let needed = if probe.restored.is_some() { PROBE_MIN_RESPONSES } else { PROBE_RESPONSES };
            if let Some(probe) = state.probe.take_if(|probe| probe.latencies.len() >= needed) {
                state.conclude(probe, now);
            }
            return state;
        }
        // It waited in the queue that the probe drains.
        Some(probe) if probe.restored.is_none() => return state,
        _ => {}
    }
    state.window.add(sample);
    if state.window.is_complete(now) { moved(state, now) } else { state }
}

/// The state after a complete window.
fn moved(mut state: AdaptiveLimit, now: Time) -> AdaptiveLimit {
    let mut window = std::mem::replace(&mut state.window, Window::new(now));
    let mut gradient = 1_000;
    if let Some(median) = median(&mut window.latencies) {
        let floor = state.floor.map_or(median, |floor| floor.min(median));
        state.floor = Some(floor);
        // Below 2^32 microseconds each, see `median`.
        gradient =
            (floor.as_micros() * TOLERATED_LATENCY / median.as_micros()).clamp(STRONGEST_SHRINK, 1_000);
    }
    if window.failures * 1_000 > window.responses * TOLERATED_FAILURES {
        gradient = gradient.min(SHRINK_ON_FAILURES);
    }
    let is_busy = window.used >= BUSY_SHARE;
    state.needs_probe |= is_busy;
    let mut target = state.limit * gradient / 1_000;
    if gradient == 1_000 && is_busy {
        target += (state.limit * 1_000).isqrt(); // the square root in thousandths
    }
    state.limit = (state.limit * (SMOOTHING - 1) + target) / SMOOTHING; // rounds down, by less than a thousandth
    let bounds = state.bounds;
    state.with_bounds(bounds)
}

/// The median, at least a microsecond and at most an hour; the upper one of two. It sorts partially.
fn median(latencies: &mut [Span]) -> Option<Span> {
    let middle = latencies.len() / 2;
    if latencies.is_empty() {
        return None;
    }
    let (_, median, _) = latencies.select_nth_unstable(middle);
    Some((*median).clamp(Span::from_micros(1), Span::from_secs(3_600)))
}

fn thousandths(requests: u32) -> u64 {
    u64::from(requests.max(1)) * 1_000
}

#[cfg(test)]
#[path = "step_trace.rs"]
mod trace;
