//! Decides which limits a log can be simulated for, and with which policies.

use std::collections::BTreeSet;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use tollkeeper::config::{Config, EffectiveGrant, EffectiveLimit};
use tollkeeper::http::{ClientAddress, HttpSettings, Source};
use tollkeeper::{Algorithm, Mode};

use super::format::{Headers, Says};
use super::logged::WantedHeaders;

/// A limit that a log cannot say enough about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotSimulated {
    /// Its name.
    pub name: String,
    /// Why, and what to pass.
    pub why: String,
}

/// The facts that the limits of these configs use.
pub fn used_facts<'c>(configs: impl Iterator<Item = &'c Config>) -> Vec<String> {
    let rules = configs.flat_map(|config| config.policy.rules()).filter(|rule| rule.mode() != Mode::Off);
    let facts: BTreeSet<String> = rules.flat_map(|rule| rule.facts()).map(str::to_owned).collect();
    facts.into_iter().collect()
}

/// The headers that facts are read from, under the settings of each config.
pub fn wanted_headers<'c>(configs: impl Iterator<Item = &'c Config>, facts: &[String]) -> WantedHeaders {
    let mut names = Vec::new();
    for config in configs {
        for fact in facts {
            match source(fact, &config.http) {
                Some(Source::Header(name)) => names.push(name),
                Some(Source::Cookie(_)) => names.push("cookie".to_owned()),
                _ => {}
            }
        }
        names.push(match &config.http.client_address {
            ClientAddress::XForwardedFor => "x-forwarded-for".to_owned(),
            ClientAddress::Forwarded => "forwarded".to_owned(),
            ClientAddress::Header(name) => name.clone(),
        });
    }
    WantedHeaders::new(names)
}

/// The part of a request that a fact is read from.
fn source(fact: &str, http: &HttpSettings) -> Option<Source> {
    let configured = http.facts.iter().find(|known| known.name == fact);
    configured.map(|known| known.from.clone()).or_else(|| Source::of(fact))
}

impl Says {
    /// Whether some line can say this fact.
    pub fn can_say(&self, fact: &str, http: &HttpSettings) -> bool {
        if self.facts.iter().any(|known| known == fact) {
            return true;
        }
        let alike = |one: &str, other: &str| one.replace('_', "-") == other.replace('_', "-");
        let header = |name: &str| match &self.headers {
            Headers::All => true,
            Headers::These(names) => names.iter().any(|known| alike(known, name)),
        };
        match source(fact, http) {
            None | Some(Source::Body(_)) => false,
            Some(Source::Ip) => self.address,
            Some(Source::Method) => self.method,
            Some(Source::Host) => self.host,
            Some(Source::Path) => self.path,
            // Without patterns, the router of the application knows the route, and a log does not.
            Some(Source::Route) => self.path && !http.routes.is_empty(),
            Some(Source::Header(name)) => header(&name),
            Some(Source::Cookie(name)) => self.cookies.contains(&name) || header("cookie"),
            Some(Source::Query(name)) => self.query || self.arguments.contains(&name),
        }
    }
}

/// The config with the limits that a log can say enough about, and the others. Limits that are off are left out.
pub fn simulated(config: &Config, says: &Says) -> anyhow::Result<(Config, Vec<NotSimulated>)> {
    let mut not_simulated = Vec::new();
    let mut limits = Vec::new();
    for limit in config.limits.iter().filter(|limit| limit.mode != Mode::Off) {
        match missing(limit, &config.http, says) {
            Some(why) => not_simulated.push(NotSimulated { name: limit.name.clone(), why }),
            None => limits.push(limit),
        }
    }
    Ok((with_limits(config, json!({ "limits": limits }))?, not_simulated))
}

