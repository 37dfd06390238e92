//! Reads facts from the query of a URI.

use hyper::Uri;
use tollkeeper::Facts;
use tollkeeper::facts::MAX_FACTS;
use tollkeeper_engine::api::error::{ApiError, Code};
use tollkeeper_engine::api::operator_facts;

use crate::service::Service;

/// The decoded names and values of a query. A name may appear only once.
pub fn pairs(uri: &Uri) -> Result<Vec<(String, String)>, ApiError> {
    let query = uri.query().unwrap_or_default();
    let mut pairs: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decoded = |text| {
            decode(text).ok_or_else(|| {
                let message = format!(
                    "fact `{name}`: `%` must be followed by two hexadecimal digits, and the result be UTF-8"
                );
                ApiError::new(Code::InvalidFact, message).at(format!("facts.{name}"))
            })
        };
        let (name, value) = (decoded(name)?, decoded(value)?);
        if pairs.iter().any(|(other, _)| *other == name) {
            let message = format!("fact `{name}` is given twice");
            return Err(ApiError::new(Code::DuplicateField, message).at(format!("facts.{name}")));
        }
        if pairs.len() == MAX_FACTS {
            let message = format!("more than {MAX_FACTS} facts in one request");
            return Err(ApiError::new(Code::TooMany, message).at("facts"));
        }
        pairs.push((name, value));
    }
    Ok(pairs)
}

/// The facts of an operator's query. A hashed fact may be given as a raw value or as `sha256:…`.
pub fn facts<'p>(pairs: &'p [(String, String)], service: &Service) -> Result<Facts<'p>, ApiError> {
    let policy = service.limiter.policy();
    let mut facts = Facts::new();
    for (name, value) in pairs {
        operator_facts::insert(&mut facts, name, value, &policy, &service.redactor)?;
    }
    Ok(facts)
}

/// Decodes a query component: `+` is a space, `%41` is `A`.
fn decode(text: &str) -> Option<String> {
    decode_path(&text.replace('+', " "))
}

/// Decodes a segment of a path, in which `+` is no space.
pub fn decode_path(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).expect("two hexadecimal digits")
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_component_is_decoded() {
        for (text, expected) in [
            ("alice", Some("alice")),
            ("a+b%20c", Some("a b c")),
            ("%e2%82%ac", Some("€")),
            ("%", None),
            ("%4", None),
            ("%zz", None),
            ("%ff", None),
        ] {
            assert_eq!(decode(text).as_deref(), expected, "{text}");
        }
    }
}
