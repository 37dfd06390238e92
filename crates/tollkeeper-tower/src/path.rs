//! Normalises a request path into its canonical spellings: one for each way in which servers may read it.
//!
//! Most paths have a single spelling: percent-encoded printable characters are decoded, once, and slashes at the end and
//! line feeds at the end of a segment are dropped. Bytes that must stay encoded (`%25`, `%3F`, everything beyond ASCII)
//! have upper-case digits. A spelling is ASCII and begins with `/`.
//!
//! Servers disagree about seven things: `%2F`, `%5C`, `\`, `;parameters`, empty segments, two slashes at the beginning,
//! and the segments `.` and `..`. Go reads `/files%2F..%2Flogin` as `/login`, Starlette as `/files/../login`, and Express
//! as a single segment. A limiter with a single reading can be bypassed in front of every server that has another. So
//! there is a `Reading` for each kind of server, and [`spellings`] returns the result of each.

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
    /// `;` and the rest of its segment are dropped.
    drops_parameters: bool,
    /// Empty segments are dropped.
    drops_empty: bool,
    /// `.` is dropped, and `..` together with the segment before it.
    resolves_dots: bool,
    /// Two slashes at the beginning are followed by a host, which is dropped.
    drops_host: bool,
}

impl Reading {
    /// axum, Express, Fastify and other routers that match the bytes of the request line.
    const AS_WRITTEN: Reading = Reading {
        encoded_slash: false,
        encoded_backslash: false,
        backslash: false,
        drops_parameters: false,
        drops_empty: false,
        resolves_dots: false,
        drops_host: false,
    };
    /// Starlette, Django and other WSGI or ASGI applications.
    const PERCENT_DECODED: Reading = Reading { encoded_slash: true, ..Reading::AS_WRITTEN };
    /// nginx, and Go's `ServeMux`.
    const CLEANED: Reading = Reading { drops_empty: true, resolves_dots: true, ..Reading::PERCENT_DECODED };
    /// URL parsers, such as `new URL(…)` in JavaScript.
    const URL: Reading =
        Reading { backslash: true, resolves_dots: true, drops_host: true, ..Reading::AS_WRITTEN };
    /// Servlets: Tomcat, Jetty, Spring.
    const KEPT: Reading =
        Reading { drops_parameters: true, drops_empty: true, resolves_dots: true, ..Reading::AS_WRITTEN };
    /// Servers that decode everything and treat a backslash as a slash, as on Windows.
    const DECODED: Reading =
        Reading { encoded_slash: true, encoded_backslash: true, backslash: true, ..Reading::KEPT };

    /// All but [`Reading::DECODED`].
    const OTHERS: [Reading; 5] =
        [Reading::AS_WRITTEN, Reading::PERCENT_DECODED, Reading::CLEANED, Reading::URL, Reading::KEPT];

    /// The length in bytes of the separator at the start of `text`; 0 without a separator.
    fn separator(self, text: &[u8]) -> usize {
        match text {
            [b'/', ..] => 1,
            [b'\\', ..] if self.backslash => 1,
            [b'%', b'2', b'F' | b'f', ..] if self.encoded_slash => 3,
            [b'%', b'5', b'C' | b'c', ..] if self.encoded_backslash => 3,
            _ => 0,
        }
    }

    /// The segments of a path; the first one ends at the first separator.
    fn segments(self, path: &str) -> impl Iterator<Item = &str> {
        let mut rest = Some(path);
        std::iter::from_fn(move || {
            let path = rest.take()?;
            let mut separators =
                (0..path.len()).map(|start| (start, self.separator(&path.as_bytes()[start..])));
            let Some((start, length)) = separators.find(|(_, length)| *length > 0) else { return Some(path) };
            rest = Some(&path[start + length..]);
            Some(&path[..start])
        })
    }

