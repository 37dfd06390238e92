//! Facts: what is known about a request, as names and values.
//!
//! Every transport translates its requests into facts, and limits see only those. Names and values are
//! checked when they are added. The first problem is stored and returned when the request is decided, so
//! that facts can be listed without a `?` on every line.

mod declared;

use core::fmt;
use core::net::{IpAddr, Ipv4Addr};
use core::ops::Deref;
use std::borrow::Cow;

use crate::net::CanonicalIp;

pub use declared::{DeclaredFact, DeclaredFacts, HASH_DIGITS};

/// The most facts in one request.
pub const MAX_FACTS: usize = 64;
/// The longest name, in bytes.
pub const MAX_NAME: usize = 64;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 1024;

/// The fact that holds the client's IP address, always in its canonical form.
pub const IP: &str = "ip";

const INLINE: usize = 4;

/// The facts of a request, in insertion order; each name occurs once.
///
/// ```
/// use tollkeeper_core::{facts, Facts};
///
/// let facts = facts! { "user" => "alice", "ip" => "192.0.2.7", "tokens" => 250 };
/// assert_eq!(facts.get("user").unwrap().to_string(), "alice");
/// assert_eq!(facts.get("plan"), None);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Facts<'a> {
    /// Most requests have only a few facts, which need no allocation.
    inline: [Option<Fact<'a>>; INLINE],
    rare: Option<Box<Rare<'a>>>,
}

/// What few requests have: one word, because facts are built and dropped with every request.
#[derive(Clone, Debug, Default)]
struct Rare<'a> {
    /// The facts that do not fit inline.
    more: Vec<Fact<'a>>,
    /// The first problem that [`Facts::put`] found.
    problem: Option<InvalidFact>,
    /// Whether some value is known only by its hash.
    has_known_hash: bool,
}

#[derive(Clone, Debug)]
struct Fact<'a> {
    name: Name<'a>,
    value: Value<'a>,
}

impl Fact<'_> {
    /// Whether this is its name. Every check compares names, and most are shorter than 16 bytes: comparing those by
    /// their first and last bytes takes less time than a call of `memcmp`.
    #[inline(always)]
    fn has(&self, name: &str) -> bool {
        #[inline(always)]
        fn ends<const N: usize>(name: &[u8]) -> (Option<&[u8; N]>, Option<&[u8; N]>) {
            (name.first_chunk(), name.last_chunk())
        }
        let (own, name) = (self.name.as_bytes(), name.as_bytes());
        own.len() == name.len()
            && match name.len() {
                2..4 => ends::<2>(own) == ends::<2>(name),
                4..=8 => ends::<4>(own) == ends::<4>(name),
                9..=16 => ends::<8>(own) == ends::<8>(name),
                _ => own == name,
            }
    }
}

/// The name of a fact. It is borrowed in nearly all requests: a literal, or a part of the request. An owned one is in
/// a box, so that a name takes two words and not three: facts are moved on the path of every check.
#[derive(Clone, Debug)]
#[expect(clippy::box_collection, reason = "a name must take two words, and a `String` takes three")]
enum Name<'a> {
    Borrowed(&'a str),
    Owned(Box<String>),
}

const _: () = assert!(size_of::<Name<'_>>() == size_of::<&str>());

impl Deref for Name<'_> {
    type Target = str;

    #[inline]
    fn deref(&self) -> &str {
        match self {
            Name::Borrowed(name) => name,
            Name::Owned(name) => name,
        }
    }
}

impl<'a> From<Cow<'a, str>> for Name<'a> {
    #[inline]
    fn from(name: Cow<'a, str>) -> Name<'a> {
        match name {
            Cow::Borrowed(name) => Name::Borrowed(name),
            Cow::Owned(name) => Name::Owned(Box::new(name)),
        }
    }
}

/// The name and the value of a fact, as [`Facts::few`] takes them.
pub type NamedValue<'a> = (Cow<'a, str>, Value<'a>);

/// A fact for [`Facts::few`].
#[inline(always)]
pub fn fact<'a>(name: impl Into<Cow<'a, str>>, value: impl Into<Value<'a>>) -> Option<NamedValue<'a>> {
    Some((name.into(), value.into()))
}

