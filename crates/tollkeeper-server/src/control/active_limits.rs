//! The active limits: those of the config file, or those that `PUT /v1/limits` replaced them with, on this node or for
//! all nodes of a remote store. All other settings always come from the file.

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tollkeeper::config::{Config, EffectiveLimit, Report};
use tollkeeper::store::Failure;
use tollkeeper::store::redis::SharedLimits;
use tollkeeper::{Limiter, Policy};
use tollkeeper_engine::api::active_limits::{ActiveLimits, LimitSource};
use tollkeeper_tower::{ActiveSettings, Settings};

/// What a replacement of the limits would change: the body of `PUT /v1/limits?dry_run=true`.
#[derive(Clone, Debug, Serialize)]
pub struct DryRun {
    valid: bool,
    warnings: Vec<WarningShape>,
    changes: Vec<LimitChange>,
}

#[derive(Clone, Debug, Serialize)]
struct WarningShape {
    line: usize,
    column: usize,
    code: Option<&'static str>,
    message: String,
    help: Option<String>,
}

/// One limit that would change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct LimitChange {
    name: String,
    kind: ChangeKind,
    /// Whether keys that the limit has counted go on with their counts.
    keeps_counts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ChangeKind {
    Added,
    Removed,
    Changed,
}

/// The result of loading a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// Its limits are active, as this version.
    Active(u64),
    /// Limits set through the API stay active, as this version; the rest of the file was applied.
    Shadowed(u64),
}

/// Why limits cannot be replaced.
#[derive(Debug)]
pub enum CannotReplace {
    /// The caller has seen another version than the active one, which is given here.
    Version(u64),
    /// The new limits are invalid.
    Invalid(Report),
    /// The remote store, which keeps the limits for all nodes, did not answer.
    Failed(Failure),
}

/// Combines the config file with limits set through the API, and installs the result in the limiter.
#[derive(Debug)]
pub struct LimitManager(RwLock<Inputs>);

#[derive(Debug)]
struct Inputs {
    /// The config as the file has it, or the built-in one.
    file: Config,
    /// Whether `file` is a file or the built-in config.
    file_source: LimitSource,
    put: Option<Put>,
    /// The last seen version of the limits that all nodes share; 0 if there were none.
    shared_version: u64,
    active: Arc<ActiveLimits>,
    /// The settings for reading requests change together with the limits, which need the facts that are read.
    reading: Arc<ActiveSettings>,
}

/// Limits that were set through the API.
#[derive(Clone, Debug)]
struct Put {
    /// The request body. It is parsed again when the rest of the file changes.
    text: Arc<[u8]>,
    /// Its version in the remote store, if all nodes share it.
    version: Option<u64>,
}

/// A valid replacement of the limits, from a caller that has seen the active version.
#[derive(Debug)]
pub struct Accepted {
    /// The new limits; `None` returns to those of the file.
    pub limits: Option<Vec<EffectiveLimit>>,
    /// The version of the shared limits that they replace.
    pub replaces: u64,
}

/// The name of a request body in error messages, in place of a file name.
const PUT_NAME: &str = "limits";

impl LimitManager {
    /// Starts with the limits of this config, which the limiter was created with.
    pub fn new(
        file: Config,
        file_source: LimitSource,
        version: u64,
        reading: Arc<ActiveSettings>,
    ) -> LimitManager {
        let active = Arc::new(ActiveLimits {
            version,
            source: file_source,
            loaded_at: now(),
            error: None,
            shadowed: false,
            persistent: None,
            limits: file.limits.clone(),
        });
        LimitManager(RwLock::new(Inputs { file, file_source, put: None, shared_version: 0, active, reading }))
    }

