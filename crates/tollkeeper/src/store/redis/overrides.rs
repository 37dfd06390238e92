//! Stores the overrides that all nodes share in one Redis hash: one node sets them, the others follow.
//!
//! The hash, `<prefix>:1:overrides`, has no expiry, so overrides outlive every node. Nodes poll its version four times
//! a second, and read only what changed: the hash also maps each of the last 10,000 versions to the override that it
//! changed. A node that is further behind, or finds a gap, reads all of it. Overrides that have ended are removed when new
//! ones are set. One hash is in one slot of a cluster.

use std::time::Duration;

use redis::{Cmd, Value};
use tollkeeper_core::policy::Override;

use super::script;
use super::store::RedisStore;
use super::wire::{self, Call, Malformed};
use crate::limiter::Limiter;
use crate::limiter::overrides::{KeyOverride, MAX_OVERRIDES, from_line, to_line};
use crate::store::remote::{Failure, FailureKind, RemoteResult};
use crate::store::resilient::within_deadline;

/// The deadline of a call. Longer than that of a decision, because no request waits for it.
const DEADLINE: Duration = Duration::from_secs(2);
/// How many versions the hash remembers.
const REMEMBERED: u64 = 10_000;
/// How many fields are read in one call.
const FIELDS: usize = 1_000;

/// The overrides that all nodes with one store and one prefix share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SharedOverrides {
    store: RedisStore,
    name: String,
}

/// Why an override was not set for all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotShared {
    /// There are [`MAX_OVERRIDES`] already.
    Full,
    /// The store did not answer. Unless there was no connection, the override may have been set or not.
    Failed(Failure),
}

impl From<Failure> for NotShared {
    fn from(failure: Failure) -> NotShared {
        NotShared::Failed(failure)
    }
}

/// What has changed since a node looked last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These are all overrides.
    All(Vec<KeyOverride>),
    /// Limit, key, and what is granted now; `None` for a removal.
    Some(Vec<(String, String, Option<Override>)>),
}

impl Changed {
    /// Applies the change to a limiter, in one step.
    pub fn apply(self, limiter: &Limiter) {
        match self {
            Changed::All(all) => limiter.replace_overrides(all),
            Changed::Some(changes) => limiter.apply_overrides(changes),
        }
    }
}

impl SharedOverrides {
    /// The shared overrides of all nodes that use this store with this prefix.
    pub fn of(store: &RedisStore) -> SharedOverrides {
        SharedOverrides { store: store.clone(), name: store.names().shared("overrides") }
    }

    /// Sets an override for all nodes. [`Limiter::check_override`] says whether it is valid.
    pub async fn set(&self, wanted: &KeyOverride) -> Result<(), NotShared> {
        let id = format!("{}:{}", wanted.limit, wanted.key);
        match self.write(&id, to_line(&wanted.granted)).await? {
            2 => Err(NotShared::Full),
            _ => Ok(()),
        }
    }

    /// Removes an override for all nodes; false if there was none.
    pub async fn remove(&self, limit: &str, key: &str) -> RemoteResult<bool> {
        Ok(self.write(&format!("{limit}:{key}"), String::new()).await? == 1)
    }

    /// A stream of all overrides and then every change.
    pub fn watch(&self) -> OverrideWatch {
        OverrideWatch { shared: self.clone(), seen: None, failing: false }
    }

    async fn write(&self, id: &str, line: String) -> RemoteResult<u64> {
        within_deadline(self.store.clock(), DEADLINE, async {
            let session = self.store.session()?;
            let keys = vec![self.name.clone()];
            let most = MAX_OVERRIDES.to_string();
            let mut call = Call::new(script::overrides(), session.nonce(), keys, most.as_bytes());
            call.args.extend([id.as_bytes().to_vec(), line.into_bytes()]);
            session.run(&call, written).await
        })
        .await
    }

    async fn version(&self) -> RemoteResult<u64> {
        let read = |reply| match reply {
            Value::Nil => Ok(0),
            reply => number(&reply).ok_or(Malformed),
        };
        let command = redis::cmd("HGET").arg(&self.name).arg("v").take();
        self.read(&command, read).await
    }

    /// All overrides and the version, in one step.
    async fn all(&self) -> RemoteResult<(u64, Vec<KeyOverride>)> {
        let fields = self.read(redis::cmd("HGETALL").arg(&self.name), pairs).await?;
        let mut version = 0;
        let mut all = Vec::new();
        for (field, value) in fields {
            if field == "v" {
                version = value.parse().map_err(|_| self.not_overrides())?;
            } else if let Some(id) = field.strip_prefix("o:") {
                let (limit, key) = id.split_once(':').ok_or_else(|| self.not_overrides())?;
                // An override of a newer version of Tollkeeper is left out, like a limit that is not known here.
                let Some(granted) = from_line(&value) else { continue };
                all.push(KeyOverride { limit: limit.to_owned(), key: key.to_owned(), granted });
            }
        }
        Ok((version, all))
    }

