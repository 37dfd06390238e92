//! Keeps a limiter's policy in sync with the limits that all nodes share.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::policy::{SharedLimits, SharedPolicy};
use crate::config::{Config, Report};
use crate::limiter::Limiter;

/// How long [`Limiter::follow`] waits for the store to return the current limits.
const FIRST_READ: Duration = Duration::from_secs(1);

/// Keeps a limiter in sync with the shared limits until it is dropped.
#[derive(Debug)]
pub struct Following {
    state: watch::Receiver<Followed>,
    task: JoinHandle<()>,
}

/// The shared limits that a limiter has last seen, and whether it applies them.
#[derive(Clone, Debug, Default)]
pub struct Followed {
    /// The version that was last seen; 0 if limits were never set.
    pub version: u64,
    /// Why this version is not applied; the limits before it stay active. `None` if it is applied.
    pub error: Option<Report>,
}

impl Limiter {
    /// Applies the shared limits while there are any, and those of `config` otherwise. All other settings come from
    /// `config`. A change is applied within a second. Limits that this node cannot parse, because a newer version
    /// of Tollkeeper has set them, change nothing.
    ///
    /// Waits at most a second for the first read. While the store cannot be reached, the active limits stay active.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::{path::Path, sync::Arc};
    /// use tollkeeper::config::{Config, StoreUrl};
    /// use tollkeeper::store::redis::SharedPolicy;
    /// use tollkeeper::store::Leased;
    /// use tollkeeper::Limiter;
    ///
    /// let (config, _) = Config::read(Path::new("tollkeeper.yaml"))?;
    /// let StoreUrl::Redis(url) = &config.store else { return Err("nothing to share in memory".into()) };
    /// let store = Leased::open(url, &config.redis)?;
    /// let shared = SharedPolicy::of(store.inner().remote());
    /// let limiter = Limiter::with_store(config.policy.clone(), Arc::new(store));
    /// let _following = limiter.follow(&shared, config.clone()).await;
    ///
    /// // On any node: set other limits for all nodes, unless they were changed meanwhile.
    /// let seen = shared.get().await?.version;
    /// let text = br#"{ "limits": [{ "name": "per-ip", "by": "ip", "rate": "500/min" }] }"#;
    /// let (changed, _) = config.with_limits("the new limits", text)?;
    /// let version = shared.set(&changed.limits, Some(seen)).await?;
    /// // And back to the limits in each node's file.
    /// shared.clear(Some(version)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn follow(&self, shared: &SharedPolicy, config: Config) -> Following {
        let mut changes = shared.watch();
        let (publish, mut state) = watch::channel(Followed::default());
        let follower = Follower { limiter: self.clone(), config, name: shared.key().to_owned(), publish };
        if let Ok(first) = tokio::time::timeout(FIRST_READ, changes.next()).await {
            follower.apply(&first);
        }
        state.mark_unchanged();
        let task = tokio::spawn(async move {
            loop {
                follower.apply(&changes.next().await);
            }
        });
        Following { state, task }
    }
}

impl Following {
    /// The last seen version, and whether it is applied.
    pub fn state(&self) -> Followed {
        self.state.borrow().clone()
    }

    /// Waits until the shared limits change, and returns the new state.
    pub async fn changed(&mut self) -> Followed {
        // This cannot fail: the sender is in the task, which lives until `self` is dropped.
        let _ = self.state.changed().await;
        self.state.borrow_and_update().clone()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Follower {
    limiter: Limiter,
    config: Config,
    name: String,
    publish: watch::Sender<Followed>,
}

impl Follower {
    fn apply(&self, shared: &SharedLimits) {
        let version = shared.version;
        let error = match &shared.limits {
            Some(limits) => match self.config.with_limits(&self.name, limits.as_bytes()) {
                Ok((config, _)) => {
                    self.limiter.replace_policy_as(config.policy, version);
                    tracing::info!("applied version {version} of the shared limits");
                    None
                }
                Err(report) => {
                    tracing::error!("cannot apply version {version} of the shared limits: {report}");
                    Some(report)
                }
            },
            // There are no shared limits, and there were none before.
            None if version == self.publish.borrow().version => return,
            None => {
                let policy = self.config.policy.clone();
                match version {
                    0 => self.limiter.replace_policy(policy),
                    _ => self.limiter.replace_policy_as(policy, version),
                };
                tracing::info!("the shared limits were removed: applied the limits of this node's config");
                None
            }
        };
        self.publish.send_replace(Followed { version, error });
    }
}
