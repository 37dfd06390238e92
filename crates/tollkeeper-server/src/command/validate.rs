//! `tollkeeper validate`: reports all errors and warnings of a config file.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use serde_json::json;
use tollkeeper::config::{Config, ReadError, Report, Severity};

use crate::command::args::{FileFormat, Validate};
use crate::command::say;

/// Prints the report: exit 0 if the file can be used, 1 if not, 2 if it cannot be read.
pub fn run(args: &Validate) -> anyhow::Result<ExitCode> {
    match args.format {
        FileFormat::Native => {}
        FileFormat::Envoy => bail!("--format envoy is not supported yet (only native)"),
        FileFormat::Limitador => bail!("--format limitador is not supported yet (only native)"),
    }
    let (config, report) = match Config::read(&args.file) {
        Ok((config, mut report)) => {
            config.check_files(&mut report);
            (Some(config), report)
        }
        Err(ReadError::Invalid(report)) => (None, report),
        Err(error) => return Err(error.into()),
    };
    let valid = report.errors() == 0;
    let file = args.file.display();
    if args.json {
        say(as_json(&file.to_string(), config.as_ref(), &report))?;
    } else {
        if !report.is_empty() {
            let text = if io::stdout().is_terminal() { report.coloured() } else { report.to_string() };
            say(text)?;
        }
        let (errors, warnings) = (counted(report.errors(), "error"), counted(report.warnings(), "warning"));
        if let Some(note) = config.as_ref().and_then(gateway_note) {
            say(note)?;
        }
        if let Some(tests) = tests_of(&args.file) {
            say(format_args!("note: run its tests with `tollkeeper test {}`", tests.display()))?;
        }
        match config.filter(|_| valid) {
            Some(config) => {
                say(format_args!("{file}: valid, {}, {warnings}", counted(config.limits.len(), "limit")))?;
            }
            None => say(format_args!("{file}: invalid, {errors}, {warnings}"))?,
        }
    }
    Ok(ExitCode::from(u8::from(!valid)))
}

/// The file of tests next to a config file: `login.tests.yaml` next to `login.yaml`.
fn tests_of(config: &Path) -> Option<PathBuf> {
    let endings = ["yaml", "yml", "toml", "json"].map(|ending| format!("tests.{ending}"));
    endings.iter().map(|ending| config.with_extension(ending)).find(|path| path.is_file())
}

/// Lists the headers that the gateway must control, if there are any.
fn gateway_note(config: &Config) -> Option<String> {
    let headers = config.gateway_headers();
    if headers.is_empty() {
        return None;
    }
    let facts: Vec<&str> = headers.iter().flat_map(|(_, facts)| facts).copied().collect();
    let headers: Vec<&str> = headers.iter().map(|(header, _)| *header).collect();
    let plural = if facts.len() == 1 { "" } else { "s" };
    Some(format!(
        "note: the gateway must set or remove these headers on every request: {} (fact{plural} {})",
        headers.join(", "),
        facts.join(", ")
    ))
}

fn as_json(file: &str, config: Option<&Config>, report: &Report) -> serde_json::Value {
    let problems: Vec<_> = report
        .problems()
        .iter()
        .map(|problem| {
            let (line, column) = report.position(problem);
            let severity = match problem.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
            };
            json!({
                "file": file, "line": line, "column": column, "severity": severity,
                "code": problem.code.map(|code| code.code()), "message": problem.message, "help": problem.help,
            })
        })
        .collect();
    let headers: Vec<_> = config
        .into_iter()
        .flat_map(Config::gateway_headers)
        .map(|(header, facts)| json!({ "header": header, "facts": facts }))
        .collect();
    json!({ "valid": report.errors() == 0, "problems": problems, "gateway_headers": headers })
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
