//! The 128-bit keyed fingerprint that replaces a key in memory.
//!
//! Keys of every length take the same memory, and an attacker without the secret cannot find two keys that
//! collide: each 32-byte block goes through sums of products with secret words (the NH
//! construction), twice with independent words, so two different blocks agree in both lanes with a
//! probability of about 2^-128, even if the attacker chooses them. It is not a message authentication code:
//! fingerprints never leave the process except into the snapshot, which holds the secret as well. Why not
//! SipHash: see `docs/adr/0002-fingerprint.md`.

use core::fmt;
use std::sync::OnceLock;

use crate::key::Key;
use crate::siphash::{self, Secret};

/// Computes fingerprints with one secret.
#[derive(Clone)]
pub struct Fingerprinter {
    words: [u64; 12],
}

impl fmt::Debug for Fingerprinter {
    /// Hides the words, which are derived from the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprinter(…)")
    }
}

/// The state of the hash after some of the input.
#[derive(Clone, Copy, Debug)]
pub struct Midstate {
    one: u64,
    two: u64,
}

/// The midstate after a family, cached with the family: every key of a limit begins with it, and hashing it again
/// takes as long as hashing the value. It belongs to the first fingerprinter that used it; others compute their own.
#[derive(Clone, Default)]
pub(crate) struct CachedMidstate(OnceLock<(u64, Midstate)>);

impl fmt::Debug for CachedMidstate {
    /// Hides the midstate, which is derived from a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CachedMidstate(…)")
    }
}

/// A cache has no identity of its own: families are equal if their bytes are.
impl PartialEq for CachedMidstate {
    fn eq(&self, _: &CachedMidstate) -> bool {
        true
    }
}

impl Eq for CachedMidstate {}

impl Fingerprinter {
    /// Derives the words that blocks are multiplied with from a secret.
    pub fn new(secret: &Secret) -> Fingerprinter {
        let mut words = [0; 12];
        for (index, pair) in words.chunks_exact_mut(2).enumerate() {
            let drawn = siphash::hash(secret, &[0xF0, u8::try_from(index).expect("six pairs")]).to_le_bytes();
            pair[0] = load(&drawn[..8]);
            pair[1] = load(&drawn[8..]);
        }
        Fingerprinter { words }
    }

    /// The fingerprint of a key: never zero.
    #[inline(always)]
    pub fn key(&self, key: Key<'_>) -> u128 {
        let midstate = match key.midstate() {
            Some(cached) => self.cached(cached, key.family()),
            None => self.family(key.family()),
        };
        finish(key.fold_values(midstate, |midstate, value| self.value(midstate, value)))
    }

    #[inline(always)]
    fn cached(&self, cached: &CachedMidstate, family: &[u8]) -> Midstate {
        // A word of the secret identifies the fingerprinter.
        let own = self.words[0];
        match cached.0.get() {
            Some((owner, midstate)) if *owner == own => *midstate,
            _ => self.compute(cached, family),
        }
    }

    #[cold]
    fn compute(&self, cached: &CachedMidstate, family: &[u8]) -> Midstate {
        let midstate = self.family(family);
        // If another fingerprinter was first, its midstate stays.
        let _ = cached.0.set((self.words[0], midstate));
        midstate
    }

    /// The midstate after the family of a limit, which all its keys have in common.
    #[inline]
    pub fn family(&self, family: &[u8]) -> Midstate {
        self.value(Midstate { one: self.words[10], two: self.words[11] }, Some(family))
    }

    /// Adds the value of one fact; an absent value is different from an empty one.
    #[inline(always)]
    pub fn value(&self, from: Midstate, value: Option<&[u8]>) -> Midstate {
        let Some(bytes) = value else {
            return self.block(salted(from, u64::MAX), [0; 4]);
        };
        let len = bytes.len();
        let salted = salted(from, len as u64);
        match len {
            0..=7 => self.block(salted, [short(bytes), 0, 0, 0]),
            8..=16 => self.block(salted, [load(bytes), load(&bytes[len - 8..]), 0, 0]),
            17..=32 => {
                let tail = &bytes[len - 16..];
                self.block(salted, [load(bytes), load(&bytes[8..]), load(tail), load(&tail[8..])])
            }
            _ => self.blocks(salted, bytes),
        }
    }

    /// A value of more than 32 bytes: block by block, where the last one may overlap the one before.
    fn blocks(&self, mut midstate: Midstate, bytes: &[u8]) -> Midstate {
        let len = bytes.len();
        for block in bytes[..len - 1].chunks_exact(32).chain([&bytes[len - 32..]]) {
            midstate = self
                .block(midstate, [load(block), load(&block[8..]), load(&block[16..]), load(&block[24..])]);
        }
        midstate
    }

    #[inline(always)]
    fn block(&self, from: Midstate, [a, b, c, d]: [u64; 4]) -> Midstate {
        let k = &self.words;
        let product = |x: u64, i: usize, y: u64, j: usize| {
            u128::from(x.wrapping_add(k[i])) * u128::from(y.wrapping_add(k[j]))
        };
        let one = product(a, 0, b, 1).wrapping_add(product(c, 2, d, 3));
        let two = product(a, 4, c, 5).wrapping_add(product(b, 6, d, 7));
        Midstate { one: folded(one, from.one, k[8]), two: folded(two, from.two, k[9]) }
    }
}

/// The fingerprint: never zero, which hash tables use to mark an empty entry.
#[inline]
pub fn finish(midstate: Midstate) -> u128 {
    let print = u128::from(midstate.one) << 64 | u128::from(midstate.two);
    print.max(1)
}

