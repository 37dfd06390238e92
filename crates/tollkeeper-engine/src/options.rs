//! How an engine is opened: where its limits come from, and its store.

use std::fmt;
use std::path::PathBuf;

use tollkeeper::config::{Config, Format, StoreUrl};

use crate::api::active_limits::LimitSource;
use crate::event::Listener;

/// Where the limits and settings of an engine come from.
#[derive(Clone, PartialEq, Eq)]
pub enum ConfigSource {
    /// A config file. A change of the file takes effect within a second.
    File(PathBuf),
    /// The text of a config. `${VAR}` is replaced as in a file.
    Text {
        /// Its format.
        format: Format,
        /// The config.
        text: String,
    },
}

/// How an engine is opened.
#[derive(Clone)]
pub struct Options {
    /// Where limits and settings come from.
    pub source: ConfigSource,
    /// The store, instead of the config's: `memory://` or `redis://…`.
    pub store: Option<String>,
    /// Engines opened with the same name are one engine.
    pub name: Option<String>,
    /// For tests: a clock that starts at this time, in seconds since the epoch, and moves only with
    /// [`Engine::advance`](crate::Engine::advance).
    pub at: Option<f64>,
    /// Receives reloads, errors and warnings. Without a listener, errors and warnings go to standard error.
    pub listener: Option<Listener>,
}

impl Options {
    /// The config's own store, the clock of the system, and no name.
    pub fn new(source: ConfigSource) -> Options {
        Options { source, store: None, name: None, at: None, listener: None }
    }

    /// Reads the config, with the store that the options choose.
    pub(crate) fn config(&self) -> Result<Config, String> {
        let mut config = match &self.source {
            ConfigSource::File(path) => Config::read(path).map_err(|error| error.to_string())?.0,
            ConfigSource::Text { format, text } => {
                let environment = |name: &str| std::env::var(name).ok();
                let parsed = Config::parse("config", *format, text.as_bytes(), &environment);
                parsed.map_err(|report| report.to_string())?.0
            }
        };
        if let Some(store) = self.store_url()? {
            config.store = store;
        }
        Ok(config)
    }

    /// The store that the options choose, if they do.
    pub(crate) fn store_url(&self) -> Result<Option<StoreUrl>, String> {
        let parse = |url: &String| url.parse().map_err(|error| format!("`store`: {error}"));
        self.store.as_ref().map(parse).transpose()
    }

    /// Whether an engine opened with other options of the same name is the one that these ask for.
    pub(crate) fn agree_with(&self, other: &Options) -> bool {
        (&self.source, &self.store, self.at) == (&other.source, &other.store, other.at)
    }
}

impl ConfigSource {
    pub(crate) fn of_limits(&self) -> LimitSource {
        match self {
            ConfigSource::File(_) => LimitSource::File,
            ConfigSource::Text { .. } => LimitSource::Code,
        }
    }
}

/// Without the text, which may contain a password.
impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigSource::File(path) => f.debug_tuple("File").field(path).finish(),
            ConfigSource::Text { format, .. } => f.debug_tuple("Text").field(format).finish(),
        }
    }
}

/// Without the store, which may contain a password.
impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("source", &self.source)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
