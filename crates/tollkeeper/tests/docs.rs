//! Checks the documentation: its links work, the tests that it names exist, and its numbers are those of the product.

use std::fs;
use std::path::{Path, PathBuf};

use tollkeeper::{
    Algorithm, Capacity, CheckedQuota, Clock, Correction, Costs, Limit, Limiter, ManualClock, MemoryStore,
    Policy, Quota, Retry, Span, Time, Verdict, facts,
};

#[test]
fn every_link_leads_to_a_file() {
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let folder = page.parent().unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            let file = link.split('#').next().unwrap();
            let found = link.starts_with("https://") || folder.join(file).exists();
            assert!(found, "{}: broken link to `{file}`", page.display());
        }
    }
}

#[test]
fn tests_named_in_architecture_exist() {
    assert!(named_tests("ARCHITECTURE.md") > 20);
}

#[test]
fn tests_named_in_the_bypass_table_exist() {
    assert!(named_tests("docs/security.md") > 30);
}

/// Each class of attack names a test.
#[test]
fn every_bypass_names_its_test() {
    let page = fs::read_to_string(root().join("docs/security.md")).unwrap();
    let table = page.split("| Class | Seen in |").nth(1).expect("the table of bypasses");
    let rows: Vec<&str> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 40, "{} rows", rows.len());
    for row in rows {
        let test = row.trim_end_matches('|').rsplit('|').next().expect("four columns").trim();
        assert!(test.contains(".rs::"), "no test: {row}");
    }
}

/// A gateway forwards client headers that it does not set itself, so a client could spoof a `trusted` fact. Each
/// documented gateway therefore sets the headers of all trusted facts in the documentation and in the policies of
/// `tollkeeper init`.
#[test]
fn documented_gateways_set_the_headers_of_trusted_facts() {
    let policies = ["public-api", "b2b", "login", "llm", "internal"]
        .map(|name| root().join(format!("crates/tollkeeper-server/src/templates/{name}.yaml")));
    let mut headers = Vec::new();
    for file in pages().into_iter().chain(policies) {
        let text = fs::read_to_string(&file).unwrap();
        let trusted = text.lines().filter(|line| line.contains("trusted: true"));
        headers.extend(trusted.flat_map(|line| {
            let names = line.split("from: header.").skip(1);
            names.filter_map(|rest| rest.split_once(", trusted: true")).map(|(name, _)| name.to_owned())
        }));
    }
    headers.sort_unstable();
    headers.dedup();
    assert!(headers.len() > 2, "{headers:?}");
    let page = |name: &str| fs::read_to_string(root().join(name)).unwrap().to_ascii_lowercase();
    let (nginx, others) = (page("docs/nginx.md"), page("docs/traefik-caddy.md"));
    for header in headers {
        assert!(nginx.contains(&format!("proxy_set_header {header} ")), "nginx: {header}");
        assert!(nginx.contains(&format!("`{header}: \"\"`")), "ingress-nginx: {header}");
        let removed = others.matches(&format!("header_up -{header}\n")).count();
        assert_eq!(removed, 2, "each Caddyfile: {header}");
        assert!(others.contains(&format!("{header}: \"\"")), "Traefik: {header}");
    }
}

/// Counts the tests that a page names as `path::name` in backticks, and fails if one does not exist.
fn named_tests(page: &str) -> usize {
    let text = fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
    let named: Vec<(&str, &str)> =
        text.split('`').skip(1).step_by(2).filter_map(|code| code.split_once(".rs::")).collect();
    for (path, name) in &named {
        let path = format!("{path}.rs");
        let source = fs::read_to_string(root().join(&path));
        let source = source.unwrap_or_else(|error| panic!("{page} names {path}: {error}"));
        // A function, or a row of a macro that generates tests.
        let exists = source.contains(&format!("fn {name}(")) || source.contains(&format!("    {name}: "));
        assert!(exists, "{page} names {path}::{name}, which does not exist");
    }
    named.len()
}

#[test]
fn every_algorithm_is_documented_with_its_picture() {
    let page = fs::read_to_string(root().join("docs/algorithms.md")).unwrap();
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    for algorithm in Algorithm::ALL {
        assert!(readme.contains(&format!("| `{algorithm}` |")), "README.md: {algorithm}");
        assert!(page.contains(&format!("\n## {algorithm}\n")), "docs/algorithms.md: {algorithm}");
        assert!(page.contains(&format!("(pictures/{algorithm}.svg)")), "docs/algorithms.md: {algorithm}");
    }
}

