//! Reads top-level fields of JSON and form bodies, and parameters of a query.
//!
//! Input that two parsers could read differently (a duplicate field, invalid JSON, a number with a fraction) is an error,
//! not an absent field. Otherwise the limiter could charge one identity while the application serves another.

use std::borrow::Cow;

use tollkeeper::json::{Kind, Malformed, Reader, Scalar};

/// The result of looking up a field in a body or a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    /// The field does not occur.
    Absent,
    /// The field occurs once, with this value.
    Once(Cow<'a, [u8]>),
    /// The field occurs more than once.
    Twice,
    /// The field is not a string, an integer, a boolean or null.
    NoText,
    /// Another field has a name that some servers treat as the same: `Email`, `[email]` or `email[]` for `email`.
    Alike,
    /// The field may occur: the body is `multipart/form-data`, which is not parsed.
    Unread,
}

/// A body is not valid JSON, so none of its fields can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotJson;

/// The format of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON.
    Json,
    /// A form or a query: `a=1&b=2`.
    Pairs,
    /// `multipart/form-data`, which is not parsed.
    Parts,
}

impl Form {
    /// The format of a body, by its content type and its first bytes. A body that looks like JSON is parsed as JSON
    /// whatever its content type, because many applications ignore the content type, too.
    pub fn of(content_type: Option<&[u8]>, body: &[u8]) -> Form {
        let essence = content_type.unwrap_or_default().split(|byte| *byte == b';').next();
        let essence = essence.unwrap_or_default().trim_ascii().to_ascii_lowercase();
        if essence == b"application/json" || essence.ends_with(b"+json") || begins_like_json(body) {
            return Form::Json;
        }
        if essence.starts_with(b"multipart/") { Form::Parts } else { Form::Pairs }
    }
}

/// Whether a body may be JSON to some parser. Python also accepts JSON in UTF-16, in UTF-32, and after a byte order mark.
/// Such a body counts as JSON here, too, so that it is rejected as invalid JSON and not parsed as a form.
fn begins_like_json(body: &[u8]) -> bool {
    let body = body.trim_ascii_start();
    body.starts_with(b"\xef\xbb\xbf") || matches!(body.first(), Some(b'{' | 0 | 0xfe | 0xff))
}

/// Reads a top-level field of a body.
pub fn of_body<'a>(form: Form, body: &'a [u8], name: &str) -> Result<Field<'a>, NotJson> {
    match form {
        _ if body.trim_ascii().is_empty() => Ok(Field::Absent),
        Form::Json => of_json(body, name),
        Form::Pairs => Ok(of_pairs(body, name)),
        Form::Parts => Ok(Field::Unread),
    }
}

/// Reads a field of a form or query such as `a=1&b=2`.
pub fn of_pairs<'a>(text: &'a [u8], name: &str) -> Field<'a> {
    let mut found = Field::Absent;
    for pair in text.split(|byte| *byte == b'&') {
        let (key, value) = match pair.iter().position(|byte| *byte == b'=') {
            Some(equals) => (&pair[..equals], &pair[equals + 1..]),
            None => (pair, &[][..]),
        };
        let key = decoded(key);
        if *key != *name.as_bytes() {
            if is_similar(&key, name) {
                return Field::Alike;
            }
            continue;
        }
        found = match found {
            Field::Absent => Field::Once(decoded(value)),
            _ => return Field::Twice,
        };
    }
    found
}

/// Whether some servers treat another key as this field: nginx ignores case, and `qs`, with which Express parses forms,
/// reads `[name]` as `name` and `name[]` as a list of that name.
fn is_similar(key: &[u8], name: &str) -> bool {
    let key = key.strip_prefix(b"[").unwrap_or(key);
    key.split_at_checked(name.len()).is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(name.as_bytes()) && matches!(rest.first(), None | Some(b'[' | b']'))
    })
}

/// Whether two names differ only in case. Go treats such JSON keys as the same, and folds the case of all of Unicode.
fn differ_in_case(one: &str, other: &str) -> bool {
    let folded = |text: &str| text.to_uppercase().to_lowercase();
    one != other && folded(one) == folded(other)
}

