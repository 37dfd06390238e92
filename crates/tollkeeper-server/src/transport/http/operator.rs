//! The calls for operators: what is stored for a key, history, and the dry run of new limits.

use hyper::http::request::Parts;
use hyper::{StatusCode, Uri};
use tollkeeper::{Facts, Policy};
use tollkeeper_engine::api::decision_json;
use tollkeeper_engine::api::error::{ApiError, Code};
use tollkeeper_engine::json::Writer;

use super::{Handled, JSON, answered, not_replaced, query, respond};
use crate::key_ref::NamedKey;
use crate::service::Service;
use crate::telemetry::history::Period;

/// `GET /v1/state`: what is stored for one key.
pub(super) async fn state(service: &Service, head: &Parts) -> Handled {
    let (limit, pairs) = named_key(service, &head.uri, "GET")?;
    let facts = query::facts(&pairs, service)?;
    let states = service.limiter.key_states(&limit, &facts).await?;
    let mut out = Writer::default();
    decision_json::write_key_states(&mut out, &service.redactor, &states, |out| {
        out.text(&key_ref(service, &limit, &facts)?);
        Ok::<(), ApiError>(())
    })?;
    Ok((None, respond(StatusCode::OK, JSON, out.finish())))
}

/// `DELETE /v1/state`: forgets one key.
pub(super) async fn forget(service: &Service, head: &Parts) -> Handled {
    let (limit, pairs) = named_key(service, &head.uri, "DELETE")?;
    let answer = service.api().forget(&limit, &query::facts(&pairs, service)?).await?;
    Ok((None, answered(service, answer)))
}

/// The limit and the facts in the query: `limit=NAME&fact=value…`, or `ref=…`.
fn named_key(
    service: &Service,
    uri: &Uri,
    method: &str,
) -> Result<(String, Vec<(String, String)>), ApiError> {
    let mut pairs = query::pairs(uri)?;
    if let Some(at) = pairs.iter().position(|(name, _)| name == "ref") {
        let (_, text) = pairs.remove(at);
        if !pairs.is_empty() {
            let message = "`ref` names limit and key: leave the other parameters out";
            return Err(ApiError::new(Code::UnknownField, message).at(pairs.swap_remove(0).0));
        }
        let key = service.key_refs.open(&text).ok_or_else(|| {
            let message =
                "unknown `ref`: it is valid for an hour, on the server that returned it (read /v1/top again)";
            ApiError::new(Code::InvalidFact, message).at("ref")
        })?;
        return Ok((key.limit.clone(), facts_of(&service.limiter.policy(), key)?));
    }
    let at = pairs.iter().position(|(name, _)| name == "limit").ok_or_else(|| {
        let message = format!("`limit` is missing (try {method} /v1/state?limit=NAME&fact=value)");
        ApiError::new(Code::MissingField, message).at("limit")
    })?;
    let (_, limit) = pairs.remove(at);
    Ok((limit, pairs))
}

/// The facts that make this key, as an operator would send them.
fn facts_of(policy: &Policy, key: NamedKey) -> Result<Vec<(String, String)>, ApiError> {
    let unknown = || {
        let message = format!("the limit `{}` of this `ref` has changed or was removed", key.limit);
        ApiError::new(Code::UnknownLimit, message).at("ref")
    };
    let (_, rule) = policy.find(&key.limit).ok_or_else(unknown)?;
    if rule.by().len() != key.values.len() {
        return Err(unknown());
    }
    let sent = |fact: &str, value: String| match policy.declared().get(fact) {
        Some(declared) if declared.is_hashed() => format!("sha256:{value}"),
        _ => value,
    };
    let facts = rule.by().iter().zip(key.values);
    Ok(facts.filter_map(|(fact, value)| Some((fact.to_string(), sent(fact, value?)))).collect())
}

/// The reference to the key that these facts make.
fn key_ref(service: &Service, limit: &str, facts: &Facts<'_>) -> Result<String, ApiError> {
    let keys = service.limiter.policy().key_texts(limit, facts)?;
    Ok(service.key_refs.seal(limit, keys.iter().map(Option::as_deref)))
}

/// `GET /v1/history`: counts per step.
pub(super) fn history(service: &Service, uri: &Uri) -> Handled {
    let pairs = query::pairs(uri)?;
    let period = match &pairs[..] {
        [] => Some(Period::FiveMinutes),
        [(name, span)] if name == "span" => Period::of(span),
        _ => return Err(unknown_parameter(&pairs, &["span"])),
    };
    let period = period
        .ok_or_else(|| ApiError::new(Code::UnknownField, "`span` is `5m`, `1h` or `24h`").at("span"))?;
    let mut out = Writer::with_capacity(1 << 14);
    service.history.write(&mut out, period);
    Ok((None, respond(StatusCode::OK, JSON, out.finish())))
}

/// Whether `PUT /v1/limits` is only to be tried: `?dry_run=true`.
pub(super) fn is_dry_run(uri: &Uri) -> Result<bool, ApiError> {
    let pairs = query::pairs(uri)?;
    match &pairs[..] {
        [] => Ok(false),
        [(name, value)] if name == "dry_run" => value
            .parse()
            .map_err(|_| ApiError::new(Code::UnknownField, "`dry_run` is `true` or `false`").at("dry_run")),
        _ => Err(unknown_parameter(&pairs, &["dry_run"])),
    }
}

/// `PUT /v1/limits?dry_run=true`: what the new limits would change.
pub(super) fn dry_run(service: &Service, head: &Parts, body: &[u8]) -> Handled {
    let tried = service.dry_run(body, &super::if_match(&head.headers)).map_err(not_replaced)?;
    let text = serde_json::to_string(&tried).expect("a dry run has only string keys");
    Ok((None, respond(StatusCode::OK, JSON, text)))
}

fn unknown_parameter(pairs: &[(String, String)], known: &[&str]) -> ApiError {
    let unknown = pairs.iter().map(|(name, _)| &**name).find(|name| !known.contains(name));
    let name: String = unknown.unwrap_or_default().chars().take(64).collect();
    let message = format!("unknown parameter `{name}`: this call takes only `{}`", known.join("`, `"));
    ApiError::new(Code::UnknownField, message).at(name)
}
