//! Fuzzes request bodies: a response or a typed error, never a panic; JSON is accepted and read exactly as by
//! `serde_json`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};
use tollkeeper_engine::api::error::ApiError;
use tollkeeper_engine::api::request::{CheckBody, MAX_BATCH, read_batch};
use tollkeeper_engine::json::{self, Kind, Malformed, Reader, Writer};

/// Maximum nesting of our reader; that of `serde_json` is 128.
const DEPTH: usize = 32;

fuzz_target!(|data: &[u8]| {
    let theirs: Option<Value> = serde_json::from_slice(data).ok();
    let theirs = theirs.filter(|value| depth(value) <= DEPTH);
    match (whole(data), &theirs) {
        (Ok(Some(ours)), Some(theirs)) => assert_eq!(ours, *theirs),
        // A number that is out of range for `serde_json` only.
        (Ok(None), None) => return,
        (Ok(ours), _) => panic!("serde_json rejects {ours:?}"),
        (Err(error), Some(theirs)) => panic!("we reject {theirs}: {error}"),
        (Err(error), None) => assert!(error.at <= data.len()),
    }
    check(data, theirs.as_ref());
    batch(data, theirs.as_ref());
    if let Ok(text) = std::str::from_utf8(data) {
        let mut quoted = Writer::with_capacity(text.len());
        quoted.text(text);
        assert_eq!(serde_json::from_str::<String>(&quoted.finish()).ok().as_deref(), Some(text));
    }
});

/// Reads the whole text in two ways, as a raw slice first and directly, which must agree. `None` if a number is out of
/// range.
fn whole(data: &[u8]) -> Result<Option<Value>, Malformed> {
    let mut bytes = data.to_vec();
    let mut reader = Reader::new(&mut bytes)?;
    let mut value = reader.value()?;
    reader.end()?;
    let mut fits = true;
    let tree = tree(&mut value, &mut fits).expect("a raw value can be read");
    value.end().expect("the end of the text");
    Ok(fits.then_some(tree))
}

fn tree(reader: &mut Reader<'_>, fits: &mut bool) -> Result<Value, Malformed> {
    Ok(match reader.kind()? {
        Kind::Object => {
            let mut map = Map::new();
            reader.object(|reader, name| {
                map.insert(name.to_owned(), tree(reader, fits)?);
                Ok::<(), Malformed>(())
            })?;
            Value::Object(map)
        }
        Kind::List => {
            let mut list = Vec::new();
            reader.list(|reader, index| {
                assert_eq!(index, list.len());
                list.push(tree(reader, fits)?);
                Ok::<(), Malformed>(())
            })?;
            Value::Array(list)
        }
        Kind::Scalar => match reader.scalar()? {
            json::Scalar::Text(text) => Value::String(text.to_owned()),
            json::Scalar::Number(number) => number.parse().map(Value::Number).unwrap_or_else(|_| {
                *fits = false;
                Value::Null
            }),
            json::Scalar::Bool(truth) => Value::Bool(truth),
            json::Scalar::Null => Value::Null,
        },
    })
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// One check: the parsed request equals the JSON.
fn check(data: &[u8], expected: Option<&Value>) {
    let mut bytes = data.to_vec();
    match Reader::new(&mut bytes).map_err(ApiError::from).and_then(CheckBody::read) {
        Ok(check) => understood(&check, expected.expect("a check is JSON")),
        Err(error) => check_error(&error),
    }
}

fn understood(check: &CheckBody<'_>, expected: &Value) {
    let facts = expected["facts"].as_object().expect("facts are an object");
    assert_eq!(check.facts.iter().count(), facts.len(), "no duplicate facts");
    for (name, value) in check.facts.iter() {
        match &facts[name] {
            // Addresses are normalized.
            Value::String(_) if name == "ip" => {}
            Value::String(text) => assert_eq!(*text, value.to_string()),
            Value::Bool(truth) => assert_eq!(truth.to_string(), value.to_string()),
            Value::Number(number) => assert_eq!(Ok(number), value.to_string().parse().as_ref().map_err(drop)),
            other => panic!("{other} is not a fact"),
        }
    }
    match expected.get("cost") {
        Some(cost) => assert_eq!(cost.as_u64(), Some(check.cost)),
        None => assert_eq!(check.cost, 1),
    }
}

/// A batch: each item is read as if it were alone, and none is lost.
fn batch(data: &[u8], expected: Option<&Value>) {
    let mut bytes = data.to_vec();
    match Reader::new(&mut bytes).map_err(ApiError::from).and_then(read_batch) {
        Ok(checks) => {
            let expected =
                expected.expect("a batch is JSON")["checks"].as_array().expect("checks are a list");
            assert_eq!(checks.len(), expected.len());
            assert!(checks.len() <= MAX_BATCH);
            for (check, expected) in checks.into_iter().zip(expected) {
                match CheckBody::read(check) {
                    Ok(check) => understood(&check, expected),
                    Err(error) => check_error(&error),
                }
            }
        }
        Err(error) => check_error(&error),
    }
}

/// An error is always JSON, below 4 KiB.
fn check_error(error: &ApiError) {
    let mut text = Writer::with_capacity(256);
    error.write(&mut text);
    let text = text.finish();
    let value: Value = serde_json::from_str(&text).expect("an error is JSON");
    assert_eq!(value["error"]["code"], error.code.name());
    assert!(text.len() < 4_096, "{} bytes", text.len());
}
