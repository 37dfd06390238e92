//! A histogram with fixed buckets, counted in stripes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::DURATIONS;
use super::stripe::{STRIPES, Stripe};

/// Counts values in N buckets with these upper bounds, and one bucket above.
#[derive(Debug)]
pub(super) struct Histogram<const N: usize> {
    bounds: &'static [u64; N],
    stripes: [Buckets<N>; STRIPES],
}

#[derive(Debug)]
#[repr(align(64))]
struct Buckets<const N: usize> {
    up_to: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

/// The counts of a histogram at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// The upper bound of each bucket and its count, not cumulative. The last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all values.
    pub sum: f64,
}

impl Counts {
    /// The number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// What was counted since an earlier reading of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Counts) -> Counts {
        let more =
            |((bound, now), (_, before)): (&(f64, u64), &(f64, u64))| (*bound, now.saturating_sub(*before));
        Counts {
            buckets: self.buckets.iter().zip(&earlier.buckets).map(more).collect(),
            sum: self.sum - earlier.sum,
        }
    }

    /// The upper bound of the bucket that holds this quantile, such as 0.99; `None` if there are no values.
    #[expect(clippy::cast_precision_loss, reason = "a rank needs no more than 52 bits")]
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let rank = self.count() as f64 * part;
        let mut seen = 0;
        let reached = self.buckets.iter().find(|(_, count)| {
            seen += count;
            seen > 0 && seen as f64 >= rank
        });
        // The last bucket has no upper bound: return its lower bound.
        let last = self.buckets.len().checked_sub(2).map(|last| self.buckets[last].0);
        reached.and_then(|(bound, _)| if bound.is_finite() { Some(*bound) } else { last })
    }
}

impl<const N: usize> Histogram<N> {
    /// An empty histogram.
    pub(super) fn new(bounds: &'static [u64; N]) -> Histogram<N> {
        let stripe = |_| Buckets {
            up_to: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        };
        Histogram { bounds, stripes: std::array::from_fn(stripe) }
    }

    #[inline]
    pub(super) fn record(&self, stripe: Stripe, number: u64) {
        self.record_all(stripe, number, 1);
    }

    /// Records the same value `many` times.
    #[inline]
    pub(super) fn record_all(&self, stripe: Stripe, number: u64, many: u64) {
        let buckets = &self.stripes[stripe.index()];
        let bucket = match self.bounds.iter().position(|bound| number <= *bound) {
            Some(index) => &buckets.up_to[index],
            None => &buckets.above,
        };
        stripe.add(bucket, many);
        stripe.add(&buckets.sum, number.saturating_mul(many));
    }

    /// The current counts, with bounds and sum divided by `unit`.
    #[expect(clippy::cast_precision_loss, reason = "a reported sum needs no more than 52 bits")]
    pub(super) fn counts(&self, unit: f64) -> Counts {
        let sum = |field: &dyn Fn(&Buckets<N>) -> &AtomicU64| -> u64 {
            self.stripes.iter().map(|stripe| field(stripe).load(Relaxed)).sum()
        };
        let mut buckets: Vec<(f64, u64)> = (0..N)
            .map(|index| (self.bounds[index] as f64 / unit, sum(&|stripe| &stripe.up_to[index])))
            .collect();
        buckets.push((f64::INFINITY, sum(&|stripe| &stripe.above)));
        Counts { buckets, sum: sum(&|stripe| &stripe.sum) as f64 / unit }
    }
}

/// A histogram of durations from 25 microseconds to a second.
#[derive(Debug)]
pub struct DurationHistogram(Histogram<{ DURATIONS.len() }>);

impl Default for DurationHistogram {
    fn default() -> DurationHistogram {
        DurationHistogram(Histogram::new(&DURATIONS))
    }
}

impl DurationHistogram {
    /// Records a duration.
    pub fn record(&self, took: Duration) {
        self.0.record(Stripe::mine(), u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// The counts so far, in seconds.
    pub fn counts(&self) -> Counts {
        self.0.counts(1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_counts_in_the_first_bucket_that_fits() {
        let histogram = Histogram::new(&[0, 10, 100]);
        for number in [0, 1, 10, 11, 100, 101, 1_000] {
            histogram.record(Stripe::mine(), number);
        }
        let counts = histogram.counts(10.0);
        assert_eq!(counts.buckets, [(0.0, 1), (1.0, 2), (10.0, 2), (f64::INFINITY, 2)]);
        assert_eq!((counts.count(), counts.sum), (7, 122.3));
    }
}
