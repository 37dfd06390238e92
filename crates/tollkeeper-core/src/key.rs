//! Keys: the identity of a stored state.
//!
//! A key is an injective encoding of the limit's name, period, algorithm and stagger (together: the
//! *family*) and of the values of its facts. The tier is not part of it: a client that changes plans keeps
//! its count as long as the period is the same. Every part is prefixed with its length, so `a_b`,`c` and
//! `a`,`b_c` are two keys.

use core::fmt;
use core::ops::Deref;

use crate::fingerprint::CachedMidstate;
use crate::inline::Inline;
use crate::quota::Algorithm;
use crate::siphash::{self, Secret};
use crate::time::Span;

/// A key, borrowed from the bytes of its family and its values.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a> {
    family: &'a [u8],
    /// The hash of the family, if the key belongs to a limit of a policy.
    midstate: Option<&'a CachedMidstate>,
    values: Values<'a>,
    /// The index of the value that decides on which server the state is stored: not part of the identity.
    partition: Option<u8>,
}

/// The values of a key, which are text.
#[derive(Clone, Copy, Debug)]
enum Values<'a> {
    /// Any number of values, as [`push_value`] encodes them.
    Encoded(&'a [u8]),
    /// A single value, without its length.
    One(&'a [u8]),
}

impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.family == other.family && self.values().eq(other.values())
    }
}

impl Eq for Key<'_> {}

const ABSENT: u16 = u16::MAX;

impl<'a> Key<'a> {
    /// A key of this family, with values as encoded by [`push_value`].
    #[inline]
    pub(crate) fn new(family: &'a Family, values: &'a [u8]) -> Key<'a> {
        let values = Values::Encoded(values);
        Key { family: &family.bytes, midstate: Some(&family.midstate), values, partition: None }
    }

    /// The key of a limit that is keyed by one fact, which is present.
    #[inline]
    pub fn of_one(family: &'a Family, value: &'a str) -> Key<'a> {
        let values = Values::One(value.as_bytes());
        Key { family: &family.bytes, midstate: Some(&family.midstate), values, partition: None }
    }

    /// Decodes the bytes of [`Key::to_bytes`]; `None` if they are not a key.
    pub fn from_bytes(bytes: &'a [u8]) -> Option<Key<'a>> {
        let name = usize::from(*bytes.first()?);
        let (family, values) = bytes.split_at_checked(name + 10)?;
        algorithm(*family.get(name + 1)?)?;
        core::str::from_utf8(&family[1..=name]).ok()?;
        let mut rest = values;
        while !rest.is_empty() {
            let value;
            (value, rest) = next_value(rest)?;
            core::str::from_utf8(value.unwrap_or_default()).ok()?;
        }
        Some(Key { family, midstate: None, values: Values::Encoded(values), partition: None })
    }

    /// The key as bytes; different keys have different bytes.
    pub fn to_bytes(self) -> Vec<u8> {
        match self.values {
            Values::Encoded(values) => [self.family, values].concat(),
            Values::One(value) => {
                let mut bytes = self.family.to_vec();
                push_value(Some(value), |part| bytes.extend_from_slice(part));
                bytes
            }
        }
    }

    /// The number of bytes of [`Key::to_bytes`].
    pub fn byte_len(self) -> usize {
        let mut len = self.family.len();
        match self.values {
            Values::Encoded(values) => len += values.len(),
            Values::One(value) => push_value(Some(value), |part| len += part.len()),
        }
        len
    }

    /// The prefix of all keys of this limit and period.
    #[inline]
    pub fn family(self) -> &'a [u8] {
        self.family
    }

    /// The hash of the family, to be computed once for all keys of a limit.
    #[inline]
    pub(crate) fn midstate(self) -> Option<&'a CachedMidstate> {
        self.midstate
    }

    /// The name of the limit.
    pub fn limit(self) -> &'a str {
        text(&self.family[1..=self.name_len()])
    }

    /// The period that is part of the key.
    pub fn period(self) -> Span {
        let bytes = self.family.last_chunk().expect("a family ends with its period");
        Span::from_micros(u64::from_be_bytes(*bytes))
    }

    /// The algorithm that is part of the key, and whether its windows are staggered.
    pub fn algorithm(self) -> (Algorithm, bool) {
        algorithm(self.family[self.name_len() + 1]).expect("a family names its algorithm")
    }

    /// The values of the facts, in the order of the limit's `by`.
    #[inline]
    pub fn values(self) -> impl Iterator<Item = Option<&'a [u8]>> {
        let mut rest = self.values;
        core::iter::from_fn(move || match rest {
            Values::Encoded(bytes) => {
                let (value, after) = next_value(bytes)?;
                rest = Values::Encoded(after);
                Some(value)
            }
            Values::One(value) => {
                rest = Values::Encoded(&[]);
                Some(Some(value))
            }
        })
    }

    /// Folds [`Key::values`]. A key of one value that is not encoded takes no loop.
    #[inline(always)]
    pub(crate) fn fold_values<T>(self, first: T, mut fold: impl FnMut(T, Option<&'a [u8]>) -> T) -> T {
        match self.values {
            Values::One(value) => fold(first, Some(value)),
            Values::Encoded(_) => self.values().fold(first, fold),
        }
    }

    /// The values as text.
    pub fn texts(self) -> impl Iterator<Item = Option<&'a str>> {
        self.values().map(|value| value.map(text))
    }

    /// The same key, stored on the server that the value at this index decides.
    #[inline]
    #[must_use]
    pub fn parted(self, partition: Option<u8>) -> Key<'a> {
        Key { partition, ..self }
    }

    /// The index of the value that decides on which server the state is stored, if one does.
    pub fn partition(self) -> Option<u8> {
        self.partition
    }

    /// The value that decides on which server the state is stored, if one does; the inner `None` is an
    /// absent value.
    pub fn partition_text(self) -> Option<Option<&'a str>> {
        self.texts().nth(usize::from(self.partition?))
    }

    /// How many microseconds earlier than epoch-aligned windows this key's windows begin: a hash of the key
    /// that is the same on every node and never changes.
    pub(crate) fn stagger(self) -> u64 {
        let mut bytes = Inline::<u8, 256>::default();
        bytes.extend_from_slice(self.family);
        self.write_values(|part| bytes.extend_from_slice(part));
        let spread = siphash::hash(&Secret([0; 16]), &bytes) % u128::from(self.period().as_micros());
        u64::try_from(spread).expect("less than the period")
    }

    fn write_values(self, mut write: impl FnMut(&[u8])) {
        match self.values {
            Values::Encoded(bytes) => write(bytes),
            Values::One(value) => push_value(Some(value), write),
        }
    }

    fn name_len(self) -> usize {
        usize::from(self.family[0])
    }
}

