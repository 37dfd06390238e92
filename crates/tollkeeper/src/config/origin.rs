//! A fingerprint of a config file, which detects that another version of the file lacks parts of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;

use super::document::{Node, Scalar, ScalarKind, Value};
use super::report::Position;
use super::units;

/// The most paths that a message lists.
const NAMED: usize = 5;

/// A version of a config file.
///
/// Its outline holds everything in the file except numbers: the path of each key, and for each string its path and a
/// hash of its value (a value may be a secret). A truncated file has a smaller outline than the complete one. At most
/// its last number differs, and is then smaller.
#[derive(Default)]
pub(super) struct Origin {
    /// A hash of the bytes of the file.
    pub(super) digest: u64,
    /// The paths of all keys, each with the hashes of its string values.
    outline: BTreeMap<String, BTreeSet<u64>>,
    /// The files that the config names and `tollkeeper serve` reads.
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

    /// The paths that this version has and `other` lacks, or where `other` has a different string.
    pub(super) fn lost_in(&self, other: &Origin) -> Lost {
        let lost = |(path, values): &(&String, &BTreeSet<u64>)| {
            other.outline.get(*path).is_none_or(|others| !values.is_subset(others))
        };
        let mut paths: Vec<String> = Vec::new();
        for (path, _) in self.outline.iter().filter(lost) {
            // If a path is lost, do not list the paths inside it.
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
                        // The order of the values in a list does not matter.
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

/// Omits the outline, which is long.
impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Origin")
    }
}

/// The paths that one version of a file has and another lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost(Vec<String>);

impl Lost {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Prints a part of a sentence: `` `auth`, `limits[login]` and 3 more ``.
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

/// A hash of bytes that is the same in every process.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Whether the rest of a path continues with a nested key or element.
fn is_inner(rest: &str) -> bool {
    rest.starts_with(['.', '['])
}

/// The `name` of an element of `limits`.
fn name_of(node: &Node) -> Option<&str> {
    let entry = node.entries().iter().find(|entry| entry.key == "name")?;
    if let Value::Scalar(scalar) = &entry.node.value { Some(&scalar.text) } else { None }
}

/// Whether a scalar is a count, a rate or a duration. A share is not: truncated, `1/30` would become larger.
fn is_number(scalar: &Scalar) -> bool {
    scalar.kind == ScalarKind::Number
        || units::rate(&scalar.text).is_ok()
        || units::duration(&scalar.text).is_ok()
}
