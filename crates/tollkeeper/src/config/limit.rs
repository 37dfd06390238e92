//! Reads one limit of the file into typed values with their positions.

use std::cell::RefCell;
use std::time::Duration;

use tollkeeper_core::{Algorithm, Consistency, CostMissing, Missing, Mode, OnStoreFailure};

use super::document::{MapEntry, Node, Value};
use super::effective_limit::{ResponseCondition, StatusPattern};
use super::excerpt::quoted;
use super::fields::{Fields, Located, RawRate, Scope};
use super::key_table::{self, Section};
use super::report::{Position, Problems};
use super::units::{self, InvalidValue};

/// A limit of the file: typed values with their positions, not yet checked against each other.
#[derive(Debug)]
pub(super) struct RawLimit {
    pub(super) position: Position,
    /// The beginning of messages about it, such as ``limit `login`: ``.
    pub(super) subject: String,
    pub(super) name: Option<Located<String>>,
    pub(super) by: Vec<Located<String>>,
    pub(super) when: Vec<Located<(String, Vec<String>)>>,
    pub(super) unless: Vec<Located<(String, Vec<String>)>>,
    pub(super) grant: RawGrant,
    pub(super) algorithm: Choice<Algorithm>,
    pub(super) ttl: Option<Located<Duration>>,
    pub(super) tier: Option<Located<String>>,
    pub(super) tiers: Option<Grants>,
    pub(super) default_tier: Option<Located<String>>,
    pub(super) overrides: Option<Grants>,
    pub(super) allow: Vec<Located<String>>,
    pub(super) missing: Missing,
    pub(super) cost: Option<Located<String>>,
    /// `None` if the file does not set it.
    pub(super) cost_missing: Option<Located<CostMissing>>,
    pub(super) mode: Mode,
    pub(super) stagger: Option<Located<bool>>,
    pub(super) on_store_failure: Option<OnStoreFailure>,
    /// `consistency: leased`.
    pub(super) leased: Option<Located<&'static str>>,
    pub(super) headers: bool,
    pub(super) deduct_when: Option<Located<ResponseCondition>>,
    pub(super) refund_when: Option<Located<ResponseCondition>>,
    pub(super) partition: Option<Located<String>>,
}

impl RawLimit {
    /// Whether the store is asked for every request.
    pub(super) fn consistency(&self) -> Consistency {
        if self.leased.is_some() { Consistency::Leased } else { Consistency::Exact }
    }
}

/// The value of a choice. An invalid value is not the same as an absent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice<T> {
    Absent,
    Invalid,
    Made(T),
}

/// The rate, burst or number of slots of a limit, a tier or an override, as in the file.
#[derive(Debug)]
pub(super) struct RawGrant {
    pub(super) position: Position,
    pub(super) rate: Option<Located<RawRate>>,
    pub(super) burst: Option<Located<u64>>,
    pub(super) limit: Option<Located<u64>>,
    /// Whether a value was invalid and has been reported: then no missing value is reported.
    pub(super) broken: bool,
}

/// Tiers or overrides.
#[derive(Debug)]
pub(super) struct Grants {
    /// The position of the key `tiers` or `overrides`.
    pub(super) position: Position,
    /// The grants with their names.
    pub(super) list: Vec<(Located<String>, RawGrant)>,
    /// Whether the value is not a table, which has been reported.
    pub(super) broken: bool,
}

impl RawLimit {
    /// Reads one element of `limits`; `number` counts from 1.
    pub(super) fn read(node: &Node, number: usize, problems: &RefCell<Problems>) -> Option<RawLimit> {
        let subject = match name_in(node) {
            Some(name) => format!("limit {}: ", quoted(name)),
            None => format!("limit {number}: "),
        };
        let fields = Fields::open(node, &key_table::LIMIT, Scope::of(&subject), problems)?;
        let name = fields.text("name");
        if !fields.has("name") {
            fields.error(node.position, format!("limit {number} has no name"), "such as `name: per-user`");
        }
        let algorithm = match fields.choice("algorithm") {
            Some(located) => {
                Choice::Made(Algorithm::from_name(located.value).expect("the key table lists the algorithms"))
            }
            None if fields.has("algorithm") => Choice::Invalid,
            None => Choice::Absent,
        };
        if let Some(replicas) = fields.count("wait_replicas")
            && replicas.value > 0
        {
            fields.error(
                replicas.position,
                format!("{subject}`wait_replicas` is not supported yet"),
                "leave it out",
            );
        }
        Some(RawLimit {
            position: node.position,
            name,
            by: fields.parse_list("by", any_text),
            when: fields.condition("when"),
            unless: fields.condition("unless"),
            grant: read_grant(&fields),
            algorithm,
            ttl: fields.has("ttl").then(|| fields.duration("ttl")).flatten(),
            tier: fields.parse("tier", any_text),
            tiers: grants(&fields, "tiers", "tier", &subject, problems),
            default_tier: fields.value("default_tier"),
            overrides: grants(&fields, "overrides", "override", &subject, problems),
            allow: fields.value_list("allow"),
            missing: match fields.choice("missing").map(|located| located.value) {
                Some("share") => Missing::Share,
                Some("deny") => Missing::Deny,
                _ => Missing::Skip,
            },
            cost: fields.parse("cost", any_text),
            cost_missing: fields
                .has("cost_missing")
                .then(|| fields.parse("cost_missing", cost_missing))
                .flatten(),
            mode: match fields.choice("mode").map(|located| located.value) {
                Some("shadow") => Mode::Shadow,
                Some("off") => Mode::Off,
                _ => Mode::Enforce,
            },
            stagger: fields.bool("stagger").filter(|located| located.value),
            on_store_failure: fields
                .choice("on_store_failure")
                .map(|located| on_store_failure(located.value)),
            leased: fields.choice("consistency").filter(|located| located.value == "leased"),
            headers: fields.bool("headers").is_none_or(|located| located.value),
            deduct_when: response(&fields, "deduct_when"),
            refund_when: response(&fields, "refund_when"),
            partition: fields.parse("partition", any_text),
            subject,
        })
    }
}

