//! `tollkeeper explain`: shows which limits apply to a request, why, and with which key.

use std::path::PathBuf;
use std::process::ExitCode;

use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;
use tollkeeper_engine::api::decision_json::write_explained;
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_engine::json::Writer;

use crate::command::args::Explain;
use crate::command::client::{Client, ServerAnswer, server_of_environment};
use crate::command::{config, json_facts, operator_facts, say, table};

/// Prints for each limit whether it applies to the request.
pub fn run(args: &Explain) -> anyhow::Result<ExitCode> {
    let has_server = args.target.server.is_some() || server_of_environment().is_some();
    let answer = if has_server && args.config.is_none() { by_server(args)? } else { by_file(args)? };
    if args.json {
        say(&answer.body)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Explained { limits } = answer.read("an explanation")?;
    let mut table = table::with(&["LIMIT", "WHY", "KEY"]);
    for limit in &limits {
        let shadow = if limit.mode == "shadow" { " (shadow: counted, never refused)" } else { "" };
        let key = limit.key.as_deref().unwrap_or("-").escape_debug().to_string();
        table.add_row([
            table::cell(&limit.name, limit.applies.then_some(true)),
            table::cell(format!("{}{shadow}", limit.why), None),
            table::cell(key, None),
        ]);
    }
    say(table.trim_fmt())?;
    if !limits.iter().any(|limit| limit.applies) {
        say("no limit applies: the request is allowed")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn by_file(args: &Explain) -> anyhow::Result<ServerAnswer> {
    let file = args.config.clone().or_else(|| std::env::var_os("TOLLKEEPER_CONFIG").map(PathBuf::from));
    let config = config(file.as_deref())?;
    let facts = operator_facts(&args.facts, config.policy.declared())?;
    let mut out = Writer::default();
    write_explained(&mut out, &config.policy, &facts, &Redactor::default())?;
    Ok(ServerAnswer { status: StatusCode::OK, body: out.finish() })
}

fn by_server(args: &Explain) -> anyhow::Result<ServerAnswer> {
    let body = json!({ "facts": json_facts(&args.facts)? }).to_string();
    Client::new(&args.target)?.call(Method::POST, "/v1/explain", Some(body), &[200])
}

/// The fields of a response that are printed.
#[derive(Debug, Deserialize)]
struct Explained {
    limits: Vec<ExplainedLimit>,
}

#[derive(Debug, Deserialize)]
struct ExplainedLimit {
    name: String,
    mode: String,
    applies: bool,
    why: String,
    key: Option<String>,
}
