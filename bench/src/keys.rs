//! Generates the keys of all benchmarks and the order of their requests.
//!
//! Requests are generated before a measurement starts, and lie in memory in the order in which they are made: a real
//! program has just read its key, too, when it calls a limiter, so the key itself is in the cache.

use std::fmt::Write;

/// The keys of a request to a layered limiter.
#[derive(Clone, Debug)]
pub struct Request {
    /// One of a million users.
    pub user: String,
    /// One of a thousand tenants.
    pub tenant: String,
    /// One of fifty routes.
    pub route: String,
}

/// A unique key of 24 bytes for this number.
pub fn key(kind: &str, number: u64) -> String {
    let mut key = String::new();
    write_key(&mut key, kind, number);
    key
}

/// Writes [`key`] into an existing string.
pub fn write_key(key: &mut String, kind: &str, number: u64) {
    key.clear();
    write!(key, "{kind:.<8}{:016x}", scrambled(number)).expect("writing to a String cannot fail");
}

/// Uniformly distributed numbers below `below`.
pub fn uniform(below: u64) -> impl Iterator<Item = u64> {
    (0..).map(move |draw| random(draw) % below)
}

/// Zipf-distributed numbers below `below` (s = 1): the most frequent is twice as frequent as the second.
#[expect(clippy::cast_precision_loss, reason = "53 random bits are enough")]
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
        // Spreads the frequent keys over the range. 7,368,787 is prime, so this is a permutation.
        rank * 7_368_787 % below
    })
}

/// Random numbers that are independent of the keys.
pub fn random(draw: u64) -> u64 {
    scrambled(draw ^ 0x5EED << 40)
}

/// SplitMix64: a bijection whose output looks random.
fn scrambled(number: u64) -> u64 {
    let number = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}
