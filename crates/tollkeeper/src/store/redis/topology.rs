//! Routes tolls and calls to one Redis server or to the servers of a cluster.

use std::sync::Arc;

use redis::{Cmd, Value};
use tollkeeper_core::Reply;

use super::batcher::{Batcher, Target};
use super::call_error::CallError;
use super::cluster::Cluster;
use super::slot;
use super::wire::{self, Call, EncodedToll, Malformed};
use crate::store::remote::Server;

/// The servers that hold the states.
#[derive(Debug)]
pub(crate) enum Topology {
    /// One server holds all keys.
    One(Batcher),
    /// The servers of a cluster share the keys, by slot.
    Many(Cluster),
}

impl Topology {
    /// Decides a toll whose keys share a slot.
    pub(crate) async fn decide(&self, toll: EncodedToll) -> Result<Reply, CallError> {
        match self {
            Topology::One(batcher) => batcher.decide(0, toll).await,
            Topology::Many(cluster) => {
                let slot = toll.names().next().map_or(0, slot::of);
                // On the heap, so that the future for a single server stays small.
                Box::pin(cluster.decide(slot, toll)).await
            }
        }
    }

    /// The server of this slot, according to the last known slot table.
    pub(crate) fn server(&self, slot: u16) -> Server {
        match self {
            Topology::One(_) => Server::default(),
            Topology::Many(cluster) => cluster.server_of(slot),
        }
    }

    /// Runs a script whose keys share a slot, and parses the reply with `read`.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        match self {
            Topology::One(batcher) => batcher.run(call, Target::Own, read).await,
            Topology::Many(cluster) => {
                let slot = call.keys.first().map_or(0, |key| slot::of(key));
                cluster.run(slot, call, read).await
            }
        }
    }

    /// Runs a plain command on the server that has this key, and parses the reply with `read`.
    pub(crate) async fn command<T>(
        &self,
        key: &str,
        command: &Cmd,
        read: impl Fn(Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        match self {
            Topology::One(batcher) => batcher.command(command, Target::Own, read).await,
            Topology::Many(cluster) => cluster.command(slot::of(key), command, read).await,
        }
    }

    /// Whether any server may evict keys; `None` if unknown.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        match self {
            Topology::One(batcher) => batcher.may_evict(),
            Topology::Many(cluster) => cluster.may_evict(),
        }
    }

    /// Why a server cannot be used; `None` if all can.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        match self {
            Topology::One(batcher) => batcher.trouble(),
            Topology::Many(cluster) => cluster.trouble(),
        }
    }

    /// The number of connections made so far.
    pub(crate) fn arrivals(&self) -> u64 {
        match self {
            Topology::One(batcher) => batcher.arrivals(),
            Topology::Many(cluster) => cluster.arrivals(),
        }
    }

    /// The number of connections made to this server so far.
    pub(crate) fn arrivals_of(&self, server: &Server) -> u64 {
        match self {
            Topology::One(batcher) => batcher.arrivals(),
            Topology::Many(cluster) => cluster.arrivals_of(server),
        }
    }

    /// Closes all connections, so that the next ones look up the primary again. A cluster ignores this.
    pub(crate) fn reconnect(&self) {
        if let Topology::One(batcher) = self {
            batcher.reconnect();
        }
    }
}
