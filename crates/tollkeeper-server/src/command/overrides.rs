//! `tollkeeper override`: lists, sets and deletes the quotas of single keys on a running server.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tollkeeper::MAX_OVERRIDES;
use tollkeeper::facts::MAX_VALUE;
use tollkeeper::policy::UtcTime;

use crate::command::args::{OverrideAction, Overrides};
use crate::command::client::{Client, escaped};
use crate::command::{say, table};

/// The longest note, in bytes.
const MAX_NOTE: usize = 1_024;
/// The maximum size of the list: JSON writes a control character in six bytes, and limit, quota and end have less than
/// 512 together.
const MAX_LIST: usize = 1_024 + MAX_OVERRIDES * (512 + 6 * (MAX_VALUE + MAX_NOTE));

/// Runs the action. The exit code of a deletion is 1 if there was no such override.
pub fn run(args: &Overrides) -> anyhow::Result<ExitCode> {
    match &args.action {
        OverrideAction::List { call } => {
            let answer = Client::new(&call.target)?.get_up_to("/v1/overrides", MAX_LIST)?;
            if call.json {
                say(&answer.body)?;
            } else {
                let Listed { overrides, persistent } = answer.read("overrides")?;
                print(&overrides)?;
                if !persistent && !overrides.is_empty() {
                    say("they last until the server ends: it has neither Redis nor a snapshot")?;
                }
            }
        }
        OverrideAction::Set { limit, value, words, call } => {
            let body = body(words)?.to_string();
            let client = Client::new(&call.target)?;
            let answer = client.call(Method::PUT, &path(limit, value), Some(body), &[200])?;
            if call.json {
                say(&answer.body)?;
            } else {
                print(&[answer.read("an override")?])?;
            }
        }
        OverrideAction::Delete { limit, value, call } => {
            let client = Client::new(&call.target)?;
            let answer = client.call(Method::DELETE, &path(limit, value), None, &[200])?;
            let Done { done } = answer.read("a result")?;
            if call.json {
                say(&answer.body)?;
            } else {
                say(if done { "removed" } else { "there was no such override" })?;
            }
            return Ok(ExitCode::from(u8::from(!done)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn path(limit: &str, value: &str) -> String {
    format!("/v1/overrides/{}/{}", escaped(limit), escaped(value))
}

/// The body of a call from words such as `rate=500/min burst=50 until=7d note=…`.
fn body(words: &[String]) -> anyhow::Result<Value> {
    let mut body = Map::new();
    for word in words {
        let (name, value) = match word.split_once('=') {
            Some((name @ ("rate" | "note"), text)) => (name, json!(text)),
            Some((name @ ("burst" | "limit"), number)) => {
                let number: u64 =
                    number.parse().with_context(|| format!("`{word}` is not a whole number"))?;
                (name, json!(number))
            }
            Some(("until", text)) => ("until", json!(until(text)?)),
            None if matches!(word.as_str(), "blocked" | "unlimited") => (word.as_str(), json!(true)),
            _ => bail!(
                "`{word}` is not known: use rate=500/min, burst=50, limit=5, blocked, unlimited, until=7d and note=TEXT"
            ),
        };
        if body.insert(name.to_owned(), value).is_some() {
            bail!("`{name}` is given twice");
        }
    }
    Ok(body.into())
}

/// A time in Unix seconds: so long from now (`7d`), or as in RFC 3339 (`2026-11-25T00:00:00Z`).
fn until(text: &str) -> anyhow::Result<u64> {
    if let Some(unix) = rfc3339(text) {
        return Ok(unix);
    }
    let length = tollkeeper::config::duration(text).map_err(|error| {
        anyhow::anyhow!("`until={text}`: {error}; or use a time such as 2026-11-25T00:00:00Z")
    })?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    Ok((now + length).as_secs())
}

/// Seconds since the epoch of a time in UTC, such as `2026-11-25T00:00:00Z`.
fn rfc3339(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix(['Z', 'z'])?.split_once(['T', 't'])?;
    let numbers =
        |text: &str, by: char| text.split(by).map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>();
    let (&[year, month, day], &[hour, minute, second]) =
        (numbers(date, '-')?.as_slice(), numbers(time, ':')?.as_slice())
    else {
        return None;
    };
    if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    if hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Years begin in March here, so that the leap day is the last.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let unix = (days.checked_sub(719_468)?) * 86_400 + hour * 3_600 + minute * 60 + second;
    // Rejects days that a month does not have.
    let same_day = UtcTime(unix).to_string().starts_with(&date.to_owned());
    same_day.then_some(unix)
}

fn print(overrides: &[Shown]) -> anyhow::Result<()> {
    if overrides.is_empty() {
        return say("there are no overrides");
    }
    let mut table = table::with(&["LIMIT", "KEY", "QUOTA", "UNTIL", "NOTE"]);
    for it in overrides {
        let burst = it.burst.map_or(String::new(), |burst| format!(" burst {burst}"));
        let quota = match (&it.rate, it.slots) {
            (Some(rate), _) => format!("{rate}{burst}"),
            (None, Some(slots)) => format!("{slots} slots"),
            (None, None) if it.blocked => "blocked".to_owned(),
            (None, None) => "unlimited".to_owned(),
        };
        let until = it.until.map_or("-".to_owned(), |until| UtcTime(until).to_string());
        let text = |text: &Option<String>| text.as_deref().unwrap_or("-").escape_debug().to_string();
        table.add_row([
            table::cell(&it.limit, None),
            table::cell(it.key.escape_debug(), None),
            table::cell(quota, it.blocked.then_some(false)),
            table::cell(until, None),
            table::cell(text(&it.note), None),
        ]);
    }
    say(table.trim_fmt())
}

#[derive(Debug, Deserialize)]
struct Listed {
    overrides: Vec<Shown>,
    persistent: bool,
}

/// The fields of an override that are printed.
#[derive(Debug, Deserialize)]
struct Shown {
    limit: String,
    key: String,
    rate: Option<String>,
    burst: Option<u64>,
    slots: Option<u64>,
    blocked: bool,
    until: Option<u64>,
    note: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Done {
    done: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_written() {
        for text in
            ["1970-01-01T00:00:00Z", "2000-02-29T23:59:59Z", "2026-11-25T00:00:05Z", "2100-03-01T00:00:00Z"]
        {
            assert_eq!(UtcTime(rfc3339(text).unwrap()).to_string(), text);
        }
        for wrong in
            ["", "7d", "2026-11-25", "2026-02-30T00:00:00Z", "2026-13-01T00:00:00Z", "2026-11-25T24:00:00Z"]
        {
            assert_eq!(rfc3339(wrong), None, "{wrong}");
        }
        assert!(until("7d").unwrap() > until("6d").unwrap());
        assert!(until("soon").unwrap_err().to_string().contains("2026-11-25T00:00:00Z"));
    }

    #[test]
    fn words_become_a_body() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            body(&words("rate=500/min burst=50 note=ticket=7")).unwrap(),
            json!({ "rate": "500/min", "burst": 50, "note": "ticket=7" })
        );
        assert_eq!(body(&words("blocked")).unwrap(), json!({ "blocked": true }));
        for wrong in ["block", "burst=many", "rate=1/s rate=2/s", "speed=5"] {
            assert!(body(&words(wrong)).is_err(), "{wrong}");
        }
    }
}
