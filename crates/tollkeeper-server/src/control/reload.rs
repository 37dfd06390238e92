//! Applies a config that was read again, because its file or a file that it names has changed, or because of a SIGHUP.
//! An invalid file changes nothing.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::mpsc;
use tollkeeper::config::{Config, Follow, ReadError, Reload, Watch};

use crate::control::active_limits::Loaded;
use crate::server::log_warnings;
use crate::service::Service;

/// Watches and reloads the config file until the result is dropped, on a thread outside the runtime.
pub fn follow(file: &Path, config: &Config, service: Arc<Service>) -> std::io::Result<Follow> {
    let path = file.to_owned();
    let runtime = tokio::runtime::Handle::current();
    Follow::new(file, config, move |reload| {
        let _runtime = runtime.enter();
        apply(&path, reload, &service)
    })
}

/// Applies a config. Returns whether it is active now.
fn apply(file: &Path, reload: Result<Reload, ReadError>, service: &Service) -> bool {
    let failed = |error: String| {
        // `GET /v1/limits` shows the error, too.
        tracing::error!("config reload failed, the previous config stays active: {error}");
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
        Ok(Loaded::Active(version)) => {
            tracing::info!("limits version {version} is active, loaded from {}", file.display());
        }
        Ok(Loaded::Shadowed(version)) => tracing::warn!(
            "the limits of {} are not applied, because limits set through the API are active as version {version} \
             (DELETE /v1/limits returns to the file); the rest of the file is applied",
            file.display()
        ),
        // The first attempt reported it; the watcher keeps retrying.
        Err(_) if attempt > 1 => return false,
        Err(error) => return failed(format!("{error:#}")),
    }
    true
}

/// Watches files that the config names, such as certificates, until it is dropped.
#[derive(Debug)]
pub struct Changes {
    sender: mpsc::Sender<()>,
    receiver: mpsc::Receiver<()>,
    watches: Vec<Watch>,
}

impl Changes {
    /// Watches these files.
    pub fn of<'f>(files: impl IntoIterator<Item = &'f Path>) -> Changes {
        // Capacity 1: one pending notification covers all changes until it is received.
        let (sender, receiver) = mpsc::channel(1);
        let mut changes = Changes { sender, receiver, watches: Vec::new() };
        files.into_iter().for_each(|file| changes.watch(file));
        changes
    }

    fn watch(&mut self, file: &Path) {
        let sender = self.sender.clone();
        let changed = move || {
            let _ = sender.try_send(());
        };
        match Watch::new(file, changed) {
            Ok(watch) => self.watches.push(watch),
            Err(error) => {
                tracing::warn!("cannot watch {}, send SIGHUP after a change: {error}", file.display());
            }
        }
    }

    /// Waits for the next change; forever if no file is watched.
    pub async fn next(&mut self) {
        self.receiver.recv().await;
    }
}
