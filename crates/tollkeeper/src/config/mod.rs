//! Reads the config file (YAML, TOML or JSON with the same keys) into a [`Policy`] and settings.
//!
//! Reading has two steps. The first collects the raw values of any format with their positions in the file. The
//! second resolves them into a [`Policy`] and settings with all defaults filled in. One pass finds every mistake,
//! and a [`Report`] shows each with its position and a suggestion. `docs/config.md` in the repository lists every
//! key.
//!
//! ```
//! use tollkeeper::config::{Config, Format};
//!
//! let text = "
//! limits:
//!   - { name: per-ip, by: ip, rate: 1000/min }
//!   - { name: per-user, by: user, rate: '${USER_RATE:-100/min}', burst: 20 }
//! ";
//! let (config, report) = Config::parse("tollkeeper.yaml", Format::Yaml, text.as_bytes(), &|_| None).unwrap();
//! assert!(report.is_empty());
//! assert_eq!(config.policy.rules().len(), 2);
//!
//! let text = "limits: [{ name: login, by: email, rate: 5/1 mn }]";
//! let report = Config::parse("tollkeeper.yaml", Format::Yaml, text.as_bytes(), &|_| None).unwrap_err();
//! assert_eq!(
//!     report.to_string().lines().next().unwrap(),
//!     "tollkeeper.yaml:1:42: error: limit `login`: period `1 mn` is not a duration (try `1m`)",
//! );
//! ```

mod document;
mod effective_limit;
mod excerpt;
mod expand;
mod fields;
mod follow;
mod from_config;
mod http;
mod json;
mod key_table;
mod limit;
mod listen;
mod origin;
mod policy_tests;
mod proxy;
mod raw;
#[cfg(test)]
mod reference;
mod report;
mod resolve;
mod schema;
mod settings;
mod suggest;
mod toml;
mod units;
mod warning;
mod warnings;
mod watch;
mod yaml;

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tollkeeper_core::{Allowance, OnStoreFailure, Policy, Quota};

pub use crate::http::{
    ClientAddress, EncodedSlashes, HeaderDialect, HttpFact, HttpSettings, Normalization, Source,
};
pub use crate::percent::Percent;
pub use crate::store::url::{Credentials, Host, InvalidStoreUrl, RedisUrl, Servers, StoreUrl};
pub use effective_limit::{EffectiveGrant, EffectiveLimit, Named, ResponseCondition, StatusPattern};
pub use follow::{Follow, Reload};
pub use listen::{InvalidListener, Listen, Listener};
pub use policy_tests::{
    Expect, Placed, PolicyTest, RowInput, TestFile, TestPolicy, TestRequest, TestRow, TestVerb,
};
pub use proxy::{
    AccessLogSettings, ConcurrencySettings, CountedUntil, HealthSettings, HostHeader, ProxySettings,
    SingleFlightSettings, UpstreamProtocol,
};
pub use report::{Diagnostic, Report, Severity};
pub use schema::schema;
pub use settings::{
    BreakerSettings, GrpcSettings, KeyFormat, LogSettings, MemorySettings, RedisSettings, TlsSettings,
    TokenDigest,
};
pub use units::Share;
pub use warning::Warning;
pub use watch::Watch;

use document::{MAX_BYTES, Node};
use origin::{NamedFile, Origin};
use report::{Position, Problems};

/// A config file, resolved: its limits and settings with all defaults filled in.
#[derive(Clone, Debug)]
pub struct Config {
    /// The limits, ready for a limiter.
    pub policy: Policy,
    /// The same limits as the file writes them, with defaults, in the same order.
    pub limits: Vec<EffectiveLimit>,
    /// The store that holds the counts: `memory://`, or the URL of a Redis server.
    pub store: StoreUrl,
    /// Settings of the embedded store.
    pub memory: MemorySettings,
    /// Settings of a Redis store.
    pub redis: RedisSettings,
    /// What happens when the store does not answer, for limits without a setting of their own.
    pub on_store_failure: OnStoreFailure,
    /// The addresses that the server listens on.
    pub listen: Listen,
    /// The part of every limit that is granted, such as 1/3; already applied to `policy`.
    pub share: Share,
    /// How facts are read from an HTTP request.
    pub http: HttpSettings,
    /// Settings of the rate limit service for Envoy.
    pub grpc: GrpcSettings,
    /// The rate-limit headers of HTTP responses.
    pub headers: Vec<HeaderDialect>,
    /// The most by which `Retry-After` is lengthened at random.
    pub retry_after_jitter: Percent,
    /// Settings of the reverse proxy.
    pub proxy: ProxySettings,
    /// What the server logs besides warnings and errors.
    pub log: LogSettings,
    /// The token for admin calls; without it, they are refused.
    pub admin: Option<TokenDigest>,
    /// The tokens that clients need to ask for decisions; if empty, no token is needed.
    pub auth: Vec<TokenDigest>,
    /// TLS for all listeners.
    pub tls: Option<TlsSettings>,
    /// Warnings that the config silences.
    pub ignored: Vec<Warning>,
    origin: Arc<Origin>,
}

