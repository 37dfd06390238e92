//! The formats of logs: which fields a line has, and what they say about a request.

pub mod csv;
mod detect;
mod json;
mod template;

use std::fmt;

use super::logged::{Context, Logged, Role, Unit, Unreadable};
use super::time::TimeFormat;

pub use detect::{Undetected, detect};

use csv::Csv;
use json::JsonFields;
use template::Template;

/// A format of logs, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormatName {
    /// The format that the first lines have.
    Auto,
    /// nginx's and Apache's default.
    Combined,
    /// Apache's shorter one.
    Common,
    /// Caddy's JSON.
    Caddy,
    /// Traefik's JSON.
    Traefik,
    /// Envoy's default text, or JSON with the field names of its documentation.
    Envoy,
    /// Any JSON, with its fields given by `--time` and `--fact`.
    Json,
    /// Comma-separated values with a header.
    Csv,
    /// The access log of the proxy.
    Tollkeeper,
    /// A `log_format` of nginx.
    LogFormat(String),
}

impl std::str::FromStr for FormatName {
    type Err = String;

    fn from_str(text: &str) -> Result<FormatName, String> {
        Ok(match text {
            "auto" => FormatName::Auto,
            "combined" => FormatName::Combined,
            "common" => FormatName::Common,
            "caddy" => FormatName::Caddy,
            "traefik" => FormatName::Traefik,
            "envoy" => FormatName::Envoy,
            "json" => FormatName::Json,
            "csv" => FormatName::Csv,
            "tollkeeper" => FormatName::Tollkeeper,
            _ if text.contains('$') => FormatName::LogFormat(text.to_owned()),
            _ => {
                return Err("auto, combined, common, caddy, traefik, envoy, json, csv, tollkeeper, \
                            or a log_format of nginx, which has variables such as $remote_addr"
                    .to_owned());
            }
        })
    }
}

impl fmt::Display for FormatName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FormatName::Auto => "auto",
            FormatName::Combined => "combined",
            FormatName::Common => "common",
            FormatName::Caddy => "caddy",
            FormatName::Traefik => "traefik",
            FormatName::Envoy => "envoy",
            FormatName::Json => "json",
            FormatName::Csv => "csv",
            FormatName::Tollkeeper => "tollkeeper",
            FormatName::LogFormat(text) => text,
        })
    }
}

/// Where the command line says that values are.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// Facts and reserved names (`--fact NAME=FIELD`), each with its field.
    pub fields: Vec<(String, String)>,
    /// The field of the time (`--time`).
    pub time: Option<String>,
    /// How it is written (`--time-format`).
    pub time_format: Option<TimeFormat>,
    /// The facts that limits use: an access log of the proxy has them by name.
    pub used_facts: Vec<String>,
}

impl Mapping {
    /// The names of the facts that lines may set, by index.
    pub fn facts(&self) -> Vec<String> {
        let is_fact = |name: &&String| !RESERVED.contains(&name.as_str());
        let mapped = self.fields.iter().map(|(name, _)| name).filter(is_fact);
        let mut names: Vec<String> = mapped.chain(&self.used_facts).cloned().collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The role of a name in `--fact NAME=FIELD`.
    fn role(&self, name: &str) -> Role {
        match name {
            "method" => Role::Method,
            "path" => Role::Target,
            "host" => Role::Host,
            "status" => Role::Status,
            "duration" => Role::Duration(Unit::Seconds),
            _ => self.fact(name),
        }
    }

    fn fact(&self, name: &str) -> Role {
        let index = self.facts().iter().position(|fact| fact == name).expect("all are listed");
        Role::Fact(u16::try_from(index).expect("few facts"))
    }

    /// The fields of the command line with their roles.
    fn roles(&self) -> impl Iterator<Item = (&str, Role)> {
        let fields = self.fields.iter().map(|(name, field)| (field.as_str(), self.role(name)));
        let format = self.time_format.clone().unwrap_or(TimeFormat::UnixOrRfc3339);
        fields.chain(self.time.as_deref().map(|field| (field, Role::Time(format))))
    }

    /// Whether the command line says where this is, so that the format's own field is not used.
    fn replaces(&self, role: &Role) -> bool {
        let named = |name: &str| self.fields.iter().any(|(known, _)| known == name);
        match role {
            Role::Time(_) => self.time.is_some(),
            Role::Duration(_) => named("duration"),
            Role::RequestLine | Role::Target => named("path"),
            Role::Method => named("method"),
            Role::Host => named("host"),
            Role::Status => named("status"),
            _ => false,
        }
    }
}

/// Names of `--fact` that are parts of a request.
const RESERVED: [&str; 5] = ["method", "path", "host", "status", "duration"];

/// Which headers a format may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Headers {
    /// Whatever the client sent.
    All,
    /// These, by their names in lower case.
    These(Vec<String>),
}

