//! `docs/config.md`, printed from the [`shape`](super::shape): every key with its kind, its default and an
//! example. Made by the test below, which fails when the page is old.

use std::fmt::Write as _;
use std::path::Path;

use super::shape::{self, Key, Kind, Names, Support};

#[test]
fn the_reference_is_what_the_table_says() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let printed = page_of_all_keys();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&page, &printed).expect("the folder of the documentation");
    }
    let kept = std::fs::read_to_string(&page).unwrap_or_default();
    let how = "UPDATE=1 cargo test -p tollkeeper --features config --lib reference";
    assert!(kept == printed, "docs/config.md is old: `{how}` prints it anew");
}

fn page_of_all_keys() -> String {
    let mut page = String::from(INTRODUCTION);
    for section in shape::sections() {
        let title = match section.path {
            "" => "The file".to_owned(),
            "limits" => "A limit: `limits`".to_owned(),
            "tiers" => "A tier or an override: `tiers`, `overrides`".to_owned(),
            "deduct_when" => "A response: `deduct_when`, `refund_when`".to_owned(),
            "http.facts" => "A fact of HTTP: `http.facts`".to_owned(),
            path => format!("`{path}`"),
        };
        let _ = write!(page, "\n## {title}\n\n{}\n\n", section.doc);
        page.push_str("| Key | Value | Default | Example | What it does |\n|---|---|---|---|---|\n");
        section.keys.iter().for_each(|key| page.push_str(&row(key)));
    }
    page.push_str(ENDING);
    let _ = write!(page, "\n## A whole file\n\n```yaml\n{WHOLE}```\n");
    page
}

/// A file that the tests read.
const WHOLE: &str = include_str!("../../tests/config/good/full.yaml");

const INTRODUCTION: &str = "\
# The config file

<!-- Printed from crates/tollkeeper/src/config/shape.rs; the test that finds it old says how to print it anew. -->

Every key, with its default. `Limiter::from_config` reads the file; a mistake is reported with its place and with what
would be right, all mistakes at once. Unknown keys are mistakes, and so are keys that stand twice.

```yaml
limits:
  - name: per-ip
    by: ip
    rate: 1000/min
  - name: per-user
    by: user
    rate: 100/min
    burst: 20
```

A duration is a whole number with a unit, one of `ms s m min h hour d day w week`: `500ms`, `15m`. A rate is a count per
duration: `10/s`, `5/15m`; or `unlimited`; or `0/s`, which refuses everything. Months are not a unit: they differ.

`${VAR}` and `${VAR:-default}` in values come from the environment; what came from there is never shown in a message.
YAML may have anchors, aliases and merge keys (`<<: *base`); it may not have tags or a second document. A file has at most
4 MiB.
";

const ENDING: &str = "
## Warnings

A file without mistakes may still say what is probably not meant. It is warned of

- no enforced limit that applies to every HTTP request on every route: one `by: ip` (or without `by`, or with `missing:
  share` or `deny`), without `when` and `unless`;
- facts from headers that any client could set, where a limit uses them. Exempt are facts that are `trusted`, because then
  only `trusted_proxies` can set them; the headers `authorization` and `cookie`; and facts with `hash: true`, which are
  secrets: whoever checks a secret refuses one that was made up;
- facts of `header.NAME` with capitals, which are never there: names of headers are in lower case;
- facts that are `trusted` while `trusted_proxies` is empty;
- a `share` that rounds a count, a burst or a number of slots by more than a tenth;
- two leaky buckets that can meet on one request;
- concurrency limits while neither HTTP nor the proxy listens: gRPC and RESP never take slots.
";

fn row(key: &Key) -> String {
    let default = match (key.default, key.required) {
        (_, true) => "required".to_owned(),
        ("", _) => String::new(),
        (default, _) => format!("`{default}`"),
    };
    let not_yet = if key.support == Support::NotYet { " **Not yet.**" } else { "" };
    let doc = key.doc.replace('|', "\\|");
    let example = if key.example.is_empty() { String::new() } else { format!("`{}`", key.example) };
    format!("| `{}` | {} | {default} | {example} | {doc}{not_yet} |\n", key.name, kind(&key.kind))
}

/// What a value is, in words.
fn kind(kind: &Kind) -> String {
    match kind {
        Kind::Store => "URL".to_owned(),
        Kind::Path => "path".to_owned(),
        Kind::Listener => "address with port, or `off`".to_owned(),
        Kind::Count { least, most: u64::MAX } => format!("whole number from {least}"),
        Kind::Count { least, most } => format!("whole number, {least} to {most}"),
        Kind::Truth => "`true` or `false`".to_owned(),
        Kind::Duration { least, most } => {
            let shown = tollkeeper_core::Span::from_millis;
            format!("duration, {} to {}", shown(*least), shown(*most))
        }
        Kind::Percent => "percentage".to_owned(),
        Kind::Share => "`a/b`".to_owned(),
        Kind::Rate => "rate".to_owned(),
        Kind::Choice { words, not_yet } => {
            let word = |word: &&str| {
                if not_yet.contains(word) { format!("`{word}` (not yet)") } else { format!("`{word}`") }
            };
            words.iter().map(word).collect::<Vec<_>>().join(", ")
        }
        Kind::LimitName => "name".to_owned(),
        Kind::Fact => "fact".to_owned(),
        Kind::Value | Kind::Text => "text".to_owned(),
        Kind::Prefix => "text".to_owned(),
        Kind::Network => "address or network".to_owned(),
        Kind::Route => "path pattern".to_owned(),
        Kind::HostName => "host name".to_owned(),
        Kind::ClientAddress => "header".to_owned(),
        Kind::Source => "part of the request".to_owned(),
        Kind::Status => "status or class".to_owned(),
        Kind::Sha256 => "64 hex digits".to_owned(),
        Kind::List(inner) => format!("list of: {}", self::kind(inner)),
        Kind::OneOrList(inner) => format!("{}, or a list", self::kind(inner)),
        Kind::Table(_) => "table (below)".to_owned(),
        Kind::Grant(_) => "rate, or a table".to_owned(),
        Kind::Map { names, value } => {
            let names = match names {
                Names::Fact => "fact",
                Names::Tier => "tier",
                Names::Value => "value",
            };
            format!("table of {names}: {}", self::kind(value))
        }
    }
}
