//! Formats with one JSON object in each line.

use serde_json::Value;

use super::{Headers, Mapping, Says};
use crate::simulate::logged::{Context, Logged, Role, Unit, Unreadable};
use crate::simulate::time::TimeFormat;

/// The fields of a JSON format.
#[derive(Clone, Debug)]
pub(super) struct JsonFields {
    fields: Vec<(Path, Role)>,
    headers: HeaderFields,
    /// Whether a line without a request is unreadable. Programs write other messages into the same log.
    needs_request: bool,
}

/// Where a format has the headers of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderFields {
    None,
    /// An object of lists, as in Caddy's log.
    Object(&'static [&'static str]),
    /// Fields with this prefix, as in Traefik's log.
    Prefix(&'static str),
}

/// The names and indices that lead to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Path(Vec<String>);

impl Path {
    fn parse(text: &str) -> Path {
        Path(text.split('.').map(str::to_owned).collect())
    }

    fn find<'v>(&self, value: &'v Value) -> Option<&'v Value> {
        find(&self.0, value)
    }
}

fn find<'v>(path: &[String], value: &'v Value) -> Option<&'v Value> {
    let Some((first, rest)) = path.split_first() else { return Some(value) };
    match value {
        Value::Object(fields) => {
            // Some programs write names with dots: `http.method` is one name or two.
            let joined = || fields.get(&path.join(".")).filter(|_| !rest.is_empty());
            fields.get(first).and_then(|inner| find(rest, inner)).or_else(joined)
        }
        Value::Array(values) => find(rest, values.get(first.parse::<usize>().ok()?)?),
        _ => None,
    }
}

fn fields(own: &[(&str, Role)], mapping: &Mapping) -> Vec<(Path, Role)> {
    let own = own.iter().filter(|(_, role)| !mapping.replaces(role));
    let own = own.map(|(path, role)| (Path::parse(path), role.clone()));
    own.chain(mapping.roles().map(|(path, role)| (Path::parse(path), role))).collect()
}

pub(super) fn caddy(mapping: &Mapping) -> JsonFields {
    let own = [
        ("ts", Role::Time(mapping.time_format.clone().unwrap_or(TimeFormat::UnixOrRfc3339))),
        ("request.remote_ip", Role::Peer),
        ("request.remote_addr", Role::Peer),
        ("request.client_ip", Role::ClientIp),
        ("request.method", Role::Method),
        ("request.uri", Role::Target),
        ("request.host", Role::Host),
        ("status", Role::Status),
        ("duration", Role::Duration(Unit::Seconds)),
    ];
    let headers = HeaderFields::Object(&["request", "headers"]);
    JsonFields { fields: fields(&own, mapping), headers, needs_request: true }
}

pub(super) fn traefik(mapping: &Mapping) -> JsonFields {
    let own = [
        ("StartUTC", Role::Time(TimeFormat::Rfc3339)),
        ("ClientHost", Role::Peer),
        ("RequestMethod", Role::Method),
        ("RequestPath", Role::Target),
        ("RequestHost", Role::Host),
        ("DownstreamStatus", Role::Status),
        ("Duration", Role::Duration(Unit::Nanos)),
    ];
    let headers = HeaderFields::Prefix("request_");
    JsonFields { fields: fields(&own, mapping), headers, needs_request: true }
}

pub(super) fn envoy(mapping: &Mapping) -> JsonFields {
    let own = [
        ("start_time", Role::Time(TimeFormat::Rfc3339)),
        ("downstream_remote_address", Role::Peer),
        ("x_forwarded_for", Role::Header("x-forwarded-for".to_owned())),
        ("method", Role::Method),
        ("path", Role::Target),
        ("authority", Role::Host),
        ("user_agent", Role::Header("user-agent".to_owned())),
        ("response_code", Role::Status),
        ("duration", Role::Duration(Unit::Millis)),
    ];
    JsonFields { fields: fields(&own, mapping), headers: HeaderFields::None, needs_request: true }
}

