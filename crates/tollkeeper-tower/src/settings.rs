//! What is in force: settings, and the reader that was made of them for the policy of the moment.
//!
//! A request is read and decided under one policy: the reader belongs to it by its version, and both are
//! replaced under one lock. So no request meets a limit whose facts nobody read.

use std::sync::Arc;
use std::thread::LocalKey;

use tollkeeper::http::{HeaderDialect, HttpFact, HttpSettings};
use tollkeeper::single_limit::Lone;
use tollkeeper::thread_cached::{Shareable, Shares, ThreadCached};
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
#[derive(Clone, Debug)]
pub struct Prepared {
    /// How requests are read and answered.
    pub settings: Settings,
    /// The policy.
    pub policy: Arc<Policy>,
    /// Its only limit, if it has only one and an admission by it needs no more than that.
    pub(crate) lone: Option<Lone>,
    /// Reads the facts that the policy needs.
    pub reader: Reader,
    /// Whether some limit may delay a request.
    pub delays: bool,
    /// Whether the response decides what some limit keeps.
    pub awaits_response: bool,
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
        let lone = if delays || awaits_response { None } else { Lone::of(&policy) };
        Prepared { settings, policy, lone, reader, delays, awaits_response }
    }
}

impl Shareable for Prepared {
    fn share(&self) -> Prepared {
        let policy = Arc::new(self.policy.share());
        let lone = self.lone.as_ref().and_then(|_| Lone::of(&policy));
        Prepared { policy, lone, ..self.clone() }
    }

    #[inline]
    fn shares() -> &'static LocalKey<Shares<Prepared>> {
        thread_local! { static PREPARED: Shares<Prepared> = const { Shares::new() } }
        &PREPARED
    }
}

/// What is in force, for all who read requests for one limiter: all clones of a layer, or all connections of a
/// server that gateways ask.
#[derive(Debug)]
pub struct InForce(ThreadCached<Prepared>);

impl InForce {
    /// These settings, for the policy of this limiter.
    ///
    /// # Panics
    ///
    /// If a route is no path pattern, or a fact is to be normalised by NFKC without the feature `nfkc`; likewise
    /// wherever settings are replaced.
    pub fn new(settings: Settings, limiter: &Limiter) -> InForce {
        InForce(ThreadCached::new(Prepared::new(settings, &limiter.policy())))
    }

    /// What is in force: the policy, and what was prepared for it.
    #[inline]
    pub fn read(&self, limiter: &Limiter) -> Arc<Prepared> {
        self.with(limiter, Arc::clone)
    }

    /// As [`InForce::read`], for who is done with it at once.
    #[inline]
    pub fn with<R>(&self, limiter: &Limiter, read: impl FnOnce(&Arc<Prepared>) -> R) -> R {
        let mut read = Some(read);
        loop {
            let version = limiter.with_policy(|policy| policy.version());
            let result = self.0.read(|prepared, _| {
                let is_current = prepared.policy.version() == version;
                is_current.then(|| read.take().map(|read| read(prepared))).flatten()
            });
            match result {
                Some(result) => return result,
                None => self.catch_up(limiter),
            }
        }
    }

    /// Changes the settings.
    pub(crate) fn change(&self, limiter: &Limiter, change: impl FnOnce(&mut Settings)) {
        self.0.replace(|last| {
            let mut settings = last.settings.clone();
            change(&mut settings);
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
            Prepared::new(settings, &policy)
        });
    }

    /// Replaces settings together with the policy that `put` puts in force; that policy.
    pub fn replace(&self, settings: Settings, put: impl FnOnce() -> Arc<Policy>) -> Arc<Policy> {
        Arc::clone(&self.0.replace(|_| Prepared::new(settings, &put())).policy)
    }

    /// Prepares for a policy that somebody else has put in force.
    #[cold]
    fn catch_up(&self, limiter: &Limiter) {
        self.0.replace(|last| Prepared::new(last.settings.clone(), &limiter.policy()));
    }
}

#[cfg(test)]
mod tests {
    use tollkeeper::{Capacity, Clock, Limit, MemoryStore, Quota, StatusSet};

    use super::*;

    #[test]
    fn one_limit_by_one_fact_has_a_way_of_its_own() {
        let limit = || Limit::new("lone", Quota::per_hour(2)).by("ip");
        let other = || Limit::new("other", Quota::per_hour(2)).by("ip");
        for (limits, is_lone) in [
            (vec![limit()], true),
            (vec![limit().mode(Mode::Shadow)], true),
            (vec![limit(), other().mode(Mode::Off)], true),
            (vec![limit(), other()], false),
            (vec![limit().by("user")], false),
            (vec![limit().when("user", "*")], false),
            (vec![limit().allow("192.0.2.1")], false),
            (vec![limit().algorithm(Algorithm::LeakyBucket)], false),
            (vec![limit().refund_when(StatusSet::of([200]))], false),
            (vec![Limit::new("slots", Quota::slots(2)).by("ip")], false),
            (vec![], false),
        ] {
            let policy = Policy::new(limits).expect("valid limits");
            let limiter = Limiter::embedded(policy, MemoryStore::new(Capacity::default(), Clock::system()));
            let prepared = InForce::new(Settings::default(), &limiter).read(&limiter);
            assert_eq!(prepared.lone.is_some(), is_lone, "{:?}", prepared.policy.rules());
        }
    }
}
