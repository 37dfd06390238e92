//! What one line of a log says about a request: filled in field by field, checked when the line is complete.

use std::net::IpAddr;

use hyper::http::{Method, Uri};
use tollkeeper_tower::address;

use super::time::{self, Offset, SECOND, Stamp, TimeFormat};

/// What a field of a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The time of the line.
    Time(TimeFormat),
    /// How long the request took.
    Duration(Unit),
    /// The address that the connection came from.
    Peer,
    /// The client's address as another program determined it.
    ClientIp,
    /// The request line: `GET /a?b=c HTTP/1.1`.
    RequestLine,
    /// The method.
    Method,
    /// The path with its query, if it has one.
    Target,
    /// The query alone.
    Query,
    /// One parameter of the query.
    Argument(String),
    /// The host.
    Host,
    /// The status of the response.
    Status,
    /// A header of the request, by its name in lower case.
    Header(String),
    /// A cookie.
    Cookie(String),
    /// A fact that `--fact` maps, by its index.
    Fact(u16),
}

/// The unit of a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// With decimals.
    Seconds,
    /// With decimals.
    Millis,
    /// As in the proxy's access log.
    Micros,
    /// As in Traefik's log.
    Nanos,
}

impl Unit {
    fn parse(self, text: &[u8]) -> Option<u64> {
        match self {
            Unit::Seconds => time::decimal(text, SECOND),
            Unit::Millis => time::decimal(text, 1_000),
            Unit::Micros => time::decimal(text, 1),
            Unit::Nanos => time::decimal(text, 1).map(|nanos| nanos / 1_000),
        }
    }
}

/// Why a line cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unreadable {
    /// It has more bytes than are read.
    TooLong,
    /// It does not have the shape of the format.
    Shape,
    /// Its JSON is invalid.
    Json,
    /// It has no time.
    NoTime,
    /// Its time is not one, or before 1970.
    Time,
    /// Its time is more than a day from now.
    Future,
    /// It has no address.
    NoAddress,
    /// Its address is not one.
    Address,
    /// Its request line is not one of HTTP.
    Request,
    /// Its status is not a number from 100 to 999.
    Status,
    /// Its duration is not a number, or negative.
    Duration,
}

impl Unreadable {
    /// The reason for people.
    pub fn reason(self) -> &'static str {
        match self {
            Unreadable::TooLong => "longer than 64 KiB",
            Unreadable::Shape => "does not have the shape of the format",
            Unreadable::Json => "invalid JSON",
            Unreadable::NoTime => "no time",
            Unreadable::Time => "invalid time",
            Unreadable::Future => "time in the future",
            Unreadable::NoAddress => "no address",
            Unreadable::Address => "not an IP address",
            Unreadable::Request => "not an HTTP request",
            Unreadable::Status => "invalid status",
            Unreadable::Duration => "invalid duration",
        }
    }
}

/// The headers that limits use, by index. Other headers of a line are skipped.
#[derive(Clone, Debug, Default)]
pub struct WantedHeaders(Vec<String>);

/// How the header of a line relates to the headers that limits use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// It is one of them.
    Same(u16),
    /// It differs from one of them only in `-` and `_`, so that some servers do not distinguish them.
    Twin(u16),
}

impl WantedHeaders {
    /// These headers, by their names in lower case.
    pub fn new(mut names: Vec<String>) -> WantedHeaders {
        names.sort_unstable();
        names.dedup();
        WantedHeaders(names)
    }

    /// The names, by index.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Whether a header of a line is needed.
    pub fn find(&self, name: &str) -> Option<Want> {
        let index = |position: usize| u16::try_from(position).expect("a policy names few headers");
        let alike = |(one, other): (u8, u8)| {
            one.eq_ignore_ascii_case(&other)
                || !(one.is_ascii_alphanumeric() || other.is_ascii_alphanumeric())
        };
        let same = self.0.iter().position(|wanted| wanted.eq_ignore_ascii_case(name));
        if let Some(position) = same {
            return Some(Want::Same(index(position)));
        }
        let twin =
            |wanted: &String| wanted.len() == name.len() && wanted.bytes().zip(name.bytes()).all(alike);
        self.0.iter().position(twin).map(|position| Want::Twin(index(position)))
    }