/// Builds [`Facts`]: `facts! { "user" => "alice", "tokens" => 250 }`.
#[macro_export]
macro_rules! facts {
    () => { $crate::Facts::new() };
    ($a:expr => $of_a:expr $(,)?) => {
        $crate::Facts::few($crate::facts::fact($a, $of_a), None, None, None)
    };
    ($a:expr => $of_a:expr, $b:expr => $of_b:expr $(,)?) => {
        $crate::Facts::few($crate::facts::fact($a, $of_a), $crate::facts::fact($b, $of_b), None, None)
    };
    ($a:expr => $of_a:expr, $b:expr => $of_b:expr, $c:expr => $of_c:expr $(,)?) => {
        $crate::Facts::few(
            $crate::facts::fact($a, $of_a),
            $crate::facts::fact($b, $of_b),
            $crate::facts::fact($c, $of_c),
            None,
        )
    };
    ($a:expr => $of_a:expr, $b:expr => $of_b:expr, $c:expr => $of_c:expr, $d:expr => $of_d:expr $(,)?) => {
        $crate::Facts::few(
            $crate::facts::fact($a, $of_a),
            $crate::facts::fact($b, $of_b),
            $crate::facts::fact($c, $of_c),
            $crate::facts::fact($d, $of_d),
        )
    };
    ($($name:expr => $value:expr),+ $(,)?) => { $crate::Facts::new()$(.with($name, $value))+ };
}

