//! gRPC: Envoy's rate limit service, health and reflection.
//!
//! Connections are hyper's, as those of HTTP are. Envoy's questions are answered here ([`unary`]), the rest is tonic's.
//! Which service is asked for, the path says, so there is no router.

pub mod budget;
pub mod decoder;
pub mod inline_executor;
pub mod proto;
pub mod rls;
pub mod unary;

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Either;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service as _};
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_reflection::server::{v1, v1alpha};

use self::budget::{Budget, CALL, Held, Stage};
use self::inline_executor::{Calls, Inbox};
use self::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use self::rls::Rls;
use self::unary::Unread;
use crate::control::access::{self, Permission};
use crate::service::Service;
use crate::telemetry::logging::OnceAMinute;
use crate::telemetry::trace::Parent;
use crate::transport::connection_budget::{Busy, End, Seat, Transport};
use crate::transport::listener::{Protocol, Stream};

/// The service, and the one call that it has.
const RATE_LIMITS: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Under these names its health is asked for: the server's, its own, and that of another server of this protocol.
const NAMES: [&str; 3] = ["", RATE_LIMITS, "ratelimit"];

/// As large as all headers of a request may be.
const MAX_HEADERS: u32 = 16 << 10;
/// How many requests of one connection are in flight at the same time.
const MAX_STREAMS: u32 = 1_024;
/// What a client may send before the call has read it: of one call, and of all calls of a connection.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// What is written of one answer before the client has taken it.
const SEND_BUFFER: usize = 16 << 10;
/// The largest message about health and reflection.
const MAX_SMALL_MESSAGE: usize = 8 << 10;
/// How long a connection may take to its first request. HTTP/2 has no word for being there before that.
const FIRST: Duration = Duration::from_secs(75);
/// A connection without traffic is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(60);
/// How long it may take to say so.
const PING_PATIENCE: Duration = Duration::from_secs(20);

/// Everything that can be asked over gRPC.
#[derive(Clone)]
pub struct Grpc(Arc<Services>);

struct Services {
    service: Arc<Service>,
    rls: Rls,
    budget: Arc<Budget>,
    full: OnceAMinute,
    health: HealthServer<HealthService>,
    reporter: HealthReporter,
    /// The types of these two have no names.
    reflection: Answers,
    old_reflection: Answers,
}

type Answers = Box<dyn Fn(Request<Incoming>) -> BoxFuture<Response<Body>, Infallible> + Send + Sync>;

impl Grpc {
    /// What this service answers.
    pub async fn new(service: Arc<Service>) -> Grpc {
        let reporter = HealthReporter::new();
        for name in NAMES {
            reporter.set_service_status(name, ServingStatus::Serving).await;
        }
        let health = HealthServer::new(HealthService::from_health_reporter(reporter.clone()))
            .max_decoding_message_size(MAX_SMALL_MESSAGE);
        let described = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let reflection = described().build_v1().expect("the descriptors are our own");
        let reflection = reflection.max_decoding_message_size(MAX_SMALL_MESSAGE);
        let old_reflection = described().build_v1alpha().expect("the descriptors are our own");
        let old_reflection = old_reflection.max_decoding_message_size(MAX_SMALL_MESSAGE);
        Grpc(Arc::new(Services {
            rls: Rls::new(Arc::clone(&service)),
            budget: Arc::default(),
            full: OnceAMinute::default(),
            service,
            health,
            reporter,
            reflection: Box::new(move |request| reflection.clone().call(request)),
            old_reflection: Box::new(move |request| old_reflection.clone().call(request)),
        }))
    }

    /// Reports that the server is about to stop. The status of the whole server changes last: a client that sees it
    /// finds that of every service changed.
    pub async fn drain(&self) {
        for name in NAMES.into_iter().rev() {
            self.0.reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    }

    /// Ends the answers to those who watch its health: they would never end by themselves, and nobody waits for them.
    pub async fn close(&self) {
        let mut reporter = self.0.reporter.clone();
        for name in NAMES {
            reporter.clear_service_status(name).await;
        }
    }
}

impl Protocol for Grpc {
    const NAME: Option<&'static [u8]> = Some(b"h2");
    const TRANSPORT: Transport = Transport::Grpc;

