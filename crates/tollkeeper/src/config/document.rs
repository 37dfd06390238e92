//! The parsed file as a tree of values with their positions, the same for YAML, TOML and JSON.
//!
//! The tree is not validated here. Duplicate keys are kept in file order, so that the reader can report their
//! positions. The size and depth of a tree are bounded in every format.

use super::report::{Position, Problems};

/// The largest file, in bytes.
pub(super) const MAX_BYTES: usize = 4 << 20;
/// The most values in a file, including the copies that YAML aliases make.
pub(super) const MAX_NODES: usize = 500_000;
/// The most bytes of text in values, including copies made by aliases and the values of variables.
pub(super) const MAX_TEXT: usize = 2 * MAX_BYTES;
/// How deep lists and tables may be nested.
pub(super) const MAX_DEPTH: usize = 32;

/// A value and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) position: Position,
    pub(super) value: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Scalar(Scalar),
    List(Vec<Node>),
    Table(Vec<MapEntry>),
    /// An invalid value that has already been reported.
    Unknown,
}

/// A string, a number, a boolean or null.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scalar {
    /// The text without quotes, with escapes and variables resolved.
    pub(super) text: String,
    pub(super) kind: ScalarKind,
    /// The text in the file, such as `${RATE}/s`, if environment variables were expanded: only this is shown.
    pub(super) unexpanded: Option<String>,
}

/// The type that the format gives a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScalarKind {
    Text,
    Number,
    Bool,
    Null,
}

/// A key of a table with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MapEntry {
    pub(super) key: String,
    pub(super) position: Position,
    pub(super) node: Node,
}

impl Node {
    pub(super) fn scalar(position: Position, text: impl Into<String>, kind: ScalarKind) -> Node {
        Node { position, value: Value::Scalar(Scalar { text: text.into(), kind, unexpanded: None }) }
    }

    /// The entries of a table; empty for other values.
    pub(super) fn entries(&self) -> &[MapEntry] {
        if let Value::Table(entries) = &self.value { entries } else { &[] }
    }

    /// Whether this is an empty table or null.
    pub(super) fn is_empty(&self) -> bool {
        match &self.value {
            Value::Table(entries) => entries.is_empty(),
            Value::Scalar(scalar) => scalar.kind == ScalarKind::Null,
            Value::List(_) | Value::Unknown => false,
        }
    }
}

impl Scalar {
    /// The text that messages may show: never the value of an environment variable.
    pub(super) fn shown(&self) -> &str {
        self.unexpanded.as_deref().unwrap_or(&self.text)
    }
}

/// Counts the values and bytes of a tree while it is built, against the limits of this module.
#[derive(Debug, Default)]
pub(super) struct Budget {
    nodes: usize,
    text: usize,
}

/// The tree exceeds a limit; the text completes the sentence "the file …".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge(&'static str);

impl Budget {
    /// Counts one value with `text` bytes of text.
    pub(super) fn take(&mut self, text: usize) -> Result<(), TooLarge> {
        self.take_all(1, text)
    }

    /// Counts `nodes` values with `text` bytes of text in total.
    pub(super) fn take_all(&mut self, nodes: usize, text: usize) -> Result<(), TooLarge> {
        self.nodes = self.nodes.saturating_add(nodes);
        self.text = self.text.saturating_add(text);
        match () {
            () if self.nodes > MAX_NODES => Err(TooLarge("has more than 500000 values")),
            () if self.text > MAX_TEXT => Err(TooLarge("has more than 8 MiB of text in its values")),
            () => Ok(()),
        }
    }
}

impl TooLarge {
    /// The tree is nested deeper than [`MAX_DEPTH`].
    pub(super) const DEPTH: TooLarge = TooLarge("is nested more than 32 deep");

    /// Reports the error at the position where the limit was exceeded.
    pub(super) fn report(self, position: Position, problems: &mut Problems) {
        let TooLarge(what) = self;
        problems.error(
            position,
            format!("the file {what}"),
            "no config needs that: look for repeated aliases or brackets",
        );
    }
}
