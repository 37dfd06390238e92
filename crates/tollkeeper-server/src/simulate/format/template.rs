//! Text formats, written as a `log_format` of nginx: variables with text between them.

use super::{Headers, Mapping, Says};
use crate::simulate::logged::{Context, Logged, Role, Unit, Unreadable};
use crate::simulate::time::TimeFormat;

/// The default of nginx and Apache. `$identity` is `-` nearly everywhere.
pub(super) const COMBINED: &str = r#"$remote_addr $identity $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent""#;
/// Apache's `common`.
pub(super) const COMMON: &str =
    r#"$remote_addr $identity $remote_user [$time_local] "$request" $status $body_bytes_sent"#;
/// Envoy's default.
pub(super) const ENVOY: &str = r#"[$start_time] "$request" $status $response_flags $bytes_received $bytes_sent $duration_ms $upstream_service_time "$http_x_forwarded_for" "$http_user_agent" "$request_id" "$host" "$upstream_host""#;

/// A compiled text format.
#[derive(Clone, Debug)]
pub(super) struct Template {
    /// The text before the first variable.
    start: Vec<u8>,
    fields: Vec<Field>,
}

/// A variable and the text after it.
#[derive(Clone, Debug)]
struct Field {
    name: String,
    roles: Vec<Role>,
    /// The text up to the next variable; empty only at the end of the line.
    end: Vec<u8>,
    /// Whether the variable is in quotes, so that it ends at a quote that is not escaped.
    quoted: bool,
}

impl Template {
    /// Compiles a format, with the fields of the command line.
    pub(super) fn new(text: &str, mapping: &Mapping) -> Result<Template, String> {
        let (start, mut fields) = split(text)?;
        let names: Vec<String> = fields.iter().map(|field| field.name.clone()).collect();
        for field in &mut fields {
            field.roles.extend(role(&field.name, &names).filter(|role| !mapping.replaces(role)));
        }
        let mut roles: Vec<Role> = Vec::new();
        for field in &mut fields {
            // nginx has several variables for the host and the path; the first one is used.
            let is_single = |role: &Role| matches!(role, Role::Host | Role::Target | Role::Peer);
            field.roles.retain(|role| !(is_single(role) && roles.contains(role)));
            roles.extend(field.roles.iter().cloned());
        }
        for (name, role) in mapping.roles() {
            let name = name.trim_start_matches('$');
            let Some(field) = fields.iter_mut().find(|field| field.name == name) else {
                let known: Vec<String> = names.iter().map(|name| format!("${name}")).collect();
                return Err(format!("the format has no `${name}` (it has {})", known.join(", ")));
            };
            // The time of an nginx log without --time-format is written as its variable is.
            let role = match (&role, self::role(name, &[]).next()) {
                (Role::Time(_), Some(Role::Time(own))) if mapping.time_format.is_none() => Role::Time(own),
                _ => role,
            };
            field.roles.push(role);
        }
        let all = || fields.iter().flat_map(|field| &field.roles);
        if !all().any(|role| matches!(role, Role::Time(_))) {
            return Err(
                "the format has no time: it needs $time_local, $time_iso8601 or $msec, or --time".to_owned()
            );
        }
        Ok(Template { start, fields })
    }

    pub(super) fn says(&self, facts: &[String]) -> Says {
        let roles = self.fields.iter().flat_map(|field| &field.roles);
        Says::of(roles, Headers::These(Vec::new()), facts)
    }

