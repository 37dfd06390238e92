//! What is wrong with a file, and how it is said: where, what, and what would be right.
//!
//! All problems of a file are collected and shown together, in the order of the file. A report may end up
//! in a terminal or a log, so nothing in it is printed raw: control characters are replaced, and whatever
//! may be a password in a URL is starred out of the excerpts.

use std::fmt::{self, Write as _};
use std::ops::Range;
use std::sync::Arc;

use super::excerpt;
use super::warning::Warning;

/// The most problems that are shown.
const SHOWN: usize = 100;
/// The most problems that are kept; the rest is counted.
const KEPT: usize = 1_000;
/// The longest message, in characters.
const LONGEST: usize = 500;

/// A stretch of the text of a file, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Position {
    pub(super) fn new(start: usize, end: usize) -> Position {
        Position { start, end: end.max(start) }
    }
}

/// Whether a file can be used in spite of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// It cannot.
    Error,
    /// It can, but somebody should look at it.
    Warning,
}

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The code by which it can be looked up and silenced; only warnings have one.
    pub code: Option<Warning>,
    /// Whether the file can be used all the same.
    pub severity: Severity,
    /// Where in the text it is, in bytes.
    pub span: Range<usize>,
    /// What is wrong.
    pub message: String,
    /// What would be right.
    pub help: Option<String>,
}

/// Everything that is wrong with a file. Written out, it is one paragraph for each problem:
///
/// ```text
/// tollkeeper.yaml:12:11: error: limit `login`: period `1 mn` is not a duration (try `1m`)
///   |     rate: 5/1 mn
///   |           ^^^^^^
/// ```
#[derive(Clone)]
pub struct Report {
    name: String,
    text: Arc<str>,
    problems: Vec<Problem>,
    more: usize,
    hidden: Vec<Position>,
}

impl Report {
    /// The problems, in the order of the file.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self.problems.is_empty()
    }

    /// How many problems are errors, those included that are too many to be kept.
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count() + self.more
    }

    /// How many problems are warnings.
    pub fn warnings(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Warning).count()
    }

    /// The line and the column of a problem, both from 1; the column counts characters.
    pub fn position(&self, problem: &Problem) -> (usize, usize) {
        excerpt::position(&self.text, problem.span.start)
    }

    /// Adds an error that has a code.
    pub(super) fn add(&mut self, code: Warning, position: Position, message: String, help: String) {
        let span = position.start..position.end;
        let problem =
            Problem { code: Some(code), severity: Severity::Error, span, message, help: Some(help) };
        let at = self.problems.partition_point(|other| other.span.start <= position.start);
        self.problems.insert(at, problem);
    }

    /// As `to_string`, with the colours of a terminal.
    pub fn coloured(&self) -> String {
        let mut text = String::new();
        self.write(&mut text, &COLOURS).expect("a string takes everything");
        text
    }

    fn write(&self, f: &mut dyn fmt::Write, colours: &Colours) -> fmt::Result {
        for (index, problem) in self.problems.iter().take(SHOWN).enumerate() {
            if index > 0 {
                f.write_char('\n')?;
            }
            self.write_problem(f, problem, colours)?;
        }
        match self.problems.len().saturating_sub(SHOWN) + self.more {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }

    fn write_problem(&self, f: &mut dyn fmt::Write, problem: &Problem, colours: &Colours) -> fmt::Result {
        let (line, column) = self.position(problem);
        let (colour, word) = match problem.severity {
            Severity::Error => (colours.error, "error"),
            Severity::Warning => (colours.warning, "warning"),
        };
        let Colours { bold, plain, .. } = colours;
        let mut message = problem.message.clone();
        if let Some(help) = &problem.help {
            write!(message, " ({help})")?;
        }
        let name = excerpt::printable(&self.name, LONGEST);
        let message = excerpt::printable(&message, LONGEST);
        let code = problem.code.map_or_else(String::new, |code| format!("[{code}]"));
        write!(f, "{bold}{name}:{line}:{column}:{plain} {colour}{word}{code}:{plain} {message}")?;
        if let Some(excerpt) = excerpt::around(&self.text, &problem.span, &self.hidden) {
            write!(f, "\n  | {}\n  | {}{colour}{}{plain}", excerpt.line, excerpt.indent, excerpt.underline)?;
        }
        Ok(())
    }
}

/// What switches the colours of a terminal.
struct Colours {
    error: &'static str,
    warning: &'static str,
    bold: &'static str,
    plain: &'static str,
}

const COLOURS: Colours =
    Colours { error: "\x1b[1;31m", warning: "\x1b[1;33m", bold: "\x1b[1m", plain: "\x1b[0m" };
const NO_COLOURS: Colours = Colours { error: "", warning: "", bold: "", plain: "" };

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &NO_COLOURS)
    }
}

/// Without the text, which may hold secrets.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report").field("name", &self.name).field("problems", &self.problems).finish()
    }
}

impl std::error::Error for Report {}

/// Collects problems while a file is read.
#[derive(Debug, Default)]
pub(super) struct Problems {
    list: Vec<Problem>,
    errors: usize,
    more: usize,
    hidden: Vec<Position>,
    silenced: Vec<Warning>,
}

impl Problems {
    /// Adds an error; `help` says what would be right, unless it is empty.
    pub(super) fn error(&mut self, position: Position, message: impl Into<String>, help: impl Into<String>) {
        self.errors += 1;
        self.add(None, position, message.into(), help.into());
    }

    /// Adds a warning, unless it is silenced.
    pub(super) fn warning(
        &mut self,
        code: Warning,
        position: Position,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        if !self.silenced.contains(&code) {
            self.add(Some(code), position, message.into(), help.into());
        }
    }

    /// Leaves these warnings out.
    pub(super) fn silence(&mut self, codes: &[Warning]) {
        self.silenced.extend_from_slice(codes);
    }

    /// Whether further problems are only counted.
    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= KEPT
    }

    /// Adds an error that is only counted.
    pub(super) fn count(&mut self) {
        self.errors += 1;
        self.more += 1;
    }

    /// Keeps a place of the file out of what is shown.
    pub(super) fn hide(&mut self, position: Position) {
        self.hidden.push(position);
    }

    /// Whether the file can be used.
    pub(super) fn no_errors(&self) -> bool {
        self.errors == 0
    }

    fn add(&mut self, code: Option<Warning>, position: Position, message: String, help: String) {
        let problem = Problem {
            code,
            severity: if code.is_some() { Severity::Warning } else { Severity::Error },
            span: position.start..position.end,
            message,
            help: Some(help).filter(|help| !help.is_empty()),
        };
        if !self.is_full() {
            // What stands in one place of the file may be met several times, through YAML's aliases.
            if !self.list.contains(&problem) {
                self.list.push(problem);
            }
        } else {
            self.more += 1;
        }
    }

    /// The report on a file of that name and text.
    pub(super) fn report(mut self, name: &str, text: &str) -> Report {
        self.list.sort_by_key(|problem| (problem.span.start, problem.severity == Severity::Warning));
        let Problems { list, more, hidden, .. } = self;
        Report { name: name.to_owned(), text: text.into(), problems: list, more, hidden }
    }
}