/// Parses `cost_missing`. The core checks the upper bound of a number.
fn cost_missing(text: &str) -> Result<CostMissing, InvalidValue> {
    match text {
        "error" => Ok(CostMissing::Error),
        "skip" => Ok(CostMissing::Skip),
        number => units::count(number).map(CostMissing::Charge).map_err(|_| {
            let message = format!("`cost_missing` cannot be {}", quoted(number));
            InvalidValue::new(message, "`error`, `skip`, or the number to charge")
        }),
    }
}

/// Parses `on_store_failure`.
pub(super) fn on_store_failure(word: &str) -> OnStoreFailure {
    match word {
        "allow" => OnStoreFailure::Allow,
        "deny" => OnStoreFailure::Deny,
        _ => OnStoreFailure::Local,
    }
}

/// Accepts any text: the core checks names.
#[expect(clippy::unnecessary_wraps, reason = "passed where a fallible parser is expected")]
pub(super) fn any_text(text: &str) -> Result<String, InvalidValue> {
    Ok(text.to_owned())
}

/// The name of a limit for messages, before it is checked.
fn name_in(node: &Node) -> Option<&str> {
    let Value::Table(entries) = &node.value else { return None };
    let entry = entries.iter().find(|entry| entry.key == "name")?;
    match &entry.node.value {
        Value::Scalar(scalar) if !scalar.shown().is_empty() => Some(scalar.shown()),
        _ => None,
    }
}

/// Reads `rate`, `burst` and `limit` of a limit, a tier or an override.
fn read_grant(fields: &Fields<'_>) -> RawGrant {
    let (rate, burst, limit) = (fields.rate("rate"), fields.count("burst"), fields.count("limit"));
    let broken = (rate.is_none() && fields.has("rate"))
        || (burst.is_none() && fields.has("burst"))
        || (limit.is_none() && fields.has("limit"));
    RawGrant { position: fields.position, rate, burst, limit, broken }
}

fn grants(
    fields: &Fields<'_>,
    key: &str,
    what: &str,
    subject: &str,
    problems: &RefCell<Problems>,
) -> Option<Grants> {
    let position = fields.key_position(key)?;
    let grant = |entry: &MapEntry| {
        let scope = Scope::of(format!("{subject}{what} {}: ", quoted(&entry.key)));
        let name = Located { value: entry.key.clone(), position: entry.position, unexpanded: None };
        (name, grant_of(&entry.node, &key_table::GRANT, scope, problems))
    };
    let list = fields.map(key).into_iter().map(grant).collect();
    Some(Grants { position, list, broken: !fields.is_table(key) })
}

/// Reads a grant that is a rate or a table.
fn grant_of(node: &Node, section: &'static Section, scope: Scope, problems: &RefCell<Problems>) -> RawGrant {
    match &node.value {
        Value::Table(_) => match Fields::open(node, section, scope, problems) {
            Some(fields) => read_grant(&fields),
            None => unreachable!("a table can be opened"),
        },
        _ => {
            let rate = Fields::none(node.position, section, scope, problems).rate_of(node);
            RawGrant { position: node.position, broken: rate.is_none(), rate, burst: None, limit: None }
        }
    }
}

fn response(fields: &Fields<'_>, key: &str) -> Option<Located<ResponseCondition>> {
    let position = fields.key_position(key)?;
    let table = fields.table(key);
    let status: Vec<StatusPattern> =
        table.parse_list("status", read_status).into_iter().map(|located| located.value).collect();
    if !table.has("status") {
        fields.subject_error(
            position,
            &format!("`{key}` has no `status`"),
            "such as `{ status: [401, 5xx] }`",
        );
    }
    Some(Located { value: ResponseCondition { status }, position, unexpanded: None })
}

fn read_status(text: &str) -> Result<StatusPattern, InvalidValue> {
    let class = text.strip_suffix("xx").and_then(|class| class.parse::<u8>().ok());
    match (class, text.parse::<u16>()) {
        (Some(class @ 1..=5), _) => Ok(StatusPattern::Class(class)),
        (None, Ok(code @ 100..=599)) if text.len() == 3 => Ok(StatusPattern::Code(code)),
        _ => Err(InvalidValue::new(
            format!("{} is not an HTTP status", quoted(text)),
            "such as `401`, or `5xx` for a class",
        )),
    }
}
