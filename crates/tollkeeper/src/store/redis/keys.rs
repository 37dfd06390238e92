//! Builds the names of the keys that Tollkeeper stores in Redis.
//!
//! `tk:1:per-user:b1m:alice` consists of a prefix, the version of the state format, the limit, its algorithm (one
//! letter) and period, and the values, escaped so that two keys never share a name. Names are short on purpose:
//! for a small state, the name takes most of the memory. If the key's bytes or its name would be longer than
//! 128, the name contains the first 16 bytes of the SHA-256 of the key's bytes instead of the values. A compact
//! name always consists of the prefix, the version and that digest.
//!
//! Braces in values are escaped, so that a client cannot choose the cluster slot of its key. Only the value of a
//! partition has braces around it, `tk:1:{acme}:per-user:b1m:alice:acme`: they put all limits of that value into one
//! slot.

use std::fmt::Write as _;

use tollkeeper_core::charge::{Item, ItemKey, Short};
use tollkeeper_core::{Algorithm, Key};

use super::digest;

/// How names are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// With limit and values, readable in `redis-cli`: `tk:1:per-user:b1m:alice`.
    #[default]
    Readable,
    /// As a digest, with the same length for every key: `tk:1:GnVi0Axp-hL_wbn6ZnMiKw`.
    Compact,
}

/// Builds key names with one prefix and format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    start: String,
    format: Format,
}

/// The longest key, and the longest name, that is written out, in bytes. A longer one is shortened to a digest.
const MAX_WRITTEN_OUT: usize = 128;

/// The version of the state format. It is part of every name, so versions never read each other's states.
const VERSION: u32 = 1;

impl Names {
    /// Names that begin with `prefix`. It must not contain braces, which would move all keys into one slot.
    pub fn new(prefix: &str, format: Format) -> Names {
        debug_assert!(!prefix.contains(['{', '}']), "a prefix must not contain braces: {prefix}");
        Names { start: format!("{prefix}:{VERSION}:"), format }
    }

    /// The name of a key that all nodes share: `secret` or `policy`.
    pub fn shared(&self, what: &str) -> String {
        format!("{}{what}", self.start)
    }

    /// The name of a key's state.
    pub fn state(&self, key: Key<'_>) -> String {
        let mut name = self.begin(&tag(key));
        if self.format == Format::Readable && key.byte_len() <= MAX_WRITTEN_OUT {
            push_family(&mut name, key);
            let values = name.len();
            for value in key.texts() {
                name.push(':');
                push_value(&mut name, value);
            }
            if name.len() <= MAX_WRITTEN_OUT {
                return name;
            }
            name.truncate(values);
            name.push_str(":%=");
        } else if self.format == Format::Readable {
            push_family(&mut name, key);
            name.push_str(":%=");
        }
        push_digest(&mut name, short_of(&key.to_bytes()));
        name
    }

    /// The name of the state that an item of a receipt was charged to.
    pub fn item(&self, item: &Item) -> String {
        match &item.key {
            ItemKey::Whole(_) => self.state(item.key()),
            ItemKey::Short(_, short) => {
                let mut name = self.begin(&short.tag);
                if self.format == Format::Readable {
                    push_family(&mut name, item.key());
                    name.push_str(":%=");
                }
                push_digest(&mut name, short.name);
                name
            }
        }
    }

    /// The name of the marker that a charge was corrected at a state. It is in the slot of that state, because it
    /// contains the state's name, in braces unless that has some. No state has such a name: `%m` is not an escape.
    pub fn marker(&self, state: &str, id: u64) -> String {
        if state.contains('{') {
            return format!("{state}:%m{id:x}");
        }
        format!("{}%m{id:x}:{{{state}}}", self.start)
    }

    fn begin(&self, tag: &str) -> String {
        let mut name = String::with_capacity(64);
        name.push_str(&self.start);
        if !tag.is_empty() {
            name.extend(["{", tag, "}:"]);
        }
        name
    }
}

/// The hash tag of a key: the escaped value of its partition, or a digest of a long one. Empty for a key without a
/// partition. The value itself is never empty, so that a tag is never mistaken for a missing one.
fn tag(key: Key<'_>) -> String {
    let mut tag = String::new();
    if let Some(value) = key.partition_text() {
        push_value(&mut tag, value);
    }
    if tag.len() > MAX_WRITTEN_OUT / 2 {
        let value = key.partition_text().flatten().unwrap_or_default();
        tag = "%=".to_owned();
        push_digest(&mut tag, short_of(value.as_bytes()));
    }
    tag
}

/// The short form of a key that is too long to be written out, for names and receipts.
pub fn short(key: Key<'_>) -> Short {
    Short { name: short_of(&key.to_bytes()), tag: tag(key).into() }
}

