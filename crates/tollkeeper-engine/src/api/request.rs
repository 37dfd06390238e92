//! Reads the JSON bodies of API requests into facts, costs, charges and slots.

use std::time::Duration;

use tollkeeper::policy::Override;
use tollkeeper::{Allowance, Costs, Facts, InvalidFact, InvalidRequest, Quota, Value as FactValue};

use crate::api::error::{ApiError, Code};
use crate::json::{Kind, Reader, Scalar};

/// The largest number of checks in one batch.
pub const MAX_BATCH: usize = 1_000;

/// The body of a check: `{"facts":{"user":"alice"},"cost":1}`.
#[derive(Clone, Debug)]
pub struct CheckBody<'a> {
    /// The facts of the request: `user=alice`.
    pub facts: Facts<'a>,
    /// Units to charge; 1 if the body does not say.
    pub cost: u64,
}

impl<'a> CheckBody<'a> {
    /// Reads a body.
    pub fn read(reader: Reader<'a>) -> Result<CheckBody<'a>, ApiError> {
        let (facts, cost) = read_facts_and_cost(reader, "a check")?;
        let facts =
            facts.ok_or_else(|| missing("facts", "an object of names and values; it may be empty"))?;
        Ok(CheckBody { facts, cost: cost.unwrap_or(1) })
    }
}

/// What an application adds to a request that it has read: `{"facts":{"user":"alice"},"cost":2}`, both optional.
#[derive(Clone, Debug, Default)]
pub struct OwnFacts<'a> {
    /// Facts that replace those of the request.
    pub facts: Facts<'a>,
    /// Units to charge, if not 1.
    pub cost: Option<u64>,
}

impl<'a> OwnFacts<'a> {
    /// Reads a text.
    pub fn read(reader: Reader<'a>) -> Result<OwnFacts<'a>, ApiError> {
        let (facts, cost) = read_facts_and_cost(reader, "facts of the application")?;
        Ok(OwnFacts { facts: facts.unwrap_or_default(), cost })
    }
}

type FactsAndCost<'a> = (Option<Facts<'a>>, Option<u64>);

fn read_facts_and_cost<'a>(mut reader: Reader<'a>, what: &str) -> Result<FactsAndCost<'a>, ApiError> {
    must_be_object(&mut reader, what, r#"{"facts":{"user":"alice"},"cost":1}"#)?;
    let (mut facts, mut cost) = (None, None);
    reader.object(|reader, name| match name {
        "facts" => once(&mut facts, name, read_facts(reader)?),
        "cost" => once(&mut cost, name, read_cost(reader)?),
        _ => Err(unknown(name, "`facts` and `cost`")),
    })?;
    reader.end()?;
    Ok((facts, cost))
}

/// The time to live of a reservation without `ttl`.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// The body of a reservation: `{"facts":{"api_key":"k","tokens":2000},"cost":1,"ttl":"60s"}`.
#[derive(Clone, Debug)]
pub struct Reserve<'a> {
    /// The facts and the estimated cost.
    pub check: CheckBody<'a>,
    /// How long the charge can be corrected: 1 s to 1 h.
    pub ttl: Duration,
}

impl<'a> Reserve<'a> {
    /// Reads a body.
    pub fn read(mut reader: Reader<'a>) -> Result<Reserve<'a>, ApiError> {
        must_be_object(
            &mut reader,
            "a reservation",
            r#"{"facts":{"api_key":"k","tokens":2000},"ttl":"60s"}"#,
        )?;
        let (mut facts, mut cost, mut ttl) = (None, None, None);
        reader.object(|reader, name| match name {
            "facts" => once(&mut facts, name, read_facts(reader)?),
            "cost" => once(&mut cost, name, read_cost(reader)?),
            "ttl" => once(&mut ttl, name, read_ttl(reader)?),
            _ => Err(unknown(name, "`facts`, `cost` and `ttl`")),
        })?;
        reader.end()?;
        let facts =
            facts.ok_or_else(|| missing("facts", "an object of names and values; it may be empty"))?;
        Ok(Reserve { check: CheckBody { facts, cost: cost.unwrap_or(1) }, ttl: ttl.unwrap_or(DEFAULT_TTL) })
    }
}

/// The body of settle and refund: `{"charge":"…"}`, with `"cost":n` or `"facts":{"tokens":n}`.
#[derive(Clone, Debug)]
pub struct Correct<'a> {
    /// The charge to correct, as an earlier response named it.
    pub charge: &'a str,
    cost: Option<u64>,
    facts: Option<Facts<'a>>,
}

