//! The OpenAPI document of the HTTP API.
//!
//! `openapi.json` holds the paths and bodies. The schema of a limit is added from the config's JSON schema, and the error
//! codes from [`Code::ALL`].

use std::sync::LazyLock;

use serde_json::{Value, json};
use tollkeeper_engine::api::error::Code;

/// The document, as JSON.
pub static TEXT: LazyLock<String> = LazyLock::new(|| {
    let mut document: Value = serde_json::from_str(include_str!("openapi.json")).expect("valid JSON");
    document["info"]["version"] = json!(env!("CARGO_PKG_VERSION"));
    let schemas = &mut document["components"]["schemas"];
    let codes: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
    schemas["Error"]["properties"]["error"]["properties"]["code"]["enum"] = json!(codes);
    let config: Value = serde_json::from_str(&tollkeeper::config::schema()).expect("valid JSON");
    schemas["Limit"] = without_variables(config["$defs"]["limit"].clone());
    serde_json::to_string_pretty(&document).expect("a JSON value")
});

/// Removes the alternative of an environment variable, which only config files can use as a value.
fn without_variables(schema: Value) -> Value {
    let is_variable = |schema: &Value| schema["$ref"] == "#/$defs/variable";
    match schema {
        Value::Object(mut fields) => {
            if let Some(Value::Array(either)) = fields.get_mut("anyOf") {
                either.retain(|schema| !is_variable(schema));
                if either.len() == 1
                    && let Some(Value::Object(only)) = either.pop()
                {
                    fields.remove("anyOf");
                    fields.extend(only);
                }
            }
            fields.into_iter().map(|(name, value)| (name, without_variables(value))).collect()
        }
        Value::Array(list) => list.into_iter().map(without_variables).collect(),
        other => other,
    }
}
