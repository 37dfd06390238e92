//! The commands that operate a running server: `usage`, `unblock`, `limits`, `explain --server`, `top`, and `demo`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_tests::certificates::Authority;

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
    // The environment names the server, too; a file on the command line takes precedence.
    assert_eq!(json_of(&operate(&server, &["explain", "--json", "user=alice"])), json);
    let file = folder.write("other.yaml", "limits: [{ name: of-the-file, by: user, rate: 1/day }]\n");
    let explained =
        operate(&server, &["explain", "--config", file.to_str().unwrap(), "--json", "user=alice"]);
    assert_eq!(json_of(&explained)["limits"][0]["name"], "of-the-file");
}

/// A token from a file or the environment, over https, with a CA that the system does not know.
#[test]
fn every_command_accepts_https_and_tokens() {
    let (authority, folder) = (Authority::new(), Folder::new());
    let (cert, key) = authority.certify("server", "IP:127.0.0.1");
    let tls = format!("tls: {{ cert: {}, key: {} }}\n", cert.display(), key.display());
    let server = Server::with_config(&folder, &config(&tls));
    let (url, ca) = (format!("https://{}", server.address), authority.certificate());
    let (ca, token) = (ca.to_str().unwrap(), folder.write("token", "boss\n"));
    for args in [
        &["check", "user=alice"][..],
        &["usage", "user=alice"],
        &["unblock", "--limit", "per-user", "user=alice"],
        &["limits", "get"],
        &["limits", "delete"],
        &["override", "set", "per-user", "bob", "blocked"],
        &["override", "list"],
        &["override", "delete", "per-user", "bob"],
        &["explain", "user=alice"],
        &["top", "--once"],
    ] {
        let with_file =
            [args, &["--json", "--server", &url, "--ca", ca, "--token-file", token.to_str().unwrap()]];
        let by_file = output(tollkeeper().args(with_file.concat()));
        assert!(json_of(&by_file).is_object(), "{args:?}");
        if args[..] == ["unblock", "--limit", "per-user", "user=alice"] {
            assert_eq!(result(&operate_tls(&url, ca, &["check", "user=alice"])).0, 0);
        } else if args[..] == ["override", "delete", "per-user", "bob"] {
            assert_eq!(json_of(&by_file), json!({ "done": true }));
            assert_eq!(
                result(&operate_tls(&url, ca, &["override", "set", "per-user", "bob", "blocked"])).0,
                0
            );
        }
        let by_environment = operate_tls(&url, ca, args);
        assert_eq!(by_environment.status.code(), Some(0), "{args:?}: {}", text(&by_environment.stderr));
        let untrusted = output(tollkeeper().args(args).env("TOLLKEEPER_SERVER", &url));
        let (code, _, error) = result(&untrusted);
        assert!(code == 2 && error.contains("--ca FILE"), "{args:?}: {error}");
    }
}

/// Runs a command against a server with TLS, which the environment names, as is the token.
fn operate_tls(url: &str, ca: &str, args: &[&str]) -> Output {
    let mut command = tollkeeper();
    output(
        command.args(args).args(["--ca", ca]).env("TOLLKEEPER_SERVER", url).env("TOLLKEEPER_TOKEN", "boss"),
    )
}

/// As a server answers that has many overrides with long notes: more than any other response.
#[test]
fn override_list_has_no_smaller_bound_than_the_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let one = json!({
        "limit": "per-user", "key": "alice", "rate": null, "burst": null, "blocked": true, "unlimited": false,
        "until": null, "note": "x".repeat(1_024),
    });
    let most = 20_000;
    let body = json!({ "overrides": vec![one; most], "persistent": true }).to_string();
    assert!(body.len() > 16 << 20);
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4_096]).unwrap();
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    });
    let listed = json_of(&run(&["override", "list", "--json", "--server", &url]));
    serving.join().unwrap().unwrap();
    assert_eq!(listed["overrides"].as_array().unwrap().len(), most);
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
        &["override", "list"],
        &["override", "set", "per-user", "a", "blocked"],
        &["override", "delete", "per-user", "a"],
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
        (&["override", "delete", "none", "a"], "there is no limit `none`"),
    ] {
        let failed = operate(&server, args);
        let (code, _, error) = result(&failed);
        assert!(code == 2 && error.contains(words), "{args:?}: {error}");
    }
    for args in
        [&["usage", "a=b"][..], &["top"], &["limits", "get"], &["unblock", "a=b"], &["override", "list"]]
    {
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

/// Runs `top` in a pseudo-terminal: waits until it shows each text and then presses the keys beside it. The settings of
/// the terminal must be the same before and after. Returns what was shown.
fn top_in_a_terminal(server: &Server, token: &str, steps: &[(&str, &str)]) -> String {
    let folder = Folder::new();
    let top = format!(
        "stty rows 24 cols 80; stty -a > before; {} top; echo code=$?; stty -a > after",
        env!("CARGO_BIN_EXE_tollkeeper")
    );
    let press = |(text, keys): &(&str, &str)| {
        format!("until grep -q -a '{text}' typescript; do sleep 0.05; done; printf '{keys}';")
    };
    let keys: String = steps.iter().map(press).collect();
    let ended = "until [ -e after ]; do sleep 0.05; done";
    let script = format!("({keys} {ended}) | timeout 60 script -q -e -f -c '{top}' typescript");
    let shell = output(
        Command::new("bash")
            .args(["-c", &format!("touch typescript; {script}")])
            .current_dir(folder.path())
            .env("TERM", "xterm")
            .env("TOLLKEEPER_SERVER", format!("http://{}", server.address))
            .env("TOLLKEEPER_TOKEN", token),
    );
    let shown = std::fs::read_to_string(folder.path().join("typescript")).unwrap();
    let setting = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(setting("before"), setting("after"), "{shell:?}");
    let (enter, leave) = (shown.find("\x1b[?1049h"), shown.rfind("\x1b[?1049l"));
    assert!(enter.is_some() && enter < leave, "it uses the alternate screen: {shown:?}");
    assert!(shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is shown again");
    assert!(shown.contains("code=0"), "{shown}");
    shown
}

#[test]
fn top_leaves_the_terminal_as_it_was() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    server.check(r#"{"user":"alice"}"#);
    for quit in ["q", "\\003"] {
        let shown = top_in_a_terminal(&server, "boss", &[("per-user", "r"), ("sort by file", quit)]);
        assert!(shown.contains("100/day burst 2"), "{shown:?}");
    }
}

/// An admin token protects the calls that show keys, and `auth` protects all of them.
#[test]
fn top_asks_for_a_missing_token_once() {
    let auth = format!("auth: {{ token_sha256: [{}] }}\n", hex(&sha256(b"data")));
    let only_auth = format!("{auth}limits: [{{ name: per-user, by: user, rate: 100/day }}]\n");
    for (config, token) in [(config(""), "boss"), (config(&auth), "boss"), (only_auth, "data")] {
        let folder = Folder::new();
        let server = Server::with_config(&folder, &config);
        let typed = format!("{token}\\r");
        let shown = top_in_a_terminal(&server, "", &[("token: ", &typed), ("per-user", "q")]);
        assert_eq!(shown.matches("token: ").count(), 1, "{shown:?}");
        assert!(!shown.contains(token), "the token is not shown: {shown:?}");
    }
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
    let deleted = operate(&server, &["override", "delete", "--json", "per-user", "mallory"]);
    assert_eq!(result(&deleted), (1, "{\"done\":false}\n".to_owned(), String::new()));
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
