//! The errors of the proxy itself, and the responses that clients get for them.

use std::fmt;

use bytes::Bytes;
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use tollkeeper_tower::problem::Problem;

/// Why the proxy answers a request itself.
#[derive(Debug)]
pub enum ProxyError {
    /// The request is invalid or not supported: a status, and what is wrong.
    Request(StatusCode, &'static str),
    /// The upstream could not be reached, or its response could not be read.
    Upstream(UpstreamError),
    /// The client's body could not be read to its end.
    BrokenBody,
    /// The client did not continue its body in time.
    StalledBody,
    /// The upstream is at its limit of concurrent requests.
    Shed,
}

/// How an upstream failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum UpstreamError {
    /// Its name has no address.
    Resolve,
    /// No connection could be opened.
    Connect,
    /// No connection could be opened in time.
    ConnectTimeout,
    /// The connection was closed before the response.
    Reset,
    /// The response is not valid HTTP.
    Protocol,
    /// The head of the response did not arrive in time.
    Timeout,
    /// The response ended early, after its head had been passed on.
    Body,
}

impl UpstreamError {
    /// All kinds of failures.
    pub const ALL: [UpstreamError; 7] = [
        UpstreamError::Resolve,
        UpstreamError::Connect,
        UpstreamError::ConnectTimeout,
        UpstreamError::Reset,
        UpstreamError::Protocol,
        UpstreamError::Timeout,
        UpstreamError::Body,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            UpstreamError::Resolve => "resolve",
            UpstreamError::Connect => "connect",
            UpstreamError::ConnectTimeout => "connect_timeout",
            UpstreamError::Reset => "reset",
            UpstreamError::Protocol => "protocol",
            UpstreamError::Timeout => "timeout",
            UpstreamError::Body => "body",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            UpstreamError::ConnectTimeout | UpstreamError::Timeout => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::BAD_GATEWAY,
        }
    }
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UpstreamError::Resolve => "the name of the upstream has no address",
            UpstreamError::Connect => "the upstream accepts no connection",
            UpstreamError::ConnectTimeout => "the upstream did not accept a connection in time",
            UpstreamError::Reset => "the upstream closed the connection before its response",
            UpstreamError::Protocol => "the response of the upstream is not valid HTTP",
            UpstreamError::Timeout => "the upstream did not respond in time",
            UpstreamError::Body => "the response of the upstream ended early",
        })
    }
}

/// As [`Display`](fmt::Display).
impl fmt::Debug for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for UpstreamError {}

impl ProxyError {
    /// The request target is longer than a URI may be: 65,534 bytes.
    pub const LONG_TARGET: ProxyError =
        ProxyError::Request(StatusCode::URI_TOO_LONG, "the request target is too long");

    /// The problem response. It never shows an address of the upstream.
    pub fn response(&self) -> Response<Bytes> {
        let mut response = self.problem().response();
        match self {
            ProxyError::Shed => {
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            ProxyError::Request(StatusCode::METHOD_NOT_ALLOWED, _) => {
                let allowed = HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH");
                response.headers_mut().insert(header::ALLOW, allowed);
            }
            _ => {}
        }
        response
    }

    fn problem(&self) -> Problem {
        match self {
            ProxyError::Request(status, detail) => Problem::new(*status, *detail),
            ProxyError::Upstream(error) => Problem::new(error.status(), error.to_string()),
            ProxyError::BrokenBody => {
                Problem::new(StatusCode::BAD_REQUEST, "the body of the request could not be read to its end")
            }
            ProxyError::StalledBody => {
                Problem::new(StatusCode::REQUEST_TIMEOUT, "the body of the request did not continue in time")
            }
            ProxyError::Shed => {
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the upstream is busy: retry in a second")
            }
        }
    }
}
