//! `tollkeeper check`: one decision, by a server or by a file.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tollkeeper::{Limiter, MemoryStore};

use crate::args::Check;
use crate::command::{config, facts, say, table};
use crate::http::answer::write_decision;
use crate::json::Writer;
use crate::redact::Redactor;

const SERVER: &str = "http://127.0.0.1:8080";
/// How long a server may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// More than any answer.
const MAX_ANSWER: usize = 16 << 20;

/// Decides, prints, and says by the exit code what was decided.
pub fn run(args: &Check) -> anyhow::Result<ExitCode> {
    let answer = match &args.config {
        Some(_) => by_file(args)?,
        None => {
            let said = args.server.clone().or_else(|| std::env::var("TOLLKEEPER_SERVER").ok());
            let server = said.as_deref().unwrap_or(SERVER);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let asked =
                runtime.block_on(async { tokio::time::timeout(PATIENCE, by_server(args, server)).await });
            asked.with_context(|| format!("{server} did not answer within {} s", PATIENCE.as_secs()))??
        }
    };
    let decision: Decision = serde_json::from_str(&answer).with_context(|| {
        format!("the server did not answer with a decision, but with: {}", excerpt(&answer))
    })?;
    if args.json {
        say(answer)?;
    } else {
        print(&decision)?;
    }
    Ok(ExitCode::from(u8::from(!decision.allowed)))
}

/// By a file, on a store of its own: it is always the first request.
fn by_file(args: &Check) -> anyhow::Result<String> {
    let config = config(args.config.as_deref())?;
    eprintln!("decided on an empty store, so this is the first request (ask a running server with --server)");
    let limiter = Limiter::embedded(config.policy, MemoryStore::default());
    let facts = facts(&args.facts)?;
    let request = if args.peek { limiter.peek(&facts) } else { limiter.check(&facts) };
    let decision = request.cost(args.cost).wait()?;
    let mut out = Writer::default();
    write_decision(&mut out, &limiter, &Redactor::default(), &decision);
    Ok(out.finish())
}

async fn by_server(args: &Check, server: &str) -> anyhow::Result<String> {
    let wrong = || format!("`{server}` is not the address of a server (such as {SERVER})");
    let base: Uri = server.parse().with_context(wrong)?;
    let (Some("http"), Some(authority)) = (base.scheme_str(), base.authority()) else {
        bail!("{}", wrong());
    };
    let address = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
    let path = if args.peek { "/v1/peek" } else { "/v1/check" };
    let facts: serde_json::Map<_, _> =
        args.facts.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    if facts.len() < args.facts.len() {
        bail!("a fact is there twice");
    }
    let body = json!({ "facts": facts, "cost": args.cost }).to_string();
    let request = Request::post(format!("{}{path}", base.path().trim_end_matches('/')))
        .header(header::HOST, authority.as_str())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::<Bytes>::from(body))?;

    let stream = tokio::net::TcpStream::connect(address)
        .await
        .with_context(|| format!("no server answers at {server} (start one with `tollkeeper serve`)"))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("the answer did not arrive: {error}"))?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    match status.as_u16() {
        200 | 429 => Ok(text),
        _ => match serde_json::from_str::<Failure>(&text) {
            Ok(Failure { error }) => bail!("{} ({})", error.message, error.code),
            Err(_) => bail!("the server answered {status}: {}", excerpt(&text)),
        },
    }
}

/// The part of an answer that people are shown.
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

#[derive(Debug, Deserialize)]
struct Failure {
    error: Error,
}

#[derive(Debug, Deserialize)]
struct Error {
    code: String,
    message: String,
}

fn print(decision: &Decision) -> anyhow::Result<()> {
    match (decision.allowed, &decision.binding) {
        (true, None) => say("allowed: no limit applies")?,
        (true, Some(_)) if decision.delay > 0.0 => {
            say(format_args!("allowed, to be held for {} s", decision.delay))?
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
    let seconds = |span: Option<f64>| span.map_or("-".to_owned(), |span| format!("{span} s"));
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

/// The beginning of an answer that nobody expected.
fn excerpt(text: &str) -> String {
    let start: String = text.chars().take(200).collect();
    start.escape_debug().to_string()
}
