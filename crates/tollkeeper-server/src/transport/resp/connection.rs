//! Serves one RESP connection: replies in the order of the commands, and with one write to commands that arrived together.
//!
//! With a remote store, all checks of a pipeline are sent to the store before the first has completed. Any other command
//! waits until all checks before it have completed.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{self, sleep, timeout};
use tollkeeper::store::StoreFuture;
use tollkeeper::{Decision, KeyDecision, OnStoreFailure, Verb};
use tollkeeper_core::toll::TollRequest;
use tollkeeper_engine::api::error::ApiError;

use super::commands::{self, Name};
use super::parse::{Arguments, Parser, ProtocolError};
use super::reply::Replies;
use super::session::{Session, shown};
use super::throttle::{self, Dialect};
use super::{Resp, check};
use crate::service::Service;
use crate::telemetry::metrics::{Ended, Endings, RouteLabel};
use crate::telemetry::refusal_log::Refusal;
use crate::telemetry::trace::SpanOutcome;
use crate::transport::connection_budget::{self, Seat, Transport};
use crate::transport::listener::{Protocol, Stream};

/// How long a connection may be without a command. Client pools keep idle connections.
const QUIET: Duration = Duration::from_secs(300);
/// How long a client may take to read its replies.
const STALLED: Duration = Duration::from_secs(10);
/// After a protocol error, input is read and discarded for this long.
const LINGER: Duration = Duration::from_secs(1);
/// The size of the read buffer. It grows only for a command that is longer.
const BUFFER: usize = 16 << 10;
/// Replies are sent at this many bytes, even if more commands are waiting.
const FULL: usize = 64 << 10;
/// The most checks of one connection in flight to a remote store: as many as one batch holds.
const IN_FLIGHT: usize = 64;

impl Protocol for Arc<Resp> {
    const TRANSPORT: Transport = Transport::Resp;

    async fn serve(self, stream: impl Stream, peer: SocketAddr, seat: Seat) {
        serve(stream, peer, self, seat).await;
    }
}

/// Serves one connection until either side closes it.
pub(super) async fn serve(mut stream: impl Stream, peer: SocketAddr, resp: Arc<Resp>, mut seat: Seat) {
    let user = seat.user();
    let mut talk = Talk::new(&resp);
    let mut parser = Parser::default();
    let mut input = Vec::with_capacity(BUFFER);
    let mut fires = pin!(sleep(QUIET));
    let (mut asked, mut stopping) = (false, false);
    loop {
        tokio::select! {
            biased;
            read = stream.read_buf(&mut input) => match read {
                Ok(1..) => {}
                Ok(0) | Err(_) => break,
            },
            // Stop only after all commands that were sent before the stop, and one that has begun to arrive.
            () = std::future::ready(()), if stopping && input.is_empty() => break,
            () = fires.as_mut() => {
                if !std::mem::take(&mut asked) {
                    tracing::debug!("closing a RESP connection: idle for {QUIET:?}");
                    break;
                }
                fires.as_mut().reset(time::Instant::now() + QUIET);
                continue;
            }
            end = seat.end() => match end {
                connection_budget::End::MakeRoom => break,
                connection_budget::End::Stop => {
                    stopping = true;
                    continue;
                }
            },
        }
        talk.began = Instant::now();
        user.used(talk.began);
        let (read, ended) = talk.answer_all(&mut parser, &mut input, &mut stream).await;
        asked |= read > 0;
        talk.record();
        if let Err(end) = ended {
            if end == End::Http {
                resp.refuse_http(peer);
            }
            if let End::Nonsense | End::Http = end {
                linger(&mut stream, &mut input).await;
            }
            break;
        }
        input.drain(..read);
        if input.is_empty() && input.capacity() > BUFFER {
            input = Vec::with_capacity(BUFFER);
        }
        if input.len() == input.capacity() {
            input.reserve(input.len());
        }
    }
    let _ = timeout(LINGER, stream.shutdown()).await;
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client sent `QUIT`.
    Quit,
    /// The client violated the protocol.
    Nonsense,
    /// The client sent HTTP.
    Http,
    /// The client does not read its replies, or has disconnected.
    Gone,
}

/// Reads and discards input before closing: closing a socket with unread input resets the connection, and the client
/// could not read the error.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), input: &mut Vec<u8>) {
    let heard = async {
        stream.shutdown().await?;
        loop {
            input.clear();
            if stream.read_buf(input).await? == 0 {
                return Ok::<(), io::Error>(());
            }
        }
    };
    let _ = timeout(LINGER, heard).await;
}

/// The state of a connection while it is served.
struct Talk<'r> {
    resp: &'r Resp,
    session: Session,
    replies: Replies,
    flights: VecDeque<Flight<'r>>,
    counts: Endings,
    /// When the commands that are being served had arrived.
    began: Instant,
}

