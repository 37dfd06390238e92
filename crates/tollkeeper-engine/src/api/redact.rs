//! Shows the values of hashed facts as `sha256:` and twelve digits, and resolves these digits back to a value.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use tollkeeper::Value;
use tollkeeper::facts::{DeclaredFact, DeclaredFacts, HASH_DIGITS, Hashed};

/// The prefix of a redacted value.
const PREFIX: &str = "sha256:";
/// Enough shards that threads rarely wait for each other.
const SHARDS: usize = 16;
/// How many values a shard remembers before it forgets the older half: 131,072 in all.
const SHARD_VALUES: usize = 4_096;

/// Redacts the values of hashed facts and remembers recent ones, so that an operator can pass a redacted value back.
#[derive(Debug, Default)]
pub struct Redactor {
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Debug, Default)]
struct Shard {
    recent: HashMap<Digits, Shown>,
    older: HashMap<Digits, Shown>,
}

/// The first digits of a hash, which are shown.
type Digits = [u8; Hashed::SHOWN_DIGITS];
/// All digits of a hash.
type Hash = [u8; HASH_DIGITS];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    One(Hash),
    /// Several values were shown with these digits.
    Several,
}

/// Why a value in the form `sha256:…` cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidHash {
    /// It has neither 12 nor 32 hexadecimal digits.
    Digits,
    /// This node has not shown these 12 digits recently.
    Unknown,
    /// Several values begin with these 12 digits.
    Ambiguous,
}

impl fmt::Display for InvalidHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            InvalidHash::Digits => "`sha256:` needs 32 hexadecimal digits, or the 12 that a response showed",
            InvalidHash::Unknown => {
                "this node has not shown these 12 digits recently (pass the value itself, or all 32 digits)"
            }
            InvalidHash::Ambiguous => {
                "several values begin with these 12 digits (pass the value itself, or all 32 digits)"
            }
        })
    }
}

/// The value of a fact as it may be shown; `value` is the form in keys.
pub fn shown<'v>(declared: &DeclaredFacts, fact: &str, value: &'v str) -> Cow<'v, str> {
    if declared.get(fact).is_some_and(DeclaredFact::is_hashed) {
        Cow::Owned(format!("{PREFIX}{value:.*}", Hashed::SHOWN_DIGITS))
    } else {
        Cow::Borrowed(value)
    }
}

