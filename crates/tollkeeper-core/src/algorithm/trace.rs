//! Runs the `.trace` tables of the algorithms and the test vectors, row by row.
//!
//! A trace is the readable specification of an algorithm:
//!
//! ```text
//! quota: token-bucket 5/1s burst 5
//!
//! # time       verb   cost  verdict  remaining  retry  reset      delay  next   why
//!   200ms-1us  check  1     deny     0          1us    800ms+1us  0      1us    one microsecond early
//!
//! change: token-bucket 5/1s burst 2
//! ```
//!
//! `quota:` starts a new key (`shift 20s` and `hold 150ms` may follow), `change:` changes the quota of the
//! same key. Times count from [`BASE`], where windows of every length that divides a week begin. The verbs:
//!
//! - `check` or `peek` of a cost. The verdict ends in `/moved` if the clock was found to have stepped back:
//!   the state was moved to now, and a `check` writes that even if it is refused. Every other refusal, and
//!   every peek, must leave the state unchanged.
//! - `refund 3@200ms`: refunds 3 units of the charge made at 200ms. `settle 3`: charges 3 more.
//! - `lease 40@1s`: grants up to 40 units that live for a second; the verdict is how many.
//! - `release #2`, `renew #2`: the second slot that was taken, which is `held` or already `gone`.
//!
//! After these last five verbs the numbers are those of a peek of cost 1.
//!
//! The vectors were computed with exact rational arithmetic by a separate program that shares no code with
//! this crate.

use crate::decision::{Outcome, Retry};
use crate::quota::{Algorithm, CheckedQuota, Quota};
use crate::time::{Span, Time};

use super::{
    KeyRequest, Past, State, StoredState, add, apply, concurrency, give_back, lease, outcome, sliding_window,
    step,
};

/// A Thursday in 2025, 00:00 UTC. The epoch was a Thursday, too, so windows of a week begin here.
const BASE: u64 = 2_915 * 7 * 86_400_000_000;

#[test]
fn meter_trace() {
    run("meter.trace", include_str!("meter.trace"));
}

#[test]
fn fixed_window_trace() {
    run("fixed_window.trace", include_str!("fixed_window.trace"));
}

#[test]
fn sliding_window_trace() {
    run("sliding_window.trace", include_str!("sliding_window.trace"));
}

#[test]
fn sliding_log_trace() {
    run("sliding_log.trace", include_str!("sliding_log.trace"));
}

#[test]
fn concurrency_trace() {
    run("concurrency.trace", include_str!("concurrency.trace"));
}

/// A clock in whole microseconds cannot distinguish the requests; they must all be counted.
#[test]
fn requests_in_one_microsecond_are_all_counted() {
    for algorithm in Algorithm::ALL {
        let quota = CheckedQuota::new(algorithm, Quota::per_hour(1_000)).unwrap();
        let mut key = Key::new(quota);
        for left in (0..1_000).rev() {
            let (outcome, _) = key.check(BASE, 1);
            assert!(outcome.allowed, "{algorithm}: {left} should be left");
            assert_eq!(outcome.remaining, left, "{algorithm}");
        }
        assert!(!key.check(BASE, 1).0.allowed, "{algorithm}: one too many");
    }
}

/// The contents of vector files, each with its name.
macro_rules! vectors {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("vectors/", $name, ".tsv")))),*]
    };
}

#[test]
fn every_algorithm_matches_its_vectors() {
    let files = vectors! {
        "fixed-window-5-per-60000000us"
        "leaky-bucket-10-per-1000000us-burst-4"
        "leaky-bucket-30-per-3600000000us-burst-5"
        "sliding-log-5-per-900000000us"
        "sliding-window-10-per-60000000us"
        "sliding-window-100-per-3600000000us"
        "sliding-window-500-per-604800000000us"
        "token-bucket-100-per-604800000000us-burst-20"
        "token-bucket-1000-per-86400000000us-burst-50"
        "token-bucket-5-per-1000000us-burst-5"
        "token-bucket-7-per-60000000us-burst-20"
    };
    let mut count = 0;
    for (name, text) in files {
        let mut key = Key::new(quota_of_file(name));
        for (line, row) in rows(text) {
            let [now, cost, verdict, remaining, retry, reset, delay] = row[..] else {
                panic!("{name}:{line}: seven columns")
            };
            let cells = key.row_of_vector(number(now), number(cost));
            let expected = match verdict {
                "peek" => [verdict, remaining, "-", reset, "0"],
                _ => [verdict, remaining, retry, reset, delay],
            };
            assert_eq!(cells, expected, "{name}:{line}: {row:?}");
            count += 1;
        }
    }
    assert_eq!(count, 440, "rows of all files");
}

