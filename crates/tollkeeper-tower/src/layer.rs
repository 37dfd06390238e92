//! `RateLimitLayer`: configures rate limiting and wraps services with it.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, request, response};
use tollkeeper::http::{HeaderDialect, HttpSettings};
use tollkeeper::{Decision, Limiter, Percent, Span};
use tollkeeper_core::net::CanonicalIp;
use tower_layer::Layer;

use crate::random;
use crate::service::RateLimit;
use crate::settings::{ActiveSettings, InCode, Settings};

/// A tower layer that asks a [`Limiter`] about each request before it reaches the wrapped service.
///
/// It reads facts from the request, the limiter decides, and a refused request is answered with 429. All clones and all
/// connections share the counts of the limiter.
///
/// Each setter returns a changed layer. It changes no other clone and no service that a layer has already wrapped, so that
/// a clone can be changed for some routes. Settings in code take precedence over those of a config file, even when the
/// file is reloaded.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper::{Limit, Limiter, Quota};
/// use tollkeeper_tower::RateLimitLayer;
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("per-ip", Quota::per_minute(1000)).by("ip"))
///     .limit(Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"))
///     .build()?;
/// let layer = RateLimitLayer::new(limiter)
///     .fact("user", |parts| Some(parts.headers.get("x-user")?.to_str().ok()?.to_owned()));
/// # drop(layer);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    pub(crate) shared: Arc<Shared>,
}

/// The state that all services of a layer share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) limiter: Limiter,
    pub(crate) active_settings: Arc<ActiveSettings>,
    pub(crate) options: Options,
    /// Watches the config file until it is dropped.
    #[cfg(feature = "config")]
    follow: Option<Arc<tollkeeper::config::Follow>>,
}

type Fact = Arc<dyn Fn(&request::Parts) -> Option<String> + Send + Sync>;
type Cost = Arc<dyn Fn(&request::Parts) -> u64 + Send + Sync>;
type OnResponse = Arc<dyn Fn(&Decision, &mut response::Parts) + Send + Sync>;
type OnRefusal = Arc<dyn Fn(&Decision, Response<Bytes>) -> Response<Bytes> + Send + Sync>;

/// Settings and hooks that the application sets in code, not in a config file.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) facts: Vec<(Box<str>, Fact)>,
    pub(crate) cost: Option<Cost>,
    pub(crate) on_response: Option<OnResponse>,
    pub(crate) on_refusal: Option<OnRefusal>,
    pub(crate) longest_delay: Span,
    pub(crate) assumed_peer: Option<CanonicalIp>,
    pub(crate) hands_over_charge: bool,
    pub(crate) draw: fn() -> u64,
}

impl RateLimitLayer {
    /// A layer that reads requests by [`HttpSettings::default`], and adds the headers of the IETF draft and
    /// `X-RateLimit-…` to responses.
    pub fn new(limiter: Limiter) -> RateLimitLayer {
        RateLimitLayer::with(limiter, Settings::default())
    }

    pub(crate) fn with(limiter: Limiter, settings: Settings) -> RateLimitLayer {
        let active_settings = Arc::new(ActiveSettings::new(settings, &limiter));
        RateLimitLayer::following(limiter, active_settings)
    }

    /// A layer that follows settings which others replace: several layers, or a layer and another reader of requests,
    /// share one config.
    pub fn following(limiter: Limiter, active_settings: Arc<ActiveSettings>) -> RateLimitLayer {
        let options = Options {
            facts: Vec::new(),
            cost: None,
            on_response: None,
            on_refusal: None,
            longest_delay: Span::from_secs(60),
            assumed_peer: None,
            hands_over_charge: false,
            draw: random::draw,
        };
        let shared = Shared {
            limiter,
            active_settings,
            options,
            #[cfg(feature = "config")]
            follow: None,
        };
        RateLimitLayer { shared: Arc::new(shared) }
    }

    /// Sets how facts are read from requests. Its IPv6 prefix replaces the limiter's, until a config file that the limiter
    /// follows is reloaded.
    ///
    /// # Panics
    ///
    /// If a route is not a path pattern, or if a fact is normalised by NFKC without the feature `nfkc`.
    #[must_use]
    pub fn http(self, http: HttpSettings) -> RateLimitLayer {
        self.set(|in_code| in_code.http = Some(http))
    }

    /// Sets the dialects of the rate-limit headers of every response; with none there is only `Retry-After`.
    ///
    /// # Panics
    ///
    /// If two of them are IETF drafts: their headers have the same names.
    #[must_use]
    pub fn headers(self, dialects: impl IntoIterator<Item = HeaderDialect>) -> RateLimitLayer {
        let dialects: Vec<HeaderDialect> = dialects.into_iter().collect();
        let drafts = dialects.iter().filter(|dialect| **dialect != HeaderDialect::XRateLimit).count();
        assert!(
            drafts <= 1,
            "at most one of ietf, draft-03, draft-06 and draft-07: their headers have the same names"
        );
        self.set(|in_code| in_code.headers = Some(dialects))
    }

