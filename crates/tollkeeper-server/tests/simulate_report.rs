//! The HTML report of `tollkeeper simulate`, opened in Chromium.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::*;
use tollkeeper_tests::languages;
use tollkeeper_tests::page::Page;

/// Text that would run if it were not escaped.
const HOSTILE: &str =
    "<script>window.ran=1</script><img src=x onerror='window.ran=2'>\"'&<svg onload=alert(1)>";

/// Opens a report and returns what the script in the browser found.
fn open(file: &Path, folder: &Folder) -> Value {
    let modules = languages::node("simulate-report", &["playwright-core@1", "axe-core@4"]);
    let script = modules.join("open_report.js");
    fs::write(&script, include_str!("simulate/open_report.js")).unwrap();
    let printed = languages::run(Command::new("node").arg(&script).arg(file).arg(folder.path()));
    serde_json::from_str(&printed).unwrap()
}

#[test]
fn report_opens_in_a_browser_and_runs_nothing() {
    let folder = Folder::new();
    let policy = "http: { facts: { agent: { from: header.user-agent } } }
limits:
  - { name: per-agent, by: agent, rate: 2/min }
  - { name: per-path, by: path, rate: 5/min, burst: 2 }
  - { name: shadow, by: user, rate: 1/hour, mode: shadow }
  - { name: unsaid, by: tenant, rate: 1/hour }
";
    let name = "<script>window.ran=3<script>'\"&.yaml";
    let (config, other) = (folder.write("policy.yaml", policy), folder.write(name, policy));
    let escaped = HOSTILE.replace('"', "\\x22");
    let mut log = String::new();
    for index in 0..400 {
        let (second, agent) = (index / 4 % 60, if index % 3 == 0 { "curl/8" } else { &escaped });
        writeln!(
            log,
            "192.0.2.{} - <b>{escaped}</b> [16/Nov/2025:11:{:02}:{second:02} +0000] \"GET /{index} HTTP/1.1\" 200 12 \"{escaped}\" \"{agent}\"",
            index % 5,
            index / 240
        )
        .unwrap();
    }
    writeln!(log, "{HOSTILE}").unwrap();
    let log = folder.write("access.log", &log);
    let report = folder.path().join("report.html");
    let mut command = tollkeeper();
    command
        .args(["simulate", "--format", "combined", "--algorithms", "--suggest", "1%", "--html"])
        .arg(&report);
    command
        .args(["--fail-if", "refused(per-agent)>1000", "--fact", "user=$remote_user", "--config"])
        .arg(config);
    let output = output(command.arg("--against").arg(other).arg(log));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));

    let html = fs::read_to_string(&report).unwrap();
    assert!(html.len() < 300_000, "{} bytes", html.len());
    assert!(html.contains("Content-Security-Policy") && html.contains("default-src 'none'"));
    assert_eq!(html.matches("<script").count(), 1, "the one that sorts tables");
    let found = open(&report, &folder);
    assert_eq!(
        (&found["ran"], &found["dialogs"], &found["errors"]),
        (&Value::Null, &json!(0), &json!([])),
        "{found}"
    );
    assert_eq!(found["requests"].as_array().unwrap().len(), 1, "only the page itself: {found}");
    assert_eq!(found["elements"], 0, "no element came from the log");
    assert_eq!(found["axe"], json!([]));
    let read = found["text"].as_str().unwrap();
    for words in [
        "<script>window.ran=1</script>",
        "per-agent",
        "tenant",
        "Refused share by algorithm",
        "Not simulated",
    ] {
        assert!(read.contains(words), "{words}: {read}");
    }
    assert!(found["pictures"].as_u64().unwrap() >= 5, "{found}");
    let (mut ascending, descending) = (found["ascending"].clone(), found["descending"].clone());
    ascending.as_array_mut().unwrap().reverse();
    assert_eq!(ascending, descending);
    let numbers: Vec<u64> =
        descending.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect();
    assert!(
        numbers.len() == 3 && numbers.is_sorted_by(|one, other| one >= other) && numbers[0] > numbers[2],
        "{numbers:?}"
    );
}

/// The pictures of `docs/choosing-limits.md` are those of the report that its commands write.
#[test]
fn pictures_of_the_page_are_those_of_its_report() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join("docs/choosing-limits.md")).unwrap();
    let page = Page::parse("docs/choosing-limits.md", &text).unwrap();
    let folder = Folder::new();
    folder.write("limits.yaml", &page.file("limits.yaml").text);
    let runs = |start: &str| page.blocks.iter().find(|block| block.text.starts_with(start)).unwrap();
    let log = output(Command::new("bash").args(["-c", &runs("awk").text]).current_dir(folder.path()));
    assert!(log.status.success());
    let mut command = tollkeeper();
    let args = "simulate --config limits.yaml --algorithms --suggest 6% --html report.html access.log";
    assert!(page.blocks.iter().any(|block| block.text.contains(args)), "the page has other arguments");
    let written = output(command.args(args.split(' ')).current_dir(folder.path()));
    assert_eq!(written.status.code(), Some(0), "{}", support::text(&written.stderr));
    let html = fs::read_to_string(folder.path().join("report.html")).unwrap();
    let pictures: Vec<String> = html.split("<svg ").skip(1).map(standalone).collect();
    for (name, picture) in [("traffic", &pictures[0]), ("suggest", &pictures[2])] {
        let file = root.join(format!("docs/reports/{name}.svg"));
        if std::env::var_os("UPDATE_PICTURES").is_some() {
            fs::write(&file, picture).unwrap();
        }
        let committed = fs::read_to_string(&file).unwrap_or_default();
        assert!(*picture == committed, "{name} is outdated: run this test with UPDATE_PICTURES=1");
    }
}

/// A picture of the report as a file of its own, with the colours of the light page.
fn standalone(rest: &str) -> String {
    let (picture, _) = rest.split_once("</svg>").unwrap();
    let (attributes, shapes) = picture.split_once('>').unwrap();
    let style = "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1a1a1a}.label{font-size:12.5px}.name{font-size:14px}";
    let colours = [
        ("var(--admitted)", "#0072b2"),
        ("var(--refused)", "#b84a00"),
        ("var(--grid)", "#e4e4e4"),
        ("var(--muted)", "#595959"),
    ];
    let shapes =
        colours.iter().fold(shapes.to_owned(), |shapes, (name, colour)| shapes.replace(name, colour));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" {attributes}>\n<style>{style}</style>\n\
         <rect width=\"900\" height=\"260\" fill=\"#ffffff\"/>{shapes}</svg>\n"
    )
}

/// 250 limits, each with many long keys.
#[test]
fn report_of_a_large_policy_is_small() {
    let folder = Folder::new();
    let mut policy = String::from("limits:\n");
    (0..250)
        .for_each(|index| writeln!(policy, "  - {{ name: limit-{index}, by: path, rate: 1/day }}").unwrap());
    let mut log = String::new();
    for index in 0..200 {
        let path = format!("/{}", "a".repeat(900));
        let line = "192.0.2.1 - - [16/Nov/2025:11:29:05 +0000] \"GET";
        writeln!(log, "{line} {path}{} HTTP/1.1\" 200 12 \"-\" \"-\"", index % 50).unwrap();
    }
    let (config, log) = (folder.write("policy.yaml", &policy), folder.write("access.log", &log));
    let report = folder.path().join("report.html");
    let output =
        output(tollkeeper().args(["simulate", "--html"]).arg(&report).arg("--config").arg(config).arg(log));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let size = fs::metadata(&report).unwrap().len();
    assert!((10_000..300_000).contains(&size), "{size} bytes");
}