/// The access log of the proxy, with all facts as they were decided by.
pub(super) fn tollkeeper(mapping: &Mapping) -> JsonFields {
    let own = [
        ("t", Role::Time(TimeFormat::UnixMicros)),
        ("ip", Role::Peer),
        ("method", Role::Method),
        ("path", Role::Target),
        ("host", Role::Host),
        ("status", Role::Status),
        ("duration", Role::Duration(Unit::Micros)),
    ];
    let facts = mapping.used_facts.iter().map(|name| {
        let path = Path(vec!["facts".to_owned(), name.clone()]);
        (path, mapping.fact(name))
    });
    let fields = fields(&own, mapping).into_iter().chain(facts).collect();
    JsonFields { fields, headers: HeaderFields::None, needs_request: true }
}

/// Any JSON: only what the command line says.
pub(super) fn any(mapping: &Mapping) -> Result<JsonFields, String> {
    if mapping.time.is_none() {
        return Err("--format json needs --time FIELD: which field is the time?".to_owned());
    }
    Ok(JsonFields { fields: fields(&[], mapping), headers: HeaderFields::None, needs_request: false })
}

impl JsonFields {
    pub(super) fn says(&self, facts: &[String]) -> Says {
        let headers = match self.headers {
            HeaderFields::None => Headers::These(Vec::new()),
            _ => Headers::All,
        };
        Says::of(self.fields.iter().map(|(_, role)| role), headers, facts)
    }

    pub(super) fn read(&self, line: &[u8], logged: &mut Logged, context: &Context) -> Result<(), Unreadable> {
        let object: Value = serde_json::from_slice(line).map_err(|_| Unreadable::Json)?;
        if !object.is_object() {
            return Err(Unreadable::Json);
        }
        let (mut has_peer, mut has_target) = (false, false);
        for (path, role) in &self.fields {
            let Some(value) = path.find(&object) else { continue };
            // Caddy has had two names for the peer.
            if *role == Role::Peer && std::mem::replace(&mut has_peer, true) {
                continue;
            }
            let text;
            let value = match value {
                Value::String(text) if text.is_empty() || text == "-" => continue,
                Value::String(text) => text.as_bytes(),
                Value::Number(_) | Value::Bool(_) => {
                    text = value.to_string();
                    text.as_bytes()
                }
                _ => continue,
            };
            has_target |= *role == Role::Target;
            logged.set(role, value, context)?;
        }
        if self.needs_request && !has_target {
            return Err(Unreadable::Shape);
        }
        self.read_headers(&object, logged, context)
    }

