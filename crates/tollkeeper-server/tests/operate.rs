//! The commands that operate a running server: `usage`, `unblock`, `limits`, `explain --server`, `top`, and `demo`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::process::{Command, Output};

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};

fn config(rest: &str) -> String {
    format!(
        "limits:
  - {{ name: per-user, by: user, rate: 100/day, burst: 2 }}
  - {{ name: login, by: user, when: {{ route: /login }}, rate: 1/day, algorithm: sliding-log }}
  - {{ name: trial, rate: 1/day, mode: shadow }}
admin: {{ token_sha256: {} }}
{rest}",
        hex(&sha256(b"boss"))
    )
}

/// Runs a command against this server with the admin token.
fn operate(server: &Server, args: &[&str]) -> Output {
    output(command(server, args).env("TOLLKEEPER_TOKEN", "boss"))
}

fn command(server: &Server, args: &[&str]) -> Command {
    let mut command = tollkeeper();
    command.args(args).env("TOLLKEEPER_SERVER", format!("http://{}", server.address));
    command
}

/// The exit code, standard output, and standard error.
fn result(output: &Output) -> (i32, String, String) {
    (output.status.code().unwrap(), text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
}

fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stdout)))
}

#[test]
fn usage_and_unblock_answer_and_solve_a_429() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    while server.check(r#"{"user":"al ice&x"}"#) {}
    let (code, printed, _) = result(&operate(&server, &["usage", "user=al ice&x"]));
    assert_eq!(code, 0);
    assert!(printed.contains("per-user") && printed.contains("refused"), "{printed}");
    let usage = json_of(&operate(&server, &["usage", "--json", "user=al ice&x"]));
    assert_eq!(usage["limits"][0]["remaining"], 0);

    let unblocked = operate(&server, &["unblock", "user=al ice&x"]);
    assert_eq!(result(&unblocked).0, 0, "{unblocked:?}");
    assert!(text(&unblocked.stdout).contains("unblocked"), "{unblocked:?}");
    assert!(server.check(r#"{"user":"al ice&x"}"#), "the next request passes");
    let one = operate(&server, &["unblock", "--limit", "per-user", "--json", "user=al ice&x"]);
    assert_eq!(json_of(&one), json!({ "limits": [{ "name": "per-user", "done": true }] }));
    let again = operate(&server, &["unblock", "--limit", "per-user", "user=al ice&x"]);
    assert_eq!(result(&again).0, 1, "there was nothing: {again:?}");
    assert!(text(&again.stdout).contains("there was nothing to forget"));
}

#[test]
fn explain_of_a_server_uses_its_active_limits() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let url = format!("http://{}", server.address);
    let explained = operate(&server, &["explain", "--server", &url, "user=alice", "route=/x"]);
    let (code, printed, error) = result(&explained);
    assert_eq!(code, 0, "{error}");
    assert!(
        printed.contains("does not apply: `route` is `/x`") && printed.contains("(shadow: counted"),
        "{printed}"
    );
    assert!(printed.contains("per-user:token-bucket:1d:alice"), "{printed}");
    let json = json_of(&operate(&server, &["explain", "--server", &url, "--json", "user=alice"]));
    assert_eq!(json["limits"][2]["mode"], "shadow");
    let both = operate(&server, &["explain", "--server", &url, "--config", "x.yaml", "user=alice"]);
    assert_eq!(result(&both).0, 2);
}

#[test]
fn limits_are_read_tried_put_and_deleted() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let got = operate(&server, &["limits", "get"]);
    let (code, printed, _) = result(&got);
    assert!(code == 0 && printed.starts_with("version 1, from the file of the server\n"), "{printed}");
    assert!(printed.contains("100/day burst 2") && printed.contains("(all)"), "{printed}");

    let mut edited = json_of(&operate(&server, &["limits", "get", "--json"]));
    edited["limits"][0]["burst"] = json!(9);
    let file = folder.write("edited.json", &edited.to_string());
    let file = file.to_str().unwrap();
    let tried = operate(&server, &["limits", "put", "--dry-run", file]);
    let (code, printed, error) = result(&tried);
    assert!(code == 0 && printed.contains("per-user  changed  are kept"), "{printed} {error}");
    assert_eq!(server.get("/v1/limits").json()["version"], 1, "a dry run changes nothing");

    let put = operate(&server, &["limits", "put", file]);
    let (code, printed, error) = result(&put);
    assert!(
        code == 0 && printed.contains("this process only: a restart returns to the file"),
        "{printed} {error}"
    );
    assert!(printed.contains("100/day burst 9"), "{printed}");
    let stale = operate(&server, &["limits", "put", file]);
    let (code, _, error) = result(&stale);
    assert!(code == 2 && error.contains("version_mismatch"), "the file has version 1: {error}");

    let yaml = folder.write("new.yaml", "limits: [{ name: only, by: ip, rate: 5/s }]\n");
    let put = json_of(&operate(&server, &["limits", "put", "--json", yaml.to_str().unwrap()]));
    assert_eq!((&put["limits"][0]["name"], &put["source"]), (&json!("only"), &json!("api")));
    let broken = folder.write("broken.yaml", "limits:\n  - { name: only, rate: 5/x }\n");
    let (code, _, error) = result(&operate(&server, &["limits", "put", broken.to_str().unwrap()]));
    assert!(code == 2 && error.contains("broken.yaml:2:"), "{error}");
    let deleted = operate(&server, &["limits", "delete"]);
    assert!(text(&deleted.stdout).starts_with("version 4, from the file of the server\n"), "{deleted:?}");
}

