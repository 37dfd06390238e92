//! Finds the entries of a shard by fingerprint: open addressing with linear probing, in four bytes a bucket.

use super::table::SHARD_KEYS;

/// Finds the entries of one shard.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// None before the first key; at most half of them are taken.
    buckets: Vec<Bucket>,
}

pub(super) const BUCKETS: usize = 2 * SHARD_KEYS;

/// The position of an entry plus 1 in the low bits, and a part of its fingerprint in the others; 0 if free. It is small,
/// so that the index stays in the processor's cache.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket(u32);

/// The low bits.
const POSITION: u32 = (1 << POSITION_BITS) - 1;
const POSITION_BITS: u32 = BUCKETS.trailing_zeros();

impl Bucket {
    #[inline]
    fn new(print: u128, position: usize) -> Bucket {
        let position = u32::try_from(position).expect("below 1,024") + 1;
        Bucket(Bucket::part_of(print) | position)
    }

    /// The part of a fingerprint that buckets have.
    #[inline]
    fn part_of(print: u128) -> u32 {
        u32::try_from(print & u128::from(u32::MAX)).expect("32 bits") & !POSITION
    }

    /// The position of its entry; `None` if it is free.
    #[inline]
    fn position(self) -> Option<usize> {
        ((self.0 & POSITION) as usize).checked_sub(1)
    }
}

/// The bucket at which the search for such a part of a fingerprint begins.
#[inline]
fn home(part: u32) -> usize {
    (part >> POSITION_BITS) as usize % BUCKETS
}

impl Index {
    /// The position of the entry with this fingerprint. `is_it` compares the part that buckets do not have.
    #[inline]
    pub(super) fn find(&self, print: u128, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        let part = Bucket::part_of(print);
        let mut at = home(part);
        loop {
            let bucket = *self.buckets.get(at)?;
            let position = bucket.position()?;
            if bucket.0 & !POSITION == part && is_it(position) {
                return Some(position);
            }
            at = (at + 1) % BUCKETS;
        }
    }

    pub(super) fn insert(&mut self, print: u128, position: usize) {
        self.buckets.resize(BUCKETS, Bucket::default());
        let mut at = home(Bucket::part_of(print));
        while self.buckets[at].position().is_some() {
            at = (at + 1) % BUCKETS;
        }
        self.buckets[at] = Bucket::new(print, position);
    }

    pub(super) fn remove(&mut self, print: u128, position: usize) {
        let mut free = home(Bucket::part_of(print));
        while self.buckets[free].position() != Some(position) {
            free = (free + 1) % BUCKETS;
        }
        // A search ends at a free bucket, so buckets behind it whose search begins before it move into it.
        let mut at = free;
        loop {
            at = (at + 1) % BUCKETS;
            let bucket = self.buckets[at];
            if bucket.position().is_none() {
                break;
            }
            let distance_from = |begin: usize| (at + BUCKETS - begin) % BUCKETS;
            if distance_from(home(bucket.0)) >= distance_from(free) {
                self.buckets[free] = bucket;
                free = at;
            }
        }
        self.buckets[free] = Bucket::default();
    }
}
