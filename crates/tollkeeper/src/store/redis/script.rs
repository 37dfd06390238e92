//! Assembles the Lua scripts: the twins of the algorithms, shared helpers, and a driver.
//!
//! Redis runs a script from its first line at every call, and creates each function in it anew. So a script
//! contains only the functions that its driver reaches, and a check only those of the algorithms in its batch:
//! that saves a call two or three microseconds of fifteen.

use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;

use tollkeeper_core::Algorithm;
use tollkeeper_core::algorithm::twins;

use super::digest;

const PRELUDE: &str = include_str!("prelude.lua");
const PARTS: [&str; 7] = [
    twins::METER,
    twins::FIXED_WINDOW,
    twins::SLIDING_WINDOW,
    twins::SLIDING_LOG,
    twins::CONCURRENCY,
    include_str!("state.lua"),
    include_str!("wide.lua"),
];

/// The driver that decides tolls.
pub const CHECK: &str = include_str!("check.lua");
/// The part of it that grants units in advance.
const LEASE: &str = include_str!("lease.lua");
/// The driver that refunds charges and adds to them.
pub const CORRECT: &str = include_str!("correct.lua");
/// The driver that sets the limits that all nodes share.
#[cfg(feature = "config")]
const POLICY: &str = include_str!("policy.lua");
/// The driver that releases and renews slots.
pub const SLOTS: &str = include_str!("slots.lua");

/// The text of a script, and the SHA-1 digest that Redis knows it by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    text: String,
    sha: String,
}

impl Script {
    /// Assembles a driver with the functions it needs, for these algorithms.
    pub fn new(driver: &str, kinds: Kinds) -> Script {
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
    SCRIPTS[usize::from(kinds.0)].get_or_init(|| match kinds.with_leases() == kinds {
        false => Script::new(CHECK, kinds),
        true => Script::new(&with_leases(CHECK), kinds),
    })
}

/// The driver with the part that grants units in advance.
fn with_leases(driver: &str) -> String {
    let call = "if admitted == nil then\nadmitted, next = grant(start)\nend\n";
    driver.replace("--lease: function\n", LEASE).replace("  --lease: call\n", call)
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

/// A set of algorithms, and whether there are leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

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
        Kinds(self.0 | 0x40)
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
fn assemble(driver: &str, kinds: Kinds) -> String {
    let pieces: Vec<Piece<'_>> = PARTS.iter().flat_map(|part| pieces(part)).collect();
    let functions: HashMap<&str, &Piece<'_>> =
        pieces.iter().filter_map(|piece| Some((piece.name?, piece))).collect();
    let driver = without_comments(driver);
    let (mut needed, mut absent) = (BTreeSet::new(), BTreeSet::new());
    let mut to_read = vec![driver.as_str()];
    while let Some(text) = to_read.pop() {
        for word in text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_') {
            let Some(function) = functions.get(word) else { continue };
            if !kinds.has(word) {
                absent.insert(word);
            } else if needed.insert(word) {
                to_read.push(&function.text);
            }
        }
    }
    let mut text = without_comments(PRELUDE);
    if !absent.is_empty() {
        text += &format!("local {}\n", absent.into_iter().collect::<Vec<_>>().join(", "));
    }
    for piece in pieces.iter().filter(|piece| piece.name.is_none_or(|name| needed.contains(name))) {
        text += &piece.text;
    }
    text + &driver
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

    #[test]
    fn only_scripts_with_leases_contain_their_functions() {
        let buckets = Kinds::default().with(Algorithm::TokenBucket);
        assert!(!check(buckets).text().contains("lease"));
        assert!(!check(Kinds::ALL).text().contains("lease"));
        let leased = check(buckets.with_leases()).text();
        assert!(leased.contains("local function meter_lease") && leased.contains("grant(start)"));
        assert!(!leased.contains("local function fixed_window_lease"));
    }

    #[test]
    fn script_is_identified_by_its_sha1() {
        let script = Script::of("return 1".to_owned());
        assert_eq!(script.sha(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
    }
}
