//! What can be called: each path and method, once.

use hyper::Method;

use super::error::{ApiError, Code};
use crate::control::access::Permission;

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "by their paths, below")]
pub enum Call {
    Check,
    Batch,
    Peek,
    Usage,
    Refund,
    Reserve,
    Settle,
    Acquire,
    Release,
    Renew,
    Limits,
    PutLimits,
    DeleteLimits,
    Forget,
    Top,
    Events,
    Auth,
    AuthNginx,
    Health,
    Ready,
    Metrics,
    OpenApi,
    Index,
}

/// How a call is made, and who may.
#[derive(Debug)]
pub struct Route {
    /// Its path.
    pub path: &'static str,
    /// Its method.
    pub method: Method,
    /// What it is.
    pub call: Call,
    /// Who may.
    pub permission: Permission,
}

const fn route(method: Method, path: &'static str, call: Call, permission: Permission) -> Route {
    Route { path, method, call, permission }
}

/// Every call there is: the most frequent one first, because they are looked at in this order.
pub static ROUTES: [Route; 23] = [
    route(Method::POST, "/v1/check", Call::Check, Permission::Data),
    route(Method::GET, "/v1/auth", Call::Auth, Permission::Gateway),
    route(Method::GET, "/v1/auth/nginx", Call::AuthNginx, Permission::Gateway),
    route(Method::POST, "/v1/check/batch", Call::Batch, Permission::Data),
    route(Method::POST, "/v1/peek", Call::Peek, Permission::Data),
    route(Method::POST, "/v1/reserve", Call::Reserve, Permission::Data),
    route(Method::POST, "/v1/settle", Call::Settle, Permission::Data),
    route(Method::POST, "/v1/refund", Call::Refund, Permission::Data),
    route(Method::POST, "/v1/acquire", Call::Acquire, Permission::Data),
    route(Method::POST, "/v1/release", Call::Release, Permission::Data),
    route(Method::POST, "/v1/renew", Call::Renew, Permission::Data),
    route(Method::GET, "/v1/usage", Call::Usage, Permission::Usage),
    route(Method::GET, "/v1/limits", Call::Limits, Permission::Data),
    route(Method::PUT, "/v1/limits", Call::PutLimits, Permission::Admin),
    route(Method::DELETE, "/v1/limits", Call::DeleteLimits, Permission::Admin),
    route(Method::DELETE, "/v1/state", Call::Forget, Permission::Admin),
    route(Method::GET, "/v1/top", Call::Top, Permission::Eyes),
    route(Method::GET, "/v1/events", Call::Events, Permission::Eyes),
    route(Method::GET, "/healthz", Call::Health, Permission::Open),
    route(Method::GET, "/readyz", Call::Ready, Permission::Open),
    route(Method::GET, "/metrics", Call::Metrics, Permission::Data),
    route(Method::GET, "/openapi.json", Call::OpenApi, Permission::Open),
    route(Method::GET, "/", Call::Index, Permission::Eyes),
];

impl Route {
    /// The route of this path and method. HEAD is GET without the body of the answer.
    pub fn of(path: &str, method: &Method) -> Result<&'static Route, NoRoute> {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        let mut at_path = ROUTES.iter().filter(|route| route.path == path).peekable();
        if at_path.peek().is_none() {
            return Err(NoRoute::Path);
        }
        at_path.find(|route| route.method == *method).ok_or(NoRoute::Method)
    }
}

/// Why there is no such call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// There is no such path.
    Path,
    /// The path takes other methods.
    Method,
}

impl NoRoute {
    /// What is said to who called it.
    pub fn error(self, path: &str) -> ApiError {
        match self {
            NoRoute::Path => {
                let message = "there is no such path (try POST /v1/check, GET /v1/limits or GET /healthz)";
                ApiError::new(Code::NotFound, message)
            }
            NoRoute::Method => {
                ApiError::new(Code::MethodNotAllowed, format!("{path} takes {}", methods(path)))
            }
        }
    }
}

/// The methods that a path takes.
pub fn methods(path: &str) -> String {
    let routes = ROUTES.iter().filter(|route| route.path == path);
    let names = |route: &Route| match route.method {
        Method::GET => "GET, HEAD".to_owned(),
        ref other => other.to_string(),
    };
    routes.map(names).collect::<Vec<_>>().join(", ")
}
