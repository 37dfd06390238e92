//! Parses TOML 1.0 into a document.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::document::{Budget, MAX_DEPTH, MapEntry, Node, ScalarKind, TooLarge, Value};
use super::report::{Position, Problems};

/// Parses a text; reports syntax errors and returns `None`.
pub(super) fn read(text: &str, problems: &mut Problems) -> Option<Node> {
    // In recoverable mode the parser stores every error, which may be too many for a long file.
    const LONG: usize = 256 << 10;
    let (table, errors) = match text.len() {
        0..LONG => DeTable::parse_recoverable(text),
        _ => match DeTable::parse(text) {
            Ok(table) => (table, Vec::new()),
            Err(error) => (Spanned::new(0..0, DeTable::new()), vec![error]),
        },
    };
    let mut readable = true;
    for error in &errors {
        let position = error.span().map_or(Position::default(), |span| Position::new(span.start, span.end));
        // Reading continues after a duplicate key. After another error, the rest may not be parsed correctly.
        if error.message() == "duplicate key" {
            let key = text.get(position.start..position.end).unwrap_or_default();
            problems.error(position, format!("duplicate key `{}`", key.escape_debug()), "keep one");
            continue;
        }
        match error.message() {
            message if message.contains("recurs") => TooLarge::DEPTH.report(position, problems),
            message => problems.error(position, message, help(message)),
        }
        readable = false;
        break;
    }
    if !readable {
        return None;
    }
    let end = text.len();
    let mut budget = Budget::default();
    match node(Position::new(0, end), DeValue::Table(table.into_inner()), 0, &mut budget) {
        Ok(node) => Some(node),
        Err((position, large)) => {
            large.report(position, problems);
            None
        }
    }
}

/// A suggestion, where the message of the parser has none.
fn help(message: &str) -> &'static str {
    match message {
        _ if message.starts_with("string values must be quoted") => {
            "rates and durations too: `rate = \"100/min\"`"
        }
        _ if message.starts_with("key with no value") => "TOML writes `key = value`",
        _ => "",
    }
}

fn node(
    position: Position,
    value: DeValue<'_>,
    depth: usize,
    budget: &mut Budget,
) -> Result<Node, (Position, TooLarge)> {
    let at = |large| (position, large);
    let inner = |spanned: Spanned<DeValue<'_>>, budget: &mut Budget| {
        let span = spanned.span();
        node(Position::new(span.start, span.end), spanned.into_inner(), depth + 1, budget)
    };
    let (text, kind) = match value {
        DeValue::String(text) => (text.into_owned(), ScalarKind::Text),
        DeValue::Integer(number) => (number.to_string(), ScalarKind::Number),
        DeValue::Float(number) => (number.to_string(), ScalarKind::Number),
        DeValue::Boolean(flag) => (flag.to_string(), ScalarKind::Bool),
        DeValue::Datetime(time) => (time.to_string(), ScalarKind::Text),
        DeValue::Array(values) => {
            budget.take(0).map_err(at)?;
            if depth >= MAX_DEPTH {
                return Err(at(TooLarge::DEPTH));
            }
            let nodes = values.into_iter().map(|value| inner(value, budget)).collect::<Result<_, _>>()?;
            return Ok(Node { position, value: Value::List(nodes) });
        }
        DeValue::Table(table) => {
            budget.take(0).map_err(at)?;
            if depth >= MAX_DEPTH {
                return Err(at(TooLarge::DEPTH));
            }
            let mut entries = Vec::new();
            for (key, value) in table {
                let span = key.span();
                let position = Position::new(span.start, span.end);
                let key = key.into_inner().into_owned();
                budget.take(key.len()).map_err(|large| (position, large))?;
                entries.push(MapEntry { key, position, node: inner(value, budget)? });
            }
            // The parser sorts entries by name; restore the file order.
            entries.sort_by_key(|entry| entry.position.start);
            return Ok(Node { position, value: Value::Table(entries) });
        }
    };
    budget.take(text.len()).map_err(at)?;
    Ok(Node::scalar(position, text, kind))
}
