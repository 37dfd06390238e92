//! Loading the config anew, when the file changes or somebody says so. A broken file changes nothing.

use std::path::Path;

use tokio::sync::mpsc;
use tollkeeper::config::{Config, Watch};

use crate::in_force::Loaded;
use crate::serve::log_warnings;
use crate::service::Service;

/// Tells of changes of files, for as long as it is kept.
#[derive(Debug)]
pub struct Changes {
    tell: mpsc::Sender<()>,
    told: mpsc::Receiver<()>,
    watches: Vec<Watch>,
}

impl Changes {
    /// Begins to watch: before the file is read for the first time, so that no change is missed.
    pub fn of(file: Option<&Path>) -> Changes {
        // One change that waits stands for all that come before it is looked at.
        let (tell, told) = mpsc::channel(1);
        let mut changes = Changes { tell, told, watches: Vec::new() };
        if let Some(file) = file {
            changes.watch(file);
        }
        changes
    }

    /// Watches this file, too.
    pub fn watch(&mut self, file: &Path) {
        let tell = self.tell.clone();
        let changed = move || {
            let _ = tell.try_send(());
        };
        match Watch::new(file, changed) {
            Ok(watch) => self.watches.push(watch),
            Err(error) => {
                tracing::warn!("{} is not watched, send SIGHUP after a change: {error}", file.display());
            }
        }
    }

    /// The next change; never, if nothing is watched.
    pub async fn next(&mut self) {
        self.told.recv().await;
    }
}

/// Reloads once.
pub fn now(file: &Path, service: &Service) {
    let failed = |error: String| {
        service.reload_failed(error.clone());
        // Whoever reads this finds it in `/v1/limits`, too.
        tracing::error!("the config was not loaded, and what was in force stays so: {error}");
    };
    let (config, report) = match Config::read(file) {
        Ok(read) => read,
        Err(error) => return failed(error.to_string()),
    };
    log_warnings(&report);
    match service.reload(config) {
        Ok(Loaded::InForce(version)) => {
            tracing::info!("version {version} of the limits is in force, from {}", file.display());
        }
        Ok(Loaded::Shadowed(version)) => tracing::warn!(
            "the limits of {} are not applied: others were PUT, and are in force as version {version} \
             (DELETE /v1/limits goes back to the file); the rest of the file holds",
            file.display()
        ),
        Err(error) => failed(format!("{error:#}")),
    }
}
