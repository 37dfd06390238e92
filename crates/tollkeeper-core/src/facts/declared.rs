//! Declared facts: facts whose raw values are normalised, or kept only as a hash.
//!
//! A client has one key, no matter how its value arrives (a header, JSON, a query, RESP, a gRPC descriptor, the
//! library), because the same function turns every raw value into the value that limits see. The function is
//! idempotent.

use std::borrow::Cow;
use std::sync::Arc;

use super::{FactProblem, Facts, Hashed, InvalidFact, MAX_VALUE, Value, truncated};
use crate::digest::{hex, sha256};

/// How many hexadecimal digits of SHA-256 replace a value.
pub const HASH_DIGITS: usize = 32;

/// The most rounds of normalisation. Some values change again in a second round; none needs this many.
const MAX_ROUNDS: usize = 8;

/// A fact whose raw values are normalised, or kept only as a hash.
///
/// ```
/// use tollkeeper_core::DeclaredFact;
///
/// let email = DeclaredFact::new("email").trim().lowercase();
/// let api_key = DeclaredFact::new("api_key").hashed();
/// assert!(api_key.is_hashed() && !email.is_hashed());
/// ```
#[derive(Clone, Debug)]
pub struct DeclaredFact {
    name: Box<str>,
    steps: Vec<Step>,
    hashed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Lowercase,
    Trim,
    With(fn(&str) -> String),
}

/// All declared facts of a policy.
#[derive(Clone, Debug, Default)]
pub struct DeclaredFacts(Option<Arc<[DeclaredFact]>>);

impl DeclaredFact {
    /// A fact whose raw value is used unchanged.
    pub fn new(name: impl Into<String>) -> DeclaredFact {
        DeclaredFact { name: name.into().into_boxed_str(), steps: Vec::new(), hashed: false }
    }

    /// Converts values to lower case.
    #[must_use]
    pub fn lowercase(self) -> DeclaredFact {
        self.step(Step::Lowercase)
    }

    /// Removes white space at both ends.
    #[must_use]
    pub fn trim(self) -> DeclaredFact {
        self.step(Step::Trim)
    }

    /// Normalises values with this function, such as one for Unicode's NFKC.
    #[must_use]
    pub fn normalize_with(self, normalize: fn(&str) -> String) -> DeclaredFact {
        self.step(Step::With(normalize))
    }

    /// Keeps only a hash of the value: the first 32 hexadecimal digits of SHA-256.
    #[must_use]
    pub fn hashed(self) -> DeclaredFact {
        DeclaredFact { hashed: true, ..self }
    }

    fn step(mut self, step: Step) -> DeclaredFact {
        self.steps.push(step);
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether only a hash of the value is kept.
    pub fn is_hashed(&self) -> bool {
        self.hashed
    }

    /// The value that limits see for the raw bytes of a request, of any length. Bytes that are not UTF-8, and text
    /// that is longer than a value may be, are replaced by their hash.
    pub fn read<'v>(&self, raw: Cow<'v, [u8]>) -> Value<'v> {
        self.value(text(raw))
    }

    fn value<'v>(&self, raw: Cow<'v, str>) -> Value<'v> {
        let text = self.normalized(raw);
        if text.is_empty() {
            return Value::Text(text);
        }
        match (self.hashed, text.len() > MAX_VALUE) {
            (false, false) => Value::Text(text),
            (false, true) => Value::Text(Cow::Owned(hash(text.as_bytes()))),
            (true, is_long) => {
                let hash = hash(text.as_bytes());
                Value::Hashed(Box::new(Hashed { hash: hash.into(), plain: (!is_long).then_some(text) }))
            }
        }
    }

    fn normalized<'v>(&self, raw: Cow<'v, str>) -> Cow<'v, str> {
        let mut text = raw;
        for _ in 0..MAX_ROUNDS {
            let mut changed = false;
            for step in &self.steps {
                if let Some(next) = step.change(&text) {
                    (text, changed) = (Cow::Owned(next), true);
                }
            }
            if !changed {
                break;
            }
        }
        text
    }
}

