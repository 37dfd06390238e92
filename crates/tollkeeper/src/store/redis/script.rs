//! Assembles the Lua scripts: the twins of the algorithms, shared helpers, and a driver.
//!
//! Redis runs a script from its first line at every call, and creates each function in it anew. So a script
//! contains only the functions that its driver reaches, and a check only those of the algorithms in its batch:
//! that saves a call two or three microseconds of fifteen. Plain buckets, the most common limits, have drivers of
//! their own, which take 0.55 (one bucket) and 0.8 (three) of the time of the general one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{LazyLock, OnceLock};

use tollkeeper_core::Algorithm;
use tollkeeper_core::algorithm::twins;

use super::digest;

/// Local names for library functions, one on each line. A script begins with those that it uses.
const PRELUDE: &str = include_str!("prelude.lua");

/// A driver: the part of a script that calls Redis.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    text: &'static str,
    /// The files of which it may use functions.
    parts: &'static [&'static str],
}

impl Driver {
    /// A driver that may use all functions of the algorithms, of their states, and of logs and slots.
    pub const fn new(text: &'static str) -> Driver {
        Driver { text, parts: &ALL_PARTS }
    }
}

const ALL_PARTS: [&str; 7] = [
    twins::METER,
    twins::FIXED_WINDOW,
    twins::SLIDING_WINDOW,
    twins::SLIDING_LOG,
    twins::CONCURRENCY,
    include_str!("state.lua"),
    include_str!("wide.lua"),
];

/// The driver that decides any tolls.
const CHECK: Driver = Driver::new(include_str!("check.lua"));
/// The driver that decides any tolls, and grants units in advance.
static CHECK_WITH_LEASES: LazyLock<String> = LazyLock::new(|| {
    let functions = CHECK.text.replace("--lease: functions\n", include_str!("lease.lua"));
    functions.replace(" decide(start, true)", " grant_or_decide(start)")
});
/// The driver that decides one toll of one plain bucket.
const BUCKET: Driver = Driver { text: include_str!("bucket.lua"), parts: &[twins::METER] };
/// The driver that decides tolls of plain buckets.
const BUCKETS: Driver = Driver { text: include_str!("buckets.lua"), parts: &[twins::METER] };
/// The driver that refunds charges and adds to them.
const CORRECT: Driver = Driver::new(include_str!("correct.lua"));
/// The driver that releases and renews slots.
const SLOTS: Driver = Driver::new(include_str!("slots.lua"));
/// The driver that sets the limits that all nodes share.
#[cfg(feature = "config")]
const POLICY: Driver = Driver { text: include_str!("policy.lua"), parts: &[] };
/// The driver that sets and removes overrides for all nodes.
const OVERRIDES: Driver = Driver { text: include_str!("overrides.lua"), parts: &[] };

/// The text of a script, and the SHA-1 digest that Redis knows it by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    text: String,
    sha: String,
}

impl Script {
    /// Assembles a driver with the functions it needs, for these algorithms.
    pub fn new(driver: Driver, kinds: Kinds) -> Script {
        Script::of(assemble(driver, kinds))
    }

    /// A script that is already assembled.
    pub fn of(text: String) -> Script {
        let sha = digest::hex(&digest::sha1(text.as_bytes()));
        Script { text, sha }
    }

    /// The text, for `EVAL`.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The SHA-1 digest in hex, for `EVALSHA`.
    pub fn sha(&self) -> &str {
        &self.sha
    }
}

/// The script that decides tolls of these algorithms.
pub fn check(kinds: Kinds) -> &'static Script {
    static SCRIPTS: [OnceLock<Script>; 128] = [const { OnceLock::new() }; 128];
    let driver = || if kinds.has_leases() { Driver::new(&CHECK_WITH_LEASES) } else { CHECK };
    SCRIPTS[usize::from(kinds.0)].get_or_init(|| Script::new(driver(), kinds))
}

/// The script that decides one toll of one plain bucket.
pub fn bucket() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(BUCKET, Kinds::ALL))
}

/// The script that decides tolls of plain buckets.
pub fn buckets() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(BUCKETS, Kinds::ALL))
}

/// The script that refunds charges and adds to them.
pub fn correct() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(CORRECT, Kinds::ALL))
}

/// The script that releases and renews slots.
pub fn slots() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(SLOTS, Kinds::ALL))
}

/// The script that sets the limits that all nodes share.
#[cfg(feature = "config")]
pub fn policy() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(POLICY, Kinds::default()))
}

/// The script that sets and removes overrides for all nodes.
pub fn overrides() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(OVERRIDES, Kinds::default()))
}

/// A set of algorithms, and whether there are leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

/// The bit of [`Kinds`] that is set if there are leases.
const LEASES: u8 = 0x40;

impl Kinds {
    /// All of them.
    pub const ALL: Kinds = Kinds(0x3f);

    /// This set and one more algorithm.
    #[must_use]
    pub fn with(self, algorithm: Algorithm) -> Kinds {
        // A leaky bucket needs the functions of a token bucket, too.
        let also = if algorithm == Algorithm::LeakyBucket { self.with(Algorithm::TokenBucket).0 } else { 0 };
        Kinds(self.0 | also | 1 << (algorithm as u8))
    }

    /// This set, with leases.
    #[must_use]
    pub fn with_leases(self) -> Kinds {
        Kinds(self.0 | LEASES)
    }

    fn has_leases(self) -> bool {
        self.0 & LEASES != 0
    }

