//! `tollkeeper proxy URL`: the limits of the config in front of one HTTP service.

use std::process::ExitCode;

use anyhow::Context as _;
use tollkeeper::config::{Listen, Listener};

use crate::command::args::Proxy;
use crate::proxy::{self, connect::TlsFiles};
use crate::server::{self, Options, ProxyOptions};

/// The policy of a proxy without a config.
pub const BUILTIN: &str = include_str!("../templates/builtin-proxy.yaml");

/// Runs until SIGTERM or SIGINT.
pub fn run(args: Proxy) -> anyhow::Result<ExitCode> {
    let at = |port: u16| Some(Listener::At(([127, 0, 0, 1], port).into()));
    let options = proxy::Options {
        target: args.url.0.map_err(anyhow::Error::msg).context("URL")?,
        tls: TlsFiles { ca: args.upstream_ca, identity: args.upstream_cert.zip(args.upstream_key) },
        upgrades: args.upgrade,
        host_header: args.host_header.map(Into::into),
        debug_headers: args.debug_headers,
    };
    server::run(Options {
        args: args.server,
        builtin: BUILTIN,
        listen: Listen { http: args.http, grpc: args.grpc, resp: args.resp, proxy: args.listen },
        // gRPC and RESP are opened only on request.
        default_listen: Listen { http: at(8080), grpc: None, resp: None, proxy: at(8000) },
        proxy: Some(ProxyOptions { options, access_log: args.access_log }),
    })
}