/// The table that throttled and redis-cell share, in milliseconds.
#[test]
fn meter_matches_the_table_of_other_limiters() {
    let [(name, text)] = vectors! { "meter-1-per-1s-burst-5" };
    let quota = CheckedQuota::new(Algorithm::TokenBucket, Quota::per_second(1).burst(5)).unwrap();
    let mut key = Key::new(quota);
    let millis = |text: &str| text.parse().map_or(text.to_owned(), |ms: u64| (ms * 1_000).to_string());
    let mut count = 0;
    for (line, row) in rows(text) {
        let [now, cost, verdict, remaining, reset, retry] = row[..] else {
            panic!("{name}:{line}: six columns")
        };
        let cells = key.row_of_vector(number(now) * 1_000, number(cost));
        let expected = [verdict, remaining, &millis(retry), &millis(reset), "0"];
        assert_eq!(cells, expected, "{name}:{line}: {row:?}");
        count += 1;
    }
    assert_eq!(count, 16, "rows");
}

/// Verdicts for given counts of the previous and the current window, in milliseconds.
#[test]
fn sliding_window_matches_its_vector() {
    let [(name, text)] = vectors! { "sliding-window" };
    let quota = CheckedQuota::new(Algorithm::SlidingWindow, Quota::per_minute(100)).unwrap();
    let mut count = 0;
    for (line, row) in rows(text) {
        let [elapsed, prev, cur, cost, verdict] = row[..] else { panic!("{name}:{line}: five columns") };
        let state = sliding_window::State { window: BASE / 60_000_000, prev: number(prev), cur: number(cur) };
        let now = BASE + number(elapsed) * 1_000;
        let step = sliding_window::step(&quota, Some(state), now, number(cost));
        assert_eq!(step.allowed, verdict == "allow", "{name}:{line}: {row:?}");
        count += 1;
    }
    assert_eq!(count, 10, "rows");
}

/// One key with its state, as a store would hold it.
struct Key {
    quota: CheckedQuota,
    shift: u64,
    hold: Option<Span>,
    state: Option<State>,
    /// The admitted charges, each with its time.
    charges: Vec<(u64, Past)>,
}

impl Key {
    fn new(quota: CheckedQuota) -> Key {
        Key { quota, shift: 0, hold: None, state: None, charges: Vec::new() }
    }

    fn check(&mut self, now: u64, cost: u64) -> (Outcome, bool) {
        let request = self.request(now, cost);
        let step = step(&self.quota, self.stored(), &request);
        let outcome = outcome(&self.quota, self.stored(), &request, &step, step.allowed);
        let (moved, mark) = (step.effect.moved(), step.effect.mark());
        if step.allowed {
            self.charges.push((now, Past { cost, count: self.quota.count(), tick: mark, window: mark }));
        }
        if step.allowed || moved {
            let taker = self.charges.len() as u64;
            self.state = apply(&self.quota, self.state.take(), &request, &step, step.allowed, taker);
        }
        (outcome, moved)
    }

    fn peek(&self, now: u64, cost: u64) -> (Outcome, bool) {
        let request = self.request(now, cost);
        let step = step(&self.quota, self.stored(), &request);
        (outcome(&self.quota, self.stored(), &request, &step, false), step.effect.moved())
    }

    fn request(&self, now: u64, cost: u64) -> KeyRequest {
        KeyRequest { now: Time::from_micros(now), cost, shift: self.shift, hold: self.hold }
    }