/// The readable form, also used in Redis: `per-user:token-bucket:1m:alice`. It is injective, too: `%`, `:`,
/// braces, spaces and ASCII control characters in values are escaped as `%` and two hexadecimal digits, and
/// an absent value is `%-`.
impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (algorithm, staggered) = self.algorithm();
        let stagger = if staggered { "+" } else { "" };
        write!(f, "{}:{algorithm}{stagger}:{}", self.limit(), self.period())?;
        for value in self.texts() {
            f.write_str(":")?;
            let Some(value) = value else {
                f.write_str("%-")?;
                continue;
            };
            for char in value.chars() {
                match char {
                    '%' | ':' | '{' | '}' | ' ' | '\0'..='\x1f' | '\x7f' => {
                        write!(f, "%{:02x}", u32::from(char))?
                    }
                    _ => write!(f, "{char}")?,
                }
            }
        }
        Ok(())
    }
}

/// The prefix of all keys of a limit with the same period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    bytes: Box<[u8]>,
    midstate: CachedMidstate,
}

impl Family {
    /// The family of a limit and a period.
    pub fn new(limit: &str, algorithm: Algorithm, stagger: bool, period: Span) -> Family {
        let mut bytes = Vec::with_capacity(LONGEST_FAMILY);
        push_family(limit, algorithm, stagger, period, |part| bytes.extend_from_slice(part));
        Family { bytes: bytes.into(), midstate: CachedMidstate::default() }
    }
}