impl<'a> Correct<'a> {
    /// Reads a body.
    pub fn read(mut reader: Reader<'a>) -> Result<Correct<'a>, ApiError> {
        must_be_object(&mut reader, "a correction", r#"{"charge":"…","facts":{"tokens":1234}}"#)?;
        let (mut charge, mut cost, mut facts) = (None, None, None);
        reader.object(|reader, name| match name {
            "charge" => once(&mut charge, name, read_text(reader, name)?),
            "cost" => once(&mut cost, name, read_cost(reader)?),
            "facts" => once(&mut facts, name, read_facts(reader)?),
            _ => Err(unknown(name, "`charge`, `cost` and `facts`")),
        })?;
        reader.end()?;
        if cost.is_some() && facts.is_some() {
            // They correct different limits, and a charge is corrected only once.
            let message = "send `cost` or `facts`, not both: a charge is corrected only once";
            return Err(ApiError::new(Code::InvalidCost, message).at("cost"));
        }
        let charge = charge.ok_or_else(|| missing("charge", "the `charge` of an earlier response"))?;
        Ok(Correct { charge, cost, facts })
    }

    /// The corrected costs, if the body has any.
    pub fn costs(&self) -> Option<Costs<'_>> {
        self.cost.map(Costs::Request).or(self.facts.as_ref().map(Costs::Facts))
    }

    /// The corrected costs, which settle requires.
    pub fn actual(&self) -> Result<Costs<'_>, ApiError> {
        self.costs()
            .ok_or_else(|| missing("facts", "the actual costs, such as {\"tokens\":1234}, or send `cost`"))
    }
}

/// The body of forget: `{"limit":"per-user","facts":{"user":"alice"}}`.
#[derive(Clone, Debug)]
pub struct Forget<'a> {
    /// The name of the limit.
    pub limit: &'a str,
    /// The facts that make the key.
    pub facts: Facts<'a>,
}

