//! Which limits are in force: those of the file, or those that were PUT in their place. A file always
//! supplies everything else.

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tollkeeper::Limiter;
use tollkeeper::config::{Config, LimitShape, Report};
use tollkeeper_tower::{InForce as Reading, Settings};

use crate::veil::Veil;

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
    /// The facts whose values are not shown.
    #[serde(skip)]
    pub veil: Veil,
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
}

/// Keeps track of what is in force, and puts it there.
#[derive(Debug)]
pub struct Laws(RwLock<Both>);

#[derive(Debug)]
struct Both {
    /// The config as the file says it, and whose it is.
    file: Config,
    origin: Source,
    /// What was PUT, as it came: it is read again when the rest of the file changes.
    put: Option<Arc<[u8]>>,
    shown: Arc<InForce>,
    /// How requests are read changes together with the limits, which need what is read.
    reading: Arc<Reading>,
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
            veil: Veil::of(&file.http),
        });
        Laws(RwLock::new(Both { file, origin, put: None, shown, reading }))
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
            both.enact(put, limiter).map_err(CannotReplace::Invalid)?;
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
    fn enact(&mut self, put: Option<Arc<[u8]>>, limiter: &Limiter) -> Result<u64, Report> {
        let config = match &put {
            None => self.file.clone(),
            Some(text) => self.file.with_limits(PUT, text)?.0,
        };
        let version = self.reading.replace(limiter, Settings::of(&config), config.policy).version();
        self.shown = Arc::new(InForce {
            version,
            source: if put.is_some() { Source::Api } else { self.origin },
            loaded_at: now(),
            error: None,
            shadowed: config.limits != self.file.limits,
            persistent: put.is_some().then_some(false),
            limits: config.limits,
            veil: Veil::of(&self.file.http),
        });
        self.put = put;
        Ok(version)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