#[test]
fn errors_name_the_fix_and_exit_with_2() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    for args in [
        &["usage", "user=a"][..],
        &["unblock", "user=a"],
        &["unblock", "--limit", "per-user", "user=a"],
        &["limits", "delete"],
        &["top", "--once"],
        &["explain", "--server", &format!("http://{}", server.address), "user=a"],
    ] {
        let without = output(&mut command(&server, args));
        let (code, printed, error) = result(&without);
        assert_eq!((code, &*printed), (2, ""), "{args:?}");
        assert!(error.contains("--token-file"), "{args:?}: {error}");
    }
    for (args, words) in [
        (&["unblock", "--limit", "none", "user=a"][..], "there is no limit `none`"),
        (&["unblock", "--limit", "per-user", "ip=192.0.2.7"], "keyed by `user`, which is missing"),
        (&["unblock", "user=a", "user=b"], "given twice"),
        (&["limits", "put", "/nowhere.yaml"], "/nowhere.yaml"),
    ] {
        let failed = operate(&server, args);
        let (code, _, error) = result(&failed);
        assert!(code == 2 && error.contains(words), "{args:?}: {error}");
    }
    for args in [&["usage", "a=b"][..], &["top"], &["limits", "get"], &["unblock", "a=b"]] {
        let nowhere = output(tollkeeper().args(args).env("TOLLKEEPER_SERVER", "http://127.0.0.1:9"));
        let (code, _, error) = result(&nowhere);
        assert!(code == 2 && error.contains("http://127.0.0.1:9"), "{args:?}: {error}");
    }
}

#[test]
fn top_prints_a_frame_without_a_terminal() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    while server.check(r#"{"user":"alice"}"#) {}
    for args in [&["top"][..], &["top", "--once"]] {
        let top = operate(&server, args);
        let (code, printed, error) = result(&top);
        assert_eq!(code, 0, "{error}");
        assert!(printed.contains("100/day burst 2") && printed.contains("alice"), "{printed}");
        assert!(!printed.contains('\x1b'), "{printed}");
    }
    let top = json_of(&operate(&server, &["top", "--once", "--json"]));
    assert_eq!(top["event"]["limits"]["per-user"]["refused"], 1);
    assert_eq!(top["top"]["refused"][0]["key"], json!(["alice"]));
}

