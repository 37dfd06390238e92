//! Expands `${VAR}` and `${VAR:-default}` in values, with variables from an environment that is passed in.
//!
//! A variable may hold a secret. So an expanded value keeps its unexpanded text, and messages show only that.

use super::document::{MAX_TEXT, Node, Value};
use super::excerpt::quoted;
use super::report::Problems;

/// The environment: the value of a variable, if it is set.
pub(super) type Environment<'e> = &'e dyn Fn(&str) -> Option<String>;

/// Expands the variables in every value of a tree.
pub(super) fn expand(node: &mut Node, environment: Environment<'_>, problems: &mut Problems) {
    let mut remaining = MAX_TEXT;
    walk(node, environment, &mut remaining, problems);
}

fn walk(node: &mut Node, environment: Environment<'_>, remaining: &mut usize, problems: &mut Problems) {
    match &mut node.value {
        Value::List(nodes) => nodes.iter_mut().for_each(|node| walk(node, environment, remaining, problems)),
        Value::Table(entries) => {
            entries.iter_mut().for_each(|entry| walk(&mut entry.node, environment, remaining, problems));
        }
        Value::Scalar(scalar) => {
            if !scalar.text.contains("${") {
                return;
            }
            match expanded(&scalar.text, environment, remaining) {
                Ok(text) => scalar.unexpanded = Some(std::mem::replace(&mut scalar.text, text)),
                Err(error) => {
                    let (message, help) = error.message_and_help();
                    problems.error(node.position, message, help);
                    // Later checks skip `Unknown`, so that the value is not reported twice.
                    node.value = Value::Unknown;
                }
            }
        }
        Value::Unknown => {}
    }
}

enum ExpandError {
    Open(String),
    Name(String),
    Unset(String),
    TooLong,
}

impl ExpandError {
    fn message_and_help(self) -> (String, String) {
        match self {
            ExpandError::Open(text) => {
                (format!("{} has no `}}`", quoted(&text)), "write `${NAME}` or `${NAME:-default}`".to_owned())
            }
            ExpandError::Name(name) => (
                format!("{} is not the name of a variable", quoted(&name)),
                "letters, digits and `_`, as in `${NAME}` or `${NAME:-default}`".to_owned(),
            ),
            ExpandError::Unset(name) => (
                format!("the environment variable `{name}` is not set"),
                format!("set it, or give a default: `${{{name}:-default}}`"),
            ),
            ExpandError::TooLong => {
                ("the environment variables of this file hold more than 8 MiB".to_owned(), String::new())
            }
        }
    }
}

fn expanded(text: &str, environment: Environment<'_>, remaining: &mut usize) -> Result<String, ExpandError> {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((inside, behind)) = after.split_once('}') else {
            return Err(ExpandError::Open(format!("${{{after}")));
        };
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if name.is_empty() || !is_name || name.as_bytes()[0].is_ascii_digit() {
            return Err(ExpandError::Name(name.to_owned()));
        }
        // As in a shell, the default of `:-` also replaces an empty value.
        let value = environment(name).filter(|value| default.is_none() || !value.is_empty());
        let value = value.or_else(|| default.map(str::to_owned));
        let value = value.ok_or_else(|| ExpandError::Unset(name.to_owned()))?;
        *remaining = remaining.checked_sub(before.len() + value.len()).ok_or(ExpandError::TooLong)?;
        done.push_str(before);
        done.push_str(&value);
        rest = behind;
    }
    done.push_str(rest);
    Ok(done)
}
