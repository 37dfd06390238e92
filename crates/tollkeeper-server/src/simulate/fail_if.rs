//! The conditions of `--fail-if`: `refused>1%`, `refused(login)>10`, `refused_keys(per-ip)>=5%`, `late>0.1%`.

use std::fmt;

use super::tally::LimitResult;
use super::world::WorldResult;

/// A condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// As it was written.
    pub text: String,
    /// What is compared.
    pub figure: Figure,
    or_equal: bool,
    bound: f64,
    is_percentage: bool,
}

/// A number of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Refused requests, of all requests.
    Refused,
    /// Refusals of a limit, of what it was asked.
    RefusedBy(String),
    /// Keys that a limit refused, of its keys.
    RefusedKeys(String),
    /// Lines that came too late, of all used lines.
    Late,
}

/// A text that is not a condition.
#[derive(Clone, PartialEq, Eq)]
pub struct InvalidCondition {
    text: String,
    /// Where it is wrong, in characters.
    at: usize,
    message: &'static str,
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for InvalidCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InvalidCondition { text, at, message } = self;
        write!(f, "{message}\n  {text}\n  {:>width$}", "^", width = at + 1)
    }
}

impl std::error::Error for InvalidCondition {}

/// What a condition found.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The condition as it was written.
    pub expr: String,
    /// The number: a percentage from 0 to 100 if the condition has one, else a count.
    pub value: f64,
    /// Whether it holds.
    pub held: bool,
}

impl std::str::FromStr for Condition {
    type Err = InvalidCondition;

    fn from_str(text: &str) -> Result<Condition, InvalidCondition> {
        let mut scan = Scan { text, at: 0 };
        let name = scan.take(|c| c.is_ascii_alphabetic() || c == '_');
        let limit = scan.limit()?;
        let figure = match (name, limit) {
            ("refused", None) => Figure::Refused,
            ("refused", Some(limit)) => Figure::RefusedBy(limit),
            ("refused_keys", Some(limit)) => Figure::RefusedKeys(limit),
            ("refused_keys", None) => return Err(scan.error("expected `(` and the name of a limit")),
            ("late", None) => Figure::Late,
            ("late", Some(_)) => return Err(Scan { text, at: 4 }.error("`late` has no limit")),
            _ => {
                let message = "expected `refused`, `refused(LIMIT)`, `refused_keys(LIMIT)` or `late`";
                return Err(Scan { text, at: 0 }.error(message));
            }
        };
        scan.spaces();
        if !scan.eat('>') {
            return Err(scan.error("expected `>` or `>=`"));
        }
        let or_equal = scan.eat('=');
        scan.spaces();
        let start = scan.at;
        let number = scan.take(|c| c.is_ascii_digit() || c == '.');
        let Ok(bound) = number.parse::<f64>() else {
            return Err(Scan { text, at: start }.error("expected a number, such as `10` or `0.5%`"));
        };
        let is_percentage = scan.eat('%');
        scan.spaces();
        if scan.at < text.len() {
            return Err(scan.error("expected the end"));
        }
        Ok(Condition { text: text.to_owned(), figure, or_equal, bound, is_percentage })
    }
}

struct Scan<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Scan<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn take(&mut self, test: impl Fn(char) -> bool) -> &'t str {
        let rest = self.rest();
        let length = rest.find(|c| !test(c)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn eat(&mut self, char: char) -> bool {
        let found = self.rest().starts_with(char);
        self.at += if found { char.len_utf8() } else { 0 };
        found
    }

    fn spaces(&mut self) {
        self.take(char::is_whitespace);
    }

    fn limit(&mut self) -> Result<Option<String>, InvalidCondition> {
        if !self.eat('(') {
            return Ok(None);
        }
        let name = self.take(|c| c != ')').trim().to_owned();
        if name.is_empty() {
            return Err(self.error("expected the name of a limit"));
        }
        if self.eat(')') { Ok(Some(name)) } else { Err(self.error("expected `)`")) }
    }

    fn error(&self, message: &'static str) -> InvalidCondition {
        let at = self.text[..self.at].chars().count();
        InvalidCondition { text: self.text.escape_debug().to_string(), at, message }
    }
}

impl Condition {
    /// The limit that it names, if it names one.
    pub fn limit(&self) -> Option<&str> {
        match &self.figure {
            Figure::RefusedBy(name) | Figure::RefusedKeys(name) => Some(name),
            Figure::Refused | Figure::Late => None,
        }
    }

    /// Compares the figure of a result. The limit must be one of the result.
    pub fn check(&self, result: &WorldResult, late: u64, used: u64) -> Checked {
        let limit = |name: &str| result.limits.iter().find(|limit| limit.name == name);
        let of = |read: fn(&LimitResult) -> (u64, u64), name: &str| limit(name).map_or((0, 0), read);
        let (count, total) = match &self.figure {
            Figure::Refused => (result.requests.refused, result.requests.total()),
            Figure::RefusedBy(name) => of(|limit| (limit.refused, limit.asked), name),
            Figure::RefusedKeys(name) => of(|limit| (limit.refused_keys.count, limit.keys.count), name),
            Figure::Late => (late, used),
        };
        let value = match (self.is_percentage, total) {
            (true, 0) => 0.0,
            (true, total) => 100.0 * count as f64 / total as f64,
            (false, _) => count as f64,
        };
        let held = if self.or_equal { value >= self.bound } else { value > self.bound };
        Checked { expr: self.text.clone(), value, held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_parsed() {
        let parsed = |text: &str| {
            let condition: Condition = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            (condition.figure, condition.or_equal, condition.bound, condition.is_percentage)
        };
        assert_eq!(parsed("refused>1%"), (Figure::Refused, false, 1.0, true));
        assert_eq!(parsed("refused(login) > 10"), (Figure::RefusedBy("login".into()), false, 10.0, false));
        assert_eq!(
            parsed("refused_keys(per-ip)>=5%"),
            (Figure::RefusedKeys("per-ip".into()), true, 5.0, true)
        );
        assert_eq!(parsed("late>0.1%"), (Figure::Late, false, 0.1, true));
    }

    #[test]
    fn errors_point_at_the_place() {
        for (text, expected) in [
            (
                "refuse>1",
                "expected `refused`, `refused(LIMIT)`, `refused_keys(LIMIT)` or `late`\n  refuse>1\n  ^",
            ),
            ("refused<1", "expected `>` or `>=`\n  refused<1\n         ^"),
            ("refused>", "expected a number, such as `10` or `0.5%`\n  refused>\n          ^"),
            ("refused>1x", "expected the end\n  refused>1x\n           ^"),
            ("refused(>1", "expected `)`\n  refused(>1\n            ^"),
            ("refused()>1", "expected the name of a limit\n  refused()>1\n          ^"),
            ("refused_keys>1", "expected `(` and the name of a limit\n  refused_keys>1\n              ^"),
            ("late(x)>1", "`late` has no limit\n  late(x)>1\n      ^"),
            ("", "expected `refused`, `refused(LIMIT)`, `refused_keys(LIMIT)` or `late`\n  \n  ^"),
        ] {
            let error = text.parse::<Condition>().expect_err(text);
            assert_eq!(error.to_string(), expected, "{text}");
        }
    }
}
