//! `tollkeeper serve`: starts the service and its listeners, reloads on signals, and drains at the end.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tollkeeper::config::{Config, Follow, Format, Listener, Report};

use crate::command::args::Serve;
use crate::control::access::{self, Tokens};
use crate::control::active_limits::Source;
use crate::control::reload::{self, Changes};
use crate::control::rlimit;
use crate::control::systemd;
use crate::service::Service;
use crate::store::Store;
use crate::telemetry::events;
use crate::telemetry::logging;
use crate::telemetry::otlp::Exporter;
use crate::telemetry::refusal_log;
use crate::telemetry::store_health;
use crate::transport::connection_budget::{Room, Transport};
use crate::transport::grpc::Grpc;
use crate::transport::http::connection::Http;
use crate::transport::listener::Connections;
use crate::transport::resp::Resp;

/// The policy of a server without a config.
pub const BUILTIN: &str = include_str!("../templates/builtin.yaml");

/// The listen backlog, which the system may reduce.
const BACKLOG: u32 = 4_096;

/// How long requests in flight may take after the listeners are closed.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// Runs until SIGTERM or SIGINT. The exit code is 1 if the counters could not be saved at the end.
pub fn run(args: &Serve) -> anyhow::Result<ExitCode> {
    logging::begin(args.log);
    rlimit::raise();
    let (config, source) = match &args.config {
        Some(file) => {
            let (config, report) = Config::read(file)?;
            log_warnings(&report);
            (config, Source::File)
        }
        None => (builtin(), Source::Builtin),
    };
    // Watch certificates before they are read, so that no change is missed.
    let certificates =
        config.tls.iter().flat_map(|tls| [Some(&tls.cert), Some(&tls.key), tls.client_ca.as_ref()]);
    let changes = Changes::of(certificates.flatten().map(|file| file.as_path()));
    let store = match &args.store {
        None => config.store.clone(),
        Some(store) => store.0.clone().context("--store")?,
    };
    let http = choose(args.http, config.listen.http, "127.0.0.1:8080");
    let resp = choose(args.resp, config.listen.resp, "127.0.0.1:6380");
    let grpc = choose(args.grpc, config.listen.grpc, "127.0.0.1:8081");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let most = rlimit::connections(Store::files(&store, &config));
        let store = Store::open(&store, &config)?;
        let on_store_failure = config.on_store_failure;
        let memory = store.memory().clone();
        let service = Arc::new(Service::new(config.clone(), source, store)?);
        if let Some(file) = &args.log_admissions {
            service.log_admissions(file)?;
        }
        let metrics = Arc::clone(&service.metrics);
        let follow = match &args.config {
            Some(file) => Some(reload::follow(file, &config, Arc::clone(&service))?),
            None => None,
        };
        let resp_service = Arc::new(Resp::new(Arc::clone(&service), on_store_failure));
        serve(args, http, grpc, (resp, resp_service), most, (follow, changes), service).await?;
        if let Some(log) = metrics.admissions.get() {
            log.close();
        }
        // Save explicitly, because dropping the store could not report a failure.
        Ok(match memory.close() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!("the counters were not saved: {error}");
                ExitCode::FAILURE
            }
        })
    })
}

/// The config of a server without a config file.
pub fn builtin() -> Config {
    let parsed = Config::parse("../templates/builtin.yaml", Format::Yaml, BUILTIN.as_bytes(), &|_| None);
    parsed.expect("the built-in policy is valid").0
}