/// Why a limit cannot be simulated.
fn missing(limit: &EffectiveLimit, http: &HttpSettings, says: &Says) -> Option<String> {
    let unsaid = |fact: &str, uses: &str| {
        let routes = if fact == "route" && says.path { ", or list `http.routes`" } else { "" };
        (!says.can_say(fact, http))
            .then(|| format!("it {uses} `{fact}`, which this log does not say: --fact {fact}=FIELD{routes}"))
    };
    let conditions = limit.when.0.iter().chain(&limit.unless.0).map(|(fact, _)| (fact, "applies by"));
    let by = limit.by.iter().map(|fact| (fact, "counts by"));
    let tier = limit.tier.iter().map(|fact| (fact, "picks its tier by"));
    let cost = limit.cost.iter().map(|fact| (fact, "charges"));
    let fact = by.chain(conditions).chain(tier).chain(cost).find_map(|(fact, uses)| unsaid(fact, uses));
    fact.or_else(|| {
        (limit.algorithm == Algorithm::Concurrency && !says.duration)
            .then(|| "it needs durations, which this log does not say: --fact duration=FIELD".to_owned())
    })
    .or_else(|| {
        let awaits_response = limit.deduct_when.is_some() || limit.refund_when.is_some();
        (awaits_response && !says.status)
            .then(|| "it depends on the status, which this log does not say: --fact status=FIELD".to_owned())
    })
}

/// The same config with these limits.
pub fn with_limits(config: &Config, limits: Value) -> anyhow::Result<Config> {
    let (config, _) =
        config.with_limits("limits", limits.to_string().as_bytes()).context("internal error")?;
    Ok(config)
}

/// The algorithms of rate limits, in the order of the documentation.
pub const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// The config with every rate limit under this algorithm, and the names of those that cannot have it.
pub fn with_algorithm(config: &Config, algorithm: Algorithm) -> anyhow::Result<(Config, Vec<String>)> {
    let mut unchanged = Vec::new();
    let mut limits = Vec::new();
    let is_rate = |limit: &&EffectiveLimit| limit.algorithm != Algorithm::Concurrency;
    let all: Vec<Value> = config.limits.iter().filter(is_rate).map(|limit| under(limit, algorithm)).collect();
    // Mostly every limit can have every algorithm. Only if not, it is found out which cannot.
    let are_valid = with_limits(config, json!({ "limits": all })).is_ok();
    for limit in &config.limits {
        let changed = under(limit, algorithm);
        let is_valid = || are_valid || with_limits(config, json!({ "limits": [changed] })).is_ok();
        if is_rate(&limit) && is_valid() {
            limits.push(changed);
        } else {
            unchanged.push(limit.name.clone());
            limits.push(serde_json::to_value(limit)?);
        }
    }
    Ok((with_limits(config, json!({ "limits": limits }))?, unchanged))
}

/// A limit under another algorithm. A bucket keeps the written burst, and a window has none.
fn under(limit: &EffectiveLimit, algorithm: Algorithm) -> Value {
    let mut limit = limit.clone();
    limit.algorithm = algorithm;
    limit.stagger &= algorithm == Algorithm::FixedWindow;
    if !algorithm.has_burst() {
        limit.grant.burst = None;
        let tiers = limit.tiers.0.iter_mut().chain(&mut limit.overrides.0);
        tiers.for_each(|(_, grant)| grant.burst = None);
    }
    json!(limit)
}

/// A rate limit whose count can be varied: one number for all keys, and no tiers.
pub fn has_one_rate(limit: &EffectiveLimit) -> bool {
    limit.algorithm != Algorithm::Concurrency && limit.tier.is_none() && written(limit).is_some()
}

/// The count and the period of a limit as they are written.
pub fn written(limit: &EffectiveLimit) -> Option<(u64, &str)> {
    let (count, period) = limit.grant.rate.as_deref()?.split_once('/')?;
    count.parse().ok().filter(|count| *count > 0).map(|count| (count, period))
}

/// The config with only this limit, enforced and with another count. The burst keeps its ratio.
pub fn with_count(config: &Config, limit: &EffectiveLimit, count: u64) -> anyhow::Result<Config> {
    let limit = EffectiveLimit { mode: Mode::Enforce, grant: scaled(limit, count)?, ..limit.clone() };
    with_limits(config, json!({ "limits": [limit] }))
}

/// The rate and the burst of a limit with another count.
pub fn scaled(limit: &EffectiveLimit, count: u64) -> anyhow::Result<EffectiveGrant> {
    let (before, period) = written(limit).ok_or_else(|| anyhow!("limit `{}` has no rate", limit.name))?;
    // Rounded to the nearest number, at least 1.
    let scale = |burst: u64| {
        let scaled =
            (2 * u128::from(burst) * u128::from(count) + u128::from(before)) / (2 * u128::from(before));
        u64::try_from(scaled).unwrap_or(u64::MAX).max(1)
    };
    Ok(EffectiveGrant {
        rate: Some(format!("{count}/{period}")),
        burst: limit.grant.burst.map(scale),
        limit: None,
    })
}
