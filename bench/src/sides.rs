//! The traits that each side of a comparison implements.

use crate::keys::Request;

/// A token bucket with integer parameters that every side accepts.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Units refilled per period: 100 of 100 per minute.
    pub count: u32,
    /// Length of the period in seconds: 60 of 100 per minute.
    pub seconds: u32,
    /// Units that a fresh key can take at once.
    pub burst: u32,
    /// Expected number of keys, for limiters that allocate their table in advance.
    pub keys: usize,
}

impl Bucket {
    /// A billion per second: more than one key can use, so every request is allowed.
    pub const UNLIMITED: Bucket =
        Bucket { count: 1_000_000_000, seconds: 1, burst: 1_000_000_000, keys: 1_000 };
    /// Refuses everything after the first two requests, for a minute. The burst is not 1 because throttlecrab then drops
    /// the key at once and allows everything.
    pub const SMALL: Bucket = Bucket { count: 1, seconds: 60, burst: 2, keys: 1_000 };

    /// Allows every request, too, but each leaves a state that lasts a minute: a store that drops fresh states keeps all
    /// keys, as in production.
    pub const fn lasting(keys: usize) -> Bucket {
        Bucket { count: 1, seconds: 60, burst: 25_000_000, keys }
    }
}

/// A limiter with one key per request.
pub trait Keyed: Sync + 'static {
    /// Name in the report.
    const NAME: &'static str;

    /// A limiter that has seen no key yet.
    fn new(bucket: Bucket) -> Self;

    /// Charges one request, and returns whether it is allowed.
    #[expect(clippy::ptr_arg, reason = "governor takes a reference to its key type, which is String")]
    fn check(&self, key: &String) -> bool;
}

/// A limiter with three limits per request, by user, tenant and route, each with the same bucket.
pub trait Layered: Sync + 'static {
    /// Name in the report.
    const NAME: &'static str;

    /// A limiter that has seen no key yet.
    fn new(bucket: Bucket) -> Self;

    /// Charges one request under all three limits, and returns whether it is allowed.
    fn check(&self, request: &Request) -> bool;
}
