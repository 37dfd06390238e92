//! The rate limit headers of responses, for HTTP and for Envoy.

use hyper::header::HeaderMap;
use tollkeeper::Decision;
use tollkeeper::config::Config;
use tollkeeper::http::HeaderDialect;
use tollkeeper_tower::headers::{self, Jitter, SerializedHeaders};
use tollkeeper_tower::random::draw;

/// Which headers are sent, and how `Retry-After` is spread among clients.
#[derive(Debug)]
pub struct Headers {
    http: Vec<HeaderDialect>,
    grpc: Vec<HeaderDialect>,
    jitter: Jitter,
}

impl Headers {
    /// The headers that the config asks for.
    pub fn of(config: &Config) -> Headers {
        let jitter = Jitter { share: config.retry_after_jitter, draw };
        Headers { http: config.headers.clone(), grpc: config.grpc.headers.clone(), jitter }
    }

    /// Inserts the headers of an HTTP response.
    pub fn insert(&self, map: &mut HeaderMap, decision: &Decision) {
        headers::insert(map, decision, &self.http, &self.jitter);
    }

    /// The headers that Envoy should add to its response.
    pub fn for_envoy(&self, decision: &Decision) -> SerializedHeaders {
        headers::write(decision, &self.grpc, &self.jitter)
    }
}
