//! A node that follows the limits which all nodes share.

use std::sync::Arc;
use std::time::Duration;

use tollkeeper::config::{Config, Format, LimitShape, StoreUrl};
use tollkeeper::store::redis::{Followed, Following, RedisOptions, RedisStore, SharedPolicy};
use tollkeeper::{Limiter, MemoryStore, Resilient, ResilientSettings, facts};

/// A limiter, what its file says, and what all nodes share.
#[derive(Debug)]
pub struct PolicyNode {
    /// Follows.
    pub limiter: Limiter,
    /// What its own file says: 100 an hour for each user.
    pub config: Config,
    /// Through a store of its own.
    pub shared: SharedPolicy,
    following: Following,
}

impl PolicyNode {
    /// A node on the store there; one that is away is not waited for.
    pub async fn start(url: &str) -> PolicyNode {
        let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is no Redis URL") };
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

    /// The limits of a policy that grants each user so many an hour.
    pub fn limits(&self, an_hour: u64) -> Vec<LimitShape> {
        let text =
            format!(r#"{{ "limits": [{{ "name": "per-user", "by": "user", "rate": "{an_hour}/h" }}] }}"#);
        self.config.with_limits("test", text.as_bytes()).expect("valid").0.limits
    }

    /// What it grants each user an hour, and under which version.
    pub fn grants(&self) -> (u64, u64) {
        let policy = self.limiter.policy();
        let (quota, _) = policy.rules()[0].plain_quota().expect("no tiers");
        (quota.count(), policy.version())
    }

    /// How far it has come.
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

    /// Waits until it has seen something else.
    pub async fn changed(&mut self) {
        self.following.changed().await;
    }

    /// Whether a user is let through.
    pub async fn check(&self, user: &str) -> bool {
        self.limiter.check(&facts! { "user" => user }).await.expect("valid").allowed()
    }
}
