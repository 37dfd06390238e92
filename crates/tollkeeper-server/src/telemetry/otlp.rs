//! Exports metrics and traces to an OTLP collector, over HTTP as protobuf.
//!
//! The metrics are the same as at `/metrics`. The OpenTelemetry SDK can export counters that another library keeps, but
//! not its histograms ([why it is not used](../../../docs/adr/0007-otlp.md)); the messages are few, so this module
//! encodes them itself.

mod wire;

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::service::Service;
use crate::telemetry::trace::{Span, Traces};

/// How often spans are sent.
const INTERVAL: Duration = Duration::from_secs(1);
/// Metrics are sent in every tenth interval.
const METRICS_EVERY: u64 = 10;
/// How long the collector may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The capacity of the queue of spans.
const QUEUE: usize = 4_096;

/// Where a collector listens, such as `http://127.0.0.1:4318`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    host: String,
    port: u16,
    /// The path before `/v1/traces` and `/v1/metrics`, such as `/api/otlp`.
    base: String,
}

impl FromStr for Collector {
    type Err = String;

    fn from_str(text: &str) -> Result<Collector, String> {
        let wrong = || format!("`{text}` is not the address of a collector (such as http://127.0.0.1:4318)");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        match (uri.scheme_str(), uri.authority(), uri.query()) {
            (Some("https"), ..) => {
                Err("OTLP is sent over http, not https: run a collector beside this process that forwards it"
                    .to_owned())
            }
            (Some("http"), Some(authority), None) => Ok(Collector {
                host: authority.host().trim_matches(['[', ']']).to_owned(),
                port: authority.port_u16().unwrap_or(4318),
                base: uri.path().trim_end_matches('/').to_owned(),
            }),
            _ => Err(wrong()),
        }
    }
}

/// The handle of the task that exports, until [`Exporter::finish`].
#[derive(Debug)]
pub struct Exporter {
    finish: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Exporter {
    /// Starts exporting metrics and recording traces.
    pub fn begin(collector: Collector, service: Arc<Service>) -> Exporter {
        let (traces, spans) = Traces::new(QUEUE);
        service.trace_to(traces);
        let (finish, finished) = oneshot::channel();
        let task = Task { collector, service, spans, started: now(), last_error: None };
        Exporter { finish, task: tokio::spawn(task.run(finished)) }
    }

    /// Sends the remaining spans and the final metrics, and ends.
    pub async fn finish(self) {
        let _ = self.finish.send(());
        let _ = self.task.await;
    }
}

struct Task {
    collector: Collector,
    service: Arc<Service>,
    spans: mpsc::Receiver<Span>,
    /// When counting started, in nanoseconds since the epoch.
    started: u64,
    /// Why the last attempt failed.
    last_error: Option<String>,
}

impl Task {
    async fn run(mut self, mut finished: oneshot::Receiver<()>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for round in 1_u64.. {
            let last = tokio::select! {
                _ = ticks.tick() => false,
                _ = &mut finished => true,
            };
            self.send_spans().await;
            if last || round.is_multiple_of(METRICS_EVERY) {
                self.send_metrics().await;
            }
            if last {
                return;
            }
        }
    }

    async fn send_spans(&mut self) {
        let mut spans = Vec::new();
        while let Ok(span) = self.spans.try_recv() {
            spans.push(span);
        }
        if !spans.is_empty() {
            self.send("/v1/traces", wire::traces(&spans)).await;
        }
        let lost = self.service.traces().map_or(0, Traces::take_lost);
        if lost > 0 {
            tracing::warn!("{lost} spans were dropped: the queue holds {QUEUE}");
        }
    }

    async fn send_metrics(&mut self) {
        let families = self.service.metrics.families(&self.service.limiter, &self.service.store);
        let times = wire::Times { since: self.started, now: now() };
        self.send("/v1/metrics", wire::metrics(&families, times)).await;
    }

    async fn send(&mut self, path: &str, body: Vec<u8>) {
        let sent = timeout(TIMEOUT, post(&self.collector, path, body)).await;
        let sent = sent.unwrap_or_else(|_| timed_out());
        let Collector { host, port, .. } = &self.collector;
        // Log each reason once, and not every attempt.
        let error = sent.err().map(|error| format!("{error:#}"));
        match &error {
            Some(why) if self.last_error.as_ref() != Some(why) => {
                tracing::warn!("export to the collector at {host}:{port} failed: {why}");
            }
            None if self.last_error.is_some() => {
                tracing::info!("export to the collector at {host}:{port} works again");
            }
            _ => {}
        }
        self.last_error = error;
    }
}

fn timed_out() -> anyhow::Result<()> {
    bail!("no answer within {} s", TIMEOUT.as_secs())
}

async fn post(collector: &Collector, path: &str, body: Vec<u8>) -> anyhow::Result<()> {
    let Collector { host, port, base } = collector;
    let stream = TcpStream::connect((host.as_str(), *port)).await.context("cannot connect")?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::post(format!("{base}{path}"))
        .header(header::HOST, format!("{host}:{port}"))
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .body(Full::<Bytes>::from(body))?;
    let response = sender.send_request(request).await;
    connection.abort();
    let status = response?.status();
    if !status.is_success() {
        bail!("the collector answered {status} to {base}{path}");
    }
    Ok(())
}

/// Nanoseconds since the epoch.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collector_address_must_be_plain_http() {
        let collector = |host: &str, port, base: &str| {
            Ok(Collector { host: host.to_owned(), port, base: base.to_owned() })
        };
        assert_eq!("http://127.0.0.1:4318".parse(), collector("127.0.0.1", 4318, ""));
        assert_eq!("http://otel/".parse(), collector("otel", 4318, ""));
        assert_eq!("http://[::1]:9/api/otlp/".parse(), collector("::1", 9, "/api/otlp"));
        for wrong in ["", "127.0.0.1:4318", "https://otel", "grpc://otel:4317", "/v1", "http://otel/?a=b"] {
            assert!(wrong.parse::<Collector>().is_err(), "{wrong}");
        }
    }
}
