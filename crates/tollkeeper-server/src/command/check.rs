//! `tollkeeper check`: decides one request, through a server or by a config file.

use std::process::ExitCode;
use std::time::Duration;

use hyper::Method;
use serde::Deserialize;
use serde_json::json;
use tollkeeper::{Limiter, MemoryStore, Span};

use crate::command::args::Check;
use crate::command::client::{Answer, Client};
use crate::command::{config, facts, json_facts, say, table};
use crate::json::Writer;
use crate::redact::Redactor;
use crate::transport::http::decision_json::write_decision;

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
fn by_file(args: &Check) -> anyhow::Result<Answer> {
    let config = config(args.config.as_deref())?;
    eprintln!("decided on an empty store, so this is the first request (use --server for a running server)");
    let limiter = Limiter::embedded(config.policy, MemoryStore::default());
    let facts = facts(&args.facts)?;
    let request = if args.peek { limiter.peek(&facts) } else { limiter.check(&facts) };
    let decision = request.cost(args.cost).wait()?;
    let mut out = Writer::default();
    write_decision(&mut out, &limiter, &Redactor::default(), &decision);
    Ok(Answer { status: hyper::StatusCode::OK, body: out.finish() })
}

fn by_server(args: &Check) -> anyhow::Result<Answer> {
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

#[derive(Debug, Deserialize)]
struct LimitAnswer {
    name: String,
    key: Vec<Option<String>>,
    mode: String,
    allowed: bool,
    cost: u64,
    limit: u64,
    remaining: Option<u64>,
    retry_after: Option<f64>,
    reset_after: Option<f64>,
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
    if decision.limits.is_empty() {
        return Ok(());
    }
    let mut table =
        table::with(&["LIMIT", "KEY", "SAYS", "COST", "REMAINING", "OF", "RETRY AFTER", "RESET AFTER"]);
    let seconds = |span: Option<f64>| span.map_or("-".to_owned(), readable);
    for limit in &decision.limits {
        let says = match (limit.allowed, limit.mode.as_str()) {
            (true, _) => "allowed",
            (false, "shadow") => "would refuse",
            (false, _) => "refused",
        };
        let key: Vec<&str> = limit.key.iter().map(|value| value.as_deref().unwrap_or("-")).collect();
        let key = if key.is_empty() { "(all)".to_owned() } else { key.join(" ").escape_debug().to_string() };
        table.add_row([
            table::cell(&limit.name, None),
            table::cell(key, None),
            table::cell(says, Some(limit.allowed)),
            table::cell(limit.cost, None),
            table::cell(limit.remaining.map_or("-".to_owned(), |left| left.to_string()), None),
            table::cell(limit.limit, None),
            table::cell(seconds(limit.retry_after), None),
            table::cell(seconds(limit.reset_after), None),
        ]);
    }
    say(table.trim_fmt())
}

/// A duration in seconds with readable units, such as `1 d 12 h`.
fn readable(seconds: f64) -> String {
    let span = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    Span::from(span).readable().to_string()
}
