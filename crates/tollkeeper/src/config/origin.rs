//! Which file a config was read from: what it takes to see that another version of it has less in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;

use super::document::{Node, Scalar, ScalarKind, Value};
use super::report::Position;
use super::units;

/// The most names in a message.
const NAMED: usize = 5;

/// A version of a config file.
///
/// Its outline is everything that is written in it except for numbers: each key by its path, and each text by its path
/// and a hash of its value (a value may be a secret). A file that is cut off anywhere has a smaller outline than the
/// whole of it; the numbers of the two differ in the last one at most, which is then smaller.
#[derive(Default)]
pub(super) struct Origin {
    /// A hash of the bytes.
    pub(super) digest: u64,
    /// Paths with the values that stand there, if they are texts.
    outline: BTreeMap<String, BTreeSet<u64>>,
    /// The files that it names and `serve` reads.
    pub(super) files: Vec<NamedFile>,
}

/// A file that a config names.
#[derive(Debug)]
pub(super) struct NamedFile {
    pub(super) key: &'static str,
    pub(super) path: PathBuf,
    pub(super) position: Position,
}

impl Origin {
    pub(super) fn new(bytes: &[u8], document: &Node, files: Vec<NamedFile>) -> Origin {
        let mut origin = Origin { digest: digest(bytes), outline: BTreeMap::new(), files };
        origin.add(String::new(), document);
        origin
    }

    /// The paths that this version has and another lacks, or where another has a different text.
    pub(super) fn lost_in(&self, other: &Origin) -> Lost {
        let lost = |(path, values): &(&String, &BTreeSet<u64>)| {
            other.outline.get(*path).is_none_or(|others| !values.is_subset(others))
        };
        let mut paths: Vec<String> = Vec::new();
        for (path, _) in self.outline.iter().filter(lost) {
            // What is inside of something that is gone is gone with it.
            let inside = |outer: &String| path.strip_prefix(outer.as_str()).is_some_and(is_inner);
            if !paths.last().is_some_and(inside) {
                paths.push(path.clone());
            }
        }
        Lost(paths)
    }

    fn add(&mut self, path: String, node: &Node) {
        let values = self.outline.entry(path.clone()).or_default();
        match &node.value {
            Value::Scalar(scalar) if is_number(scalar) => {}
            Value::Scalar(scalar) => drop(values.insert(digest(scalar.text.as_bytes()))),
            Value::Table(entries) => {
                for entry in entries {
                    let dot = if path.is_empty() { "" } else { "." };
                    self.add(format!("{path}{dot}{}", entry.key), &entry.node);
                }
            }
            Value::List(nodes) => {
                for (index, node) in nodes.iter().enumerate() {
                    match (&node.value, name_of(node)) {
                        // Of a list of values it matters which there are, not in which order.
                        (Value::Scalar(scalar), _) => {
                            let values = self.outline.entry(path.clone()).or_default();
                            values.insert(digest(scalar.text.as_bytes()));
                        }
                        (_, Some(name)) => self.add(format!("{path}[{name}]"), node),
                        (_, None) => self.add(format!("{path}[{index}]"), node),
                    }
                }
            }
            Value::Unknown => {}
        }
    }
}

/// Without the outline, which is long.
impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Origin")
    }
}

/// What one version of a file has and another lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost(Vec<String>);

impl Lost {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// As part of a sentence: `` `auth`, `limits[login]` and 3 more ``.
impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, path) in self.0.iter().take(NAMED).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}`{}`", path.escape_debug())?;
        }
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// A hash of bytes, the same in every process.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Whether the rest of a path leads further inside.
fn is_inner(rest: &str) -> bool {
    rest.starts_with(['.', '['])
}

/// What the limits of a list are called.
fn name_of(node: &Node) -> Option<&str> {
    let entry = node.entries().iter().find(|entry| entry.key == "name")?;
    if let Value::Scalar(scalar) = &entry.node.value { Some(&scalar.text) } else { None }
}

/// A count, a rate or a duration. A share is none: cut off, it would be larger.
fn is_number(scalar: &Scalar) -> bool {
    scalar.kind == ScalarKind::Number
        || units::rate(&scalar.text).is_ok()
        || units::duration(&scalar.text).is_ok()
}