    /// What the versions after `seen`, up to `now`, have changed; `None` if that is not known any more.
    async fn since(
        &self,
        seen: u64,
        now: u64,
    ) -> RemoteResult<Option<Vec<(String, String, Option<Override>)>>> {
        if now < seen || now - seen >= REMEMBERED {
            return Ok(None);
        }
        let versions: Vec<String> = (seen + 1..=now).map(|version| format!("c:{version}")).collect();
        let Some(mut ids) = self.fields(&versions).await?.into_iter().collect::<Option<Vec<String>>>() else {
            return Ok(None);
        };
        ids.sort_unstable();
        ids.dedup();
        let names: Vec<String> = ids.iter().map(|id| format!("o:{id}")).collect();
        let mut changes = Vec::with_capacity(ids.len());
        for (id, line) in ids.into_iter().zip(self.fields(&names).await?) {
            let (limit, key) = id.split_once(':').ok_or_else(|| self.not_overrides())?;
            changes.push((limit.to_owned(), key.to_owned(), line.as_deref().and_then(from_line)));
        }
        Ok(Some(changes))
    }

    /// The values of these fields.
    async fn fields(&self, names: &[String]) -> RemoteResult<Vec<Option<String>>> {
        let mut values = Vec::with_capacity(names.len());
        for some in names.chunks(FIELDS) {
            let mut command = redis::cmd("HMGET");
            command.arg(&self.name).arg(some);
            values.extend(self.read(&command, texts).await?);
        }
        Ok(values)
    }

    async fn read<T>(&self, command: &Cmd, parse: fn(Value) -> Result<T, Malformed>) -> RemoteResult<T> {
        let call = async { self.store.session()?.command(&self.name, command, parse).await };
        within_deadline(self.store.clock(), DEADLINE, call).await
    }

    fn not_overrides(&self) -> Failure {
        let message = format!("the key `{}` does not contain overrides (delete it)", self.name);
        Failure::new(FailureKind::Protocol, message)
    }
}

/// A stream of changes to the shared overrides: see [`SharedOverrides::watch`].
#[derive(Debug)]
pub struct OverrideWatch {
    shared: SharedOverrides,
    seen: Option<u64>,
    failing: bool,
}

impl OverrideWatch {
    /// How often a node polls the version.
    pub const INTERVAL: Duration = Duration::from_millis(250);

    /// The first call returns all overrides as soon as the store answers. Later calls wait for the next change, which
    /// is noticed within a second, or as soon as the store answers again. Cancel safe.
    pub async fn next(&mut self) -> Changed {
        loop {
            if let Some(changed) = self.poll().await {
                return changed;
            }
            tokio::time::sleep(OverrideWatch::INTERVAL).await;
        }
    }

    /// What has changed since the last call; `None` if nothing has, or if the store does not answer. Cancel safe.
    pub async fn poll(&mut self) -> Option<Changed> {
        match self.read().await {
            Ok(changed) => {
                self.failing = false;
                changed
            }
            // Logged once, not with every poll.
            Err(failure) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(
                        "cannot read the shared overrides, so the last known ones stay in force: {failure}"
                    );
                }
                None
            }
        }
    }

    async fn read(&mut self) -> RemoteResult<Option<Changed>> {
        let now = self.shared.version().await?;
        if self.seen == Some(now) {
            return Ok(None);
        }
        let some = match self.seen {
            Some(seen) => self.shared.since(seen, now).await?,
            None => None,
        };
        if let Some(changes) = some {
            self.seen = Some(now);
            return Ok(Some(Changed::Some(changes)));
        }
        let (version, all) = self.shared.all().await?;
        self.seen = Some(version);
        Ok(Some(Changed::All(all)))
    }
}

/// Parses the reply of `overrides.lua`: 0, 1 or 2.
fn written(call: &Call, reply: &wire::Value) -> Result<u64, Malformed> {
    match call.list(reply)? {
        [wire::Value::Number(done @ 0..=2), wire::Value::Number(_)] => {
            u64::try_from(*done).map_err(|_| Malformed)
        }
        _ => Err(Malformed),
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn text(value: Value) -> Result<Option<String>, Malformed> {
    match value {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) => String::from_utf8(bytes).map(Some).map_err(|_| Malformed),
        _ => Err(Malformed),
    }
}

fn texts(reply: Value) -> Result<Vec<Option<String>>, Malformed> {
    let Value::Array(values) = reply else { return Err(Malformed) };
    values.into_iter().map(text).collect()
}

/// The fields and values of a hash, as RESP2 or RESP3 returns them.
fn pairs(reply: Value) -> Result<Vec<(String, String)>, Malformed> {
    let both = |field, value| match (text(field)?, text(value)?) {
        (Some(field), Some(value)) => Ok((field, value)),
        _ => Err(Malformed),
    };
    match reply {
        Value::Map(pairs) => pairs.into_iter().map(|(field, value)| both(field, value)).collect(),
        Value::Array(values) => {
            let mut values = values.into_iter();
            std::iter::from_fn(|| Some(both(values.next()?, values.next()?))).collect()
        }
        _ => Err(Malformed),
    }
}