impl<'a> Forget<'a> {
    /// Reads a body.
    pub fn read(mut reader: Reader<'a>) -> Result<Forget<'a>, ApiError> {
        must_be_object(&mut reader, "a key", r#"{"limit":"per-user","facts":{"user":"alice"}}"#)?;
        let (mut limit, mut facts) = (None, None);
        reader.object(|reader, name| match name {
            "limit" => once(&mut limit, name, read_text(reader, name)?),
            "facts" => once(&mut facts, name, read_facts(reader)?),
            _ => Err(unknown(name, "`limit` and `facts`")),
        })?;
        reader.end()?;
        let limit = limit.ok_or_else(|| missing("limit", "the name of a limit"))?;
        Ok(Forget { limit, facts: facts.unwrap_or_default() })
    }
}

/// Reads `{"facts":{…}}`, the body of explain and usage.
pub fn read_explain<'a>(mut reader: Reader<'a>) -> Result<Facts<'a>, ApiError> {
    must_be_object(&mut reader, "the body", r#"{"facts":{"user":"alice"}}"#)?;
    let mut facts = None;
    reader.object(|reader, name| match name {
        "facts" => once(&mut facts, name, read_facts(reader)?),
        _ => Err(unknown(name, "`facts`")),
    })?;
    reader.end()?;
    facts.ok_or_else(|| missing("facts", "an object of names and values; it may be empty"))
}

/// The body of an override: `{"rate":"500/min","burst":50,"until":1795564800,"note":"…"}`, `{"limit":9}`,
/// `{"blocked":true}` or `{"unlimited":true}`.
pub fn read_override(mut reader: Reader<'_>) -> Result<Override, ApiError> {
    must_be_object(&mut reader, "an override", r#"{"rate":"500/min","burst":50}"#)?;
    let (mut rate, mut burst, mut slots) = (None, None, None);
    let (mut blocked, mut unlimited, mut until, mut note) = (None, None, None, None);
    reader.object(|reader, name| match name {
        "rate" => once(&mut rate, name, read_text(reader, name)?),
        "burst" => once(&mut burst, name, read_number(reader, name)?),
        "limit" => once(&mut slots, name, read_number(reader, name)?),
        "blocked" => once(&mut blocked, name, read_bool(reader, name)?),
        "unlimited" => once(&mut unlimited, name, read_bool(reader, name)?),
        "until" => once(&mut until, name, read_until(reader)?),
        "note" => once(&mut note, name, read_note(reader)?),
        _ => Err(unknown(name, "`rate`, `burst`, `limit`, `blocked`, `unlimited`, `until` and `note`")),
    })?;
    reader.end()?;
    if burst.is_some() && rate.is_none() {
        return Err(missing("rate", "`burst` needs a `rate`, such as \"500/min\""));
    }
    let (blocked, unlimited) = (blocked.unwrap_or(false), unlimited.unwrap_or(false));
    let given = [rate.is_some(), slots.is_some(), blocked, unlimited];
    match given.into_iter().filter(|given| *given).count() {
        0 => return Err(missing("rate", "send `rate`, `limit`, `blocked` or `unlimited`")),
        1 => {}
        _ => {
            let message = "`rate`, `limit`, `blocked` and `unlimited` exclude each other: send one of them";
            return Err(ApiError::new(Code::InvalidLimits, message));
        }
    }
    let allowance = match (rate, slots) {
        (Some(rate), _) => {
            let invalid = |message: String| ApiError::new(Code::InvalidLimits, message).at("rate");
            match (tollkeeper::config::rate(rate).map_err(invalid)?, burst) {
                (Allowance::Quota(quota), burst) => quota.with_burst(burst).into(),
                (other, None) => other,
                (_, Some(_)) => {
                    return Err(invalid(format!("`{rate}` has no burst: leave `burst` out")));
                }
            }
        }
        (None, Some(slots)) => Quota::slots(slots).into(),
        (None, None) if blocked => Allowance::Nothing,
        (None, None) => Allowance::Unlimited,
    };
    Ok(Override { allowance, until: until.flatten(), note: note.flatten() })
}

fn read_number(reader: &mut Reader<'_>, name: &str) -> Result<u64, ApiError> {
    let number = if let Some(Scalar::Number(number)) = scalar(reader)? { number.parse().ok() } else { None };
    number.ok_or_else(|| {
        ApiError::new(Code::InvalidLimits, format!("`{name}` must be a whole number, such as 50")).at(name)
    })
}

fn read_bool(reader: &mut Reader<'_>, name: &str) -> Result<bool, ApiError> {
    match scalar(reader)? {
        Some(Scalar::Bool(bool)) => Ok(bool),
        _ => Err(ApiError::new(Code::InvalidJson, format!("`{name}` must be true or false")).at(name)),
    }
}

fn read_until(reader: &mut Reader<'_>) -> Result<Option<u64>, ApiError> {
    let invalid = || {
        let message = "`until` must be a time in Unix seconds, such as 1795564800, or null";
        ApiError::new(Code::InvalidTtl, message).at("until")
    };
    match scalar(reader)? {
        Some(Scalar::Null) => Ok(None),
        Some(Scalar::Number(number)) => number.parse().map(Some).map_err(|_| invalid()),
        _ => Err(invalid()),
    }
}

fn read_note(reader: &mut Reader<'_>) -> Result<Option<String>, ApiError> {
    match scalar(reader)? {
        Some(Scalar::Null) => Ok(None),
        Some(Scalar::Text(text)) => Ok(Some(text.to_owned()).filter(|note| !note.is_empty())),
        _ => Err(ApiError::new(Code::InvalidJson, "`note` must be a string or null").at("note")),
    }
}

/// Reads `{"slot":"…"}`.
pub fn read_slot<'a>(mut reader: Reader<'a>) -> Result<&'a str, ApiError> {
    must_be_object(&mut reader, "a slot", r#"{"slot":"…"}"#)?;
    let mut slot = None;
    reader.object(|reader, name| match name {
        "slot" => once(&mut slot, name, read_text(reader, name)?),
        _ => Err(unknown(name, "`slot`")),
    })?;
    reader.end()?;
    slot.ok_or_else(|| missing("slot", "the `slot` of an earlier /v1/acquire"))
}

/// Reads `{"checks":[…]}`. The elements are well-formed JSON, but are not validated yet: an invalid check must not fail
/// the others.
pub fn read_batch<'a>(mut reader: Reader<'a>) -> Result<Vec<Reader<'a>>, ApiError> {
    must_be_object(&mut reader, "a batch", r#"{"checks":[…]}"#)?;
    let mut checks: Option<Vec<Reader<'a>>> = None;
    reader.object(|reader, name| match name {
        "checks" if reader.kind()? == Kind::List => {
            let mut list = Vec::new();
            reader.list(|reader, index| {
                if index == MAX_BATCH {
                    let message = format!("a batch has at most {MAX_BATCH} checks: send several batches");
                    return Err(ApiError::new(Code::TooMany, message).at("checks"));
                }
                list.push(reader.value()?);
                Ok(())
            })?;
            once(&mut checks, name, list)
        }
        "checks" => Err(ApiError::new(Code::InvalidJson, "`checks` must be a list of checks").at("checks")),
        _ => Err(unknown(name, "`checks`")),
    })?;
    reader.end()?;
    checks.ok_or_else(|| missing("checks", "a list of checks"))
}

