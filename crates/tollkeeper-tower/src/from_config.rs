//! A layer made from a config file, which it follows.

use std::path::Path;
use std::sync::Arc;

use tollkeeper::config::{Config, Follow, ReadError, Reload};

use crate::layer::RateLimitLayer;
use crate::settings::Settings;

impl RateLimitLayer {
    /// Reads limits and settings from a config file, and follows it: a change takes effect within a second,
    /// for every request that starts later, and keeps all counts; one that takes anything but numbers out of the file
    /// waits until the file is written ([`Follow`]). A broken file changes nothing, and what is wrong with it is written
    /// to standard error; [`RateLimitLayer::from_config_telling`] passes it to a function instead.
    ///
    /// The file is followed as long as the layer or a service of it lives. A store elsewhere needs a tokio
    /// runtime.
    pub fn from_config(path: impl AsRef<Path>) -> Result<RateLimitLayer, ReadError> {
        RateLimitLayer::from_config_telling(path, |reload| {
            if let Err(error) = reload {
                eprintln!("tollkeeper: what was in force stays so: {error}");
            }
        })
    }

    /// As [`RateLimitLayer::from_config`]; `tell` is called after every change of the file.
    pub fn from_config_telling(
        path: impl AsRef<Path>,
        tell: impl Fn(Result<(), ReadError>) + Send + 'static,
    ) -> Result<RateLimitLayer, ReadError> {
        let path = path.as_ref();
        let (config, _) = Config::read(path)?;
        let mut layer = RateLimitLayer::with(config.limiter()?, Settings::of(&config));
        let shared = Arc::make_mut(&mut layer.shared);
        let follow = Follow::new(path, &config, {
            let (limiter, in_force) = (shared.limiter.clone(), Arc::clone(&shared.in_force));
            move |reload| {
                let replaced = reload.map(|Reload { config, .. }| {
                    in_force.replace(Settings::of(&config), || limiter.replace_policy(config.policy));
                });
                let applied = replaced.is_ok();
                tell(replaced);
                applied
            }
        });
        let follow = follow.map_err(|error| ReadError::Unreadable {
            path: path.to_owned(),
            reason: format!("it cannot be followed: {error}"),
        })?;
        shared.keep(follow);
        Ok(layer)
    }
}

impl Settings {
    /// What a config says of them.
    pub fn of(config: &Config) -> Settings {
        let Config { http, headers, retry_after_jitter, .. } = config;
        Settings { http: http.clone(), headers: headers.clone(), retry_after_jitter: *retry_after_jitter }
    }
}