impl<'a> Facts<'a> {
    /// No facts.
    #[inline(always)]
    pub fn new() -> Facts<'a> {
        Facts::default()
    }

    /// Up to four facts; of several with the same name, the last. [`facts!`](crate::facts!) is easier to write.
    // Valid facts with different names are written where the caller keeps them. Facts that were filled one by one would
    // be moved there, and moving what was just written stalls the processor. So would a list, unless the compiler happens
    // to inline every loop over it.
    #[inline(always)]
    pub fn few(
        a: Option<NamedValue<'a>>,
        b: Option<NamedValue<'a>>,
        c: Option<NamedValue<'a>>,
        d: Option<NamedValue<'a>>,
    ) -> Facts<'a> {
        let (is_b_new, is_c_new) = (is_other(&b, &a), is_other(&c, &a) && is_other(&c, &b));
        let is_d_new = is_other(&d, &a) && is_other(&d, &b) && is_other(&d, &c);
        if !(is_plain(&a) && is_plain(&b) && is_plain(&c) && is_plain(&d) && is_b_new && is_c_new && is_d_new)
        {
            return Facts::collect([a, b, c, d]);
        }
        let inline = [unchecked(a), unchecked(b), unchecked(c), unchecked(d)];
        Facts { inline, rare: None }
    }

    #[cold]
    #[inline(never)]
    fn collect(list: [Option<NamedValue<'a>>; INLINE]) -> Facts<'a> {
        let mut facts = Facts::new();
        for (name, value) in list.into_iter().flatten() {
            facts.put(name, value);
        }
        facts
    }

    /// Adds a fact, or replaces its value. An empty value counts as absent. The name is borrowed, which costs no
    /// allocation, or owned.
    ///
    /// An invalid name or value is stored, and makes the decision about these facts an error.
    #[must_use]
    #[inline(always)]
    pub fn with(mut self, name: impl Into<Cow<'a, str>>, value: impl Into<Value<'a>>) -> Facts<'a> {
        self.put(name, value);
        self
    }

    /// As [`Facts::with`], in place.
    #[inline(always)]
    pub fn put(&mut self, name: impl Into<Cow<'a, str>>, value: impl Into<Value<'a>>) {
        if let Err(error) = self.insert(name, value) {
            self.rare().problem.get_or_insert(error);
        }
    }

    /// As [`Facts::put`], for the fact `ip`.
    #[inline]
    pub fn put_ip(&mut self, ip: CanonicalIp) {
        match (ip.v4(), &mut self.inline[0]) {
            // Written where it stays.
            (Some(ip), free @ None) => {
                *free = Some(Fact { name: Name::Borrowed(IP), value: Value::Ip(IpAddr::V4(ip)) });
            }
            _ => self.put_other_ip(ip.into()),
        }
    }

    #[cold]
    fn put_other_ip(&mut self, ip: IpAddr) {
        self.put(IP, ip);
    }

    /// As [`Facts::put`], but returns an invalid name or value as an error at once.
    // Inlined, so that the name is checked by the compiler where it is a literal, and the value is written where it
    // stays: reading a value right after its parts were written stalls the processor.
    #[inline(always)]
    pub fn insert(
        &mut self,
        name: impl Into<Cow<'a, str>>,
        value: impl Into<Value<'a>>,
    ) -> Result<(), InvalidFact> {
        let name = Name::from(name.into());
        let value = match checked(&name, value.into()) {
            Ok(value) => value,
            Err(problem) => return Err(InvalidFact::new(&name, problem)),
        };
        if matches!(&value, Value::Hashed(hashed) if hashed.plain.is_none()) {
            self.rare().has_known_hash = true;
        }
        let is_free = |entry: &Option<Fact<'a>>| entry.as_ref().is_none_or(|fact| fact.has(&name));
        match self.inline.iter().position(is_free) {
            Some(index) => {
                self.inline[index] = Some(Fact { name, value });
                Ok(())
            }
            None => self.insert_more(name, value),
        }
    }

    /// Adds a valid fact, or replaces its value, where those are that do not fit inline.
    #[cold]
    fn insert_more(&mut self, name: Name<'a>, value: Value<'a>) -> Result<(), InvalidFact> {
        let more = &mut self.rare().more;
        let has_room = INLINE + more.len() < MAX_FACTS;
        match more.iter_mut().find(|fact| fact.has(&name)) {
            Some(fact) => fact.value = value,
            None if has_room => more.push(Fact { name, value }),
            None => return Err(InvalidFact::new(&name, FactProblem::TooMany)),
        }
        Ok(())
    }

    /// As [`Facts::insert`], for bytes that may not be UTF-8.
    pub fn insert_bytes(
        &mut self,
        name: impl Into<Cow<'a, str>>,
        value: &'a [u8],
    ) -> Result<(), InvalidFact> {
        match core::str::from_utf8(value) {
            Ok(text) => self.insert(name, text),
            Err(_) => Err(InvalidFact::new(&name.into(), FactProblem::NotUtf8)),
        }
    }

    /// The value of a fact; `None` if it is absent or empty.
    // The first fact is compared in place; the loop over the others would crowd the registers of the caller.
    #[inline]
    pub fn get(&self, name: &str) -> Option<&Value<'a>> {
        let first = self.inline[0].as_ref()?;
        if first.has(name) { first.value.unless_empty() } else { self.get_other(name) }
    }

    #[inline(never)]
    fn get_other(&self, name: &str) -> Option<&Value<'a>> {
        for fact in &self.inline[1..] {
            let fact = fact.as_ref()?;
            if fact.has(name) {
                return fact.value.unless_empty();
            }
        }
        self.get_more(name)
    }

    /// As [`Facts::get`], for the facts that do not fit inline.
    #[cold]
    fn get_more(&self, name: &str) -> Option<&Value<'a>> {
        self.rare.as_ref()?.more.iter().find(|fact| fact.has(name))?.value.unless_empty()
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value<'a>)> {
        self.all().map(|fact| (&*fact.name, &fact.value))
    }

    /// The first problem that [`Facts::put`] found, if any.
    pub(crate) fn check(&self) -> Result<(), InvalidFact> {
        match self.rare.as_ref().and_then(|rare| rare.problem.as_ref()) {
            Some(problem) => Err(problem.clone()),
            None => Ok(()),
        }
    }

    /// Whether the facts are few and valid, and their values known: nearly always.
    #[inline]
    pub(crate) fn are_ordinary(&self) -> bool {
        self.rare.is_none()
    }

    #[cold]
    fn rare(&mut self) -> &mut Rare<'a> {
        self.rare.get_or_insert_default()
    }

    /// Replaces the value of a fact that is present.
    fn replace(&mut self, name: &str, value: Value<'a>) {
        let more = self.rare.iter_mut().flat_map(|rare| &mut rare.more);
        let all = self.inline.iter_mut().map_while(Option::as_mut).chain(more);
        all.filter(|fact| fact.has(name)).for_each(|fact| fact.value = value.clone());
    }

    #[inline]
    fn all(&self) -> impl Iterator<Item = &Fact<'a>> {
        let more = self.rare.iter().flat_map(|rare| &rare.more);
        self.inline.iter().map_while(Option::as_ref).chain(more)
    }
}

