//! Spellings of a path: one for each way in which servers read it.
//!
//! A path that says something to every server alike has one spelling, whatever it is made of: percent-encoded
//! characters that need no encoding are decoded, empty segments disappear, and a slash at the end is dropped.
//! Decoding happens once: what is still encoded then (`%25`, every byte beyond ASCII) stays so, with digits in
//! upper case. A spelling is ASCII and begins with `/`.
//!
//! Servers disagree about five things: `%2F`, `%5C`, `\`, `;parameters`, and the segments `.` and `..`. To Go
//! `/files%2F..%2Flogin` is `/login`, to Starlette it is `/files/../login`, to Express a single segment. A limiter
//! that reads such a path in one way only can be bypassed in front of all servers that read it in another. So there
//! is a [`Reading`] for each kind of server, and [`spellings`] has the result of each.

use std::borrow::Cow;

use tollkeeper::http::EncodedSlashes;

/// How a kind of server reads a path.
#[derive(Clone, Copy, Debug)]
struct Reading {
    /// `%2F` separates segments.
    encoded_slash: bool,
    /// `%5C` separates segments.
    encoded_backslash: bool,
    /// `\` separates segments.
    backslash: bool,
    /// What comes behind a `;` in a segment is dropped.
    parameters: bool,
    dots: Dots,
}

/// What becomes of the segments `.` and `..`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dots {
    /// They are names like any other.
    Kept,
    /// `..` takes the segment before it away.
    Resolved,
    /// The same, where an empty segment is a segment: `/login//..` is `/login/`.
    ResolvedAmongEmpty,
}

impl Reading {
    /// axum, Express, Fastify and other routers that match the bytes of the request line.
    const AS_WRITTEN: Reading = Reading {
        encoded_slash: false,
        encoded_backslash: false,
        backslash: false,
        parameters: false,
        dots: Dots::Kept,
    };
    /// Starlette, Django and whatever else is called by WSGI or ASGI.
    const PERCENT_DECODED: Reading = Reading { encoded_slash: true, ..Reading::AS_WRITTEN };
    /// nginx, and Go's `ServeMux`.
    const RESOLVED: Reading = Reading { dots: Dots::Resolved, ..Reading::PERCENT_DECODED };
    /// Parsers of URLs, such as `new URL(…)` in JavaScript.
    const URL: Reading = Reading { backslash: true, dots: Dots::ResolvedAmongEmpty, ..Reading::AS_WRITTEN };
    /// Servlets: Tomcat, Jetty, Spring.
    const KEPT: Reading = Reading { parameters: true, dots: Dots::Resolved, ..Reading::AS_WRITTEN };
    /// Servers that decode everything and take a backslash for a slash, as on Windows.
    const DECODED: Reading =
        Reading { encoded_slash: true, encoded_backslash: true, backslash: true, ..Reading::KEPT };

    /// All but [`Reading::DECODED`].
    const OTHERS: [Reading; 5] =
        [Reading::AS_WRITTEN, Reading::PERCENT_DECODED, Reading::RESOLVED, Reading::URL, Reading::KEPT];

    /// How many bytes the separator has that this begins with; 0 if it begins with none.
    fn separator(self, text: &[u8]) -> usize {
        match text {
            [b'/', ..] => 1,
            [b'\\', ..] if self.backslash => 1,
            [b'%', b'2', b'F' | b'f', ..] if self.encoded_slash => 3,
            [b'%', b'5', b'C' | b'c', ..] if self.encoded_backslash => 3,
            _ => 0,
        }
    }

    /// The segments of a path, the first of which comes before the first slash.
    fn segments(self, path: &str) -> impl Iterator<Item = &str> {
        let mut rest = Some(path);
        std::iter::from_fn(move || {
            let path = rest.take()?;
            let mut places = (0..path.len()).map(|start| (start, self.separator(&path.as_bytes()[start..])));
            let Some((start, length)) = places.find(|(_, length)| *length > 0) else { return Some(path) };
            rest = Some(&path[start + length..]);
            Some(&path[..start])
        })
    }

    fn spelled(self, path: &str) -> String {
        let mut spelling = String::with_capacity(path.len() + 1);
        for written in self.segments(path) {
            let segment = if self.parameters { written.split(';').next().unwrap_or_default() } else { written };
            let start = spelling.len();
            spelling.push('/');
            push_segment(&mut spelling, segment);
            match (&spelling[start..], self.dots) {
                ("/", Dots::ResolvedAmongEmpty) | ("/." | "/..", Dots::Kept) => {}
                ("/" | "/.", _) => spelling.truncate(start),
                ("/..", _) => {
                    let parent = spelling[..start].rfind('/').unwrap_or(0);
                    spelling.truncate(parent);
                }
                _ => {}
            }
        }
        if self.dots == Dots::ResolvedAmongEmpty {
            let segments = spelling.split('/').filter(|segment| !segment.is_empty());
            spelling = segments.flat_map(|segment| ["/", segment]).collect();
        }
        if spelling.is_empty() {
            spelling.push('/');
        }
        spelling
    }
}

/// All spellings of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spellings<'p> {
    /// The one that is shown.
    pub shown: Cow<'p, str>,
    /// Further ones, all different.
    pub others: Vec<String>,
}

