//! The table of what each limit says about a request, for `check`, `usage` and others.

use std::time::Duration;

use serde::Deserialize;
use tollkeeper::Span;
use tollkeeper::policy::UtcTime;

use crate::command::{say, table};

/// The fields of a limit in a response that are printed.
#[derive(Debug, Deserialize)]
pub struct LimitAnswer {
    name: String,
    key: Vec<Option<String>>,
    mode: String,
    allowed: bool,
    cost: u64,
    limit: u64,
    remaining: Option<u64>,
    retry_after: Option<f64>,
    reset_after: Option<f64>,
    #[serde(rename = "override")]
    overridden: Option<Overridden>,
}

/// An override at run time that applies to the key.
#[derive(Debug, Deserialize)]
struct Overridden {
    until: Option<u64>,
}

/// Prints a row for each limit; nothing if there is none.
pub fn print(limits: &[LimitAnswer]) -> anyhow::Result<()> {
    if limits.is_empty() {
        return Ok(());
    }
    let mut table =
        table::with(&["LIMIT", "KEY", "SAYS", "COST", "REMAINING", "OF", "RETRY AFTER", "RESET AFTER"]);
    let seconds = |span: Option<f64>| span.map_or("-".to_owned(), readable);
    for limit in limits {
        let says = match (limit.allowed, limit.mode.as_str()) {
            (true, _) => "allowed",
            (false, "shadow") => "would refuse",
            (false, _) => "refused",
        };
        let key: Vec<&str> = limit.key.iter().map(|value| value.as_deref().unwrap_or("-")).collect();
        let key = if key.is_empty() { "(all)".to_owned() } else { key.join(" ").escape_debug().to_string() };
        table.add_row([
            table::cell(&limit.name, None),
            table::cell(key, None),
            table::cell(says, Some(limit.allowed)),
            table::cell(limit.cost, None),
            table::cell(limit.remaining.map_or("-".to_owned(), |left| left.to_string()), None),
            table::cell(limit.limit, None),
            table::cell(seconds(limit.retry_after), None),
            table::cell(seconds(limit.reset_after), None),
        ]);
    }
    say(table.trim_fmt())?;
    for limit in limits {
        if let Some(Overridden { until }) = &limit.overridden {
            let until = until.map_or(String::new(), |until| format!(" until {}", UtcTime(until)));
            say(format_args!("`{}`: this key has an override{until}", limit.name))?;
        }
    }
    Ok(())
}

/// A duration in seconds with readable units, such as `1 d 12 h`.
pub fn readable(seconds: f64) -> String {
    let span = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    Span::from(span).readable().to_string()
}
