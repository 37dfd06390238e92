//! The subcommands other than `serve`: their output, streams and exit codes.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_tests::certificates::Authority;

/// The exit code, standard output and standard error.
fn result(output: &Output) -> (Option<i32>, &str, &str) {
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Asserts that a command fails before it does anything: exit code 2, and these words on standard error.
fn fails(command: &mut Command, words: &[&str]) {
    let output = output(command);
    let (code, printed, stderr) = result(&output);
    assert_eq!((code, printed), (Some(2), ""), "{command:?}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{command:?} does not say {word:?}: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// A server that accepts one request and answers with these bytes.
fn server_answering(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4_096];
        let count = stream.read(&mut request).unwrap();
        assert!(text(&request[..count]).starts_with("POST /v1/check HTTP/1.1\r\n"));
        let _ = stream.write_all(answer);
    });
    address
}

/// A server whose one limit does not refill while a test runs.
fn server(folder: &Folder) -> Server {
    Server::with_config(folder, "limits:\n  - { name: demo, by: user, rate: 1/day, burst: 5 }\n")
}

/// Five limits, each with a different result in `explain`.
const POLICY: &str = "limits:
  - { name: per-ip, by: ip, rate: 1000/day, missing: share }
  - { name: per-user, by: user, rate: 10/day, burst: 2 }
  - { name: login, when: { route: /login }, by: user, rate: 5/day }
  - name: plan
    by: user
    tier: plan
    tiers: { free: { rate: 60/day, burst: 6 }, pro: { rate: 600/day, burst: 60 }, enterprise: unlimited }
    default_tier: free
    overrides: { acme: { rate: 6000/day, burst: 600 } }
  - { name: trial, by: user, rate: 1/day, mode: shadow }
";

#[test]
fn check_calls_a_server_and_exits_with_the_decision() {
    let folder = Folder::new();
    let server = server(&folder);
    let url = format!("http://{}", server.address);
    for left in [3, 1] {
        let output = run(&["check", "--server", &url, "--cost", "2", "user=alice"]);
        let (code, printed, stderr) = result(&output);
        assert_eq!((code, stderr), (Some(0), ""), "{printed}");
        let lines: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["allowed"]);
        assert_eq!(
            lines[1],
            "LIMIT KEY SAYS COST REMAINING OF RETRY AFTER RESET AFTER".split(' ').collect::<Vec<_>>()
        );
        assert_eq!(lines[2][..6], ["demo", "alice", "allowed", "2", left.to_string().as_str(), "5"]);
        assert_eq!((lines[2][6], lines[2][8], lines.len()), ("-", "d", 3), "{printed}");
        assert!(!printed.contains('\x1b'), "no colours without a terminal");
    }
    let refused = run(&["check", "--server", &url, "--cost", "5", "user=alice"]);
    let (code, printed, stderr) = result(&refused);
    assert_eq!((code, stderr), (Some(1), ""));
    assert!(
        printed.starts_with(
            "refused: `demo` allows 1 per day with bursts of 5; the next request of cost 5 fits in "
        ),
        "{printed}"
    );
    assert!(printed.contains(" refused ") && printed.lines().count() == 3, "{printed}");
    let never = run(&["check", "--server", &url, "--cost", "6", "user=alice"]);
    assert_eq!(never.status.code(), Some(1));
    assert!(text(&never.stdout).contains("never fits (at most 5)"), "{}", text(&never.stdout));
    let none = run(&["check", "--server", &url]);
    assert_eq!(result(&none), (Some(0), "allowed: no limit applies\n", ""));
}

#[test]
fn check_json_prints_the_response_of_the_server() {
    let folder = Folder::new();
    let server = server(&folder);
    let url = format!("http://{}/", server.address);
    let output = run(&["check", "--server", &url, "--json", "--cost", "5", "user=alice"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["binding"], &answer["limits"][0]["cost"]), (&json!("demo"), &json!(5)));
    assert!(answer["charge"].is_string());
    assert_eq!(text(&output.stdout).lines().count(), 1, "one line");
    let refused = run(&["check", "--json", "--server", &url, "user=alice"]);
    assert_eq!((refused.status.code(), text(&refused.stderr)), (Some(1), ""));
    let answer: Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!(answer["allowed"], false);
    assert!(answer["reason"].is_string());
}

