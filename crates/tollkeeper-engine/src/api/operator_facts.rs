//! Facts as operators pass them: the value of a hashed fact may be given as `sha256:…`, as answers show it.

use tollkeeper::{Facts, InvalidRequest, Policy, Value};

use crate::api::error::{ApiError, Code};
use crate::api::redact::Redactor;

/// The same facts, with the hashes that they name.
pub fn resolve<'f>(
    facts: &'f Facts<'f>,
    policy: &Policy,
    redactor: &Redactor,
) -> Result<Facts<'f>, ApiError> {
    let mut resolved = Facts::new();
    for (name, value) in facts.iter() {
        match value {
            Value::Text(text) => insert(&mut resolved, name, text, policy, redactor)?,
            value => resolved.insert(name, value.clone()).map_err(InvalidRequest::Fact)?,
        }
    }
    Ok(resolved)
}

/// Inserts one fact: the value itself, or for a hashed fact also `sha256:…`.
pub fn insert<'v>(
    facts: &mut Facts<'v>,
    name: &'v str,
    value: &'v str,
    policy: &Policy,
    redactor: &Redactor,
) -> Result<(), ApiError> {
    let value = redactor.value(policy.declared(), name, value).map_err(|error| {
        let message = format!("fact `{name}`: {error}");
        ApiError::new(Code::InvalidFact, message).at(format!("facts.{name}"))
    })?;
    Ok(facts.insert(name, value).map_err(InvalidRequest::Fact)?)
}