    /// The spelling of a path that this kind of server reads.
    fn normalize(self, path: &str) -> String {
        let mut spelling = String::with_capacity(path.len() + 1);
        let path = if self.drops_host { without_host(path) } else { path.strip_prefix('/').unwrap_or(path) };
        for segment in self.segments(path) {
            let is_parameter = |char: char| self.drops_parameters && char == ';';
            let start = spelling.len();
            spelling.push('/');
            push_segment(&mut spelling, segment.split(is_parameter).next().unwrap_or_default());
            // Starlette matches routes by regular expressions, and Python's `$` also matches before a final line feed.
            spelling.truncate(spelling.trim_end_matches("%0A").len());
            match &spelling[start..] {
                "/" if self.drops_empty => spelling.truncate(start),
                "/." if self.resolves_dots => spelling.truncate(start),
                "/.." if self.resolves_dots => {
                    let parent = spelling[..start].rfind('/').unwrap_or(0);
                    spelling.truncate(parent);
                }
                _ => {}
            }
        }
        spelling.truncate(spelling.trim_end_matches('/').len());
        if spelling.is_empty() {
            spelling.push('/');
        }
        spelling
    }
}

/// The path after the first slash, or after the host: `new URL("//x/login", …)` has the path `/login`.
fn without_host(path: &str) -> &str {
    let is_slash = |char: char| matches!(char, '/' | '\\');
    let rest = path.trim_start_matches(is_slash);
    match path.len() - rest.len() {
        0 | 1 => rest,
        _ => rest.split_once(is_slash).map_or("", |(_, path)| path),
    }
}

/// All spellings of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spellings<'p> {
    /// The spelling that logs and decisions show, such as `/api/login` for `/api%2Flogin`.
    pub shown: Cow<'p, str>,
    /// The other spellings, all different.
    pub others: Vec<String>,
}

/// Every spelling that some server could read from a path.
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
    let shown = shown.normalize(path);
    let mut others = Vec::new();
    if matches!(slashes, EncodedSlashes::Both | EncodedSlashes::Refuse) && is_ambiguous(path) {
        for reading in Reading::OTHERS {
            let other = reading.normalize(path);
            if other != shown && !others.contains(&other) {
                others.push(other);
            }
        }
    }
    Spellings { shown: Cow::Owned(shown), others }
}

/// The canonical spelling of a path, in which encoded slashes are part of a segment.
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
    let reading = Reading::DECODED; // knows every separator
    (0..path.len())
        .any(|start| path.as_bytes()[start] != b'/' && reading.separator(&path.as_bytes()[start..]) > 0)
}

/// Whether servers may read a path differently.
fn is_ambiguous(path: &str) -> bool {
    let is_dots = |segment: &str| {
        if !segment.starts_with(['.', '%']) {
            return false;
        }
        let mut plain = String::new();
        push_segment(&mut plain, segment);
        plain == "." || plain == ".."
    };
    path.contains(';') || path.contains("//") || has_encoded_slash(path) || path.split('/').any(is_dots)
}

/// Appends a segment in its canonical encoding: printable characters are decoded, except for those that have a meaning
/// in a path, and all other bytes are encoded.
pub(crate) fn push_segment(out: &mut String, segment: &str) {
    let mut rest = segment.as_bytes().iter();
    while let Some(byte) = rest.next().copied() {
        let decoded = if byte == b'%' { decode_hex(rest.as_slice()) } else { None };
        if decoded.is_some() {
            rest.nth(1);
        }
        match decoded.unwrap_or(byte) {
            // A stray `%` is encoded, too: otherwise it could form a new escape with characters decoded after it.
            reserved @ (b'/' | b'\\' | b'%' | b';' | b'?' | b'#') => push_encoded(out, reserved),
            plain if plain.is_ascii_graphic() => out.push(char::from(plain)),
            other => push_encoded(out, other),
        }
    }
}

/// The byte that is encoded by the two hexadecimal digits after a `%`.
fn decode_hex(digits: &[u8]) -> Option<u8> {
    let digit = |index: usize| char::from(*digits.get(index)?).to_digit(16);
    u8::try_from(digit(0)? * 16 + digit(1)?).ok()
}

fn push_encoded(out: &mut String, byte: u8) {
    out.push('%');
    for digit in [byte >> 4, byte & 15] {
        out.extend(char::from_digit(digit.into(), 16).map(|digit| digit.to_ascii_uppercase()));
    }
}

