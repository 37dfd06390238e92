//! What was counted and traced, sent to a collector: OTLP over HTTP, as protobuf.
//!
//! The same numbers go out here and at `/metrics`. OpenTelemetry's own kit could read counters that are counted
//! elsewhere, but not histograms ([why it is not used](../../../docs/adr/0007-otlp.md)); the messages are
//! few, so they are written here.

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

/// How often spans are sent, and metrics in so many of these times.
const EVERY: Duration = Duration::from_secs(1);
const METRICS_EVERY: u64 = 10;
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Spans that may wait to be sent.
const WAITING: usize = 4_096;

/// Where a collector listens, such as `http://127.0.0.1:4318`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    host: String,
    port: u16,
    /// What the paths of the protocol are behind.
    base: String,
}

impl FromStr for Collector {
    type Err = String;

    fn from_str(text: &str) -> Result<Collector, String> {
        let wrong = || format!("`{text}` is not the address of a collector (such as http://127.0.0.1:4318)");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        match (uri.scheme_str(), uri.authority(), uri.query()) {
            (Some("https"), ..) => {
                Err("OTLP is sent over plain http: let a collector beside this process pass it on".to_owned())
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

/// Sends, until it is told to finish.
#[derive(Debug)]
pub struct Exporter {
    finish: oneshot::Sender<()>,
    sending: JoinHandle<()>,
}

impl Exporter {
    /// Begins to send what is counted, and to trace.
    pub fn begin(collector: Collector, service: Arc<Service>) -> Exporter {
        let (traces, spans) = Traces::new(WAITING);
        service.trace_to(traces);
        let (finish, finished) = oneshot::channel();
        let work = Work { collector, service, spans, began: now(), trouble: None };
        Exporter { finish, sending: tokio::spawn(work.run(finished)) }
    }

    /// Sends what is left.
    pub async fn finish(self) {
        let _ = self.finish.send(());
        let _ = self.sending.await;
    }
}

struct Work {
    collector: Collector,
    service: Arc<Service>,
    spans: mpsc::Receiver<Span>,
    /// Since when is counted.
    began: u64,
    /// Why the last attempt failed.
    trouble: Option<String>,
}

impl Work {
    async fn run(mut self, mut finished: oneshot::Receiver<()>) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for turn in 1_u64.. {
            let last = tokio::select! {
                _ = ticks.tick() => false,
                _ = &mut finished => true,
            };
            self.send_spans().await;
            if last || turn.is_multiple_of(METRICS_EVERY) {
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
            tracing::warn!("{lost} spans were not kept: more than {WAITING} waited to be sent");
        }
    }

    async fn send_metrics(&mut self) {
        let families = self.service.metrics.families(&self.service.limiter, &self.service.store);
        let times = wire::Times { since: self.began, now: now() };
        self.send("/v1/metrics", wire::metrics(&families, times)).await;
    }

    async fn send(&mut self, path: &str, body: Vec<u8>) {
        let sent = timeout(PATIENCE, post(&self.collector, path, body)).await;
        let sent = sent.unwrap_or_else(|_| bail_late());
        let Collector { host, port, .. } = &self.collector;
        // Logged once for each reason, and not once for each attempt.
        let trouble = sent.err().map(|error| format!("{error:#}"));
        match &trouble {
            Some(why) if self.trouble.as_ref() != Some(why) => {
                tracing::warn!("the collector at {host}:{port} does not take what it is sent: {why}");
            }
            None if self.trouble.is_some() => tracing::info!("the collector at {host}:{port} takes it again"),
            _ => {}
        }
        self.trouble = trouble;
    }
}

fn bail_late() -> anyhow::Result<()> {
    bail!("no answer within {} s", PATIENCE.as_secs())
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
        bail!("it answers {status} to {base}{path}");
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
    fn a_collector_is_a_plain_http_address() {
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
