//! A tonic service behind the layer, called by a tonic client.

mod support;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::uri::PathAndQuery;
use prost::Message;
use support::{Reached, Server, limiter};
use tollkeeper::{Limit, Quota};
use tollkeeper_tower::RateLimitLayer;
use tonic::body::Body;
use tonic::server::{NamedService, UnaryService};
use tonic::transport::{Channel, server::TcpIncoming};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

/// The method `test.Echo/Say`, whose request and response are empty.
#[derive(Clone)]
struct Echo(Reached);

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl UnaryService<()> for Echo {
    type Response = ();
    type Future = std::future::Ready<Result<tonic::Response<()>, Status>>;

    fn call(&mut self, _: tonic::Request<()>) -> Self::Future {
        self.0.increment();
        std::future::ready(Ok(tonic::Response::new(())))
    }
}

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let codec = ProstCodec::<(), ()>::default();
            Ok(tonic::server::Grpc::new(codec).unary(service, request).await)
        })
    }
}

/// `google.rpc.Status` and the messages in it, decoded by prost to check the hand-written encoder.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Duration>,
}

#[derive(Clone, PartialEq, Message)]
struct Duration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

async fn say(channel: &Channel) -> Result<tonic::Response<()>, Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.expect("it is connected");
    let path = PathAndQuery::from_static("/test.Echo/Say");
    client.unary(tonic::Request::new(()), path, ProstCodec::<(), ()>::default()).await
}

#[tokio::test]
async fn refused_call_is_resource_exhausted_with_retry_info() {
    let limits = vec![
        Limit::new("per-ip", Quota::per_minute(2)).by("ip").when("path", "/test.Echo/Say"),
        Limit::new("twice", Quota::per_minute(100)).by("query.x"),
    ];
    let (limiter, clock) = limiter(limits);
    let reached = Reached::default();
    let (layer, echo) = (RateLimitLayer::new(limiter), Echo(reached.clone()));
    let server = Server::of(move |listener| async move {
        let router = tonic::transport::Server::builder().layer(layer).add_service(echo);
        router.serve_with_incoming(TcpIncoming::from(listener)).await.expect("the server runs");
    });
    let server = server.await;
    let channel =
        Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap();
    clock.advance(tollkeeper::Span::from_micros(500_000));
    for remaining in ["1", "0"] {
        let response = say(&channel).await.expect("admitted");
        assert_eq!(response.metadata().get("x-ratelimit-remaining").unwrap(), remaining);
    }
    let status = say(&channel).await.expect_err("two a minute");
    assert_eq!((status.code(), reached.count()), (Code::ResourceExhausted, 2));
    assert!(status.message().starts_with("`per-ip` allows 2 per minute; "), "{status:?}");
    assert!(status.metadata().get("ratelimit").is_some(), "{status:?}");
    let details = RpcStatus::decode(status.details()).unwrap();
    assert_eq!((details.code, details.message.as_str()), (8, status.message()));
    let [Any { type_url, value }] = &details.details[..] else { panic!("{details:?}") };
    assert_eq!(type_url, "type.googleapis.com/google.rpc.RetryInfo");
    let RetryInfo { retry_delay } = RetryInfo::decode(&value[..]).unwrap();
    let Duration { seconds, nanos } = retry_delay.unwrap();
    let wait = u64::try_from(seconds).unwrap() * 1_000_000 + u64::try_from(nanos).unwrap() / 1_000;
    clock.advance(tollkeeper::Span::from_micros(wait - 1));
    assert_eq!(say(&channel).await.expect_err("a microsecond early").code(), Code::ResourceExhausted);
    clock.advance(tollkeeper::Span::from_micros(1));
    say(&channel).await.expect("admitted after the retry delay");
}
