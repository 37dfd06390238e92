//! `SingleFlightLayer`: configures single flight and wraps services with it.

use std::sync::Arc;

use tollkeeper::Limiter;
use tollkeeper::http::HttpSettings;
use tower_layer::Layer;

use super::flights::{FlightCounts, Flights};
use super::key::{InvalidRules, KeyReader};
use super::rule::SingleFlightRule;
use super::service::SingleFlight;

/// A tower layer that lets one of identical requests in flight through, and gives its response to the others.
///
/// All clones and all services of a layer share its flights. Put a [`RateLimitLayer`](crate::RateLimitLayer) around it:
/// then each follower is charged by its own limits and gets its own rate-limit headers.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper_tower::{SingleFlightLayer, SingleFlightRule};
///
/// let layer = SingleFlightLayer::new([
///     SingleFlightRule::new().when("path", "/search"),
///     // Shared only by requests with the same credentials, because the response depends on them.
///     SingleFlightRule::new().by("header.authorization").when("path", "/me/*"),
/// ])?;
/// # drop(layer);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct SingleFlightLayer {
    keys: Arc<KeyReader>,
    flights: Arc<Flights>,
}

impl SingleFlightLayer {
    /// A layer that reads requests by [`HttpSettings::default`]. The first rule that applies to a request decides.
    pub fn new(rules: impl IntoIterator<Item = SingleFlightRule>) -> Result<SingleFlightLayer, InvalidRules> {
        SingleFlightLayer::with_http(rules, HttpSettings::default())
    }

    /// A layer that reads requests by these settings.
    ///
    /// # Panics
    ///
    /// If a fact is normalised by NFKC without the feature `nfkc`.
    pub fn with_http(
        rules: impl IntoIterator<Item = SingleFlightRule>,
        http: HttpSettings,
    ) -> Result<SingleFlightLayer, InvalidRules> {
        let keys = Arc::new(KeyReader::new(rules.into_iter().collect(), http)?);
        Ok(SingleFlightLayer { keys, flights: Arc::default() })
    }

    /// Never shares the response to a request with a header that a limit of this limiter reads, such as `by:
    /// header.x-api-key`, unless the rule is keyed by it. The limits may be replaced later.
    #[must_use]
    pub fn with_limiter(self, limiter: Limiter) -> SingleFlightLayer {
        SingleFlightLayer { keys: Arc::new(self.keys.with_limiter(limiter)), ..self }
    }

    /// A layer with the rules of `self` that goes on with the counts of `earlier`: for a config that is reloaded. Flights
    /// are not joined across layers, because a key means something only under its rules.
    #[must_use]
    pub fn continuing(self, earlier: &SingleFlightLayer) -> SingleFlightLayer {
        SingleFlightLayer { flights: Arc::new(Flights::continuing(&earlier.flights)), ..self }
    }

    /// What happened to the requests that a rule applied to.
    pub fn counts(&self) -> FlightCounts {
        self.flights.counts()
    }
}

impl<S> Layer<S> for SingleFlightLayer {
    type Service = SingleFlight<S>;

    fn layer(&self, service: S) -> SingleFlight<S> {
        SingleFlight::new(service, Arc::clone(&self.keys), Arc::clone(&self.flights))
    }
}