impl Deref for Family {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The longest family in bytes: a length, a name, the algorithm and the period.
pub const LONGEST_FAMILY: usize = 1 + 64 + 1 + 8;

/// Passes the prefix of all keys of a limit with this period to `write`, in parts.
#[inline]
pub fn push_family(
    limit: &str,
    algorithm: Algorithm,
    stagger: bool,
    period: Span,
    mut write: impl FnMut(&[u8]),
) {
    // A name that is too long makes the policy invalid, so that these bytes are never used.
    let limit = &limit.as_bytes()[..limit.len().min(64)];
    let len = u8::try_from(limit.len()).expect("at most 64");
    let code = u8::try_from(Algorithm::ALL.iter().position(|other| *other == algorithm).expect("listed"))
        .expect("few");
    write(&[len]);
    write(limit);
    write(&[code | if stagger { 0x80 } else { 0 }]);
    write(&period.as_micros().to_be_bytes());
}

/// Passes the encoded value of one fact to `write`: its length, then its bytes.
#[inline]
pub(crate) fn push_value(value: Option<&[u8]>, mut write: impl FnMut(&[u8])) {
    match value {
        Some(value) => {
            push_len(value.len(), &mut write);
            write(value);
        }
        None => write(&ABSENT.to_le_bytes()),
    }
}

/// Passes the encoded length of a value to `write`, before the value itself.
#[inline]
pub(crate) fn push_len(len: usize, write: impl FnOnce(&[u8])) {
    write(&u16::try_from(len).expect("a value has at most 1 KiB").to_le_bytes());
}

#[inline]
fn next_value(bytes: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    match u16::from_le_bytes(*len) {
        ABSENT => Some((None, rest)),
        len => {
            let (value, rest) = rest.split_at_checked(usize::from(len))?;
            Some((Some(value), rest))
        }
    }
}

fn algorithm(code: u8) -> Option<(Algorithm, bool)> {
    Some((*Algorithm::ALL.get(usize::from(code & 0x7f))?, code & 0x80 != 0))
}

fn text(bytes: &[u8]) -> &str {
    core::str::from_utf8(bytes).expect("keys are made of text")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A pseudo-random generator (xorshift) that gives the same numbers in every run.
    pub(crate) struct Random(pub(crate) u64);

    impl Random {
        pub(crate) fn number(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        pub(crate) fn below(&mut self, end: usize) -> usize {
            usize::try_from((self.number() >> 32) % end as u64).expect("below a usize")
        }

        pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
            list[self.below(list.len())]
        }
    }

    /// The parts that a key must distinguish.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub(crate) struct Parts {
        limit: &'static str,
        algorithm: Algorithm,
        stagger: bool,
        period: Span,
        values: Vec<Option<String>>,
    }

    const LIMITS: [&str; 7] = [
        "a",
        "ab",
        "a.b",
        "a-b",
        "per-user",
        "per-user-",
        "a-name-of-64-bytes...........................................end",
    ];
    const ATOMS: [&str; 24] = [
        "",
        "a",
        "b",
        "ab",
        "ba",
        ":",
        "::",
        "%",
        "%-",
        "%3a",
        "%25",
        "-",
        "3a",
        "{",
        "}",
        "\0",
        "\n",
        " ",
        "\x7f",
        "\u{1}\0",
        "ü",
        "\u{2028}",
        "1m",
        "token-bucket",
    ];

    impl Parts {
        pub(crate) fn random(random: &mut Random) -> Parts {
            let seconds = random.pick(&[1, 60, 61, 3_600, 86_400, 604_800]);
            Parts {
                limit: random.pick(&LIMITS),
                algorithm: random.pick(&Algorithm::ALL),
                stagger: random.below(2) == 0,
                period: Span::from_micros(random.pick(&[1_000, 1_001, 1_000_000]) * seconds),
                values: (0..random.below(4)).map(|_| value(random)).collect(),
            }
        }