#[test]
fn check_peek_charges_nothing() {
    let server = Server::start();
    let url = format!("http://{}", server.address);
    for _ in 0..6 {
        let output = run(&["check", "--server", &url, "--peek", "--json", "user=alice"]);
        assert_eq!(output.status.code(), Some(0));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&answer["limits"][0]["remaining"], &answer["charge"]), (&json!(5), &Value::Null));
    }
    let never = run(&["check", "--server", &url, "--peek", "--cost", "6", "user=alice"]);
    assert_eq!(
        never.status.code(),
        Some(1),
        "a peek that would be refused exits with 1, although its status is 200"
    );
}

#[test]
fn check_flag_overrides_the_server_variable() {
    let (one, other) = (Server::start(), Server::start());
    let url = |server: &Server| format!("http://{}", server.address);
    let decided =
        |server: &Server| server.metric("tollkeeper_checks_total{limit=\"demo\",result=\"allowed\"}");
    let done = output(tollkeeper().args(["check", "user=a"]).env("TOLLKEEPER_SERVER", url(&one)));
    assert_eq!((done.status.code(), decided(&one), decided(&other)), (Some(0), 1.0, 0.0));
    let flag = output(
        tollkeeper().args(["check", "--server", &url(&other), "user=a"]).env("TOLLKEEPER_SERVER", url(&one)),
    );
    assert_eq!((flag.status.code(), decided(&one), decided(&other)), (Some(0), 1.0, 1.0));
}

#[test]
fn check_flag_ignores_the_other_variable() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", "limits:\n  - { name: by-file, rate: 10/day, burst: 2 }\n");
    let server = Server::start();
    let url = format!("http://{}", server.address);
    let by_file = output(
        tollkeeper().args(["check", "--config"]).arg(&file).args(["user=a"]).env("TOLLKEEPER_SERVER", &url),
    );
    assert_eq!(by_file.status.code(), Some(0), "{}", text(&by_file.stderr));
    assert!(text(&by_file.stdout).contains("by-file"), "{}", text(&by_file.stdout));
    let by_server =
        output(tollkeeper().args(["check", "--server", &url, "user=a"]).env("TOLLKEEPER_CONFIG", &file));
    assert_eq!(by_server.status.code(), Some(0), "{}", text(&by_server.stderr));
    assert!(text(&by_server.stdout).contains("demo"), "{}", text(&by_server.stdout));
    fails(tollkeeper().args(["check", "--server", &url, "--config"]).arg(&file), &["--config", "--server"]);
}

#[test]
fn check_without_a_server_suggests_serve() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    fails(tollkeeper().args(["check", "--server", &url, "user=alice"]), &[&url, "tollkeeper serve"]);
    fails(
        tollkeeper().args(["check", "user=alice"]).env("TOLLKEEPER_SERVER", &url),
        &[&url, "tollkeeper serve"],
    );
    for wrong in ["", "127.0.0.1", "localhost:8080", "ftp://localhost", "http://", "http:// x", "/v1/check"] {
        fails(tollkeeper().args(["check", "--server", wrong, "user=alice"]), &["http://127.0.0.1:8080"]);
    }
}

/// A server with a token, and with TLS if there is a certificate.
fn secured(folder: &Folder, identity: Option<&(PathBuf, PathBuf)>) -> Server {
    let tls = identity.map_or(String::new(), |(cert, key)| {
        format!("tls: {{ cert: {}, key: {} }}\n", cert.display(), key.display())
    });
    let token = hex(&sha256(b"clerk"));
    let limits = "limits: [{ name: demo, by: user, rate: 1/day, burst: 5 }]";
    Server::with_config(folder, &format!("{tls}auth: {{ token_sha256: [{token}] }}\n{limits}\n"))
}

