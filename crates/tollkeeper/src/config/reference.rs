//! Generates `docs/config.md` from the [key table](super::key_table): every key with its kind, default and example.
//!
//! The test below generates the page, and fails if the committed page is stale.

use std::fmt::Write as _;
use std::path::Path;

use super::key_table::{self, Key, KeyKind, Names};
use super::units;
use super::warning::Warning;

#[test]
fn config_reference_is_up_to_date() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let printed = page_of_all_keys();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&page, &printed).expect("the folder of the documentation");
    }
    let kept = std::fs::read_to_string(&page).unwrap_or_default();
    let how = "UPDATE=1 cargo test -p tollkeeper --features config --lib reference";
    assert!(kept == printed, "docs/config.md is stale: regenerate it with `{how}`");
}

fn page_of_all_keys() -> String {
    let mut page = String::from(INTRODUCTION);
    for section in key_table::sections() {
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
    page.push_str(HASHED_FACTS);
    page.push_str(WARNINGS);
    for warning in Warning::ALL {
        let _ = writeln!(page, "| `{warning}` | {} |", warning.explanation());
    }
    page.push_str(CHANGES);
    let _ = write!(page, "\n## A whole file\n\n```yaml\n{WHOLE}```\n");
    page
}

/// A complete file, which the tests read too.
const WHOLE: &str = include_str!("../../tests/config/good/full.yaml");

const INTRODUCTION: &str = "\
# The config file

<!-- Generated from crates/tollkeeper/src/config/key_table.rs; the test that finds it stale says how to regenerate it. -->

Every key, with its default. `Limiter::from_config` reads the file. All errors are reported at once, each with its
position and a suggestion. Unknown and duplicate keys are errors.

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
duration: `10/s`, `5/15m`; or `unlimited`; or `0/s`, which refuses every request. Months are not a unit, because they vary
in length.

`${VAR}` and `${VAR:-default}` in values are replaced by environment variables, whose values are never shown in a message.
YAML files may use anchors, aliases and merge keys (`<<: *base`), but no tags and no second document. A file may have at
most 4 MiB.
";

const HASHED_FACTS: &str = "
## Hashed facts

`hash: true` replaces a value by the first 32 hexadecimal digits of its SHA-256, after `normalize`. Raw values from every
source are hashed: headers, JSON, the query, RESP, gRPC, and the facts of a limiter built from the file. So a customer has
one count, and these commands use the same key as the header `Authorization: Bearer cust-1`:

```sh checked-not-run
curl 'http://127.0.0.1:8080/v1/usage?api_key=cust-1'
curl 'http://127.0.0.1:8080/v1/usage?api_key=sha256:21d120906fd394b11c7a5ea3e84254bb'
curl -d '{\"facts\":{\"api_key\":{\"sha256\":\"21d120906fd394b11c7a5ea3e84254bb\"}}}' http://127.0.0.1:8080/v1/check
```

(The commands are checked, not run.) Responses show `sha256:` and twelve digits.
`/v1/usage` and `/v1/state` accept these twelve digits on the node that showed them, unless they match several values.
In headers, cookies, the client's query, RESP and Envoy's descriptors, a value that looks like a hash is treated as a raw
value: a client cannot use another client's key. `overrides` and `allow` list raw values.
";

const WARNINGS: &str = "
## Warnings

A valid file may still contain a probable mistake. `validate` shows it with its position, and the server logs it when it
loads the file. Each warning has a code: `warning[W001]`. Silence an accepted warning with `validate: { ignore: [W001] }`.

`validate` also lists the headers that the gateway must set or remove on every request, because `trusted` facts are read
from them: a gateway that forwards such a header from a client lets the client choose its own plan.

| Code | Meaning |
|---|---|
";

const CHANGES: &str = "
## Changing a file that is in use

The server and `config::Follow` watch the file for changes; a SIGHUP makes the server read it at once. All counts are kept,
and an invalid file changes nothing.

A file may be read while it is being written. So a change that only adds to the file, or only changes numbers, takes effect
at once. A change that removes anything else (a token, a limit, a key of a limit, a route) takes effect when two reads
250 ms apart have found the same content and the same modification time. A file without `limits` is rejected: write an empty
policy as `limits: []`. A file that keeps changing for longer than 5 s is reported, and the active config stays. To be sure
that a file is never read partly written, write a new file and rename it over the old one.
";

fn row(key: &Key) -> String {
    let default = match (key.default, key.required) {
        (_, true) => "required".to_owned(),
        ("", _) => String::new(),
        (default, _) => format!("`{default}`"),
    };
    let doc = key.doc.replace('|', "\\|");
    let example = if key.example.is_empty() { String::new() } else { format!("`{}`", key.example) };
    format!("| `{}` | {} | {default} | {example} | {doc} |\n", key.name, kind(&key.kind))
}

/// The kind of a value, in words.
fn kind(kind: &KeyKind) -> String {
    match kind {
        KeyKind::Store => "URL".to_owned(),
        KeyKind::Path => "path".to_owned(),
        KeyKind::Listener => "address with a port, or `off`".to_owned(),
        KeyKind::Count { least, most: u64::MAX } => format!("whole number from {least}"),
        KeyKind::Count { least, most } => format!("whole number, {least} to {most}"),
        KeyKind::Bool => "`true` or `false`".to_owned(),
        KeyKind::Duration { least, most } => {
            let shown = tollkeeper_core::Span::from_millis;
            format!("duration, {} to {}", shown(*least), shown(*most))
        }
        KeyKind::Size { least, most } => format!("size, {} to {}", units::Size(*least), units::Size(*most)),
        KeyKind::Percent => "percentage".to_owned(),
        KeyKind::Share => "`a/b`".to_owned(),
        KeyKind::Rate => "rate".to_owned(),
        KeyKind::Choice { words, not_yet } => {
            let word = |word: &&str| {
                if not_yet.contains(word) { format!("`{word}` (not yet)") } else { format!("`{word}`") }
            };
            words.iter().map(word).collect::<Vec<_>>().join(", ")
        }
        KeyKind::LimitName => "name".to_owned(),
        KeyKind::Fact => "fact".to_owned(),
        KeyKind::Value | KeyKind::Text => "string".to_owned(),
        KeyKind::Prefix => "string".to_owned(),
        KeyKind::Network => "address or network".to_owned(),
        KeyKind::Route => "path pattern".to_owned(),
        KeyKind::HostName => "host name".to_owned(),
        KeyKind::ClientAddress => "header".to_owned(),
        KeyKind::Source => "part of the request".to_owned(),
        KeyKind::Status => "status or class".to_owned(),
        KeyKind::Sha256 => "64 hex digits".to_owned(),
        KeyKind::CostMissing => "`error`, `skip` or a whole number".to_owned(),
        KeyKind::Warning => "code".to_owned(),
        KeyKind::List(inner) => format!("list of: {}", self::kind(inner)),
        KeyKind::OneOrList(inner) => format!("{}, or a list", self::kind(inner)),
        KeyKind::Table(_) => "table (below)".to_owned(),
        KeyKind::Grant(_) => "rate, or a table".to_owned(),
        KeyKind::Map { names, value } => {
            let names = match names {
                Names::Fact => "fact",
                Names::Tier => "tier",
                Names::Value => "value",
            };
            format!("table of {names}: {}", self::kind(value))
        }
    }
}
