//! The JSON schema, checked with an independent validator: it accepts what the parser accepts and, as far as a schema
//! can, rejects what the parser rejects.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tollkeeper::config::{Format, schema};

use super::{file_name, files, parse};

/// The first line of a file whose mistakes no schema can see.
const MARK: &str = "# beyond the schema\n";
/// Files that have no comments, and mistakes that no schema can see.
const BEYOND: [&str; 1] = ["json-duplicate-keys.json"];

#[test]
fn the_schema_accepts_every_good_file() {
    let refused = refused(&files("good"), "good");
    assert_eq!(refused, BTreeSet::new());
}

#[test]
fn the_schema_refuses_every_broken_file_that_a_schema_can() {
    let broken: Vec<PathBuf> =
        files("broken").into_iter().filter(|path| Format::of(path).is_some()).collect();
    let refused = refused(&broken, "broken");
    let mut wrong = Vec::new();
    for path in &broken {
        let name = file_name(path);
        let text = fs::read(path).expect(name);
        let beyond = text.starts_with(MARK.as_bytes()) || BEYOND.contains(&name);
        match (beyond, refused.contains(name)) {
            (false, false) => {
                wrong.push(format!("{name}: the schema accepts it; if no schema can refuse it, mark it"))
            }
            (true, true) => wrong.push(format!("{name}: the schema refuses it, and it is marked")),
            (false, true) if parse(path).is_ok() => {
                wrong.push(format!("{name}: the schema refuses it, and we do not"))
            }
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}\nthe mark is a first line `{}`", wrong.join("\n"), MARK.trim());
}

/// Every example of the schema is a value that it accepts.
#[test]
fn the_schema_is_one_and_its_examples_are_right() {
    let path = written("metaschema");
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
    assert_eq!(refused(&paths, "examples"), BTreeSet::new(), "in {}", folder.display());
}

/// A file for each example below `properties`, the path of keys being `path`.
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

/// The names of the files that the schema refuses, or that cannot be read at all.
fn refused(paths: &[PathBuf], purpose: &str) -> BTreeSet<String> {
    let check = Command::new(tool())
        .args(["--output-format", "json", "--schemafile"])
        .arg(written(purpose))
        .args(paths)
        .output()
        .expect("installed");
    let said: Value = serde_json::from_slice(&check.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&check.stderr)));
    let lists = [&said["errors"], &said["parse_errors"]];
    let named = lists.into_iter().filter_map(Value::as_array).flatten();
    let names = named.map(|error| Path::new(error["filename"].as_str().expect("a name")));
    names.map(|path| file_name(path).to_owned()).collect()
}

/// The schema in a file of its own for each test.
fn written(purpose: &str) -> PathBuf {
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