/// The value of a fact. Values of every type are compared and keyed as text: `1` equals `"1"`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Text.
    Text(Cow<'a, str>),
    /// A whole number.
    Number(i64),
    /// An IP address; an IPv4-mapped IPv6 address becomes the IPv4 address.
    Ip(IpAddr),
    /// A value of which keys hold only a hash.
    Hashed(Box<Hashed<'a>>),
}

/// The value of a hashed fact: keys hold only its hash.
#[derive(Clone)]
pub struct Hashed<'a> {
    /// The value itself, for conditions and overrides; `None` if only its hash is known.
    pub plain: Option<Cow<'a, str>>,
    /// The first 32 hexadecimal digits of its SHA-256.
    pub hash: Box<str>,
}

impl Hashed<'_> {
    /// How many digits are shown to people: enough to distinguish values.
    pub const SHOWN_DIGITS: usize = 12;

    /// The hash as it is shown to people: `sha256:` and twelve digits.
    pub fn shown(&self) -> String {
        format!("sha256:{:.*}", Self::SHOWN_DIGITS, self.hash)
    }
}

/// Shows the hash, never the value.
impl fmt::Debug for Hashed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.hash)
    }
}

/// The text of every octet of an IPv4 address, with a trailing dot, as a number whose first byte is the lowest.
const OCTETS: [u32; 256] = {
    let mut texts = [0; 256];
    let mut octet = 0u8;
    loop {
        let (hundreds, tens, ones) = (b'0' + octet / 100, b'0' + octet / 10 % 10, b'0' + octet % 10);
        texts[octet as usize] = u32::from_le_bytes(match octet {
            0..10 => [ones, b'.', 0, 0],
            10..100 => [tens, ones, b'.', 0],
            100.. => [hundreds, tens, ones, b'.'],
        });
        if octet == u8::MAX {
            break texts;
        }
        octet += 1;
    }
};

/// A buffer for the text of a number or an address.
pub type Scratch = [u8; 48];

impl Value<'_> {
    /// A value of which only the hash is known: 32 hexadecimal digits.
    pub fn from_hash(hash: &str) -> Option<Value<'static>> {
        let is_hash = hash.len() == HASH_DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash
            .then(|| Value::Hashed(Box::new(Hashed { plain: None, hash: hash.to_ascii_lowercase().into() })))
    }

    /// The value as text; numbers and addresses are written into `scratch`.
    #[inline]
    pub fn text<'s>(&'s self, scratch: &'s mut Scratch) -> &'s str {
        match self {
            Value::Text(text) => text,
            Value::Hashed(hashed) => hashed.plain.as_deref().unwrap_or(&hashed.hash),
            Value::Number(number) => format_into(scratch, format_args!("{number}")),
            Value::Ip(IpAddr::V4(ip)) => {
                core::str::from_utf8(ipv4_into(*ip, scratch)).expect("digits and dots")
            }
            Value::Ip(IpAddr::V6(ip)) => format_into(scratch, format_args!("{ip}")),
        }
    }

    #[inline]
    fn unless_empty(&self) -> Option<&Self> {
        if self.is_empty() { None } else { Some(self) }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        match self {
            Value::Text(text) => text.is_empty(),
            Value::Hashed(hashed) => hashed.plain.as_deref().is_some_and(str::is_empty),
            Value::Number(_) | Value::Ip(_) => false,
        }
    }
}