    /// Whether a function belongs to an algorithm of this set, or to no particular algorithm.
    fn has(self, function: &str) -> bool {
        if function.starts_with("wide_") {
            return self.has("log_") || self.has("slots_");
        }
        let owner = [
            ("meter_departs", Algorithm::LeakyBucket),
            ("meter_", Algorithm::TokenBucket),
            ("fixed_window_", Algorithm::FixedWindow),
            ("sliding_window_", Algorithm::SlidingWindow),
            ("sliding_log_", Algorithm::SlidingLog),
            ("log_", Algorithm::SlidingLog),
            ("concurrency_", Algorithm::Concurrency),
            ("slots_", Algorithm::Concurrency),
        ]
        .into_iter()
        .find(|(prefix, _)| function.starts_with(prefix));
        owner.is_none_or(|(_, algorithm)| self.with(algorithm) == self)
    }
}

/// The text of a script: every function that the driver reaches, then the driver. Functions of other algorithms
/// are declared as local variables without a value: Redis forbids access to undefined globals.
fn assemble(driver: Driver, kinds: Kinds) -> String {
    let pieces: Vec<Piece<'_>> = driver.parts.iter().flat_map(|part| pieces(part)).collect();
    let functions: HashMap<&str, &Piece<'_>> =
        pieces.iter().filter_map(|piece| Some((piece.name?, piece))).collect();
    let driver = without_comments(driver.text);
    let (mut needed, mut absent) = (BTreeSet::new(), BTreeSet::new());
    let mut to_read = vec![driver.as_str()];
    while let Some(text) = to_read.pop() {
        for word in words(text) {
            let Some(function) = functions.get(word) else { continue };
            if !kinds.has(word) {
                absent.insert(word);
            } else if needed.insert(word) {
                to_read.push(&function.text);
            }
        }
    }
    let mut body = String::new();
    if !absent.is_empty() {
        body += &format!("local {}\n", absent.into_iter().collect::<Vec<_>>().join(", "));
    }
    for piece in pieces.iter().filter(|piece| piece.name.is_none_or(|name| needed.contains(name))) {
        body += &piece.text;
    }
    body += &driver;
    let used: HashSet<&str> = words(&body).collect();
    let is_used = |line: &&str| words(line).nth(1).is_some_and(|name| used.contains(name));
    let prelude: Vec<&str> = PRELUDE.lines().filter(|line| is_code(line)).filter(is_used).collect();
    prelude.join("\n") + "\n" + &body
}

/// The words of a Lua text: names, keywords and numbers.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_').filter(|word| !word.is_empty())
}

/// A function of a part, or a line between two functions.
struct Piece<'a> {
    name: Option<&'a str>,
    text: String,
}

fn pieces(part: &str) -> Vec<Piece<'_>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    let mut inside = false;
    for line in part.lines().filter(|line| is_code(line)) {
        let name = line.strip_prefix("local function ").and_then(|rest| rest.split('(').next());
        if !inside {
            pieces.push(Piece { name, text: String::new() });
            inside = name.is_some();
        }
        let piece = pieces.last_mut().expect("pushed above, or by an earlier line");
        piece.text += line.trim_start();
        piece.text += "\n";
        inside &= line != "end";
    }
    pieces
}

fn without_comments(text: &str) -> String {
    text.lines().filter(|line| is_code(line)).map(|line| line.trim_start().to_owned() + "\n").collect()
}

fn is_code(line: &str) -> bool {
    let line = line.trim_start();
    !line.is_empty() && !line.starts_with("--")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(text: &str) -> Vec<&str> {
        let named = |line: &'_ str| line.strip_prefix("local function ").map(|rest| rest.len());
        text.lines().filter(|line| named(line).is_some()).collect()
    }

    #[test]
    fn bucket_check_contains_only_bucket_functions() {
        let buckets = check(Kinds::default().with(Algorithm::TokenBucket));
        assert!(functions(buckets.text()).len() < 17, "{:#?}", functions(buckets.text()));
        assert!(functions(check(Kinds::ALL).text()).len() > 30);
        assert!(!buckets.text().contains("--"), "comments are removed");
        assert!(!functions(buckets.text()).iter().any(|name| name.contains("give_back")));
    }

    /// A script for plain buckets contains only what decides a bucket, and no local name that it does not use.
    #[test]
    fn plain_bucket_scripts_contain_no_other_functions() {
        let expected = ["meter_drained", "meter_drained_at", "meter_step"];
        for script in [bucket(), buckets()] {
            let functions = functions(script.text());
            let names: Vec<&str> = functions.iter().filter_map(|line| words(line).nth(2)).collect();
            assert_eq!(names, expected);
        }
        assert!(!bucket().text().contains("table.concat") && buckets().text().contains("table.concat"));
    }

    #[test]
    fn only_scripts_with_leases_contain_their_functions() {
        let buckets = Kinds::default().with(Algorithm::TokenBucket);
        assert!(!check(buckets).text().contains("lease"));
        assert!(!check(Kinds::ALL).text().contains("lease"));
        let leased = check(buckets.with_leases()).text();
        assert!(leased.contains("local function meter_lease") && leased.contains("= grant_or_decide(start)"));
        assert!(!leased.contains("local function fixed_window_lease"));
    }

    #[test]
    fn script_is_identified_by_its_sha1() {
        let script = Script::of("return 1".to_owned());
        assert_eq!(script.sha(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
    }
}
