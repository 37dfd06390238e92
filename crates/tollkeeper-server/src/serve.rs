//! `tollkeeper serve`: from a config to listeners, and back down.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tollkeeper::config::{Config, Format, Listener, Report};

use crate::args::Serve;
use crate::connections::Connections;
use crate::logging;
use crate::notify;
use crate::otlp::Exporter;
use crate::reload::{self, Changes};
use crate::service::{Service, Source};
use crate::store::Store;

/// The policy of a server that was given none.
pub const BUILTIN: &str = include_str!("builtin.yaml");

/// How long requests in flight may take once the listeners are closed.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// Runs until a signal says to stop.
pub fn run(args: &Serve) -> anyhow::Result<()> {
    logging::begin(args.log);
    let changes = Changes::of(args.config.as_deref());
    let (config, source) = match &args.config {
        Some(file) => {
            let (config, report) = Config::read(file)?;
            log_warnings(&report);
            (config, Source::File)
        }
        None => (builtin(), Source::Builtin),
    };
    let http = choose(args.http, config.listen.http, "127.0.0.1:8080");
    for (name, flag, file) in
        [("grpc", args.grpc, config.listen.grpc), ("resp", args.resp, config.listen.resp)]
    {
        if let Some(Listener::At(_)) = flag {
            bail!("--{name} is not there yet (leave it out, or say `--{name} off`)");
        }
        if let (None, Some(Listener::At(address))) = (flag, file) {
            tracing::warn!("listen.{name} is {address}, but {name} is not there yet: nobody listens there");
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = Store::open(args.store.as_ref().unwrap_or(&config.store), &config)?;
        serve(args, http, changes, Arc::new(Service::new(config, source, store))).await
    })
}

/// The config of a server that was given none.
pub fn builtin() -> Config {
    let parsed = Config::parse("builtin.yaml", Format::Yaml, BUILTIN.as_bytes(), &|_| None);
    parsed.expect("the built-in policy is valid").0
}

async fn serve(
    args: &Serve,
    http: Listener,
    mut changes: Changes,
    service: Arc<Service>,
) -> anyhow::Result<()> {
    // Before the first line says that it listens: whoever reads that may send signals.
    let mut hangup = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let exporter = args.otlp.clone().map(|collector| Exporter::begin(collector, Arc::clone(&service)));
    let connections = match http {
        Listener::Off => None,
        Listener::At(address) => {
            let listener = TcpListener::bind(address).await.with_context(|| {
                format!("cannot listen for HTTP on {address} (choose another address with `--http`)")
            })?;
            let address = listener.local_addr()?;
            let connections = Connections::accept(listener, Arc::clone(&service));
            listening("http", address)?;
            if args.config.is_none() {
                eprintln!(
                    "no --config: 5 requests in 10 seconds for each user. Try this six times:\n\n  \
                     curl -d '{{\"facts\":{{\"user\":\"alice\"}}}}' http://{address}/v1/check\n"
                );
            }
            Some(connections)
        }
    };

    notify::tell(notify::State::Ready);
    loop {
        tokio::select! {
            _ = hangup.recv() => {}
            () = changes.next() => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
        match &args.config {
            Some(file) => reload::now(file, &service),
            None => tracing::info!("SIGHUP: there is no config file to load again"),
        }
    }
    tracing::info!("draining");
    notify::tell(notify::State::Stopping);
    service.drain();
    let drained = async {
        tokio::time::sleep(args.drain_delay).await;
        let Some(connections) = connections else { return };
        let left = connections.close(LAST_REQUESTS).await;
        if left > 0 {
            tracing::warn!("{left} connections had requests in flight after {LAST_REQUESTS:?}");
        }
    };
    let drained = async {
        drained.await;
        if let Some(exporter) = exporter {
            exporter.finish().await;
        }
    };
    tokio::select! {
        () = drained => {}
        // Who asks twice does not want to wait.
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// The one line on standard output that says where.
fn listening(name: &str, address: impl std::fmt::Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "listening {name}={address}")?;
    out.flush()
}

/// Flags win over the file.
fn choose(flag: Option<Listener>, file: Option<Listener>, default: &str) -> Listener {
    flag.or(file).unwrap_or_else(|| default.parse().expect("an address"))
}

/// Warnings of a config that is in force all the same.
pub fn log_warnings(report: &Report) {
    if !report.is_empty() {
        tracing::warn!("the config has warnings:\n{report}");
    }
}