fn read_facts<'a>(reader: &mut Reader<'a>) -> Result<Facts<'a>, ApiError> {
    let mut facts = Facts::new();
    if reader.kind()? != Kind::Object {
        let message = "`facts` must be an object of names and values, such as {\"user\":\"alice\"}";
        return Err(ApiError::new(Code::InvalidFact, message).at("facts"));
    }
    reader.object(|reader, name| {
        let invalid = |what: &str| {
            let message = format!("fact `{}`: {what}", truncated(name));
            Err(ApiError::new(Code::InvalidFact, message).at(format!("facts.{}", truncated(name))))
        };
        if facts.iter().any(|(other, _)| other == name) {
            return Err(duplicate(&format!("facts.{}", truncated(name))));
        }
        match reader.kind()? {
            Kind::Scalar => {}
            Kind::Object => {
                let not_a_hash =
                    || invalid("an object must be a hash of 32 hexadecimal digits, {\"sha256\":\"…\"}");
                let mut hash = None;
                reader.object(|reader, field| match (field, scalar(reader)?) {
                    ("sha256", Some(Scalar::Text(text))) if hash.is_none() => {
                        hash = Some(text);
                        Ok(())
                    }
                    _ => not_a_hash(),
                })?;
                let Some(value) = hash.and_then(FactValue::from_hash) else { return not_a_hash() };
                return facts.insert(name, value).map_err(|error| InvalidRequest::Fact(error).into());
            }
            Kind::List => {
                return invalid("a value is a string, a whole number, a boolean or a hash, not a list");
            }
        }
        let text = match reader.scalar()? {
            Scalar::Text(text) => text,
            Scalar::Number(number) if number.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit()) => {
                number
            }
            Scalar::Number(_) => return invalid("a number must be whole, without fraction and exponent"),
            Scalar::Bool(true) => "true",
            Scalar::Bool(false) => "false",
            Scalar::Null => return invalid("null is not a value (leave the fact out)"),
        };
        facts.insert(name, text).map_err(|error: InvalidFact| InvalidRequest::Fact(error).into())
    })?;
    Ok(facts)
}

fn read_cost(reader: &mut Reader<'_>) -> Result<u64, ApiError> {
    let invalid = |message: String| ApiError::new(Code::InvalidCost, message).at("cost");
    let Some(Scalar::Number(number)) = scalar(reader)? else {
        return Err(invalid("`cost` must be a whole number from 1 to 2147483648".to_owned()));
    };
    if let Ok(cost) = number.parse() {
        return Ok(cost);
    }
    Err(invalid(format!("the cost {} is not a whole number from 1 to 2147483648", truncated(number))))
}