    fn stored(&self) -> StoredState<'_> {
        self.state.as_ref().map_or(StoredState::Nothing, State::stored)
    }

    /// Verdict, remaining, retry, reset and delay in microseconds; a cost of 0 is a peek.
    fn row_of_vector(&mut self, now: u64, cost: u64) -> [String; 5] {
        let (outcome, _) = if cost == 0 { self.peek(now, 1) } else { self.check(now, cost) };
        let retry = match outcome.retry {
            _ if cost == 0 => "-".to_owned(),
            None => "-".to_owned(),
            Some(Retry::Never) => "never".to_owned(),
            Some(Retry::After(span)) => span.as_micros().to_string(),
        };
        let verdict = match (cost, outcome.allowed) {
            (0, _) => "peek",
            (_, true) => "allow",
            (_, false) => "deny",
        };
        let reset = outcome.reset_after.expect("no vector has slots").as_micros();
        let delay = if cost == 0 { 0 } else { outcome.delay.as_micros() };
        [verdict.to_owned(), outcome.remaining.to_string(), retry, reset.to_string(), delay.to_string()]
    }
}

/// Runs a trace and reports every row that differs.
fn run(file: &str, text: &str) {
    let mut key: Option<Key> = None;
    let mut differences = String::new();
    let mut count = 0;
    for (line, row) in rows(text) {
        match row[0] {
            "quota:" => key = Some(new_key(&row[1..])),
            "change:" => {
                let key = key.as_mut().expect("a quota comes before its change");
                let changed = new_key(&row[1..]);
                assert_eq!(
                    changed.quota.period(),
                    key.quota.period(),
                    "{file}:{line}: the period is part of the key"
                );
                key.quota = changed.quota;
            }
            _ => {
                let key = key.as_mut().expect("a quota comes before its rows");
                let [time, verb, arg, expected @ ..] = &row[..] else { panic!("{file}:{line}: too short") };
                let expected: Vec<String> = expected.iter().take(6).map(|cell| canonical(cell)).collect();
                let before = key.state.clone();
                let (actual, may_write) = row_of_trace(key, span(time), verb, arg);
                assert!(may_write || key.state == before, "{file}:{line}: the state has changed");
                if expected != actual {
                    let given = format!("{time} {verb} {arg}");
                    differences += &format!("{file}:{line}\n  expected  {given}  {}", expected.join("  "));
                    differences += &format!("\n  actual    {given}  {}\n", actual.join("  "));
                }
                count += 1;
            }
        }
    }
    assert!(differences.is_empty(), "verdict, remaining, retry, reset, delay, next:\n{differences}");
    assert!(count > 0, "{file} has no rows");
}

/// Executes one row. Returns its cells, and whether the row may change the state.
fn row_of_trace(key: &mut Key, time: u64, verb: &str, arg: &str) -> (Vec<String>, bool) {
    let now = BASE + time;
    let (verdict, outcome, may_write) = match verb {
        "check" | "peek" => {
            let (outcome, moved) =
                if verb == "check" { key.check(now, number(arg)) } else { key.peek(now, number(arg)) };
            let verdict = if outcome.allowed { "allow" } else { "deny" };
            let verdict = if moved { format!("{verdict}/moved") } else { verdict.to_owned() };
            (verdict, outcome, verb == "check" && (outcome.allowed || moved))
        }
        "refund" => {
            let (part, when) = arg.split_once('@').expect("UNITS@TIME");
            let at = BASE + span(when);
            let (_, past) =
                *key.charges.iter().rfind(|(time, _)| *time == at).expect("a charge at that time");
            let (state, time) = (key.state.take().expect("charged"), Time::from_micros(now));
            key.state = Some(give_back(&key.quota, state, time, key.shift, number(part), &past));
            ("-".to_owned(), key.peek(now, 1).0, true)
        }
        "settle" => {
            let (state, time) = (key.state.take(), Time::from_micros(now));
            key.state = Some(add(&key.quota, state, time, key.shift, number(arg)));
            ("-".to_owned(), key.peek(now, 1).0, true)
        }
        "lease" => {
            let (want, life) = arg.split_once('@').expect("UNITS@LIFE");
            let raise = span(life) / key.quota.tick().span().as_micros() * key.quota.count();
            let raise = if key.quota.algorithm().has_burst() { raise } else { 0 };
            let (state, time) = (key.state.clone(), Time::from_micros(now));
            let granted = lease(&key.quota, state, time, key.shift, number(want), raise);
            let (units, state) = granted.map_or((0, None), |(units, state)| (units, Some(state)));
            key.state = state.or(key.state.take());
            (units.to_string(), key.peek(now, 1).0, units > 0)
        }
        "release" | "renew" => {
            let id = number(arg.strip_prefix('#').expect("# and the number of a slot"));
            let Some(State::Concurrency(slots)) = &mut key.state else { panic!("no slot was taken") };
            let held = match verb {
                "release" => concurrency::release(slots, now, id),
                _ => concurrency::renew(slots, now, id),
            };
            (if held { "held" } else { "gone" }.to_owned(), key.peek(now, 1).0, true)
        }
        _ => panic!("unknown verb: {verb}"),
    };
    let or_none = |span: Option<Span>| span.map_or("-".to_owned(), show);
    let retry = match outcome.retry {
        None => "-".to_owned(),
        Some(Retry::Never) => "never".to_owned(),
        Some(Retry::After(span)) => show(span),
    };
    let (reset, next) = (or_none(outcome.reset_after), or_none(outcome.next_after));
    let cells = vec![verdict, outcome.remaining.to_string(), retry, reset, show(outcome.delay), next];
    (cells, may_write)
}