    /// The header that a variable such as nginx's `http_x_user` holds: names there have `_` for `-`.
    pub fn of_variable(&self, name: &str) -> Option<u16> {
        match self.find(name) {
            Some(Want::Same(index) | Want::Twin(index)) => Some(index),
            None => None,
        }
    }
}

/// A part of a request that is stored as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The method.
    Method,
    /// Path and query.
    Target,
    /// The host.
    Host,
    /// A wanted header, by its index.
    Header(u16),
    /// A header that is a twin of the wanted one.
    Twin(u16),
    /// A mapped fact, by its index.
    Fact(u16),
}

/// What a line says.
#[derive(Debug, Default)]
pub struct Logged {
    /// Its time.
    pub stamp: Option<Stamp>,
    /// How long the request took, in microseconds.
    pub duration: Option<u64>,
    /// The status of the response.
    pub status: Option<u16>,
    /// The address that the connection came from.
    pub peer: Option<IpAddr>,
    client_ip: Option<IpAddr>,
    parts: Vec<(Part, usize, usize)>,
    bytes: Vec<u8>,
    query: Option<(usize, usize)>,
    arguments: Vec<(usize, usize)>,
    unescaped: Vec<u8>,
}

impl Logged {
    /// Forgets the last line.
    pub fn clear(&mut self) {
        self.stamp = None;
        self.duration = None;
        self.status = None;
        self.peer = None;
        self.client_ip = None;
        self.parts.clear();
        self.bytes.clear();
        self.query = None;
        self.arguments.clear();
    }

    /// The parts, with their bytes.
    pub fn parts(&self) -> impl Iterator<Item = (Part, &[u8])> {
        self.parts.iter().map(|(part, start, end)| (*part, &self.bytes[*start..*end]))
    }

    /// Sets a part.
    pub fn push(&mut self, part: Part, value: &[u8]) {
        let (start, end) = self.store(value);
        self.parts.push((part, start, end));
    }