async fn serve(
    args: &Serve,
    http: Listener,
    grpc: Listener,
    (resp, resp_service): (Listener, Arc<Resp>),
    most_connections: usize,
    (follow, mut changes): (Option<Follow>, Changes),
    service: Arc<Service>,
) -> anyhow::Result<()> {
    // Handle signals before printing the first `listening` line: a process that reads it may send them at once.
    let mut hangup = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let (http, grpc) = (listen("http", http)?, listen("grpc", grpc)?);
    let resp = listen("resp", resp)?;
    let listeners =
        [(&http, Transport::Http), (&grpc, Transport::Grpc), (&resp, Transport::Resp)].into_iter();
    let listeners: Vec<Transport> =
        listeners.filter(|(listener, _)| listener.is_some()).map(|(_, transport)| transport).collect();
    let room = Room::new(most_connections, &listeners);
    tracing::debug!("at most {most_connections} connections may be open at the same time");
    tokio::spawn(events::send_every_second(Arc::clone(&service)));
    let (stop_log, stopped) = oneshot::channel();
    let refusal_log = tokio::spawn(refusal_log::write(Arc::clone(&service), stopped));
    tokio::spawn(store_health::watch(service.store.memory().clone()));
    if let Some(following) = Arc::clone(&service).begin_to_follow().await {
        tokio::spawn(following);
    }
    let exporter = args.otlp.clone().map(|collector| Exporter::begin(collector, Arc::clone(&service)));
    let mut open = Vec::new();
    if let Some((listener, address)) = http {
        let is_loopback = address.ip().to_canonical().is_loopback();
        if args.config.is_none() {
            let (token, digest) = access::generate_token();
            service.access.change(Tokens { admin: Some(digest), demo: is_loopback, ..Tokens::default() });
            eprintln!(
                "no --config: 5 requests in 10 seconds for each user. Try this six times:\n\n  \
                 curl -d '{{\"facts\":{{\"user\":\"alice\"}}}}' http://{address}/v1/check\n\n\
                 Admin calls take this token, which is shown only here:\n\n  \
                 curl -H 'Authorization: Bearer {token}' -X DELETE \
                 'http://{address}/v1/state?limit=demo&user=alice'\n"
            );
        }
        let protocol = Http::new(Arc::clone(&service), is_loopback);
        open.push(Connections::accept(listener, Arc::clone(&room), Arc::clone(&service), protocol));
        listening("http", address);
    }
    let rls = Grpc::new(Arc::clone(&service)).await;
    if let Some((listener, address)) = grpc {
        service.metrics.grpc.begin();
        open.push(Connections::accept(listener, Arc::clone(&room), Arc::clone(&service), rls.clone()));
        listening("grpc", address);
    }
    if let Some((listener, address)) = resp {
        service.metrics.resp.begin();
        open.push(Connections::accept(listener, Arc::clone(&room), Arc::clone(&service), resp_service));
        listening("resp", address);
    }

    systemd::notify(systemd::State::Ready);
    loop {
        tokio::select! {
            _ = hangup.recv() => {}
            () = changes.next() => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
        match &follow {
            Some(follow) => follow.reload(),
            None => tracing::info!("SIGHUP ignored: there is no config file to reload"),
        }
    }
    drop(follow);
    tracing::info!("draining");
    systemd::notify(systemd::State::Stopping);
    service.drain();
    rls.drain().await;
    let drained = async {
        tokio::time::sleep(args.drain_delay).await;
        rls.close().await;
        // Close all listeners concurrently, so that none waits for the requests of another.
        let closing: Vec<_> =
            open.into_iter().map(|connections| tokio::spawn(connections.close(LAST_REQUESTS))).collect();
        let mut left = 0;
        for closed in closing {
            left += closed.await.unwrap_or(0);
        }
        if left > 0 {
            tracing::warn!("closed {left} connections with requests in flight after {LAST_REQUESTS:?}");
        }
    };
    let drained = async {
        drained.await;
        if let Some(exporter) = exporter {
            exporter.finish().await;
        }
        drop(stop_log);
        let _ = refusal_log.await;
    };
    tokio::select! {
        () = drained => {}
        // A second signal skips the rest of the drain.
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Binds the listener, unless it is `off`.
fn listen(name: &str, at: Listener) -> anyhow::Result<Option<(TcpListener, SocketAddr)>> {
    let Listener::At(address) = at else { return Ok(None) };
    let listener = bind(address).with_context(|| {
        let protocol = name.to_uppercase();
        format!("cannot listen for {protocol} on {address} (choose another address with `--{name}`)")
    })?;
    let address = listener.local_addr()?;
    Ok(Some((listener, address)))
}

/// Like [`TcpListener::bind`], but with a larger backlog than its 128. A client that finds the backlog full retries
/// after a second, or its HTTP/2 connection is reset; and thousands connect at once when another node goes away.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Prints the address of a listener on standard output. A closed pipe is ignored: the reader may be gone.
fn listening(name: &str, address: impl std::fmt::Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "listening {name}={address}").and_then(|()| out.flush());
}

/// The flag overrides the file, which overrides the default.
fn choose(flag: Option<Listener>, file: Option<Listener>, default: &str) -> Listener {
    flag.or(file).unwrap_or_else(|| default.parse().expect("an address"))
}

/// Logs the warnings of a config that is applied nevertheless.
pub fn log_warnings(report: &Report) {
    if !report.is_empty() {
        tracing::warn!("the config has warnings:\n{report}");
    }
}
