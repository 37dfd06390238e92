//! Counts distinct keys: exactly up to 100,000, above that by HyperLogLog.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// The most keys that are counted exactly.
pub const EXACT: usize = 100_000;
/// The bits of a hash that select a register: 16,384 registers, for a standard error of 0.8 %.
const BITS: u32 = 14;
const REGISTERS: usize = 1 << BITS;

/// A set of hashes of which only the size is of interest.
#[derive(Clone, Debug)]
pub struct Distinct(Counter);

#[derive(Clone, Debug)]
enum Counter {
    Exact(HashSet<u64, BuildHasherDefault<AsIs>>),
    /// The most leading zeros of a hash in each register, plus one.
    Estimate(Box<[u8; REGISTERS]>),
}

/// How many keys there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCount {
    /// The number.
    pub count: u64,
    /// Whether it is exact; otherwise it is off by about 1 %.
    pub is_exact: bool,
}

/// The hashes are random already.
#[derive(Clone, Copy, Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only numbers are hashed")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl Default for Distinct {
    fn default() -> Distinct {
        Distinct(Counter::Exact(HashSet::default()))
    }
}

impl Distinct {
    /// Adds a hash; true if it is certainly new.
    #[inline]
    pub fn add(&mut self, hash: u64) -> bool {
        match &mut self.0 {
            Counter::Exact(hashes) => {
                let is_new = hashes.insert(hash);
                if hashes.len() > EXACT {
                    self.estimate();
                }
                is_new
            }
            Counter::Estimate(registers) => {
                note(registers, hash);
                false
            }
        }
    }

    #[cold]
    fn estimate(&mut self) {
        let Counter::Exact(hashes) = &self.0 else { return };
        let mut registers = Box::new([0; REGISTERS]);
        hashes.iter().for_each(|hash| note(&mut registers, *hash));
        self.0 = Counter::Estimate(registers);
    }

    /// How many there are.
    pub fn count(&self) -> KeyCount {
        match &self.0 {
            Counter::Exact(hashes) => {
                KeyCount { count: u64::try_from(hashes.len()).unwrap_or(u64::MAX), is_exact: true }
            }
            Counter::Estimate(registers) => {
                // Far above 5/2 of the registers, where the estimate needs no correction for empty ones.
                let sum: f64 = registers.iter().map(|zeros| 2f64.powi(-i32::from(*zeros))).sum();
                let count = REGISTERS as f64;
                let alpha = 0.7213 / (1.0 + 1.079 / count);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "it is below 2^64"
                )]
                let count = (alpha * count * count / sum).round() as u64;
                KeyCount { count, is_exact: false }
            }
        }
    }
}

#[inline]
fn note(registers: &mut [u8; REGISTERS], hash: u64) {
    let register = usize::try_from(hash >> (64 - BITS)).expect("14 bits");
    // A set bit ends the count of zeros in the bits that are left.
    let zeros = ((hash << BITS) | (1 << (BITS - 1))).leading_zeros() + 1;
    let zeros = u8::try_from(zeros).expect("at most 64");
    registers[register] = registers[register].max(zeros);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of SplitMix64, which is evenly distributed.
    fn hash(number: u64) -> u64 {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    #[test]
    fn count_is_exact_and_then_close() {
        let mut distinct = Distinct::default();
        for number in 0..EXACT as u64 {
            assert!(distinct.add(hash(number)));
            assert!(!distinct.add(hash(number / 2)));
        }
        assert_eq!(distinct.count(), KeyCount { count: EXACT as u64, is_exact: true });
        for total in [200_000u64, 1_000_000, 3_000_000] {
            (0..total).for_each(|number| {
                distinct.add(hash(number));
            });
            let KeyCount { count, is_exact } = distinct.count();
            assert!(!is_exact && count.abs_diff(total) < total / 40, "{count} of {total}");
        }
    }
}
