//! Remembers which charges have been corrected, in buckets that expire as a whole.
//!
//! A charge may be corrected only once, so a corrected charge has a marker until the charge is void. Markers that
//! expire at about the same time share a table, which is dropped when the last of them has expired: expiry never
//! examines single markers. Markers with a longer life go into wider buckets, so there are at most a few dozen buckets.
//!
//! Markers are not part of a key's state. The sixteen bytes of a state have no spare bit, and eight more bytes for
//! every key (40 instead of 32) would take a quarter more memory for all keys, more than the refunded keys save.

use std::collections::BTreeMap;

use tollkeeper_core::Time;

use super::state::Packed;
use super::table::{Entry, Table};

/// The markers of one shard.
#[derive(Debug, Default)]
pub(super) struct Markers {
    buckets: BTreeMap<Bucket, Table>,
}

/// Markers that expire in the same interval of 2^`width` microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bucket {
    width: u32,
    number: u64,
}

/// The width of the narrowest buckets: 2^18 microseconds, a quarter of a second.
const NARROWEST: u32 = 18;
/// The life of a marker, in microseconds, has at least this many bits more than the width of its bucket, unless the
/// bucket is of the narrowest width. So a marker is kept for at most an eighth longer than needed, and at most 32
/// buckets of one width are in use.
const SHARE: u32 = 3;
/// Widths differ by this many bits, so that few different widths are in use.
const STEP: u32 = 2;

impl Bucket {
    /// The bucket of this width that contains a time.
    fn of(width: u32, time: Time) -> Bucket {
        Bucket { width, number: time.as_micros() >> width }
    }

    /// The bucket for a marker that is set at `now`.
    fn for_life(now: Time, expires: Time) -> Bucket {
        let bits = u64::BITS - expires.since(now).as_micros().leading_zeros();
        let steps = bits.saturating_sub(1 + SHARE + NARROWEST) / STEP;
        Bucket::of(NARROWEST + STEP * steps, expires)
    }

    /// Whether all its markers have expired.
    fn is_over(self, now: Time) -> bool {
        self.number < now.as_micros() >> self.width
    }
}

impl Markers {
    /// Memory allocated for the markers, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.buckets.values().map(Table::bytes).sum()
    }

    /// Whether this charge, which is void at `expires`, has been marked.
    pub(super) fn has(&self, print: u128, expires: Time) -> bool {
        self.widths().any(|width| {
            let bucket = self.buckets.get(&Bucket::of(width, expires));
            bucket.is_some_and(|markers| markers.get(print).is_some())
        })
    }

    /// Marks a charge that is void at `expires`.
    pub(super) fn set(&mut self, print: u128, now: Time, expires: Time) {
        let markers = self.buckets.entry(Bucket::for_life(now, expires)).or_default();
        markers.set(print, Packed::marker(expires), |_| false, |_| {});
    }

    /// Drops the buckets that have expired. Returns how many markers were in them.
    pub(super) fn expire(&mut self, now: Time) -> usize {
        let mut gone = 0;
        let over = |markers: &Markers| markers.oldest().find(|bucket| bucket.is_over(now));
        while let Some(over) = over(self) {
            gone += self.buckets.remove(&over).map_or(0, |markers| markers.len());
        }
        gone
    }

    /// All markers, expired ones included.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.buckets.values().flat_map(Table::iter)
    }

    /// The oldest bucket of each width.
    fn oldest(&self) -> impl Iterator<Item = Bucket> {
        let first = |from: Bucket| self.buckets.range(from..).next().map(|(bucket, _)| *bucket);
        let next = move |bucket: &Bucket| first(Bucket { width: bucket.width + 1, number: 0 });
        std::iter::successors(first(Bucket { width: 0, number: 0 }), next)
    }

    /// The widths that are in use.
    fn widths(&self) -> impl Iterator<Item = u32> {
        self.oldest().map(|bucket| bucket.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollkeeper_core::Span;

    const NOW: Time = Time::from_micros(1_760_000_000_000_000);
    const YEAR: u64 = 366 * 86_400_000_000;

    /// Lives of every length, in microseconds.
    fn lives() -> impl Iterator<Item = u64> {
        (0..46).flat_map(|bits| [1 << bits, (1 << bits) + (1 << bits >> 1)]).take_while(|life| *life <= YEAR)
    }

    #[test]
    fn marker_outlives_its_charge_only_slightly() {
        for life in lives() {
            let expires = NOW + Span::from_micros(life);
            let mut markers = Markers::default();
            markers.set(7, NOW, expires);
            for early in [0, life / 2, life - 1] {
                assert_eq!(markers.expire(NOW + Span::from_micros(early)), 0, "{life}");
                assert!(markers.has(7, expires) && !markers.has(8, expires), "{life}");
            }
            let late = NOW + Span::from_micros(life + life / 8 + (1 << NARROWEST));
            assert_eq!(markers.expire(late), 1, "{life}");
            assert!(!markers.has(7, expires) && markers.bytes() == 0, "{life}");
        }
    }

    #[test]
    fn marker_set_late_in_its_life_is_found() {
        // After a restart a marker is set again, with less life left than the first time.
        for life in lives() {
            let expires = NOW + Span::from_micros(life);
            for elapsed in [0, life / 3, life - 1] {
                let mut markers = Markers::default();
                markers.set(7, NOW + Span::from_micros(elapsed), expires);
                assert!(markers.has(7, expires), "{life} {elapsed}");
            }
        }
    }

    #[test]
    fn markers_of_any_lifetime_use_few_buckets() {
        let mut markers = Markers::default();
        let mut set = 0u64;
        for step in 0..500 {
            let now = NOW + Span::from_micros(step * 500_000);
            let expired = markers.expire(now);
            for life in lives().filter(|life| *life < 3_600_000_000) {
                markers.set(
                    u128::from(set.wrapping_mul(0x9E37_79B9_7F4A_7C15)) << 64 | 1,
                    now,
                    now + Span::from_micros(life),
                );
                set += 1;
            }
            assert!(step < 10 || expired > 0, "step {step}: no marker has expired");
        }
        assert!(markers.buckets.len() < 200, "{} buckets", markers.buckets.len());
        assert_eq!(markers.iter().count(), markers.buckets.values().map(Table::len).sum::<usize>());
        let all = markers.iter().count();
        assert_eq!(markers.expire(NOW + Span::from_micros(YEAR)), all);
    }
}
