//! `tollkeeper check`: decides one request, through a server or by a config file.

use std::process::ExitCode;

use hyper::Method;
use serde::Deserialize;
use serde_json::json;
use tollkeeper::{Limiter, MemoryStore};
use tollkeeper_engine::api::decision_json::write_decision;
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_engine::json::Writer;

use crate::command::args::Check;
use crate::command::client::{Client, ServerAnswer};
use crate::command::limit_table::{self, LimitAnswer, readable};
use crate::command::{config, facts, json_facts, say};

/// Decides and prints the decision; the exit code is 0 if allowed, 1 if refused.
pub fn run(args: &Check) -> anyhow::Result<ExitCode> {
    let answer = match &args.config {
        Some(_) => by_file(args)?,
        None => by_server(args)?,
    };
    let decision: Decision = answer.read("a decision")?;
    if args.json {
        say(&answer.body)?;
    } else {
        print(&decision)?;
    }
    Ok(ExitCode::from(u8::from(!decision.allowed)))
}

/// Decides by a file on an empty store, so it is always the first request.
fn by_file(args: &Check) -> anyhow::Result<ServerAnswer> {
    let config = config(args.config.as_deref())?;
    eprintln!("decided on an empty store, so this is the first request (use --server for a running server)");
    let limiter = Limiter::embedded(config.policy, MemoryStore::default());
    let facts = facts(&args.facts)?;
    let request = if args.peek { limiter.peek(&facts) } else { limiter.check(&facts) };
    let decision = request.cost(args.cost).wait()?;
    let mut out = Writer::default();
    write_decision(&mut out, &limiter, &Redactor::default(), &decision);
    Ok(ServerAnswer { status: hyper::StatusCode::OK, body: out.finish() })
}

fn by_server(args: &Check) -> anyhow::Result<ServerAnswer> {
    let body = json!({ "facts": json_facts(&args.facts)?, "cost": args.cost }).to_string();
    let path = if args.peek { "/v1/peek" } else { "/v1/check" };
    Client::new(&args.target)?.call(Method::POST, path, Some(body), &[200, 429])
}

/// The fields of a response that are printed.
#[derive(Debug, Deserialize)]
struct Decision {
    allowed: bool,
    binding: Option<String>,
    reason: Option<String>,
    delay: f64,
    limits: Vec<LimitAnswer>,
}

fn print(decision: &Decision) -> anyhow::Result<()> {
    match (decision.allowed, &decision.binding) {
        (true, None) => say("allowed: no limit applies")?,
        (true, Some(_)) if decision.delay > 0.0 => {
            say(format_args!("allowed, delay it by {}", readable(decision.delay)))?
        }
        (true, Some(_)) => say("allowed")?,
        (false, _) => {
            say(format_args!("refused: {}", decision.reason.as_deref().unwrap_or("no reason given")))?
        }
    }
    limit_table::print(&decision.limits)
}