    async fn serve(self, stream: impl Stream, _: SocketAddr, mut seat: Seat) {
        let user = seat.user();
        let inbox = Inbox::default();
        let mut protocol = http2::Builder::new(inbox.clone());
        protocol
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(SEND_BUFFER)
            .max_header_list_size(MAX_HEADERS)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_PATIENCE);
        let asked = AtomicBool::new(false);
        let answer = service_fn(|request| {
            asked.store(true, Relaxed);
            let (services, busy) = (Arc::clone(&self.0), user.busy());
            async move {
                let answer = services.answer(request).await;
                Ok::<_, Infallible>(answer.map(|answer| Answer { _busy: Some(busy), ..answer }))
            }
        });
        let connection = pin!(protocol.serve_connection(TokioIo::new(stream), answer));
        let mut calls = Calls::new(connection, inbox);
        let mut first = pin!(sleep(FIRST));
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|context| calls.poll(context)) => {
                    if let Err(error) = ended {
                        tracing::debug!("a gRPC connection ended: {error}");
                    }
                    return;
                }
                end = seat.end() => {
                    if !asked.load(Relaxed) || (end == End::MakeRoom && !user.is_busy()) {
                        return;
                    }
                    calls.connection.as_mut().graceful_shutdown();
                }
                () = first.as_mut(), if !first.is_elapsed() => {
                    if !asked.load(Relaxed) {
                        return tracing::debug!("a gRPC connection ended: nothing was asked in {FIRST:?}");
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grpc")
    }
}

impl Services {
    async fn answer(&self, request: Request<Incoming>) -> Response<Answer> {
        let refused = |status: Status| status.into_http().map(|body| Answer::of(Either::Right(body), None));
        if !is_grpc(request.headers()) {
            let mut response = Response::new(Answer::of(Either::Right(Body::empty()), None));
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return response;
        }
        let service = request.uri().path().split('/').nth(1);
        if service != Some(HealthServer::<HealthService>::NAME)
            && let Err(status) = self.admit(request.headers())
        {
            return refused(status);
        }
        if request.uri().path() == SHOULD_RATE_LIMIT {
            let parent = self.service.parent(request.headers());
            return match self.should_rate_limit(request.into_body(), parent).await {
                Ok((message, held)) => {
                    unary::answer(&message).map(|body| Answer::of(Either::Left(body), Some(held)))
                }
                Err(status) => refused(status),
            };
        }
        // A stream of these lasts as long as the client likes. Reflection reads a request only when its last answer
        // was taken, so a client that reads nothing fills the window of its stream.
        let unread = match service {
            Some(v1::ServerReflectionServer::<()>::NAME | v1alpha::ServerReflectionServer::<()>::NAME) => {
                usize::try_from(STREAM_WINDOW).expect("64 KiB")
            }
            _ => MAX_SMALL_MESSAGE,
        };
        let mut held = self.budget.call();
        if held.set(CALL + unread, Stage::Arriving).is_err() {
            return refused(self.exhausted());
        }
        let Ok(response) = match service {
            Some(HealthServer::<HealthService>::NAME) => self.health.clone().call(request).await,
            Some(v1::ServerReflectionServer::<()>::NAME) => (self.reflection)(request).await,
            Some(v1alpha::ServerReflectionServer::<()>::NAME) => (self.old_reflection)(request).await,
            _ => Ok(Status::unimplemented(format!("there is only {SHOULD_RATE_LIMIT} here")).into_http()),
        };
        response.map(|body| Answer::of(Either::Right(body), Some(held)))
    }

    async fn should_rate_limit(
        &self,
        body: Incoming,
        parent: Option<Parent>,
    ) -> Result<(RateLimitResponse, Held), Status> {
        let (message, held) = unary::read(body, &self.budget).await.map_err(|unread| match unread {
            Unread::Full => self.exhausted(),
            Unread::Wrong(status) => status,
        })?;
        Ok((self.rls.answer(&message, parent).await?, held))
    }

    /// Counts a call that found no room.
    fn exhausted(&self) -> Status {
        self.service.metrics.grpc_exhausted.fetch_add(1, Relaxed);
        self.full.write(|before| {
            tracing::warn!(
                "a gRPC call was refused with RESOURCE_EXHAUSTED: calls in flight hold all memory that they may \
                 ({before} more since the last such line)"
            );
        });
        Status::resource_exhausted("calls in flight hold all memory that they may: try again later")
    }