/// The text of an IPv4 address as a number whose first byte is the lowest, and its length. It is put together in
/// registers: reading it right after its parts were written stalls the processor.
#[inline]
pub(crate) fn ipv4(ip: Ipv4Addr) -> (u128, usize) {
    let (mut text, mut len) = (0, 0);
    for octet in ip.octets() {
        text |= u128::from(OCTETS[usize::from(octet)]) << (8 * len);
        len += 2 + usize::from(octet >= 10) + usize::from(octet >= 100);
    }
    (text, len - 1)
}

/// Formats an IPv4 address into `scratch`.
pub(crate) fn ipv4_into(ip: Ipv4Addr, scratch: &mut Scratch) -> &[u8] {
    let (text, len) = ipv4(ip);
    scratch[..16].copy_from_slice(&text.to_le_bytes());
    &scratch[..len]
}

/// Formats into `scratch`. Numbers and addresses always fit.
pub(crate) fn format_into<'s>(scratch: &'s mut Scratch, arguments: fmt::Arguments<'_>) -> &'s str {
    use std::io::Write;
    let mut rest = &mut scratch[..];
    rest.write_fmt(arguments).expect("48 bytes fit any number and any address");
    let len = size_of::<Scratch>() - rest.len();
    core::str::from_utf8(&scratch[..len]).expect("formatted text")
}

impl PartialEq for Value<'_> {
    fn eq(&self, other: &Value<'_>) -> bool {
        self.text(&mut [0; 48]) == other.text(&mut [0; 48])
    }
}

impl Eq for Value<'_> {}

/// The text; for a hashed value, [`Hashed::shown`].
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Hashed(hashed) => f.write_str(&hashed.shown()),
            value => f.write_str(value.text(&mut [0; 48])),
        }
    }
}

impl<'a> From<&'a str> for Value<'a> {
    #[inline]
    fn from(text: &'a str) -> Value<'a> {
        Value::Text(Cow::Borrowed(text))
    }
}

impl<'a> From<&'a String> for Value<'a> {
    fn from(text: &'a String) -> Value<'a> {
        Value::Text(Cow::Borrowed(text))
    }
}

impl From<String> for Value<'_> {
    fn from(text: String) -> Self {
        Value::Text(Cow::Owned(text))
    }
}

impl<'a> From<Cow<'a, str>> for Value<'a> {
    fn from(text: Cow<'a, str>) -> Value<'a> {
        Value::Text(text)
    }
}

impl From<IpAddr> for Value<'_> {
    #[inline]
    fn from(ip: IpAddr) -> Self {
        Value::Ip(ip.to_canonical())
    }
}

impl From<bool> for Value<'_> {
    fn from(truth: bool) -> Self {
        Value::Text(Cow::Borrowed(if truth { "true" } else { "false" }))
    }
}

macro_rules! value_from_number {
    ($($number:ty),*) => {$(
        impl From<$number> for Value<'_> {
            fn from(number: $number) -> Self {
                match i64::try_from(number) {
                    Ok(number) => Value::Number(number),
                    Err(_) => Value::Text(Cow::Owned(number.to_string())),
                }
            }
        }
    )*};
}
value_from_number!(i32, i64, u16, u32, u64, usize);

/// A fact with an invalid name or value.
#[derive(Clone, PartialEq, Eq)]
pub struct InvalidFact {
    /// The name of the fact, cut to 64 bytes.
    pub name: String,
    /// Why it is invalid.
    pub problem: FactProblem,
}

/// Why a fact is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FactProblem {
    /// The name is empty, too long, or has other characters than `A-Z a-z 0-9 . _ : / -`.
    Name,
    /// The value is empty where a value is required.
    Empty,
    /// The value is too long: it has this many bytes.
    TooLong(usize),
    /// The value is not UTF-8.
    NotUtf8,
    /// The value of `ip` is not an IP address.
    NotAnAddress,
    /// There are more than 64 facts.
    TooMany,
    /// A hash was given for a fact that is not hashed.
    NotHashed,
}

impl InvalidFact {
    #[cold]
    fn new(name: &str, problem: FactProblem) -> InvalidFact {
        InvalidFact { name: truncated(name), problem }
    }
}

