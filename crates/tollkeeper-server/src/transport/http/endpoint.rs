//! The routing table: method, path, endpoint and required access of every call of the HTTP API.

use hyper::Method;
use tollkeeper_engine::ApiCall;
use tollkeeper_engine::api::error::{ApiError, Code};

use crate::control::access::Permission;

/// What a route leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the paths in `ROUTES`")]
pub enum Endpoint {
    /// A call with a JSON body, which the engine answers.
    Call(ApiCall),
    Batch,
    Usage,
    Limits,
    PutLimits,
    DeleteLimits,
    State,
    Forget,
    Overrides,
    SetOverride,
    DeleteOverride,
    History,
    Top,
    Events,
    Auth,
    AuthNginx,
    Health,
    Ready,
    Metrics,
    OpenApi,
    Dashboard,
    DashboardFile,
}

/// One row of the routing table.
#[derive(Debug)]
pub struct Route {
    /// The path, such as `/v1/check`. A segment in braces matches any other than an empty one.
    pub path: &'static str,
    /// The method.
    pub method: Method,
    /// The endpoint it leads to.
    pub endpoint: Endpoint,
    /// The permission that it needs.
    pub permission: Permission,
}

const fn route(method: Method, path: &'static str, endpoint: Endpoint, permission: Permission) -> Route {
    Route { path, method, endpoint, permission }
}

/// Every route. They are searched in this order, so the most frequent one comes first.
pub static ROUTES: [Route; 30] = [
    route(Method::POST, "/v1/check", Endpoint::Call(ApiCall::Check), Permission::Data),
    route(Method::GET, "/v1/auth", Endpoint::Auth, Permission::Gateway),
    route(Method::GET, "/v1/auth/nginx", Endpoint::AuthNginx, Permission::Gateway),
    route(Method::POST, "/v1/check/batch", Endpoint::Batch, Permission::Data),
    route(Method::POST, "/v1/peek", Endpoint::Call(ApiCall::Peek), Permission::Data),
    route(Method::POST, "/v1/reserve", Endpoint::Call(ApiCall::Reserve), Permission::Data),
    route(Method::POST, "/v1/settle", Endpoint::Call(ApiCall::Settle), Permission::Data),
    route(Method::POST, "/v1/refund", Endpoint::Call(ApiCall::Refund), Permission::Data),
    route(Method::POST, "/v1/acquire", Endpoint::Call(ApiCall::Acquire), Permission::Data),
    route(Method::POST, "/v1/release", Endpoint::Call(ApiCall::Release), Permission::Data),
    route(Method::POST, "/v1/renew", Endpoint::Call(ApiCall::Renew), Permission::Data),
    route(Method::GET, "/v1/usage", Endpoint::Usage, Permission::Usage),
    route(Method::GET, "/v1/limits", Endpoint::Limits, Permission::Data),
    route(Method::PUT, "/v1/limits", Endpoint::PutLimits, Permission::Admin),
    route(Method::DELETE, "/v1/limits", Endpoint::DeleteLimits, Permission::Admin),
    route(Method::GET, "/v1/state", Endpoint::State, Permission::Views),
    route(Method::DELETE, "/v1/state", Endpoint::Forget, Permission::Admin),
    route(Method::POST, "/v1/explain", Endpoint::Call(ApiCall::Explain), Permission::Views),
    route(Method::GET, "/v1/overrides", Endpoint::Overrides, Permission::Views),
    route(Method::PUT, "/v1/overrides/{limit}/{value}", Endpoint::SetOverride, Permission::Admin),
    route(Method::DELETE, "/v1/overrides/{limit}/{value}", Endpoint::DeleteOverride, Permission::Admin),
    route(Method::GET, "/v1/history", Endpoint::History, Permission::Views),
    route(Method::GET, "/v1/top", Endpoint::Top, Permission::Views),
    route(Method::GET, "/v1/events", Endpoint::Events, Permission::Views),
    route(Method::GET, "/healthz", Endpoint::Health, Permission::Open),
    route(Method::GET, "/readyz", Endpoint::Ready, Permission::Open),
    route(Method::GET, "/metrics", Endpoint::Metrics, Permission::Data),
    route(Method::GET, "/openapi.json", Endpoint::OpenApi, Permission::Open),
    route(Method::GET, "/", Endpoint::Dashboard, Permission::Views),
    route(Method::GET, "/dashboard/{name}", Endpoint::DashboardFile, Permission::Open),
];

impl Route {
    /// The route of this path and method. HEAD is routed as GET.
    pub fn of(path: &str, method: &Method) -> Result<&'static Route, NoRoute> {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        let mut at_path = ROUTES.iter().filter(|route| route.has_path(path)).peekable();
        if at_path.peek().is_none() {
            return Err(NoRoute::Path);
        }
        at_path.find(|route| route.method == *method).ok_or(NoRoute::Method)
    }

    fn has_path(&self, path: &str) -> bool {
        if !self.path.contains('{') {
            return self.path == path;
        }
        let (mut segments, mut given) = (self.path.split('/'), path.split('/'));
        let fits = |(segment, given): (&str, &str)| {
            segment == given || segment.starts_with('{') && !given.is_empty()
        };
        segments.by_ref().zip(given.by_ref()).all(fits) && segments.next().is_none() && given.next().is_none()
    }
}

/// Why a request matches no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// The path is unknown.
    Path,
    /// The path exists, but not with this method.
    Method,
}

impl NoRoute {
    /// The error for the client.
    pub fn error(self, path: &str) -> ApiError {
        match self {
            NoRoute::Path => {
                let message = "unknown path (try POST /v1/check, GET /v1/limits or GET /healthz)";
                ApiError::new(Code::NotFound, message)
            }
            NoRoute::Method => {
                ApiError::new(Code::MethodNotAllowed, format!("{path} accepts only {}", methods(path)))
            }
        }
    }
}

/// The methods of a path, as in `Allow`: `GET, HEAD, PUT, DELETE`.
pub fn methods(path: &str) -> String {
    let routes = ROUTES.iter().filter(|route| route.has_path(path));
    let names = |route: &Route| match route.method {
        Method::GET => "GET, HEAD".to_owned(),
        ref other => other.to_string(),
    };
    routes.map(names).collect::<Vec<_>>().join(", ")
}
