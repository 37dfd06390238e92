//! The active limits and where they come from: the answer of `limits`.

use serde::Serialize;
use tollkeeper::config::EffectiveLimit;

/// The active limits and where they come from: the body of `GET /v1/limits`.
#[derive(Clone, Debug, Serialize)]
pub struct ActiveLimits {
    /// The version of the policy, counted from 1.
    pub version: u64,
    /// Where the limits come from.
    pub source: LimitSource,
    /// When the limits became active, in seconds since the epoch.
    pub loaded_at: u64,
    /// Why the last attempt to replace the limits failed.
    pub error: Option<String>,
    /// Whether the file's limits differ from these, which replace them.
    pub shadowed: bool,
    /// For limits set through the API: whether they survive a restart of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// The limits, in the form of the config.
    pub limits: Vec<EffectiveLimit>,
}

impl ActiveLimits {
    /// The JSON of the answer.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("limits have only string keys")
    }
}

/// Where limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitSource {
    /// A config file.
    File,
    /// `PUT /v1/limits`.
    Api,
    /// The built-in policy of a server without a config.
    Builtin,
    /// The program that opened the engine.
    Code,
}

impl LimitSource {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            LimitSource::File => "file",
            LimitSource::Api => "api",
            LimitSource::Builtin => "builtin",
            LimitSource::Code => "code",
        }
    }
}
