//! Reads typed values from the tables of a file, as the [key table](super::key_table) defines them.
//!
//! An invalid value is reported at once and then treated as absent, so that reading continues and one report
//! holds all errors.

use std::cell::RefCell;
use std::collections::HashSet;
use std::time::Duration;

use tollkeeper_core::Span;

use super::document::{MapEntry, Node, Scalar, ScalarKind, Value};
use super::excerpt::quoted;
use super::key_table::{self, Key, KeyKind, Section};
use super::report::{Position, Problems};
use super::suggest::nearest;
use super::units::{self, InvalidValue, Rate, Share};
use super::yaml;
use crate::percent::Percent;

/// A value with its position in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Located<T> {
    pub(super) value: T,
    pub(super) position: Position,
    /// The text in the file, such as `${RATE}/s`, if environment variables were expanded. Messages show it instead
    /// of the value, which may be a secret.
    pub(super) unexpanded: Option<String>,
}

impl<T> Located<T> {
    fn at(node: &Node, value: T) -> Located<T> {
        let unexpanded =
            if let Value::Scalar(scalar) = &node.value { scalar.unexpanded.clone() } else { None };
        Located { value, position: node.position, unexpanded }
    }
}

/// A table of the file whose keys have been checked.
pub(super) struct Fields<'d> {
    scope: Scope,
    found: Vec<(&'static Key, &'d MapEntry)>,
    section: &'static Section,
    problems: &'d RefCell<Problems>,
    /// The position of the table.
    pub(super) position: Position,
}

/// The prefix of messages about a table.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    /// The subject of the message: ``limit `login`: ``.
    subject: String,
    /// The prefix of a key: `memory.`.
    path: String,
}

impl Scope {
    /// The scope of a limit, a tier, a fact and the like.
    pub(super) fn of(subject: impl Into<String>) -> Scope {
        Scope { subject: subject.into(), path: String::new() }
    }

    fn inside(&self, key: &str) -> Scope {
        Scope { subject: self.subject.clone(), path: format!("{}{key}.", self.path) }
    }

    /// The name of the table in messages.
    fn table(&self) -> String {
        match (self.subject.trim_end_matches(": "), self.path.trim_end_matches('.')) {
            ("", "") => "the file".to_owned(),
            (subject, "") => subject.to_owned(),
            (_, path) => format!("{}`{path}`", self.subject),
        }
    }

    /// The name of a key in messages.
    fn name(&self, key: &str) -> String {
        format!("{}`{}{key}`", self.subject, self.path)
    }

    /// The prefix of a message about the value of a key. With a subject, the key is left out: it is underlined.
    fn before(&self, key: &str) -> String {
        if self.subject.is_empty() { format!("{}: ", self.name(key)) } else { self.subject.clone() }
    }
}

/// A value that is being read, with its expected kind and the key that messages show.
#[derive(Clone, Copy)]
struct Item<'n> {
    node: &'n Node,
    kind: &'static KeyKind,
    key: &'n str,
}