impl Redactor {
    /// As [`shown`], and remembers the value if it is redacted.
    pub fn redact<'v>(&self, declared: &DeclaredFacts, fact: &str, value: &'v str) -> Cow<'v, str> {
        let shown = shown(declared, fact, value);
        if let (Cow::Owned(_), Ok(hash)) = (&shown, Hash::try_from(value.as_bytes())) {
            self.remember(hash);
        }
        shown
    }

    /// A key in its readable form, such as `plan:token-bucket:1m:sha256:0123456789ab`, of a limit with this `by`.
    pub fn redact_key(&self, declared: &DeclaredFacts, by: &[Box<str>], key: &str) -> String {
        // Name, algorithm and period come first, and no part contains a colon.
        let parts = key.split(':').enumerate().map(|(index, part)| {
            match index.checked_sub(3).and_then(|index| by.get(index)) {
                Some(fact) => self.redact(declared, fact, part),
                None => Cow::Borrowed(part),
            }
        });
        parts.collect::<Vec<_>>().join(":")
    }

    /// The value that an operator passes for a fact: the value itself, or for a hashed fact also `sha256:…`.
    pub fn value<'v>(
        &self,
        declared: &DeclaredFacts,
        fact: &str,
        text: &'v str,
    ) -> Result<Value<'v>, InvalidHash> {
        let is_hashed = declared.get(fact).is_some_and(DeclaredFact::is_hashed);
        let Some(digits) = text.strip_prefix(PREFIX).filter(|_| is_hashed) else { return Ok(text.into()) };
        if let Some(value) = Value::from_hash(digits) {
            return Ok(value);
        }
        let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digits = digits.to_ascii_lowercase();
        let digits =
            Digits::try_from(digits.as_bytes()).ok().filter(|_| is_hex).ok_or(InvalidHash::Digits)?;
        match self.recall(digits).ok_or(InvalidHash::Unknown)? {
            Shown::Several => Err(InvalidHash::Ambiguous),
            Shown::One(hash) => {
                let hash = std::str::from_utf8(&hash).expect("keys are text");
                Value::from_hash(hash).ok_or(InvalidHash::Unknown)
            }
        }
    }

    fn remember(&self, hash: Hash) {
        let digits = *hash.first_chunk().expect("a hash has more digits than are shown");
        let mut shard = self.shard(digits);
        let shard = &mut *shard;
        match shard.recent.entry(digits) {
            Entry::Occupied(mut entry) => {
                if *entry.get() != Shown::One(hash) {
                    entry.insert(Shown::Several);
                }
            }
            Entry::Vacant(entry) => {
                entry.insert(match shard.older.get(&digits) {
                    Some(other) if *other != Shown::One(hash) => Shown::Several,
                    _ => Shown::One(hash),
                });
                if shard.recent.len() == SHARD_VALUES {
                    shard.older = std::mem::take(&mut shard.recent);
                }
            }
        }
    }

    fn recall(&self, digits: Digits) -> Option<Shown> {
        let shard = self.shard(digits);
        shard.recent.get(&digits).or_else(|| shard.older.get(&digits)).copied()
    }

    fn shard(&self, digits: Digits) -> std::sync::MutexGuard<'_, Shard> {
        let shard = &self.shards[usize::from(digits[0]) % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "0123456789abcdef0123456789abcdef";

    fn declared() -> DeclaredFacts {
        DeclaredFacts::new([DeclaredFact::new("api_key").hashed(), DeclaredFact::new("email").lowercase()])
    }

    fn value(redactor: &Redactor, text: &str) -> Result<String, InvalidHash> {
        redactor.value(&declared(), "api_key", text).map(|value| format!("{value:?}"))
    }

    #[test]
    fn redacted_value_can_be_passed_back() {
        let redactor = Redactor::default();
        assert_eq!(value(&redactor, "sha256:0123456789ab"), Err(InvalidHash::Unknown));
        assert_eq!(redactor.redact(&declared(), "api_key", HASH), "sha256:0123456789ab");
        assert_eq!(value(&redactor, "sha256:0123456789ab"), Ok(format!("Hashed({HASH})")));
        assert_eq!(value(&redactor, "sha256:0123456789AB"), Ok(format!("Hashed({HASH})")));
        assert_eq!(value(&redactor, &format!("sha256:{HASH}")), Ok(format!("Hashed({HASH})")));
        for wrong in ["sha256:", "sha256:0123", "sha256:0123456789abc", "sha256:0123456789xy"] {
            assert_eq!(value(&redactor, wrong), Err(InvalidHash::Digits), "{wrong}");
        }
        // Another value with the same 12 digits.
        redactor.redact(&declared(), "api_key", &format!("{:0<32}", &HASH[..12]));
        assert_eq!(value(&redactor, "sha256:0123456789ab"), Err(InvalidHash::Ambiguous));
    }

    #[test]
    fn hash_in_a_key_is_redacted() {
        let by: [Box<str>; 2] = ["user".into(), "api_key".into()];
        let key = format!("plan:token-bucket:1m:{HASH}:{HASH}");
        let redacted = Redactor::default().redact_key(&declared(), &by, &key);
        assert_eq!(redacted, format!("plan:token-bucket:1m:{HASH}:sha256:0123456789ab"));
    }

    #[test]
    fn other_facts_are_not_redacted() {
        let redactor = Redactor::default();
        assert_eq!(redactor.redact(&declared(), "email", "alice"), "alice");
        assert_eq!(redactor.redact(&declared(), "user", HASH), HASH);
        let value = redactor.value(&declared(), "user", "sha256:0123456789ab").expect("a plain value");
        assert_eq!(value.to_string(), "sha256:0123456789ab");
    }

    #[test]
    fn memory_is_bounded_and_keeps_recent_values() {
        let redactor = Redactor::default();
        let hash = |number: usize| format!("{number:016x}{number:016x}");
        let many = 4 * SHARDS * SHARD_VALUES;
        for number in 0..many {
            // Low digits first, so that all shards are used.
            let digits: String = hash(number).chars().rev().collect();
            redactor.redact(&declared(), "api_key", &digits);
        }
        let kept: usize = redactor
            .shards
            .iter()
            .map(|shard| shard.lock().unwrap())
            .map(|shard| shard.recent.len() + shard.older.len())
            .sum();
        assert!(kept <= 2 * SHARDS * SHARD_VALUES, "{kept}");
        let last: String = hash(many - 1).chars().rev().collect();
        assert!(value(&redactor, &format!("sha256:{}", &last[..12])).is_ok());
    }
}