/// Every spelling of a path that a server could mean.
///
/// ```
/// use tollkeeper::http::EncodedSlashes;
/// use tollkeeper_tower::path::spellings;
///
/// assert!(spellings("/login", EncodedSlashes::Both).others.is_empty());
/// let both = spellings("/api%2Flogin", EncodedSlashes::Both);
/// assert_eq!((&*both.shown, &*both.others), ("/api/login", &["/api%2Flogin".to_owned()][..]));
/// ```
pub fn spellings(path: &str, slashes: EncodedSlashes) -> Spellings<'_> {
    if is_normal(path) {
        return Spellings { shown: Cow::Borrowed(path), others: Vec::new() };
    }
    let shown = match slashes {
        EncodedSlashes::Keep => Reading::KEPT,
        EncodedSlashes::Both | EncodedSlashes::Decode | EncodedSlashes::Refuse => Reading::DECODED,
    };
    let shown = shown.spelled(path);
    let mut others = Vec::new();
    if matches!(slashes, EncodedSlashes::Both | EncodedSlashes::Refuse) && is_ambiguous(path) {
        for reading in Reading::OTHERS {
            let other = reading.spelled(path);
            if other != shown && !others.contains(&other) {
                others.push(other);
            }
        }
    }
    Spellings { shown: Cow::Owned(shown), others }
}

/// The spelling of a path in which encoded slashes are part of a segment.
///
/// ```
/// use tollkeeper_tower::path::normalized;
///
/// assert_eq!(normalized("/login"), "/login");
/// assert_eq!(normalized("//x/%2e%2e/./%6Cogin;jsessionid=1/"), "/login");
/// ```
pub fn normalized(path: &str) -> Cow<'_, str> {
    spellings(path, EncodedSlashes::Keep).shown
}

/// Whether a path has an encoded slash, an encoded backslash or a backslash.
pub fn has_encoded_slash(path: &str) -> bool {
    let every = Reading::DECODED;
    (0..path.len()).any(|start| path.as_bytes()[start] != b'/' && every.separator(&path.as_bytes()[start..]) > 0)
}

/// Whether servers may disagree about a path.
fn is_ambiguous(path: &str) -> bool {
    let is_dots = |segment: &str| {
        if !segment.starts_with(['.', '%']) {
            return false;
        }
        let mut plain = String::new();
        push_segment(&mut plain, segment);
        plain == "." || plain == ".."
    };
    path.contains(';') || has_encoded_slash(path) || path.split('/').any(is_dots)
}

/// Writes a segment with every character encoded that must be, and no other.
pub(crate) fn push_segment(out: &mut String, segment: &str) {
    let mut rest = segment.as_bytes().iter();
    while let Some(byte) = rest.next().copied() {
        let encoded = if byte == b'%' { escaped(rest.as_slice()) } else { None };
        if encoded.is_some() {
            rest.nth(1);
        }
        match encoded.unwrap_or(byte) {
            plain if is_unreserved(plain) => out.push(char::from(plain)),
            // A `%` that encodes nothing is one: left alone it could come to encode what is decoded behind it.
            plain if encoded.is_some() || matches!(plain, b'%' | b'\\') || !plain.is_ascii_graphic() => {
                push_encoded(out, plain)
            }
            plain => out.push(char::from(plain)),
        }
    }
}

/// The byte that two digits behind a `%` stand for.
fn escaped(digits: &[u8]) -> Option<u8> {
    let digit = |index: usize| char::from(*digits.get(index)?).to_digit(16);
    u8::try_from(digit(0)? * 16 + digit(1)?).ok()
}

fn push_encoded(out: &mut String, byte: u8) {
    out.push('%');
    for digit in [byte >> 4, byte & 15] {
        out.extend(char::from_digit(digit.into(), 16).map(|digit| digit.to_ascii_uppercase()));
    }
}

fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Whether nothing has to be done, as for nearly every path.
fn is_normal(path: &str) -> bool {
    let bytes = path.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'%' | b';' | b'\\');
    let doubtful = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    bytes.first() == Some(&b'/')
        && (bytes.len() == 1 || bytes.last() != Some(&b'/'))
        && bytes.iter().all(plain)
        && !bytes.windows(2).any(doubtful)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_one_spelling() {
        for (path, expected) in [
            ("/login", "/login"),
            ("/Login", "/Login"),
            ("/", "/"),
            ("", "/"),
            ("*", "/*"),
            ("//", "/"),
            ("/login/", "/login"),
            ("/login//", "/login"),
            ("//login", "/login"),
            ("/a//b", "/a/b"),
            ("/./login", "/login"),
            ("/login/.", "/login"),
            ("/a/../login", "/login"),
            ("/../../login", "/login"),
            ("/a/b/..", "/a"),
            ("/a/..", "/"),
            ("/a/...", "/a/..."),
            ("/.well-known/x", "/.well-known/x"),
            ("/%6cogin", "/login"),
            ("/%6C%6f%67in", "/login"),
            ("/%2e/login", "/login"),
            ("/a/%2e%2E/login", "/login"),
            ("/login;jsessionid=1", "/login"),
            ("/login;a;b/;c", "/login"),
            ("/a/..;/login", "/login"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%2Fb", "/a%2Fb"),
            ("/a%3bb", "/a%3Bb"),
            ("/%252e%252e/a", "/%252e%252e/a"),
            ("/%", "/%25"),
            ("/%2", "/%252"),
            ("/%zz", "/%25zz"),
            ("/%2%45", "/%252E"),
            ("/käse", "/k%C3%A4se"),
            ("/k%c3%a4se", "/k%C3%A4se"),
            ("/a%00b", "/a%00b"),
            ("/a b", "/a%20b"),
            ("/a:b@c!$&'()*+,=", "/a:b@c!$&'()*+,="),
            ("/a\\b", "/a%5Cb"),
            ("/a%5cb", "/a%5Cb"),
        ] {
            assert_eq!(normalized(path), expected, "{path}");
            assert_eq!(normalized(expected), expected, "{path}, again");
        }
    }

    #[test]
    fn what_is_normal_is_not_copied() {
        for path in ["/", "/login", "/users/7/files/a.txt", "/a:b@c"] {
            assert!(matches!(normalized(path), Cow::Borrowed(_)), "{path}");
        }
    }
}