        /// An equal key, or a variation that an attacker might try to share another client's key.
        pub(crate) fn similar(&self, random: &mut Random) -> Parts {
            let (mut parts, other) = (self.clone(), Parts::random(random));
            let values = &mut parts.values;
            match random.below(10) {
                0..=2 => {}
                3 => parts.limit = other.limit,
                4 => parts.algorithm = other.algorithm,
                5 => parts.stagger = other.stagger,
                6 => parts.period = other.period,
                7 => return other,
                8 if !values.is_empty() => {
                    let index = random.below(values.len());
                    values[index] = value(random);
                }
                8 => values.push(value(random)),
                _ => {
                    // The same characters with another boundary between the values.
                    let text: String = values.iter().flatten().map(String::as_str).collect();
                    let cut = text.floor_char_boundary(random.below(text.len() + 1));
                    *values = vec![Some(text[..cut].to_owned()), Some(text[cut..].to_owned())];
                }
            }
            parts
        }

        pub(crate) fn bytes(&self) -> Vec<u8> {
            let mut bytes = Family::new(self.limit, self.algorithm, self.stagger, self.period).to_vec();
            for value in &self.values {
                push_value(value.as_deref().map(str::as_bytes), |part| bytes.extend_from_slice(part));
            }
            bytes
        }
    }

    fn value(random: &mut Random) -> Option<String> {
        match random.below(5) {
            0 => None,
            atoms => Some((1..=atoms).map(|_| random.pick(&ATOMS)).collect()),
        }
    }

    #[test]
    fn keys_are_equal_only_for_equal_parts() {
        let mut random = Random(1);
        let mut equal = 0;
        for _ in 0..100_000 {
            let one = Parts::random(&mut random);
            let other = one.similar(&mut random);
            let bytes = [one.bytes(), other.bytes()];
            let text = bytes.each_ref().map(|bytes| Key::from_bytes(bytes).expect("a key").to_string());
            assert_eq!(bytes[0] == bytes[1], one == other, "bytes of {one:?} and {other:?}");
            assert_eq!(text[0] == text[1], one == other, "{} of {one:?} and {other:?}", text[0]);
            equal += usize::from(one == other);
        }
        assert!(
            (30_000..60_000).contains(&equal),
            "{equal} of 100000 pairs were equal: the variations are too strong or too weak"
        );
    }

    #[test]
    fn a_key_is_decoded_from_its_bytes() {
        let mut random = Random(2);
        for _ in 0..10_000 {
            let parts = Parts::random(&mut random);
            let bytes = parts.bytes();
            let key = Key::from_bytes(&bytes).expect("a key");
            assert_eq!(key.to_bytes(), bytes);
            assert_eq!((key.limit(), key.period()), (parts.limit, parts.period));
            assert_eq!(key.algorithm(), (parts.algorithm, parts.stagger));
            assert_eq!(
                key.texts().collect::<Vec<_>>(),
                parts.values.iter().map(Option::as_deref).collect::<Vec<_>>()
            );
            let family = Family::new(parts.limit, parts.algorithm, parts.stagger, parts.period);
            assert_eq!(key, Key::new(&family, &bytes[family.len()..]));
        }
    }

    #[test]
    fn a_key_of_one_value_equals_its_encoded_form() {
        let family = Family::new("daily", Algorithm::FixedWindow, true, Span::from_secs(60));
        for value in ["alice", "", "a:b%{}\0", &"x".repeat(1024)] {
            let mut encoded = Vec::new();
            push_value(Some(value.as_bytes()), |part| encoded.extend_from_slice(part));
            let (one, encoded) = (Key::of_one(&family, value), Key::new(&family, &encoded));
            assert_eq!(one, encoded);
            assert_eq!(one.to_bytes(), encoded.to_bytes());
            assert_eq!(one.to_string(), encoded.to_string());
            assert_eq!(one.stagger(), encoded.stagger());
            assert_ne!(one, Key::of_one(&family, "other"));
            assert_ne!(one, Key::new(&family, &[]));
        }
    }

    #[test]
    fn decoding_malformed_bytes_does_not_panic() {
        let mut random = Random(3);
        let mut keys = 0;
        for _ in 0..100_000 {
            let mut bytes = Parts::random(&mut random).bytes();
            for _ in 0..random.below(4) {
                let index = random.below(bytes.len());
                match random.below(3) {
                    0 => bytes[index] = random.number().to_le_bytes()[0],
                    1 => bytes.truncate(index.max(1)),
                    _ => bytes.insert(index, random.number().to_le_bytes()[0]),
                }
            }
            if let Some(key) = Key::from_bytes(&bytes) {
                let shown =
                    (key.limit(), key.algorithm(), key.period(), key.texts().count(), key.to_string());
                assert_eq!(key.to_bytes(), bytes, "{shown:?}");
                keys += 1;
            }
        }
        assert!(
            (10_000..90_000).contains(&keys),
            "{keys} of 100000 were keys: the mutations are too strong or too weak"
        );
    }