/// Adds a value's length before the value, so that a value differs from itself with padding.
#[inline]
fn salted(from: Midstate, len: u64) -> Midstate {
    Midstate { one: from.one.wrapping_add(len), two: from.two.wrapping_sub(len) }
}

/// Mixes a sum of products into a lane.
#[inline]
fn folded(sum: u128, lane: u64, word: u64) -> u64 {
    let [low, high] = halves(sum);
    let [low, high] = halves(u128::from(low ^ lane) * u128::from(high ^ word));
    low ^ high
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "splits the number into its halves")]
fn halves(wide: u128) -> [u64; 2] {
    [wide as u64, (wide >> 64) as u64]
}

/// The first eight bytes.
#[inline]
fn load(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("at least eight bytes"))
}

/// Up to seven bytes as a word: different bytes of the same length give different words.
#[inline]
fn short(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    match (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) << 32 | u64::from(u32::from_le_bytes(*last))
        }
        _ if len == 0 => 0,
        _ => u64::from(bytes[0]) << 16 | u64::from(bytes[len / 2]) << 8 | u64::from(bytes[len - 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Family;
    use crate::key::tests::{Parts, Random};
    use crate::quota::Algorithm;
    use crate::time::Span;
    use std::collections::BTreeSet;

    fn prints() -> Fingerprinter {
        Fingerprinter::new(&Secret([7; 16]))
    }

    fn of(values: &[Option<&[u8]>]) -> u128 {
        let prints = prints();
        let start = prints.family(b"limit");
        finish(values.iter().fold(start, |midstate, value| prints.value(midstate, *value)))
    }

    #[test]
    fn every_length_and_byte_position_changes_the_print() {
        let mut seen = BTreeSet::new();
        let mut count = 0;
        for len in 0..=200 {
            let mut value = vec![0u8; len];
            seen.insert(of(&[Some(&value)]));
            count += 1;
            for position in 0..len {
                value[position] = 1;
                seen.insert(of(&[Some(&value)]));
                value[position] = 0;
                count += 1;
            }
        }
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn boundary_between_values_changes_the_fingerprint() {
        let all = [
            of(&[Some(b"ab"), Some(b"c")]),
            of(&[Some(b"a"), Some(b"bc")]),
            of(&[Some(b"abc")]),
            of(&[Some(b"abc"), None]),
            of(&[None, Some(b"abc")]),
            of(&[Some(b"abc"), Some(b"")]),
            of(&[None]),
            of(&[Some(b"")]),
            of(&[]),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn fingerprints_are_equal_only_for_equal_keys() {
        let (prints, mut random) = (prints(), Random(5));
        for _ in 0..100_000 {
            let one = Parts::random(&mut random);
            let other = one.similar(&mut random);
            let print = |parts: &Parts| prints.key(Key::from_bytes(&parts.bytes()).expect("a key"));
            assert_eq!(print(&one) == print(&other), one == other, "{one:?} and {other:?}");
        }
    }

    #[test]
    fn cached_families_give_the_same_fingerprints() {
        let family = Family::new("per-user", Algorithm::TokenBucket, false, Span::from_secs(60));
        let [one, other] = [7, 8].map(|byte| Fingerprinter::new(&Secret([byte; 16])));
        for value in ["alice", "bob"] {
            // The first fingerprinter owns the cache.
            let (cached, bytes) = (Key::of_one(&family, value), Key::of_one(&family, value).to_bytes());
            let plain = Key::from_bytes(&bytes).expect("a key");
            assert_eq!((one.key(cached), other.key(cached)), (one.key(plain), other.key(plain)));
        }
    }

    #[test]
    fn each_input_bit_changes_about_half_of_the_print() {
        for len in [1, 7, 8, 16, 17, 32, 33, 64, 100] {
            let value = vec![0x5a; len];
            for bit in 0..8 * len {
                let mut other = value.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                let changed = (of(&[Some(&value)]) ^ of(&[Some(&other)])).count_ones();
                // Binomial with 128 fair bits: mean 64, standard deviation 5.7.
                assert!((30..=98).contains(&changed), "bit {bit} of {len} bytes changes {changed} of 128");
            }
        }
    }

    #[test]
    fn a_fingerprint_is_never_zero() {
        assert_eq!(finish(Midstate { one: 0, two: 0 }), 1);
        assert_eq!(finish(Midstate { one: 1, two: 0 }), 1 << 64);
    }

    #[test]
    fn debug_output_hides_the_secret() {
        assert_eq!(format!("{:?}", prints()), "Fingerprinter(…)");
    }

    #[test]
    fn another_secret_gives_another_fingerprint() {
        let other = Fingerprinter::new(&Secret([8; 16]));
        assert_ne!(of(&[]), finish(other.family(b"limit")));
    }

    /// A hash table indexes by the leading bits: sequential values must spread like random ones.
    #[test]
    fn leading_bits_are_evenly_distributed() {
        let prints = prints();
        let family = prints.family(b"per-user");
        let mut buckets = [0u32; 1024];
        for user in 0..102_400 {
            let name = format!("user-{user:019}");
            let print = finish(prints.value(family, Some(name.as_bytes())));
            buckets[usize::try_from(print >> 118).expect("ten bits")] += 1;
        }
        let squares: f64 = buckets.iter().map(|count| (f64::from(*count) - 100.0).powi(2) / 100.0).sum();
        // Chi-squared with 1,023 degrees of freedom: mean 1,023, standard deviation 45.
        assert!((800.0..1250.0).contains(&squares), "{squares}");
    }
}
