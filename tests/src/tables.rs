//! The documented tables as histories: every `.trace` next to an algorithm, and every vector.
//!
//! `trace.rs` of the core defines their format and proves that Rust gives their results. Here only the events are used,
//! with the verdict and `remaining`.

use tollkeeper_core::{Algorithm, CheckedQuota, Quota, Span};

use crate::fold::{History, Row};

/// A Thursday in 2025, 00:00 UTC.
const BASE: u64 = 2_915 * 7 * 86_400_000_000;

macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../crates/tollkeeper-core/src/algorithm/", $name)))),*]
    };
}

/// Every table.
pub fn all() -> Vec<History> {
    let traces = files! {
        "meter.trace" "fixed_window.trace" "sliding_window.trace" "sliding_log.trace" "concurrency.trace"
    };
    let vectors = files! {
        "vectors/fixed-window-5-per-60000000us.tsv"
        "vectors/leaky-bucket-10-per-1000000us-burst-4.tsv"
        "vectors/leaky-bucket-30-per-3600000000us-burst-5.tsv"
        "vectors/meter-1-per-1s-burst-5.tsv"
        "vectors/sliding-log-5-per-900000000us.tsv"
        "vectors/sliding-window-10-per-60000000us.tsv"
        "vectors/sliding-window-100-per-3600000000us.tsv"
        "vectors/sliding-window-500-per-604800000000us.tsv"
        "vectors/token-bucket-100-per-604800000000us-burst-20.tsv"
        "vectors/token-bucket-1000-per-86400000000us-burst-50.tsv"
        "vectors/token-bucket-5-per-1000000us-burst-5.tsv"
        "vectors/token-bucket-7-per-60000000us-burst-20.tsv"
    };
    let mut histories = Vec::new();
    traces.iter().for_each(|(name, text)| trace(&mut histories, name, text));
    vectors.iter().for_each(|(name, text)| histories.push(vector(name, text)));
    let [(name, text)] = files! { "vectors/sliding-window.tsv" };
    counts(&mut histories, name, text);
    histories
}

fn trace(histories: &mut Vec<History>, name: &str, text: &str) {
    let mut charges = Vec::new();
    for row in rows(text) {
        if let ["quota:" | "change:", words @ ..] = &row[..] {
            let (quota, shift, hold) = quota(words);
            if row[0] == "quota:" {
                histories.push(History::new(quota, BASE, 0));
                charges.clear();
            }
            let key = histories.last_mut().expect("a quota comes before its change").key();
            key.quota = quota;
            if row[0] == "quota:" {
                (key.shift, key.hold) = (shift, hold);
            }
            continue;
        }
        let history = histories.last_mut().expect("a quota comes before its rows");
        let [time, verb, arg, verdict, remaining, ..] = &row[..] else { panic!("{name}: {row:?}") };
        history.key().now = BASE + span(time);
        match *verb {
            "check" => {
                let (_, past) = history.check(number(arg));
                charges.extend(past.map(|past| (span(time), past)));
            }
            "peek" => {
                history.peek(number(arg));
            }
            "refund" => {
                let (part, when) = arg.split_once('@').expect("PART@TIME");
                let when = span(when);
                let (_, past) = *charges.iter().rfind(|(time, _)| *time == when).expect("a charge");
                history.give_back(number(part), &past);
                history.peek(1);
            }
            "settle" => {
                history.add(number(arg));
                history.peek(1);
            }
            "lease" => {
                let (want, life) = arg.split_once('@').expect("how much @ life");
                let quota = history.key().quota;
                let raise = span(life) / quota.tick().span().as_micros() * quota.count();
                let raise = if quota.algorithm().has_burst() { raise } else { 0 };
                assert_eq!(history.lease(number(want), raise), number(verdict), "{name}: {row:?}");
                history.peek(1);
            }
            "release" | "renew" => {
                let who = number(arg.strip_prefix('#').expect("#NUMBER"));
                let held = if *verb == "renew" { history.renew_slot(who) } else { history.release_slot(who) };
                assert_eq!(held, *verdict == "held", "{name}: {row:?}");
                history.peek(1);
            }
            _ => panic!("{name}: {row:?}"),
        }
        let Row::Asked(outcome, _) = &history.steps.last().expect("a step").row else { panic!("asked last") };
        assert_eq!(outcome.remaining, number(remaining), "{name}: {row:?}");
        if let Some(verdict) = verdict.split('/').next().filter(|word| ["allow", "deny"].contains(word)) {
            assert_eq!(outcome.allowed, verdict == "allow", "{name}: {row:?}");
        }
    }
}

