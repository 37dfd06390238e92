//! Parses YAML 1.2 into a document: one document per file, with anchors, aliases and merge keys.
//!
//! Each alias makes a copy that counts against the [`Budget`], so that a file of a kilobyte cannot become a gigabyte.
//! Tags are rejected, because the key alone determines the type of a value.

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError, Span};

use super::document::{Budget, MAX_DEPTH, MapEntry, Node, ScalarKind, TooLarge, Value};
use super::excerpt::quoted;
use super::report::{Position, Problems};

/// Parses a text; reports a syntax error and returns `None`. The result is also `None` for an empty file.
pub(super) fn read(text: &str, problems: &mut Problems) -> Option<Node> {
    let options = granit_parser::options! {
        emit_comments: false,
        emit_unresolved_aliases: true,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    let mut builder = Builder {
        text,
        problems,
        open: Vec::new(),
        anchors: HashMap::new(),
        budget: Budget::default(),
        root: None,
        documents: 0,
    };
    for event in Parser::new_from_str_with_options(text, options) {
        let step = match event {
            Ok((event, span)) => builder.take(event, position(&span, text)),
            Err(error) => {
                let (position, message, help) = syntax(&error, text);
                match error.kind() {
                    ErrorKind::RecursionLimitExceeded => Err((position, TooLarge::DEPTH)),
                    _ => {
                        builder.problems.error(position, message, help);
                        return None;
                    }
                }
            }
        };
        if let Err((position, large)) = step {
            large.report(position, builder.problems);
            return None;
        }
    }
    builder.root
}

struct Builder<'t, 'p> {
    text: &'t str,
    problems: &'p mut Problems,
    /// The lists and tables that have begun but not ended.
    open: Vec<Open>,
    anchors: HashMap<usize, Anchored>,
    budget: Budget,
    root: Option<Node>,
    documents: usize,
}

/// A list or a table that is being parsed.
struct Open {
    start: usize,
    anchor: usize,
    /// The nesting depth of its deepest value.
    height: usize,
    inside: Inside,
}

enum Inside {
    List(Vec<Node>),
    Table { entries: Vec<MapEntry>, key: Option<Key>, merges: Vec<Node> },
}

/// A key whose value comes next.
enum Key {
    Named(String, Position),
    /// `<<`.
    Merge,
    /// Not a valid key, which has been reported.
    Invalid,
}

/// The value of an anchor, with the size of a copy of it.
struct Anchored {
    node: Node,
    nodes: usize,
    text: usize,
    height: usize,
}

type Step = Result<(), (Position, TooLarge)>;

impl Builder<'_, '_> {
    fn take(&mut self, event: Event<'_>, position: Position) -> Step {
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents == 2 {
                    let help = "a config is one document: remove the `---`";
                    self.problems.error(position, "a second document begins here", help);
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse_tag(tag.is_some(), position);
                self.budget.take(text.len()).map_err(|large| (position, large))?;
                let kind = if style == ScalarStyle::Plain { plain_kind(&text) } else { ScalarKind::Text };
                let merge = style == ScalarStyle::Plain && text == "<<";
                self.put(Node::scalar(position, text.into_owned(), kind), anchor, 0, merge)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse_tag(tag.is_some(), position);
                self.begin(position, anchor, Inside::List(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse_tag(tag.is_some(), position);
                self.begin(
                    position,
                    anchor,
                    Inside::Table { entries: Vec::new(), key: None, merges: Vec::new() },
                )
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(position),
            Event::Alias(anchor) => self.repeat(anchor, position),
            Event::UnresolvedAlias(name) => {
                let message = format!("there is no anchor {} above this alias", quoted(&format!("&{name}")));
                self.problems.error(position, message, "a value that begins with `*` must be in quotes");
                self.put(Node { position, value: Value::Unknown }, 0, 0, false)
            }
            _ => Ok(()),
        }
    }

    fn refuse_tag(&mut self, tagged: bool, position: Position) {
        if tagged {
            self.problems.error(
                position,
                "this value has a tag",
                "remove the word with `!`, or put it in quotes",
            );
        }
    }

    fn begin(&mut self, position: Position, anchor: usize, inside: Inside) -> Step {
        self.budget.take(0).map_err(|large| (position, large))?;
        self.open.push(Open { start: position.start, anchor, height: 0, inside });
        Ok(())
    }

    fn end(&mut self, position: Position) -> Step {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let value = match open.inside {
            Inside::List(nodes) => Value::List(nodes),
            Inside::Table { mut entries, merges, .. } => {
                self.merge(&mut entries, merges);
                Value::Table(entries)
            }
        };
        // The parser ends a block at the next line; the underline must not extend that far.
        let block = self.text.get(open.start..position.end).unwrap_or_default();
        let end = open.start + block.trim_end().len();
        self.put(
            Node { position: Position::new(open.start, end), value },
            open.anchor,
            open.height + 1,
            false,
        )
    }

    /// Adds a complete value to the innermost open list or table.
    fn put(&mut self, node: Node, anchor: usize, height: usize, merge: bool) -> Step {
        if anchor != 0 {
            let (nodes, text) = size(&node);
            self.budget.take_all(nodes, text).map_err(|large| (node.position, large))?;
            self.anchors.insert(anchor, Anchored { node: node.clone(), nodes, text, height });
        }
        let Some(open) = self.open.last_mut() else {
            // A second document was reported when it began.
            self.root.get_or_insert(node);
            return Ok(());
        };
        open.height = open.height.max(height);
        match &mut open.inside {
            Inside::List(nodes) => nodes.push(node),
            Inside::Table { entries, key, merges } => match key.take() {
                None => {
                    *key = Some(match node.value {
                        Value::Scalar(_) if merge => Key::Merge,
                        Value::Scalar(scalar) => Key::Named(scalar.text, node.position),
                        _ => {
                            let help = "put it in quotes if it begins with a bracket";
                            self.problems.error(node.position, "a key must be a string", help);
                            Key::Invalid
                        }
                    });
                }
                Some(Key::Named(key, position)) => entries.push(MapEntry { key, position, node }),
                Some(Key::Merge) => merges.push(node),
                Some(Key::Invalid) => {}
            },
        }
        Ok(())
    }

    /// Adds a copy of the value of an anchor.
    fn repeat(&mut self, anchor: usize, position: Position) -> Step {
        let Some(anchored) = self.anchors.get(&anchor) else {
            self.problems.error(
                position,
                "this alias is inside the value that it refers to",
                "an anchored value must end before its aliases",
            );
            return self.put(Node { position, value: Value::Unknown }, 0, 0, false);
        };
        self.budget.take_all(anchored.nodes, anchored.text).map_err(|large| (position, large))?;
        if self.open.len() + anchored.height > MAX_DEPTH {
            return Err((position, TooLarge::DEPTH));
        }
        let (node, height) = (anchored.node.clone(), anchored.height);
        self.put(node, 0, height, false)
    }

    /// Adds the entries of the tables that `<<` names. Keys of the table itself take precedence, then earlier merges.
    fn merge(&mut self, entries: &mut Vec<MapEntry>, merges: Vec<Node>) {
        for node in merges {
            let position = node.position;
            let tables = match node.value {
                Value::List(nodes) => nodes,
                _ => vec![node],
            };
            for table in tables {
                let Value::Table(merged) = table.value else {
                    self.problems.error(
                        position,
                        "`<<` can merge only tables",
                        "write `<<: *name`, where `&name` marks a table",
                    );
                    continue;
                };
                let known: std::collections::HashSet<String> =
                    entries.iter().map(|entry| entry.key.clone()).collect();
                entries.extend(merged.into_iter().filter(|entry| !known.contains(&entry.key)));
            }
        }
    }
}

/// The number of values of a tree, and its bytes of text.
fn size(node: &Node) -> (usize, usize) {
    match &node.value {
        Value::Scalar(scalar) => (1, scalar.text.len()),
        Value::Unknown => (1, 0),
        Value::List(nodes) => nodes.iter().map(size).fold((1, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)),
        Value::Table(entries) => entries.iter().fold((1, 0), |sum, entry| {
            let one = size(&entry.node);
            (sum.0 + one.0 + 1, sum.1 + one.1 + entry.key.len())
        }),
    }
}

/// The type of a scalar without quotes in the core schema of YAML 1.2, in which `yes`, `no`, `on` and `off` are
/// strings.
fn plain_kind(text: &str) -> ScalarKind {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => ScalarKind::Null,
        "true" | "True" | "TRUE" | "false" | "False" | "FALSE" => ScalarKind::Bool,
        _ if is_number(text) => ScalarKind::Number,
        _ => ScalarKind::Text,
    }
}

fn is_number(text: &str) -> bool {
    let digits = |text: &str, test: fn(&u8) -> bool| !text.is_empty() && text.as_bytes().iter().all(test);
    if let Some(rest) = text.strip_prefix("0x") {
        return digits(rest, u8::is_ascii_hexdigit);
    }
    if let Some(rest) = text.strip_prefix("0o") {
        return digits(rest, |byte| (b'0'..=b'7').contains(byte));
    }
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") || matches!(text, ".nan" | ".NaN" | ".NAN") {
        return true;
    }
    let begins = unsigned.starts_with(|char: char| char.is_ascii_digit() || char == '.');
    begins && unsigned.parse::<f64>().is_ok()
}

fn position(span: &Span, text: &str) -> Position {
    let range = span.byte_range().unwrap_or(0..0);
    Position::new(range.start.min(text.len()), range.end.min(text.len()))
}

/// The position, message and help for a syntax error.
fn syntax(error: &ScanError, text: &str) -> (Position, String, &'static str) {
    let at = text.floor_char_boundary(error.marker().byte_offset().unwrap_or(0).min(text.len()));
    let length = text[at..].chars().next().filter(|char| *char != '\n').map_or(0, char::len_utf8);
    let position = Position::new(at, at + length);
    let (message, help) = match error.kind() {
        ErrorKind::TabInBlockIndentation | ErrorKind::TabInIndentation | ErrorKind::TabNotAllowed => {
            ("a tab where only spaces are allowed", "indent with spaces")
        }
        ErrorKind::MappingValueNotAllowed | ErrorKind::MappingKeyNotAllowed => {
            ("a key is not expected here", "check the indentation; a value with `: ` in it must be in quotes")
        }
        ErrorKind::ExpectedBlockMappingKey | ErrorKind::SimpleKeyExpected | ErrorKind::InvalidSimpleKey => {
            ("expected a key followed by `:`", "check the indentation, and write `key: value`")
        }
        ErrorKind::InvalidIndentation
        | ErrorKind::InvalidFlowScalarIndent
        | ErrorKind::ExpectedBlockSequenceEntry
        | ErrorKind::BlockSequenceEntryNotAllowed => (
            "this line is not indented as its neighbours are",
            "the keys of one table begin in the same column",
        ),
        ErrorKind::InvalidQuotedScalarIndent => {
            ("a quoted string that began above continues here", "close the quote")
        }
        ErrorKind::InvalidColonPlacement => {
            ("a key is not expected here", "is a `[` or a `{` above still open?")
        }
        ErrorKind::MissingAnchorOrAliasName => {
            ("`*` and `&` begin an alias or an anchor", "put a pattern in quotes: `\"*\"`")
        }
        ErrorKind::UnclosedQuotedScalar => ("the string that begins here is not closed", "close the quote"),
        ErrorKind::UnclosedFlowCollection { open: '[' }
        | ErrorKind::ExpectedFlowSequenceSeparator
        | ErrorKind::UnexpectedEofFlowSequence => {
            ("this list is not closed", "separate its values by `,` and end it with `]`")
        }
        ErrorKind::UnclosedFlowCollection { .. }
        | ErrorKind::ExpectedFlowMappingSeparator
        | ErrorKind::UnexpectedEofFlowMapping => {
            ("this table is not closed", "separate its keys by `,` and end it with `}`")
        }
        ErrorKind::UnexpectedCharacter { .. } => {
            return (
                position,
                format!("{} may not begin a value", quoted(&text[at..at + length])),
                "put the value in quotes",
            );
        }
        ErrorKind::UnknownQuotedScalarEscape => {
            ("this is not an escape sequence", "write `\\\\` for a backslash, or use single quotes")
        }
        kind => return (position, kind.to_string(), ""),
    };
    (position, message.to_owned(), help)
}
