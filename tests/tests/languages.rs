//! Runs the programs of `docs/go.md` exactly as shown, with a server that is up and then goes down.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tollkeeper_tests::binary;
use tollkeeper_tests::languages::{Killed, folder, run};
use tollkeeper_tests::page::{Page, root};

#[test]
fn go() {
    let program = built("main.go");
    behaves_as_documented(|port| {
        let mut app = Command::new(&program);
        app.env("PORT", port);
        app
    });
}

#[test]
fn go_refunds_reserves_and_shows_usage() {
    let server = Server::start();
    let printed =
        run(Command::new(built("calls.go")).env("TOLLKEEPER_SERVER", &server.url).env("NO_PROXY", "*"));
    let (last, logins) =
        printed.lines().collect::<Vec<_>>().split_last().map(|(l, r)| (*l, r.to_vec())).expect("lines");
    let expected =
        ["login 200", "login 401", "login 401", "login 401", "login 401", "login 401", "login 429"];
    assert_eq!(logins, expected);
    let left: u32 = last.strip_prefix("left ").and_then(|left| left.parse().ok()).expect("a number");
    // Without the correction it would be 6000, and without the charge 10000. It refills in a minute.
    assert!((7_800..10_000).contains(&left), "{left} left");
}

/// Builds a program of the page. Its build cache is in `target`, too.
fn built(file: &str) -> PathBuf {
    let folder = folder("go-page");
    fs::write(folder.join(file), &page().file(file).text).expect("`target` is writable");
    let program = folder.join(file).with_extension("app");
    let mut build = Command::new("go");
    build
        .args(["build", "-o"])
        .arg(&program)
        .arg(file)
        .current_dir(&folder)
        .env("GOCACHE", folder.join("cache"));
    run(&mut build);
    program
}

/// The table at the top of the page, row by row.
fn behaves_as_documented(app: impl Fn(&str) -> Command) {
    let server = Server::start();
    let open = App::start(&app, &server.url, "true");
    let closed = App::start(&app, &server.url, "false");
    let answers: Vec<Response> = (0..6).map(|_| open.get()).collect();
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
    let retry: u32 =
        answers[5].header("retry-after").expect("refusals have Retry-After").parse().expect("seconds");
    // One unit refills after 2 s; the header is rounded up, with up to a tenth of jitter.
    assert!((1..=3).contains(&retry), "Retry-After: {retry}");
    assert!(answers[..5].iter().all(|answer| answer.header("retry-after").is_none()));
    assert_eq!(closed.get().status, 429, "both apps use the same server");

    let mistaken = App::start(&app, &format!("{}/nowhere", server.url), "true");
    assert_eq!(mistaken.get().status, 500, "any other error");

    drop(server);
    let before = open.failures_logged();
    for _ in 0..6 {
        assert_eq!(open.get().status, 200, "fail open: the request passes without a decision");
        assert_eq!(closed.get().status, 503, "fail closed: the request does not pass");
    }
    assert_eq!(open.failures_logged() - before, 6, "each failure is logged");

    // This listener accepts connections and never replies.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let silent = format!("http://{}", listener.local_addr().expect("bound"));
    assert_eq!(App::start(&app, &silent, "true").get().status, 200, "fail open: timeout");
    assert_eq!(App::start(&app, &silent, "false").get().status, 503, "fail closed: timeout");
}

struct Server {
    url: String,
    process: Killed,
}

impl Server {
    fn start() -> Server {
        let config = folder("server").join(format!("{}.yaml", std::process::id()));
        fs::write(&config, &page().file("tollkeeper.yaml").text).expect("`target` is writable");
        let mut serve = Command::new(binary::tollkeeper());
        serve
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off", "--config"])
            .arg(&config)
            .stdout(Stdio::piped());
        let mut process = Killed::start(&mut serve);
        let mut lines = BufReader::new(process.0.stdout.take().expect("piped")).lines();
        let address = lines
            .find_map(|line| Some(line.expect("text").strip_prefix("listening http=")?.to_owned()))
            .expect("the server prints its address");
        Server { url: format!("http://{address}"), process }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill();
    }
}

struct App {
    url: String,
    log: PathBuf,
    _process: Killed,
}

impl App {
    fn start(app: &impl Fn(&str) -> Command, server: &str, fail_open: &str) -> App {
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a free port")
            .port();
        let log = folder("log").join(format!("{}-{port}", std::process::id()));
        let mut command = app(&port.to_string());
        command.env("TOLLKEEPER_SERVER", server).env("FAIL_OPEN", fail_open);
        command.stdout(Stdio::null()).stderr(File::create(&log).expect("`target` is writable"));
        for proxy in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(proxy);
        }
        let app =
            App { url: format!("http://127.0.0.1:{port}/"), log, _process: Killed::start(&mut command) };
        let listens = format!("until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done");
        run(Command::new("timeout").args(["60", "bash", "-c", &listens]));
        // The first request of a new program may exceed its timeout, so it is sent from another address.
        run(curl("127.0.0.2").arg(&app.url));
        app
    }

    fn get(&self) -> Response {
        Response::parse(&run(curl("127.0.0.1").arg(&self.url)))
    }

    /// How often the log reports that the server did not answer.
    fn failures_logged(&self) -> usize {
        fs::read_to_string(&self.log).expect("the log exists").matches("tollkeeper did not answer").count()
    }
}

fn curl(from: &str) -> Command {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--include", "--noproxy", "*", "--interface", from]);
    curl
}

struct Response {
    status: u16,
    head: Vec<String>,
}

impl Response {
    fn parse(text: &str) -> Response {
        let head: Vec<String> = text.lines().take_while(|line| !line.is_empty()).map(str::to_owned).collect();
        let status = head.first().and_then(|line| line.split(' ').nth(1)).expect("a status");
        Response { status: status.parse().expect("a number"), head }
    }

    fn header(&self, name: &str) -> Option<&str> {
        let named = |line: &&String| line.to_lowercase().starts_with(&format!("{name}:"));
        Some(self.head.iter().find(named)?.split_once(':')?.1.trim())
    }
}

fn page() -> Page {
    let text = fs::read_to_string(root().join("docs/go.md")).expect("the page");
    Page::parse("docs/go.md", &text).unwrap_or_else(|mistake| panic!("{mistake}"))
}