    /// Stores and receipts of earlier releases hold these bytes.
    #[test]
    fn the_encoding_of_a_key_is_stable() {
        let check = |algorithm, stagger, expected: &[u8]| {
            let period = Span::from_secs(60);
            let values = vec![Some("alice".to_owned()), None];
            let parts = Parts { limit: "ab", algorithm, stagger, period, values };
            let end = b"\0\0\0\0\x03\x93\x87\x00\x05\0alice\xff\xff";
            assert_eq!(parts.bytes(), [expected, end].concat(), "{algorithm}");
        };
        check(Algorithm::TokenBucket, false, b"\x02ab\x00");
        check(Algorithm::LeakyBucket, false, b"\x02ab\x01");
        check(Algorithm::FixedWindow, false, b"\x02ab\x02");
        check(Algorithm::FixedWindow, true, b"\x02ab\x82");
        check(Algorithm::SlidingWindow, false, b"\x02ab\x03");
        check(Algorithm::SlidingLog, false, b"\x02ab\x04");
        check(Algorithm::Concurrency, false, b"\x02ab\x05");
    }

    fn key_bytes(limit: &'static str, values: &[Option<&str>]) -> Vec<u8> {
        let values = values.iter().map(|value| value.map(str::to_owned)).collect();
        let period = Span::from_secs(60);
        Parts { limit, algorithm: Algorithm::TokenBucket, stagger: false, period, values }.bytes()
    }

    #[test]
    fn display_shows_and_escapes_every_part() {
        for (values, expected) in [
            (&[Some("alice")][..], "per-user:token-bucket:1m:alice"),
            (&[], "per-user:token-bucket:1m"),
            (&[Some("a:b"), Some("{c}%")], "per-user:token-bucket:1m:a%3ab:%7bc%7d%25"),
            (&[None, Some("")], "per-user:token-bucket:1m:%-:"),
            (&[Some("zwei\nZeilen\0 grün")], "per-user:token-bucket:1m:zwei%0aZeilen%00%20grün"),
        ] {
            assert_eq!(Key::from_bytes(&key_bytes("per-user", values)).expect("a key").to_string(), expected);
        }
        let staggered = Family::new("daily", Algorithm::FixedWindow, true, Span::from_secs(86_400));
        assert_eq!(Key::new(&staggered, &[]).to_string(), "daily:fixed-window+:1d");
    }

    #[test]
    fn truncated_bytes_are_not_a_key() {
        let good = key_bytes("per-user", &[Some("alice")]);
        for len in 0..good.len() {
            // Truncated right after the family, it is a key without values.
            assert_eq!(Key::from_bytes(&good[..len]).is_some(), len == "per-user".len() + 10, "{len} bytes");
        }
    }

    #[test]
    fn stagger_is_stable_and_covers_the_whole_period() {
        let family = Family::new("daily", Algorithm::FixedWindow, true, Span::from_secs(60));
        let stagger = |user: &str| {
            let mut values = Vec::new();
            push_value(Some(user.as_bytes()), |part| values.extend_from_slice(part));
            Key::new(&family, &values).stagger()
        };
        assert_eq!(stagger("alice"), 40_282_804);
        let mut tenths = [0; 10];
        for user in 0..10_000 {
            let stagger = stagger(&format!("user-{user}"));
            assert!(stagger < 60_000_000, "{stagger}");
            tenths[usize::try_from(stagger / 6_000_000).expect("a tenth")] += 1;
        }
        assert!(tenths.iter().all(|count| (900..1100).contains(count)), "{tenths:?}");
    }

    #[test]
    fn the_family_of_an_invalid_name_does_not_panic() {
        for name in ["", "x", &"x".repeat(64), &"x".repeat(65), &"ü".repeat(300)] {
            assert!(Family::new(name, Algorithm::TokenBucket, false, Span::ZERO).len() <= 74, "{name}");
        }
    }
}
