//! Tollkeeper's sides: through a handle, through the policy, and with three layered limits.

use std::time::Duration;

use tollkeeper::{Capacity, Clock, Handle, Layers, Limit, Limiter, MemoryStore, Policy, Quota, facts};

use crate::keys::Request;
use crate::sides::{Bucket, Keyed, Layered};

/// One limit, prepared: `Handle::check`.
pub struct ByHandle(Handle);

/// One limit, looked up for every request: `Limiter::check` with facts.
pub struct ByPolicy(Limiter);

/// Three limits, prepared: `Layers::check`.
pub struct ByLayers(Layers<3>);

/// Three limits in one `Limiter::check` with facts.
pub struct ThreeLimits(Limiter);

/// A limiter with one limit for each of these facts, called `per-FACT`.
pub fn limiter(bucket: Bucket, facts: &[&str], clock: Clock) -> Limiter {
    let quota = Quota::per(u64::from(bucket.count), Duration::from_secs(u64::from(bucket.seconds)));
    let quota = quota.burst(u64::from(bucket.burst));
    let limits = facts.iter().map(|fact| Limit::new(format!("per-{fact}"), quota).by(*fact)).collect();
    // Twice the needed capacity, so that an uneven spread over the shards makes no difference.
    let capacity = Capacity { max_keys: 2 * bucket.keys, ..Capacity::default() };
    Limiter::embedded(Policy::new(limits).expect("valid limits"), MemoryStore::new(capacity, clock))
}

/// The handle of the limit by `user`.
pub fn handle(limiter: &Limiter) -> Handle {
    limiter.handle("per-user").expect("a plain limit")
}

/// The handle of the limits by `user`, `tenant` and `route`.
pub fn layers(limiter: &Limiter) -> Layers<3> {
    limiter.layers(["per-user", "per-tenant", "per-route"]).expect("plain limits")
}

impl Keyed for ByHandle {
    const NAME: &'static str = "handle";

    fn new(bucket: Bucket) -> ByHandle {
        ByHandle(handle(&limiter(bucket, &["user"], Clock::system())))
    }

    #[inline]
    fn check(&self, key: &String) -> bool {
        self.0.check(key).expect("a valid key").allowed
    }
}

impl Keyed for ByPolicy {
    const NAME: &'static str = "policy";

    fn new(bucket: Bucket) -> ByPolicy {
        ByPolicy(limiter(bucket, &["user"], Clock::system()))
    }

    #[inline]
    fn check(&self, key: &String) -> bool {
        let facts = facts! { "user" => key.as_str() };
        self.0.check(&facts).wait().expect("valid facts").allowed()
    }
}

impl Layered for ByLayers {
    const NAME: &'static str = "handle";

    fn new(bucket: Bucket) -> ByLayers {
        ByLayers(layers(&limiter(bucket, &["user", "tenant", "route"], Clock::system())))
    }

    #[inline]
    fn check(&self, request: &Request) -> bool {
        let Request { user, tenant, route } = request;
        self.0.check([user, tenant, route]).expect("valid keys").allowed
    }
}

impl Layered for ThreeLimits {
    const NAME: &'static str = "policy";

    fn new(bucket: Bucket) -> ThreeLimits {
        ThreeLimits(limiter(bucket, &["user", "tenant", "route"], Clock::system()))
    }

    #[inline]
    fn check(&self, request: &Request) -> bool {
        let Request { user, tenant, route } = request;
        let facts =
            facts! { "user" => user.as_str(), "tenant" => tenant.as_str(), "route" => route.as_str() };
        self.0.check(&facts).wait().expect("valid facts").allowed()
    }
}