#[test]
fn check_sends_a_token_from_a_file_or_the_environment() {
    let folder = Folder::new();
    let server = secured(&folder, None);
    let url = format!("http://{}", server.address);
    let [right, wrong, empty] = [("right", "clerk\n"), ("wrong", "guess"), ("empty", "\n")]
        .map(|(name, text)| folder.write(name, text));
    let check = || {
        let mut command = tollkeeper();
        command.args(["check", "--server", &url, "user=alice"]);
        command
    };
    let allowed = |command: &mut Command| assert_eq!(output(command).status.code(), Some(0), "{command:?}");
    allowed(check().arg("--token-file").arg(&right));
    allowed(check().env("TOLLKEEPER_TOKEN", "clerk"));
    allowed(check().arg("--token-file").arg(&right).env("TOLLKEEPER_TOKEN", "guess"));

    fails(&mut check(), &["unauthorized", "--token-file", "TOLLKEEPER_TOKEN"]);
    fails(check().env("TOLLKEEPER_TOKEN", ""), &["--token-file", "TOLLKEEPER_TOKEN"]);
    fails(check().env("TOLLKEEPER_TOKEN", "guess"), &["unauthorized", "the token from `TOLLKEEPER_TOKEN`"]);
    fails(check().arg("--token-file").arg(&wrong), &["unauthorized", wrong.to_str().unwrap()]);
    fails(check().arg("--token-file").arg(&empty), &["does not hold a token"]);
    fails(
        check().arg("--token-file").arg(folder.path().join("missing")),
        &["--token-file", "cannot be read"],
    );
    fails(check().args(["--token", "clerk"]), &["--token"]);
    let guess = output(check().env("TOLLKEEPER_TOKEN", "guess"));
    assert!(!text(&guess.stderr).contains("guess"), "{}", text(&guess.stderr));
}

#[test]
fn check_over_https_suggests_ca_for_untrusted_server() {
    let (authority, stranger, folder) = (Authority::new(), Authority::new(), Folder::new());
    let server = secured(&folder, Some(&authority.certify("server", "IP:127.0.0.1")));
    let url = format!("https://{}", server.address);
    let check = |url: &str, ca: Option<&Authority>| {
        let mut command = tollkeeper();
        command.args(["check", "--server", url, "user=alice"]).env("TOLLKEEPER_TOKEN", "clerk");
        if let Some(ca) = ca {
            command.arg("--ca").arg(ca.certificate());
        }
        command
    };
    let done = output(&mut check(&url, Some(&authority)));
    assert_eq!(result(&done).0, Some(0), "{}", text(&done.stderr));
    fails(&mut check(&url, None), &["not trusted", "--ca FILE"]);
    fails(&mut check(&url, Some(&stranger)), &["not trusted", "--ca FILE"]);
    let other_name = url.replace("127.0.0.1", "localhost");
    fails(&mut check(&other_name, Some(&authority)), &["not trusted"]);
    fails(check(&url, None).arg("--ca").arg(folder.write("empty.pem", "")), &["--ca", "no certificate"]);
    let plain = url.replace("https", "http");
    fails(&mut check(&plain, None), &["if it speaks TLS, use https"]);
    fails(&mut check(&plain, Some(&authority)), &["--ca", "https"]);
    let other = Server::start();
    fails(&mut check(&format!("https://{}", other.address), None), &["does not speak TLS"]);
    // The certificate that `openssl req -x509` creates by default: `--ca` would not help.
    let (own, folder) = (authority.certificate(), Folder::new());
    let self_signed = secured(&folder, Some(&(own.clone(), own.with_extension("key"))));
    fails(&mut check(&format!("https://{}", self_signed.address), Some(&authority)), &["CA:FALSE"]);
}

#[test]
fn passwords_in_arguments_are_not_printed() {
    for (args, words) in [
        (&["check", "--server", "http://app:hunter2@127.0.0.1"][..], &["--token-file"][..]),
        (&["check", "--server", "http://app:hunter2@ 127.0.0.1"], &["not the address of a server"]),
        (&["serve", "--store", "redis://app:hunter2@127.0.0.1:x"], &["--store", "the port is not a number"]),
        (&["serve", "--store", "redis://hunter2@127.0.0.1"], &["--store", "the password is missing"]),
        (&["serve", "--store", "hunter2"], &["--store", "not a URL"]),
    ] {
        fails(tollkeeper().args(args), words);
        let refused = output(tollkeeper().args(args));
        assert!(!text(&refused.stderr).contains("hunter2"), "{}", text(&refused.stderr));
    }
    let help =
        output(tollkeeper().args(["serve", "--help"]).env("TOLLKEEPER_STORE", "redis://:hunter2@127.0.0.1"));
    assert!(!text(&help.stdout).contains("hunter2"), "{}", text(&help.stdout));
}

