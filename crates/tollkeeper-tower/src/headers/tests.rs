use std::time::Duration;

use super::*;
use tollkeeper::{
    Algorithm, Allowance, Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Mode, Policy, Quota,
    Time, facts,
};

const NO_JITTER: Jitter = Jitter { share: Percent::new(0), draw: || unreachable!("no jitter to draw") };

fn limiter(limits: Vec<Limit>) -> (Limiter, ManualClock) {
    // Half a second into a minute, an hour and a day.
    let clock = ManualClock::new(Time::from_micros(1_760_054_400_500_000));
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    (Limiter::embedded(Policy::new(limits).expect("valid"), store), clock)
}

/// The headers of a decision as `name: value` lines.
fn lines(decision: &tollkeeper::Decision, dialects: &[HeaderDialect]) -> Vec<String> {
    let written = write(decision, dialects, &NO_JITTER);
    let line = |(field, value): (Field, &[u8])| {
        format!("{}: {}", field.name(), std::str::from_utf8(value).expect("ASCII"))
    };
    let lines: Vec<String> = written.iter().map(line).collect();
    let mut map = HeaderMap::new();
    insert(&mut map, decision, dialects, &NO_JITTER);
    assert_eq!(map.len(), lines.len());
    for line in &lines {
        let (name, value) = line.split_once(": ").expect("a line");
        assert_eq!(map[name], value);
    }
    lines
}

/// Checks the headers of two requests of this cost, one after the other.
fn check(limits: Vec<Limit>, cost: u64, dialect: HeaderDialect, expected: [&[&str]; 2]) {
    let (limiter, _) = limiter(limits);
    for expected in expected {
        let decision = limiter.acquire(&facts! { "user" => "alice" }).cost(cost).wait().expect("valid");
        let slot = decision.slot.map(tollkeeper::SlotGuard::keep);
        assert_eq!(lines(&decision.decision, &[dialect]), expected, "{slot:?}");
    }
}

/// A bucket of 20 that refills in 12 s, and 1000 a day. Of two requests that cost 15 the first is admitted. The second is
/// refused until the hidden limit `secret` allows it: when its sliding window no longer counts any of the first.
fn bucket_and_day() -> Vec<Limit> {
    vec![
        Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"),
        Limit::new("daily-quota", Quota::per_day(1000)).by("user").algorithm(Algorithm::FixedWindow),
        Limit::new("secret", Quota::per_minute(15)).hidden(),
        Limit::new("tried", Quota::per_minute(15)).mode(Mode::Shadow),
        Limit::new("free", Allowance::Unlimited),
        Limit::new("skipped", Quota::per_minute(1)).by("absent"),
    ]
}

#[test]
fn ietf() {
    check(
        bucket_and_day(),
        15,
        HeaderDialect::Ietf,
        [
            &[
                r#"ratelimit-policy: "per-user";q=20;w=12, "daily-quota";q=1000;w=86400"#,
                r#"ratelimit: "per-user";r=5;t=1"#,
            ],
            &[
                "retry-after: 120",
                r#"ratelimit-policy: "per-user";q=20;w=12, "daily-quota";q=1000;w=86400"#,
                r#"ratelimit: "per-user";r=5;t=6"#,
            ],
        ],
    );
}

#[test]
fn draft_03() {
    check(
        bucket_and_day(),
        15,
        HeaderDialect::Draft03,
        [
            &["ratelimit-limit: 20, 20;w=12, 1000;w=86400", "ratelimit-remaining: 5", "ratelimit-reset: 9"],
            &[
                "retry-after: 120",
                "ratelimit-limit: 20, 20;w=12, 1000;w=86400",
                "ratelimit-remaining: 5",
                "ratelimit-reset: 9",
            ],
        ],
    );
}

#[test]
fn draft_06() {
    check(
        bucket_and_day(),
        15,
        HeaderDialect::Draft06,
        [
            &[
                "ratelimit-policy: 20;w=12, 1000;w=86400",
                "ratelimit-limit: 20",
                "ratelimit-remaining: 5",
                "ratelimit-reset: 9",
            ],
            &[
                "retry-after: 120",
                "ratelimit-policy: 20;w=12, 1000;w=86400",
                "ratelimit-limit: 20",
                "ratelimit-remaining: 5",
                "ratelimit-reset: 9",
            ],
        ],
    );
}

#[test]
fn draft_07() {
    check(
        bucket_and_day(),
        15,
        HeaderDialect::Draft07,
        [
            &["ratelimit-policy: 20;w=12, 1000;w=86400", "ratelimit: limit=20, remaining=5, reset=9"],
            &[
                "retry-after: 120",
                "ratelimit-policy: 20;w=12, 1000;w=86400",
                "ratelimit: limit=20, remaining=5, reset=9",
            ],
        ],
    );
}

#[test]
fn x_ratelimit() {
    // 9 s after 1760054400.5: rounded up.
    check(
        bucket_and_day(),
        15,
        HeaderDialect::XRateLimit,
        [
            &["x-ratelimit-limit: 20", "x-ratelimit-remaining: 5", "x-ratelimit-reset: 1760054410"],
            &[
                "retry-after: 120",
                "x-ratelimit-limit: 20",
                "x-ratelimit-remaining: 5",
                "x-ratelimit-reset: 1760054410",
            ],
        ],
    );
}

