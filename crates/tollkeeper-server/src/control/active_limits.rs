//! Which limits are in force: those of the file, or those that were PUT in their place, here or for all nodes of the
//! store. A file always supplies everything else.

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tollkeeper::config::{Config, LimitShape, Report};
use tollkeeper::store::redis::SharedLimits;
use tollkeeper::{Failure, Limiter};
use tollkeeper_tower::{InForce as Reading, Settings};

/// The limits in force and where they come from: what `GET /v1/limits` says.
#[derive(Clone, Debug, Serialize)]
pub struct InForce {
    /// Counts policies, from 1.
    pub version: u64,
    /// Where they come from.
    pub source: Source,
    /// When they came into force, in seconds since the epoch.
    pub loaded_at: u64,
    /// Why the last attempt to replace them failed.
    pub error: Option<String>,
    /// Whether a file has other limits than these.
    pub shadowed: bool,
    /// Of limits that were PUT: whether they outlive this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// The limits, as they are written in a config.
    pub limits: Vec<LimitShape>,
}

/// Where limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A config file.
    File,
    /// They were PUT.
    Api,
    /// The policy of a server that was given none.
    Builtin,
}

/// What became of limits that were to be in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// They are.
    InForce(u64),
    /// Others that were PUT are; the rest of the file holds.
    Shadowed(u64),
}

/// Why limits cannot be replaced.
#[derive(Debug)]
pub enum CannotReplace {
    /// Another version is in force than the caller has seen.
    Version(u64),
    /// They make no sense.
    Invalid(Report),
    /// The store that keeps them for all nodes did not answer.
    Failed(Failure),
}

/// Keeps track of what is in force, and puts it there.
#[derive(Debug)]
pub struct Laws(RwLock<Both>);

#[derive(Debug)]
struct Both {
    /// The config as the file says it, and whose it is.
    file: Config,
    origin: Source,
    put: Option<Put>,
    /// The version of what all nodes share that was seen last; 0 if there was none.
    shared: u64,
    shown: Arc<InForce>,
    /// How requests are read changes together with the limits, which need what is read.
    reading: Arc<Reading>,
}

/// What was PUT.
#[derive(Clone, Debug)]
struct Put {
    /// As it came: it is read again when the rest of the file changes.
    text: Arc<[u8]>,
    /// Its version in the store, if all nodes share it.
    version: Option<u64>,
}

/// Limits that may be PUT: they make sense, and whoever sends them has seen what is in force.
#[derive(Debug)]
pub struct Accepted {
    /// The limits; without any, those of the file hold again.
    pub limits: Option<Vec<LimitShape>>,
    /// The version of what all nodes share that they are to replace.
    pub replaces: u64,
}

/// What messages call the limits that were PUT.
const PUT: &str = "limits";

impl Laws {
    /// The limits of this config, which the limiter was made with.
    pub fn new(file: Config, origin: Source, version: u64, reading: Arc<Reading>) -> Laws {
        let shown = Arc::new(InForce {
            version,
            source: origin,
            loaded_at: now(),
            error: None,
            shadowed: false,
            persistent: None,
            limits: file.limits.clone(),
        });
        Laws(RwLock::new(Both { file, origin, put: None, shared: 0, shown, reading }))
    }

    /// What is in force.
    pub fn shown(&self) -> Arc<InForce> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner).shown)
    }

    /// Takes a file that was read anew.
    pub fn reload(&self, file: Config, limiter: &Limiter) -> Result<Loaded, Report> {
        let mut both = self.write();
        let before = std::mem::replace(&mut both.file, file);
        let put = both.put.clone();
        let version = both.enact(put, limiter).inspect_err(|_| both.file = before)?;
        Ok(if both.shown.shadowed { Loaded::Shadowed(version) } else { Loaded::InForce(version) })
    }

    /// Remembers that the file could not be read. What is in force stays so.
    pub fn reload_failed(&self, error: String) {
        let mut both = self.write();
        both.shown = Arc::new(InForce { error: Some(error), ..InForce::clone(&both.shown) });
    }

    /// Puts these limits (`{"limits":[…]}`) in the place of the file's, or goes back to those of the file,
    /// if the caller has seen what is in force now.
    pub fn replace(
        &self,
        put: Option<Arc<[u8]>>,
        has_seen: impl Fn(u64) -> bool,
        limiter: &Limiter,
    ) -> Result<Arc<InForce>, CannotReplace> {
        let mut both = self.write();
        if !has_seen(both.shown.version) {
            return Err(CannotReplace::Version(both.shown.version));
        }
        if put.is_some() || both.put.is_some() {
            let put = put.map(|text| Put { text, version: None });
            both.enact(put, limiter).map_err(CannotReplace::Invalid)?;
        }
        Ok(Arc::clone(&both.shown))
    }

    /// Looks whether limits may be PUT for all nodes.
    pub fn accept(
        &self,
        put: Option<&[u8]>,
        has_seen: impl Fn(u64) -> bool,
    ) -> Result<Accepted, CannotReplace> {
        let both = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if !has_seen(both.shown.version) {
            return Err(CannotReplace::Version(both.shown.version));
        }
        let read = put.map(|text| both.file.with_limits(PUT, text)).transpose();
        let limits = read.map_err(CannotReplace::Invalid)?.map(|(config, _)| config.limits);
        Ok(Accepted { limits, replaces: both.shared })
    }

    /// Goes by what all nodes share. Limits that this node cannot read change nothing.
    pub fn follow(&self, shared: SharedLimits, limiter: &Limiter) -> Result<Arc<InForce>, Report> {
        let mut both = self.write();
        if std::mem::replace(&mut both.shared, shared.version) == shared.version {
            return Ok(Arc::clone(&both.shown));
        }
        let put =
            shared.limits.map(|text| Put { text: text.into_bytes().into(), version: Some(shared.version) });
        if put.is_some() || both.put.is_some() {
            let enacted = both.enact(put, limiter);
            enacted.inspect_err(|report| {
                both.shown =
                    Arc::new(InForce { error: Some(report.to_string()), ..InForce::clone(&both.shown) });
            })?;
        }
        Ok(Arc::clone(&both.shown))
    }

    fn write(&self) -> RwLockWriteGuard<'_, Both> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Both {
    /// Puts the file with these limits in force: every request that starts later meets them, and all
    /// counters are kept.
    fn enact(&mut self, put: Option<Put>, limiter: &Limiter) -> Result<u64, Report> {
        let config = match &put {
            None => self.file.clone(),
            Some(put) => self.file.with_limits(PUT, &put.text)?.0,
        };
        let policy =
            self.reading.replace(Settings::of(&config), || match put.as_ref().and_then(|put| put.version) {
                Some(version) => limiter.replace_policy_as(config.policy, version),
                None => limiter.replace_policy(config.policy),
            });
        let version = policy.version();
        self.shown = Arc::new(InForce {
            version,
            source: if put.is_some() { Source::Api } else { self.origin },
            loaded_at: now(),
            error: None,
            shadowed: config.limits != self.file.limits,
            persistent: put.as_ref().map(|put| put.version.is_some()),
            limits: config.limits,
        });
        self.put = put;
        Ok(version)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
