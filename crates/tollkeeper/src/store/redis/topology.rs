//! One server or a cluster of them: where a toll is decided.

use std::sync::Arc;

use redis::{Cmd, Value};
use tollkeeper_core::Reply;

use super::batcher::Lane;
use super::call_error::Fate;
use super::cluster::Cluster;
use super::slot;
use super::wire::{self, Call, EncodedToll, Malformed};
use crate::store::remote::Server;

/// Where states are.
#[derive(Debug)]
pub(crate) enum Topology {
    /// On one server.
    One(Lane),
    /// On several, by slot.
    Many(Cluster),
}

impl Topology {
    /// Decides a toll whose keys share a slot.
    pub(crate) async fn decide(&self, asked: EncodedToll) -> Result<Reply, Fate> {
        match self {
            Topology::One(lane) => lane.decide(0, asked).await,
            Topology::Many(cluster) => {
                let slot = asked.names().next().map_or(0, slot::of);
                cluster.decide(slot, asked).await
            }
        }
    }

    /// Who has this slot, as far as is known.
    pub(crate) fn server(&self, slot: u16) -> Server {
        match self {
            Topology::One(_) => Server::default(),
            Topology::Many(cluster) => cluster.server_of(slot),
        }
    }

    /// Runs a script whose keys share a slot, and reads the reply.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        match self {
            Topology::One(lane) => lane.run(call, read).await,
            Topology::Many(cluster) => {
                let slot = call.keys.first().map_or(0, |key| slot::of(key));
                cluster.run(slot, call, read).await
            }
        }
    }

    /// Runs a plain command on the server that has this key, and reads the reply.
    pub(crate) async fn command<T>(
        &self,
        key: &str,
        command: &Cmd,
        read: impl Fn(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        match self {
            Topology::One(lane) => lane.command(command, read).await,
            Topology::Many(cluster) => cluster.command(slot::of(key), command, read).await,
        }
    }

    /// Whether a server may evict keys, if they say so.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        match self {
            Topology::One(lane) => lane.may_evict(),
            Topology::Many(cluster) => cluster.may_evict(),
        }
    }

    /// Why some server cannot be asked, if one cannot.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        match self {
            Topology::One(lane) => lane.trouble(),
            Topology::Many(cluster) => cluster.trouble(),
        }
    }

    /// How many connections there have been.
    pub(crate) fn arrivals(&self) -> u64 {
        match self {
            Topology::One(lane) => lane.arrivals(),
            Topology::Many(cluster) => cluster.arrivals(),
        }
    }

    /// How many connections to this server there have been.
    pub(crate) fn arrivals_of(&self, server: &Server) -> u64 {
        match self {
            Topology::One(lane) => lane.arrivals(),
            Topology::Many(cluster) => cluster.arrivals_of(server),
        }
    }

    /// Gives all connections up, so that the next ones ask again where to go.
    pub(crate) fn give_up(&self) {
        if let Topology::One(lane) = self {
            lane.give_up();
        }
    }
}
