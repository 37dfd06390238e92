//! Limits that all nodes share: one sets them, the others follow.
//!
//! They are one key, `<prefix>:1:policy`, without an expiry: so they outlive every node, live in one slot of
//! a cluster, and are written by one script that compares the version first. Nodes look at the version
//! twice a second, some twenty bytes, and read the rest when it is another. That needs no second kind of
//! connection, and a node that was cut off is right again with its next look; a message that is published
//! reaches only those who listen.

use std::fmt;
use std::time::Duration;

use redis::{Cmd, Value};

use super::script;
use super::store::RedisStore;
use super::wire::{self, Call, Malformed};
use crate::config::LimitShape;
use crate::store::remote::{Failure, FailureKind, RemoteResult};
use crate::store::resilient::within_deadline;

/// How often a node looks.
const LOOKS: Duration = Duration::from_millis(500);
/// How long a call may take: whoever sets limits can wait, but not for ever.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most digits of a version, which is below 2^53, and the newline behind it.
const HEAD: usize = 17;

/// The limits that all nodes with one store and one prefix share. Cheap to clone.
///
/// See [`Limiter::follow`](crate::Limiter::follow) for an example.
#[derive(Clone, Debug)]
pub struct SharedPolicy {
    store: RedisStore,
    name: String,
}

/// What the nodes share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedLimits {
    /// Grows with every change; 0 if there never was one, or the store has lost it.
    pub version: u64,
    /// The limits as JSON, to be read by [`Config::with_limits`](crate::config::Config::with_limits). Without
    /// any, each node goes by its own.
    pub limits: Option<String>,
}

/// Why nothing was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotSet {
    /// Another came first.
    Conflict {
        /// The version that is there.
        version: u64,
    },
    /// The store did not answer. Unless it says that there is no connection, it may have been set or not.
    Failed(Failure),
}

impl SharedPolicy {
    /// What the nodes of this store share.
    pub fn of(store: &RedisStore) -> SharedPolicy {
        SharedPolicy { store: store.clone(), name: store.names().shared("policy") }
    }

    /// The key that holds it.
    pub fn key(&self) -> &str {
        &self.name
    }

    /// Sets the limits for all nodes, and gives their version. With `expected`, only if that version is there:
    /// of two who saw the same, one wins.
    pub async fn set(&self, limits: &[LimitShape], expected: Option<u64>) -> Result<u64, NotSet> {
        let limits = serde_json::json!({ "limits": limits });
        self.write(limits.to_string().into_bytes(), expected).await
    }

    /// Takes the limits back, so that each node goes by its own. The version counts on.
    pub async fn clear(&self, expected: Option<u64>) -> Result<u64, NotSet> {
        self.write(Vec::new(), expected).await
    }

    /// What is there now.
    pub async fn get(&self) -> RemoteResult<SharedLimits> {
        self.parse(&self.ask(redis::cmd("GET").arg(&self.name)).await?)
    }

    /// What is there now, and then every change.
    pub fn watch(&self) -> PolicyWatch {
        PolicyWatch { policy: self.clone(), seen: None, failing: false }
    }

    async fn version(&self) -> RemoteResult<u64> {
        let head = self.ask(redis::cmd("GETRANGE").arg(&self.name).arg(0).arg(HEAD - 1)).await?;
        Ok(self.parse(&head)?.version)
    }

    async fn write(&self, limits: Vec<u8>, expected: Option<u64>) -> Result<u64, NotSet> {
        let expected = expected.map_or_else(String::new, |version| version.to_string());
        let answer = within_deadline(PATIENCE, async {
            let session = self.store.session()?;
            let keys = vec![self.name.clone()];
            let mut call = Call::new(script::policy(), session.nonce(), keys, expected.as_bytes());
            call.args.push(limits);
            session.run(&call, written).await
        });
        let (set, version) = answer.await?;
        if set { Ok(version) } else { Err(NotSet::Conflict { version }) }
    }

    async fn ask(&self, command: &Cmd) -> RemoteResult<Vec<u8>> {
        let text = |reply| match reply {
            Value::BulkString(bytes) => Ok(bytes),
            Value::Nil => Ok(Vec::new()),
            _ => Err(Malformed),
        };
        let answer = async { self.store.session()?.command(&self.name, command, text).await };
        within_deadline(PATIENCE, answer).await
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
        limits.ok_or_else(|| self.nonsense())
    }

    fn nonsense(&self) -> Failure {
        let message = format!("`{}` holds something else than limits: set or delete it", self.name);
        Failure::new(FailureKind::Nonsense, message)
    }
}

/// Tells of every change of what the nodes share.
#[derive(Debug)]
pub struct PolicyWatch {
    policy: SharedPolicy,
    seen: Option<u64>,
    failing: bool,
}

impl PolicyWatch {
    /// What is there, as soon as the store says so, and from then on whatever is another: within a second of
    /// the change, if the store answers, and else as soon as it does. May be dropped while it waits.
    pub async fn next(&mut self) -> SharedLimits {
        loop {
            match self.look().await {
                Ok(Some(shared)) => return shared,
                Ok(None) => self.failing = false,
                // LimitReply once, and not twice a second.
                Err(failure) if !std::mem::replace(&mut self.failing, true) => {
                    tracing::warn!("the limits that all nodes share cannot be read: {failure}");
                }
                Err(_) => {}
            }
            tokio::time::sleep(LOOKS).await;
        }
    }

    async fn look(&mut self) -> RemoteResult<Option<SharedLimits>> {
        if self.seen == Some(self.policy.version().await?) {
            return Ok(None);
        }
        let shared = self.policy.get().await?;
        (self.seen, self.failing) = (Some(shared.version), false);
        Ok(Some(shared))
    }
}

/// Whether limits were set, and the version that is there.
fn written(call: &Call, answer: &wire::Value) -> Result<(bool, u64), Malformed> {
    match call.list(answer)? {
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
                write!(f, "other limits were set meanwhile: version {version} is in force, look at it first")
            }
            NotSet::Failed(failure) => write!(f, "{failure}"),
        }
    }
}

impl std::error::Error for NotSet {}
