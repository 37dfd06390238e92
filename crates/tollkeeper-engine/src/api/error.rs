//! API errors: code, message and the field they are about, and how other errors map to them.

use http::StatusCode;
use tollkeeper::facts::FactProblem;
use tollkeeper::{ForgetError, InvalidRequest, Unavailable};

use crate::json::{Malformed, Writer};

/// An error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The kind of error, which also decides the status.
    pub code: Code,
    /// What is wrong, and what would be right.
    pub message: String,
    /// The field that it is about, such as `facts.user`.
    pub at: Option<String>,
}

/// The kinds of errors. Their names are API: clients depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The body is not valid JSON, or did not arrive completely.
    InvalidJson,
    /// A required field is missing.
    MissingField,
    /// A field is unknown.
    UnknownField,
    /// A field is given twice.
    DuplicateField,
    /// A fact has an invalid name or value.
    InvalidFact,
    /// A cost is not a number, or out of range.
    InvalidCost,
    /// Too many facts, checks or event streams.
    TooMany,
    /// The new limits are invalid.
    InvalidLimits,
    /// No limit has this name.
    UnknownLimit,
    /// The charge was not issued by this store, or has expired or is fully corrected.
    UnknownCharge,
    /// The slot was not issued by this store, or is no longer held.
    UnknownSlot,
    /// A token is missing or wrong.
    Unauthorized,
    /// The request comes from another site, or the endpoint is disabled.
    Forbidden,
    /// The path is unknown.
    NotFound,
    /// The path does not support this method.
    MethodNotAllowed,
    /// The body is too large.
    TooLarge,
    /// `If-Match` names another version than the active one.
    VersionMismatch,
    /// The ttl of a reservation is not a duration, or out of range.
    InvalidTtl,
    /// The store did not answer, and no failure policy applies.
    StoreUnavailable,
}

impl Code {
    /// Every code.
    pub const ALL: [Code; 19] = [
        Code::InvalidJson,
        Code::MissingField,
        Code::UnknownField,
        Code::DuplicateField,
        Code::InvalidFact,
        Code::InvalidCost,
        Code::TooMany,
        Code::InvalidLimits,
        Code::UnknownLimit,
        Code::UnknownCharge,
        Code::UnknownSlot,
        Code::Unauthorized,
        Code::Forbidden,
        Code::NotFound,
        Code::MethodNotAllowed,
        Code::TooLarge,
        Code::VersionMismatch,
        Code::InvalidTtl,
        Code::StoreUnavailable,
    ];

    /// Its name and its status.
    fn table(self) -> (&'static str, StatusCode) {
        match self {
            Code::InvalidJson => ("invalid_json", StatusCode::BAD_REQUEST),
            Code::MissingField => ("missing_field", StatusCode::BAD_REQUEST),
            Code::UnknownField => ("unknown_field", StatusCode::BAD_REQUEST),
            Code::DuplicateField => ("duplicate_field", StatusCode::BAD_REQUEST),
            Code::InvalidFact => ("invalid_fact", StatusCode::BAD_REQUEST),
            Code::InvalidCost => ("invalid_cost", StatusCode::BAD_REQUEST),
            Code::TooMany => ("too_many", StatusCode::BAD_REQUEST),
            Code::InvalidLimits => ("invalid_limits", StatusCode::BAD_REQUEST),
            Code::UnknownLimit => ("unknown_limit", StatusCode::NOT_FOUND),
            Code::UnknownCharge => ("unknown_charge", StatusCode::NOT_FOUND),
            Code::UnknownSlot => ("unknown_slot", StatusCode::NOT_FOUND),
            Code::Unauthorized => ("unauthorized", StatusCode::UNAUTHORIZED),
            Code::Forbidden => ("forbidden", StatusCode::FORBIDDEN),
            Code::NotFound => ("not_found", StatusCode::NOT_FOUND),
            Code::MethodNotAllowed => ("method_not_allowed", StatusCode::METHOD_NOT_ALLOWED),
            Code::TooLarge => ("too_large", StatusCode::PAYLOAD_TOO_LARGE),
            Code::VersionMismatch => ("version_mismatch", StatusCode::PRECONDITION_FAILED),
            Code::InvalidTtl => ("invalid_ttl", StatusCode::BAD_REQUEST),
            Code::StoreUnavailable => ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE),
        }
    }

    /// Its name, such as `invalid_fact`.
    pub fn name(self) -> &'static str {
        self.table().0
    }

    /// The status of the response.
    pub fn status(self) -> StatusCode {
        self.table().1
    }
}

impl ApiError {
    /// An error about the request as a whole.
    pub fn new(code: Code, message: impl Into<String>) -> ApiError {
        ApiError { code, message: message.into(), at: None }
    }

    /// Names the field that the error is about.
    #[must_use]
    pub fn at(self, field: impl Into<String>) -> ApiError {
        ApiError { at: Some(field.into()), ..self }
    }

    /// Writes `{"error":{"code":…,"message":…,"where":…}}`.
    pub fn write(&self, out: &mut Writer) {
        out.raw("{\"error\":{\"code\":");
        out.text(self.code.name());
        out.raw(",\"message\":");
        out.text(&self.message);
        out.raw(",\"where\":");
        out.or_null(self.at.as_deref(), Writer::text);
        out.raw("}}");
    }
}

impl From<Malformed> for ApiError {
    fn from(malformed: Malformed) -> ApiError {
        ApiError::new(Code::InvalidJson, malformed.to_string())
    }
}

impl From<Unavailable> for ApiError {
    fn from(unavailable: Unavailable) -> ApiError {
        ApiError::new(Code::StoreUnavailable, unavailable.to_string())
    }
}

impl From<ForgetError> for ApiError {
    fn from(error: ForgetError) -> ApiError {
        match error {
            ForgetError::Invalid(invalid) => invalid.into(),
            ForgetError::Unavailable(unavailable) => unavailable.into(),
            other => ApiError::new(Code::StoreUnavailable, other.to_string()),
        }
    }
}

impl From<InvalidRequest> for ApiError {
    fn from(invalid: InvalidRequest) -> ApiError {
        let (code, at) = match &invalid {
            InvalidRequest::Fact(fact) if fact.problem == FactProblem::TooMany => {
                (Code::TooMany, "facts".to_owned())
            }
            InvalidRequest::Fact(fact) => (Code::InvalidFact, format!("facts.{}", fact.name)),
            InvalidRequest::CostFact { fact, .. } => (Code::InvalidCost, format!("facts.{fact}")),
            InvalidRequest::UnknownLimit(_) => (Code::UnknownLimit, "limit".to_owned()),
            InvalidRequest::ZeroCost
            | InvalidRequest::Cost(_)
            | InvalidRequest::MoreThanCharged { .. }
            | InvalidRequest::ZeroRefund
            | InvalidRequest::NothingToCorrect { by_cost: true, .. } => {
                (Code::InvalidCost, "cost".to_owned())
            }
            InvalidRequest::NothingToCorrect { by_cost: false, .. } => {
                (Code::InvalidCost, "facts".to_owned())
            }
            InvalidRequest::KeyFacts { absent, .. } => (Code::MissingField, format!("facts.{}", absent[0])),
            InvalidRequest::TooManyDues => (Code::TooMany, "facts".to_owned()),
            InvalidRequest::Ttl(_) => (Code::InvalidTtl, "ttl".to_owned()),
            // A problem that a newer library reports: its message says what is wrong.
            _ => (Code::InvalidFact, "facts".to_owned()),
        };
        ApiError::new(code, invalid.to_string()).at(at)
    }
}