/// Decodes a key or value of a form: `+` is a space, `%41` an `A`, and a stray `%` stays as it is.
fn decoded(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.iter().any(|byte| matches!(byte, b'+' | b'%')) {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        let digit = |index: usize| char::from(*rest.as_slice().get(index)?).to_digit(16);
        let encoded = || u8::try_from(digit(0)? * 16 + digit(1)?).ok();
        match byte {
            b'+' => bytes.push(b' '),
            b'%' if let Some(byte) = encoded() => {
                bytes.push(byte);
                rest.nth(1);
            }
            byte => bytes.push(*byte),
        }
    }
    Cow::Owned(bytes)
}

/// Reads a top-level field of a JSON text. All of the text must be valid JSON.
pub fn of_json(text: &[u8], name: &str) -> Result<Field<'static>, NotJson> {
    // The reader unescapes in place.
    let mut copy = text.to_vec();
    let mut reader = Reader::new(&mut copy)?.deep(MAX_DEPTH);
    let mut found = Field::Absent;
    let (mut is_duplicate, mut has_similar) = (false, false);
    if reader.kind()? == Kind::Object {
        reader.object(|reader, key| {
            let value = reader.value()?;
            if key == name {
                is_duplicate |= found != Field::Absent;
                found = of_value(value)?;
            } else if differ_in_case(key, name) {
                has_similar = true;
            }
            Ok::<(), NotJson>(())
        })?;
    } else {
        reader.value()?;
    }
    reader.end()?;
    Ok(match (is_duplicate, has_similar) {
        (true, _) => Field::Twice,
        (false, true) => Field::Alike,
        (false, false) => found,
    })
}

