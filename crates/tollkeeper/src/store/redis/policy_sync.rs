//! A limiter that goes by the limits which all nodes share.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::policy::{SharedLimits, SharedPolicy};
use crate::config::{Config, Report};
use crate::limiter::Limiter;

/// How long a limiter that begins to follow waits for the store.
const BEGINNING: Duration = Duration::from_secs(1);

/// Keeps a limiter at the limits that all nodes share, until it is dropped.
#[derive(Debug)]
pub struct Following {
    state: watch::Receiver<Followed>,
    task: JoinHandle<()>,
}

/// How far a limiter has come in following.
#[derive(Clone, Debug, Default)]
pub struct Followed {
    /// The version that was last seen; 0 if there was none.
    pub version: u64,
    /// Why its limits are not in force: what was in force before still is.
    pub error: Option<Report>,
}

impl Limiter {
    /// Goes by the limits that all nodes share, as long as there are any, and by those of the config when
    /// there are none. Everything else is as the config says. A change is followed within a second; limits
    /// that this node cannot read, because a newer one has set them, change nothing.
    ///
    /// Waits a second at most for the first look. While the store is away, what was in force stays so.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::{path::Path, sync::Arc};
    /// use tollkeeper::config::{Config, StoreUrl};
    /// use tollkeeper::store::redis::SharedPolicy;
    /// use tollkeeper::{Limiter, Resilient};
    ///
    /// let (config, _) = Config::read(Path::new("tollkeeper.yaml"))?;
    /// let StoreUrl::Redis(url) = &config.store else { return Err("nothing to share in memory".into()) };
    /// let store = Resilient::open(url, &config.redis)?;
    /// let shared = SharedPolicy::of(store.remote());
    /// let limiter = Limiter::with_store(config.policy.clone(), Arc::new(store));
    /// let _following = limiter.follow(&shared, config.clone()).await;
    ///
    /// // On any node: other limits for all of them, unless somebody else was faster.
    /// let seen = shared.get().await?.version;
    /// let text = br#"{ "limits": [{ "name": "per-ip", "by": "ip", "rate": "500/min" }] }"#;
    /// let (changed, _) = config.with_limits("the new limits", text)?;
    /// let version = shared.set(&changed.limits, Some(seen)).await?;
    /// // And back to what each node's file says.
    /// shared.clear(Some(version)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn follow(&self, shared: &SharedPolicy, config: Config) -> Following {
        let mut changes = shared.watch();
        let (publish, mut state) = watch::channel(Followed::default());
        let follower = Follower { limiter: self.clone(), config, name: shared.key().to_owned(), publish };
        if let Ok(first) = tokio::time::timeout(BEGINNING, changes.next()).await {
            follower.take(&first);
        }
        state.mark_unchanged();
        let task = tokio::spawn(async move {
            loop {
                follower.take(&changes.next().await);
            }
        });
        Following { state, task }
    }
}

impl Following {
    /// How far it has come.
    pub fn state(&self) -> Followed {
        self.state.borrow().clone()
    }

    /// Waits until something else was shared, and gives how far it has come then.
    pub async fn changed(&mut self) -> Followed {
        // The other end goes only with this one.
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
    fn take(&self, shared: &SharedLimits) {
        let version = shared.version;
        let error = match &shared.limits {
            Some(limits) => match self.config.with_limits(&self.name, limits.as_bytes()) {
                Ok((config, _)) => {
                    self.limiter.replace_policy_as(config.policy, version);
                    tracing::info!("version {version} of the limits is in force, set for all nodes");
                    None
                }
                Err(report) => {
                    tracing::error!("version {version} of the limits stays out of force: {report}");
                    Some(report)
                }
            },
            // Nobody has set any, and nobody had.
            None if version == self.publish.borrow().version => return,
            None => {
                let policy = self.config.policy.clone();
                match version {
                    0 => self.limiter.replace_policy(policy),
                    _ => self.limiter.replace_policy_as(policy, version),
                };
                tracing::info!("the nodes share no limits any more: this one's own are in force");
                None
            }
        };
        self.publish.send_replace(Followed { version, error });
    }
}