fn read_ttl(reader: &mut Reader<'_>) -> Result<Duration, ApiError> {
    let invalid = |message: String| ApiError::new(Code::InvalidTtl, message).at("ttl");
    match scalar(reader)? {
        Some(Scalar::Text(text)) => tollkeeper::config::duration(text).map_err(invalid),
        _ => Err(invalid("`ttl` must be a duration from 1s to 1h, such as \"60s\"".to_owned())),
    }
}

fn read_text<'a>(reader: &mut Reader<'a>, name: &str) -> Result<&'a str, ApiError> {
    match scalar(reader)? {
        Some(Scalar::Text(text)) => Ok(text),
        _ => Err(ApiError::new(Code::InvalidJson, format!("`{name}` must be a string")).at(name)),
    }
}

/// The next value; `None` if it is a list or an object.
fn scalar<'a>(reader: &mut Reader<'a>) -> Result<Option<Scalar<'a>>, ApiError> {
    Ok(if reader.kind()? == Kind::Scalar { Some(reader.scalar()?) } else { None })
}

fn must_be_object(reader: &mut Reader<'_>, what: &str, example: &str) -> Result<(), ApiError> {
    match reader.kind()? {
        Kind::Object => Ok(()),
        _ => Err(ApiError::new(Code::InvalidJson, format!("{what} must be an object, such as {example}"))),
    }
}

fn once<T>(field: &mut Option<T>, name: &str, value: T) -> Result<(), ApiError> {
    if field.replace(value).is_some() { Err(duplicate(name)) } else { Ok(()) }
}

fn duplicate(name: &str) -> ApiError {
    ApiError::new(Code::DuplicateField, format!("`{name}` is given twice")).at(name)
}

fn unknown(name: &str, known: &str) -> ApiError {
    let message = format!("unknown field `{}`: this body takes only {known}", truncated(name));
    ApiError::new(Code::UnknownField, message).at(truncated(name))
}

fn missing(name: &str, what: &str) -> ApiError {
    ApiError::new(Code::MissingField, format!("`{name}` is missing ({what})")).at(name)
}

