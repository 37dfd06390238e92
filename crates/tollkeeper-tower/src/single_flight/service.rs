//! The service: joins a request to the flight with its key, or calls the wrapped service.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::flights::Flights;
use super::future::{FlightBody, SingleFlightFuture, fly};
use super::key::KeyReader;
use super::sharing::may_share_request;

/// A service behind single flight.
#[derive(Clone, Debug)]
pub struct SingleFlight<S> {
    inner: S,
    keys: Arc<KeyReader>,
    flights: Arc<Flights>,
}

impl<S> SingleFlight<S> {
    pub(super) fn new(inner: S, keys: Arc<KeyReader>, flights: Arc<Flights>) -> SingleFlight<S> {
        SingleFlight { inner, keys, flights }
    }
}

impl<S, B, R> Service<Request<B>> for SingleFlight<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Body + Send + 'static,
    R: Body<Data = Bytes> + Send + Unpin + 'static,
    R::Error: Send,
{
    type Response = Response<FlightBody<R>>;
    type Error = S::Error;
    type Future = SingleFlightFuture<S, B, R>;

    /// Always ready. The readiness of the wrapped service is polled just before the call, because followers do not call
    /// it: a concurrency limit in it would reserve a permit for each of them.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> SingleFlightFuture<S, B, R> {
        let service = self.inner.clone();
        let (head, body) = request.into_parts();
        let key = if may_share_request(&head, &body) { self.keys.key(&head) } else { None };
        let request = Request::from_parts(head, body);
        match key {
            Some(key) => {
                let role = self.flights.join(key.digest);
                SingleFlightFuture::flying(fly(role, key, service, request))
            }
            None => SingleFlightFuture::direct(service, request),
        }
    }
}