/// The rows of a table, split at white space, each with its line number.
fn rows(text: &str) -> impl Iterator<Item = (usize, Vec<&str>)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    lines
        .map(|(line, text)| (line, text.split_whitespace().collect()))
        .filter(|(_, row): &(usize, Vec<&str>)| row.first().is_some_and(|cell| !cell.starts_with('#')))
}

/// `token-bucket 5/1s burst 5 shift 20s hold 150ms`
fn new_key(words: &[&str]) -> Key {
    let [algorithm, rate, options @ ..] = words else { panic!("an algorithm and a rate: {words:?}") };
    let algorithm = Algorithm::from_name(algorithm).expect("the name of an algorithm");
    let (count, period) = rate.split_once('/').expect("count/period");
    let mut quota = Quota::every(number(count), Span::from_micros(span(period)));
    let (mut shift, mut hold) = (0, None);
    for option in options.chunks(2) {
        match option {
            ["burst", burst] => quota = quota.burst(number(burst)),
            ["shift", by] => shift = span(by),
            ["hold", longest] => hold = Some(Span::from_micros(span(longest))),
            _ => panic!("unknown option: {option:?}"),
        }
    }
    Key { shift, hold, ..Key::new(CheckedQuota::new(algorithm, quota).expect("a quota")) }
}

/// `token-bucket-5-per-1000000us-burst-5`
fn quota_of_file(name: &str) -> CheckedQuota {
    let (left, right) = name.split_once("-per-").expect("…-per-…");
    let (algorithm, count) = left.rsplit_once('-').expect("ALGORITHM-COUNT");
    let (period, burst) = right.split_once("-burst-").map_or((right, None), |(p, b)| (p, Some(number(b))));
    let algorithm = Algorithm::from_name(algorithm).expect("the name of an algorithm");
    let quota = Quota::every(number(count), Span::from_micros(span(period))).with_burst(burst);
    CheckedQuota::new(algorithm, quota).expect("a quota")
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}

/// A cell as [`show`] writes it: `200ms-1us` is `199999us`.
fn canonical(cell: &str) -> String {
    let is_span = cell.starts_with(|c: char| c.is_ascii_digit()) && cell.ends_with(['s', 'm', 'h', 'd']);
    if is_span { show(Span::from_micros(span(cell))) } else { cell.to_owned() }
}

fn show(span: Span) -> String {
    if span == Span::ZERO { "0".to_owned() } else { span.to_string() }
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
    if text == "0" {
        return 0;
    }
    let split = text.find(|c: char| c.is_ascii_lowercase()).unwrap_or_else(|| panic!("missing unit: {text}"));
    let (number, unit) = text.split_at(split);
    let unit: u64 = match unit {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => panic!("unknown unit: {text}"),
    };
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    let parts = fraction.bytes().rev().fold(0, |parts, digit| (parts + u64::from(digit - b'0') * unit) / 10);
    integer.parse::<u64>().unwrap_or_else(|_| panic!("not a number: {text}")) * unit + parts
}
