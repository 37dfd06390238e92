//! One spelling for each path, so that nobody gets a second count by writing it another way.
//!
//! In this order: `;parameters` are dropped, percent-encoded characters that need no encoding are decoded,
//! empty segments and `.` disappear, `..` takes the segment before it away, and a slash at the end is
//! dropped. Decoding happens once: what is still encoded then (`%2F`, `%25`, every byte beyond ASCII) stays
//! so, with digits in upper case. What comes out is ASCII, begins with `/`, and is its own spelling.

use std::borrow::Cow;

/// The one spelling of a path.
///
/// ```
/// use tollkeeper_tower::path::normalized;
///
/// assert_eq!(normalized("/login"), "/login");
/// assert_eq!(normalized("//x/%2e%2e/./%6Cogin;jsessionid=1/"), "/login");
/// ```
pub fn normalized(path: &str) -> Cow<'_, str> {
    if is_normal(path) {
        return Cow::Borrowed(path);
    }
    let mut normal = String::with_capacity(path.len() + 1);
    for written in path.split('/') {
        let written = written.split(';').next().unwrap_or_default();
        let start = normal.len();
        normal.push('/');
        push_segment(&mut normal, written);
        match &normal[start..] {
            "/" | "/." => normal.truncate(start),
            "/.." => {
                let parent = normal[..start].rfind('/').unwrap_or(0);
                normal.truncate(parent);
            }
            _ => {}
        }
    }
    if normal.is_empty() {
        normal.push('/');
    }
    Cow::Owned(normal)
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
            plain if encoded.is_some() || plain == b'%' || !plain.is_ascii_graphic() => {
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
    let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'%' | b';');
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
            ("/a\\b", "/a\\b"),
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
