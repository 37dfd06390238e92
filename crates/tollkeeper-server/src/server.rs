//! Starts the service and its listeners, reloads on signals, and drains at the end: what `serve` and `proxy` share.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tollkeeper::Span;
use tollkeeper::config::{Config, Follow, Format, Listen, Listener, Report};
use tollkeeper_engine::api::active_limits::LimitSource;

use crate::command::args::{AccessLog, ServerArgs};
use crate::control::access::{self, Tokens};
use crate::control::reload::{self, Changes};
use crate::control::rlimit;
use crate::control::systemd;
use crate::proxy::listener::ProxyListener;
use crate::proxy::{self, Proxy};
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

/// The listen backlog, which the system may reduce.
const BACKLOG: u32 = 4_096;

/// How long requests in flight may take after the listeners are closed.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// How to run a server.
#[derive(Debug)]
pub struct Options {
    /// The config file, the store and how to log.
    pub args: ServerArgs,
    /// The policy without a file.
    pub builtin: &'static str,
    /// The listeners that the command line names.
    pub listen: Listen,
    /// The listeners where neither the command line nor the config names one.
    pub default_listen: Listen,
    /// The proxy, if this server is one.
    pub proxy: Option<ProxyOptions>,
}

/// How to run the proxy of a server.
#[derive(Debug)]
pub struct ProxyOptions {
    /// Its upstream.
    pub options: proxy::Options,
    /// Where its access log is written.
    pub access_log: Option<AccessLog>,
}

