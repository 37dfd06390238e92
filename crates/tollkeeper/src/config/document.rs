//! What was written, whatever the format: a tree of values, each with its place in the text.
//!
//! Nothing is judged here. Keys that stand twice are kept twice, in their order, so that whoever knows
//! what they mean can point at them. A tree is bounded in size and depth however it was written.

use super::report::{Position, Problems};

/// The largest file, in bytes.
pub(super) const MAX_BYTES: usize = 4 << 20;
/// The most values in a file, those included that YAML's aliases repeat.
pub(super) const MAX_NODES: usize = 500_000;
/// The most bytes of text in values, those included that aliases repeat and variables bring in.
pub(super) const MAX_TEXT: usize = 2 * MAX_BYTES;
/// How deep lists and tables may be nested.
pub(super) const MAX_DEPTH: usize = 32;

/// A value and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) position: Position,
    pub(super) value: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Scalar(Scalar),
    List(Vec<Node>),
    Table(Vec<Entry>),
    /// Something that was reported already.
    Unknown,
}

/// A value that is not made of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scalar {
    /// The text without quotes, escapes resolved.
    pub(super) text: String,
    pub(super) kind: ScalarKind,
    /// As it stands in the file, if variables of the environment were put in: what may be shown.
    pub(super) unexpanded: Option<String>,
}

/// What the format says a scalar is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScalarKind {
    Text,
    Number,
    Bool,
    Null,
}

/// A key of a table with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) position: Position,
    pub(super) node: Node,
}

impl Node {
    pub(super) fn scalar(position: Position, text: impl Into<String>, kind: ScalarKind) -> Node {
        Node { position, value: Value::Scalar(Scalar { text: text.into(), kind, unexpanded: None }) }
    }

    /// The entries of a table; none of anything else.
    pub(super) fn entries(&self) -> &[Entry] {
        if let Value::Table(entries) = &self.value { entries } else { &[] }
    }

    /// Whether there is nothing in it.
    pub(super) fn is_empty(&self) -> bool {
        match &self.value {
            Value::Table(entries) => entries.is_empty(),
            Value::Scalar(scalar) => scalar.kind == ScalarKind::Null,
            Value::List(_) | Value::Unknown => false,
        }
    }
}

impl Scalar {
    /// What may be shown of it: never what came from the environment.
    pub(super) fn shown(&self) -> &str {
        self.unexpanded.as_deref().unwrap_or(&self.text)
    }
}

/// Counts the values of a tree while it grows, and stops it.
#[derive(Debug, Default)]
pub(super) struct Budget {
    nodes: usize,
    text: usize,
}

/// A tree that must not grow any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge(&'static str);

impl Budget {
    /// Takes one value with so many bytes of text.
    pub(super) fn take(&mut self, text: usize) -> Result<(), TooLarge> {
        self.take_all(1, text)
    }

    /// Takes so many values with so many bytes of text.
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
    /// For a tree that is nested too deeply.
    pub(super) const DEPTH: TooLarge = TooLarge("is nested more than 32 deep");

    /// Says so, at the place where it became too much.
    pub(super) fn report(self, position: Position, problems: &mut Problems) {
        let TooLarge(what) = self;
        problems.error(
            position,
            format!("the file {what}"),
            "no config needs that: look for repeated aliases or brackets",
        );
    }
}
