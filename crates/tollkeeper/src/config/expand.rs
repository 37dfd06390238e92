//! `${VAR}` and `${VAR:-default}` in values, from an environment that is passed in.
//!
//! What comes out of the environment may be a secret, so a value remembers how it was written, and only
//! that is ever shown.

use super::document::{MAX_TEXT, Node, Value};
use super::excerpt::quoted;
use super::report::Problems;

/// The environment: the value of a variable, if it is set.
pub(super) type Environment<'e> = &'e dyn Fn(&str) -> Option<String>;

/// Puts variables into every value of a tree.
pub(super) fn expand(node: &mut Node, environment: Environment<'_>, problems: &mut Problems) {
    let mut room = MAX_TEXT;
    walk(node, environment, &mut room, problems);
}

fn walk(node: &mut Node, environment: Environment<'_>, room: &mut usize, problems: &mut Problems) {
    match &mut node.value {
        Value::List(nodes) => nodes.iter_mut().for_each(|node| walk(node, environment, room, problems)),
        Value::Table(entries) => {
            entries.iter_mut().for_each(|entry| walk(&mut entry.node, environment, room, problems));
        }
        Value::Scalar(scalar) => {
            if !scalar.text.contains("${") {
                return;
            }
            match expanded(&scalar.text, environment, room) {
                Ok(text) => scalar.before = Some(std::mem::replace(&mut scalar.text, text)),
                Err(wrong) => {
                    let (message, help) = wrong.said();
                    problems.error(node.place, message, help);
                    // It has been reported; whoever reads on must not report what it would have been.
                    node.value = Value::Unknown;
                }
            }
        }
        Value::Unknown => {}
    }
}

enum Wrong {
    Open(String),
    Name(String),
    Unset(String),
    TooLong,
}

impl Wrong {
    fn said(self) -> (String, String) {
        match self {
            Wrong::Open(text) => {
                (format!("{} has no `}}`", quoted(&text)), "write `${NAME}` or `${NAME:-default}`".to_owned())
            }
            Wrong::Name(name) => (
                format!("{} is not the name of a variable", quoted(&name)),
                "letters, digits and `_`, as in `${NAME}` or `${NAME:-default}`".to_owned(),
            ),
            Wrong::Unset(name) => (
                format!("the environment variable `{name}` is not set"),
                format!("set it, or give a default: `${{{name}:-default}}`"),
            ),
            Wrong::TooLong => {
                ("the environment variables of this file hold more than 8 MiB".to_owned(), String::new())
            }
        }
    }
}

fn expanded(text: &str, environment: Environment<'_>, room: &mut usize) -> Result<String, Wrong> {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((inside, behind)) = after.split_once('}') else {
            return Err(Wrong::Open(format!("${{{after}")));
        };
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if name.is_empty() || !is_name || name.as_bytes()[0].is_ascii_digit() {
            return Err(Wrong::Name(name.to_owned()));
        }
        // As in a shell, `:-` stands in for what is empty, too.
        let value = environment(name).filter(|value| default.is_none() || !value.is_empty());
        let value = value.or_else(|| default.map(str::to_owned));
        let value = value.ok_or_else(|| Wrong::Unset(name.to_owned()))?;
        *room = room.checked_sub(before.len() + value.len()).ok_or(Wrong::TooLong)?;
        done.push_str(before);
        done.push_str(&value);
        rest = behind;
    }
    done.push_str(rest);
    Ok(done)
}