    /// Sets the largest share by which `Retry-After` is randomly lengthened, so that clients do not all retry at once.
    /// The default is 10 %. The jitter is never longer than 30 s, or 1 s for a wait below 10 s.
    #[must_use]
    pub fn retry_after_jitter(self, share: Percent) -> RateLimitLayer {
        self.set(|in_code| in_code.retry_after_jitter = Some(share))
    }

    /// Adds a fact that only the application knows. It replaces a fact of the same name that is read from the request.
    /// `read` is called only if an active limit names the fact.
    #[must_use]
    pub fn fact(
        self,
        name: impl Into<String>,
        read: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> RateLimitLayer {
        let name = name.into().into_boxed_str();
        self.with_options(|options| options.facts.push((name, Arc::new(read))))
    }

    /// Sets the cost of a request, from 1 to 2^31. The default is 1.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&request::Parts) -> u64 + Send + Sync + 'static) -> RateLimitLayer {
        self.with_options(|options| options.cost = Some(Arc::new(cost)))
    }

    /// Sets a hook that is called with every decision and the head of its response, after the rate-limit headers have
    /// been inserted. It is called for refusals, too.
    #[must_use]
    pub fn on_response(
        self,
        hook: impl Fn(&Decision, &mut response::Parts) + Send + Sync + 'static,
    ) -> RateLimitLayer {
        self.with_options(|options| options.on_response = Some(Arc::new(hook)))
    }

    /// Sets a hook that may replace the response to a refused request. It is called with the response that would
    /// otherwise be sent.
    #[must_use]
    pub fn on_refusal(
        self,
        hook: impl Fn(&Decision, Response<Bytes>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> RateLimitLayer {
        self.with_options(|options| options.on_refusal = Some(Arc::new(hook)))
    }

    /// Sets the longest time that a leaky bucket may delay a request. The default is a minute. A request that would have
    /// to wait longer is refused.
    #[must_use]
    pub fn longest_delay(self, longest: impl Into<Span>) -> RateLimitLayer {
        let longest = longest.into();
        self.with_options(|options| options.longest_delay = longest)
    }

    /// Sets the address of peers that have none, as on a Unix socket.
    ///
    /// Without it, a request whose peer is unknown is answered with 500 if a limit needs its address. Usually the server
    /// forgot to provide it (`into_make_service_with_connect_info` in axum, [`PeerAddress`](crate::PeerAddress) in other
    /// servers), and that must not disable a limit.
    #[must_use]
    pub fn assume_peer(self, peer: IpAddr) -> RateLimitLayer {
        self.with_options(|options| options.assumed_peer = Some(peer.into()))
    }

    /// Inserts the [`Charge`](tollkeeper::Charge) of every admitted request into its extensions, for a handler that knows
    /// the final cost only later: pass it to [`Limiter::settle`] or [`Limiter::refund`]. There is no charge if no limit
    /// applied, or if none was charged because the store did not answer.
    #[must_use]
    pub fn hand_over_charge(self) -> RateLimitLayer {
        self.with_options(|options| options.hands_over_charge = true)
    }

    /// Sets the source of the random numbers for the jitter of `Retry-After`: for tests.
    #[must_use]
    pub fn draw(self, draw: fn() -> u64) -> RateLimitLayer {
        self.with_options(|options| options.draw = draw)
    }

    /// The limiter that decides.
    pub fn limiter(&self) -> &Limiter {
        &self.shared.limiter
    }

    fn set(mut self, change: impl FnOnce(&mut InCode)) -> RateLimitLayer {
        let shared = Arc::make_mut(&mut self.shared);
        shared.active_settings = Arc::new(shared.active_settings.changed(&shared.limiter, change));
        self
    }

    fn with_options(mut self, change: impl FnOnce(&mut Options)) -> RateLimitLayer {
        change(&mut Arc::make_mut(&mut self.shared).options);
        self
    }
}

impl Shared {
    #[cfg(feature = "config")]
    pub(crate) fn keep(&mut self, follow: tollkeeper::config::Follow) {
        self.follow = Some(Arc::new(follow));
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, service: S) -> RateLimit<S> {
        RateLimit::new(service, Arc::clone(&self.shared))
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts: Vec<&str> = self.facts.iter().map(|(name, _)| &**name).collect();
        f.debug_struct("Options").field("facts", &facts).finish_non_exhaustive()
    }
}