fn vector(name: &str, text: &str) -> History {
    let name = name.trim_start_matches("vectors/").trim_end_matches(".tsv");
    let in_millis = name.starts_with("meter-");
    let (left, right) = name.split_once("-per-").expect("…-per-…");
    let (algorithm, count) = left.rsplit_once('-').expect("ALGORITHM-COUNT");
    let (period, burst) = right.split_once("-burst-").map_or((right, None), |(p, b)| (p, Some(number(b))));
    let algorithm = if in_millis { "token-bucket" } else { algorithm };
    let algorithm = Algorithm::from_name(algorithm).expect("an algorithm");
    let rate = Quota::every(number(count), Span::from_micros(span(period))).with_burst(burst);
    let mut history = History::new(CheckedQuota::new(algorithm, rate).expect("a quota"), 0, 0);
    for row in rows(text) {
        let [now, cost, verdict, remaining, ..] = &row[..] else { panic!("{name}: {row:?}") };
        history.key().now = number(now) * if in_millis { 1_000 } else { 1 };
        let outcome = if *cost == "0" { history.peek(1) } else { history.check(number(cost)).0 };
        assert_eq!(outcome.remaining, number(remaining), "{name}: {row:?}");
        assert!(*cost == "0" || outcome.allowed == (*verdict == "allow"), "{name}: {row:?}");
    }
    history
}

/// Verdicts for given counts, in milliseconds.
fn counts(histories: &mut Vec<History>, name: &str, text: &str) {
    let quota = CheckedQuota::new(Algorithm::SlidingWindow, Quota::per_minute(100)).expect("a quota");
    for row in rows(text) {
        let [elapsed, prev, cur, cost, verdict] = &row[..] else { panic!("{name}: {row:?}") };
        let mut history = History::new(quota, BASE - 60_000_000, 0);
        history.add(number(prev));
        history.key().now = BASE;
        history.add(number(cur));
        history.key().now = BASE + number(elapsed) * 1_000;
        assert_eq!(history.check(number(cost)).0.allowed, *verdict == "allow", "{name}: {row:?}");
        histories.push(history);
    }
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let split = text.lines().map(|line| line.split_whitespace().collect());
    split.filter(|row: &Vec<&str>| row.first().is_some_and(|cell| !cell.starts_with('#')))
}

/// `token-bucket 5/1s burst 5 shift 20s hold 150ms`
fn quota(words: &[&str]) -> (CheckedQuota, u64, Option<Span>) {
    let [algorithm, rate, options @ ..] = words else { panic!("an algorithm and a rate: {words:?}") };
    let (count, period) = rate.split_once('/').expect("count/period");
    let mut rate = Quota::every(number(count), Span::from_micros(span(period)));
    let (mut shift, mut hold) = (0, None);
    for option in options.chunks(2) {
        match option {
            ["burst", burst] => rate = rate.burst(number(burst)),
            ["shift", by] => shift = span(by),
            ["hold", longest] => hold = Some(Span::from_micros(span(longest))),
            _ => panic!("unknown option: {option:?}"),
        }
    }
    let algorithm = Algorithm::from_name(algorithm).expect("an algorithm");
    (CheckedQuota::new(algorithm, rate).expect("a quota"), shift, hold)
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}

/// Microseconds of `0`, `1.5s`, `200ms-1us` or `2h+1us`.
fn span(text: &str) -> u64 {
    let mut total = 0;
    for plus in text.split('+') {
        let mut terms = plus.split('-').map(term);
        total += terms.next().expect("split gives at least one");
        total -= terms.sum::<u64>();
    }
    total
}

fn term(text: &str) -> u64 {
    let split = text.find(|char: char| char.is_ascii_lowercase()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit {
        "" | "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => panic!("unknown unit: {text}"),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let parts = fraction.bytes().rev().fold(0, |parts, digit| (parts + u64::from(digit - b'0') * unit) / 10);
    self::number(whole) * unit + parts
}