impl Step {
    /// The text after this step; `None` if it is unchanged.
    fn change(self, text: &str) -> Option<String> {
        match self {
            Step::Lowercase if text.bytes().all(|byte| byte.is_ascii() && !byte.is_ascii_uppercase()) => None,
            Step::Lowercase => Some(text.to_lowercase()).filter(|lower| lower != text),
            Step::Trim => Some(text.trim()).filter(|trimmed| trimmed.len() < text.len()).map(str::to_owned),
            Step::With(normalize) => Some(normalize(text)).filter(|normal| normal != text),
        }
    }
}

impl DeclaredFacts {
    /// These facts. For a name that is declared twice, the first declaration counts.
    pub fn new(facts: impl IntoIterator<Item = DeclaredFact>) -> DeclaredFacts {
        let facts: Arc<[DeclaredFact]> =
            facts.into_iter().filter(|fact| fact.hashed || !fact.steps.is_empty()).collect();
        DeclaredFacts((!facts.is_empty()).then_some(facts))
    }

    /// Whether no fact is declared.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// All declared facts.
    pub fn iter(&self) -> impl Iterator<Item = &DeclaredFact> {
        self.0.iter().flat_map(|facts| facts.iter())
    }

    /// The declared fact with this name.
    pub fn get(&self, name: &str) -> Option<&DeclaredFact> {
        self.iter().find(|fact| *fact.name == *name)
    }

    /// The value that limits see for the raw bytes of a request, of any length: see [`DeclaredFact::read`].
    pub fn read<'v>(&self, name: &str, raw: Cow<'v, [u8]>) -> Value<'v> {
        match self.get(name) {
            Some(fact) => fact.read(raw),
            None => DeclaredFact { name: Box::default(), steps: Vec::new(), hashed: false }.read(raw),
        }
    }

    /// The value that limits see for the raw value of a fact.
    pub fn value<'v>(&self, name: &str, raw: Value<'v>) -> Value<'v> {
        match self.get(name) {
            Some(fact) => identified(fact, &raw).unwrap_or(raw),
            None => raw,
        }
    }

    /// The facts that limits see for the raw facts of a request; `None` if they are the same.
    // In a box, because most requests have none: facts are large, and would be moved with every request.
    pub(crate) fn identify<'a>(&self, facts: &Facts<'a>) -> Result<Option<Box<Facts<'a>>>, InvalidFact> {
        let declared = self.0.as_deref().unwrap_or_default();
        let mut identified_facts: Option<Box<Facts<'a>>> = None;
        for fact in facts.all() {
            self.check(&fact.name, &fact.value)?;
            let declared = declared.iter().find(|declared| *declared.name == *fact.name);
            if let Some(value) = declared.and_then(|declared| identified(declared, &fact.value)) {
                identified_facts.get_or_insert_with(|| Box::new(facts.clone())).replace(&fact.name, value);
            }
        }
        Ok(identified_facts)
    }

    /// Rejects a value of which only the hash is known, unless its fact is hashed.
    fn check(&self, name: &str, value: &Value<'_>) -> Result<(), InvalidFact> {
        match value {
            Value::Hashed(hashed)
                if hashed.plain.is_none() && !self.get(name).is_some_and(DeclaredFact::is_hashed) =>
            {
                Err(InvalidFact { name: truncated(name), problem: FactProblem::NotHashed })
            }
            _ => Ok(()),
        }
    }
}

/// The value that limits see instead of a raw value; `None` if it is the raw value itself.
fn identified<'v>(fact: &DeclaredFact, raw: &Value<'v>) -> Option<Value<'v>> {
    let text = match raw {
        Value::Hashed(_) => return None,
        Value::Text(text) => text.clone(),
        Value::Number(_) | Value::Ip(_) => Cow::Owned(raw.to_string()),
    };
    let is_changed = |value: &Value<'_>| match value {
        Value::Text(after) => !matches!(raw, Value::Text(before) if before == after),
        _ => true,
    };
    Some(fact.value(text)).filter(is_changed)
}

