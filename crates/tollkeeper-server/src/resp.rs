//! RESP, the protocol of Redis: any of its clients is a client of this. Translates, and decides nothing.

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

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use tollkeeper::{Meter, OnStoreFailure};

use crate::service::Service;
use throttle::Dialect;

/// What all connections share.
#[derive(Debug)]
pub struct Resp {
    service: Arc<Service>,
    cell: Meter,
    crab: Meter,
    password: Password,
    began: Instant,
    /// Connections there have been, and those that have ended.
    came: AtomicU64,
    gone: AtomicU64,
}

/// What a client has to say before it may ask anything, if it has to say something.
#[derive(Default)]
pub struct Password(Option<Box<IsRight>>);

type IsRight = dyn Fn(&[u8]) -> bool + Send + Sync;

impl Password {
    /// One that is told by asking whether it is right.
    pub fn told_by(is_right: impl Fn(&[u8]) -> bool + Send + Sync + 'static) -> Password {
        Password(Some(Box::new(is_right)))
    }

    fn is_needed(&self) -> bool {
        self.0.is_some()
    }

    fn is(&self, word: &[u8]) -> bool {
        self.0.as_ref().is_some_and(|is_right| is_right(word))
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_needed() { "Password(…)" } else { "Password(none)" })
    }
}

impl Resp {
    /// Asks this service. Limits that travel with calls have no failure policy of their own.
    pub fn new(service: Arc<Service>, on_store_failure: OnStoreFailure, password: Password) -> Resp {
        let meter = |dialect: Dialect| service.limiter.meter(dialect.name_space(), on_store_failure);
        let (cell, crab) = (meter(Dialect::Cell), meter(Dialect::Crab));
        let (came, gone) = (AtomicU64::new(0), AtomicU64::new(0));
        Resp { service, cell, crab, password, began: Instant::now(), came, gone }
    }

    fn meter(&self, dialect: Dialect) -> &Meter {
        match dialect {
            Dialect::Cell => &self.cell,
            Dialect::Crab => &self.crab,
        }
    }

    /// A number for the next connection.
    fn number(&self) -> u64 {
        self.came.fetch_add(1, Relaxed) + 1
    }

    fn connected(&self) -> u64 {
        self.came.load(Relaxed).saturating_sub(self.gone.load(Relaxed))
    }
}