/// Whether a path already is its only spelling, which is true of nearly every path. Spares the copy.
fn is_normal(path: &str) -> bool {
    let bytes = path.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'%' | b';' | b'\\' | b'?' | b'#');
    let is_empty_or_dots = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    bytes.first() == Some(&b'/')
        && (bytes.len() == 1 || bytes.last() != Some(&b'/'))
        && bytes.iter().all(plain)
        && !bytes.windows(2).any(is_empty_or_dots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_has_one_normal_spelling() {
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
            ("/%40me", "/@me"),
            ("/a%22%3c%7C", "/a\"<|"),
            ("/a%3fb%23", "/a%3Fb%23"),
            ("/%", "/%25"),
            ("/%2", "/%252"),
            ("/%zz", "/%25zz"),
            ("/%2%45", "/%252E"),
            ("/käse", "/k%C3%A4se"),
            ("/k%c3%a4se", "/k%C3%A4se"),
            ("/a%00b", "/a%00b"),
            ("/a%0a", "/a"),
            ("/a%0A/%0a%0A/", "/a"),
            ("/%0A", "/"),
            ("/a/..%0A", "/"),
            ("/a%0Ab", "/a%0Ab"),
            ("/a%250A", "/a%250A"),
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
    fn normal_path_is_not_copied() {
        for path in ["/", "/login", "/users/7/files/a.txt", "/a:b@c"] {
            assert!(matches!(normalized(path), Cow::Borrowed(_)), "{path}");
        }
    }

    /// Each row has a path and its spellings: the shown one first, then the others.
    #[test]
    fn ambiguous_path_has_a_spelling_for_each_kind_of_server() {
        for (path, expected) in [
            ("/login", &["/login"][..]),
            ("/login/", &["/login"]),
            ("/a%20b/", &["/a%20b"]),
            ("/login//", &["/login"]),
            ("/users//export", &["/users/export", "/users//export"]),
            ("//x/login", &["/x/login", "//x/login", "/login"]),
            ("///x\\a/login", &["/x/a/login", "///x%5Ca/login", "/x%5Ca/login", "/a/login"]),
            ("//x", &["/x", "//x", "/"]),
            ("/.well-known/x", &["/.well-known/x"]),
            ("/api%2Flogin", &["/api/login", "/api%2Flogin"]),
            ("/api/login%2f", &["/api/login", "/api/login%2F"]),
            ("/api%5clogin", &["/api/login", "/api%5Clogin"]),
            ("/api\\login", &["/api/login", "/api%5Clogin"]),
            ("/files/..%2Flogin", &["/login", "/files/..%2Flogin", "/files/../login"]),
            ("/files/%2E%2E/login", &["/login", "/files/../login"]),
            ("/login//..", &["/", "/login//..", "/login"]),
            ("/users/..;/export", &["/export", "/users/..%3B/export"]),
            ("/login;a=1", &["/login", "/login%3Ba=1"]),
            ("/users/a%5Cb%2Fexport", &["/users/a/b/export", "/users/a%5Cb%2Fexport", "/users/a%5Cb/export"]),
            ("/x%2Fy/../login", &["/x/login", "/x%2Fy/../login", "/x/y/../login", "/login"]),
        ] {
            let Spellings { shown, others } = spellings(path, EncodedSlashes::Both);
            let all: Vec<&str> = std::iter::once(&*shown).chain(others.iter().map(String::as_str)).collect();
            assert_eq!(all, expected, "{path}");
            for (slashes, shown) in [
                (EncodedSlashes::Decode, Cow::Borrowed(expected[0])),
                (EncodedSlashes::Keep, normalized(path)),
            ] {
                assert_eq!(spellings(path, slashes), Spellings { shown, others: Vec::new() }, "{path}");
            }
        }
    }

    #[test]
    fn encoded_slash_is_found_in_any_case() {
        for path in ["/a%2Fb", "/a%2fb", "/a%5C", "/%5c", "/a\\b"] {
            assert!(has_encoded_slash(path), "{path}");
        }
        for path in ["/", "/a/b", "/a%2", "/a%252F", "/%2E%2E/a;b", ""] {
            assert!(!has_encoded_slash(path), "{path}");
        }
    }
}
