//! The peers, each used as its own documentation shows.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use governor::DefaultKeyedRateLimiter;
use limitador::limit::{Context, Limit, Namespace};
use throttlecrab::AdaptiveStore;

use crate::keys::Request;
use crate::sides::{Bucket, Keyed, Layered};

/// `governor`: GCRA in a DashMap, on its default clock.
pub struct Governor(DefaultKeyedRateLimiter<String>);

impl Keyed for Governor {
    const NAME: &'static str = "governor";

    fn new(bucket: Bucket) -> Governor {
        let each = Duration::from_secs(u64::from(bucket.seconds)) / bucket.count;
        let burst = NonZeroU32::new(bucket.burst).expect("a burst");
        let quota = governor::Quota::with_period(each).expect("a period").allow_burst(burst);
        Governor(governor::RateLimiter::keyed(quota))
    }

    #[inline]
    fn check(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

/// `throttlecrab`: GCRA in its adaptive store. It takes `&mut self`, so it is behind a mutex, as its documentation says.
/// It gets the expected number of keys, because near its capacity it scans all of them on every request.
pub struct Throttlecrab(Mutex<throttlecrab::RateLimiter<AdaptiveStore>>, Bucket);

impl Keyed for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(bucket: Bucket) -> Throttlecrab {
        let store = AdaptiveStore::builder().capacity(bucket.keys).build();
        Throttlecrab(Mutex::new(throttlecrab::RateLimiter::new(store)), bucket)
    }

    #[inline]
    fn check(&self, key: &String) -> bool {
        let Bucket { count, seconds, burst, .. } = self.1;
        let mut limiter = self.0.lock().expect("no panic under the lock");
        let answer =
            limiter.rate_limit(key, burst.into(), count.into(), seconds.into(), 1, SystemTime::now());
        answer.expect("valid numbers").0
    }
}

/// `limitador`: fixed windows in memory, keyed by expressions over a context. Its window is the bucket's period, and its
/// maximum the bucket's burst.
pub struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: Namespace,
}

impl Limitador {
    fn of(bucket: Bucket, variables: &[&str]) -> Limitador {
        let limiter = limitador::RateLimiter::new(2 * bucket.keys as u64);
        let (most, seconds) = (u64::from(bucket.burst), u64::from(bucket.seconds));
        for variable in variables {
            let variable = (*variable).try_into().expect("the name of a variable is an expression");
            limiter.add_limit(Limit::new("bench", most, seconds, [], [variable]));
        }
        Limitador { limiter, namespace: "bench".into() }
    }

    #[inline]
    fn ask<const N: usize>(&self, values: [(&str, &String); N]) -> bool {
        let values = values.map(|(name, value)| (name.to_owned(), value.clone()));
        let context = Context::from(HashMap::from(values));
        let answer = self.limiter.check_rate_limited_and_update(&self.namespace, &context, 1);
        !answer.expect("valid expressions").limited
    }
}

impl Keyed for Limitador {
    const NAME: &'static str = "limitador";

    fn new(bucket: Bucket) -> Limitador {
        Limitador::of(bucket, &["user"])
    }

    #[inline]
    fn check(&self, key: &String) -> bool {
        self.ask([("user", key)])
    }
}

/// Limitador checks several limits in one call, as we do.
impl Layered for Limitador {
    const NAME: &'static str = "limitador";

    fn new(bucket: Bucket) -> Limitador {
        Limitador::of(bucket, &["user", "tenant", "route"])
    }

    #[inline]
    fn check(&self, request: &Request) -> bool {
        self.ask([("user", &request.user), ("tenant", &request.tenant), ("route", &request.route)])
    }
}

/// The other peers have one limit per limiter, so three limiters are called one after the other.
pub struct ThreeOf<K>([K; 3]);

impl<K: Keyed> Layered for ThreeOf<K> {
    const NAME: &'static str = K::NAME;

    fn new(bucket: Bucket) -> ThreeOf<K> {
        ThreeOf([bucket; 3].map(K::new))
    }

    #[inline]
    fn check(&self, request: &Request) -> bool {
        let [users, tenants, routes] = &self.0;
        users.check(&request.user) && tenants.check(&request.tenant) && routes.check(&request.route)
    }
}