    fn store(&mut self, value: &[u8]) -> (usize, usize) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(value);
        (start, self.bytes.len())
    }

    fn has(&self, part: Part) -> bool {
        self.parts.iter().any(|(known, ..)| *known == part)
    }

    /// As [`Logged::set`], for a value with backslash escapes.
    pub fn set_escaped(&mut self, role: &Role, value: &[u8], context: &Context) -> Result<(), Unreadable> {
        if memchr::memchr(b'\\', value).is_none() {
            return self.set(role, value, context);
        }
        let mut text = std::mem::take(&mut self.unescaped);
        text.clear();
        unescape(value, &mut text);
        let result = self.set(role, &text, context);
        self.unescaped = text;
        result
    }

    /// Sets what a field says.
    pub fn set(&mut self, role: &Role, value: &[u8], context: &Context) -> Result<(), Unreadable> {
        match role {
            Role::Time(format) => {
                self.stamp = Some(format.parse(value, context.tz).ok_or(Unreadable::Time)?);
            }
            Role::Duration(unit) => self.duration = Some(unit.parse(value).ok_or(Unreadable::Duration)?),
            Role::Peer => self.peer = Some(address::address(value).ok_or(Unreadable::Address)?),
            Role::ClientIp => self.client_ip = Some(last_address(value).ok_or(Unreadable::Address)?),
            Role::RequestLine => {
                let (method, target) = request_line(value).ok_or(Unreadable::Request)?;
                self.push(Part::Method, method);
                self.push(Part::Target, target);
            }
            Role::Method => self.push(Part::Method, value),
            Role::Target => self.push(Part::Target, value),
            Role::Query => self.query = Some(self.store(value)),
            Role::Argument(name) => {
                let (start, _) = self.store(name.as_bytes());
                self.bytes.push(b'=');
                let (_, end) = self.store(value);
                self.arguments.push((start, end));
            }
            Role::Host => self.push(Part::Host, value),
            Role::Status => {
                let status = std::str::from_utf8(value).ok().and_then(|text| text.parse::<u16>().ok());
                // Envoy writes 0 if the client left before there was a response; nginx writes 000.
                let status = status.filter(|status| *status == 0 || (100..1_000).contains(status));
                self.status = Some(status.ok_or(Unreadable::Status)?).filter(|status| *status > 0);
            }
            Role::Header(name) => {
                match context.wanted.find(name) {
                    Some(Want::Same(index)) => self.push(Part::Header(index), value),
                    Some(Want::Twin(index)) => self.push(Part::Twin(index), value),
                    None => {}
                }
                if name == "x-forwarded-for" {
                    self.client_ip = self.client_ip.or_else(|| last_address(value));
                }
            }
            Role::Cookie(name) => {
                if let Some(Want::Same(index)) = context.wanted.find("cookie") {
                    let (start, _) = self.store(name.as_bytes());
                    self.bytes.push(b'=');
                    let (_, end) = self.store(value);
                    self.parts.push((Part::Header(index), start, end));
                }
            }
            Role::Fact(index) => {
                if context.facts[usize::from(*index)] == tollkeeper::facts::IP {
                    let ip = last_address(value).ok_or(Unreadable::Address)?;
                    self.client_ip = Some(ip);
                    self.push(Part::Fact(*index), ip.to_string().as_bytes());
                } else {
                    self.push(Part::Fact(*index), value);
                }
            }
        }
        Ok(())
    }

    /// Completes and checks the line; its time.
    pub fn finish(&mut self, context: &Context) -> Result<Stamp, Unreadable> {
        let stamp = self.stamp.ok_or(Unreadable::NoTime)?;
        if stamp.micros > context.latest {
            return Err(Unreadable::Future);
        }
        // A log that says only what another program believes is read as if that were the peer.
        match (self.peer, self.client_ip) {
            (None, Some(ip)) => self.peer = Some(ip),
            (Some(peer), Some(ip)) if peer != ip => self.forward(ip, context),
            _ => {}
        }
        if self.peer.is_none() && context.needs_address {
            return Err(Unreadable::NoAddress);
        }
        self.complete_target();
        let part = |wanted: Part| self.parts().find(|(part, _)| *part == wanted).map(|(_, bytes)| bytes);
        if part(Part::Target).is_some_and(|target| !is_target(target))
            || part(Part::Method).is_some_and(|method| !is_method(method))
        {
            return Err(Unreadable::Request);
        }
        Ok(stamp)
    }

    /// Adds the client's address as the log determined it, unless the line has the header itself.
    fn forward(&mut self, ip: IpAddr, context: &Context) {
        if let Some(Want::Same(index)) = context.wanted.find("x-forwarded-for")
            && !self.has(Part::Header(index))
        {
            self.push(Part::Header(index), ip.to_string().as_bytes());
        }
    }

    /// Appends the query, or the parameters that the line has, to a path without one.
    fn complete_target(&mut self) {
        if self.query.is_none() && self.arguments.is_empty() {
            return;
        }
        let at = self.parts.iter().position(|(part, ..)| *part == Part::Target);
        let path = at.map_or((0, 0), |at| (self.parts[at].1, self.parts[at].2));
        if memchr::memchr(b'?', &self.bytes[path.0..path.1]).is_some() {
            return;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_within(path.0..path.1);
        if path == (0, 0) {
            self.bytes.push(b'/');
        }
        let parts: Vec<(usize, usize)> = match self.query {
            Some(query) => vec![query],
            None => self.arguments.clone(),
        };
        for (index, (from, to)) in parts.into_iter().enumerate() {
            self.bytes.push(if index == 0 { b'?' } else { b'&' });
            self.bytes.extend_from_within(from..to);
        }
        let target = (Part::Target, start, self.bytes.len());
        match at {
            Some(at) => self.parts[at] = target,
            None => self.parts.push(target),
        }
    }
}

/// What the fields of every line are read with.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// The headers that limits use.
    pub wanted: WantedHeaders,
    /// The facts that `--fact` maps.
    pub facts: Vec<String>,
    /// The offset of stamps without one.
    pub tz: Offset,
    /// The latest time that a line may have.
    pub latest: u64,
    /// Whether a line without an address is unreadable.
    pub needs_address: bool,
}