/// A check in flight to a remote store.
enum Flight<'r> {
    Check(Verb, RouteLabel, StoreFuture<'r, Decision>),
    Throttle(Call, StoreFuture<'r, KeyDecision>),
}

/// A `CL.THROTTLE` or `THROTTLE` call in flight.
#[derive(Clone, Debug)]
struct Call {
    dialect: Dialect,
    quantity: u64,
    /// The key, kept only for the log of refusals.
    key: Option<Box<str>>,
}

impl<'r> Talk<'r> {
    fn new(resp: &'r Resp) -> Talk<'r> {
        Talk {
            resp,
            session: Session::new(resp),
            replies: Replies::default(),
            flights: VecDeque::new(),
            counts: Endings::default(),
            began: Instant::now(),
        }
    }

    /// Replies to every complete command of the input, and returns their length.
    async fn answer_all(
        &mut self,
        parser: &mut Parser,
        input: &mut [u8],
        stream: &mut (impl AsyncWrite + Unpin),
    ) -> (usize, Result<(), End>) {
        let mut read = 0;
        let ended = loop {
            match parser.next(&mut input[read..]) {
                Ok(None) => break Ok(()),
                Ok(Some(len)) => {
                    self.answer(parser.arguments(&input[read..])).await;
                    read += len;
                }
                Err(error) => {
                    self.settle().await;
                    self.refuse_bytes(error);
                    break Err(if error == ProtocolError::Http { End::Http } else { End::Nonsense });
                }
            }
            if self.session.ending {
                break Err(End::Quit);
            }
            if self.replies.bytes.len() >= FULL || self.flights.len() == IN_FLIGHT {
                self.settle().await;
                if self.send(stream).await.is_err() {
                    break Err(End::Gone);
                }
            }
        };
        self.settle().await;
        let sent = self.send(stream).await.map_err(|_| End::Gone);
        (read, ended.and(sent))
    }

    #[inline]
    async fn answer(&mut self, arguments: Arguments<'_>) {
        let Some(name) = arguments.get(0) else { return };
        let Some(entry) = commands::find(name) else {
            self.settle().await;
            return self.replies.error(&format!("ERR unknown command '{}'", shown(name)));
        };
        if !self.session.may_ask(self.resp) && !entry.is_open() {
            self.settle().await;
            return self.replies.error("NOAUTH Authentication required.");
        }
        match entry.what {
            Name::ClThrottle => return self.throttle(Dialect::Cell, arguments).await,
            Name::Throttle => return self.throttle(Dialect::Crab, arguments).await,
            Name::TkCheck => return self.check(Verb::Check, arguments).await,
            Name::TkPeek => return self.check(Verb::Peek, arguments).await,
            _ => self.settle().await,
        }
        if !entry.takes(arguments.len()) {
            let message = format!("ERR wrong number of arguments for '{}' command", entry.name);
            return self.replies.error(&message);
        }
        match entry.what {
            Name::Del => self.forget(arguments).await,
            _ => self.session.answer(self.resp, entry, arguments, &mut self.replies),
        }
    }

    #[inline]
    async fn throttle(&mut self, dialect: Dialect, arguments: Arguments<'_>) {
        let asked = dialect.read(arguments).and_then(|asked| {
            let meter = self.resp.limits(dialect);
            let answer = meter.check(&asked.key, &asked.quota, asked.quantity);
            let answer = answer.map_err(|error| dialect.refuse(&error))?;
            let key = self.resp.service.refusals.is_on().then(|| asked.key.as_ref().into());
            Ok((answer, Call { dialect, quantity: asked.quantity, key }))
        });
        match asked {
            Ok((StoreFuture::Ready(passage), call)) if self.flights.is_empty() => {
                self.throttled(call, &passage)
            }
            Ok((answer, call)) => self.take_off(Flight::Throttle(call, answer)).await,
            Err(message) => self.refuse(&message).await,
        }
    }

    #[inline]
    async fn check(&mut self, verb: Verb, arguments: Arguments<'_>) {
        let asked = check::read(arguments).and_then(|(facts, cost)| {
            let request = TollRequest { verb, facts: &facts, cost, hold: None, also: &[] };
            let Service { limiter, metrics, refusals, .. } = &*self.resp.service;
            let route = if refusals.is_on() { metrics.route(&facts) } else { RouteLabel::NONE };
            Ok((route, limiter.decide(None, &request).map_err(ApiError::from)?))
        });
        match asked {
            Ok((route, StoreFuture::Ready(decision))) if self.flights.is_empty() => {
                self.checked(verb, route, &decision);
            }
            Ok((route, answer)) => self.take_off(Flight::Check(verb, route, answer)).await,
            Err(error) => self.refuse(&format!("ERR {} {}", error.code.name(), error.message)).await,
        }
    }

    /// `DEL`: deletes the keys in both dialects.
    async fn forget(&mut self, arguments: Arguments<'_>) {
        let (mut forgotten, mut answered) = (0, Ok(()));
        for key in arguments.from(1) {
            let key = throttle::text(key);
            match (self.resp.cell.forget(&key).await, self.resp.crab.forget(&key).await) {
                (Ok(cell), Ok(crab)) => forgotten += u64::from(cell || crab),
                (Err(unavailable), _) | (_, Err(unavailable)) => answered = Err(unavailable),
            }
        }
        match answered {
            Ok(()) => self.replies.number(forgotten),
            Err(unavailable) => {
                let error = ApiError::from(unavailable);
                self.refuse(&format!("ERR {} {}", error.code.name(), error.message)).await;
            }
        }
    }

    /// Starts a check, and does not wait for its result.
    async fn take_off(&mut self, mut flight: Flight<'r>) {
        poll_fn(|context| {
            match &mut flight {
                Flight::Check(_, _, answer) => nudge(answer, context),
                Flight::Throttle(_, answer) => nudge(answer, context),
            }
            Poll::Ready(())
        })
        .await;
        self.flights.push_back(flight);
    }

    /// Waits for all checks in flight, and writes their replies.
    async fn settle(&mut self) {
        while let Some(flight) = self.flights.pop_front() {
            match flight {
                Flight::Check(verb, route, answer) => {
                    let decision = answer.await;
                    self.checked(verb, route, &decision);
                }
                Flight::Throttle(call, answer) => {
                    let passage = answer.await;
                    self.throttled(call, &passage);
                }
            }
        }
    }

    fn checked(&mut self, verb: Verb, route: RouteLabel, decision: &Decision) {
        let service = &self.resp.service;
        check::write(&mut self.replies, &service.limiter, &service.redactor, decision);
        if let Some(traces) = self.resp.service.traces() {
            let name = if verb.charges() { "TK.CHECK" } else { "TK.PEEK" };
            traces.sample(name, self.began, || SpanOutcome::of(decision));
        }
        if verb.charges() {
            self.resp.service.log_refusal("resp", route, decision);
            self.counts.add(ended(decision.degraded(), decision.allowed()));
        }
    }

    #[inline]
    fn throttled(&mut self, call: Call, passage: &KeyDecision) {
        let Call { dialect, quantity, key } = call;
        dialect.write(&mut self.replies, &passage.outcome());
        if let Some(traces) = self.resp.service.traces() {
            let name = dialect.name_space();
            traces.sample(name, self.began, || SpanOutcome::of_one(name, passage));
        }
        if quantity > 0 {
            if let (false, Some(key)) = (passage.allowed, &key) {
                let refusal = || Some(Refusal::of_one(dialect.name_space(), key, quantity, passage));
                self.resp.service.refusals.add(refusal);
            }
            self.counts.add(ended(passage.degraded(), passage.allowed));
        }
    }

    async fn refuse(&mut self, message: &str) {
        self.settle().await;
        self.counts.add(Ended::Error);
        self.replies.error(message);
    }

    fn refuse_bytes(&mut self, error: ProtocolError) {
        self.replies.error(&format!("ERR {error}"));
    }

    async fn send(&mut self, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let bytes = &mut self.replies.bytes;
        if bytes.is_empty() {
            return Ok(());
        }
        let sent = async {
            stream.write_all(bytes).await?;
            stream.flush().await
        };
        timeout(STALLED, sent).await.map_err(|_| io::ErrorKind::TimedOut)??;
        bytes.clear();
        bytes.shrink_to(BUFFER);
        Ok(())
    }

    /// Records the commands that were served together. Their replies were sent together, so they took equally long.
    fn record(&mut self) {
        let counts = std::mem::take(&mut self.counts);
        self.resp.service.metrics.resp.record_together(&counts, self.began.elapsed());
    }
}

impl Drop for Talk<'_> {
    fn drop(&mut self) {
        self.resp.gone.fetch_add(1, Relaxed);
    }
}

/// Polls a future once, so that its call is sent.
fn nudge<T: Unpin>(answer: &mut StoreFuture<'_, T>, context: &mut Context<'_>) {
    if let StoreFuture::Later(later) = answer
        && let Poll::Ready(value) = later.as_mut().poll(context)
    {
        *answer = StoreFuture::Ready(value);
    }
}

fn ended(degraded: Option<OnStoreFailure>, allowed: bool) -> Ended {
    match (degraded, allowed) {
        (Some(_), _) => Ended::Degraded,
        (None, true) => Ended::Allowed,
        (None, false) => Ended::Refused,
    }
}
