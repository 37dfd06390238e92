//! What a simulation found, and its three forms: text, JSON, HTML.

pub mod html;
pub mod json;
pub mod text;

use tollkeeper::Algorithm;

use super::fail_if::Checked;
use super::lines::UnreadableLines;
use super::plan::NotSimulated;
use super::suggest::Suggestion;
use super::world::WorldResult;

/// What a simulation found.
#[derive(Clone, Debug)]
pub struct Report {
    /// The config file.
    pub policy: String,
    /// The lines of the log.
    pub lines: LineCounts,
    /// Lines that could not be read.
    pub unreadable: UnreadableLines,
    /// Whether the lines of a second were spread over it.
    pub spread: bool,
    /// The result of the config.
    pub result: WorldResult,
    /// Limits that the log does not say enough about.
    pub not_simulated: Vec<NotSimulated>,
    /// The results of other policies.
    pub against: Vec<Against>,
    /// Each rate limit under each algorithm.
    pub algorithms: Vec<UnderAlgorithm>,
    /// Suggested limits.
    pub suggest: Vec<Suggestion>,
    /// The share that suggested limits refuse at most.
    pub suggest_share: Option<f64>,
    /// The conditions of `--fail-if`.
    pub fail_if: Vec<Checked>,
    /// What a reader must know to judge the numbers.
    pub notes: Vec<String>,
}

/// The lines of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// Without blank lines and headers.
    pub read: u64,
    /// Those that were decided.
    pub used: u64,
    /// Those that could not be read.
    pub unreadable: u64,
    /// Those that came too late to be put in order.
    pub late: u64,
}

/// The result of another policy.
#[derive(Clone, Debug)]
pub struct Against {
    /// Its file.
    pub policy: String,
    /// Its result.
    pub result: WorldResult,
    /// Limits that the log does not say enough about.
    pub not_simulated: Vec<NotSimulated>,
}

/// A limit under one of the algorithms.
#[derive(Clone, Debug)]
pub struct UnderAlgorithm {
    /// The limit.
    pub name: String,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How many requests it applied to.
    pub asked: u64,
    /// How many it refused, or would have.
    pub refused: u64,
}

impl Report {
    /// The warning that the report begins with, if more than 5 % of the lines are unreadable.
    pub fn warning(&self) -> Option<String> {
        let LineCounts { read, unreadable, .. } = self.lines;
        (unreadable * 20 > read).then(|| {
            let share = percent(unreadable, read);
            format!("warning: {share} of the lines are unreadable: is --format right?")
        })
    }
}

/// What no log can tell, at the end of every report.
pub const CAVEATS: [&str; 2] = [
    "Clients that are refused retry or leave: a log cannot tell what they would have done.",
    "Requests that were refused at the time are in the log too (--drop-status 429 leaves them out).",
];

/// A share for people: `0.25 %`.
pub fn percent(part: u64, of: u64) -> String {
    share(if of == 0 { 0.0 } else { part as f64 / of as f64 })
}

/// As [`percent`], for a number from 0 to 1. What is not zero is not shown as zero.
pub fn share(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0 %".to_owned(),
        percent if percent < 0.01 => "< 0.01 %".to_owned(),
        percent if percent < 10.0 => format!("{percent:.2} %"),
        percent => format!("{percent:.1} %"),
    }
}

/// A number with separators: `1,234,567`.
pub fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(number), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(percent(0, 0), "0 %");
        assert_eq!(percent(1, 1_000_000), "< 0.01 %");
        assert_eq!(percent(25, 10_000), "0.25 %");
        assert_eq!(percent(1, 3), "33.3 %");
    }
}
