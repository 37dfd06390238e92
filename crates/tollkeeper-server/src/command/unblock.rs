//! `tollkeeper unblock`: forgets what a key has used, so that its next request passes.

use std::process::ExitCode;

use anyhow::bail;
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::command::args::Unblock;
use crate::command::client::{Client, query};
use crate::command::{json_facts, say, table};

/// Forgets the key under one limit, or under every limit that applies. The exit code is 0 if there was something to
/// forget, and 1 if not.
pub fn run(args: &Unblock) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.target)?;
    let limits = match &args.limit {
        Some(limit) => vec![limit.clone()],
        None => applying(&client, &args.facts)?,
    };
    if limits.is_empty() {
        bail!(
            "no limit applies to these facts (name one with `--limit`; `tollkeeper explain --server URL` says why)"
        );
    }
    let mut forgotten = Vec::new();
    for name in limits {
        let facts = args.facts.iter().map(|(name, value)| (&**name, &**value));
        let path = format!("/v1/state?{}", query([("limit", &*name)].into_iter().chain(facts)));
        let Done { done } = client.call(Method::DELETE, &path, None, &[200])?.read("a result")?;
        forgotten.push(Forgotten { name, done });
    }
    let any = forgotten.iter().any(|limit| limit.done);
    if args.json {
        say(json!({ "limits": forgotten }))?;
    } else {
        let mut table = table::with(&["LIMIT", "RESULT"]);
        for limit in &forgotten {
            let result = if limit.done { "unblocked" } else { "there was nothing to forget" };
            table.add_row([table::cell(&limit.name, None), table::cell(result, limit.done.then_some(true))]);
        }
        say(table.trim_fmt())?;
    }
    Ok(ExitCode::from(u8::from(!any)))
}

/// The limits of the server that apply to a request with these facts and count it by a key.
fn applying(client: &Client, facts: &[(String, String)]) -> anyhow::Result<Vec<String>> {
    let body = json!({ "facts": json_facts(facts)? }).to_string();
    let answer = client.call(Method::POST, "/v1/explain", Some(body), &[200])?;
    let Explained { limits } = answer.read("an explanation")?;
    Ok(limits.into_iter().filter(|limit| limit.key.is_some()).map(|limit| limit.name).collect())
}

#[derive(Debug, Deserialize)]
struct Explained {
    limits: Vec<ExplainedLimit>,
}

#[derive(Debug, Deserialize)]
struct ExplainedLimit {
    name: String,
    key: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Done {
    done: bool,
}

#[derive(Debug, Serialize)]
struct Forgotten {
    name: String,
    done: bool,
}