impl<'d> Fields<'d> {
    /// Checks the keys of a table; `None` if the value is not a table.
    pub(super) fn open(
        node: &'d Node,
        section: &'static Section,
        scope: Scope,
        problems: &'d RefCell<Problems>,
    ) -> Option<Fields<'d>> {
        let mut fields = Fields { scope, found: Vec::new(), section, problems, position: node.position };
        let entries = match &node.value {
            Value::Table(entries) => entries,
            _ => {
                let example = if section.path.is_empty() { "limits" } else { section.keys[0].name };
                fields.report_wrong_kind(
                    node,
                    &fields.scope.table(),
                    "a table",
                    &format!("keys with values, such as `{example}`"),
                );
                return None;
            }
        };
        for entry in entries {
            let Some(key) = section.find(&entry.key) else {
                fields.unknown(entry);
                continue;
            };
            if fields.found.iter().any(|(known, _)| known.name == key.name) {
                fields.duplicate(entry);
                continue;
            }
            fields.found.push((key, entry));
        }
        Some(fields)
    }

    /// A table that is absent from the file: every key has its default.
    pub(super) fn none(
        position: Position,
        section: &'static Section,
        scope: Scope,
        problems: &'d RefCell<Problems>,
    ) -> Fields<'d> {
        Fields { scope, found: Vec::new(), section, problems, position }
    }

    fn unknown(&self, entry: &MapEntry) {
        if self.problems.borrow().is_full() {
            // Looking for similar keys would take too long in a file with thousands of errors.
            return self.problems.borrow_mut().count();
        }
        let known = self.section.keys.iter().map(|key| key.name);
        let help = match nearest(&entry.key, known.clone()) {
            _ if std::ptr::eq(self.section, &key_table::GRANT)
                && key_table::LIMIT.find(&entry.key).is_some() =>
            {
                "it belongs to the limit, not to a tier or an override".to_owned()
            }
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known keys: {}", list(known)),
        };
        let whole = if self.section.path.is_empty() { String::new() } else { self.scope.table() + ": " };
        self.error(entry.position, format!("{whole}unknown key {}", quoted(&entry.key)), help);
    }

    fn duplicate(&self, entry: &MapEntry) {
        self.error(
            entry.position,
            format!("{}duplicate key {}", self.scope.subject, quoted(&entry.key)),
            "keep one",
        );
    }

    /// The position of a key; `None` if it is absent.
    pub(super) fn key_position(&self, key: &str) -> Option<Position> {
        self.entry(key).map(|entry| entry.position)
    }

    /// The position of the value of a key, or of the table if the key is absent.
    pub(super) fn value_position(&self, key: &str) -> Position {
        self.entry(key).map_or(self.position, |entry| entry.node.position)
    }

    /// Whether the value of a key is a table.
    pub(super) fn is_table(&self, key: &str) -> bool {
        self.entry(key).is_some_and(|entry| matches!(entry.node.value, Value::Table(_)))
    }

    /// Whether a key is present, whatever its value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.entry(key).is_some()
    }

    /// Whether a key is absent or an empty list.
    pub(super) fn is_empty_list(&self, key: &str) -> bool {
        self.entry(key)
            .is_none_or(|entry| matches!(&entry.node.value, Value::List(nodes) if nodes.is_empty()))
    }

    /// The table of a key; with its defaults if it is absent.
    pub(super) fn table(&self, key: &str) -> Fields<'d> {
        let KeyKind::Table(section) = self.key(key).kind else { panic!("`{key}` is not a table") };
        let scope = self.scope.inside(key);
        let entry = self.entry(key);
        let read = entry.and_then(|entry| Fields::open(&entry.node, section, scope.clone(), self.problems));
        read.unwrap_or_else(|| Fields::none(self.position, section, scope, self.problems))
    }

    /// The nodes of a list of tables.
    pub(super) fn nodes(&self, key: &str) -> &'d [Node] {
        match self.entry(key).map(|entry| &entry.node) {
            Some(Node { value: Value::List(nodes), .. }) => nodes,
            Some(node) => {
                self.report_wrong_kind(
                    node,
                    &self.scope.name(key),
                    "a list",
                    "a list of tables, such as `- name: per-ip`",
                );
                &[]
            }
            None => &[],
        }
    }

    /// The entries of a map. Duplicate names are reported and left out.
    pub(super) fn map(&self, key: &str) -> Vec<&'d MapEntry> {
        let Some(entry) = self.entry(key) else { return Vec::new() };
        let Value::Table(entries) = &entry.node.value else {
            self.report_wrong_kind(&entry.node, &self.scope.name(key), "a table", "each name with its value");
            return Vec::new();
        };
        let mut names = HashSet::new();
        let (unique, duplicates): (Vec<&MapEntry>, Vec<&MapEntry>) =
            entries.iter().partition(|entry| names.insert(entry.key.as_str()));
        duplicates.into_iter().for_each(|entry| self.duplicate(entry));
        unique
    }

    /// The facts of a condition, each with its patterns.
    pub(super) fn condition(&self, key: &str) -> Vec<Located<(String, Vec<String>)>> {
        let read = |entry: &&MapEntry| {
            let patterns = self.patterns(&entry.node, &format!("{key}.{}", entry.key));
            Located { value: (entry.key.clone(), patterns), position: entry.position, unexpanded: None }
        };
        self.map(key).iter().map(read).collect()
    }

    pub(super) fn count(&self, key: &str) -> Option<Located<u64>> {
        self.read(key, |item| self.read_count(item))
    }

    pub(super) fn bool(&self, key: &str) -> Option<Located<bool>> {
        self.read(key, |item| {
            let scalar = self.scalar(item, "`true` or `false`")?;
            let is_bool = scalar.kind == ScalarKind::Bool || scalar.unexpanded.is_some();
            match scalar.text.to_ascii_lowercase().as_str() {
                "true" if is_bool => Some(true),
                "false" if is_bool => Some(false),
                _ => {
                    let help = match scalar.text.to_ascii_lowercase().as_str() {
                        "yes" | "on" | "y" | "1" => "write `true`",
                        "no" | "off" | "n" | "0" => "write `false`",
                        "true" | "false" => "without quotes",
                        _ => "",
                    };
                    self.report_wrong_kind(item.node, &self.scope.name(key), "`true` or `false`", help);
                    None
                }
            }
        })
    }

    pub(super) fn duration(&self, key: &str) -> Option<Located<Duration>> {
        self.read(key, |item| {
            let span = self.parsed(item, "a duration", units::duration)?;
            let KeyKind::Duration { least, most } = *item.kind else { panic!("`{key}` is not a duration") };
            let (least, most) = (Span::from_millis(least), Span::from_millis(most));
            if span < least || span > most {
                let message = format!(
                    "{} must be from {least} to {most}, found {}",
                    self.scope.name(key),
                    shown(item.node)
                );
                self.error(item.node.position, message, "");
                return None;
            }
            Some(Duration::from(span))
        })
    }

    /// A number of bytes.
    pub(super) fn size(&self, key: &str) -> Option<Located<u64>> {
        self.read(key, |item| {
            let bytes = self.parsed(item, "a size", units::size)?;
            let KeyKind::Size { least, most } = *item.kind else { panic!("`{key}` is not a size") };
            if !(least..=most).contains(&bytes) {
                let (least, most) = (units::Size(least), units::Size(most));
                let name = self.scope.name(key);
                let message = format!("{name} must be from {least} to {most}, found {}", shown(item.node));
                self.error(item.node.position, message, "");
                return None;
            }
            Some(bytes)
        })
    }

    pub(super) fn percent(&self, key: &str) -> Option<Located<Percent>> {
        self.read(key, |item| self.parsed(item, "a percentage", units::percent))
    }

    pub(super) fn share(&self, key: &str) -> Option<Located<Share>> {
        self.read(key, |item| self.parsed(item, "a share", units::share))
    }

    pub(super) fn rate(&self, key: &str) -> Option<Located<RawRate>> {
        self.read(key, |item| self.read_rate(item))
    }

    /// A rate in a position where a table is also allowed.
    pub(super) fn rate_of(&self, node: &Node) -> Option<Located<RawRate>> {
        let value = self.read_rate(Item { node, kind: &KeyKind::Rate, key: "rate" })?;
        Some(Located::at(node, value))
    }

    /// One of the words that the key table lists.
    pub(super) fn choice(&self, key: &str) -> Option<Located<&'static str>> {
        self.read(key, |item| self.read_choice(item))
    }

    /// A list of words that the key table lists.
    pub(super) fn choices(&self, key: &str) -> Vec<Located<&'static str>> {
        self.list(key, |item| self.read_choice(item))
    }

    /// A string, unchanged.
    pub(super) fn text(&self, key: &str) -> Option<Located<String>> {
        self.read(key, |item| self.parsed(item, "a string", |text| Ok(text.to_owned())))
    }

    /// A string, or the text of a number or a boolean.
    pub(super) fn value(&self, key: &str) -> Option<Located<String>> {
        self.read(key, |item| Some(self.scalar(item, "a string")?.text.clone()))
    }

    /// A string, parsed by `parse`.
    pub(super) fn parse<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, InvalidValue>,
    ) -> Option<Located<T>> {
        self.read(key, |item| self.parsed(item, wanted(item.kind), &parse))
    }

    /// A list of strings, each parsed by `parse`.
    pub(super) fn parse_list<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, InvalidValue>,
    ) -> Vec<Located<T>> {
        self.list(key, |item| self.parsed(item, wanted(item.kind), &parse))
    }

    /// A list of scalars, each as its text.
    pub(super) fn value_list(&self, key: &str) -> Vec<Located<String>> {
        self.list(key, |item| Some(self.scalar(item, "a string")?.text.clone()))
    }

    /// The entries of a map whose values are scalars, each as its text.
    pub(super) fn value_map(&self, key: &str) -> Vec<Located<(String, String)>> {
        let read = |entry: &&MapEntry| {
            let name = format!("{key}.{}", entry.key);
            let scalar =
                self.scalar(Item { node: &entry.node, kind: &KeyKind::Value, key: &name }, "a value")?;
            Some(Located::at(&entry.node, (entry.key.clone(), scalar.text.clone())))
        };
        self.map(key).iter().filter_map(read).collect()
    }

    /// Reports every required key that is absent.
    pub(super) fn require(&self) {
        for key in self.section.keys.iter().filter(|key| key.required && !self.has(key.name)) {
            self.error(self.position, format!("{}: `{}` is missing", self.scope.table(), key.name), key.doc);
        }
    }

    /// The value of a key, or its default.
    fn read<T>(&self, key: &str, read: impl Fn(Item<'_>) -> Option<T>) -> Option<Located<T>> {
        let definition = self.key(key);
        fn item<'n>(node: &'n Node, definition: &'static Key, key: &'n str) -> Item<'n> {
            Item { node, kind: &definition.kind, key }
        }
        let read_value = self
            .entry(key)
            .and_then(|entry| Some(Located::at(&entry.node, read(item(&entry.node, definition, key))?)));
        read_value.or_else(|| {
            let default = default(definition)?;
            Some(Located {
                value: read(item(&default, definition, key))?,
                position: self.value_position(key),
                unexpanded: None,
            })
        })
    }

    /// The values of a list, or a single value if the key allows one instead of a list.
    fn list<T>(&self, key: &str, read: impl Fn(Item<'_>) -> Option<T>) -> Vec<Located<T>> {
        let definition = self.key(key);
        let (inner, single_allowed) = match definition.kind {
            KeyKind::List(inner) => (inner, false),
            KeyKind::OneOrList(inner) => (inner, true),
            _ => panic!("`{key}` is not a list"),
        };
        let read_all = |node: &Node| {
            let one = |node: &Node| Some(Located::at(node, read(Item { node, kind: inner, key })?));
            match &node.value {
                Value::List(nodes) => nodes.iter().filter_map(one).collect(),
                Value::Scalar(Scalar { kind: ScalarKind::Null, .. }) | Value::Table(_) | Value::Unknown => {
                    self.report_wrong_kind(node, &self.scope.name(key), "a list", "");
                    Vec::new()
                }
                Value::Scalar(_) if single_allowed => one(node).into_iter().collect(),
                Value::Scalar(scalar) => {
                    let help = format!("write `[{}]`", scalar.shown().escape_debug());
                    self.report_wrong_kind(node, &self.scope.name(key), "a list", &help);
                    Vec::new()
                }
            }
        };
        match self.entry(key) {
            Some(entry) => read_all(&entry.node),
            None => default(definition).map_or_else(Vec::new, |node| read_all(&node)),
        }
    }

    /// One pattern or several.
    fn patterns(&self, node: &Node, key: &str) -> Vec<String> {
        let one = |node: &Node| {
            Some(self.scalar(Item { node, kind: &KeyKind::Value, key }, "a string")?.text.clone())
        };
        match &node.value {
            Value::List(nodes) if nodes.is_empty() => {
                self.error(
                    node.position,
                    format!("{} has no patterns", self.scope.name(key)),
                    "list at least one",
                );
                Vec::new()
            }
            Value::List(nodes) => nodes.iter().filter_map(one).collect(),
            _ => one(node).into_iter().collect(),
        }
    }

    fn read_count(&self, item: Item<'_>) -> Option<u64> {
        let scalar = self.scalar(item, "a whole number")?;
        let KeyKind::Count { least, most } = *item.kind else { panic!("`{}` is not a count", item.key) };
        let bounds = match (least, most) {
            (least, u64::MAX) => format!("at least {least}"),
            (least, most) => format!("from {least} to {most}"),
        };
        let is_number = scalar.kind == ScalarKind::Number || scalar.unexpanded.is_some();
        let digits = !scalar.text.is_empty() && scalar.text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number || !digits {
            let help = match () {
                () if digits => "without quotes".to_owned(),
                () => bounds,
            };
            self.report_wrong_kind(item.node, &self.scope.name(item.key), "a whole number", &help);
            return None;
        }
        match scalar.text.parse::<u64>() {
            Ok(number) if (least..=most).contains(&number) => Some(number),
            Ok(_) => {
                let message =
                    format!("{} must be {bounds}, found {}", self.scope.name(item.key), shown(item.node));
                self.error(item.node.position, message, "");
                None
            }
            Err(_) => {
                let message = format!("{} is too large: {}", self.scope.name(item.key), shown(item.node));
                self.error(item.node.position, message, "a number fits in 64 bits");
                None
            }
        }
    }

    fn read_rate(&self, item: Item<'_>) -> Option<RawRate> {
        // A bare number is accepted here, so that the message can say that the period is missing.
        let scalar = self.scalar(item, "a rate, such as `100/min`")?;
        match units::rate(&scalar.text) {
            Ok(rate) => Some(RawRate { rate, text: scalar.text.clone() }),
            Err(invalid) => {
                self.report_invalid(item, scalar, invalid);
                None
            }
        }
    }

    fn read_choice(&self, item: Item<'_>) -> Option<&'static str> {
        let KeyKind::Choice { words, not_yet } = *item.kind else { panic!("`{}` is not a choice", item.key) };
        let scalar = self.scalar(item, &format!("one of {}", list(words.iter().copied())))?;
        let Some(word) = words.iter().copied().find(|word| *word == scalar.text) else {
            let help = match nearest(&scalar.text, words.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => list(words.iter().copied()),
            };
            let message = format!("{} cannot be {}", self.scope.name(item.key), shown(item.node));
            self.error(item.node.position, message, help);
            return None;
        };
        if not_yet.contains(&word) {
            let rest: Vec<&str> = words.iter().copied().filter(|word| !not_yet.contains(word)).collect();
            let message = format!("{}: `{word}` is not supported yet", self.scope.name(item.key));
            self.error(item.node.position, message, format!("use {}", list(rest)));
            return None;
        }
        Some(word)
    }

    /// The text of a scalar, parsed by `parse`.
    fn parsed<T>(
        &self,
        item: Item<'_>,
        wanted: &str,
        parse: impl Fn(&str) -> Result<T, InvalidValue>,
    ) -> Option<T> {
        let scalar = self.scalar(item, wanted)?;
        if matches!(scalar.kind, ScalarKind::Bool) && scalar.unexpanded.is_none() {
            let help = if matches!(item.kind, KeyKind::Listener) {
                "write `off` to turn it off"
            } else {
                "put it in quotes if it is meant as a string"
            };
            self.report_wrong_kind(item.node, &self.scope.name(item.key), wanted, help);
            return None;
        }
        if scalar.kind == ScalarKind::Number
            && scalar.unexpanded.is_none()
            && matches!(
                item.kind,
                KeyKind::Text
                    | KeyKind::Path
                    | KeyKind::LimitName
                    | KeyKind::Fact
                    | KeyKind::Prefix
                    | KeyKind::Sha256
            )
        {
            let help = format!("put it in quotes: `\"{}\"`", scalar.text);
            self.report_wrong_kind(item.node, &self.scope.name(item.key), wanted, &help);
            return None;
        }
        match parse(&scalar.text) {
            Ok(value) => Some(value),
            Err(invalid) => {
                self.report_invalid(item, scalar, invalid);
                None
            }
        }
    }

    fn report_invalid(&self, item: Item<'_>, scalar: &Scalar, invalid: InvalidValue) {
        let before = self.scope.before(item.key);
        match &scalar.unexpanded {
            // The message of the parser would show the value.
            Some(unexpanded) => {
                let message =
                    format!("{before}the value of {} is not {}", quoted(unexpanded), wanted(item.kind));
                self.error(
                    item.node.position,
                    message,
                    "it is not shown, because it comes from the environment",
                );
            }
            None => self.error(item.node.position, format!("{before}{}", invalid.message), invalid.help),
        }
        if matches!(item.kind, KeyKind::Sha256) {
            // The value may be the token itself.
            self.problems.borrow_mut().hide(item.node.position);
        }
    }

    /// The scalar of an item; reports null, lists and tables.
    fn scalar<'n>(&self, item: Item<'n>, wanted: &str) -> Option<&'n Scalar> {
        match &item.node.value {
            Value::Scalar(scalar) if scalar.kind != ScalarKind::Null => Some(scalar),
            Value::Unknown => None,
            _ => {
                self.report_wrong_kind(item.node, &self.scope.name(item.key), wanted, "");
                None
            }
        }
    }

    /// Reports a value of the wrong kind.
    fn report_wrong_kind(&self, node: &Node, name: &str, wanted: &str, help: &str) {
        match &node.value {
            Value::Unknown => {}
            Value::Scalar(Scalar { kind: ScalarKind::Null, .. }) => {
                self.error(node.position, format!("{name} has no value"), "write one, or leave the key out");
            }
            _ => self.error(node.position, format!("{name} must be {wanted}, found {}", shown(node)), help),
        }
    }

    /// Reports an error that begins with the subject of the table.
    pub(super) fn subject_error(&self, position: Position, message: &str, help: &str) {
        self.error(position, format!("{}{message}", self.scope.subject), help);
    }

    /// Reports an error.
    pub(super) fn error(&self, position: Position, message: impl Into<String>, help: impl Into<String>) {
        self.problems.borrow_mut().error(position, message, help);
    }

    fn entry(&self, key: &str) -> Option<&'d MapEntry> {
        self.found.iter().find(|(known, _)| known.name == key).map(|(_, entry)| *entry)
    }

    fn key(&self, key: &str) -> &'static Key {
        self.section.find(key).unwrap_or_else(|| panic!("the key table has no `{}.{key}`", self.section.path))
    }
}

