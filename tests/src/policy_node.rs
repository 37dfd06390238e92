//! A limiter that follows the shared limits, as a node does.

use std::sync::Arc;
use std::time::Duration;

use tollkeeper::config::{Config, EffectiveLimit, Format, StoreUrl};
use tollkeeper::store::redis::{Followed, Following, RedisOptions, RedisStore, SharedPolicy};
use tollkeeper::store::{Resilient, ResilientSettings};
use tollkeeper::{Limiter, MemoryStore, facts};

/// A limiter with the config of its file and its handle to the shared limits.
#[derive(Debug)]
pub struct PolicyNode {
    /// Uses the shared limits as soon as they change.
    pub limiter: Limiter,
    /// The config of its file: 100 requests per hour for each user.
    pub config: Config,
    /// The shared limits, through its own store.
    pub shared: SharedPolicy,
    following: Following,
}

impl PolicyNode {
    /// Starts a node with the store at this URL, without waiting for a store that is down.
    pub async fn start(url: &str) -> PolicyNode {
        let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
        let file = "limits: [{ name: per-user, by: user, rate: 100/h }]";
        let (config, _) =
            Config::parse("node.yaml", Format::Yaml, file.as_bytes(), &|_| None).expect("valid");
        let store = RedisStore::open(&url, RedisOptions::default());
        let shared = SharedPolicy::of(&store);
        let settings =
            ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
        let store = Resilient::new(store, settings, MemoryStore::default());
        let limiter = Limiter::with_store(config.policy.clone(), Arc::new(store));
        let following = limiter.follow(&shared, config.clone()).await;
        PolicyNode { limiter, config, shared, following }
    }

    /// Limits of `an_hour` requests per hour for each user.
    pub fn limits(&self, an_hour: u64) -> Vec<EffectiveLimit> {
        let text =
            format!(r#"{{ "limits": [{{ "name": "per-user", "by": "user", "rate": "{an_hour}/h" }}] }}"#);
        self.config.with_limits("test", text.as_bytes()).expect("valid").0.limits
    }

    /// The active limit in requests per hour, and the version of the limits.
    pub fn grants(&self) -> (u64, u64) {
        let policy = self.limiter.policy();
        let (quota, _) = policy.rules()[0].plain_quota().expect("no tiers");
        (quota.count(), policy.version())
    }

    /// The last version it has seen.
    pub fn followed(&self) -> Followed {
        self.following.state()
    }

    /// Waits until it has seen a version.
    pub async fn sees(&mut self, version: u64) -> Followed {
        loop {
            let state = self.following.state();
            if state.version == version {
                return state;
            }
            self.changed().await;
        }
    }

    /// Waits for the next version.
    pub async fn changed(&mut self) {
        self.following.changed().await;
    }

    /// Whether a request of this user is admitted.
    pub async fn check(&self, user: &str) -> bool {
        self.limiter.check(&facts! { "user" => user }).await.expect("valid").allowed()
    }
}
