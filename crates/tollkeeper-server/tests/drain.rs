//! Start and shutdown of a server: listen addresses, output, and draining without aborted requests.

mod support;

use std::fs;
use std::net::TcpListener;
use std::process::Stdio;

use serde_json::{Value, json};
use support::*;

const ALICE: &str = r#"{"facts":{"user":"alice"}}"#;

/// A check whose head the server has read (it answered `100 Continue`) and whose body it awaits.
fn in_flight(server: &Server) -> Client {
    let mut client = server.client();
    let length = ALICE.len();
    client.send(
        format!(
            "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
        .as_bytes(),
    );
    assert_eq!(client.answer().status, 100);
    client
}

#[test]
fn request_in_flight_is_finished_on_shutdown() {
    for signal in ["TERM", "INT"] {
        let server = Server::start();
        let mut half = in_flight(&server);
        half.send(&ALICE.as_bytes()[..10]);
        server.signal(signal);
        server.logs("draining");
        eventually("the listener is closed", || server.is_closed());
        half.send(&ALICE.as_bytes()[10..]);
        let answer = half.answer();
        assert_eq!((answer.status, answer.json()["allowed"].clone()), (200, json!(true)), "SIG{signal}");
        assert_eq!(half.last_answers().len(), 0, "the server closes the connection after this response");
        let address = server.address;
        let ended = server.ended();
        assert_eq!(ended.code, Some(0), "SIG{signal}: {}", ended.log);
        assert_eq!(ended.printed, format!("listening http={address}\n"), "nothing else is printed");
        assert!(!ended.log.contains("WARN") && !ended.log.contains("ERROR"), "{}", ended.log);
    }
}

#[test]
fn draining_server_is_not_ready_but_serves() {
    let server = Server::with(&["--drain-delay", "3s"]);
    let mut kept = server.client();
    assert_eq!(kept.request("GET", "/readyz", "").status, 200);
    server.signal("TERM");
    eventually("readyz reports draining", || kept.request("GET", "/readyz", "").status == 503);
    let ready = server.get("/readyz");
    assert_eq!((ready.status, ready.text()), (503, "draining\n"));
    assert_eq!(server.get("/healthz").status, 200, "a draining server is alive");
    assert!(server.check(r#"{"user":"alice"}"#), "a draining server still serves");
    assert_eq!(kept.request("POST", "/v1/check", ALICE).status, 200);
    eventually("the listener is closed", || server.is_closed());
    assert_eq!(server.ended().code, Some(0));
}

#[test]
fn idle_connection_does_not_delay_shutdown() {
    let server = Server::start();
    let mut used = server.client();
    assert_eq!(used.request("GET", "/healthz", "").status, 200);
    let mut silent = server.client();
    let mut half = server.client();
    half.send(b"GET /healthz HTTP/1.1\r\nho");
    assert_eq!(server.get("/healthz").status, 200);
    server.signal("TERM");
    for client in [&mut used, &mut silent] {
        assert_eq!(client.last_answers().len(), 0);
    }
    drop(half);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    assert!(!ended.log.contains("in flight"), "{}", ended.log);
}

#[test]
fn endless_request_does_not_block_shutdown() {
    let server = Server::start();
    let half = in_flight(&server);
    server.signal("TERM");
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    drop(half);
}

#[test]
fn second_signal_skips_requests_in_flight() {
    let server = Server::start();
    let mut half = in_flight(&server);
    server.signal("TERM");
    eventually("the listener is closed", || server.is_closed());
    server.signal("INT");
    assert_eq!(half.last_answers().len(), 0, "the request is aborted");
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    assert!(!ended.log.contains("in flight after"), "the server waited: {}", ended.log);
}

#[test]
fn second_signal_skips_the_drain_delay() {
    let server = Server::with(&["--drain-delay", "1h"]);
    server.signal("TERM");
    eventually("the server is draining", || server.get("/readyz").status == 503);
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
}

#[test]
fn sighup_without_a_config_changes_nothing() {
    let server = Server::start();
    assert_eq!(server.post("/v1/check", r#"{"facts":{"user":"alice"},"cost":5}"#).status, 200);
    server.signal("HUP");
    server.logs("there is no config file");
    assert_eq!(server.get("/v1/limits").json()["version"], 1);
    let peek = server.post("/v1/peek", ALICE).json();
    assert!(peek["limits"][0]["reset_after"].as_f64().unwrap() > 0.0, "the charge still counts: {peek}");
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
}

#[test]
fn address_in_use_error_names_the_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--http", "--resp"] {
        let other = if flag == "--http" { ["--resp", "127.0.0.1:0"] } else { ["--http", "127.0.0.1:0"] };
        let output = run(&[&["serve", flag, &address], &other[..]].concat());
        assert_eq!(output.status.code(), Some(2));
        let stderr = text(&output.stderr);
        assert!(stderr.contains(&address) && stderr.contains(flag) && stderr.contains("in use"), "{stderr}");
        assert_eq!(text(&output.stdout), "", "no listener was opened");
    }
}

#[test]
fn invalid_address_is_refused_with_an_example() {
    for wrong in ["8080", "localhost:8080", "127.0.0.1", "127.0.0.1:99999", "on", ""] {
        let output = run(&["serve", "--http", wrong]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains("--http") && stderr.contains("127.0.0.1:"), "{wrong}: {stderr}");
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn invalid_flags_are_refused() {
    for (args, named) in [
        (&["--grpc", "8081"][..], "--grpc"),
        (&["--store", "nonsense"], "--store"),
        (&["--drain-delay", "soon"], "--drain-delay"),
        (&["--log", "loud"], "--log"),
        (&["--config", "/nowhere/at/all.yaml"], "/nowhere/at/all.yaml"),
    ] {
        let output = run(&[&["serve", "--http", "127.0.0.1:0"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(named), "{args:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "{args:?}");
    }
}

#[test]
fn server_does_not_start_with_an_invalid_config() {
    let folder = Folder::new();
    let file =
        folder.write("tollkeeper.yaml", "limits:\n  - { name: a, by: user, rate: 5/soon }\n  - { nam: b }\n");
    let output = run(&["serve", "--http", "127.0.0.1:0", "--config", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("tollkeeper.yaml:2:") && stderr.contains("tollkeeper.yaml:3:"),
        "both errors are reported at once: {stderr}"
    );
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn flags_override_the_environment_and_the_file() {
    // Each source sets another loopback address, so the address shows which source won, whatever the port.
    let folder = Folder::new();
    let file = folder.write(
        "tollkeeper.yaml",
        "listen: { http: 127.0.0.4:0 }\nlimits:\n  - { name: a, by: user, rate: 5/day }\n",
    );
    let file = file.to_str().unwrap();
    for (environment, args, expected) in [
        (None, &["--config", file][..], "127.0.0.4"),
        (Some("127.0.0.3:0"), &["--config", file], "127.0.0.3"),
        (Some("127.0.0.3:0"), &["--config", file, "--http", "127.0.0.2:0"], "127.0.0.2"),
        (Some("127.0.0.3:0"), &["--http", "127.0.0.2:0"], "127.0.0.2"),
        (Some("127.0.0.3:0"), &[], "127.0.0.3"),
    ] {
        let mut command = tollkeeper();
        command.arg("serve").args(args);
        if let Some(address) = environment {
            command.env("TOLLKEEPER_HTTP", address);
        }
        let server = Server::launch(&mut command);
        assert_eq!(server.address.ip().to_string(), expected, "{environment:?} {args:?}");
        assert_ne!(server.address.port(), 0, "the actual port is printed instead of 0");
        assert_eq!(server.get("/healthz").status, 200);
    }
    let server =
        Server::launch(tollkeeper().args(["serve", "--http", "127.0.0.1:0"]).env("TOLLKEEPER_CONFIG", file));
    assert_eq!(
        server.get("/v1/limits").json()["limits"][0]["name"],
        "a",
        "TOLLKEEPER_CONFIG names the config file"
    );
    let server = Server::launch(tollkeeper().args(["serve", "--http", "[::1]:0"]));
    assert!(server.address.is_ipv6());
    assert_eq!(server.get("/healthz").status, 200);
}

#[test]
fn off_disables_the_listener() {
    let mut child = tollkeeper()
        .args(["serve", "--http", "off"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the server handles SIGTERM", || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() >> 14 & 1 == 1
    });
    let killed = std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(killed.success());
    eventually("the server exits", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), ""));
}

#[test]
fn logs_are_text_or_json() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", "limits:\n  - { name: a, rate: 5/day }\n");
    let file = file.to_str().unwrap();
    let server = Server::with(&["--config", file, "--log", "json"]);
    server.signal("TERM");
    let ended = server.ended();
    assert!(ended.log.contains("draining"));
    for line in ended.log.lines() {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(object["level"].is_string() && object["fields"]["message"].is_string(), "{line}");
    }
    assert_eq!(ended.printed.lines().count(), 1, "{}", ended.printed);

    let server = Server::launch(
        tollkeeper().args(["serve", "--http", "127.0.0.1:0", "--config", file]).env("RUST_LOG", "error"),
    );
    server.signal("TERM");
    assert_eq!(server.ended().log, "", "RUST_LOG sets the level");
    let server = Server::launch(
        tollkeeper()
            .args(["serve", "--http", "127.0.0.1:0", "--config", file])
            .env("RUST_LOG", "=,=nonsense"),
    );
    server.logs("RUST_LOG");
}

#[test]
fn server_without_config_prints_an_example_call() {
    let server = Server::start();
    server.logs("/v1/check");
    let log = server.log();
    let line =
        log.lines().find(|line| line.trim_start().starts_with("curl ")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains(&format!("http://{}/v1/check", server.address)), "{line}");
    let body = line.split('\'').nth(1).unwrap();
    assert_eq!(server.post("/v1/check", body).status, 200, "{body}");
}

#[test]
fn systemd_is_notified_of_ready_and_stopping() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    let folder = Folder::new();
    let path = folder.path().join("notify");
    let name = format!("tollkeeper-test-{}", std::process::id());
    let sockets = [
        (path.to_str().unwrap().to_owned(), UnixDatagram::bind(&path).unwrap()),
        (
            format!("@{name}"),
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
        ),
    ];
    for (named, socket) in sockets {
        socket.set_read_timeout(Some(support::PATIENCE)).unwrap();
        let notification = || {
            let mut text = [0; 64];
            let len = socket.recv(&mut text).expect("systemd is notified");
            String::from_utf8_lossy(&text[..len]).into_owned()
        };
        let mut command = support::tollkeeper();
        let server =
            Server::launch(command.args(["serve", "--http", "127.0.0.1:0"]).env("NOTIFY_SOCKET", &named));
        assert_eq!(notification(), "READY=1");
        server.signal("TERM");
        assert_eq!(notification(), "STOPPING=1");
        assert_eq!(server.ended().code, Some(0));
    }
}

#[test]
fn failed_systemd_notification_is_not_fatal() {
    let mut command = support::tollkeeper();
    let server = Server::launch(
        command.args(["serve", "--http", "127.0.0.1:0"]).env("NOTIFY_SOCKET", "/nowhere/notify"),
    );
    server.logs("cannot notify systemd at /nowhere/notify (NOTIFY_SOCKET)");
    assert_eq!(server.get("/readyz").status, 200);
}