/// The method and the target of a request line. HTTP/0.9 has no version.
fn request_line(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = memchr::memchr(b' ', line)?;
    let (method, rest) = (&line[..space], &line[space + 1..]);
    let target = match memchr::memrchr(b' ', rest) {
        Some(last) if rest[last + 1..].starts_with(b"HTTP/") => &rest[..last],
        _ => rest,
    };
    Some((method, target))
}

fn is_method(method: &[u8]) -> bool {
    matches!(method, b"GET" | b"POST" | b"HEAD" | b"PUT" | b"DELETE") || Method::from_bytes(method).is_ok()
}

/// Whether the target is one that a server would have read.
fn is_target(target: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/?&=%+:,;@!$'()*".contains(byte);
    (target.first() == Some(&b'/') && target.iter().all(is_plain)) || Uri::try_from(target).is_ok()
}

/// The address, or the last one of a list as in `X-Forwarded-For`: the hop that the log's own server saw.
fn last_address(value: &[u8]) -> Option<IpAddr> {
    address::forwarded_for(std::iter::once(value)).next().flatten()
}

/// Resolves the escapes of nginx and Apache: `\xHH`, `\"`, `\\`, `\n` and the like. Others stay as they are.
pub fn unescape(text: &[u8], out: &mut Vec<u8>) {
    let hex = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let mut rest = text;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        let (byte, length) = match rest.get(at + 1) {
            Some(b'x') => match (hex(rest.get(at + 2)), hex(rest.get(at + 3))) {
                (Some(high), Some(low)) => (u8::try_from(high * 16 + low).unwrap_or(b'?'), 4),
                _ => (b'\\', 1),
            },
            Some(b'"') => (b'"', 2),
            Some(b'\\') => (b'\\', 2),
            Some(b'n') => (b'\n', 2),
            Some(b'r') => (b'\r', 2),
            Some(b't') => (b'\t', 2),
            Some(b'b') => (8, 2),
            Some(b'v') => (11, 2),
            Some(b'f') => (12, 2),
            _ => (b'\\', 1),
        };
        out.push(byte);
        rest = &rest[at + length..];
    }
    out.extend_from_slice(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let wanted = ["cookie", "x-api-key", "x-forwarded-for"].map(str::to_owned).to_vec();
        Context {
            wanted: WantedHeaders::new(wanted),
            facts: vec!["user".to_owned(), "ip".to_owned()],
            latest: u64::MAX,
            ..Context::default()
        }
    }

    /// The parts of a line with these fields, each as `Part=text`.
    fn parts(fields: &[(Role, &str)]) -> Result<Vec<String>, Unreadable> {
        let (mut logged, context) = (Logged::default(), context());
        let time = Role::Time(TimeFormat::Unix);
        for (role, value) in [(time, "1")].iter().chain(fields) {
            logged.set_escaped(role, value.as_bytes(), &context)?;
        }
        logged.finish(&context)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut parts: Vec<String> =
            logged.parts().map(|(part, bytes)| format!("{part:?}={}", text(bytes))).collect();
        parts.extend(logged.peer.map(|peer| format!("peer={peer}")));
        Ok(parts)
    }

    #[test]
    fn request_line_is_split() {
        let line = |text| parts(&[(Role::RequestLine, text)]).map(|parts| parts.join(" "));
        assert_eq!(line("GET /a?b=c HTTP/1.1").as_deref(), Ok("Method=GET Target=/a?b=c"));
        assert_eq!(line("GET /").as_deref(), Ok("Method=GET Target=/"));
        assert_eq!(line("OPTIONS * HTTP/1.1").as_deref(), Ok("Method=OPTIONS Target=*"));
        assert_eq!(line(r"GET /\x22x\x22 HTTP/1.1").as_deref(), Ok("Method=GET Target=/\"x\""));
        for wrong in ["-", "", r"\x16\x03\x01", "GET /a b HTTP/1.1", "GE(T / HTTP/1.1", r"GET /\x00 HTTP/1.1"]
        {
            assert_eq!(line(wrong), Err(Unreadable::Request), "{wrong}");
        }
    }

    #[test]
    fn query_and_arguments_complete_a_path() {
        let target = |fields: &[(Role, &str)]| parts(fields).map(|parts| parts.join(" "));
        let (path, query) = ((Role::Target, "/a"), (Role::Query, "b=c&d=e"));
        assert_eq!(target(&[path.clone(), query]).as_deref(), Ok("Target=/a?b=c&d=e"));
        let arguments = [(Role::Argument("b".to_owned()), "c"), (Role::Argument("d".to_owned()), "e"), path];
        assert_eq!(target(&arguments).as_deref(), Ok("Target=/a?b=c&d=e"));
        let with_query = [(Role::RequestLine, "GET /a?x=y"), (Role::Argument("x".to_owned()), "y")];
        assert_eq!(target(&with_query).as_deref(), Ok("Method=GET Target=/a?x=y"));
    }

    #[test]
    fn addresses_are_the_peer_and_the_forwarded_one() {
        let forwarded = (Role::Header("x-forwarded-for".to_owned()), "192.0.2.1, 192.0.2.2");
        let one = parts(&[(Role::Peer, "10.0.0.1"), forwarded.clone()]);
        assert_eq!(one.unwrap(), ["Header(2)=192.0.2.1, 192.0.2.2", "peer=10.0.0.1"]);
        assert_eq!(parts(&[forwarded]).unwrap()[1], "peer=192.0.2.2", "the log has no other address");
        let client = parts(&[(Role::Peer, "10.0.0.1"), (Role::ClientIp, "192.0.2.9")]);
        assert_eq!(client.unwrap(), ["Header(2)=192.0.2.9", "peer=10.0.0.1"]);
        let mapped = parts(&[(Role::Peer, "10.0.0.1"), (Role::Fact(1), "192.0.2.9:4711")]);
        assert_eq!(mapped.unwrap(), ["Fact(1)=192.0.2.9", "Header(2)=192.0.2.9", "peer=10.0.0.1"]);
        assert_eq!(parts(&[(Role::Peer, "unix:")]), Err(Unreadable::Address));
    }

    #[test]
    fn only_wanted_headers_are_kept() {
        let header = |name: &str| (Role::Header(name.to_owned()), "v");
        let fields = [header("x-api-key"), header("x_api_key"), header("x-other")];
        assert_eq!(parts(&fields).unwrap(), ["Header(1)=v", "Twin(1)=v"]);
        let cookie = parts(&[(Role::Cookie("sid".to_owned()), "7")]);
        assert_eq!(cookie.unwrap(), ["Header(0)=sid=7"]);
        assert_eq!(context().wanted.of_variable("x_api_key"), Some(1));
    }

    #[test]
    fn invalid_numbers_are_rejected() {
        for (role, value, reason) in [
            (Role::Status, "abc", Unreadable::Status),
            (Role::Status, "99", Unreadable::Status),
            (Role::Status, "-200", Unreadable::Status),
            (Role::Duration(Unit::Seconds), "-0.5", Unreadable::Duration),
            (Role::Duration(Unit::Millis), "12ms", Unreadable::Duration),
        ] {
            assert_eq!(parts(&[(role, value)]), Err(reason), "{value}");
        }
        assert!(parts(&[(Role::Status, "0")]).is_ok(), "Envoy writes 0 for a client that left");
    }

    #[test]
    fn escapes_are_resolved() {
        let unescaped = |text: &str| {
            let mut out = Vec::new();
            unescape(text.as_bytes(), &mut out);
            String::from_utf8_lossy(&out).into_owned()
        };
        for (text, expected) in [
            (r"a\x22b\x5Cc", "a\"b\\c"),
            (r#"a\"b\\c"#, "a\"b\\c"),
            (r"\xe4\xbd\xa0", "你"),
            (r"\x4", r"\x4"),
            (r"\xzz\q\", r"\xzz\q\"),
            (r"a\tb", "a\tb"),
        ] {
            assert_eq!(unescaped(text), expected, "{text}");
        }
    }
}
