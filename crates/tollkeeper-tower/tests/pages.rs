//! What `docs/rust.md` and `docs/headers-and-addresses.md` show is what the code does.
//!
//! The programs of `docs/headers-and-addresses.md` run as they are written there, against a layer over sockets. What they need is
//! installed once, into `target/languages`.

#[path = "pages/retry.rs"]
mod retry;
mod support;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::middleware::{Next, from_fn_with_state};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use support::{Server, everything, limiter};
use tokio::net::TcpStream;
use tokio::process::Command;
use tollkeeper::http::HeaderDialect;
use tollkeeper::{Algorithm, Allowance, Limit, Limiter, Percent, Quota, facts};
use tollkeeper_tests::page::{Kind, Page, root};
use tollkeeper_tower::RateLimitLayer;

fn page(name: &str) -> (Page, String) {
    let text = fs::read_to_string(root().join(name)).expect("the page");
    (Page::parse(name, &text).unwrap_or_else(|mistake| panic!("{mistake}")), text)
}

#[test]
fn rust_blocks_of_the_page_are_part_of_an_example() {
    let (page, _) = page("docs/rust.md");
    let examples = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap();
    let examples: Vec<String> =
        examples.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    let mut shown = 0;
    for block in page.blocks.iter().filter(|block| block.kind == Kind::Program) {
        assert!(examples.iter().any(|example| example.contains(&block.text)), "{}", page.place(block));
        shown += 1;
    }
    assert!(shown >= 6, "{shown} blocks");
}

#[tokio::test]
async fn headers_on_the_page_are_those_sent() {
    let (_, text) = page("docs/headers-and-addresses.md");
    for dialect in HeaderDialect::ALL {
        let (limiter, clock) = limiter(vec![
            Limit::new("per-user", Quota::per_minute(100).burst(20)),
            Limit::new("daily", Quota::per_day(1000)).algorithm(Algorithm::FixedWindow),
        ]);
        clock.set(tollkeeper::Time::from_micros(1_760_054_400_500_000));
        let server = Server::axum(everything(RateLimitLayer::new(limiter).headers([dialect])).0).await;
        let answer = server.get("/", &[]).await;
        let row = format!("| `{}` ", dialect.name());
        let row =
            text.lines().find(|line| line.starts_with(&row)).expect("a row for each dialect").to_lowercase();
        let mut sent = 0;
        for (name, value) in &answer.headers {
            if name.as_str().contains("ratelimit") {
                let line = format!("`{name}: {}`", value.to_str().unwrap());
                assert!(row.contains(&line), "{line} is not in {row}");
                sent += 1;
            }
        }
        assert_eq!(row.matches(": ").count(), sent, "{row}");
    }
}

/// A server that refuses the first request for each path, and the statuses of its responses.
struct RefusingServer {
    server: Server,
    statuses: Statuses,
}

/// The statuses of all responses, by path.
type Statuses = Arc<Mutex<HashMap<String, Vec<u16>>>>;

impl RefusingServer {
    /// `/soon` admits one request every two seconds, `/tomorrow` one a day, and `/never` none.
    async fn start() -> RefusingServer {
        let soon = Limit::new("soon", Quota::per(1, Duration::from_secs(2)).burst(1)).when("path", "/soon");
        let tomorrow = Limit::new("tomorrow", Quota::per_day(1).burst(1)).when("path", "/tomorrow");
        let never = Limit::new("never", Allowance::Nothing).when("path", "/never");
        let builder = Limiter::builder().limit(soon).limit(tomorrow).limit(never);
        let limiter = builder.build().expect("valid limits");
        let layer = RateLimitLayer::new(limiter.clone()).retry_after_jitter(Percent::new(0));
        let (router, _) = everything(layer);
        let statuses = Statuses::default();
        let recorded = router.layer(from_fn_with_state((limiter, Arc::clone(&statuses)), record));
        RefusingServer { server: Server::axum(recorded).await, statuses }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.address)
    }

    /// Checks that a client retries once after `Retry-After`, and not at all if the wait is too long or endless.
    async fn check(&self, client: impl AsyncFn(String) -> u16) {
        for (path, last, all) in
            [("/soon", 200, vec![429, 200]), ("/tomorrow", 429, vec![429]), ("/never", 429, vec![429])]
        {
            assert_eq!(client(self.url(path)).await, last, "{path}");
            assert_eq!(self.statuses.lock().expect("not poisoned").remove(path), Some(all), "{path}");
        }
    }
}

