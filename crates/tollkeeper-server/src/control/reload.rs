//! Puts a config in force that was read again, because its file or a file that it names has changed, or because of a
//! SIGHUP. A broken file changes nothing.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::mpsc;
use tollkeeper::config::{Config, Follow, ReadError, Reload, Watch};

use crate::command::serve::log_warnings;
use crate::control::active_limits::Loaded;
use crate::service::Service;

/// Follows the config file for as long as it is kept. All of it happens on a thread that is not the runtime's.
pub fn follow(file: &Path, config: &Config, service: Arc<Service>) -> std::io::Result<Follow> {
    let path = file.to_owned();
    let runtime = tokio::runtime::Handle::current();
    Follow::new(file, config, move |reload| {
        let _runtime = runtime.enter();
        apply(&path, reload, &service)
    })
}

/// Puts a config in force. Returns whether it is.
fn apply(file: &Path, reload: Result<Reload, ReadError>, service: &Service) -> bool {
    let failed = |error: String| {
        // It is in `/v1/limits`, too.
        tracing::error!("the config was not loaded, and what was in force stays so: {error}");
        service.reload_failed(error);
        false
    };
    let Reload { config, report, attempt } = match reload {
        Ok(reload) => reload,
        Err(error) => return failed(error.to_string()),
    };
    if attempt == 1 {
        log_warnings(&report);
    }
    match service.reload(config) {
        Ok(Loaded::InForce(version)) => {
            tracing::info!("version {version} of the limits is in force, from {}", file.display());
        }
        Ok(Loaded::Shadowed(version)) => tracing::warn!(
            "the limits of {} are not applied: others were PUT, and are in force as version {version} \
             (DELETE /v1/limits goes back to the file); the rest of the file holds",
            file.display()
        ),
        // It has been reported, and is tried again and again.
        Err(_) if attempt > 1 => return false,
        Err(error) => return failed(format!("{error:#}")),
    }
    true
}

/// Tells of changes of files that the config names, for as long as it is kept.
#[derive(Debug)]
pub struct Changes {
    tell: mpsc::Sender<()>,
    told: mpsc::Receiver<()>,
    watches: Vec<Watch>,
}

impl Changes {
    /// Watches these files.
    pub fn of<'f>(files: impl IntoIterator<Item = &'f Path>) -> Changes {
        // One change that waits stands for all that come before it is looked at.
        let (tell, told) = mpsc::channel(1);
        let mut changes = Changes { tell, told, watches: Vec::new() };
        files.into_iter().for_each(|file| changes.watch(file));
        changes
    }

    fn watch(&mut self, file: &Path) {
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

    /// The next change; never, if no file is watched.
    pub async fn next(&mut self) {
        self.told.recv().await;
    }
}