/// What the lines of a format can say.
#[derive(Clone, Debug)]
pub struct Says {
    /// The client's address.
    pub address: bool,
    /// The method.
    pub method: bool,
    /// The path.
    pub path: bool,
    /// The query.
    pub query: bool,
    /// The host.
    pub host: bool,
    /// The status.
    pub status: bool,
    /// The duration.
    pub duration: bool,
    /// Headers.
    pub headers: Headers,
    /// Single cookies.
    pub cookies: Vec<String>,
    /// Single parameters of the query.
    pub arguments: Vec<String>,
    /// Facts that are mapped.
    pub facts: Vec<String>,
}

impl Says {
    fn of<'r>(roles: impl Iterator<Item = &'r Role>, headers: Headers, facts: &[String]) -> Says {
        let mut says = Says {
            address: false,
            method: false,
            path: false,
            query: false,
            host: false,
            status: false,
            duration: false,
            headers,
            cookies: Vec::new(),
            arguments: Vec::new(),
            facts: Vec::new(),
        };
        for role in roles {
            match role {
                Role::Time(_) => {}
                Role::Duration(_) => says.duration = true,
                Role::Peer | Role::ClientIp => says.address = true,
                Role::RequestLine => (says.method, says.path, says.query) = (true, true, true),
                Role::Method => says.method = true,
                Role::Target => (says.path, says.query) = (true, true),
                Role::Query => says.query = true,
                Role::Argument(name) => says.arguments.push(name.clone()),
                Role::Host => says.host = true,
                Role::Status => says.status = true,
                Role::Header(name) => {
                    says.address |= name == "x-forwarded-for";
                    if let Headers::These(names) = &mut says.headers {
                        names.push(name.clone());
                    }
                }
                Role::Cookie(name) => says.cookies.push(name.clone()),
                Role::Fact(index) => {
                    let name = &facts[usize::from(*index)];
                    says.address |= name == tollkeeper::facts::IP;
                    says.facts.push(name.clone());
                }
            }
        }
        says
    }
}

/// A format, ready to read lines.
#[derive(Clone, Debug)]
pub struct Format {
    /// Its name.
    pub name: FormatName,
    /// Whether its time is that of the end of a request.
    pub is_end: bool,
    shape: Shape,
}

#[derive(Clone, Debug)]
enum Shape {
    Text(Template),
    Json(JsonFields),
    /// Envoy writes either.
    TextOrJson(Template, JsonFields),
    Csv(Csv),
}

impl Format {
    /// The format of this name with the fields of the command line. The error says what is missing.
    pub fn new(name: &FormatName, mapping: &Mapping) -> Result<Format, String> {
        let shape = match name {
            FormatName::Auto => unreachable!("it is detected first"),
            FormatName::Combined => Shape::Text(Template::new(template::COMBINED, mapping)?),
            FormatName::Common => Shape::Text(Template::new(template::COMMON, mapping)?),
            FormatName::LogFormat(text) => Shape::Text(Template::new(text, mapping)?),
            FormatName::Envoy => {
                let json = json::envoy(mapping);
                // Fields of the command line may be those of only one of both.
                match Template::new(template::ENVOY, mapping) {
                    Ok(template) => Shape::TextOrJson(template, json),
                    Err(_) => Shape::Json(json),
                }
            }
            FormatName::Caddy => Shape::Json(json::caddy(mapping)),
            FormatName::Traefik => Shape::Json(json::traefik(mapping)),
            FormatName::Tollkeeper => Shape::Json(json::tollkeeper(mapping)),
            FormatName::Json => Shape::Json(json::any(mapping)?),
            FormatName::Csv => Shape::Csv(Csv::new(mapping)?),
        };
        let is_end = !matches!(name, FormatName::Traefik | FormatName::Envoy | FormatName::Tollkeeper);
        Ok(Format { name: name.clone(), is_end, shape })
    }

    /// Reads a line; false if it is a header, which says nothing.
    pub fn read(&mut self, line: &[u8], logged: &mut Logged, context: &Context) -> Result<bool, Unreadable> {
        match &mut self.shape {
            Shape::Text(template) => template.read(line, logged, context).map(|()| true),
            Shape::TextOrJson(_, json) if line.first() == Some(&b'{') => {
                json.read(line, logged, context).map(|()| true)
            }
            Shape::TextOrJson(template, _) => template.read(line, logged, context).map(|()| true),
            Shape::Json(json) => json.read(line, logged, context).map(|()| true),
            Shape::Csv(csv) => csv.read(line, logged, context),
        }
    }

    /// What its lines can say; `first` is the first line of the log.
    pub fn says(&self, first: &[u8], facts: &[String]) -> Result<Says, String> {
        Ok(match &self.shape {
            Shape::TextOrJson(_, json) if first.first() == Some(&b'{') => json.says(facts),
            Shape::Text(template) | Shape::TextOrJson(template, _) => template.says(facts),
            Shape::Json(json) => json.says(facts),
            Shape::Csv(csv) => csv.says(first, facts)?,
        })
    }

    /// Whether facts in it are already normalised and hashed.
    pub fn has_decided_facts(&self) -> bool {
        self.name == FormatName::Tollkeeper
    }
}