    /// The active limits.
    pub fn active(&self) -> Arc<ActiveLimits> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner).active)
    }

    /// Applies a config file that was read again.
    pub fn reload(&self, file: Config, limiter: &Limiter) -> Result<Loaded, Report> {
        let mut inputs = self.write();
        let previous = std::mem::replace(&mut inputs.file, file);
        let put = inputs.put.clone();
        let version = inputs.install(put, limiter).inspect_err(|_| inputs.file = previous)?;
        Ok(if inputs.active.shadowed { Loaded::Shadowed(version) } else { Loaded::Active(version) })
    }

    /// Records that a reload failed. The active limits stay.
    pub fn reload_failed(&self, error: String) {
        let mut inputs = self.write();
        inputs.active = Arc::new(ActiveLimits { error: Some(error), ..ActiveLimits::clone(&inputs.active) });
    }

    /// Replaces the file's limits with these (`{"limits":[…]}`), or with `None` returns to those of the file, on
    /// condition that the caller has seen the active version.
    pub fn replace(
        &self,
        put: Option<Arc<[u8]>>,
        has_seen: impl Fn(u64) -> bool,
        limiter: &Limiter,
    ) -> Result<Arc<ActiveLimits>, CannotReplace> {
        let mut inputs = self.write();
        if !has_seen(inputs.active.version) {
            return Err(CannotReplace::Version(inputs.active.version));
        }
        if put.is_some() || inputs.put.is_some() {
            let put = put.map(|text| Put { text, version: None });
            inputs.install(put, limiter).map_err(CannotReplace::Invalid)?;
        }
        Ok(Arc::clone(&inputs.active))
    }

    /// Checks, without applying anything, whether the limits may be replaced for all nodes.
    pub fn accept(
        &self,
        put: Option<&[u8]>,
        has_seen: impl Fn(u64) -> bool,
    ) -> Result<Accepted, CannotReplace> {
        let inputs = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if !has_seen(inputs.active.version) {
            return Err(CannotReplace::Version(inputs.active.version));
        }
        let read = put.map(|text| inputs.file.with_limits(PUT_NAME, text)).transpose();
        let limits = read.map_err(CannotReplace::Invalid)?.map(|(config, _)| config.limits);
        Ok(Accepted { limits, replaces: inputs.shared_version })
    }

    /// What these limits would change if they replaced the active ones, which `policy` has.
    pub fn dry_run(
        &self,
        put: &[u8],
        has_seen: impl Fn(u64) -> bool,
        policy: &Policy,
    ) -> Result<DryRun, CannotReplace> {
        let inputs = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if !has_seen(inputs.active.version) {
            return Err(CannotReplace::Version(inputs.active.version));
        }
        let (config, report) = inputs.file.with_limits(PUT_NAME, put).map_err(CannotReplace::Invalid)?;
        let warnings = report.problems().iter().map(|problem| {
            let (line, column) = report.position(problem);
            WarningShape {
                line,
                column,
                code: problem.code.map(|code| code.code()),
                message: problem.message.clone(),
                help: problem.help.clone(),
            }
        });
        Ok(DryRun {
            valid: true,
            warnings: warnings.collect(),
            changes: changes((&inputs.active.limits, policy), (&config.limits, &config.policy)),
        })
    }

    /// Applies the limits that all nodes share. If this node cannot parse them, its active limits stay.
    pub fn follow(&self, shared: SharedLimits, limiter: &Limiter) -> Result<Arc<ActiveLimits>, Report> {
        let mut inputs = self.write();
        if std::mem::replace(&mut inputs.shared_version, shared.version) == shared.version {
            return Ok(Arc::clone(&inputs.active));
        }
        let put =
            shared.limits.map(|text| Put { text: text.into_bytes().into(), version: Some(shared.version) });
        if put.is_some() || inputs.put.is_some() {
            let installed = inputs.install(put, limiter);
            installed.inspect_err(|report| {
                inputs.active = Arc::new(ActiveLimits {
                    error: Some(report.to_string()),
                    ..ActiveLimits::clone(&inputs.active)
                });
            })?;
        }
        Ok(Arc::clone(&inputs.active))
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inputs> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inputs {
    /// Installs the file's config with these limits. Every request that starts later is decided by them, and all
    /// counters are kept.
    fn install(&mut self, put: Option<Put>, limiter: &Limiter) -> Result<u64, Report> {
        let config = match &put {
            None => self.file.clone(),
            Some(put) => self.file.with_limits(PUT_NAME, &put.text)?.0,
        };
        let policy =
            self.reading.replace(Settings::of(&config), || match put.as_ref().and_then(|put| put.version) {
                Some(version) => limiter.replace_policy_as(config.policy, version),
                None => limiter.replace_policy(config.policy),
            });
        let version = policy.version();
        self.active = Arc::new(ActiveLimits {
            version,
            source: if put.is_some() { LimitSource::Api } else { self.file_source },
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

/// The limits that differ, in the order of the new policy, then those that are removed.
fn changes(
    (old, old_policy): (&[EffectiveLimit], &Policy),
    (new, new_policy): (&[EffectiveLimit], &Policy),
) -> Vec<LimitChange> {
    let with_name =
        |limits: &[EffectiveLimit], name: &str| limits.iter().position(|limit| limit.name == name);
    let kept = |name: &str| {
        let (_, before) = old_policy.find(name)?;
        let (_, after) = new_policy.find(name)?;
        Some(after.keeps_counts_of(before))
    };
    let changed = new.iter().filter_map(|limit| {
        let kind = match with_name(old, &limit.name) {
            None => ChangeKind::Added,
            Some(index) if old[index] != *limit => ChangeKind::Changed,
            Some(_) => return None,
        };
        let keeps_counts = kept(&limit.name).unwrap_or(false);
        Some(LimitChange { name: limit.name.clone(), kind, keeps_counts })
    });
    let removed = old.iter().filter(|limit| with_name(new, &limit.name).is_none());
    let removed = removed.map(|limit| LimitChange {
        name: limit.name.clone(),
        kind: ChangeKind::Removed,
        keeps_counts: false,
    });
    changed.chain(removed).collect()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
