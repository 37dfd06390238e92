//! Tests of the JSON schema with `check-jsonschema`: it accepts every valid file and, as far as a schema can,
//! rejects every invalid one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tollkeeper::config::{Format, schema};

use super::{file_name, files, parse};

/// The first line of a file whose errors no schema can detect.
const MARK: &str = "# beyond the schema\n";
/// Files whose errors no schema can detect, in a format without comments.
const BEYOND: [&str; 1] = ["json-duplicate-keys.json"];

#[test]
fn schema_accepts_every_good_file() {
    let rejected = rejected(&files("good"), "good");
    assert_eq!(rejected, BTreeSet::new());
}

#[test]
fn schema_rejects_broken_files() {
    let broken: Vec<PathBuf> =
        files("broken").into_iter().filter(|path| Format::of(path).is_some()).collect();
    let rejected = rejected(&broken, "broken");
    let mut wrong = Vec::new();
    for path in &broken {
        let name = file_name(path);
        let text = fs::read(path).expect(name);
        let beyond = text.starts_with(MARK.as_bytes()) || BEYOND.contains(&name);
        match (beyond, rejected.contains(name)) {
            (false, false) => {
                wrong.push(format!("{name}: the schema accepts it; if no schema can reject it, mark it"))
            }
            (true, true) => wrong.push(format!("{name}: the schema rejects it, although it is marked")),
            (false, true) if parse(path).is_ok() => {
                wrong.push(format!("{name}: the schema rejects it, but the reader accepts it"))
            }
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}\nthe mark is a first line `{}`", wrong.join("\n"), MARK.trim());
}

/// The schema accepts its own examples.
#[test]
fn schema_and_its_examples_are_valid() {
    let path = write_schema("metaschema");
    let check = Command::new(tool()).args(["--check-metaschema"]).arg(&path).output().expect("installed");
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));

    let schema: Value = serde_json::from_str(&schema()).expect("JSON");
    let mut examples = Vec::new();
    collect(&schema["properties"], &mut Vec::new(), &mut examples);
    collect(&schema["$defs"]["limit"]["properties"], &mut vec!["limits".to_owned()], &mut examples);
    assert!(examples.len() > 50, "{}", examples.len());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("examples-of-the-schema");
    fs::create_dir_all(&folder).expect("a folder for temporary files");
    let write = |(index, file): (usize, &Value)| {
        let path = folder.join(format!("{index}.json"));
        fs::write(&path, file.to_string()).expect("a file");
        path
    };
    let paths: Vec<PathBuf> = examples.iter().enumerate().map(write).collect();
    assert_eq!(rejected(&paths, "examples"), BTreeSet::new(), "in {}", folder.display());
}

/// Adds a file for each example in `properties`, which are nested under the keys in `path`.
fn collect(properties: &Value, path: &mut Vec<String>, files: &mut Vec<Value>) {
    for (name, property) in properties.as_object().into_iter().flatten() {
        path.push(name.clone());
        let values = property["examples"].as_array().into_iter().flatten().chain(property.get("default"));
        for value in values {
            let file = path.iter().rev().fold(value.clone(), |inner, name| match name.as_str() {
                "limits" => serde_json::json!({ "limits": [inner] }),
                name => serde_json::json!({ name: inner }),
            });
            let mut file = file;
            if let Some(keys) = file.as_object_mut() {
                keys.entry("limits").or_insert_with(|| serde_json::json!([]));
            }
            if let Some(limit) = file.pointer_mut("/limits/0").and_then(Value::as_object_mut) {
                limit.entry("name").or_insert_with(|| "a".into());
            }
            if let Some(tls) = file.pointer_mut("/tls").and_then(Value::as_object_mut) {
                for needed in ["cert", "key"] {
                    tls.entry(needed).or_insert_with(|| "a.pem".into());
                }
            }
            files.push(file);
        }
        collect(&property["properties"], path, files);
        path.pop();
    }
}

/// The names of the files that the schema rejects or that cannot be parsed.
fn rejected(paths: &[PathBuf], purpose: &str) -> BTreeSet<String> {
    let check = Command::new(tool())
        .args(["--output-format", "json", "--schemafile"])
        .arg(write_schema(purpose))
        .args(paths)
        .output()
        .expect("installed");
    let output: Value = serde_json::from_slice(&check.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&check.stderr)));
    let lists = [&output["errors"], &output["parse_errors"]];
    let named = lists.into_iter().filter_map(Value::as_array).flatten();
    let names = named.map(|error| Path::new(error["filename"].as_str().expect("a name")));
    names.map(|path| file_name(path).to_owned()).collect()
}

/// Writes the schema to a separate file for each test.
fn write_schema(purpose: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("schema-{purpose}.json"));
    fs::write(&path, schema()).expect("a folder for temporary files");
    path
}

fn tool() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/python/bin/check-jsonschema");
    let how = "`make test` installs it, or: python3 -m venv target/python && target/python/bin/pip install check-jsonschema";
    assert!(path.exists(), "check-jsonschema is missing: {how}");
    path
}
