//! RESP, the protocol of Redis, so that every Redis client can be used. Decisions are made by the limiter.

pub mod check;
pub mod commands;
pub mod connection;
mod inline;
pub mod parse;
pub mod reply;
mod session;
#[cfg(test)]
mod tests;
pub mod throttle;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use tollkeeper::{AdHocLimits, OnStoreFailure};

use crate::control::access::Permission;
use crate::service::Service;
use crate::telemetry::logging::OnceAMinute;
use throttle::Dialect;

/// State shared by all RESP connections.
#[derive(Debug)]
pub struct Resp {
    service: Arc<Service>,
    cell: AdHocLimits,
    crab: AdHocLimits,
    began: Instant,
    /// Connections opened since the start, and those of them that have ended.
    came: AtomicU64,
    gone: AtomicU64,
    http: OnceAMinute,
}

impl Resp {
    /// Serves this service. `on_store_failure` applies to `CL.THROTTLE` and `THROTTLE`, whose limits come with each call
    /// and have no failure policy of their own.
    pub fn new(service: Arc<Service>, on_store_failure: OnStoreFailure) -> Resp {
        let ad_hoc = |dialect: Dialect| service.limiter.ad_hoc(dialect.name_space(), on_store_failure);
        let (cell, crab) = (ad_hoc(Dialect::Cell), ad_hoc(Dialect::Crab));
        let (came, gone) = (AtomicU64::new(0), AtomicU64::new(0));
        Resp { service, cell, crab, began: Instant::now(), came, gone, http: OnceAMinute::default() }
    }

    /// Whether a client must authenticate before its first command.
    fn needs_token(&self) -> bool {
        self.service.access.data_is_closed()
    }

    fn admits(&self, token: &[u8]) -> bool {
        self.service.access.admit(Permission::Data, Some(token)).is_ok()
    }

    fn limits(&self, dialect: Dialect) -> &AdHocLimits {
        match dialect {
            Dialect::Cell => &self.cell,
            Dialect::Crab => &self.crab,
        }
    }

    /// Logs a connection that is closed because it sent HTTP.
    fn refuse_http(&self, peer: SocketAddr) {
        self.http.write(|before| {
            tracing::warn!(
                "a RESP connection from {peer} was closed, because it sent HTTP: a wrong port, or a web page that makes \
                 a browser send commands ({before} more since the last such line)"
            );
        });
    }

    /// The id of a new connection, starting at 1.
    fn number(&self) -> u64 {
        self.came.fetch_add(1, Relaxed) + 1
    }

    fn connected(&self) -> u64 {
        self.came.load(Relaxed).saturating_sub(self.gone.load(Relaxed))
    }
}