/// Runs until SIGTERM or SIGINT. The exit code is 1 if the counters could not be saved at the end.
pub fn run(options: Options) -> anyhow::Result<ExitCode> {
    logging::begin(options.args.log);
    rlimit::raise();
    let (config, source) = match &options.args.config {
        Some(file) => {
            let (config, report) = Config::read(file)?;
            log_warnings(&report);
            (config, LimitSource::File)
        }
        None => (builtin(options.builtin), LimitSource::Builtin),
    };
    // Watch certificates before they are read, so that no change is missed.
    let certificates =
        config.tls.iter().flat_map(|tls| [Some(&tls.cert), Some(&tls.key), tls.client_ca.as_ref()]);
    let changes = Changes::of(certificates.flatten().map(|file| file.as_path()));
    let store = match &options.args.store {
        None => config.store.clone(),
        Some(store) => store.0.clone().context("--store")?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let most = rlimit::connections(Store::files(&store, &config));
        let store = Store::open(&store, &config)?;
        let memory = store.memory().clone();
        let service = Arc::new(Service::new(config.clone(), source, store)?);
        if let Some(file) = &options.args.log_admissions {
            service.log_admissions(file)?;
        }
        let access_log = options.proxy.as_ref().and_then(|proxy| proxy.access_log.as_ref());
        let access_log = access_log.map(AccessLog::open).transpose()?.map(Arc::new);
        if let Some(proxy) = &options.proxy {
            let (log, is_traced) = (access_log.clone(), options.args.otlp.is_some());
            service.set_proxy(
                Proxy::new(proxy.options.clone(), &config, Arc::clone(&service), log, is_traced).await?,
            );
        }
        let metrics = Arc::clone(&service.metrics);
        let follow = match &options.args.config {
            Some(file) => Some(reload::follow(file, &config, Arc::clone(&service))?),
            None => None,
        };
        serve(&options, &config, most, (follow, changes), service).await?;
        if let Some(log) = metrics.admissions.get() {
            log.close();
        }
        if let Some(log) = access_log {
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

/// The config of a server without a config file, from a policy that is part of the program.
pub fn builtin(policy: &str) -> Config {
    let parsed = Config::parse("built-in policy", Format::Yaml, policy.as_bytes(), &|_| None);
    parsed.expect("the built-in policy is valid").0
}

async fn serve(
    options: &Options,
    config: &Config,
    most_connections: usize,
    (follow, mut changes): (Option<Follow>, Changes),
    service: Arc<Service>,
) -> anyhow::Result<()> {
    // Handle signals before printing the first `listening` line: a process that reads it may send them at once.
    let mut hangup = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let Bound { http, grpc, resp, proxy } = bind_all(options, config, &service)?;
    let listeners = [
        (&http, Transport::Http),
        (&grpc, Transport::Grpc),
        (&resp, Transport::Resp),
        (&proxy, Transport::Proxy),
    ];
    let listeners = listeners.into_iter().filter(|(listener, _)| listener.is_some());
    let room = Room::new(most_connections, &listeners.map(|(_, transport)| transport).collect::<Vec<_>>());
    tracing::debug!("at most {most_connections} connections may be open at the same time");
    tokio::spawn(events::send_every_second(Arc::clone(&service)));
    let (stop_log, stopped) = oneshot::channel();
    let refusal_log = tokio::spawn(refusal_log::write(Arc::clone(&service), stopped));
    tokio::spawn(store_health::watch(service.store.memory().clone()));
    if let Some(following) = Arc::clone(&service).begin_to_follow().await {
        tokio::spawn(following);
    }
    let exporter =
        options.args.otlp.clone().map(|collector| Exporter::begin(collector, Arc::clone(&service)));
    if options.args.config.is_none() {
        let http = http.as_ref().map(|(_, address)| (*address, open_demo(&service, *address)));
        print_demo(options, http);
    }
    let mut open = Vec::new();
    if let Some((listener, address)) = http {
        let protocol = Http::new(Arc::clone(&service), is_loopback(address));
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
        let protocol = Arc::new(Resp::new(Arc::clone(&service), config.on_store_failure));
        open.push(Connections::accept(listener, Arc::clone(&room), Arc::clone(&service), protocol));
        listening("resp", address);
    }
    if let (Some((listener, address)), Some(proxy)) = (proxy, service.proxy()) {
        service.metrics.proxy.begin();
        let protocol = ProxyListener(Arc::clone(proxy));
        open.push(Connections::accept(listener, Arc::clone(&room), Arc::clone(&service), protocol));
        listening("proxy", address);
    }

    systemd::notify(systemd::ServiceState::Ready);
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
    systemd::notify(systemd::ServiceState::Stopping);
    service.drain();
    rls.drain().await;
    let drained = async {
        tokio::time::sleep(options.args.drain_delay).await;
        rls.close().await;
        // Close all listeners concurrently, so that none waits for the requests of another.
        let closing: Vec<_> =
            open.into_iter().map(|connections| tokio::spawn(connections.close(LAST_REQUESTS))).collect();
        let mut left = 0;
        for closed in closing {
            left += closed.await.unwrap_or(0);
        }
        if left > 0 {
            let grace = Span::from(LAST_REQUESTS);
            tracing::warn!("closed {left} connections with requests in flight after {grace}");
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

/// The listeners that are on.
struct Bound {
    http: Option<(TcpListener, SocketAddr)>,
    grpc: Option<(TcpListener, SocketAddr)>,
    resp: Option<(TcpListener, SocketAddr)>,
    proxy: Option<(TcpListener, SocketAddr)>,
}

/// Binds every listener that is on. The command line overrides the file, which overrides the default.
fn bind_all(options: &Options, config: &Config, service: &Service) -> anyhow::Result<Bound> {
    let (flags, file, defaults) = (&options.listen, &config.listen, &options.default_listen);
    let choose = |which: fn(&Listen) -> Option<Listener>| {
        which(flags).or(which(file)).or(which(defaults)).unwrap_or(Listener::Off)
    };
    let proxy = match service.proxy() {
        Some(_) => listen("listen", choose(|listen| listen.proxy), config.proxy.reuse_port)?,
        None => None,
    };
    Ok(Bound {
        http: listen("http", choose(|listen| listen.http), false)?,
        grpc: listen("grpc", choose(|listen| listen.grpc), false)?,
        resp: listen("resp", choose(|listen| listen.resp), false)?,
        proxy,
    })
}

/// Gives a server without a config an admin token, which is returned. On loopback, its views need none.
fn open_demo(service: &Service, address: SocketAddr) -> String {
    let (token, digest) = access::generate_token();
    service.access.change(Tokens { admin: Some(digest), demo: is_loopback(address), ..Tokens::default() });
    token
}

/// Prints how to try a server without a config. `http` is the address of its API and the admin token.
fn print_demo(options: &Options, http: Option<(SocketAddr, String)>) {
    if let Some(proxy) = &options.proxy {
        eprintln!(
            "no --config: 100 requests in a minute for each address (limit `demo`, by `ip`), in front of {}\n",
            proxy.options.target
        );
    }
    match (&options.proxy, http) {
        (_, None) => {}
        (None, Some((address, token))) => eprintln!(
            "no --config: 5 requests in 10 seconds for each user. Try this six times:\n\n  \
             curl -d '{{\"facts\":{{\"user\":\"alice\"}}}}' http://{address}/v1/check\n\n\
             Admin calls take this token, which is shown only here:\n\n  \
             curl -H 'Authorization: Bearer {token}' -X DELETE \
             'http://{address}/v1/state?limit=demo&user=alice'\n"
        ),
        (Some(_), Some((address, token))) => eprintln!(
            "Dashboard: http://{address}/\n\
             Admin calls take this token, which is shown only here: {token}\n"
        ),
    }
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Binds the listener, unless it is `off`.
fn listen(flag: &str, at: Listener, reuse_port: bool) -> anyhow::Result<Option<(TcpListener, SocketAddr)>> {
    let Listener::At(address) = at else { return Ok(None) };
    let listener = bind(address, reuse_port)
        .with_context(|| format!("cannot listen on {address} (choose another address with `--{flag}`)"))?;
    let address = listener.local_addr()?;
    Ok(Some((listener, address)))
}

/// Like [`TcpListener::bind`], but with a larger backlog than its 128. A client that finds the backlog full retries
/// after a second, or its HTTP/2 connection is reset; and thousands connect at once when another node goes away.
fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(reuse_port)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Prints the address of a listener on standard output. A closed pipe is ignored: the reader may be gone.
fn listening(name: &str, address: impl std::fmt::Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "listening {name}={address}").and_then(|()| out.flush());
}

/// Logs the warnings of a config that is applied nevertheless.
pub fn log_warnings(report: &Report) {
    if !report.is_empty() {
        tracing::warn!("the config has warnings:\n{report}");
    }
}
