//! The keys of all benchmarks and the order of their requests.
//!
//! Everything is drawn beforehand, so that no generator runs during a measurement, and keys are in memory in the order
//! of their requests: a real program, too, has just read its key when it calls a limiter.

use std::fmt::Write;

/// The keys of a request to a layered limiter.
#[derive(Clone, Debug)]
pub struct Request {
    /// One of many.
    pub user: String,
    /// One of a thousand.
    pub tenant: String,
    /// One of fifty.
    pub route: String,
}

/// The key of a number: 24 bytes, unique.
pub fn key(kind: &str, number: u64) -> String {
    let mut key = String::new();
    write_key(&mut key, kind, number);
    key
}

/// As [`key`], where another one was.
pub fn write_key(key: &mut String, kind: &str, number: u64) {
    key.clear();
    write!(key, "{kind:.<8}{:016x}", scrambled(number)).expect("a string takes everything");
}

/// Numbers below `below`, each as likely as any other.
pub fn uniform(below: u64) -> impl Iterator<Item = u64> {
    (0..).map(move |draw| random(draw) % below)
}

/// Numbers below `below` by Zipf's law (s = 1): the most frequent comes twice as often as the second.
#[expect(clippy::cast_precision_loss, reason = "a draw needs no more than 53 bits")]
pub fn zipf(below: u64) -> impl Iterator<Item = u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=below)
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect();
    (0..).map(move |draw| {
        let drawn = sum * (random(draw) >> 11) as f64 / (1_u64 << 53) as f64;
        let rank = sums.partition_point(|sum| *sum < drawn) as u64;
        // Frequent keys did not all come first: 7,368,787 is prime, so this is another order of the same.
        rank * 7_368_787 % below
    })
}

/// Draws that have nothing to do with the keys.
fn random(draw: u64) -> u64 {
    scrambled(draw ^ 0x5EED << 40)
}

/// SplitMix64: a bijection whose output looks random.
fn scrambled(number: u64) -> u64 {
    let number = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}
