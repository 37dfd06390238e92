//! Counts the requests of one transport by route and result, and their durations.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use tollkeeper::Facts;

use super::DURATIONS;
use super::histogram::{Counts, Histogram};
use super::stripe::{STRIPES, Stripe};

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was allowed.
    Allowed,
    /// It was refused.
    Refused,
    /// It was decided without the store.
    Degraded,
    /// It was invalid.
    Error,
}

impl Ended {
    pub(super) const ALL: [Ended; 4] = [Ended::Allowed, Ended::Refused, Ended::Degraded, Ended::Error];

    pub(super) fn name(self) -> &'static str {
        match self {
            Ended::Allowed => "allowed",
            Ended::Refused => "refused",
            Ended::Degraded => "degraded",
            Ended::Error => "error",
        }
    }
}

/// Counts of results, for requests that are recorded together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Endings([u64; Ended::ALL.len()]);

impl Endings {
    /// Adds one result.
    #[inline]
    pub fn add(&mut self, ended: Ended) {
        self.0[ended as usize] += 1;
    }
}

/// The number of a route that the config names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteLabel(pub(super) usize);

impl RouteLabel {
    /// No known route.
    pub const NONE: RouteLabel = RouteLabel(0);
    /// Any route beyond the first [`MOST`].
    const OTHER: RouteLabel = RouteLabel(MOST + 1);
}

/// The maximum number of distinct routes.
const MOST: usize = 200;

/// The results and durations of requests over one transport.
#[derive(Debug)]
pub struct RequestTally {
    /// By route; each is allocated on first use.
    routes: Box<[OnceLock<Box<Ends>>]>,
    durations: Histogram<{ DURATIONS.len() }>,
}

/// By [`Ended`].
type Ends = [EndStripe; STRIPES];

#[derive(Debug, Default)]
#[repr(align(64))]
struct EndStripe([AtomicU64; Ended::ALL.len()]);

impl Default for RequestTally {
    fn default() -> RequestTally {
        let routes = (0..MOST + 2).map(|_| OnceLock::new()).collect();
        RequestTally { routes, durations: Histogram::new(&DURATIONS) }
    }
}

impl RequestTally {
    /// Makes the series of this transport appear with zeros, because its listener is open.
    pub fn begin(&self) {
        self.of(RouteLabel::NONE);
    }

    #[inline]
    fn of(&self, route: RouteLabel) -> &Ends {
        self.routes[route.0].get_or_init(Default::default)
    }

    /// Records one request with its result and duration.
    #[inline]
    pub fn record(&self, ended: Ended, took: Duration) {
        self.record_on(RouteLabel::NONE, ended, took);
    }

    /// Like [`RequestTally::record`], for a route.
    #[inline]
    pub fn record_on(&self, route: RouteLabel, ended: Ended, took: Duration) {
        let stripe = Stripe::mine();
        stripe.add(&self.of(route)[stripe.index()].0[ended as usize], 1);
        self.durations.record(stripe, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Records the requests of one batch, which all took the same time.
    pub fn record_together(&self, endings: &Endings, took: Duration) {
        let stripe = Stripe::mine();
        let ends = &self.of(RouteLabel::NONE)[stripe.index()].0;
        for (end, count) in ends.iter().zip(endings.0).filter(|(_, count)| *count > 0) {
            stripe.add(end, count);
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.durations.record_all(stripe, nanos, endings.0.iter().sum());
    }

    /// Counts by route and result, for the routes that had requests.
    pub(super) fn ends(&self) -> impl Iterator<Item = (RouteLabel, Ended, u64)> {
        let seen =
            self.routes.iter().enumerate().filter_map(|(route, ends)| Some((RouteLabel(route), ends.get()?)));
        seen.flat_map(|(route, ends)| {
            Ended::ALL.map(|ended| {
                let count = ends.iter().map(|stripe| stripe.0[ended as usize].load(Relaxed)).sum();
                (route, ended, count)
            })
        })
    }

    /// The durations in seconds; `None` if the transport has no series yet.
    pub(super) fn durations(&self) -> Option<Counts> {
        self.ends().next().map(|_| self.durations.counts(1e9))
    }
}

/// The routes that the config names.
#[derive(Debug, Default)]
pub(super) struct Routes(ArcSwap<Known>);

#[derive(Clone, Debug, Default)]
struct Known {
    numbers: HashMap<Box<str>, RouteLabel>,
    /// Whether there are more than [`MOST`] routes.
    more: bool,
}

impl Routes {
    /// Adds route names. They are never removed, so a series continues after a reload.
    pub(super) fn know<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let names: Vec<&str> = names.into_iter().collect();
        if names.is_empty() {
            return;
        }
        self.0.rcu(|known| {
            let mut known = Known::clone(known);
            // The value of the fact `route` where no pattern matches.
            for name in ["unmatched"].iter().chain(&names) {
                let next = known.numbers.len() + 1;
                if known.numbers.contains_key(*name) {
                    continue;
                } else if next <= MOST {
                    known.numbers.insert((*name).into(), RouteLabel(next));
                } else {
                    known.more = true;
                }
            }
            known
        });
    }

    #[inline]
    pub(super) fn of(&self, facts: &Facts<'_>) -> RouteLabel {
        if self.0.load().numbers.is_empty() {
            return RouteLabel::NONE;
        }
        let Some(value) = facts.get("route") else { return RouteLabel::NONE };
        self.named(value.text(&mut [0; 48]))
    }

    pub(super) fn named(&self, name: &str) -> RouteLabel {
        let known = self.0.load();
        let unknown = if known.more { RouteLabel::OTHER } else { RouteLabel::NONE };
        known.numbers.get(name).copied().unwrap_or(unknown)
    }

    /// Names by route number.
    pub(super) fn names(&self) -> Vec<Box<str>> {
        let mut names = vec![Box::default(); MOST + 2];
        names[RouteLabel::OTHER.0] = "other".into();
        for (name, route) in &self.0.load().numbers {
            names[route.0] = name.clone();
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use tollkeeper::facts;

    use super::*;

    fn name(routes: &Routes, route: &str) -> String {
        let facts = facts! { "route" => route };
        routes.names()[routes.of(&facts).0].to_string()
    }

    #[test]
    fn only_routes_of_the_config_become_labels() {
        let routes = Routes::default();
        assert_eq!(name(&routes, "/login"), "");
        routes.know(["/login", "/users/{id}"]);
        assert_eq!(name(&routes, "/login"), "/login");
        assert_eq!(name(&routes, "/users/{id}"), "/users/{id}");
        assert_eq!(name(&routes, "unmatched"), "unmatched");
        assert_eq!(name(&routes, "/users/7"), "", "clients cannot create labels");
        assert_eq!(routes.of(&facts! { "user" => "/login" }), RouteLabel::NONE);
        routes.know(["/other"]);
        assert_eq!(name(&routes, "/login"), "/login", "routes are never removed");
    }

    #[test]
    fn routes_beyond_200_share_one_label() {
        let routes = Routes::default();
        let all: Vec<String> = (0..300).map(|number| format!("/{number}")).collect();
        routes.know(all.iter().map(String::as_str));
        routes.know(all.iter().map(String::as_str));
        let mut names: Vec<String> = all.iter().map(|route| name(&routes, route)).collect();
        assert_eq!(names[..199], all[..199]);
        names.dedup();
        assert_eq!(names[199..], ["other"]);
    }
}