fn text(raw: Cow<'_, [u8]>) -> Cow<'_, str> {
    match raw {
        Cow::Borrowed(bytes) => match core::str::from_utf8(bytes) {
            Ok(text) => Cow::Borrowed(text),
            Err(_) => Cow::Owned(hash(bytes)),
        },
        Cow::Owned(bytes) => match String::from_utf8(bytes) {
            Ok(text) => Cow::Owned(text),
            Err(error) => Cow::Owned(hash(error.as_bytes())),
        },
    }
}

fn hash(bytes: &[u8]) -> String {
    hex(&sha256(bytes)[..HASH_DIGITS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts;

    /// The text that limits see for a raw value.
    fn identified(fact: DeclaredFact, raw: &str) -> String {
        let declared = DeclaredFacts::new([fact]);
        let facts = facts! { "key" => raw };
        let identified = declared.identify(&facts).expect("valid");
        let value = identified.as_deref().unwrap_or(&facts).get("key").expect("present").clone();
        let again = declared.value("key", value.clone());
        assert_eq!(format!("{value:?}"), format!("{again:?}"), "not idempotent");
        match value {
            Value::Hashed(hashed) => hashed.hash.into(),
            value => value.to_string(),
        }
    }

    #[test]
    fn raw_values_become_the_values_limits_see() {
        let key = || DeclaredFact::new("key");
        fn narrow(text: &str) -> String {
            text.replace('\u{1d400}', "A")
        }
        for (fact, raw, expected) in [
            (key(), " Alice ", " Alice "),
            (key().trim(), " Alice ", "Alice"),
            (key().lowercase(), "ALICE", "alice"),
            (key().lowercase(), "ÄRGER", "ärger"),
            (key().trim().lowercase(), " Alice ", "alice"),
            // The function returns an upper-case letter, which the second round converts.
            (key().lowercase().normalize_with(narrow), "\u{1d400}", "a"),
            (key().hashed(), "cust-1", &hash(b"cust-1")),
            (key().trim().lowercase().hashed(), " CUST-1", &hash(b"cust-1")),
            (key().hashed(), "7", &hash(b"7")),
        ] {
            assert_eq!(identified(fact, raw), expected, "{raw}");
        }
    }

    #[test]
    fn a_hash_as_text_is_hashed_like_any_text() {
        let known = hash(b"cust-1");
        let other = identified(DeclaredFact::new("key").hashed(), &known);
        assert_ne!(other, known, "a client must not get another client's key by sending its hash");
    }

    #[test]
    fn a_number_and_its_text_have_the_same_hash() {
        let declared = DeclaredFacts::new([DeclaredFact::new("key").hashed()]);
        let number = declared.value("key", Value::from(7));
        let text = declared.value("key", Value::from("7"));
        assert_eq!(format!("{number:?}"), format!("{text:?}"));
    }

    #[test]
    fn invalid_utf8_and_long_text_are_hashed() {
        let long = "x".repeat(MAX_VALUE + 1);
        let declared = DeclaredFacts::new([DeclaredFact::new("secret").hashed()]);
        let read = |name, bytes: &[u8]| format!("{:?}", declared.read(name, Cow::Owned(bytes.to_vec())));
        assert_eq!(read("plain", long.as_bytes()), format!("Text({:?})", hash(long.as_bytes())));
        assert_eq!(read("plain", b"\xff"), format!("Text({:?})", hash(b"\xff")));
        assert_eq!(read("secret", long.as_bytes()), format!("Hashed({})", hash(long.as_bytes())));
        assert_eq!(read("secret", b"\xff"), format!("Hashed({})", hash(hash(b"\xff").as_bytes())));
        assert_eq!(read("plain", b""), "Text(\"\")");
    }

    #[test]
    fn a_known_hash_needs_a_hashed_fact() {
        let value = || Value::from_hash(&hash(b"cust-1")).expect("32 digits");
        let hashed = DeclaredFacts::new([DeclaredFact::new("key").hashed()]);
        let facts = facts! { "key" => value() };
        assert!(hashed.identify(&facts).is_ok());
        for declared in [DeclaredFacts::default(), DeclaredFacts::new([DeclaredFact::new("key").trim()])] {
            let error = declared.identify(&facts).expect_err("not hashed");
            assert_eq!(error.problem, FactProblem::NotHashed);
        }
    }
}
