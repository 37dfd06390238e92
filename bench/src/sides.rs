//! The traits that each side of a comparison implements.

use crate::keys::Request;

/// A token bucket in numbers that every side can be given.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// How many come back…
    pub count: u32,
    /// … in so many seconds.
    pub seconds: u32,
    /// How many can be taken at once.
    pub burst: u32,
    /// How many keys to expect, for those who want to know.
    pub keys: usize,
}

impl Bucket {
    /// Allows everything that one key can ask for: a billion per second.
    pub const ENDLESS: Bucket =
        Bucket { count: 1_000_000_000, seconds: 1, burst: 1_000_000_000, keys: 1_000 };
    /// Refuses all but the first few for a minute. Not of burst 1: throttlecrab then forgets a key at once
    /// and refuses nothing.
    pub const SMALL: Bucket = Bucket { count: 1, seconds: 60, burst: 2, keys: 1_000 };

    /// Allows everything too, but each request leaves a state for a minute, so a store that drops fresh states keeps
    /// all keys, as in production.
    pub const fn lasting(keys: usize) -> Bucket {
        Bucket { count: 1, seconds: 60, burst: 25_000_000, keys }
    }
}

/// Limits requests by one key.
pub trait Keyed: Sync + 'static {
    /// What it is called in the report.
    const NAME: &'static str;

    /// A limiter without state.
    fn new(bucket: Bucket) -> Self;

    /// Charges one request; whether it may pass.
    #[expect(clippy::ptr_arg, reason = "governor's keys are what the caller has, and that is a String")]
    fn check(&self, key: &String) -> bool;
}

/// Limits requests by user, by tenant and by route, each with the same bucket.
pub trait Layered: Sync + 'static {
    /// What it is called in the report.
    const NAME: &'static str;

    /// A limiter without state.
    fn new(bucket: Bucket) -> Self;

    /// Charges one request everywhere; whether it may pass.
    fn check(&self, request: &Request) -> bool;
}
