//! Patterns for `when` and `unless`: `*` matches any run of characters, everything else itself.

use crate::facts::{Facts, Scratch};

/// Whether `pattern` covers the whole of `text`. Linear in the text for each `*`: nobody who sends
/// a value can make it slow.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on when the guess of the last `*` was too short.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
            }
            Some(byte) if *byte == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((after, from)) => {
                    star = Some((after, from + 1));
                    p = after;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Facts that a request must have: each is there and matches one of its patterns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The name of the fact.
    pub fact: String,
    /// The patterns, of which one must match.
    pub patterns: Vec<String>,
}

impl Condition {
    /// Whether the fact is there and matches.
    pub(crate) fn holds(&self, facts: &Facts<'_>) -> bool {
        let mut scratch: Scratch = [0; 48];
        facts.get(&self.fact).is_some_and(|value| {
            let text = value.text(&mut scratch);
            self.patterns.iter().any(|pattern| matches(pattern, text))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_run_and_the_rest_itself() {
        for (pattern, text, expected) in [
            ("/login", "/login", true),
            ("/login", "/Login", false),
            ("/login", "/login/", false),
            ("", "", true),
            ("", "x", false),
            ("*", "", true),
            ("*", "anything\n\0", true),
            ("/api/*", "/api/", true),
            ("/api/*", "/ap", false),
            ("*.png", "a.png.png", true),
            ("*.png", "a.pngx", false),
            ("a*b*c", "abc", true),
            ("a*b*c", "axxbyybzzc", true),
            ("a*b*c", "axxbyyb", false),
            ("**", "x", true),
            ("*ü*", "grün", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn many_stars_are_not_slow() {
        let pattern = "*a".repeat(500) + "b";
        assert!(!matches(&pattern, &"a".repeat(1024)));
    }
}