/// A rate with its text in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RawRate {
    pub(super) rate: Rate,
    pub(super) text: String,
}

/// The default of a key, parsed as if the file contained it.
fn default(key: &Key) -> Option<Node> {
    if key.default.is_empty() {
        return None;
    }
    yaml::read(key.default, &mut Problems::default())
}

/// The expected value of a kind, for messages.
fn wanted(kind: &KeyKind) -> &'static str {
    match kind {
        KeyKind::Store => "the URL of a store",
        KeyKind::Path => "a path",
        KeyKind::Listener => "an address with a port, or `off`",
        KeyKind::LimitName => "the name of a limit",
        KeyKind::Fact => "the name of a fact",
        KeyKind::Network => "an address or a network",
        KeyKind::Route => "a path pattern",
        KeyKind::HostName => "the name of a host",
        KeyKind::ClientAddress => "the name of a header",
        KeyKind::Source => "a part of the request",
        KeyKind::Status => "a status",
        KeyKind::Sha256 => "64 hex digits",
        KeyKind::CostMissing => "`error`, `skip` or a whole number",
        KeyKind::Warning => "the code of a warning",
        KeyKind::Prefix => "a prefix",
        KeyKind::Rate => "a rate",
        KeyKind::Duration { .. } => "a duration",
        KeyKind::Size { .. } => "a size",
        KeyKind::Percent => "a percentage",
        KeyKind::Share => "a share",
        KeyKind::Count { .. } => "a whole number",
        _ => "a string",
    }
}

/// The form of a value in messages.
fn shown(node: &Node) -> String {
    match &node.value {
        Value::Scalar(scalar) => quoted(scalar.shown()),
        Value::List(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        Value::Unknown => "something else".to_owned(),
    }
}

fn list<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    words.into_iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}
