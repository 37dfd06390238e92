//! The distribution of delays, in buckets that are 6 % wide.

/// Buckets in each doubling.
const STEPS: u64 = 16;

/// Delays in microseconds.
#[derive(Clone, Debug, Default)]
pub struct Delays {
    counts: Vec<u64>,
    total: u64,
    longest: u64,
}

/// A summary of delays, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelaySummary {
    /// Half of all requests are delayed by at most this.
    pub p50: u64,
    /// All but one in a hundred are.
    pub p99: u64,
    /// The longest.
    pub longest: u64,
}

impl Delays {
    /// Counts a delay.
    pub fn add(&mut self, micros: u64) {
        let bucket = bucket(micros);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        self.longest = self.longest.max(micros);
    }

    /// The summary; `None` if nothing was counted.
    pub fn summary(&self) -> Option<DelaySummary> {
        let at = |percent: u64| {
            let rank = (self.total * percent).div_ceil(100);
            let mut seen = 0;
            let bucket = self.counts.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            upper(bucket.unwrap_or(0)).min(self.longest)
        };
        (self.total > 0).then(|| DelaySummary { p50: at(50), p99: at(99), longest: self.longest })
    }
}

/// The bucket of a delay: below 16 µs each has its own.
fn bucket(micros: u64) -> usize {
    let doublings = u64::from(micros.max(1).ilog2()).saturating_sub(u64::from(STEPS.ilog2()));
    usize::try_from(doublings * STEPS + (micros >> doublings)).expect("at most 64 doublings")
}

/// The longest delay of a bucket.
fn upper(bucket: usize) -> u64 {
    let bucket = u64::try_from(bucket).unwrap_or(0);
    let doublings = (bucket / STEPS).saturating_sub(1);
    ((bucket - doublings * STEPS + 1) << doublings) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_delay_is_within_its_bucket() {
        for micros in (0..5_000).chain([65_535, 65_536, 1_000_000, 86_400_000_000]) {
            let upper = upper(bucket(micros));
            assert!(micros <= upper && upper <= micros + micros / 16, "{micros} {upper}");
        }
    }

    #[test]
    fn summary_has_the_ranks() {
        let mut delays = Delays::default();
        assert_eq!(delays.summary(), None);
        (1..=1_000u64).for_each(|number| delays.add(number * 1_000));
        let DelaySummary { p50, p99, longest } = delays.summary().expect("counted");
        assert_eq!(longest, 1_000_000);
        assert!(p50.abs_diff(500_000) < 32_000 && p99.abs_diff(990_000) < 32_000, "{p50} {p99}");
    }
}
