//! Patterns for `when` and `unless`: `*` matches any run of characters, everything else matches itself.

use crate::facts::{Facts, Scratch};

/// Whether `pattern` matches the whole `text`. Linear in the text for each `*`, so a client cannot make it
/// slow by sending a special value.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to continue if the last `*` must match more: the positions in the pattern and in the text.
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

/// A condition on one fact: it is present and matches one of the patterns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The name of the fact.
    pub fact: String,
    /// The patterns, one of which must match.
    pub patterns: Vec<String>,
}

impl Condition {
    /// Whether the fact is present and matches.
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
    use crate::facts;
    use crate::key::tests::Random;

    #[test]
    fn a_star_matches_any_run_of_characters() {
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

    /// The definition of a match as a naive recursive function.
    fn reference(pattern: &[u8], text: &[u8]) -> bool {
        match (pattern, text) {
            ([], _) => text.is_empty(),
            ([b'*', rest @ ..], _) => (0..=text.len()).any(|run| reference(rest, &text[run..])),
            ([one, rest @ ..], [first, others @ ..]) => one == first && reference(rest, others),
            _ => false,
        }
    }

    #[test]
    fn matches_agrees_with_the_reference() {
        let mut random = Random(4);
        let mut matched = 0;
        for _ in 0..100_000 {
            let pattern: String = (0..random.below(7)).map(|_| random.pick(&['a', 'b', '*'])).collect();
            let text: String = (0..random.below(9)).map(|_| random.pick(&['a', 'b'])).collect();
            let expected = reference(pattern.as_bytes(), text.as_bytes());
            assert_eq!(matches(&pattern, &text), expected, "{pattern:?} {text:?}");
            matched += usize::from(expected);
        }
        assert!((10_000..90_000).contains(&matched), "{matched} of 100000 matched: too few or too many");
    }

    #[test]
    fn many_stars_are_not_slow() {
        let pattern = "*a".repeat(500) + "b";
        assert!(!matches(&pattern, &"a".repeat(1024)));
    }

    #[test]
    fn a_condition_needs_the_fact_and_one_matching_pattern() {
        let facts = facts! { "route" => "/a", "empty" => "", "n" => 17, "ip" => "::ffff:192.0.2.7" };
        for (fact, patterns, expected) in [
            ("route", &["/a"][..], true),
            ("route", &["/b", "/*"], true),
            ("route", &["/b", "/c"], false),
            ("route", &[], false),
            ("n", &["1*"], true),
            ("ip", &["192.0.2.*"], true),
            ("ip", &["::ffff:*"], false),
            ("empty", &["*", ""], false),
            ("absent", &["*", ""], false),
        ] {
            let patterns = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            let condition = Condition { fact: fact.to_owned(), patterns };
            assert_eq!(condition.holds(&facts), expected, "{condition:?}");
        }
    }
}
