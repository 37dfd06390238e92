//! `tollkeeper usage`: what each limit of a running server says now about a request.

use std::process::ExitCode;

use hyper::Method;
use serde::Deserialize;

use crate::command::args::Usage;
use crate::command::client::{Client, query};
use crate::command::limit_table::{self, LimitAnswer};
use crate::command::{json_facts, say};

/// Prints the state of each limit that applies.
pub fn run(args: &Usage) -> anyhow::Result<ExitCode> {
    json_facts(&args.facts)?;
    let facts = query(args.facts.iter().map(|(name, value)| (&**name, &**value)));
    let path = format!("/v1/usage?{facts}");
    let answer = Client::new(&args.target)?.call(Method::GET, &path, None, &[200])?;
    if args.json {
        say(&answer.body)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Answered { limits } = answer.read("usage")?;
    if limits.is_empty() {
        say("no limit applies to these facts (`tollkeeper explain --server URL …` says why)")?;
    }
    limit_table::print(&limits)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Deserialize)]
struct Answered {
    limits: Vec<LimitAnswer>,
}
