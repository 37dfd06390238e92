//! `tollkeeper validate`: everything that is wrong with a config file, at once.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use anyhow::bail;
use serde_json::json;
use tollkeeper::config::{Config, ReadError, Report, Severity};

use crate::args::{FileFormat, Validate};
use crate::command::say;

/// Prints the report: exit 0 if the file can be used, 1 if not, 2 if it cannot be read.
pub fn run(args: &Validate) -> anyhow::Result<ExitCode> {
    match args.format {
        FileFormat::Native => {}
        FileFormat::Envoy => bail!("--format envoy is not there yet (only native)"),
        FileFormat::Limitador => bail!("--format limitador is not there yet (only native)"),
    }
    let (limits, report) = match Config::read(&args.file) {
        Ok((config, report)) => (Some(config.limits.len()), report),
        Err(ReadError::Invalid(report)) => (None, report),
        Err(error @ ReadError::Unreadable { .. }) => return Err(error.into()),
    };
    let file = args.file.display();
    if args.json {
        say(as_json(&file.to_string(), &report))?;
    } else {
        if !report.is_empty() {
            let text = if io::stdout().is_terminal() { report.coloured() } else { report.to_string() };
            say(text)?;
        }
        let (errors, warnings) = (counted(report.errors(), "error"), counted(report.warnings(), "warning"));
        match limits {
            Some(limits) => say(format_args!("{file}: valid, {}, {warnings}", counted(limits, "limit")))?,
            None => say(format_args!("{file}: invalid, {errors}, {warnings}"))?,
        }
    }
    Ok(ExitCode::from(u8::from(limits.is_none())))
}

fn as_json(file: &str, report: &Report) -> serde_json::Value {
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
                "message": problem.message, "help": problem.help,
            })
        })
        .collect();
    json!({ "valid": report.errors() == 0, "problems": problems })
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