/// An integer is read as its text. A number with a fraction or an exponent is [`Field::NoText`], because it can be
/// written in many ways (`1.0`, `1.00`, `1e0`). `null` is read as an empty string, and an empty fact is absent.
fn of_value(mut value: Reader<'_>) -> Result<Field<'static>, NotJson> {
    if value.kind()? != Kind::Scalar {
        return Ok(Field::NoText);
    }
    let text = match value.scalar()? {
        Scalar::Text(text) => text,
        Scalar::Number(number) if number.contains(['.', 'e', 'E']) => return Ok(Field::NoText),
        Scalar::Number(number) => number,
        Scalar::Bool(true) => "true",
        Scalar::Bool(false) => "false",
        Scalar::Null => "",
    };
    Ok(Field::Once(Cow::Owned(text.as_bytes().to_vec())))
}

/// How deep arrays and objects may be nested.
const MAX_DEPTH: usize = 64;

impl From<Malformed> for NotJson {
    fn from(_: Malformed) -> NotJson {
        NotJson
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn once(text: &str) -> Result<Field<'_>, NotJson> {
        Ok(Field::Once(Cow::Borrowed(text.as_bytes())))
    }

    #[test]
    fn ambiguous_json_is_rejected() {
        for (json, expected) in [
            (r#"{"email":"a@b.c"}"#, once("a@b.c")),
            (r#" { "x" : [ 1 , {"email":"no"} ] , "email" : "yes" } "#, once("yes")),
            (r#"{"em\u0061il":"\ud83d\ude00\n\/"}"#, once("\u{1f600}\n/")),
            (r#"{"email":"a\"b\\"}"#, once("a\"b\\")),
            (r#"{"email":7}"#, once("7")),
            (r#"{"email":-70}"#, once("-70")),
            (r#"{"email":true,"x":false}"#, once("true")),
            (r#"{"email":null}"#, once("")),
            (r#"{"email":""}"#, once("")),
            ("{}", Ok(Field::Absent)),
            (r#"{"Email":"x"}"#, Ok(Field::Alike)),
            (r#"{"email":"a","EMAIL":"b"}"#, Ok(Field::Alike)),
            (r#"{"x":{"Email":"b"},"emails":"c"}"#, Ok(Field::Absent)),
            (r#"["email"]"#, Ok(Field::Absent)),
            ("7", Ok(Field::Absent)),
            (r#"{"email":"a","email":"a"}"#, Ok(Field::Twice)),
            (r#"{"email":null,"\u0065mail":"b"}"#, Ok(Field::Twice)),
            (r#"{"email":1.0}"#, Ok(Field::NoText)),
            (r#"{"email":1e3}"#, Ok(Field::NoText)),
            (r#"{"email":["a"]}"#, Ok(Field::NoText)),
            (r#"{"email":{}}"#, Ok(Field::NoText)),
            // Some parsers accept some of these.
            (r#"{"email":"a",}"#, Err(NotJson)),
            (r#"{"email":'a'}"#, Err(NotJson)),
            (r#"{email:"a"}"#, Err(NotJson)),
            (r#"{"email":"a"} x"#, Err(NotJson)),
            (r#"{"email":"a"}{"email":"b"}"#, Err(NotJson)),
            (r#"{"email":01}"#, Err(NotJson)),
            (r#"{"email":+1}"#, Err(NotJson)),
            (r#"{"email":.5}"#, Err(NotJson)),
            (r#"{"email":1.}"#, Err(NotJson)),
            (r#"{"email":NaN}"#, Err(NotJson)),
            (r#"{"email":"\ud83d"}"#, Err(NotJson)),
            (r#"{"email":"\ud83d\u0041"}"#, Err(NotJson)),
            (r#"{"email":"\u+123"}"#, Err(NotJson)),
            (r#"{"email":"\x"}"#, Err(NotJson)),
            ("{\"email\":\"a\nb\"}", Err(NotJson)),
            ("\u{feff}{}", Err(NotJson)),
            (r#"{"email":"a""#, Err(NotJson)),
            (r#"/* */{"email":"a"}"#, Err(NotJson)),
            ("", Err(NotJson)),
        ] {
            assert_eq!(of_json(json.as_bytes(), "email"), expected, "{json}");
        }
        let deep = |depth: usize| format!("{{\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(of_json(deep(60).as_bytes(), "email"), Ok(Field::Absent));
        assert_eq!(of_json(deep(100_000).as_bytes(), "email"), Err(NotJson));
    }

    #[test]
    fn form_field_is_decoded_once() {
        for (text, expected) in [
            ("email=a", Field::Once(Cow::Borrowed(&b"a"[..]))),
            ("x=1&email=a%40b.c+d&y", Field::Once(Cow::Borrowed(b"a@b.c d"))),
            ("%65mail=%2541", Field::Once(Cow::Borrowed(b"%41"))),
            ("email=100%", Field::Once(Cow::Borrowed(b"100%"))),
            ("email=%zz%ff", Field::Once(Cow::Borrowed(b"%zz\xff"))),
            ("email", Field::Once(Cow::Borrowed(b""))),
            ("email=a&email=b", Field::Twice),
            ("email=a&em%61il=", Field::Twice),
            ("emails=b&xemail=c&email.x=d&x[email]=e", Field::Absent),
            ("email=a&EMAIL=b", Field::Alike),
            ("[email]=a", Field::Alike),
            ("%5Bemail%5D[0]=a", Field::Alike),
            ("email[]=a&email=b", Field::Alike),
            ("", Field::Absent),
        ] {
            assert_eq!(of_body(Form::Pairs, text.as_bytes(), "email"), Ok(expected), "{text}");
        }
    }

    #[test]
    fn format_depends_on_content_type_and_first_bytes() {
        for (content_type, body, expected) in [
            (Some("application/json"), "[]", Form::Json),
            (Some("Application/JSON; charset=utf-8"), "", Form::Json),
            (Some("application/vnd.api+json"), "", Form::Json),
            (Some("text/plain"), " \n{", Form::Json),
            (None, "{}", Form::Json),
            (Some("application/x-www-form-urlencoded"), "{\"a\":1}", Form::Json),
            (Some("application/x-www-form-urlencoded"), "a=1", Form::Pairs),
            (None, "a=1", Form::Pairs),
            (Some("text/plain"), "\u{feff}{}", Form::Json),
            (Some("text/plain"), "\0{\0}", Form::Json),
            (Some("text/plain"), "\n\0{\0}\0", Form::Json),
            (Some("multipart/form-data; boundary=x"), "--x", Form::Parts),
        ] {
            let form = Form::of(content_type.map(str::as_bytes), body.as_bytes());
            assert_eq!(form, expected, "{content_type:?} {body:?}");
        }
        assert_eq!(of_body(Form::Json, b" ", "email"), Ok(Field::Absent), "an empty body has no fields");
        assert_eq!(of_body(Form::Parts, b"", "email"), Ok(Field::Absent));
        assert_eq!(of_body(Form::Parts, b"--x", "email"), Ok(Field::Unread));
        for (key, name) in [("E\u{17f}K", "esk"), ("e\u{17f}\u{212a}", "ESK")] {
            assert!(differ_in_case(key, name), "{key}: Go folds the long s and the kelvin sign");
        }
    }
}