#[test]
fn slots_have_a_unit_and_no_window() {
    let slots = || vec![Limit::new("exports", Quota::slots(1)).by("user")];
    check(
        slots(),
        1,
        HeaderDialect::Ietf,
        [
            &[
                r#"ratelimit-policy: "exports";q=1;qu="concurrent-requests""#,
                r#"ratelimit: "exports";r=0;t=1"#,
            ],
            &[
                "retry-after: 1",
                r#"ratelimit-policy: "exports";q=1;qu="concurrent-requests""#,
                r#"ratelimit: "exports";r=0;t=1"#,
            ],
        ],
    );
    check(
        slots(),
        1,
        HeaderDialect::Draft03,
        [
            &["ratelimit-limit: 1", "ratelimit-remaining: 0"],
            &["retry-after: 1", "ratelimit-limit: 1", "ratelimit-remaining: 0"],
        ],
    );
    check(
        slots(),
        1,
        HeaderDialect::Draft07,
        [&["ratelimit: limit=1, remaining=0"], &["retry-after: 1", "ratelimit: limit=1, remaining=0"]],
    );
}

#[test]
fn cost_above_the_quota_has_no_retry_after() {
    let limits = || vec![Limit::new("all", Quota::per_minute(5))];
    let expected: &[&str] = &[r#"ratelimit-policy: "all";q=5;w=60"#, r#"ratelimit: "all";r=5"#];
    check(limits(), 6, HeaderDialect::Ietf, [expected, expected]);
    let nothing = || vec![Limit::new("all", Allowance::Nothing)];
    let expected: &[&str] = &[r#"ratelimit-policy: "all";q=0;w=60"#, r#"ratelimit: "all";r=0"#];
    check(nothing(), 1, HeaderDialect::Ietf, [expected, expected]);
}

#[test]
fn without_a_visible_limit_there_are_no_headers() {
    for dialect in HeaderDialect::ALL {
        check(vec![Limit::new("all", Quota::per_minute(5)).by("absent")], 1, dialect, [&[], &[]]);
        check(vec![Limit::new("all", Quota::per_minute(5)).hidden()], 1, dialect, [&[], &[]]);
    }
    let (limiter, _) = limiter(vec![Limit::new("all", Quota::per_minute(1))]);
    let decide = || limiter.check(&facts! {}).wait().expect("valid");
    assert_eq!(lines(&decide(), &[]), [""; 0]);
    assert_eq!(lines(&decide(), &[]), ["retry-after: 120"], "without a dialect, only when to retry");
}

#[test]
fn dialects_can_be_combined() {
    let (limiter, _) = limiter(vec![Limit::new("all", Quota::per_minute(5))]);
    let decision = limiter.check(&facts! {}).wait().expect("valid");
    assert_eq!(
        lines(&decision, &[HeaderDialect::XRateLimit, HeaderDialect::Ietf]),
        [
            "x-ratelimit-limit: 5",
            "x-ratelimit-remaining: 4",
            "x-ratelimit-reset: 1760054520",
            r#"ratelimit-policy: "all";q=5;w=60"#,
            r#"ratelimit: "all";r=4;t=120"#,
        ]
    );
}

#[test]
fn numbers_have_at_most_15_digits_and_windows_at_least_1_s() {
    let (limiter, _) = limiter(vec![
        Limit::new("large", Quota::per(1 << 49, Duration::from_secs(1))).algorithm(Algorithm::FixedWindow),
        Limit::new("short", Quota::per(1000, Duration::from_millis(10))),
    ]);
    let decision = limiter.check(&facts! {}).wait().expect("valid");
    assert_eq!(
        lines(&decision, &[HeaderDialect::Ietf])[0],
        r#"ratelimit-policy: "large";q=562949953421312;w=1, "short";q=1000;w=1"#
    );
    let mut text = Text::new();
    text.emit_number(Field::RateLimitLimit, u64::MAX);
    assert_eq!(text.finish().iter().next(), Some((Field::RateLimitLimit, &b"999999999999999"[..])));
}

#[test]
fn jitter_lengthens_the_wait_by_at_most_30_s() {
    let seconds = |share, draw: fn() -> u64, wait| Jitter { share: Percent::new(share), draw }.seconds(wait);
    let (least, most) = (|| 0, || u64::MAX);
    for (share, wait, shortest, longest) in [
        (10, Span::from_secs(60), 60, 66),
        (10, Span::from_micros(1), 1, 1),
        (10, Span::ZERO, 1, 1),
        (10, Span::from_micros(60_000_001), 61, 67),
        (100, Span::from_secs(10), 10, 20),
        (100, Span::from_micros(9_999_999), 10, 11),
        (100, Span::from_millis(500), 1, 1),
        (50, Span::from_secs(9), 9, 10),
        (10, Span::from_secs(5), 5, 6),
        (100, Span::from_secs(3_600), 3_600, 3_630),
        (10, Span::from_secs(86_400), 86_400, 86_430),
        (0, Span::from_secs(60), 60, 60),
        (100, Span::from_micros(u64::MAX), 18_446_744_073_710, 18_446_744_073_710),
    ] {
        assert_eq!(seconds(share, least, wait), shortest, "{share} % of {wait}");
        assert_eq!(seconds(share, most, wait), longest, "{share} % of {wait}");
        let drawn = seconds(share, crate::random::draw, wait);
        assert!((shortest..=longest).contains(&drawn), "{share} % of {wait}: {drawn}");
    }
}
