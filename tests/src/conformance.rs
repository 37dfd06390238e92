//! Reads the files of `clients/conformance`: calls, and the answers that all interfaces must give.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// One file: a config and steps.
#[derive(Debug)]
pub struct ConformanceFile {
    /// The name, without extension.
    pub name: String,
    /// The config.
    pub config: Value,
    /// The time at which the manual clock starts, in seconds since the epoch.
    pub at: f64,
    /// The steps, in order.
    pub steps: Vec<ConformanceStep>,
}

/// One step.
#[derive(Debug)]
pub enum ConformanceStep {
    /// Moves the clock by so many seconds.
    Advance(f64),
    /// Makes a call and compares the answer.
    Call(ConformanceCall),
}

/// A call and its answer.
#[derive(Debug)]
pub struct ConformanceCall {
    /// The call, such as `check`.
    pub call: String,
    /// The body, in which `$name` is replaced by a remembered receipt.
    pub body: String,
    /// The status of the answer.
    pub status: u16,
    /// The text of the answer, in which `$name` replaces a receipt.
    pub out: String,
    save: HashMap<String, String>,
}

/// All files with calls, by name. `bypasses.json` has requests.
pub fn files() -> Vec<ConformanceFile> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clients/conformance");
    let paths = fs::read_dir(folder).expect("the folder exists").map(|entry| entry.expect("readable").path());
    let is_calls = |path: &PathBuf| {
        path.extension().is_some_and(|end| end == "json") && !path.ends_with("bypasses.json")
    };
    let mut paths: Vec<_> = paths.filter(is_calls).collect();
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> ConformanceFile {
    let file: Value = serde_json::from_slice(&fs::read(path).expect("readable")).expect("valid JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let step = |step: &Value| match step["advance"].as_f64() {
        Some(seconds) => ConformanceStep::Advance(seconds),
        None => ConformanceStep::Call(ConformanceCall {
            call: text(&step["call"]),
            body: text(&step["in"]),
            status: step["status"].as_u64().and_then(|status| status.try_into().ok()).expect("a status"),
            out: text(&step["out"]),
            save: serde_json::from_value(step["save"].clone()).unwrap_or_default(),
        }),
    };
    ConformanceFile {
        name: path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned(),
        config: file["config"].clone(),
        at: file["at"].as_f64().expect("a time"),
        steps: file["steps"].as_array().expect("a list").iter().map(step).collect(),
    }
}

/// The charges and slots of earlier answers, by name.
#[derive(Debug, Default)]
pub struct Receipts(HashMap<String, String>);

impl Receipts {
    /// The body with the receipts that it names.
    pub fn fill(&self, body: &str) -> String {
        self.0.iter().fold(body.to_owned(), |body, (name, receipt)| {
            body.replace(&format!("\"${name}\""), &format!("\"{receipt}\""))
        })
    }

    /// Remembers the receipts of an answer, and returns it with their names instead.
    pub fn take(&mut self, call: &ConformanceCall, answer: &str) -> String {
        let json: Value = serde_json::from_str(answer).expect("an answer is JSON");
        let mut named = answer.to_owned();
        for field in ["charge", "slot"] {
            if let Some(receipt) = json[field].as_str() {
                let name = call.save.get(field).map_or(field, String::as_str);
                named = named.replace(receipt, &format!("${name}"));
                self.0.insert(name.to_owned(), receipt.to_owned());
            }
        }
        named
    }
}
