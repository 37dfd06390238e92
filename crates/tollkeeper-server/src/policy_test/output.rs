//! The results of policy tests as TAP 14 and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::FileResult;

/// The results as TAP 14: one line for each test, and a YAML block for each that failed.
pub fn tap(files: &[FileResult], coverage: bool) -> String {
    let count: usize = files.iter().map(|file| file.tests.len()).sum();
    let mut out = format!("TAP version 14\n1..{count}\n");
    let tests = files.iter().flat_map(|file| file.tests.iter().map(move |test| (file, test)));
    for (number, (file, test)) in tests.enumerate() {
        let verdict = if test.failures.is_empty() { "ok" } else { "not ok" };
        line(&mut out, &format!("{verdict} {} - {}", number + 1, description(&test.name)));
        let Some(first) = test.failures.first() else { continue };
        line(&mut out, "  ---");
        for failure in &test.failures {
            let place = format!("{}:{}:{}", file.path.display(), failure.line, failure.column);
            line(&mut out, &format!("  {}: {}", quoted(&place), quoted(&failure.message)));
        }
        line(&mut out, "  limits:");
        for limit in &first.limits {
            line(&mut out, &format!("    - {}", quoted(limit)));
        }
        line(&mut out, "  ...");
    }
    if coverage {
        for file in files {
            for part in file.coverage.unmatched() {
                line(&mut out, &format!("# no row matches: {part} ({})", file.path.display()));
            }
        }
    }
    out.truncate(out.trim_end().len());
    out
}

fn line(out: &mut String, line: &str) {
    writeln!(out, "{line}").expect("writing to a string does not fail");
}

/// The name of a test: `#` would begin a directive.
fn description(name: &str) -> String {
    name.escape_debug().to_string().replace("\\'", "'").replace("\\\"", "\"").replace('#', "\\#")
}

/// A string of YAML, which JSON is, too.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The results as JSON.
pub fn json(files: &[FileResult], coverage: bool) -> Value {
    let shown = files.iter().map(|file| {
        let tests: Vec<Value> = file
            .tests
            .iter()
            .map(|test| {
                let failures: Vec<Value> = test
                    .failures
                    .iter()
                    .map(|failure| {
                        json!({
                            "line": failure.line, "column": failure.column, "message": failure.message,
                            "limits": failure.limits,
                        })
                    })
                    .collect();
                json!({ "name": test.name, "ok": failures.is_empty(), "failures": failures })
            })
            .collect();
        let mut shown = json!({ "file": file.path.display().to_string(), "tests": tests });
        if coverage {
            shown["unmatched"] = json!(file.coverage.unmatched());
        }
        shown
    });
    let shown: Vec<Value> = shown.collect();
    let failed = failed(files);
    let count: usize = files.iter().map(|file| file.tests.len()).sum();
    json!({ "version": 1, "passed": count - failed, "failed": failed, "files": shown })
}

/// How many tests failed.
pub fn failed(files: &[FileResult]) -> usize {
    files.iter().flat_map(|file| &file.tests).filter(|test| !test.failures.is_empty()).count()
}