// What follows are the sequences of docs/algorithms.md, all under 10 per 10 s.

#[test]
fn fixed_window_admits_20_within_200_ms_around_an_edge() {
    let admitted = |algorithm| {
        let mut key = Key::new(algorithm);
        key.admitted(9_900, 10) + key.admitted(10_100, 10)
    };
    assert_eq!(admitted(Algorithm::FixedWindow), 20);
    assert_eq!(admitted(Algorithm::SlidingWindow), 10);
    assert_eq!(admitted(Algorithm::SlidingLog), 10);
    assert_eq!(admitted(Algorithm::TokenBucket), 10);
}

#[test]
fn sliding_window_admits_at_most_19_in_nine_seconds() {
    let mut key = Key::new(Algorithm::SlidingWindow);
    assert_eq!(key.admitted(9_999, 10), 10);
    let later: u64 = (11..=19).map(|second| key.admitted(1_000 * second, 5)).sum();
    assert_eq!(later, 9, "one more at the end of each second, but no twentieth in total");
}

#[test]
fn sliding_window_holds_persistent_clients_to_the_quota() {
    for start in [0, 2_500, 7_500, 9_950] {
        let mut key = Key::new(Algorithm::SlidingWindow);
        let arrivals = (start..200_000).step_by(50);
        let admitted: Vec<u64> = arrivals.filter(|at| key.admitted(*at, 1) == 1).collect();
        for from in admitted.iter().filter(|at| (20_000..190_000).contains(*at)) {
            let within = admitted.iter().filter(|at| (*from..*from + 10_000).contains(*at)).count();
            assert!((9..=10).contains(&within), "{within} from {from} ms on");
        }
    }
}

#[test]
fn token_bucket_admits_19_in_10_s_and_one_right_after() {
    let mut key = Key::new(Algorithm::TokenBucket);
    let admitted: u64 = (0..10_000).step_by(50).map(|at| key.admitted(at, 15)).sum();
    assert_eq!(admitted, 19);
    assert_eq!(key.admitted(10_000, 15), 1);
}

#[test]
fn leaky_bucket_drains_one_request_per_second() {
    let mut key = Key::new(Algorithm::LeakyBucket);
    let delays: Vec<_> = (0..10).map(|_| key.check(0, 1).delay().as_micros()).collect();
    assert_eq!(delays, (0..10).map(|second| second * 1_000_000).collect::<Vec<_>>());
    assert!(!key.check(0, 1).allowed());
}

#[test]
fn clock_set_back_gives_no_credit_and_costs_little() {
    // The bucket is emptied at 100 s and has one unit again a second later.
    let wait = |then: u64| {
        let mut key = Key::new(Algorithm::TokenBucket);
        assert!(key.check(100_000, 10).allowed());
        match key.check(then, 1).verdict() {
            Verdict::Deny { retry: Retry::After(wait) } => wait.as_micros() / 1_000,
            Verdict::Allow { .. } => 0,
            never => panic!("{never:?}"),
        }
    };
    assert_eq!(wait(100_000), 1_000);
    assert_eq!(wait(95_000), 6_000, "five seconds back: the wait lasts until the clock has caught up");
    assert_eq!(wait(0), 1_000, "back by more than the time to refill: the state restarts from now");
    assert_eq!(wait(3_700_000), 0, "an hour forward: full");
}

#[test]
fn bucket_returns_the_surplus_minus_its_refill() {
    let settled = |algorithm| {
        let mut key = Key::new(algorithm);
        let charge = key.check(10_000, 8).charge().unwrap();
        key.set_time(13_000);
        assert_eq!(key.limiter.settle(&charge, Costs::Request(2)).wait().unwrap(), Correction::Done);
        key.remaining()
    };
    // Eight of ten are charged; three seconds later the charge is settled at two. The bucket has refilled
    // three meanwhile, so it gets a refund of five of the surplus of six: what is left of the eight.
    assert_eq!(settled(Algorithm::TokenBucket), 10);
    assert_eq!(settled(Algorithm::LeakyBucket), 5);
    assert_eq!(settled(Algorithm::FixedWindow), 8);
    assert_eq!(settled(Algorithm::SlidingWindow), 8);
    assert_eq!(settled(Algorithm::SlidingLog), 8);
}

