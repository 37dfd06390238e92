//! Runs `step.trace` row by row.
//!
//! `limit: min 8 max 512 seed 1` starts a new limit at time 0. A row has a time, how many responses arrive then, their
//! latency, how much of the limit was in use when they began, and the state after them: the limit, the limit in force
//! and the floor. Responses that failed have `failed` as their latency, and `left@30ms` is a client that left after
//! 30 ms. A request began when its latency says. A row with 0 responses only lets time pass.

use tollkeeper::{Span, Time};

use super::*;

/// The time 0 of the trace. Some requests began earlier.
const START: Time = Time::from_micros(3_600_000_000);

#[test]
fn step_trace() {
    let mut state = None;
    let mut differences = String::new();
    for (line, text) in include_str!("step.trace").lines().enumerate() {
        let cells: Vec<&str> = text.split_whitespace().collect();
        match cells[..] {
            [] => {}
            [first, ..] if first.starts_with('#') => {}
            ["limit:", "min", min, "max", max, "seed", seed] => {
                let bounds = Bounds { min: number(min), max: number(max) };
                state = Some(AdaptiveLimit::new(bounds, START, number(seed)));
            }
            [time, count, latency, used, ref expected @ ..] => {
                let now = START + span(time);
                let mut after = state.take().expect("a limit comes before its rows");
                after = advance(after, now);
                for _ in 0..number::<usize>(count) {
                    after = step(after, &sample(latency, used, now), now);
                }
                let shown = shown(&after);
                if shown[..] != expected[..3] {
                    differences +=
                        &format!("step.trace:{}: {text}\n    actual  {}\n", line + 1, shown.join("  "));
                }
                state = Some(after);
            }
            _ => panic!("step.trace:{}: too short", line + 1),
        }
    }
    assert!(differences.is_empty(), "limit, in force, floor:\n{differences}");
}

fn shown(state: &AdaptiveLimit) -> [String; 3] {
    let limit = format!("{}.{:03}", state.limit / 1_000, state.limit % 1_000);
    let floor = state.floor().map_or("-".to_owned(), |floor| floor.to_string());
    [limit, state.in_force().to_string(), floor]
}

fn sample(latency: &str, used: &str, now: Time) -> Sample {
    let (ending, latency) = match latency.split_once('@') {
        Some(("left", latency)) => (Ending::Left, span(latency)),
        _ if latency == "failed" => (Ending::Failed, Span::ZERO),
        _ => (Ending::Answered, span(latency)),
    };
    let began = Time::from_micros(now.as_micros() - latency.as_micros());
    Sample { began, latency, used: number::<u32>(used.trim_end_matches('%')) * 10, ending }
}

/// `100ms`, `10s` or `9.8s`.
fn span(text: &str) -> Span {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1_000),
        None => (text.strip_suffix('s').expect("ms or s"), 1_000_000),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let part =
        part.parse::<u64>().expect("digits") * unit / 10_u64.pow(u32::try_from(part.len()).expect("few"));
    Span::from_micros(whole.parse::<u64>().expect("a number") * unit + part)
}

fn number<N: std::str::FromStr>(text: &str) -> N {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}
