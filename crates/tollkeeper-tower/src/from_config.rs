//! Builds a layer from a config file and reloads the file when it changes.

use std::path::Path;
use std::sync::Arc;

use tollkeeper::config::{Config, Follow, ReadError, Reload};

use crate::layer::RateLimitLayer;
use crate::settings::Settings;

impl RateLimitLayer {
    /// Reads limits and settings from a config file, and reloads the file when it changes. A change takes effect within
    /// a second, for every request that starts later, and keeps all counts; a change that removes anything but numbers
    /// waits until the file has been written completely ([`Follow`]). An invalid file changes nothing, and its error is
    /// written to standard error; [`RateLimitLayer::from_config_telling`] passes the error to a function instead.
    ///
    /// The file is watched as long as the layer or one of its services lives. A remote store needs a tokio runtime.
    pub fn from_config(path: impl AsRef<Path>) -> Result<RateLimitLayer, ReadError> {
        RateLimitLayer::from_config_telling(path, |reload| {
            if let Err(error) = reload {
                eprintln!("tollkeeper: config not reloaded, the previous one stays active: {error}");
            }
        })
    }

    /// Like [`RateLimitLayer::from_config`], but calls `tell` with the result of every reload.
    pub fn from_config_telling(
        path: impl AsRef<Path>,
        tell: impl Fn(Result<(), ReadError>) + Send + 'static,
    ) -> Result<RateLimitLayer, ReadError> {
        let path = path.as_ref();
        let (config, _) = Config::read(path)?;
        let mut layer = RateLimitLayer::with(config.limiter()?, Settings::of(&config));
        let shared = Arc::make_mut(&mut layer.shared);
        let follow = Follow::new(path, &config, {
            let (limiter, active_settings) = (shared.limiter.clone(), Arc::clone(&shared.active_settings));
            move |reload| {
                let replaced = reload.map(|Reload { config, .. }| {
                    active_settings.replace(Settings::of(&config), || limiter.replace_policy(config.policy));
                });
                let applied = replaced.is_ok();
                tell(replaced);
                applied
            }
        });
        let follow = follow.map_err(|error| ReadError::Unreadable {
            path: path.to_owned(),
            reason: format!("cannot watch the file for changes: {error}"),
        })?;
        shared.keep(follow);
        Ok(layer)
    }
}

impl Settings {
    /// The settings in a config.
    pub fn of(config: &Config) -> Settings {
        let Config { http, headers, retry_after_jitter, .. } = config;
        Settings { http: http.clone(), headers: headers.clone(), retry_after_jitter: *retry_after_jitter }
    }
}
