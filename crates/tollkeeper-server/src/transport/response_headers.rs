//! What clients are told of their limits in headers.

use hyper::header::HeaderMap;
use tollkeeper::Decision;
use tollkeeper::config::Config;
use tollkeeper::http::HeaderDialect;
use tollkeeper_tower::headers::{self, Jitter, Written};
use tollkeeper_tower::random::draw;

/// Which headers there are, and how far apart clients are told to come again.
#[derive(Debug)]
pub struct Headers {
    http: Vec<HeaderDialect>,
    grpc: Vec<HeaderDialect>,
    jitter: Jitter,
}

impl Headers {
    /// As the config has it.
    pub fn of(config: &Config) -> Headers {
        let jitter = Jitter { share: config.retry_after_jitter, draw };
        Headers { http: config.headers.clone(), grpc: config.grpc.headers.clone(), jitter }
    }

    /// Puts those of an answer over HTTP into its map.
    pub fn insert(&self, map: &mut HeaderMap, decision: &Decision) {
        headers::insert(map, decision, &self.http, &self.jitter);
    }

    /// Those that Envoy is told to add.
    pub fn for_envoy(&self, decision: &Decision) -> Written {
        headers::write(decision, &self.grpc, &self.jitter)
    }
}
