//! Leaves out requests: those that `--only` does not match, and all but a sample of the keys.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use hyper::http::request::Parts;
use tollkeeper::config::Config;
use tollkeeper::{Limit, Policy, Quota, Verb};
use tollkeeper_core::siphash::{self, Secret};

use super::batch::{Batch, BatchEntry};
use super::worker::{FactReader, Names};

/// The name of the limit that holds the conditions of `--only`; no limit of a config can have it.
const ONLY: &str = "only";

/// A part of all keys: 1/10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    part: u64,
    of: u64,
}

impl std::str::FromStr for Sample {
    type Err = String;

    fn from_str(text: &str) -> Result<Sample, String> {
        let parts = text.split_once('/').and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
        match parts {
            Some((part, of)) if 0 < part && part <= of => Ok(Sample { part, of }),
            _ => Err("a part of all keys, such as 1/10".to_owned()),
        }
    }
}

/// A condition of `--only`: a fact and the pattern that it must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Only {
    /// The fact.
    pub fact: String,
    /// The pattern, as in `when`.
    pub pattern: String,
}

impl std::str::FromStr for Only {
    type Err = String;

    fn from_str(text: &str) -> Result<Only, String> {
        match text.split_once('=') {
            Some((fact, pattern)) if tollkeeper::facts::is_name(fact) && !pattern.is_empty() => {
                Ok(Only { fact: fact.to_owned(), pattern: pattern.to_owned() })
            }
            _ => Err("a fact and a pattern, such as route=/api/*".to_owned()),
        }
    }
}

/// Decides which requests are used.
#[derive(Debug)]
pub struct Filter {
    only: Option<Part>,
    sample: Option<(Sample, Part)>,
}

/// A policy of which only the conditions or the key are of interest.
#[derive(Debug)]
struct Part {
    policy: Arc<Policy>,
    reader: FactReader,
}

impl Part {
    fn new(config: &Config, policy: Policy) -> anyhow::Result<Part> {
        let reader = FactReader::new(&config.http, &policy)?;
        Ok(Part { policy: Arc::new(policy), reader })
    }

    /// Calls `read` with the key of the request under the only limit; without it, if the limit does not apply.
    fn key<T>(
        &self,
        head: &Parts,
        entry: &BatchEntry,
        batch: &Batch,
        names: &Names,
        read: impl FnOnce(Option<tollkeeper::store::Key<'_>>) -> T,
    ) -> T {
        let seen = self.reader.read(head, entry, batch, &self.policy, names);
        let Ok(settled) = seen.complete(&self.policy) else { return read(None) };
        let mut toll = tollkeeper::store::Toll::new(&self.policy, Verb::Peek);
        let Ok(()) = toll.add(settled.facts, 1) else { return read(None) };
        read(toll.dues().next().map(|due| due.key))
    }
}

impl Filter {
    /// The filter of the command line; `None` if every request is used.
    pub fn new(config: &Config, only: &[Only], sample: Option<Sample>) -> anyhow::Result<Option<Filter>> {
        let conditions = match only {
            [] => None,
            only => {
                let limit = Limit::new(ONLY, Quota::per_second(1));
                let limit = only.iter().fold(limit, |limit, only| limit.when(&only.fact, &only.pattern));
                let policy = Policy::new(vec![limit]).context("--only")?;
                let declared = config.policy.declared().iter().cloned();
                Some(Part::new(config, policy.declaring(declared).context("--only")?)?)
            }
        };
        let sample = match (sample, config.limits.first()) {
            (None, _) => None,
            (Some(_), None) => bail!("--sample needs a limit, by whose key it samples"),
            (Some(sample), Some(first)) => {
                let limits = serde_json::json!({ "limits": [first] }).to_string();
                let config = config.with_limits("--sample", limits.as_bytes());
                let (config, _) = config.context("--sample")?;
                Some((sample, Part::new(&config, config.policy.clone())?))
            }
        };
        let is_needed = conditions.is_some() || sample.is_some();
        Ok(is_needed.then_some(Filter { only: conditions, sample }))
    }

    /// Whether a request is used. Requests without the key that is sampled by are all used.
    pub fn admits(&self, head: &Parts, entry: &BatchEntry, batch: &Batch, names: &Names) -> bool {
        let matches =
            self.only.as_ref().is_none_or(|only| only.key(head, entry, batch, names, |key| key.is_some()));
        matches
            && self.sample.as_ref().is_none_or(|(sample, part)| {
                part.key(head, entry, batch, names, |key| key.is_none_or(|key| sample.admits(key)))
            })
    }
}

impl Sample {
    fn admits(self, key: tollkeeper::store::Key<'_>) -> bool {
        let hash = siphash::hash(&Secret(*b"sample of keys.."), &key.to_bytes());
        hash % u128::from(self.of) < u128::from(self.part)
    }
}