    pub(super) fn read(&self, line: &[u8], logged: &mut Logged, context: &Context) -> Result<(), Unreadable> {
        let mut rest = line.strip_prefix(self.start.as_slice()).ok_or(Unreadable::Shape)?;
        for field in &self.fields {
            let end = field.end_in(rest).ok_or(Unreadable::Shape)?;
            let value = &rest[..end];
            rest = &rest[end + field.end.len()..];
            if value == b"-" || value.is_empty() {
                continue;
            }
            for role in &field.roles {
                logged.set_escaped(role, value, context)?;
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(Unreadable::Shape) }
    }
}

impl Field {
    /// Where the value at the start of `rest` ends.
    #[inline]
    fn end_in(&self, rest: &[u8]) -> Option<usize> {
        let Some(first) = self.end.first() else {
            // A number at the end of the line: what follows it belongs to another format.
            let is_number = self.name.ends_with("bytes_sent");
            return (!is_number || memchr::memchr(b' ', rest).is_none()).then_some(rest.len());
        };
        let mut from = 0;
        loop {
            let at = from + memchr::memchr(*first, &rest[from..])?;
            let is_escaped = self.quoted
                && rest[..at].last() == Some(&b'\\')
                && rest[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
            if !is_escaped && rest[at..].starts_with(&self.end) {
                return Some(at);
            }
            from = at + 1;
        }
    }
}

/// The text before the first variable, and the variables.
fn split(text: &str) -> Result<(Vec<u8>, Vec<Field>), String> {
    let mut pieces = text.split('$');
    let start = pieces.next().unwrap_or_default().as_bytes().to_vec();
    let mut fields: Vec<Field> = Vec::new();
    for piece in pieces {
        let (name, end) = match piece.strip_prefix('{') {
            Some(rest) => rest.split_once('}').ok_or_else(|| format!("`${piece}` has no closing brace"))?,
            None => {
                let length =
                    piece.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(piece.len());
                piece.split_at(length)
            }
        };
        if name.is_empty() {
            return Err("`$` without the name of a variable".to_owned());
        }
        if let Some(last) = fields.last().filter(|last| last.end.is_empty()) {
            return Err(format!("nothing separates `${}` from `${name}`", last.name));
        }
        let before = fields.last().map_or(&start, |field| &field.end);
        let quoted = before.ends_with(b"\"") && end.starts_with('"');
        fields.push(Field { name: name.to_owned(), roles: Vec::new(), end: end.as_bytes().to_vec(), quoted });
    }
    Ok((start, fields))
}

/// What a variable says. `all` are the variables of the format: some are used only if better ones are missing.
fn role(name: &str, all: &[String]) -> impl Iterator<Item = Role> {
    let has = |names: &[&str]| all.iter().any(|known| names.contains(&known.as_str()));
    let role = match name {
        "msec" => Some(Role::Time(TimeFormat::Unix)),
        "time_local" if !has(&["msec"]) => Some(Role::Time(TimeFormat::Clf)),
        "time_iso8601" if !has(&["msec", "time_local"]) => Some(Role::Time(TimeFormat::Rfc3339)),
        "start_time" => Some(Role::Time(TimeFormat::Rfc3339)),
        "request_time" => Some(Role::Duration(Unit::Seconds)),
        "duration_ms" => Some(Role::Duration(Unit::Millis)),
        "realip_remote_addr" => Some(Role::Peer),
        // With nginx's realip module, this is the client, and the other one the peer.
        "remote_addr" if has(&["realip_remote_addr"]) => Some(Role::ClientIp),
        "remote_addr" => Some(Role::Peer),
        "request" => Some(Role::RequestLine),
        "request_method" if !has(&["request"]) => Some(Role::Method),
        "request_uri" if !has(&["request"]) => Some(Role::Target),
        "uri" | "document_uri" if !has(&["request", "request_uri"]) => Some(Role::Target),
        "args" | "query_string" if !has(&["request", "request_uri"]) => Some(Role::Query),
        "host" | "http_host" => Some(Role::Host),
        "status" => Some(Role::Status),
        "proxy_add_x_forwarded_for" => Some(Role::Header("x-forwarded-for".to_owned())),
        _ => None,
    };
    let prefixed = |prefix: &str| name.strip_prefix(prefix).filter(|rest| !rest.is_empty());
    role.or_else(|| prefixed("http_").map(|header| Role::Header(header.replace('_', "-"))))
        .or_else(|| prefixed("cookie_").map(|cookie| Role::Cookie(cookie.to_owned())))
        .or_else(|| prefixed("arg_").map(|argument| Role::Argument(argument.to_owned())))
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::logged::Part;

    fn context() -> Context {
        Context { latest: u64::MAX, facts: vec!["user".to_owned()], ..Context::default() }
    }

    /// Peer, stamp in microseconds, parts and status of a line.
    fn read(format: &str, line: &str) -> Result<String, Unreadable> {
        let mapping = Mapping { fields: vec![], ..Mapping::default() };
        let template = Template::new(format, &mapping).expect("a format");
        let (mut logged, context) = (Logged::default(), context());
        template.read(line.as_bytes(), &mut logged, &context)?;
        let stamp = logged.finish(&context)?;
        let text = |part| {
            let found = logged.parts().find(|(known, _)| *known == part);
            found.map_or("-".to_owned(), |(_, bytes)| String::from_utf8_lossy(bytes).into_owned())
        };
        let status = logged.status.map_or(0, u16::into);
        let peer = logged.peer.map_or("-".to_owned(), |peer| peer.to_string());
        Ok(format!("{peer} {} {} {} {status}", stamp.micros, text(Part::Method), text(Part::Target)))
    }

    #[test]
    fn combined_lines_are_read() {
        let line = r#"192.0.2.7 - - [16/Nov/2026:11:29:05 +0000] "GET /a?b=c HTTP/1.1" 200 12 "-" "curl/8""#;
        assert_eq!(read(COMBINED, line).as_deref(), Ok("192.0.2.7 1794828545000000 GET /a?b=c 200"));
        assert_eq!(read(COMMON, line), Err(Unreadable::Shape), "it has more fields");
        let common = r#"2001:db8::1 - frank [16/Nov/2026:11:29:05 +0000] "HEAD / HTTP/1.0" 304 -"#;
        assert_eq!(read(COMMON, common).as_deref(), Ok("2001:db8::1 1794828545000000 HEAD / 304"));
    }

    #[test]
    fn quotes_in_values_are_escaped() {
        let nginx =
            r#"192.0.2.7 - - [16/Nov/2026:11:29:05 +0000] "GET /\x22 HTTP/1.1" 200 12 "-" "a\x22 \x22b""#;
        assert_eq!(read(COMBINED, nginx).as_deref(), Ok("192.0.2.7 1794828545000000 GET /\" 200"));
        let apache = r#"192.0.2.7 - - [16/Nov/2026:11:29:05 +0000] "GET / HTTP/1.1" 200 12 "-" "a\" \"b\\""#;
        assert_eq!(read(COMBINED, apache).as_deref(), Ok("192.0.2.7 1794828545000000 GET / 200"));
        let unescaped = r#"192.0.2.7 - - [16/Nov/2026:11:29:05 +0000] "GET / HTTP/1.1" 200 12 "-" "a" "b""#;
        assert_eq!(read(COMBINED, unescaped), Err(Unreadable::Shape));
    }

    #[test]
    fn envoy_line_has_the_forwarded_address() {
        let line = r#"[2026-11-16T11:29:05.250Z] "POST /a HTTP/1.1" 503 UF 0 95 16 - "192.0.2.1, 192.0.2.7" "curl/8" "f5" "api.example.test" "-""#;
        assert_eq!(read(ENVOY, line).as_deref(), Ok("192.0.2.7 1794828545250000 POST /a 503"));
    }

    #[test]
    fn milliseconds_win_over_whole_seconds() {
        let format = "$remote_addr [$time_local] $msec $request_method $uri?$args $status";
        let line = "192.0.2.7 [16/Nov/2026:11:29:05 +0000] 1794828545.250 GET /a?b=c 200";
        assert_eq!(read(format, line).as_deref(), Ok("192.0.2.7 1794828545250000 GET /a?b=c 200"));
        let realip = "$realip_remote_addr $remote_addr $msec";
        assert_eq!(read(realip, "10.0.0.1 192.0.2.7 1.5").as_deref(), Ok("10.0.0.1 1500000 - - 0"));
    }

    #[test]
    fn invalid_formats_are_rejected() {
        let error = |format: &str| Template::new(format, &Mapping::default()).expect_err("invalid");
        assert_eq!(error("$remote_addr$status"), "nothing separates `$remote_addr` from `$status`");
        assert_eq!(error("$ x"), "`$` without the name of a variable");
        assert_eq!(error("${x"), "`${x` has no closing brace");
        assert!(error("$remote_addr $status").starts_with("the format has no time"));
        let mapping = Mapping { fields: vec![("user".into(), "$http_x".into())], ..Mapping::default() };
        let error = Template::new("$msec $status", &mapping).expect_err("no such variable");
        assert_eq!(error, "the format has no `$http_x` (it has $msec, $status)");
    }
}
