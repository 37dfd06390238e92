//! The JSON schema of the config file, for editors and for checks before a file is rolled out.
//!
//! It is generated from the [key table](super::key_table) and covers names, kinds, ranges and patterns. Rules that
//! span several keys are checked only by [`Config::parse`](super::Config::parse). The schema also rejects keys that
//! are not supported yet.

use serde_json::{Map, Value, json};
use tollkeeper_core::toll::MAX_COST;

use super::key_table::{self, Key, KeyKind, Names, Section};
use super::warning::Warning;

/// The schema as JSON text, in draft 2020-12.
pub fn schema() -> String {
    let mut root = table(&key_table::ROOT);
    root.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
    root.insert("minProperties".to_owned(), json!(1));
    root.insert("title".to_owned(), json!("The config file of Tollkeeper"));
    let limit = table(&key_table::LIMIT);
    // A value with an environment variable may be any text before it is expanded.
    let variable = json!({
        "description": "Environment variables are expanded: `${NAME}`, or `${NAME:-default}`.",
        "type": "string",
        "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}",
    });
    root.insert("$defs".to_owned(), json!({ "limit": limit, "variable": variable }));
    serde_json::to_string_pretty(&root).expect("a tree of text") + "\n"
}

fn table(section: &'static Section) -> Map<String, Value> {
    let properties: Map<String, Value> =
        section.keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<&str> = section.keys.iter().filter(|key| key.required).map(|key| key.name).collect();
    let mut object = Map::new();
    object.insert("type".to_owned(), json!("object"));
    object.insert("description".to_owned(), json!(section.doc));
    object.insert("properties".to_owned(), Value::Object(properties));
    object.insert("additionalProperties".to_owned(), json!(false));
    if !required.is_empty() {
        object.insert("required".to_owned(), json!(required));
    }
    object
}

fn property(key: &'static Key) -> Value {
    let mut property = value(&key.kind);
    let Value::Object(fields) = &mut property else { unreachable!("every kind is an object") };
    fields.insert("description".to_owned(), json!(key.doc));
    if let Some(default) = yaml_as_json(key.default) {
        fields.insert("default".to_owned(), default);
    }
    if let Some(example) = yaml_as_json(key.example) {
        fields.insert("examples".to_owned(), json!([example]));
    }
    property
}

