//! The scripts: twins, what surrounds them, and a driver, put together as one text.
//!
//! A script is run from its first line at every call, and each function in it is made anew each time. So a
//! script holds only functions that its driver reaches, and a check only those of the algorithms in its
//! batch: that saves a call two or three microseconds of fifteen.

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
/// The driver that gives back and adds.
pub const CORRECT: &str = include_str!("correct.lua");
/// The driver that sets what all nodes share.
#[cfg(feature = "config")]
const POLICY: &str = include_str!("policy.lua");
/// The driver that releases and renews slots.
pub const SLOTS: &str = include_str!("slots.lua");

/// A script, and what Redis calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    text: String,
    sha: String,
}

impl Script {
    /// A driver with the functions it needs, of these algorithms.
    pub fn new(driver: &str, kinds: Kinds) -> Script {
        Script::of(assemble(driver, kinds))
    }

    /// A script that is already put together.
    pub fn of(text: String) -> Script {
        let sha = digest::hex(&digest::sha1(text.as_bytes()));
        Script { text, sha }
    }

    /// What `EVAL` is given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What `EVALSHA` is given.
    pub fn sha(&self) -> &str {
        &self.sha
    }
}

/// The script that decides tolls of these algorithms.
pub fn check(kinds: Kinds) -> &'static Script {
    static SCRIPTS: [OnceLock<Script>; 64] = [const { OnceLock::new() }; 64];
    SCRIPTS[usize::from(kinds.0)].get_or_init(|| Script::new(CHECK, kinds))
}

/// The script that gives back and adds.
pub fn correct() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(CORRECT, Kinds::ALL))
}

/// The script that releases and renews slots.
pub fn slots() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(SLOTS, Kinds::ALL))
}

/// The script that sets what all nodes share.
#[cfg(feature = "config")]
pub fn policy() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(POLICY, Kinds::default()))
}

/// A set of algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// All of them.
    pub const ALL: Kinds = Kinds(0x3f);

    /// These and one more.
    #[must_use]
    pub fn with(self, algorithm: Algorithm) -> Kinds {
        // A leaky bucket is a token bucket, and something more.
        let also = if algorithm == Algorithm::LeakyBucket { self.with(Algorithm::TokenBucket).0 } else { 0 };
        Kinds(self.0 | also | 1 << (algorithm as u8))
    }

    /// Whether a function belongs to one of these algorithms, or to none.
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

/// The text of a script: the driver, and before it every function that it reaches. Functions of other
/// algorithms are named, so that they are no globals, but are nothing.
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

/// A function of a part, or what stands between two.
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
        let piece = pieces.last_mut().expect("pushed above, or by a line before");
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
    fn a_check_of_buckets_holds_the_functions_of_buckets() {
        let buckets = check(Kinds::default().with(Algorithm::TokenBucket));
        assert!(functions(buckets.text()).len() < 17, "{:#?}", functions(buckets.text()));
        assert!(functions(check(Kinds::ALL).text()).len() > 30);
        assert!(!buckets.text().contains("--"), "comments do not travel");
        assert!(!functions(buckets.text()).iter().any(|name| name.contains("give_back")));
    }

    #[test]
    fn a_script_is_called_by_its_digest() {
        let script = Script::of("return 1".to_owned());
        assert_eq!(script.sha(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
    }
}
