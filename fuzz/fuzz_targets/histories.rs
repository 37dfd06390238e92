//! Fuzzes histories of one bucket or window: admissions in every interval keep the contract, checked by sums alone.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tollkeeper::store::algorithm::{self, KeyRequest, State, StoredState};
use tollkeeper::{Algorithm, CheckedQuota, Quota, Span, Time};

const BURST: u64 = 7;
const COUNT: u64 = 5;
const PERIOD: u64 = 1_000_000;

fuzz_target!(|data: &[u8]| {
    for kind in
        [Algorithm::TokenBucket, Algorithm::SlidingLog, Algorithm::FixedWindow, Algorithm::SlidingWindow]
    {
        let rate = Quota::per_second(COUNT);
        let rate = if kind.has_burst() { rate.burst(BURST) } else { rate };
        let quota = CheckedQuota::new(kind, rate).expect("valid");
        let mut now = Time::from_micros(1_760_000_000_000_000);
        let mut state: Option<State> = None;
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        for pair in data.chunks_exact(2).take(200) {
            now = now + Span::from_micros(u64::from(pair[0]).pow(2) * 20);
            let request = KeyRequest { now, cost: 1 + u64::from(pair[1] % 8), shift: 0, hold: None };
            let stored = state.as_ref().map_or(StoredState::Nothing, State::stored);
            let step = algorithm::step(&quota, stored, &request);
            if step.allowed {
                admitted.push((now.as_micros(), request.cost));
                state = algorithm::apply(&quota, state.take(), &request, &step, true, 0);
            }
        }
        for (first, (from, _)) in admitted.iter().enumerate() {
            let mut sum = 0;
            for (until, cost) in &admitted[first..] {
                sum += cost;
                let span = until - from;
                let most = match kind {
                    // Both sides are multiplied by the period to avoid a division.
                    Algorithm::TokenBucket => BURST * PERIOD + COUNT * (span + 1),
                    Algorithm::SlidingLog if span < PERIOD => COUNT * PERIOD,
                    Algorithm::SlidingWindow if span < PERIOD => (2 * COUNT - 1) * PERIOD,
                    Algorithm::FixedWindow if until / PERIOD == from / PERIOD => COUNT * PERIOD,
                    _ => continue,
                };
                assert!(sum * PERIOD <= most, "{kind}: {sum} in {span} µs");
            }
        }
    }
});