/// Runs the command in a pseudo-terminal, presses `q`, and compares the settings of the terminal before and after.
#[test]
fn top_leaves_the_terminal_as_it_was() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    server.check(r#"{"user":"alice"}"#);
    let top = format!(
        "stty rows 24 cols 80; stty -a > before; {} top; echo code=$?; stty -a > after",
        env!("CARGO_BIN_EXE_tollkeeper")
    );
    let keys = "sleep 3; printf r; sleep 0.3; printf q; sleep 1";
    let script = format!("({keys}) | script -q -e -c '{top}' typescript");
    let shell = output(
        Command::new("bash")
            .args(["-c", &script])
            .current_dir(folder.path())
            .env("TERM", "xterm")
            .env("TOLLKEEPER_SERVER", format!("http://{}", server.address))
            .env("TOLLKEEPER_TOKEN", "boss"),
    );
    let shown = std::fs::read_to_string(folder.path().join("typescript")).unwrap();
    let setting = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(setting("before"), setting("after"), "{shell:?}");
    assert!(shown.contains("code=0"), "{shown}");
    let (enter, leave) = (shown.find("\x1b[?1049h"), shown.rfind("\x1b[?1049l"));
    assert!(enter.is_some() && enter < leave, "it uses the alternate screen: {shown:?}");
    assert!(shown.contains("per-user") && shown.contains("sort by file"), "{shown:?}");
    assert!(shown.find("\x1b[?25h") > shown.find("\x1b[?25l"), "the cursor is shown again");
}

#[test]
fn demo_plays_the_burst_through_every_algorithm() {
    let demo = run(&["demo"]);
    let (code, printed, error) = result(&demo);
    assert_eq!(code, 0, "{error}");
    for words in ["TOKEN-BUCKET", "CONCURRENCY", "allowed 3/5", "refused, retry in", "of 72"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    let json = json_of(&run(&["demo", "--json"]));
    let names: Vec<&str> =
        json["algorithms"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 6);
    for algorithm in json["algorithms"].as_array().unwrap() {
        let requests = algorithm["requests"].as_array().unwrap();
        let allowed = requests[..7].iter().filter(|request| request["allowed"] == true).count();
        assert_eq!(allowed, 5, "the first five of seven at once: {algorithm}");
        assert!(requests[6]["retry_after"].as_f64().unwrap() > 0.0);
    }
    let one = run(&["demo", "--algorithm", "sliding-log"]);
    assert!(!text(&one.stdout).contains("TOKEN-BUCKET") && text(&one.stdout).contains("SLIDING-LOG"));
    let (code, _, error) = result(&run(&["demo", "--algorithm", "magic"]));
    assert!(code == 2 && error.contains("leaky-bucket"), "{error}");
}

#[test]
fn override_is_set_listed_and_deleted() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let run = |args: &[&str]| result(&operate(&server, &[&["override"], args].concat()));
    assert_eq!(run(&["list"]), (0, "there are no overrides\n".to_owned(), String::new()));
    let (code, printed, error) =
        run(&["set", "per-user", "al/ice", "rate=500/day", "burst=9", "until=7d", "note=ticket 4711"]);
    assert!(
        code == 0 && printed.contains("500/day burst 9") && printed.contains("ticket 4711"),
        "{printed} {error}"
    );
    assert!(printed.contains("al/ice"), "{printed}");
    let (_, usage, _) = result(&operate(&server, &["usage", "user=al/ice"]));
    assert!(usage.contains("`per-user`: this key has an override until 20"), "{usage}");
    let (_, listed, _) = run(&["list"]);
    assert!(listed.contains("al/ice") && listed.contains("until the server ends"), "{listed}");
    let json = json_of(&operate(&server, &["override", "list", "--json"]));
    assert_eq!(json["overrides"][0]["burst"], 9);
    let blocked =
        json_of(&operate(&server, &["override", "set", "--json", "per-user", "mallory", "blocked"]));
    assert_eq!(blocked["blocked"], true);
    assert!(!server.check(r#"{"user":"mallory"}"#));
    assert_eq!(run(&["delete", "per-user", "mallory"]).0, 0);
    assert_eq!(run(&["delete", "per-user", "mallory"]).0, 1);
    for (args, words) in [
        (&["set", "none", "a", "blocked"][..], "there is no limit `none`"),
        (&["set", "per-user", "a", "block"], "`block` is not known"),
        (&["set", "per-user", "a", "burst=5"], "`rate` is missing"),
        (&["set", "per-user", "a", "blocked", "until=2020-01-01T00:00:00Z"], "in the past"),
        (&["set", "trial", "a", "blocked"], "has no `by`"),
    ] {
        let (code, _, error) = run(args);
        assert!(code == 2 && error.contains(words), "{args:?}: {error}");
    }
}
