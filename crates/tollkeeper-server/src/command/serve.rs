//! `tollkeeper serve`: the service over HTTP, gRPC and RESP.

use std::process::ExitCode;

use tollkeeper::config::{Listen, Listener};

use crate::command::args::Serve;
use crate::server::{self, Options};

/// The policy of a server without a config.
pub const BUILTIN: &str = include_str!("../templates/builtin.yaml");

/// Runs until SIGTERM or SIGINT.
pub fn run(args: Serve) -> anyhow::Result<ExitCode> {
    let at = |port: u16| Some(Listener::At(([127, 0, 0, 1], port).into()));
    server::run(Options {
        args: args.server,
        builtin: BUILTIN,
        listen: Listen { http: args.http, grpc: args.grpc, resp: args.resp, proxy: None },
        default_listen: Listen { http: at(8080), grpc: at(8081), resp: at(6380), proxy: None },
        proxy: None,
    })
}
