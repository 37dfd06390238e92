//! Reads the value of a cookie, and only if all servers read the same one.
//!
//! Of two cookies with the same name some servers take the first and some the last. Some also split the header at commas
//! and blanks, undo escapes between quotes, trim characters that others keep, or (nginx) ignore the case of names. So a
//! value counts only if it occurs once and has only characters that RFC 6265 allows. The remaining differences are
//! normalised: one pair of quotes is removed, and the value is percent-decoded, as Express and Fastify do.

use std::borrow::Cow;

/// Why the value of a cookie is ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unclear {
    /// The cookie occurs more than once, at least to some servers.
    Twice,
    /// Its name or its value has characters that servers read differently.
    Characters,
}

/// The value of the cookie with this name; `None` if it is absent. HTTP/2 may split the header into several `lines`.
pub fn of<'a>(
    lines: impl IntoIterator<Item = &'a [u8]>,
    name: &str,
) -> Result<Option<Cow<'a, [u8]>>, Unclear> {
    let name = name.as_bytes();
    let mut found = None;
    for cookie in lines.into_iter().flat_map(|line| line.split(|byte| *byte == b';')) {
        let cookie = cookie.trim_ascii();
        let (key, value) = match cookie.iter().position(|byte| *byte == b'=') {
            Some(equals) => (cookie[..equals].trim_ascii_end(), &cookie[equals + 1..]),
            None => (cookie, &[][..]),
        };
        if trim_non_graphic(key).eq_ignore_ascii_case(name) {
            if found.is_some() {
                return Err(Unclear::Twice);
            }
            found = Some(if key == name { parse_value(value) } else { Err(Unclear::Characters) });
        }
        // Servers that split the header at commas or blanks find another cookie inside this one.
        let mut words = cookie.split(|byte| matches!(byte, b',' | b' ' | b'\t')).skip(1);
        let has_name = |word: &[u8]| {
            word.split_at_checked(name.len())
                .is_some_and(|(start, rest)| start.eq_ignore_ascii_case(name) && rest.starts_with(b"="))
        };
        if words.any(has_name) {
            return Err(Unclear::Twice);
        }
    }
    found.transpose()
}

/// Trims everything but printable ASCII from both ends. Some servers trim part of it, such as Unicode whitespace.
fn trim_non_graphic(name: &[u8]) -> &[u8] {
    let is_plain = |byte: &u8| byte.is_ascii_graphic();
    let start = name.iter().position(is_plain).unwrap_or(name.len());
    let end = name.iter().rposition(is_plain).map_or(start, |last| last + 1);
    &name[start..end]
}

fn parse_value(value: &[u8]) -> Result<Cow<'_, [u8]>, Unclear> {
    let value = value.trim_ascii();
    let value = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value);
    let is_allowed = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b',' | b';' | b'\\');
    if !value.iter().all(is_allowed) {
        return Err(Unclear::Characters);
    }
    Ok(percent_decoded(value).map_or(Cow::Borrowed(value), Cow::Owned))
}

/// The percent-decoded value; `None` if the value must be used undecoded. As in JavaScript, a value with a stray `%`,
/// or one that decodes to invalid UTF-8, is not decoded at all.
fn percent_decoded(value: &[u8]) -> Option<Vec<u8>> {
    if !value.contains(&b'%') {
        return None;
    }
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(*rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            byte => *byte,
        });
    }
    std::str::from_utf8(&bytes).is_ok().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lines: &[&[u8]], expected: Result<Option<&str>, Unclear>) {
        let found = of(lines.iter().copied(), "sid");
        let found = found.as_ref().map(|value| value.as_ref().map(|value| str::from_utf8(value).unwrap()));
        assert_eq!(found.map_err(|unclear| *unclear), expected, "{lines:?}");
    }

    #[test]
    fn spellings_of_one_cookie_have_one_value() {
        for line in [
            "sid=a-b",
            " sid=a-b ",
            "sid = a-b",
            "x=1; sid=a-b; y=2",
            "x=1;sid=a-b;",
            "$Version=1; sid=a-b; $Path=/",
            "sid=\"a-b\"",
            "sid=%61%2Db",
            "sid=%61%2db",
            "sid=\"a%2Db\"",
            "sid2=y; xsid=z; sid=a-b",
        ] {
            check(&[line.as_bytes()], Ok(Some("a-b")));
        }
        check(&[b"x=1", b"sid=a-b", b"y=2"], Ok(Some("a-b")));
        check(&[], Ok(None));
        check(&[b"x=1; sid2=2"], Ok(None));
        check(&[b"sid"], Ok(Some("")));
        check(&[b"sid="], Ok(Some("")));
    }

    #[test]
    fn value_is_decoded_once_and_completely_or_not_at_all() {
        for (line, expected) in [
            ("sid=s%3Aa%2Fb%20c", "s:a/b c"),
            ("sid=s:a/b", "s:a/b"),
            ("sid=%2541", "%41"),
            ("sid=k%C3%A4se", "k\u{e4}se"),
            ("sid=%zz%41", "%zz%41"),
            ("sid=100%", "100%"),
            ("sid=%ff%41", "%ff%41"),
            ("sid=a=b", "a=b"),
        ] {
            check(&[line.as_bytes()], Ok(Some(expected)));
        }
    }

    #[test]
    fn duplicate_cookie_is_ambiguous() {
        for lines in [
            &[&b"sid=a; sid=b"[..]][..],
            &[b"sid=a; sid=a"],
            &[b"sid=; sid=a"],
            &[b"sid; sid=a"],
            &[b"sid=a", b"sid=b"],
            &[b"SID=x; sid=a"],
            &[b"sid=a", b"Sid=b"],
            &[b"x=1, sid=a"],
            &[b"x=1, Sid=a"],
            &[b"x=1,sid=a; sid=b"],
            &[b"x=1 sid=a"],
            &[b"sid=a, sid=b"],
            &[b"x=\"; sid=a\"; sid=b"],
            &[b"sid=a; \xa0sid=b"],
        ] {
            check(lines, Err(Unclear::Twice));
        }
    }

    #[test]
    fn characters_that_servers_read_differently_are_ambiguous() {
        for line in [
            &b"sid=a,x=1"[..],
            b"sid=a b",
            b"sid=\"a;b\"",
            b"sid=\"\\141\"",
            b"sid=a\"b",
            b"sid=\"a",
            b"sid=a\\b",
            b"sid=a\xa0",
            b"\xa0sid=a",
            b"sid\x85=a",
            b"SID=a",
        ] {
            check(&[line], Err(Unclear::Characters));
        }
    }
}