/// The first 64 characters of client input, for error messages.
fn truncated(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<(String, u64), (&'static str, Option<String>)> {
        let mut bytes = body.as_bytes().to_vec();
        let check = Reader::new(&mut bytes).map_err(ApiError::from).and_then(CheckBody::read);
        match check {
            Ok(check) => {
                let facts: Vec<String> =
                    check.facts.iter().map(|(name, value)| format!("{name}={value}")).collect();
                Ok((facts.join(" "), check.cost))
            }
            Err(error) => Err((error.code.name(), error.at)),
        }
    }

    #[test]
    fn facts_are_strings_numbers_and_booleans() {
        for (body, facts, cost) in [
            (r#"{"facts":{}}"#, "", 1),
            (r#"{"cost":3,"facts":{"user":"alice"}}"#, "user=alice", 3),
            (r#"{"facts":{"a":1,"b":-7,"c":true,"d":false,"e":""}}"#, "a=1 b=-7 c=true d=false e=", 1),
            (r#"{"facts":{"n":99999999999999999999}}"#, "n=99999999999999999999", 1),
            (r#"{"facts":{"ip":"::ffff:192.0.2.7"}}"#, "ip=192.0.2.7", 1),
            (r#"{"f\u0061cts":{"\u0075ser":"a\nb\u0000"}}"#, "user=a\nb\0", 1),
            (r#"{"facts":{},"cost":0}"#, "", 0),
        ] {
            assert_eq!(read(body), Ok((facts.to_owned(), cost)), "{body}");
        }
    }

    #[test]
    fn invalid_check_is_refused_with_code_and_field() {
        let long = format!(r#"{{"facts":{{"user":"{}"}}}}"#, "x".repeat(1025));
        let many: Vec<String> = (0..65).map(|n| format!("\"f{n}\":1")).collect();
        let many = format!(r#"{{"facts":{{{}}}}}"#, many.join(","));
        for (body, code, at) in [
            ("", "invalid_json", ""),
            ("[]", "invalid_json", ""),
            ("{}", "missing_field", "facts"),
            (r#"{"facts":{}}}"#, "invalid_json", ""),
            (r#"{"facts":{},"costs":1}"#, "unknown_field", "costs"),
            (r#"{"facts":{},"facts":{}}"#, "duplicate_field", "facts"),
            (r#"{"facts":{},"cost":1,"cost":1}"#, "duplicate_field", "cost"),
            (r#"{"facts":{"a":1,"a":1}}"#, "duplicate_field", "facts.a"),
            (r#"{"facts":{"a":"","a":""}}"#, "duplicate_field", "facts.a"),
            (r#"{"facts":[]}"#, "invalid_fact", "facts"),
            (r#"{"facts":null}"#, "invalid_fact", "facts"),
            (r#"{"facts":{"a":null}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":1.5}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":1e3}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":[]}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":{"b":1}}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":{"sha256":7}}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":{"sha256":"0123456789ab"}}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a":{"sha256":"0","sha256":"1"}}}"#, "invalid_fact", "facts.a"),
            (r#"{"facts":{"a b":1}}"#, "invalid_fact", "facts.a b"),
            (r#"{"facts":{"":1}}"#, "invalid_fact", "facts."),
            (r#"{"facts":{"ip":"nowhere"}}"#, "invalid_fact", "facts.ip"),
            (r#"{"facts":{"ip":7}}"#, "invalid_fact", "facts.ip"),
            (&long, "invalid_fact", "facts.user"),
            (&many, "too_many", "facts"),
            (r#"{"facts":{"a":NaN}}"#, "invalid_json", ""),
            (r#"{"facts":{},"cost":NaN}"#, "invalid_json", ""),
            (r#"{"facts":{},"cost":"1"}"#, "invalid_cost", "cost"),
            (r#"{"facts":{},"cost":1.0}"#, "invalid_cost", "cost"),
            (r#"{"facts":{},"cost":-1}"#, "invalid_cost", "cost"),
            (r#"{"facts":{},"cost":99999999999999999999}"#, "invalid_cost", "cost"),
            (r#"{"facts":{},"cost":{}}"#, "invalid_cost", "cost"),
            (r#"{"facts":{},"cost":null}"#, "invalid_cost", "cost"),
        ] {
            let at = (!at.is_empty()).then(|| at.to_owned());
            assert_eq!(read(body), Err((code, at)), "{body}");
        }
    }

    #[test]
    fn invalid_check_does_not_fail_its_batch() {
        let mut body = br#"{"checks":[{"facts":{}},{"nonsense":[1,{"a":2}]},7]}"#.to_vec();
        let checks = read_batch(Reader::new(&mut body).unwrap()).unwrap();
        let codes: Vec<_> =
            checks.into_iter().map(|check| CheckBody::read(check).map_err(|e| e.code.name())).collect();
        assert!(codes[0].is_ok());
        assert_eq!(codes[1].as_ref().err(), Some(&"unknown_field"));
        assert_eq!(codes[2].as_ref().err(), Some(&"invalid_json"));

        let check = r#"{"facts":{}}"#;
        for (body, code) in [
            ("{}".to_owned(), Code::MissingField),
            ("[]".to_owned(), Code::InvalidJson),
            (r#"{"checks":{}}"#.to_owned(), Code::InvalidJson),
            (r#"{"checks":[{]}"#.to_owned(), Code::InvalidJson),
            (r#"{"checks":[],"checks":[]}"#.to_owned(), Code::DuplicateField),
            (r#"{"checks":[],"more":1}"#.to_owned(), Code::UnknownField),
            (format!(r#"{{"checks":[{}]}}"#, vec![check; 1_001].join(",")), Code::TooMany),
        ] {
            let mut bytes = body.clone().into_bytes();
            let error = read_batch(Reader::new(&mut bytes).unwrap()).unwrap_err();
            assert_eq!(error.code, code, "{body}");
        }
        let mut most = format!(r#"{{"checks":[{}]}}"#, vec![check; 1_000].join(",")).into_bytes();
        assert_eq!(read_batch(Reader::new(&mut most).unwrap()).unwrap().len(), 1_000);
    }
}