fn short_of(bytes: &[u8]) -> u128 {
    let [half @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = digest::sha256(bytes);
    u128::from_be_bytes(half)
}

/// The limit, the letter of the algorithm, `+` if its windows are staggered, and the period.
fn push_family(name: &mut String, key: Key<'_>) {
    let (algorithm, staggered) = key.algorithm();
    let letter = match algorithm {
        Algorithm::TokenBucket => 'b',
        Algorithm::LeakyBucket => 'q',
        Algorithm::FixedWindow => 'f',
        Algorithm::SlidingWindow => 'w',
        Algorithm::SlidingLog => 'l',
        Algorithm::Concurrency => 'c',
    };
    name.push_str(key.limit());
    name.push(':');
    name.push(letter);
    if staggered {
        name.push('+');
    }
    write!(name, "{}", key.period()).expect("a string takes all");
}

fn push_value(name: &mut String, value: Option<&str>) {
    let Some(value) = value else { return name.push_str("%-") };
    let is_escaped = |char: char| matches!(char, '%' | ':' | '{' | '}' | ' ' | '\0'..='\x1f' | '\x7f');
    let mut rest = value;
    while let Some(at) = rest.find(is_escaped) {
        name.push_str(&rest[..at]);
        // Every escaped character is one byte long.
        write!(name, "%{:02x}", rest.as_bytes()[at]).expect("a string takes all");
        rest = &rest[at + 1..];
    }
    name.push_str(rest);
}

/// URL-safe base64 without padding: 22 characters.
fn push_digest(name: &mut String, digest: u128) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    for index in 0..22 {
        let bits = if index < 21 { digest >> (122 - 6 * index) } else { digest << 4 };
        let six = usize::try_from(bits & 0x3f).expect("six bits");
        name.push(char::from(ALPHABET[six]));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tollkeeper_core::{Facts, Limit, Policy, Quota, Toll, Verb, facts};

    use super::*;

    /// Calls `use_key` with the key that `limit` builds from these facts.
    fn with_key<T>(limit: Limit, facts: &Facts<'_>, use_key: impl FnOnce(Key<'_>) -> T) -> T {
        let policy = std::sync::Arc::new(Policy::new(vec![limit]).expect("valid"));
        let toll: Toll = policy.toll(Verb::Usage, facts, 1).expect("valid");
        use_key(toll.get(0).key)
    }

    fn per_user() -> Limit {
        Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user")
    }

    fn name_of(names: &Names, value: &str, partition: Option<&str>) -> String {
        let facts = facts! { "user" => value };
        match partition {
            None => with_key(per_user(), &facts, |key| names.state(key)),
            Some(tenant) => {
                let limit = per_user().by("tenant").partition("tenant");
                with_key(limit, &facts.with("tenant", tenant), |key| names.state(key))
            }
        }
    }

    #[test]
    fn names_are_short_and_readable() {
        let readable = Names::new("tk", Format::Readable);
        let compact = Names::new("tk", Format::Compact);
        assert_eq!(name_of(&readable, "alice", None), "tk:1:per-user:b1m:alice");
        assert_eq!(name_of(&readable, "a:{b}% \n\0", None), "tk:1:per-user:b1m:a%3a%7bb%7d%25%20%0a%00");
        assert_eq!(name_of(&readable, "alice", Some("acme")), "tk:1:{acme}:per-user:b1m:alice:acme");
        assert_eq!(
            name_of(&readable, "a", Some("{b}\0\n")),
            "tk:1:{%7bb%7d%00%0a}:per-user:b1m:a:%7bb%7d%00%0a"
        );
        assert_eq!(name_of(&compact, "alice", None), "tk:1:GnVi0Axp-hL_wbn6ZnMiKw");
        let long = name_of(&readable, &"x".repeat(1_000), None);
        assert_eq!(long, format!("tk:1:per-user:b1m:%={}", &long[20..]));
        assert_eq!(long.len(), 42);
    }

    #[test]
    fn marker_is_in_the_slot_of_its_state() {
        let names = Names::new("tk", Format::Readable);
        for partition in [None, Some("acme"), Some(&"x".repeat(1_000))] {
            let state = name_of(&names, "alice", partition);
            let marker = names.marker(&state, 255);
            let tag = marker.split_once('{').and_then(|(_, rest)| rest.split_once('}')).expect("a tag").0;
            let own = state.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
            assert_eq!(tag, own.map_or(&*state, |(tag, _)| tag));
            assert!(!tag.is_empty() && own.is_some() == partition.is_some(), "{state}");
            assert!(marker.starts_with("tk:1:"), "{marker}");
        }
    }

    /// The values consist of few letters and all separators, so that badly escaped parts would collide. Names without
    /// a partition contain no braces.
    #[test]
    fn different_keys_never_share_a_name() {
        let texts = ["", "a", "b", ":", "%", "%3a", "{", "}", "{a}", "a:b", "-", "%-", " ", "\n", "%=", "ab"];
        let long = "y".repeat(130);
        let texts: Vec<&str> = texts.into_iter().chain([long.as_str(), &long[..127], &long[..100]]).collect();
        for format in [Format::Readable, Format::Compact] {
            let names = Names::new("tk", format);
            let mut seen: HashMap<String, Vec<u8>> = HashMap::new();
            for limit in ["a", "a-b", "a.b"] {
                for algorithm in Algorithm::ALL {
                    let limit = |by: usize| {
                        let limit = match algorithm {
                            Algorithm::Concurrency => Limit::new(limit, Quota::slots(5)),
                            _ => Limit::new(limit, Quota::per_minute(5)).algorithm(algorithm),
                        };
                        let limit = limit.missing(tollkeeper_core::Missing::Share);
                        ["one", "two"][..by].iter().fold(limit, |limit, fact| limit.by(*fact))
                    };
                    let mut check = |by, facts: &Facts<'_>| {
                        with_key(limit(by), facts, |key| {
                            let name = names.state(key);
                            assert!(!name.contains(['{', '}']), "{name}");
                            assert!(name.len() <= MAX_WRITTEN_OUT, "{name}");
                            let other = seen.insert(name.clone(), key.to_bytes());
                            assert!(other.is_none_or(|other| other == key.to_bytes()), "{name}");
                        });
                    };
                    check(0, &facts! {});
                    for one in &texts {
                        check(1, &facts! { "one" => *one });
                        check(2, &facts! { "one" => *one });
                        check(2, &facts! { "two" => *one });
                        for two in &texts {
                            check(2, &facts! { "one" => *one, "two" => *two });
                        }
                    }
                }
            }
            assert!(seen.len() > 6_000, "{}", seen.len());
        }
    }
}
