//! Loading the config anew, when the file changes or somebody says so. A broken file changes nothing.

use std::path::Path;
use std::sync::Arc;

use tollkeeper::config::{Config, Watch};

use crate::serve::log_warnings;
use crate::service::Service;

/// Reloads whenever the file changes, for as long as the watch is kept.
pub fn watch(file: &Path, service: Arc<Service>) -> Option<Watch> {
    let path = file.to_owned();
    Watch::new(file, move || now(&path, &service))
        .inspect_err(|error| {
            tracing::warn!("{} is not watched, send SIGHUP after a change: {error}", file.display())
        })
        .ok()
}

/// Reloads once.
pub fn now(file: &Path, service: &Service) {
    match Config::read(file) {
        Ok((config, report)) => {
            log_warnings(&report);
            let version = service.reload(config);
            tracing::info!("version {version} of the limits is in force, from {}", file.display());
        }
        Err(error) => {
            let error = error.to_string();
            tracing::error!("the config was not loaded, and what was in force stays so: {error}");
            service.reload_failed(error);
        }
    }
}
