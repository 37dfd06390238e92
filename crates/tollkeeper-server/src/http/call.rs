//! What can be called: each path and method, once.

use hyper::Method;

use super::error::{ApiError, Code};

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
    Forget,
    Health,
    Ready,
    Metrics,
}

/// Every call there is: the most frequent one first, because they are looked at in this order.
pub static CALLS: [(&str, Method, Call); 15] = [
    ("/v1/check", Method::POST, Call::Check),
    ("/v1/check/batch", Method::POST, Call::Batch),
    ("/v1/peek", Method::POST, Call::Peek),
    ("/v1/reserve", Method::POST, Call::Reserve),
    ("/v1/settle", Method::POST, Call::Settle),
    ("/v1/refund", Method::POST, Call::Refund),
    ("/v1/acquire", Method::POST, Call::Acquire),
    ("/v1/release", Method::POST, Call::Release),
    ("/v1/renew", Method::POST, Call::Renew),
    ("/v1/usage", Method::GET, Call::Usage),
    ("/v1/limits", Method::GET, Call::Limits),
    ("/v1/state", Method::DELETE, Call::Forget),
    ("/healthz", Method::GET, Call::Health),
    ("/readyz", Method::GET, Call::Ready),
    ("/metrics", Method::GET, Call::Metrics),
];

impl Call {
    /// The call of this path and method.
    pub fn of(path: &str, method: &Method) -> Result<Call, NoCall> {
        let mut at_path = CALLS.iter().filter(|(known, _, _)| *known == path).peekable();
        if at_path.peek().is_none() {
            return Err(NoCall::Path);
        }
        match at_path.find(|(_, known, _)| known == method) {
            Some((_, _, call)) => Ok(*call),
            None => Err(NoCall::Method),
        }
    }
}

/// Why there is no such call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoCall {
    /// There is no such path.
    Path,
    /// The path takes other methods.
    Method,
}

impl NoCall {
    /// What is said to who called it.
    pub fn error(self, path: &str) -> ApiError {
        match self {
            NoCall::Path => {
                let message = "there is no such path (try POST /v1/check, GET /v1/limits or GET /healthz)";
                ApiError::new(Code::NotFound, message)
            }
            NoCall::Method => {
                ApiError::new(Code::MethodNotAllowed, format!("{path} takes {}", methods(path)))
            }
        }
    }
}

/// The methods that a path takes.
pub fn methods(path: &str) -> String {
    let methods = CALLS.iter().filter(|(known, _, _)| *known == path).map(|(_, method, _)| method.as_str());
    methods.collect::<Vec<_>>().join(", ")
}
