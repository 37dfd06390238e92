//! Collects and prints the errors and warnings about a config file: position, message, suggestion.
//!
//! A report shows all problems of a file at once, in file order. It may end up in a terminal or a log, so
//! control characters are replaced, and what may be a password in a URL is replaced by stars.

use std::fmt::{self, Write as _};
use std::ops::Range;
use std::sync::Arc;

use super::excerpt;
use super::warning::Warning;

/// The most problems that are printed.
const SHOWN: usize = 100;
/// The most problems that are stored; further ones are only counted.
const KEPT: usize = 1_000;
/// The longest message, in characters.
const LONGEST: usize = 500;

/// A range of bytes in a file. The default, `0..0`, is the file as a whole.
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

/// Whether a file with a problem can still be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The file is rejected.
    Error,
    /// The file is used, but the problem is probably a mistake.
    Warning,
}

/// An error or a warning about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diagnostic {
    /// The code to look it up and to silence it; only warnings and missing files have one.
    pub code: Option<Warning>,
    /// Whether the file can be used despite the problem.
    pub severity: Severity,
    /// Its position in the file, in bytes.
    pub span: Range<usize>,
    /// What is wrong, such as ``limit `login`: period `1 mn` is not a duration``.
    pub message: String,
    /// How to fix it, such as ``try `1m` ``.
    pub help: Option<String>,
}

/// All errors and warnings about a file. It prints as one paragraph per problem:
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
    problems: Vec<Diagnostic>,
    more: usize,
    hidden: Vec<Position>,
}

impl Report {
    /// The problems, in file order.
    pub fn problems(&self) -> &[Diagnostic] {
        &self.problems
    }

    /// Whether there are no problems.
    pub fn is_empty(&self) -> bool {
        self.problems.is_empty()
    }

    /// The number of errors, including those that are counted but not stored.
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count() + self.more
    }

    /// The number of warnings.
    pub fn warnings(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Warning).count()
    }

    /// The line and column of a problem, both counted from 1; the column counts characters.
    pub fn position(&self, problem: &Diagnostic) -> (usize, usize) {
        excerpt::position(&self.text, problem.span.start)
    }

    /// Adds an error that has a code.
    pub(super) fn add(&mut self, code: Warning, position: Position, message: String, help: String) {
        let span = position.start..position.end;
        let problem =
            Diagnostic { code: Some(code), severity: Severity::Error, span, message, help: Some(help) };
        let at = self.problems.partition_point(|other| other.span.start <= position.start);
        self.problems.insert(at, problem);
    }

    /// As `to_string`, with terminal colours.
    pub fn coloured(&self) -> String {
        let mut text = String::new();
        self.write(&mut text, &COLOURS).expect("writing to a String cannot fail");
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

    fn write_problem(&self, f: &mut dyn fmt::Write, problem: &Diagnostic, colours: &Colours) -> fmt::Result {
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

/// The escape sequences of terminal colours.
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

/// As [`Display`](fmt::Display), which shows no secrets: this is what `main` prints when it returns the error.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Report {}

/// Collects problems while a file is read.
#[derive(Debug, Default)]
pub(super) struct Problems {
    list: Vec<Diagnostic>,
    errors: usize,
    more: usize,
    hidden: Vec<Position>,
    silenced: Vec<Warning>,
}

impl Problems {
    /// Adds an error. `help` says how to fix it, and may be empty.
    pub(super) fn error(&mut self, position: Position, message: impl Into<String>, help: impl Into<String>) {
        self.errors += 1;
        self.add(None, position, message.into(), help.into());
    }

    /// Adds a warning, unless its code is silenced.
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

    /// Drops later warnings with these codes.
    pub(super) fn silence(&mut self, codes: &[Warning]) {
        self.silenced.extend_from_slice(codes);
    }

    /// Whether further problems are counted but not stored.
    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= KEPT
    }

    /// Counts an error without storing it.
    pub(super) fn count(&mut self) {
        self.errors += 1;
        self.more += 1;
    }

    /// Replaces the text at this position by stars wherever the report shows it.
    pub(super) fn hide(&mut self, position: Position) {
        self.hidden.push(position);
    }

    /// Whether no errors have been added.
    pub(super) fn no_errors(&self) -> bool {
        self.errors == 0
    }

    fn add(&mut self, code: Option<Warning>, position: Position, message: String, help: String) {
        let problem = Diagnostic {
            code,
            severity: if code.is_some() { Severity::Warning } else { Severity::Error },
            span: position.start..position.end,
            message,
            help: Some(help).filter(|help| !help.is_empty()),
        };
        if !self.is_full() {
            // Through YAML aliases, the same position may be read several times.
            if !self.list.contains(&problem) {
                self.list.push(problem);
            }
        } else {
            self.more += 1;
        }
    }

    /// The report on the file with this name and text.
    pub(super) fn report(mut self, name: &str, text: &str) -> Report {
        self.list.sort_by_key(|problem| (problem.span.start, problem.severity == Severity::Warning));
        let Problems { list, more, hidden, .. } = self;
        Report { name: name.to_owned(), text: text.into(), problems: list, more, hidden }
    }
}