    fn read_headers(&self, object: &Value, logged: &mut Logged, context: &Context) -> Result<(), Unreadable> {
        match self.headers {
            HeaderFields::None => {}
            HeaderFields::Object(path) => {
                let headers = path.iter().try_fold(object, |value, name| value.get(name));
                for (name, values) in headers.and_then(Value::as_object).into_iter().flatten() {
                    let name = name.to_ascii_lowercase();
                    for value in values.as_array().into_iter().flatten().filter_map(Value::as_str) {
                        // Caddy writes this instead of cookies and credentials, unless it is told to log them.
                        if value != "REDACTED" && name != "host" {
                            logged.set(&Role::Header(name.clone()), value.as_bytes(), context)?;
                        }
                    }
                }
            }
            HeaderFields::Prefix(prefix) => {
                for (name, value) in object.as_object().into_iter().flatten() {
                    if let (Some(name), Some(value)) = (name.strip_prefix(prefix), value.as_str()) {
                        let name = name.to_ascii_lowercase();
                        if name != "host" {
                            logged.set(&Role::Header(name), value.as_bytes(), context)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::logged::{Part, WantedHeaders};

    fn read(fields: &JsonFields, line: &str) -> Result<String, Unreadable> {
        let wanted = WantedHeaders::new(vec!["x-user".to_owned()]);
        let facts = vec!["user".to_owned()];
        let context = Context { latest: u64::MAX, wanted, facts, ..Context::default() };
        let mut logged = Logged::default();
        fields.read(line.as_bytes(), &mut logged, &context)?;
        let stamp = logged.finish(&context)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let parts = logged.parts().map(|(part, bytes)| match part {
            Part::Header(_) => format!("x-user: {}", text(bytes)),
            _ => text(bytes),
        });
        let parts: Vec<String> = parts.collect();
        let peer = logged.peer.map_or("-".to_owned(), |peer| peer.to_string());
        let numbers = (logged.status.unwrap_or(0), logged.duration.unwrap_or(0));
        Ok(format!("{peer} {} {} {} {}", stamp.micros, parts.join(" "), numbers.0, numbers.1))
    }

    #[test]
    fn lines_of_caddy_are_read() {
        let line = r#"{"level":"info","ts":1794828545.25,"logger":"http.log.access","msg":"handled request",
            "request":{"remote_ip":"192.0.2.7","remote_port":"4711","client_ip":"192.0.2.7","proto":"HTTP/1.1",
            "method":"GET","host":"localhost:8080","uri":"/a?b=c","headers":{"X-User":["alice"],
            "Authorization":["REDACTED"],"Accept":["*/*"]}},"bytes_read":0,"duration":0.000123,"status":200}"#;
        let expected = "192.0.2.7 1794828545250000 GET /a?b=c localhost:8080 x-user: alice 200 123";
        assert_eq!(read(&caddy(&Mapping::default()), line).as_deref(), Ok(expected));
        let other = r#"{"level":"info","ts":1794828545.25,"msg":"serving initial configuration"}"#;
        assert_eq!(read(&caddy(&Mapping::default()), other), Err(Unreadable::Shape));
    }

    /// The sample has the fields and the form of Traefik's documentation: Traefik itself is not available as a package.
    #[test]
    fn lines_of_traefik_are_read() {
        let line = r#"{"ClientAddr":"192.0.2.7:4711","ClientHost":"192.0.2.7","DownstreamStatus":404,"Duration":1500000,
            "RequestHost":"api.example.test","RequestMethod":"POST","RequestPath":"/a?b=c","request_X-User":"alice",
            "StartLocal":"2026-11-16T12:29:05.25+01:00","StartUTC":"2026-11-16T11:29:05.25Z","level":"info","msg":""}"#;
        let expected = "192.0.2.7 1794828545250000 POST /a?b=c api.example.test x-user: alice 404 1500";
        assert_eq!(read(&traefik(&Mapping::default()), line).as_deref(), Ok(expected));
    }

    #[test]
    fn lines_of_envoy_are_read() {
        let line = r#"{"start_time":"2026-11-16T11:29:05.250Z","method":"GET","path":"/a","authority":"api",
            "downstream_remote_address":"192.0.2.7:4711","x_forwarded_for":null,"response_code":200,"duration":12}"#;
        let expected = "192.0.2.7 1794828545250000 GET /a api 200 12000";
        assert_eq!(read(&envoy(&Mapping::default()), line).as_deref(), Ok(expected));
    }

    #[test]
    fn paths_lead_through_objects_and_lists() {
        let fields =
            vec![("user".into(), "request.headers.X-User.0".into()), ("status".into(), "http.status".into())];
        let mapping = Mapping { fields, time: Some("time".into()), ..Mapping::default() };
        let line = r#"{"time":"2026-11-16T11:29:05Z","request":{"headers":{"X-User":["alice","bob"]}},"http.status":201}"#;
        assert_eq!(read(&any(&mapping).unwrap(), line).as_deref(), Ok("- 1794828545000000 alice 201 0"));
    }

    #[test]
    fn broken_json_is_unreadable() {
        let caddy = caddy(&Mapping::default());
        let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
        for line in ["", "{", "[]", "1", "{\"ts\":1}x", &deep, "{\"a\":\"\u{0}\"}"] {
            assert!(read(&caddy, line).is_err(), "{line:.20}");
        }
    }
}