#[test]
fn check_reports_a_server_that_is_not_tollkeeper() {
    let check = |address: SocketAddr| {
        let mut command = tollkeeper();
        command.args(["check", "--server", &format!("http://{address}"), "user=alice"]);
        command
    };
    for (answer, words) in [
        (&b""[..], &[][..]),
        (b"\0\x01\x02 nonsense\r\n\r\n", &[]),
        (b"-ERR unknown command 'POST'\r\n", &[]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"allowed\":true", &["did not arrive"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n<html></html>", &["did not answer with a decision", "<html>"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{\"allowed\":true}", &["did not answer with a decision"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\xff\xfe\x1b[", &["did not answer with a decision"]),
        (b"HTTP/1.1 204 No Content\r\n\r\n", &["204"]),
        (b"HTTP/1.1 301 Moved\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", &["301"]),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\nnot found", &["404", "not found"]),
        (b"HTTP/1.1 500 Oh No\r\ncontent-length: 4\r\n\r\noops", &["500", "oops"]),
        (
            b"HTTP/1.1 403 Forbidden\r\ncontent-length: 65\r\n\r\n{\"error\":{\"code\":\"forbidden\",\"message\":\"stay out\",\"where\":null}} ",
            &["stay out", "forbidden"],
        ),
    ] {
        let mut command = check(server_answering(answer));
        fails(&mut command, words);
    }
    let escape =
        output(&mut check(server_answering(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n\x1b[31mx")));
    assert!(!text(&escape.stderr).contains('\x1b'), "text from a server is escaped for the terminal");
}

#[test]
fn check_times_out_on_a_silent_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    fails(tollkeeper().args(["check", "--server", &url, "user=alice"]), &[&url]);
}

#[test]
fn check_refuses_invalid_facts_and_costs() {
    let server = Server::start();
    let url = format!("http://{}", server.address);
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", POLICY);
    let file = file.to_str().unwrap();
    let long = format!("user={}", "x".repeat(1_025));
    for whom in [["--server", &url], ["--config", file]] {
        for (args, words) in [
            (&["alice"][..], &["user=alice"][..]),
            (&["=alice"], &["user=alice"]),
            (&[""], &["user=alice"]),
            (&["us er=alice"], &["us er", "a name is"]),
            (&[&long], &["1025 bytes"]),
            (&["ip=nowhere"], &["IP address"]),
            (&["user=a", "user=b"], &["twice"]),
            (&["--cost", "0", "user=a"], &["peek"]),
            (&["--cost", "2147483649", "user=a"], &["2147483648"]),
            (&["--cost", "-1", "user=a"], &["-1"]),
            (&["--cost=-1", "user=a"], &["--cost"]),
            (&["--cost", "many", "user=a"], &["--cost"]),
            (&["--cost", "1.5", "user=a"], &["--cost"]),
        ] {
            fails(tollkeeper().arg("check").args(whom).args(args), words);
        }
        let odd = run(&["check", whom[0], whom[1], "--json", "user=a=b c\u{1b}[31m", "plan=", "x-y.z:/=1"]);
        assert_eq!(odd.status.code(), Some(0), "{}", text(&odd.stderr));
    }
    let shown = run(&["check", "--server", &url, "user=a\u{1b}[31m\n"]);
    assert!(text(&shown.stdout).contains("a\\u{1b}[31m\\n"), "{}", text(&shown.stdout));
    assert_eq!(
        server.metric("tollkeeper_checks_total{limit=\"demo\",result=\"allowed\"}"),
        2.0,
        "nothing else was charged"
    );
}

#[test]
fn check_by_a_file_uses_an_empty_store() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", POLICY);
    let file = file.to_str().unwrap();
    for _ in 0..4 {
        let output = run(&["check", "--config", file, "--json", "--cost", "2", "user=alice", "ip=192.0.2.7"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stderr).contains("first request"), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let left: Vec<_> = answer["limits"]
            .as_array()
            .unwrap()
            .iter()
            .map(|limit| (&limit["name"], &limit["remaining"]))
            .collect();
        assert_eq!(
            left,
            [
                (&json!("per-ip"), &json!(998)),
                (&json!("per-user"), &json!(0)),
                (&json!("plan"), &json!(4)),
                (&json!("trial"), &json!(1)),
            ]
        );
    }
    let refused = run(&["check", "--config", file, "--cost", "3", "user=alice"]);
    assert_eq!(refused.status.code(), Some(1));
    let printed = text(&refused.stdout);
    assert!(
        printed.starts_with(
            "refused: `per-user` allows 10 per day with bursts of 2; a request of cost 3 never fits"
        ),
        "{printed}"
    );
    assert!(printed.contains("would refuse"), "{printed}");
    fails(tollkeeper().args(["check", "--config", "/nowhere.yaml", "user=a"]), &["/nowhere.yaml"]);
    let broken = folder.write("broken.yaml", "limits:\n  - { name: a, rate: 5/soon }\n");
    fails(tollkeeper().args(["check", "--config"]).arg(&broken), &["broken.yaml:2:"]);
}

#[test]
fn explain_shows_whether_and_why_each_limit_applies() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", POLICY);
    let file = file.to_str().unwrap();
    let why = |facts: &[&str]| -> Vec<(String, bool, String, Value)> {
        let output = run(&[&["explain", "--config", file, "--json"], facts].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let limits = answer["limits"].as_array().unwrap().iter().map(|limit| {
            assert_eq!(limit.as_object().unwrap().len(), 6, "{limit}");
            let word = |name: &str| limit[name].as_str().unwrap().to_owned();
            (word("name"), limit["applies"].as_bool().unwrap(), word("why"), limit["key"].clone())
        });
        limits.collect()
    };
    let limit = |facts: &[&str], name: &str| -> (bool, String, Value) {
        let (_, applies, why, key) = why(facts).into_iter().find(|limit| limit.0 == name).unwrap();
        (applies, why, key)
    };
    let names: Vec<String> = why(&[]).into_iter().map(|limit| limit.0).collect();
    assert_eq!(names, ["per-ip", "per-user", "login", "plan", "trial"], "all limits, in config order");
    let (applies, words, key) = limit(&["ip=::ffff:192.0.2.7", "user=alice"], "per-ip");
    assert_eq!((applies, &*words), (true, "applies: 1000 per day"));
    assert!(key.as_str().unwrap().ends_with("192.0.2.7"), "{key}");
    let (applies, words, key) = limit(&["user=alice"], "per-user");
    assert_eq!((applies, &*words), (true, "applies: 10 per day with bursts of 2"));
    assert!(key.as_str().unwrap().contains("alice"), "{key}");
    for (facts, name, applies, words) in [
        (&["route=/login"][..], "login", false, "`user`, which is absent"),
        (&["user=alice"], "login", false, "`route`"),
        (&["user=alice", "route=/logout"], "login", false, "`route`"),
        (&["user=alice", "route=/login"], "login", true, "5 per day"),
        (&["user=alice", "plan=pro"], "plan", true, "tier `pro` has 600 per day"),
        (&["user=alice", "plan=gold"], "plan", true, "`gold`, which is not listed"),
        (&["user=alice"], "plan", true, "because `plan` is absent"),
        (&["user=alice", "plan=enterprise"], "plan", false, "tier `enterprise` is unlimited"),
        (&["user=acme", "plan=free"], "plan", true, "override for `acme` has 6000 per day"),
        (&["user="], "per-user", false, "`user`, which is absent"),
    ] {
        let (does_apply, why, key) = limit(facts, name);
        assert_eq!(does_apply, applies, "{facts:?}: {why}");
        assert!(why.contains(words), "{facts:?}: {why}");
        assert_eq!(key.is_string(), applies, "{facts:?}: {key}");
    }
}

#[test]
fn explain_prints_a_table() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", POLICY);
    let output = run(&["explain", "--config", file.to_str().unwrap(), "user=alice"]);
    let (code, printed, _) = result(&output);
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 6, "{printed}");
    assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["LIMIT", "WHY", "KEY"]);
    assert!(
        lines[2].contains("per-user")
            && lines[2].contains("applies: 10 per day with bursts of 2")
            && lines[2].contains("alice"),
        "{printed}"
    );
    assert!(lines[3].contains("does not apply"), "{printed}");
    assert!(lines[5].contains("shadow"), "{printed}");

    let builtin = run(&["explain", "user=alice"]);
    assert!(text(&builtin.stdout).contains("demo"), "without a file, the built-in policy of `serve`");
    let none = run(&["explain"]);
    assert_eq!(none.status.code(), Some(0));
    assert!(
        text(&none.stdout).ends_with("no limit applies: the request is allowed\n"),
        "{}",
        text(&none.stdout)
    );
    fails(tollkeeper().args(["explain", "--config", "/nowhere.yaml"]), &["/nowhere.yaml"]);
    fails(tollkeeper().args(["explain", "ip=nowhere"]), &["IP address"]);
    fails(tollkeeper().args(["explain", "user"]), &["user=alice"]);
    fails(tollkeeper().args(["explain", "user=a", "user=b"]), &["twice"]);
}

#[test]
fn validate_exit_code_is_0_valid_1_invalid_2_unreadable() {
    let folder = Folder::new();
    let valid = folder.write(
        "valid.yaml",
        "limits:\n  - { name: a, by: ip, rate: 5/s, missing: share }\n  - { name: b, by: user, rate: 5/s }\n",
    );
    let output = run(&["validate", valid.to_str().unwrap()]);
    let (code, printed, stderr) = result(&output);
    assert_eq!((code, stderr), (Some(0), ""), "{printed}");
    assert_eq!(printed, format!("{}: valid, 2 limits, 0 warnings\n", valid.display()));

    let warned = folder.write("warned.yaml", "limits:\n  - { name: a, by: user, rate: 5/s }\n");
    let output = run(&["validate", warned.to_str().unwrap()]);
    let (code, printed, _) = result(&output);
    assert_eq!(code, Some(0), "warnings are allowed");
    assert!(printed.contains("warned.yaml:1:1: warning[W001]: "), "{printed}");
    assert!(printed.ends_with("warned.yaml: valid, 1 limit, 1 warning\n"), "{printed}");

    let invalid = folder.write(
        "invalid.yaml",
        "limits:\n  - { name: a, by: user, rate: 5/soon }\n  - { nam: b, rate: 1/s }\n",
    );
    let output = run(&["validate", invalid.to_str().unwrap()]);
    let (code, printed, _) = result(&output);
    assert_eq!(code, Some(1));
    assert!(
        printed.contains("invalid.yaml:2:") && printed.contains("invalid.yaml:3:"),
        "all errors are reported at once: {printed}"
    );
    assert!(printed.contains("error: ") && printed.contains("invalid.yaml: invalid, "), "{printed}");
    assert!(!printed.contains('\x1b'), "{printed}");

    fails(tollkeeper().args(["validate", "/nowhere.yaml"]), &["/nowhere.yaml"]);
    fails(tollkeeper().arg("validate").arg(folder.path()), &["cannot be read"]);
    let other = folder.write("config.ini", "limits:\n");
    fails(tollkeeper().arg("validate").arg(&other), &[".yaml"]);
    fails(tollkeeper().arg("validate"), &["<FILE>"]);
    for format in ["envoy", "limitador"] {
        let with = format!("--format {format}");
        fails(tollkeeper().args(["validate", "--format", format]).arg(&valid), &[&with, "yet"]);
    }
    fails(tollkeeper().args(["validate", "--format", "xml"]).arg(&valid), &["native"]);
}

#[test]
fn validate_lists_the_headers_that_the_gateway_must_set() {
    let folder = Folder::new();
    let yaml = "http:
  trusted_proxies: [10.0.0.0/8]
  client_address: header.X-Real-IP
  facts:
    user: { from: header.x-user-id, trusted: true }
    account: { from: header.x-user-id, trusted: true }
    plan: { from: header.x-plan, trusted: true }
    key: { from: header.authorization, hash: true }
limits:
  - { name: per-ip, by: ip, rate: 5/s }
";
    let file = folder.write("tollkeeper.yaml", yaml);
    let output = run(&["validate", file.to_str().unwrap()]);
    let (code, printed, _) = result(&output);
    let note = "note: the gateway must set or remove these headers on every request: x-real-ip, x-user-id, x-plan (facts \
                ip, user, account, plan)\n";
    assert!(code == Some(0) && printed.starts_with(note), "{printed}");
    assert!(printed.ends_with("valid, 1 limit, 0 warnings\n"), "it is no warning: {printed}");
    let output = run(&["validate", "--json", file.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["gateway_headers"][1], json!({ "header": "x-user-id", "facts": ["user", "account"] }));
}

#[test]
fn validate_reports_missing_files() {
    let folder = Folder::new();
    let here = folder.write("here.pem", "");
    let yaml = format!(
        "store: rediss://127.0.0.1\nredis: {{ ca: {here} }}\ntls: {{ cert: /nowhere/cert.pem, key: {folder}, client_ca: {here} }}\n\
         limits:\n  - {{ name: per-ip, by: ip, rate: 5/s }}\n",
        here = here.display(),
        folder = folder.path().display()
    );
    let file = folder.write("tollkeeper.yaml", &yaml);
    let output = run(&["validate", file.to_str().unwrap()]);
    let (code, printed, _) = result(&output);
    assert_eq!(code, Some(1), "serve would not start: {printed}");
    for expected in [
        "tollkeeper.yaml:3:14: error[W014]: `tls.cert`: the file `/nowhere/cert.pem` does not exist",
        "error[W014]: `tls.key`: the file",
        "is a folder",
        "invalid, 2 errors, 0 warnings",
    ] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    let file = folder.write("ignored.yaml", &format!("{yaml}validate: {{ ignore: [W014] }}\n"));
    assert_eq!(
        run(&["validate", file.to_str().unwrap()]).status.code(),
        Some(0),
        "the files may be on another machine, so the warning can be ignored"
    );
    // Other commands read the limits without these files.
    assert_eq!(run(&["explain", "--config", file.to_str().unwrap(), "ip=192.0.2.7"]).status.code(), Some(0));
}

#[test]
fn ignored_warning_is_not_printed_or_logged() {
    let folder = Folder::new();
    let yaml = "limits:\n  - { name: a, by: user, rate: 5/s, when: { method: post } }\n";
    let ignored = format!("{yaml}validate: {{ ignore: [W001] }}\n");
    let output = run(&["validate", folder.write("ignored.yaml", &ignored).to_str().unwrap()]);
    let (code, printed, _) = result(&output);
    assert_eq!(code, Some(0));
    assert!(printed.contains("warning[W010]") && !printed.contains("W001"), "{printed}");
    let server = Server::with_config(&folder, &ignored);
    server.logs("warning[W010]");
    assert!(!server.log().contains("W001"), "{}", server.log());
}

#[test]
fn explain_shows_the_cost_fact() {
    let folder = Folder::new();
    let yaml = "limits:
  - { name: per-ip, by: ip, rate: 5/s }
  - { name: tokens, by: user, rate: 10000/min, cost: tokens, cost_missing: 500 }
";
    let file = folder.write("tollkeeper.yaml", yaml);
    let explain = |facts: &[&str]| {
        let output = run(&[&["explain", "--config", file.to_str().unwrap()], facts].concat());
        result(&output).1.to_owned()
    };
    assert!(explain(&["user=a", "tokens=7"]).contains("10000 per minute; charges the number in `tokens`"));
    assert!(explain(&["user=a"]).contains("charges 500, because `tokens` is absent"));
    let json: Value = serde_json::from_str(&explain(&["--json", "user=a"])).unwrap();
    assert_eq!((&json["limits"][0]["cost"], &json["limits"][1]["cost"]), (&Value::Null, &json!("tokens")));
}

#[test]
fn validate_json_has_the_position_of_every_problem() {
    let folder = Folder::new();
    let problems = |name: &str, yaml: &str| -> (Option<i32>, Value) {
        let file = folder.write(name, yaml);
        let output = run(&["validate", "--json", file.to_str().unwrap()]);
        assert_eq!(text(&output.stderr), "");
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
    };
    let (code, report) = problems("valid.yaml", "limits:\n  - { name: a, rate: 5/s }\n");
    assert_eq!((code, report), (Some(0), json!({ "valid": true, "problems": [], "gateway_headers": [] })));
    let (code, report) = problems("warned.yaml", "limits:\n  - { name: a, by: user, rate: 5/s }\n");
    assert_eq!((code, &report["valid"]), (Some(0), &json!(true)));
    assert_eq!(report["problems"][0]["severity"], "warning");
    assert_eq!(report["problems"][0]["code"], "W001");
    let (code, report) = problems(
        "invalid.yaml",
        "limits:\n  - { name: a, rate: 5/soon }\n  - { name: b, rate: 5/s, colour: red }\n",
    );
    assert_eq!((code, &report["valid"]), (Some(1), &json!(false)));
    let errors: Vec<&Value> = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|problem| problem["severity"] == "error")
        .collect();
    assert_eq!(errors.len(), 2, "{report}");
    for (error, line) in errors.iter().zip([2, 3]) {
        assert_eq!(error["line"], line, "{error}");
        assert!(error["column"].as_u64().unwrap() > 1, "{error}");
        assert!(error["file"].as_str().unwrap().ends_with("invalid.yaml"));
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
}

#[test]
fn schema_is_json_and_describes_limits() {
    let output = run(&["schema"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(schema["$schema"].as_str().is_some_and(|url| url.contains("json-schema.org")), "{schema}");
    assert!(schema["properties"]["limits"].is_object() && schema["properties"]["store"].is_object());
    assert_eq!(schema["additionalProperties"], false);
}

#[test]
fn init_lists_and_prints_the_templates() {
    let names = ["public-api", "b2b", "login", "llm", "internal"];
    let list = run(&["init"]);
    let (code, printed, stderr) = result(&list);
    assert_eq!((code, stderr), (Some(0), ""));
    let listed: Vec<&str> = printed.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(listed, names);
    assert!(
        printed.lines().all(|line| line.split_whitespace().count() > 3),
        "each with its description: {printed}"
    );
    let folder = Folder::new();
    for name in names {
        let output = run(&["init", name]);
        let (code, printed, stderr) = result(&output);
        assert_eq!((code, stderr), (Some(0), ""), "{name}");
        let file = folder.write(&format!("{name}.yaml"), printed);
        let valid = run(&["validate", file.to_str().unwrap()]);
        assert_eq!(valid.status.code(), Some(0), "{name}: {}", text(&valid.stdout));
        assert!(text(&valid.stdout).ends_with(" limits, 0 warnings\n"), "{}", text(&valid.stdout));
        let server = Server::with(&["--config", file.to_str().unwrap()]);
        assert_eq!(server.get("/v1/limits").json()["source"], "file", "{name}");
    }
    for wrong in ["nope", "", "Login", "../login", "\u{1b}[31m"] {
        fails(tollkeeper().args(["init", wrong]), &["public-api, b2b, login, llm, internal"]);
    }
    fails(tollkeeper().args(["init", "login", "b2b"]), &["b2b"]);
}

#[test]
fn completions_are_valid_shell_scripts() {
    for (shell, words) in
        [("bash", "_tollkeeper"), ("zsh", "#compdef tollkeeper"), ("fish", "complete -c tollkeeper")]
    {
        let output = run(&["completions", shell]);
        let (code, printed, stderr) = result(&output);
        assert_eq!((code, stderr), (Some(0), ""), "{shell}");
        assert!(printed.contains(words), "{shell}");
        for command in ["serve", "check", "explain", "validate", "schema", "init"] {
            assert!(printed.contains(command), "{shell} does not know {command}");
        }
    }
    let script = run(&["completions", "bash"]).stdout;
    let mut bash =
        Command::new("bash").arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(&script).unwrap();
    let read = bash.wait_with_output().unwrap();
    assert!(read.status.success(), "{}", text(&read.stderr));
    fails(tollkeeper().args(["completions", "cmd"]), &["bash"]);
    fails(tollkeeper().arg("completions"), &["<SHELL>"]);
}

#[test]
fn every_command_has_help() {
    for (command, words) in [
        (
            "serve",
            &[
                "Run the service",
                "--config",
                "--http",
                "--drain-delay",
                "TOLLKEEPER_HTTP",
                "127.0.0.1:8080",
                "127.0.0.1:8081",
                "--log",
            ][..],
        ),
        (
            "check",
            &[
                "exit 0",
                "--server",
                "--cost",
                "--peek",
                "--json",
                "TOLLKEEPER_SERVER",
                "--token-file",
                "TOLLKEEPER_TOKEN",
                "--ca",
                "user=alice",
            ],
        ),
        ("explain", &["which limits apply", "--config", "--json"]),
        ("validate", &["file:line:column", "--format", "native", "envoy", "limitador"]),
        ("schema", &["JSON schema"]),
        ("init", &["policy template", "public-api, b2b, login, llm"]),
        ("completions", &["bash", "zsh", "fish"]),
    ] {
        let output = run(&[command, "--help"]);
        let (code, printed, stderr) = result(&output);
        assert_eq!((code, stderr), (Some(0), ""), "{command}");
        for word in words {
            assert!(printed.contains(word), "{command} --help does not say {word:?}: {printed}");
        }
        fails(tollkeeper().args([command, "--nonsense"]), &["--nonsense", "--help"]);
    }
    let all = run(&["--help"]);
    assert_eq!(all.status.code(), Some(0));
    for command in ["serve", "check", "explain", "validate", "schema", "init", "completions"] {
        assert!(text(&all.stdout).contains(command), "{}", text(&all.stdout));
    }
    assert_eq!(text(&run(&["--version"]).stdout), format!("tollkeeper {}\n", env!("CARGO_PKG_VERSION")));
    fails(&mut tollkeeper(), &["Usage"]);
    fails(tollkeeper().arg("sreve"), &["serve"]);
    fails(tollkeeper().args(["serve", "--prot", "1"]), &["--prot"]);
}

#[test]
fn closed_pipe_does_not_panic() {
    for args in [
        &["init"][..],
        &["init", "login"],
        &["completions", "bash"],
        &["schema"],
        &["explain", "--json"],
        &["explain"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = tollkeeper()
            .args(args)
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(!text(&output.stderr).contains("panicked"), "{args:?}: {}", text(&output.stderr));
        assert_ne!(output.status.code(), Some(101), "{args:?}");
    }
}