/// Records the statuses of responses. Before the first request for a path it uses up the quota, so that the request is
/// refused however long the client took to start.
async fn record(
    State((limiter, statuses)): State<(Limiter, Statuses)>,
    request: axum::extract::Request,
    next: Next,
) -> axum::response::Response {
    let path = request.uri().path().to_owned();
    if !statuses.lock().expect("not poisoned").contains_key(&path) {
        limiter.check(&facts! { "path" => path.as_str() }).await.expect("valid");
    }
    let response = next.run(request).await;
    statuses.lock().expect("not poisoned").entry(path).or_default().push(response.status().as_u16());
    response
}

#[tokio::test]
async fn rust_retry_loop_waits_for_retry_after() {
    let shown = page("docs/headers-and-addresses.md").0.file("retry.rs").text.clone();
    assert!(include_str!("pages/retry.rs").ends_with(&shown), "tests/pages/retry.rs differs from the page");
    let server = RefusingServer::start().await;
    server
        .check(async |url| {
            let sent = retry::with_retry(async || send(&url).await).await;
            sent.expect("the server responds").status().as_u16()
        })
        .await;
}

async fn send(url: &str) -> Result<Response<Bytes>, hyper::Error> {
    let uri: http::Uri = url.parse().expect("a URL");
    let stream =
        TcpStream::connect(uri.authority().expect("an address").as_str()).await.expect("the server listens");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get(uri.path()).header("host", "test").body(Empty::<Bytes>::new()).expect("valid");
    let (parts, body) = sender.send_request(request).await?.into_parts();
    Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
}

#[tokio::test]
async fn python_retry_loop_waits_for_retry_after() {
    let folder = folder("retry-python");
    fs::write(folder.join("retry.py"), &page("docs/headers-and-addresses.md").0.file("retry.py").text)
        .unwrap();
    let main = "import sys, urllib.error\nfrom retry import open_with_retry\n\
        try:\n    print(open_with_retry(sys.argv[1]).status)\n\
        except urllib.error.HTTPError as error:\n    print(error.code)\n";
    fs::write(folder.join("main.py"), main).unwrap();
    let server = RefusingServer::start().await;
    server.check(async |url| status(&folder, &["python3", "main.py", &url]).await).await;
}

#[tokio::test]
async fn typescript_retry_loop_waits_for_retry_after() {
    let folder = folder("retry-node");
    if !folder.join("node_modules/typescript").exists() {
        let install = "install --no-save --no-audit --no-fund --ignore-scripts typescript@5.9";
        run(&folder, &[&["npm"], &install.split(' ').collect::<Vec<_>>()[..]].concat()).await;
    }
    fs::write(folder.join("package.json"), r#"{"type":"module"}"#).unwrap();
    fs::write(folder.join("retry.ts"), &page("docs/headers-and-addresses.md").0.file("retry.ts").text)
        .unwrap();
    let main = "import { fetchWithRetry } from './retry.js';\n\
        console.log((await fetchWithRetry(process.argv[2])).status);\n";
    fs::write(folder.join("main.js"), main).unwrap();
    let compile = "node node_modules/typescript/bin/tsc --strict --target es2022 --module es2022 --lib es2022,dom retry.ts";
    run(&folder, &compile.split(' ').collect::<Vec<_>>()).await;
    let server = RefusingServer::start().await;
    server.check(async |url| status(&folder, &["node", "main.js", &url]).await).await;
}

async fn status(folder: &Path, command: &[&str]) -> u16 {
    run(folder, command).await.trim().parse().expect("a status")
}

async fn run(folder: &Path, command: &[&str]) -> String {
    let mut process = Command::new(command[0]);
    process.args(&command[1..]).current_dir(folder).env("no_proxy", "*").kill_on_drop(true);
    let output = process.output().await.unwrap_or_else(|error| panic!("{}: {error}", command[0]));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    stdout.into_owned()
}

fn folder(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("target");
    let folder = target.join("languages").join(name);
    fs::create_dir_all(&folder).expect("`target` can be written");
    folder
}
