//! The calls that list, set and delete overrides: `/v1/overrides`.

use std::borrow::Cow;

use hyper::{Response, StatusCode};
use tollkeeper::facts::Hashed;
use tollkeeper::policy::InvalidOverride;
use tollkeeper::{Allowance, KeyOverride, OverrideError, Policy, Value};
use tollkeeper_engine::api::error::{ApiError, Code};
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_engine::api::{call, request};
use tollkeeper_engine::json::{Reader, Writer};

use super::response_body::Reply;
use super::{Handled, JSON, answered, query, respond};
use crate::history;
use crate::service::{CannotOverride, Service};

/// `GET /v1/overrides`.
pub(super) fn list(service: &Service) -> Response<Reply> {
    let policy = service.limiter.policy();
    let mut out = Writer::default();
    out.raw("{\"overrides\":");
    out.list(&service.limiter.overrides(), |out, it| write(out, it, &policy, &service.redactor));
    out.raw(",\"persistent\":");
    out.bool(service.keeps_overrides());
    out.raw("}");
    respond(StatusCode::OK, JSON, out.finish())
}

/// `PUT /v1/overrides/LIMIT/VALUE`.
pub(super) async fn set(service: &Service, path: &str, body: &mut [u8]) -> Handled {
    let (limit, value) = named(path)?;
    let key = key_of(service, &limit, &value)?;
    let granted = request::read_override(Reader::new(body)?)?;
    let set = service.set_override(KeyOverride { limit, key, granted }).await.map_err(not_set)?;
    let mut out = Writer::default();
    write(&mut out, &set, &service.limiter.policy(), &service.redactor);
    Ok((None, respond(StatusCode::OK, JSON, out.finish())))
}

/// `DELETE /v1/overrides/LIMIT/VALUE`.
pub(super) async fn delete(service: &Service, path: &str) -> Handled {
    let (limit, value) = named(path)?;
    let key = match key_of(service, &limit, &value) {
        Ok(key) => key,
        Err(error) => listed(service, &limit, &value).ok_or(error)?,
    };
    let removed = service.remove_override(&limit, &key).await.map_err(not_set)?;
    Ok((None, answered(service, call::done(removed))))
}

/// The limit and the value in the path. Each segment is percent-decoded once.
fn named(path: &str) -> Result<(String, String), ApiError> {
    let mut segments = path.split('/').skip(3).map(query::decode_path);
    let mut segment = |name: &str| {
        segments.next().flatten().ok_or_else(|| {
            let message = format!(
                "`{name}` in the path: `%` must be followed by two hexadecimal digits, and the result be UTF-8"
            );
            ApiError::new(Code::InvalidFact, message).at(name)
        })
    };
    Ok((segment("limit")?, segment("value")?))
}

/// The key that a value makes under an active limit.
fn key_of(service: &Service, limit: &str, value: &str) -> Result<String, ApiError> {
    let policy = service.limiter.policy();
    let fact = policy.find(limit).and_then(|(_, rule)| rule.by().first()).map_or("", |fact| &**fact);
    let value = service
        .redactor
        .value(policy.declared(), fact, value)
        .map_err(|error| ApiError::new(Code::InvalidFact, format!("fact `{fact}`: {error}")).at("value"))?;
    let key = service.limiter.override_key(limit, value);
    key.map_err(|invalid| not_set(CannotOverride::Invalid(invalid.into())))
}

/// The key of the override that is listed with this value: its limit may be inactive or keyed by other facts by now, so
/// that no value makes its key. `None` if there is no such override, or several.
fn listed(service: &Service, limit: &str, value: &str) -> Option<String> {
    let policy = service.limiter.policy();
    let all = service.limiter.overrides().into_iter().filter(|it| it.limit == limit);
    let mut found = all.filter(|it| it.key == value || shown(it, &policy, &service.redactor) == value);
    let first = found.next()?;
    found.next().is_none().then_some(first.key)
}

fn not_set(error: CannotOverride) -> ApiError {
    let error = match error {
        CannotOverride::Invalid(error) => error,
        CannotOverride::Failed(failure) => {
            let message = format!(
                "the store did not answer ({failure}): the override may or may not have changed, GET /v1/overrides \
                 shows those in force"
            );
            return ApiError::new(Code::StoreUnavailable, message);
        }
    };
    let (code, at) = match &error {
        OverrideError::Invalid(InvalidOverride::UnknownLimit(_)) => (Code::UnknownLimit, "limit"),
        OverrideError::Invalid(InvalidOverride::NotOneFact { .. }) => (Code::InvalidLimits, "limit"),
        OverrideError::Invalid(InvalidOverride::Quota { .. }) => (Code::InvalidLimits, "rate"),
        OverrideError::Invalid(_) => (Code::InvalidFact, "value"),
        OverrideError::Ended { .. } => (Code::InvalidTtl, "until"),
        OverrideError::LongNote => (Code::TooLarge, "note"),
        _ => (Code::TooMany, "value"),
    };
    ApiError::new(code, error.to_string()).at(at)
}

/// The value of an override as it may be shown. If the limit is not active, it is not known whether its fact is hashed:
/// a key that looks like a hash is shown as one.
fn shown<'o>(it: &'o KeyOverride, policy: &Policy, redactor: &Redactor) -> Cow<'o, str> {
    match policy.find(&it.limit).and_then(|(_, rule)| rule.by().first()) {
        Some(fact) => redactor.redact(policy.declared(), fact, &it.key),
        None if Value::from_hash(&it.key).is_some() => {
            Cow::Owned(format!("sha256:{:.*}", Hashed::SHOWN_DIGITS, it.key))
        }
        None => Cow::Borrowed(&it.key),
    }
}

/// Writes one override.
fn write(out: &mut Writer, it: &KeyOverride, policy: &Policy, redactor: &Redactor) {
    out.raw("{\"limit\":");
    out.text(&it.limit);
    out.raw(",\"key\":");
    out.text(&shown(it, policy, redactor));
    let (rate, slots) = match it.granted.allowance {
        Allowance::Quota(quota) => match quota.period() {
            Some(period) => (Some((quota, period)), None),
            None => (None, Some(quota.count())),
        },
        _ => (None, None),
    };
    out.raw(",\"rate\":");
    out.or_null(rate, |out, (quota, period)| out.text(&history::rate(quota.count(), period)));
    out.raw(",\"burst\":");
    out.or_null(rate.and_then(|(quota, _)| quota.explicit_burst()), Writer::number);
    if slots.is_some() {
        out.raw(",\"slots\":");
        out.or_null(slots, Writer::number);
    }
    out.raw(",\"blocked\":");
    out.bool(it.granted.allowance == Allowance::Nothing);
    out.raw(",\"unlimited\":");
    out.bool(it.granted.allowance == Allowance::Unlimited);
    out.raw(",\"until\":");
    out.or_null(it.granted.until, Writer::number);
    out.raw(",\"note\":");
    out.or_null(it.granted.note.as_deref(), Writer::text);
    out.raw("}");
}