impl Config {
    /// Reads a file, with variables from the environment of this process. The report returned with a config
    /// holds warnings only.
    pub fn read(path: &Path) -> Result<(Config, Report), ReadError> {
        Format::of_file(path)?;
        let (text, _) = content(path)?;
        Config::parse_file(path, &text)
    }

    /// Parses the content of a file, with variables from the environment of this process.
    fn parse_file(path: &Path, text: &[u8]) -> Result<(Config, Report), ReadError> {
        let format = Format::of_file(path)?;
        let environment = |name: &str| std::env::var(name).ok();
        Config::parse(&path.display().to_string(), format, text, &environment).map_err(ReadError::Invalid)
    }

    /// Parses `text`. Messages call it `name`; `environment` returns the values of variables.
    pub fn parse(
        name: &str,
        format: Format,
        text: &[u8],
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Config, Report), Report> {
        let bytes = text;
        with_report(name, text, |text, problems| {
            let mut document = document(format, text, problems)?;
            expand::expand(&mut document, environment, problems.get_mut());
            let mut file = raw::read(&document, problems)?;
            let files = std::mem::take(&mut file.files);
            let config = Config::resolve(file, problems)?;
            Some(Config { origin: Arc::new(Origin::new(bytes, &document, files)), ..config })
        })
    }

    /// The same config with its limits replaced by those in `text`, which is JSON: `{"limits": [...]}`, with each
    /// limit written as in a file and as [`EffectiveLimit`] serializes it. Other settings stay, and `${VAR}` is not
    /// expanded.
    ///
    /// ```
    /// use tollkeeper::config::{Config, Format};
    ///
    /// let text = b"share: 1/2\nlimits: [{ name: per-ip, by: ip, rate: 1000/min }]";
    /// let (config, _) = Config::parse("tollkeeper.yaml", Format::Yaml, text, &|_| None).unwrap();
    /// let other = br#"{ "limits": [{ "name": "per-ip", "by": "ip", "rate": "500/min" }] }"#;
    /// let (config, _) = config.with_limits("request", other).unwrap();
    /// assert_eq!(config.limits[0].grant.rate.as_deref(), Some("500/min"));
    /// assert_eq!(config.policy.rules()[0].plain_quota().unwrap().0.count(), 250);
    /// ```
    pub fn with_limits(&self, name: &str, text: &[u8]) -> Result<(Config, Report), Report> {
        let config = self.clone();
        with_report(name, text, |text, problems| {
            let document = document(Format::Json, text, problems)?;
            for entry in document.entries().iter().filter(|entry| entry.key != "limits") {
                let message = format!("only `limits` can be replaced, not {}", excerpt::quoted(&entry.key));
                problems.get_mut().error(entry.position, message, "leave it out");
            }
            let file = raw::read(&document, problems)?;
            let file = raw::RawConfig {
                share: config.share,
                on_store_failure: config.on_store_failure,
                listen: config.listen.clone(),
                http: config.http.clone(),
                ignored: config.ignored.clone(),
                ..file
            };
            let Config { policy, limits, .. } = Config::resolve(file, problems)?;
            Some(Config { policy, limits, ..config })
        })
    }