    /// Whether a caller with these headers may ask. Health is for everybody.
    fn admit(&self, headers: &HeaderMap) -> Result<(), Status> {
        let access = &self.service.access;
        if !access.data_is_closed() {
            return Ok(());
        }
        access.admit(Permission::Data, access::presented(Permission::Data, headers)).map_err(|_| {
            Status::unauthenticated("this takes a token (`authorization: Bearer …` in the metadata)")
        })
    }
}

/// Whether a client of gRPC asks. A web page cannot send this type to another site without being allowed to.
fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// The body of an answer, and what its call holds until it is sent.
struct Answer {
    body: Either<unary::Answer, Body>,
    _held: Option<Held>,
    _busy: Option<Busy>,
}

impl Answer {
    fn of(body: Either<unary::Answer, Body>, held: Option<Held>) -> Answer {
        Answer { body, _held: held, _busy: None }
    }
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::Pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Poll};

    use bytes::Bytes;
    use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, DuplexStream, ReadBuf};
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;
    use crate::transport::http::connection::tests::{PEER, service};

    /// What a connection sends until the server ends it.
    async fn said(stream: &mut tokio::io::DuplexStream) -> Vec<u8> {
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.unwrap();
        said
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_asks_nothing_is_closed() {
        let began = Instant::now();
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (_stop, stopped) = watch::channel(());
        tokio::spawn(Grpc::new(service()).await.serve(theirs, PEER, Seat::alone(stopped)));
        said(&mut ours).await;
        assert!((FIRST..FIRST * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_has_asked_nothing_does_not_hold_up_the_end() {
        let began = Instant::now();
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (stop, stopped) = watch::channel(());
        tokio::spawn(Grpc::new(service()).await.serve(theirs, PEER, Seat::alone(stopped)));
        stop.send(()).unwrap();
        said(&mut ours).await;
        assert!(began.elapsed() < FIRST, "{:?}", began.elapsed());
    }

    /// A stream that counts how often it is written to.
    struct Counted(DuplexStream, Arc<AtomicUsize>);

    impl AsyncRead for Counted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            read: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(context, read)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.1.fetch_add(1, Relaxed);
            Pin::new(&mut self.0).poll_write(context, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(context)
        }
    }

    #[tokio::test]
    async fn calls_that_came_together_are_answered_together() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (_stop, stopped) = watch::channel(());
        let writes = Arc::new(AtomicUsize::new(0));
        let counted = Counted(theirs, Arc::clone(&writes));
        tokio::spawn(Grpc::new(service()).await.serve(counted, PEER, Seat::alone(stopped)));
        let (client, connection) = h2::client::handshake(ours).await.unwrap();
        tokio::spawn(connection);

        // Domain `d` with a descriptor of `user` and `u`.
        let question = b"\0\0\0\0\x10\x0a\x01d\x12\x0b\x0a\x09\x0a\x04user\x12\x01u";
        let mut asked = 0;
        let mut ask = async |count: usize| {
            let mut answers = Vec::new();
            for _ in 0..count {
                let request = Request::post(format!("http://localhost{SHOULD_RATE_LIMIT}"));
                let request = request.header(CONTENT_TYPE, "application/grpc").body(()).unwrap();
                let mut client = client.clone().ready().await.unwrap();
                let (answer, mut body) = client.send_request(request, false).unwrap();
                body.send_data(Bytes::from_static(question), true).unwrap();
                answers.push(answer);
            }
            for answer in answers {
                let mut body = answer.await.unwrap().into_body();
                let message = body.data().await.unwrap().unwrap();
                // Five per minute are granted.
                asked += 1;
                let code = if asked <= 5 { 1 } else { 2 };
                assert_eq!(message[5..7], [0x08, code], "call {asked}");
            }
        };
        ask(1).await; // greetings are over then
        let greeted = writes.load(Relaxed);
        ask(8).await;
        let writes = writes.load(Relaxed) - greeted;
        assert!(writes <= 2, "{writes} writes for eight answers");
    }
}
