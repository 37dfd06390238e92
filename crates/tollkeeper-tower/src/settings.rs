//! The active settings, with a reader of facts that was built for the current policy.
//!
//! A request is read and decided under one policy: the reader belongs to the policy's version, and both are replaced
//! under one lock. So no limit applies to a request whose facts were not read for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::LocalKey;

use tollkeeper::http::{HeaderDialect, HttpFact, HttpSettings};
use tollkeeper::thread_cached::{Shareable, Shares, ThreadCached};
use tollkeeper::{Algorithm, Limiter, Mode, Percent, Policy};

use crate::facts::Reader;

/// How requests are read and answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How facts are read.
    pub http: HttpSettings,
    /// The dialects of the headers of every response.
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

/// Settings, prepared for one version of the policy.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// How requests are read and answered.
    pub settings: Settings,
    /// The policy.
    pub policy: Arc<Policy>,
    /// Reads the facts that the policy needs.
    pub reader: Reader,
    /// Whether some limit may delay a request.
    pub delays: bool,
    /// Whether the response decides what some limit keeps.
    pub awaits_response: bool,
    /// Whether an admission is needed after the request was passed on: for delays, refunds or slots.
    pub keeps_decision: bool,
}

impl Prepared {
    /// # Panics
    ///
    /// If a route is no path pattern, or a fact is to be normalised by NFKC without the feature `nfkc`.
    fn new(settings: Settings, policy: &Policy) -> Prepared {
        let policy = Arc::new(policy.clone());
        let reader = Reader::new(&settings.http, &policy).unwrap_or_else(|error| panic!("{error}"));
        let any = |test: fn(&tollkeeper::Rule) -> bool| {
            policy.rules().iter().any(|rule| rule.mode() != Mode::Off && test(rule))
        };
        let delays = any(|rule| rule.algorithm() == Algorithm::LeakyBucket);
        let awaits_response = any(tollkeeper::Rule::awaits_response);
        let keeps_decision =
            delays || awaits_response || any(|rule| rule.algorithm() == Algorithm::Concurrency);
        Prepared { settings, policy, reader, delays, awaits_response, keeps_decision }
    }
}

impl Shareable for Prepared {
    fn share(&self) -> Prepared {
        Prepared { policy: Arc::new(self.policy.share()), ..self.clone() }
    }

    #[inline]
    fn shares() -> &'static LocalKey<Shares<Prepared>> {
        thread_local! { static PREPARED: Shares<Prepared> = const { Shares::new() } }
        &PREPARED
    }
}

/// The active, prepared settings, shared by all readers of requests for one limiter: all services of a layer, or all
/// connections of a forward-auth server.
#[derive(Debug)]
pub struct ActiveSettings {
    prepared: ThreadCached<Prepared>,
    /// The settings without those that were set in code. Layers that differ in the latter share it, and so follow the
    /// same config file.
    base: Arc<Mutex<Settings>>,
    in_code: InCode,
}

/// The settings that an application has set in code: they take precedence over those of a config file.
#[derive(Clone, Debug, Default)]
pub(crate) struct InCode {
    pub(crate) http: Option<HttpSettings>,
    pub(crate) headers: Option<Vec<HeaderDialect>>,
    pub(crate) retry_after_jitter: Option<Percent>,
}

impl InCode {
    fn over(&self, base: &Settings) -> Settings {
        Settings {
            http: self.http.as_ref().unwrap_or(&base.http).clone(),
            headers: self.headers.as_ref().unwrap_or(&base.headers).clone(),
            retry_after_jitter: self.retry_after_jitter.unwrap_or(base.retry_after_jitter),
        }
    }
}

impl ActiveSettings {
    /// These settings, for the policy of this limiter.
    ///
    /// # Panics
    ///
    /// If a route is no path pattern, or a fact is to be normalised by NFKC without the feature `nfkc`; likewise
    /// wherever settings are replaced.
    pub fn new(settings: Settings, limiter: &Limiter) -> ActiveSettings {
        let prepared = ThreadCached::new(Prepared::new(settings.clone(), &limiter.policy()));
        ActiveSettings { prepared, base: Arc::new(Mutex::new(settings)), in_code: InCode::default() }
    }

    /// The same with other settings in code. It follows the same config file; otherwise the two are independent.
    pub(crate) fn changed(&self, limiter: &Limiter, change: impl FnOnce(&mut InCode)) -> ActiveSettings {
        let mut in_code = self.in_code.clone();
        change(&mut in_code);
        let base = Arc::clone(&self.base);
        let settings = in_code.over(&lock(&base));
        let mut policy = limiter.policy();
        if policy.ipv6_prefix() != settings.http.ipv6_prefix {
            let prefix = settings.http.ipv6_prefix;
            policy = limiter.replace_policy(Policy::clone(&policy).with_ipv6_prefix(prefix));
        }
        let declares = settings.http.facts.iter().any(|fact| fact.hash || !fact.normalize.is_empty());
        if declares && policy.declared().is_empty() {
            let declared = settings.http.facts.iter().map(HttpFact::declared);
            let declaring = Policy::clone(&policy).declaring(declared);
            policy = limiter.replace_policy(declaring.unwrap_or_else(|error| panic!("{error}")));
        }
        ActiveSettings { prepared: ThreadCached::new(Prepared::new(settings, &policy)), base, in_code }
    }

    /// The active policy and the settings prepared for it.
    #[inline]
    pub fn read(&self, limiter: &Limiter) -> Arc<Prepared> {
        self.with(limiter, Arc::clone)
    }

    /// As [`ActiveSettings::read`], without touching the reference count.
    #[inline]
    pub fn with<R>(&self, limiter: &Limiter, read: impl FnOnce(&Arc<Prepared>) -> R) -> R {
        let mut read = Some(read);
        loop {
            let version = limiter.with_policy(|policy| policy.version());
            let result = self.prepared.read(|prepared, _| {
                let is_current = prepared.policy.version() == version;
                is_current.then(|| read.take().map(|read| read(prepared))).flatten()
            });
            match result {
                Some(result) => return result,
                None => self.catch_up(limiter),
            }
        }
    }

    /// Replaces the settings together with the policy that `put` activates, and returns that policy. Settings that the
    /// application has set in code stay.
    pub fn replace(&self, settings: Settings, put: impl FnOnce() -> Arc<Policy>) -> Arc<Policy> {
        let replaced = self.prepared.replace(|_| {
            // Locked until the policy is active, so that layers that share the settings see both or none.
            let mut base = lock(&self.base);
            *base = settings;
            Prepared::new(self.in_code.over(&base), &put())
        });
        Arc::clone(&replaced.policy)
    }

    /// Prepares for a policy that was replaced on the limiter itself.
    #[cold]
    fn catch_up(&self, limiter: &Limiter) {
        self.prepared.replace(|_| {
            let base = lock(&self.base);
            Prepared::new(self.in_code.over(&base), &limiter.policy())
        });
    }
}

fn lock(settings: &Mutex<Settings>) -> MutexGuard<'_, Settings> {
    settings.lock().unwrap_or_else(PoisonError::into_inner)
}
