//! Stores the limits that all nodes share in one Redis key: one node sets them, the others follow.
//!
//! The key, `<prefix>:1:policy`, has no expiry, so the limits outlive every node. One key is in one slot of a
//! cluster, so one script can compare the version and write. Nodes poll the version twice a second, about twenty
//! bytes, and read the limits when it has changed. Compared with publish/subscribe, polling needs no second kind of
//! connection, and a node that was cut off is up to date again with its next poll: a published message would have
//! been lost.

use std::fmt;
use std::time::Duration;

use redis::{Cmd, Value};

use super::script;
use super::store::RedisStore;
use super::wire::{self, Call, Malformed};
use crate::config::EffectiveLimit;
use crate::store::remote::{Failure, FailureKind, RemoteResult};
use crate::store::resilient::within_deadline;

/// How often a node polls the version.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The deadline of a call. Longer than that of a decision, because no request waits for it.
const DEADLINE: Duration = Duration::from_secs(2);
/// The longest header in bytes: 16 digits of a version, which is below 2^53, and a newline.
const MAX_HEADER: usize = 17;

/// The limits that all nodes with one store and one prefix share. Cheap to clone.
///
/// See [`Limiter::follow`](crate::Limiter::follow) for an example.
#[derive(Clone, Debug)]
pub struct SharedPolicy {
    store: RedisStore,
    name: String,
}

/// The shared limits, and their version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedLimits {
    /// Grows with every change; 0 if limits were never set, or the store has lost them.
    pub version: u64,
    /// The limits as JSON, for [`Config::with_limits`](crate::config::Config::with_limits). If `None`, each node
    /// applies the limits of its own config.
    pub limits: Option<String>,
}

/// Why limits were not set.
#[derive(Clone, PartialEq, Eq)]
pub enum NotSet {
    /// The version is not the expected one: another caller changed the limits first.
    Conflict {
        /// The current version.
        version: u64,
    },
    /// The store did not answer. Unless there was no connection, the limits may have been set or not.
    Failed(Failure),
}

impl SharedPolicy {
    /// The shared limits of all nodes that use this store with this prefix.
    pub fn of(store: &RedisStore) -> SharedPolicy {
        SharedPolicy { store: store.clone(), name: store.names().shared("policy") }
    }

    /// The name of the Redis key, such as `tk:1:policy`.
    pub fn key(&self) -> &str {
        &self.name
    }

    /// Sets the limits for all nodes, and returns their version. With `expected`, only if that is the current
    /// version: of two callers who read the same version, one wins.
    pub async fn set(&self, limits: &[EffectiveLimit], expected: Option<u64>) -> Result<u64, NotSet> {
        let limits = serde_json::json!({ "limits": limits });
        self.write(limits.to_string().into_bytes(), expected).await
    }

    /// Removes the shared limits, so that each node applies its own. The version still grows.
    pub async fn clear(&self, expected: Option<u64>) -> Result<u64, NotSet> {
        self.write(Vec::new(), expected).await
    }

    /// The current limits and their version.
    pub async fn get(&self) -> RemoteResult<SharedLimits> {
        self.parse(&self.read(redis::cmd("GET").arg(&self.name)).await?)
    }

    /// A stream of the current limits and then every change.
    pub fn watch(&self) -> PolicyWatch {
        PolicyWatch { policy: self.clone(), seen: None, failing: false }
    }

    async fn version(&self) -> RemoteResult<u64> {
        let header = self.read(redis::cmd("GETRANGE").arg(&self.name).arg(0).arg(MAX_HEADER - 1)).await?;
        Ok(self.parse(&header)?.version)
    }

    async fn write(&self, limits: Vec<u8>, expected: Option<u64>) -> Result<u64, NotSet> {
        let expected = expected.map_or_else(String::new, |version| version.to_string());
        let call = within_deadline(self.store.clock(), DEADLINE, async {
            let session = self.store.session()?;
            let keys = vec![self.name.clone()];
            let mut call = Call::new(script::policy(), session.nonce(), keys, expected.as_bytes());
            call.args.push(limits);
            session.run(&call, written).await
        });
        let (set, version) = call.await?;
        if set { Ok(version) } else { Err(NotSet::Conflict { version }) }
    }

    async fn read(&self, command: &Cmd) -> RemoteResult<Vec<u8>> {
        let text = |reply| match reply {
            Value::BulkString(bytes) => Ok(bytes),
            Value::Nil => Ok(Vec::new()),
            _ => Err(Malformed),
        };
        let call = async { self.store.session()?.command(&self.name, command, text).await };
        within_deadline(self.store.clock(), DEADLINE, call).await
    }

    fn parse(&self, bytes: &[u8]) -> RemoteResult<SharedLimits> {
        let limits = (|| {
            if bytes.is_empty() {
                return Some(SharedLimits::default());
            }
            let (version, limits) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
            let limits = (!limits.is_empty()).then(|| limits.to_owned());
            Some(SharedLimits { version: version.parse().ok()?, limits })
        })();
        limits.ok_or_else(|| self.not_limits())
    }

    fn not_limits(&self) -> Failure {
        let message = format!("the key `{}` does not contain limits (set or delete it)", self.name);
        Failure::new(FailureKind::Protocol, message)
    }
}

/// A stream of changes to the shared limits: see [`SharedPolicy::watch`].
#[derive(Debug)]
pub struct PolicyWatch {
    policy: SharedPolicy,
    seen: Option<u64>,
    failing: bool,
}

impl PolicyWatch {
    /// The first call returns the current limits as soon as the store answers. Later calls wait for the next change,
    /// which is noticed within a second, or as soon as the store answers again. Cancel safe.
    pub async fn next(&mut self) -> SharedLimits {
        loop {
            match self.poll().await {
                Ok(Some(shared)) => return shared,
                Ok(None) => self.failing = false,
                // Logged once, not twice a second.
                Err(failure) if !std::mem::replace(&mut self.failing, true) => {
                    tracing::warn!("cannot read the shared limits: {failure}");
                }
                Err(_) => {}
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn poll(&mut self) -> RemoteResult<Option<SharedLimits>> {
        if self.seen == Some(self.policy.version().await?) {
            return Ok(None);
        }
        let shared = self.policy.get().await?;
        (self.seen, self.failing) = (Some(shared.version), false);
        Ok(Some(shared))
    }
}

/// Parses the reply of `policy.lua`: whether the limits were set, and the current version.
fn written(call: &Call, reply: &wire::Value) -> Result<(bool, u64), Malformed> {
    match call.list(reply)? {
        [wire::Value::Number(set @ (0 | 1)), wire::Value::Number(version)] => {
            Ok((*set == 1, u64::try_from(*version).map_err(|_| Malformed)?))
        }
        _ => Err(Malformed),
    }
}

impl From<Failure> for NotSet {
    fn from(failure: Failure) -> NotSet {
        NotSet::Failed(failure)
    }
}

impl fmt::Display for NotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotSet::Conflict { version } => {
                write!(f, "the limits were changed meanwhile: read the current version, {version}, and retry")
            }
            NotSet::Failed(failure) => write!(f, "{failure}"),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for NotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for NotSet {}