    /// Adds an error to `report` for each missing file that `tls` names, or `redis` if the store is on Redis:
    /// `tollkeeper serve` would not start. Reading a config does not check this, because a program that needs only
    /// the limits does not need the files.
    pub fn check_files(&self, report: &mut Report) {
        if self.ignored.contains(&Warning::MissingFile) {
            return;
        }
        let read = |file: &&NamedFile| !file.key.starts_with("redis.") || self.store != StoreUrl::Memory;
        for NamedFile { key, path, position } in self.origin.files.iter().filter(read) {
            let problem = match std::fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => "is a folder",
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => "does not exist",
                _ => continue,
            };
            let path = excerpt::quoted(&path.display().to_string());
            let message = format!("`{key}`: the file {path} {problem}");
            let help = "paths are relative to the folder where `tollkeeper serve` is started".to_owned();
            report.add(Warning::MissingFile, *position, message, help);
        }
    }

    /// The headers that only the gateway may set, each with the facts read from it: the headers of `trusted` facts,
    /// and the header with the client's address if `client_address` is `header.NAME`. A gateway that forwards such a
    /// header from a client lets the client choose its own identity or plan.
    pub fn gateway_headers(&self) -> Vec<(&str, Vec<&str>)> {
        let mut headers: Vec<(&str, Vec<&str>)> = Vec::new();
        let address = match &self.http.client_address {
            ClientAddress::Header(header) if !self.http.trusted_proxies.is_empty() => Some((&**header, "ip")),
            _ => None,
        };
        let trusted = self.http.facts.iter().filter(|fact| fact.trusted);
        let trusted = trusted.filter_map(|fact| match &fact.from {
            Source::Header(header) => Some((&**header, &*fact.name)),
            _ => None,
        });
        for (header, fact) in address.into_iter().chain(trusted) {
            match headers.iter_mut().find(|(known, _)| *known == header) {
                Some((_, facts)) => facts.push(fact),
                None => headers.push((header, vec![fact])),
            }
        }
        headers
    }

    /// Step two: resolves the raw values into a config.
    fn resolve(file: raw::RawConfig, problems: &RefCell<Problems>) -> Option<Config> {
        if let Err(error) = file.store.value.supported() {
            problems.borrow_mut().error(file.store.position, error.to_string(), "");
        }
        let resolved = resolve::resolve(&file, problems)?;
        warnings::check(&file, &resolved.policy, &mut problems.borrow_mut());
        Some(Config {
            policy: resolved.policy,
            limits: resolved.limits,
            store: file.store.value,
            memory: file.memory,
            redis: file.redis,
            on_store_failure: file.on_store_failure,
            listen: file.listen,
            share: file.share,
            http: file.http,
            grpc: file.grpc,
            headers: file.headers,
            retry_after_jitter: file.retry_after_jitter,
            proxy: file.proxy,
            log: file.log,
            admin: file.admin,
            auth: file.auth,
            tls: file.tls,
            ignored: file.ignored,
            origin: Arc::default(),
        })
    }
}

/// Reads a text with `read`, and returns the result with a report on it.
fn with_report<T>(
    name: &str,
    bytes: &[u8],
    read: impl FnOnce(&str, &mut RefCell<Problems>) -> Option<T>,
) -> Result<(T, Report), Report> {
    let mut problems = RefCell::new(Problems::default());
    let (text, config) = match readable(bytes) {
        Ok(text) => (text, read(text, &mut problems)),
        Err((position, text, message, help)) => {
            problems.get_mut().error(position, message, help);
            (text, None)
        }
    };
    let problems = problems.into_inner();
    match config {
        Some(config) if problems.no_errors() => Ok((config, problems.report(name, text))),
        _ => Err(problems.report(name, text)),
    }
}

/// The first half of step one: parses the text into a tree of values.
fn document(format: Format, text: &str, problems: &mut RefCell<Problems>) -> Option<Node> {
    let problems = problems.get_mut();
    let document = match format {
        _ if text.trim().is_empty() => None,
        Format::Yaml => yaml::read(text, problems),
        Format::Toml => toml::read(text, problems),
        Format::Json => json::read(text, problems),
    };
    let document = document.filter(|document| !document.is_empty());
    if document.is_none() && problems.no_errors() {
        // A file may be empty for a moment while it is being written. Reading it as a config without limits would
        // admit every request.
        problems.error(Position::default(), "the file is empty", "a config has at least `limits:`");
    }
    document
}

