//! `tollkeeper limits`: reads and replaces the limits of a running server.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use tollkeeper::config::Config;

use crate::command::args::{Limits, LimitsAction};
use crate::command::client::{Client, ServerAnswer};
use crate::command::{say, table};

/// Runs the action, and prints what is active afterwards.
pub fn run(args: &Limits) -> anyhow::Result<ExitCode> {
    let (target, json) = match &args.action {
        LimitsAction::Get { call } | LimitsAction::Put { call, .. } | LimitsAction::Delete { call } => {
            (&call.target, call.json)
        }
    };
    let client = Client::new(target)?;
    let answer = match &args.action {
        LimitsAction::Get { .. } => client.call(Method::GET, "/v1/limits", None, &[200])?,
        LimitsAction::Put { file, dry_run, .. } => {
            let (limits, version) = read(file)?;
            let path = if *dry_run { "/v1/limits?dry_run=true" } else { "/v1/limits" };
            let answer = client.call_if(Method::PUT, path, version, Some(limits), &[200])?;
            if *dry_run && !json {
                print_dry_run(&answer)?;
                return Ok(ExitCode::SUCCESS);
            }
            answer
        }
        LimitsAction::Delete { .. } => client.call(Method::DELETE, "/v1/limits", None, &[200])?,
    };
    if json {
        say(&answer.body)?;
    } else {
        print(&answer)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The limits in a config file, as the body of a call; or in the output of `limits get --json`, together with the
/// version that it shows, so that a change made since is not overwritten.
fn read(file: &Path) -> anyhow::Result<(String, Option<u64>)> {
    if file.extension().is_some_and(|extension| extension == "json") {
        let unreadable = || format!("{} cannot be read", file.display());
        let text = std::fs::read_to_string(file).with_context(unreadable)?;
        let mut read: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", file.display()))?;
        if let Some(version) = read.get("version").and_then(Value::as_u64) {
            return Ok((json!({ "limits": read["limits"].take() }).to_string(), Some(version)));
        }
    }
    let (config, report) = Config::read(file)?;
    if !report.is_empty() {
        eprintln!("{report}");
    }
    Ok((json!({ "limits": config.limits }).to_string(), None))
}

fn print(answer: &ServerAnswer) -> anyhow::Result<()> {
    let active: Active = answer.read("limits")?;
    let from = match active.source.as_str() {
        "file" => "from the file of the server",
        "builtin" => "built in",
        _ => "set through the API",
    };
    let kept = match active.persistent {
        Some(true) => ", for all nodes, kept across restarts",
        Some(false) => ", for this process only: a restart returns to the file",
        None => "",
    };
    say(format_args!("version {}, {from}{kept}", active.version))?;
    if active.shadowed {
        say("the limits in the file differ from these (`tollkeeper limits delete` returns to them)")?;
    }
    if let Some(error) = &active.error {
        say(format_args!("the file was not loaded: {error}"))?;
    }
    let mut table = table::with(&["LIMIT", "BY", "QUOTA", "ALGORITHM", "MODE"]);
    for limit in &active.limits {
        let by = if limit.by.is_empty() { "(all)".to_owned() } else { limit.by.join(" ") };
        table.add_row([
            table::cell(&limit.name, None),
            table::cell(by, None),
            table::cell(limit.quota(), None),
            table::cell(&limit.algorithm, None),
            table::cell(&limit.mode, None),
        ]);
    }
    if active.limits.is_empty() { say("there are no limits") } else { say(table.trim_fmt()) }
}

fn print_dry_run(answer: &ServerAnswer) -> anyhow::Result<()> {
    let tried: DryRun = answer.read("the result of a dry run")?;
    for warning in &tried.warnings {
        let help = warning.help.as_deref().map_or(String::new(), |help| format!(" ({help})"));
        say(format_args!("warning at {}:{}: {}{help}", warning.line, warning.column, warning.message))?;
    }
    if tried.changes.is_empty() {
        return say("valid, and nothing would change");
    }
    let mut table = table::with(&["LIMIT", "CHANGE", "COUNTS"]);
    for change in &tried.changes {
        let counts = match (change.kind.as_str(), change.keeps_counts) {
            ("added", _) => "start at zero",
            ("removed", _) => "are no longer used",
            (_, true) => "are kept",
            (_, false) => "start at zero: another `by`, period or algorithm",
        };
        table.add_row([
            table::cell(&change.name, None),
            table::cell(&change.kind, None),
            table::cell(counts, None),
        ]);
    }
    say("valid; nothing was changed, this would be:")?;
    say(table.trim_fmt())
}

#[derive(Debug, Deserialize)]
struct Active {
    version: u64,
    source: String,
    error: Option<String>,
    shadowed: bool,
    persistent: Option<bool>,
    limits: Vec<ActiveLimit>,
}

/// The fields of an active limit that tables show.
#[derive(Clone, Debug, Deserialize)]
pub struct ActiveLimit {
    /// The name.
    pub name: String,
    /// The facts it is keyed by.
    pub by: Vec<String>,
    rate: Option<String>,
    burst: Option<u64>,
    limit: Option<u64>,
    tier: Option<String>,
    /// The algorithm.
    pub algorithm: String,
    /// `enforce`, `shadow` or `off`.
    pub mode: String,
}

impl ActiveLimit {
    /// What it grants, as written in the config: `100/min burst 20`, `5 slots`, `by plan`.
    pub fn quota(&self) -> String {
        match (&self.rate, self.burst, self.limit, &self.tier) {
            (Some(rate), Some(burst), ..) => format!("{rate} burst {burst}"),
            (Some(rate), None, ..) => rate.clone(),
            (None, _, Some(slots), _) => format!("{slots} slots"),
            (None, _, None, Some(tier)) => format!("by {tier}"),
            (None, _, None, None) => "-".to_owned(),
        }
    }
}

#[derive(Debug, Deserialize)]
struct DryRun {
    warnings: Vec<Warning>,
    changes: Vec<Change>,
}

#[derive(Debug, Deserialize)]
struct Warning {
    line: usize,
    column: usize,
    message: String,
    help: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Change {
    name: String,
    kind: String,
    keeps_counts: bool,
}

/// All active limits of a server.
pub fn active(answer: &ServerAnswer) -> anyhow::Result<Vec<ActiveLimit>> {
    Ok(answer.read::<Active>("limits")?.limits)
}