#[test]
fn lowered_burst_keeps_the_use() {
    let mut key = Key::new(Algorithm::TokenBucket);
    assert!(key.check(0, 10).allowed());
    let quota = |burst| vec![limit(Algorithm::TokenBucket, rate().burst(burst))];
    key.limiter.replace(quota(3)).unwrap();
    let refused = key.check(0, 1);
    assert_eq!(refused.retry_after(), Some(Span::from_secs(8)), "until the level is 2 of 3");
    key.limiter.replace(quota(12)).unwrap();
    assert_eq!(key.remaining(), 2);
}

#[test]
fn largest_documented_numbers_are_exact_bounds() {
    let text = fs::read_to_string(root().join("docs/algorithms.md")).unwrap();
    for (period, largest, written) in [
        (1, 2_251_799_813, "2,251,799,813"),
        (60, 37_529_996, "37,529,996"),
        (3_600, 625_499_948, "625,499,948"),
        (86_400, 26_062_497, "26,062,497"),
        (30 * 86_400, 868_749_928, "868,749,928"),
    ] {
        let rate = |count| Quota::every(count, Span::from_secs(period));
        assert!(CheckedQuota::new(Algorithm::TokenBucket, rate(largest)).is_ok(), "{largest} in {period} s");
        assert!(
            CheckedQuota::new(Algorithm::TokenBucket, rate(largest + 1)).is_err(),
            "{largest} in {period} s"
        );
        assert!(text.contains(written), "docs/algorithms.md does not contain {written}");
    }
}

/// One key of one limit, on a clock that starts at the edge of a window.
struct Key {
    limiter: Limiter,
    clock: ManualClock,
}

const START: u64 = 1_760_000_000_000;

fn rate() -> Quota {
    Quota::per(10, std::time::Duration::from_secs(10))
}

fn limit(algorithm: Algorithm, rate: Quota) -> Limit {
    Limit::new("limit", rate).algorithm(algorithm)
}

impl Key {
    fn new(algorithm: Algorithm) -> Key {
        let clock = ManualClock::new(Time::from_micros(START * 1_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        let policy = Policy::new(vec![limit(algorithm, rate())]).expect("valid");
        Key { limiter: Limiter::embedded(policy, store), clock }
    }

    fn set_time(&mut self, millis: u64) {
        self.clock.set(Time::from_micros((START + millis) * 1_000));
    }

    fn check(&mut self, millis: u64, cost: u64) -> tollkeeper::Decision {
        self.set_time(millis);
        self.limiter.check(&facts! {}).cost(cost).wait().expect("valid")
    }

    /// Sends this many requests at this millisecond; returns how many are admitted.
    fn admitted(&mut self, millis: u64, requests: u64) -> u64 {
        (0..requests).map(|_| u64::from(self.check(millis, 1).allowed())).sum()
    }

    fn remaining(&self) -> u64 {
        let decision = self.limiter.peek(&facts! {}).wait().expect("valid");
        decision.limit("limit").expect("the limit applies to every request").outcome().remaining
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every page of the documentation.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for folder in ["", "docs", "docs/adr"] {
        let entries = fs::read_dir(root().join(folder)).expect("a folder");
        pages.extend(entries.map(|entry| entry.expect("readable").path()));
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() > 5, "{pages:?}");
    pages
}

/// `main` prints an error that it returns with `{:?}`: every error type says there what it says with `{}`.
#[test]
fn every_error_prints_well_with_debug() {
    let mut checked = Vec::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for line in text.lines().filter(|line| line.starts_with("impl ")) {
                let Some((_, name)) = line.split_once("::error::Error for ") else { continue };
                let name = name.trim_end_matches([' ', '{', '}']);
                let debug = format!("impl fmt::Debug for {name} {{");
                let (_, body) = text.split_once(&debug).unwrap_or_else(|| panic!("{name} derives Debug"));
                let body: Vec<&str> = body.lines().skip(1).take(2).map(str::trim).collect();
                assert_eq!(body[1], "fmt::Display::fmt(self, f)", "{name} in {}", path.display());
                checked.push(name.to_owned());
            }
        }
    }
    assert!(checked.len() >= 20 && checked.contains(&"ReadError".to_owned()), "{checked:?}");
    let error = Limiter::builder().limit(Limit::new("login", Quota::per_minute(0))).build().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}