/// The bytes of a file, up to just above the size limit of a config, and its modification time.
fn content(path: &Path) -> Result<(Vec<u8>, Option<SystemTime>), ReadError> {
    let read = || {
        let mut file = File::open(path)?;
        let mut bytes = Vec::new();
        // One byte more than allowed, to tell a file that is too large from one that just fits.
        let max = u64::try_from(MAX_BYTES).expect("a few megabytes") + 1;
        file.by_ref().take(max).read_to_end(&mut bytes)?;
        let modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
        Ok((bytes, modified))
    };
    let unreadable =
        |error: std::io::Error| ReadError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    read().map_err(unreadable)
}

/// Parses a duration in the syntax of the config file, such as `10s` or `15m`. The error says what is wrong and
/// suggests a fix.
pub fn duration(text: &str) -> Result<Duration, String> {
    units::duration(text).map(Duration::from).map_err(|invalid| invalid.to_string())
}

/// Parses a rate in the syntax of the config file, such as `500/min` or `unlimited`. The error says what is wrong and
/// suggests a fix.
pub fn rate(text: &str) -> Result<Allowance, String> {
    Ok(match units::rate(text).map_err(|invalid| invalid.to_string())? {
        units::Rate::Unlimited => Allowance::Unlimited,
        units::Rate::Every { count: 0, .. } => Allowance::Nothing,
        units::Rate::Every { count, period } => Quota::every(count, period).into(),
    })
}

/// The text of a file. An error holds its position, the text before it, the message and the help.
fn readable(bytes: &[u8]) -> Result<&str, (Position, &str, String, &'static str)> {
    if bytes.len() > MAX_BYTES {
        let message = "the file is larger than 4 MiB".to_owned();
        return Err((Position::default(), "", message, "no config needs that: is it the right file?"));
    }
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let valid = std::str::from_utf8(&bytes[..error.valid_up_to()]).expect("valid up to there");
            let message = format!("the file is not UTF-8: byte {:#04x} here", bytes[error.valid_up_to()]);
            let position = Position::new(valid.len(), valid.len());
            return Err((position, valid, message, "save it as UTF-8"));
        }
    };
    // Editors add a byte order mark without showing it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if let Some(nul) = text.find('\0') {
        let position = Position::new(nul, nul + 1);
        return Err((position, text, "the file has a NUL byte here".to_owned(), "it is not a text file"));
    }
    Ok(text)
}

/// The format of a config file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// YAML 1.2.
    Yaml,
    /// TOML 1.0.
    Toml,
    /// JSON.
    Json,
}

impl Format {
    /// The format for the extension of a path: `yaml`, `yml`, `toml` or `json`.
    pub fn of(path: &Path) -> Option<Format> {
        match path.extension()?.to_str()? {
            "yaml" | "yml" => Some(Format::Yaml),
            "toml" => Some(Format::Toml),
            "json" => Some(Format::Json),
            _ => None,
        }
    }

    fn of_file(path: &Path) -> Result<Format, ReadError> {
        let reason = "its extension must be .yaml, .yml, .toml or .json".to_owned();
        Format::of(path).ok_or_else(|| ReadError::Unreadable { path: path.to_owned(), reason })
    }
}

/// Why no config could be read from a file.
#[non_exhaustive]
pub enum ReadError {
    /// The file, or a file that the config needs, cannot be read.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason, such as `No such file or directory`.
        reason: String,
    },
    /// The config has errors.
    Invalid(Report),
    /// The file keeps changing, so it is unknown whether the parts it lacks are still to be written.
    Unsettled {
        /// The file.
        path: PathBuf,
        /// The parts that it had before and lacks now, such as `` `auth`, `limits[login]` ``; empty if the file is not
        /// valid.
        lost: String,
    },
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Unreadable { path, reason } => {
                write!(f, "{} cannot be read: {reason}", excerpt::printable(&path.display().to_string(), 500))
            }
            ReadError::Invalid(report) => write!(f, "{report}"),
            ReadError::Unsettled { path, lost } => {
                let path = excerpt::printable(&path.display().to_string(), 500);
                let lost = if lost.is_empty() { "a part of the file" } else { lost };
                write!(
                    f,
                    "{path} keeps changing, and {lost} would be lost (the change takes effect when the file has \
                     been the same for 250 ms: write a new file and rename it over the old one)"
                )
            }
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ReadError {}
