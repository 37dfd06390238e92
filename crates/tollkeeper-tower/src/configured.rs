//! A layer made from a config file, which it follows.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tollkeeper::Limiter;
use tollkeeper::config::{Config, ReadError, Watch};

use crate::layer::RateLimitLayer;
use crate::settings::{InForce, Settings};

impl RateLimitLayer {
    /// Reads limits and settings from a config file, and follows it: a change takes effect within a second,
    /// for every request that starts later, and keeps all counts. A broken file changes nothing, and what is
    /// wrong with it is written to standard error; [`RateLimitLayer::from_config_telling`] tells somebody
    /// else.
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
        let follower = Arc::new(Mutex::new(Follower::default()));
        // Watched before it is read, so that no change goes unseen in between.
        let watch = Watch::new(path, {
            let (path, follower) = (path.to_owned(), Arc::clone(&follower));
            move || {
                let mut follower = follower.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(reload) = follower.reload(&path) {
                    tell(reload);
                }
            }
        });
        let watch = watch.map_err(|error| ReadError::Unreadable {
            path: path.to_owned(),
            reason: format!("it cannot be followed: {error}"),
        })?;
        let (config, _) = Config::read(path)?;
        let mut layer = RateLimitLayer::with(config.limiter()?, Settings::of(&config));
        let shared = Arc::make_mut(&mut layer.shared);
        shared.keep(watch);
        let mut follower = follower.lock().unwrap_or_else(PoisonError::into_inner);
        follower.of = Some((shared.limiter.clone(), Arc::clone(&shared.in_force)));
        if follower.missed {
            // Should it be broken by now, the next change will tell.
            follower.reload(path);
        }
        drop(follower);
        Ok(layer)
    }
}

/// Whoever puts a changed file in force.
#[derive(Default)]
struct Follower {
    of: Option<(Limiter, Arc<InForce>)>,
    /// The file changed before there was anything to put it in force for.
    missed: bool,
}

impl Follower {
    fn reload(&mut self, path: &Path) -> Option<Result<(), ReadError>> {
        let Some((limiter, in_force)) = &self.of else {
            self.missed = true;
            return None;
        };
        Some(Config::read(path).map(|(config, _)| {
            in_force.replace(Settings::of(&config), || limiter.replace_policy(config.policy));
        }))
    }
}

impl Settings {
    /// What a config says of them.
    pub fn of(config: &Config) -> Settings {
        let Config { http, headers, retry_after_jitter, .. } = config;
        Settings { http: http.clone(), headers: headers.clone(), retry_after_jitter: *retry_after_jitter }
    }
}
