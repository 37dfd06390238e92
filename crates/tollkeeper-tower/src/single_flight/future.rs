//! The future of a request: it calls the service itself, or takes part in a flight.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::timeout;
use tower_service::Service;

use super::flights::{Leader, Role};
use super::key::FlightKey;
use super::sharing::{CompleteResponse, may_share_response};
use crate::body::{BufferedBody, RequestBody};
use crate::response::ResponseBody;

/// The largest body that is shared, in bytes.
const MAX_BODY: usize = 1 << 20;
/// The longest time to collect the body of a leader's response. If it takes longer, the leader gets the part that has
/// arrived and then the rest as a stream, and its followers make their own calls.
const COLLECT_TIME: Duration = Duration::from_secs(10);

/// The body of a response: the service's own, of which a part may have been collected, or a shared one.
pub type FlightBody<R> = ResponseBody<RequestBody<R>>;

type Flying<R, E> = Pin<Box<dyn Future<Output = Result<Response<FlightBody<R>>, E>> + Send>>;

pin_project! {
    /// The future of a [`SingleFlight`](super::SingleFlight) service.
    pub struct SingleFlightFuture<S, B, R>
    where
        S: Service<Request<B>>,
        R: Body,
    {
        #[pin]
        state: FutureState<S, B, R>,
    }
}

pin_project! {
    #[project = FutureStateProjected]
    enum FutureState<S, B, R>
    where
        S: Service<Request<B>>,
        R: Body,
    {
        /// No rule applies: the service is being called as soon as it is ready.
        Waiting { service: S, request: Option<Request<B>> },
        /// No rule applies: the service has been called.
        Calling { #[pin] future: S::Future },
        /// The request takes part in a flight.
        Flying { flying: Flying<R, S::Error> },
    }
}

impl<S, B, R> SingleFlightFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    /// Calls the service.
    pub(super) fn direct(service: S, request: Request<B>) -> SingleFlightFuture<S, B, R> {
        SingleFlightFuture { state: FutureState::Waiting { service, request: Some(request) } }
    }

    /// Takes part in a flight.
    pub(super) fn flying(
        flying: impl Future<Output = Result<Response<FlightBody<R>>, S::Error>> + Send + 'static,
    ) -> SingleFlightFuture<S, B, R> {
        SingleFlightFuture { state: FutureState::Flying { flying: Box::pin(flying) } }
    }
}

/// What a request does in its role: the leader calls the service and shares the response, a follower waits for that.
pub(super) async fn fly<S, B, R>(
    role: Role,
    key: FlightKey,
    mut service: S,
    request: Request<B>,
) -> Result<Response<FlightBody<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes> + Unpin,
{
    let leader = match role {
        Role::Leader(leader) => Some(leader),
        Role::Follower(follower) => match follower.response().await {
            Some(landed) => return Ok(landed.response()),
            None => None,
        },
        Role::Alone => None,
    };
    poll_fn(|context| service.poll_ready(context)).await?;
    let response = service.call(request).await?;
    Ok(match leader {
        Some(leader) => land(leader, &key, response).await,
        None => own(response),
    })
}

/// Collects the response of a leader and shares it. If it cannot be shared, the leader gets it without loss: what was
/// collected, then the rest of the stream. The followers are released as soon as that is known.
async fn land<R>(leader: Leader, key: &FlightKey, response: Response<R>) -> Response<FlightBody<R>>
where
    R: Body<Data = Bytes> + Unpin,
{
    let (head, body) = response.into_parts();
    let mut body = RequestBody::from(body);
    if may_share_response(&head)
        && key.contains_vary(&head.headers)
        && let Ok(BufferedBody::All(bytes)) = timeout(COLLECT_TIME, body.buffer_up_to(MAX_BODY)).await
        && !body.has_trailers()
    {
        let bytes = Bytes::from(bytes);
        leader.land(CompleteResponse::new(&head, bytes.clone()));
        return Response::from_parts(head, ResponseBody::ours(bytes));
    }
    Response::from_parts(head, ResponseBody::theirs(body, None))
}

fn own<R: Body<Data = Bytes>>(response: Response<R>) -> Response<FlightBody<R>> {
    response.map(|body| ResponseBody::theirs(RequestBody::from(body), None))
}

impl<S, B, R> Future for SingleFlightFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    type Output = Result<Response<FlightBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let future = match this.state.as_mut().project() {
                FutureStateProjected::Waiting { service, request } => {
                    ready!(service.poll_ready(context))?;
                    service.call(request.take().expect("called once"))
                }
                FutureStateProjected::Calling { future } => return future.poll(context).map_ok(own),
                FutureStateProjected::Flying { flying } => return flying.as_mut().poll(context),
            };
            this.state.set(FutureState::Calling { future });
        }
    }
}

impl<S, B, R> std::fmt::Debug for SingleFlightFuture<S, B, R>
where
    S: Service<Request<B>>,
    R: Body,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SingleFlightFuture").finish_non_exhaustive()
    }
}