impl fmt::Display for InvalidFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fact `{}`: ", self.name.escape_debug())?;
        match self.problem {
            FactProblem::Name => write!(f, "a name is 1 to {MAX_NAME} of `A-Z a-z 0-9 . _ : / -`"),
            FactProblem::Empty => f.write_str("the value is empty"),
            FactProblem::TooLong(len) => {
                write!(f, "the value has {len} bytes (at most {MAX_VALUE}; hash longer ones)")
            }
            FactProblem::NotUtf8 => f.write_str("the value is not UTF-8 (hash or encode bytes)"),
            FactProblem::NotAnAddress => {
                f.write_str("the value is not an IP address (such as `192.0.2.7` or `2001:db8::1`)")
            }
            FactProblem::NotHashed => {
                f.write_str("a hash was given, but this fact is not hashed (pass the value itself)")
            }
            FactProblem::TooMany => write!(f, "more than {MAX_FACTS} facts in one request"),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for InvalidFact {}

/// Whether `name` may be the name of a fact.
#[inline(always)]
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|byte| NAME_BYTES[usize::from(byte)])
}

/// The bytes that names may contain. A table, because every byte of every name of a request is checked.
const NAME_BYTES: [bool; 256] = {
    let mut allowed = [false; 256];
    let mut byte = 0u8;
    while byte < 128 {
        allowed[byte as usize] =
            byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b':' | b'/' | b'-');
        byte += 1;
    }
    allowed
};

/// Whether a fact is absent, or valid as it is: a text, a number or an IPv4 address that [`checked`] would not change.
#[inline(always)]
fn is_plain(fact: &Option<NamedValue<'_>>) -> bool {
    let Some((name, value)) = fact else { return true };
    is_name(name)
        && match value {
            Value::Text(text) => **name != *IP && text.len() <= MAX_VALUE,
            Value::Number(_) => **name != *IP,
            Value::Ip(ip) => ip.is_ipv4(),
            Value::Hashed(_) => false,
        }
}

/// Whether two facts do not have the same name.
#[inline(always)]
fn is_other(one: &Option<NamedValue<'_>>, other: &Option<NamedValue<'_>>) -> bool {
    !matches!((one, other), (Some((one, _)), Some((other, _))) if **one == **other)
}

/// A fact that is known to be valid.
#[inline(always)]
fn unchecked(fact: Option<NamedValue<'_>>) -> Option<Fact<'_>> {
    fact.map(|(name, value)| Fact { name: name.into(), value })
}

/// The value in its canonical form, if the name is valid and the fact may have the value.
#[inline(always)]
fn checked<'a>(name: &str, value: Value<'a>) -> Result<Value<'a>, FactProblem> {
    Err(match &value {
        _ if !is_name(name) => FactProblem::Name,
        Value::Text(text) if text.len() > MAX_VALUE => FactProblem::TooLong(text.len()),
        Value::Text(text) if name == IP && !text.is_empty() => match text.parse::<IpAddr>() {
            Ok(ip) => return Ok(Value::from(ip)),
            Err(_) => FactProblem::NotAnAddress,
        },
        Value::Hashed(hashed) if hashed.plain.as_ref().is_some_and(|plain| plain.len() > MAX_VALUE) => {
            FactProblem::TooLong(hashed.plain.as_ref().map_or(0, |plain| plain.len()))
        }
        Value::Number(_) | Value::Hashed(_) if name == IP => FactProblem::NotAnAddress,
        // An IPv4 client must not get a second key by connecting with an IPv4-mapped IPv6 address.
        Value::Ip(ip @ IpAddr::V6(_)) => return Ok(Value::from(*ip)),
        Value::Ip(IpAddr::V4(_)) | Value::Text(_) | Value::Number(_) | Value::Hashed(_) => return Ok(value),
    })
}

/// The first 64 bytes of a name, cut between characters, for error messages.
fn truncated(name: &str) -> String {
    name.chars()
        .scan(0, |len, char| {
            *len += char.len_utf8();
            (*len <= MAX_NAME).then_some(char)
        })
        .collect()
}

#[cfg(test)]
mod tests;