/// The schema of a kind of value.
fn value(kind: &'static KeyKind) -> Value {
    let text = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    const UNIT: &str = "(ms|s|m|min|h|hour|d|day|w|week)";
    let own = match kind {
        KeyKind::List(inner) => {
            let unique = matches!(inner, KeyKind::Choice { .. });
            let mut list = json!({ "type": "array", "items": value(inner), "uniqueItems": unique });
            if matches!(inner, KeyKind::Sha256) {
                list["minItems"] = json!(1);
            }
            return list;
        }
        KeyKind::OneOrList(inner) => {
            let list = json!({ "type": "array", "items": value(inner), "uniqueItems": matches!(inner, KeyKind::Fact) });
            return json!({ "anyOf": [value(inner), list] });
        }
        KeyKind::Table(section) if std::ptr::eq(*section, &key_table::LIMIT) => {
            return json!({ "$ref": "#/$defs/limit" });
        }
        KeyKind::Table(section) => return Value::Object(table(section)),
        KeyKind::Grant(section) => return json!({ "anyOf": [value(&KeyKind::Rate), table(section)] }),
        KeyKind::Map { names: which, value: inner } => {
            let names = match which {
                Names::Fact => text(FACT),
                Names::Tier | Names::Value => json!({ "type": "string" }),
            };
            let mut inner = value(inner);
            if let Some(Value::Array(either)) = inner.get_mut("anyOf")
                && let Some(Value::Object(list)) = either.last_mut().filter(|last| last["type"] == "array")
            {
                list.insert("minItems".to_owned(), json!(1));
            }
            let least = u8::from(*which == Names::Tier);
            return json!({ "type": "object", "propertyNames": names, "additionalProperties": inner, "minProperties": least });
        }
        KeyKind::Count { least, most: u64::MAX } => json!({ "type": "integer", "minimum": least }),
        KeyKind::Count { least, most } => json!({ "type": "integer", "minimum": least, "maximum": most }),
        KeyKind::Bool => json!({ "type": "boolean" }),
        KeyKind::Value => json!({ "type": ["string", "number", "boolean"] }),
        KeyKind::Text => json!({ "type": "string" }),
        KeyKind::Path => json!({ "type": "string", "minLength": 1 }),
        KeyKind::Choice { words, not_yet } => {
            let words: Vec<&str> = words.iter().copied().filter(|word| !not_yet.contains(word)).collect();
            json!({ "enum": words })
        }
        KeyKind::Status => {
            json!({ "anyOf": [{ "type": "integer", "minimum": 100, "maximum": 599 }, text("^([1-5][0-9][0-9]|[1-5]xx)$")] })
        }
        KeyKind::Store => text(r"^(memory://|rediss?(\+(unix|cluster|sentinel))?://.+)$"),
        KeyKind::Listener => text(r"^(off|[0-9.]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})$"),
        KeyKind::Duration { .. } => text(&format!("^0*[1-9][0-9]*{UNIT}$")),
        KeyKind::Size { .. } => {
            json!({ "type": ["string", "integer"], "pattern": "^[0-9]+(B|KiB|MiB|GiB)?$" })
        }
        KeyKind::Rate => text(&format!("^(unlimited|[0-9]+/(0*[1-9][0-9]*)?{UNIT})$")),
        KeyKind::Percent => text(r"^(0?[0-9]{1,2}(\.[0-9]{1,2})?|100(\.0{1,2})?)%$"),
        KeyKind::Share => text("^0*[1-9][0-9]*/0*[1-9][0-9]*$"),
        KeyKind::LimitName => text("^[a-z0-9._-]{1,64}$"),
        KeyKind::Fact => text(FACT),
        KeyKind::Prefix => text("^[A-Za-z0-9._:-]{1,64}$"),
        KeyKind::Network => text("^[0-9A-Fa-f.:]+(/[0-9]{1,3})?$"),
        KeyKind::Route => text("^/[^?# ]*$"),
        KeyKind::HostName => text(r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?$"),
        KeyKind::ClientAddress => text(r"^(x-forwarded-for|forwarded|header\..+)$"),
        KeyKind::Source => text(r"^(ip|method|host|path|route|(header|cookie|query|body)\..+)$"),
        KeyKind::Sha256 => text("^[0-9A-Fa-f]{64}$"),
        KeyKind::CostMissing => {
            json!({ "anyOf": [{ "enum": ["error", "skip"] }, { "type": "integer", "minimum": 0, "maximum": MAX_COST }] })
        }
        KeyKind::Warning => json!({ "enum": Warning::ALL.map(Warning::code) }),
    };
    json!({ "anyOf": [own, { "$ref": "#/$defs/variable" }] })
}

const FACT: &str = "^[A-Za-z0-9._:/-]{1,64}$";

/// A default or an example of the key table, converted from YAML to JSON.
fn yaml_as_json(text: &str) -> Option<Value> {
    use super::document::{Node, ScalarKind, Value as YamlValue};
    fn json(node: &Node) -> Value {
        match &node.value {
            YamlValue::Table(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), json(&entry.node))).collect()
            }
            YamlValue::List(nodes) => nodes.iter().map(json).collect(),
            YamlValue::Scalar(scalar) if matches!(scalar.kind, ScalarKind::Number | ScalarKind::Bool) => {
                serde_json::from_str(&scalar.text).expect("the key table has plain numbers and booleans")
            }
            YamlValue::Scalar(scalar) => json!(scalar.text),
            YamlValue::Unknown => Value::Null,
        }
    }
    super::yaml::read(text, &mut super::report::Problems::default()).map(|node| json(&node))
}
