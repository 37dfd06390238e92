//! What is in force: settings, and the reader that was made of them for the policy of the moment.
//!
//! A request is read and decided under one policy: the reader belongs to it by its version, and both are
//! replaced under one lock. So no request meets a limit whose facts nobody read.

use std::sync::{Arc, PoisonError, RwLock};

use tollkeeper::http::{HeaderDialect, HttpSettings, InvalidRoute};
use tollkeeper::{Algorithm, Limiter, Mode, Percent, Policy};

use crate::facts::Reader;

/// How requests are read and answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How facts are read.
    pub http: HttpSettings,
    /// The dialects of the headers of every answer.
    pub headers: Vec<HeaderDialect>,
    /// By how much `Retry-After` is lengthened at most.
    pub retry_after_jitter: Percent,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            http: HttpSettings::default(),
            headers: vec![HeaderDialect::Ietf, HeaderDialect::XRateLimit],
            retry_after_jitter: Percent::new(10),
        }
    }
}

/// Settings, made ready for one version of the policy.
#[derive(Debug)]
pub struct Prepared {
    /// How requests are read and answered.
    pub settings: Settings,
    /// Reads the facts that the policy needs.
    pub reader: Reader,
    /// Whether some limit may delay a request.
    pub delays: bool,
    /// Whether the response decides what some limit keeps.
    pub awaits_response: bool,
    version: u64,
}

impl Prepared {
    fn new(settings: Settings, policy: &Policy) -> Result<Prepared, InvalidRoute> {
        let reader = Reader::new(&settings.http, policy)?;
        let any = |test: fn(&tollkeeper::Rule) -> bool| {
            policy.rules().iter().any(|rule| rule.mode() != Mode::Off && test(rule))
        };
        let delays = any(|rule| rule.algorithm() == Algorithm::LeakyBucket);
        let awaits_response = any(tollkeeper::Rule::awaits_response);
        Ok(Prepared { settings, reader, delays, awaits_response, version: policy.version() })
    }
}

/// What is in force, for all who read requests for one limiter: all clones of a layer, or all connections of a
/// server that gateways ask.
#[derive(Debug)]
pub struct InForce(RwLock<Arc<Prepared>>);

impl InForce {
    /// These settings, for the policy of this limiter.
    ///
    /// # Panics
    ///
    /// If a route is no path pattern, or a fact is to be normalised by NFKC without the feature `nfkc`; likewise
    /// wherever settings are replaced.
    pub fn new(settings: Settings, limiter: &Limiter) -> InForce {
        let prepared = prepared(settings, &limiter.policy());
        InForce(RwLock::new(Arc::new(prepared)))
    }

    /// The policy in force, and what was prepared for it.
    pub fn read(&self, limiter: &Limiter) -> (Arc<Policy>, Arc<Prepared>) {
        loop {
            let policy = limiter.with_policy(Arc::clone);
            let prepared = Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner));
            if prepared.version == policy.version() {
                return (policy, prepared);
            }
            self.catch_up(limiter);
        }
    }

    /// Changes the settings.
    pub(crate) fn change(&self, limiter: &Limiter, change: impl FnOnce(&mut Settings)) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let mut settings = current.settings.clone();
        change(&mut settings);
        let mut policy = limiter.policy();
        if policy.ipv6_prefix() != settings.http.ipv6_prefix {
            let prefix = settings.http.ipv6_prefix;
            policy = limiter.replace_policy(Policy::clone(&policy).with_ipv6_prefix(prefix));
        }
        *current = Arc::new(prepared(settings, &policy));
    }

    /// Replaces settings together with the policy that `put` puts in force; that policy.
    pub fn replace(&self, settings: Settings, put: impl FnOnce() -> Arc<Policy>) -> Arc<Policy> {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let policy = put();
        *current = Arc::new(prepared(settings, &policy));
        policy
    }

    /// Prepares for a policy that somebody else has put in force.
    #[cold]
    fn catch_up(&self, limiter: &Limiter) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let policy = limiter.policy();
        if current.version != policy.version() {
            *current = Arc::new(prepared(current.settings.clone(), &policy));
        }
    }
}

fn prepared(settings: Settings, policy: &Policy) -> Prepared {
    Prepared::new(settings, policy).unwrap_or_else(|error| panic!("{error}"))
}
