//! Path patterns: `/login`, `/users/{id}`, `/api/*`. The most specific one that matches is the route.
//!
//! Segment by segment, a word is more specific than `{name}`, and that more than `*`. `/api/*` also matches
//! `/api`, because a slash at the end makes no other path, and so does `/api/{name}` if nothing else does. Words are compared without regard to case: an
//! application that is stricter loses nothing, one that is not would otherwise be called past its limits.
//!
//! The tree is written out here rather than taken from `matchit`, which knows neither of these two rules and
//! refuses patterns that overlap.

use std::cmp::Ordering;

use tollkeeper::http::{InvalidRoute, check_route};

use crate::path;

/// The patterns of an application.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    patterns: Vec<String>,
    root: Node,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// Words and what follows them, in the order of the words.
    words: Vec<(Box<str>, Node)>,
    any: Option<Box<Node>>,
    rest: Option<usize>,
    end: Option<usize>,
}

impl Routes {
    /// Compiles patterns; the first that is none is the error.
    pub fn new(patterns: &[String]) -> Result<Routes, InvalidRoute> {
        let mut root = Node::default();
        for (index, pattern) in patterns.iter().enumerate() {
            check_route(pattern)?;
            root.add(segments(pattern), index);
        }
        Ok(Routes { patterns: patterns.to_vec(), root })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The pattern, as it was written, that a normalised path matches.
    pub fn find(&self, path: &str) -> Option<&str> {
        self.root.find(segments(path)).map(|index| self.patterns[index].as_str())
    }
}

/// What comes behind the first slash, if anything does.
fn segments(path: &str) -> Option<&str> {
    path.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// The first segment, and the rest.
fn split(segments: &str) -> (&str, Option<&str>) {
    match segments.split_once('/') {
        Some((first, rest)) => (first, Some(rest)),
        None => (segments, None),
    }
}

impl Node {
    fn add(&mut self, segments: Option<&str>, pattern: usize) {
        let Some(segments) = segments else {
            self.end.get_or_insert(pattern);
            return;
        };
        let (first, rest) = split(segments);
        match first {
            "*" => {
                self.rest.get_or_insert(pattern);
            }
            _ if first.starts_with('{') => self.any.get_or_insert_default().add(rest, pattern),
            word => {
                let mut normal = String::new();
                path::push_segment(&mut normal, word);
                let place = match self.search(&normal) {
                    Ok(place) => place,
                    Err(place) => {
                        self.words.insert(place, (normal.to_ascii_lowercase().into(), Node::default()));
                        place
                    }
                };
                self.words[place].1.add(rest, pattern);
            }
        }
    }

    /// Looks at each node once at most: a path can take no detour.
    fn find(&self, segments: Option<&str>) -> Option<usize> {
        let Some(segments) = segments else {
            // Fastify takes `/users/` for `/users/{id}` with an empty id.
            let empty = || self.any.as_ref().and_then(|any| any.end);
            return self.end.or(self.rest).or_else(empty);
        };
        let (first, rest) = split(segments);
        let word = self.search(first).ok().and_then(|place| self.words[place].1.find(rest));
        word.or_else(|| self.any.as_ref().and_then(|any| any.find(rest))).or(self.rest)
    }

    fn search(&self, word: &str) -> Result<usize, usize> {
        self.words.binary_search_by(|(known, _)| compared(known, word))
    }
}

/// Compares a word in lower case with one in any.
fn compared(known: &str, word: &str) -> Ordering {
    known.bytes().cmp(word.bytes().map(|byte| byte.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(patterns: &[&str], cases: &[(&str, Option<&str>)]) {
        let mut patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        for _ in 0..patterns.len() {
            // Whatever their order.
            patterns.rotate_left(1);
            let routes = Routes::new(&patterns).expect("valid");
            for (path, expected) in cases {
                assert_eq!(routes.find(&path::normalized(path)), *expected, "{path} among {patterns:?}");
            }
        }
    }

    #[test]
    fn the_most_specific_pattern_wins() {
        check(
            &[
                "/",
                "/login",
                "/users/{id}",
                "/users/me",
                "/users/{id}/files",
                "/users/*",
                "/api/*",
                "/api/search",
            ],
            &[
                ("/", Some("/")),
                ("/login", Some("/login")),
                ("/LOGIN", Some("/login")),
                ("/login/", Some("/login")),
                ("//%6cogin;x/.", Some("/login")),
                ("/login/x", None),
                ("/logins", None),
                ("/users", Some("/users/*")),
                ("/users/7", Some("/users/{id}")),
                ("/users/me", Some("/users/me")),
                ("/Users/ME", Some("/users/me")),
                ("/users/7/files", Some("/users/{id}/files")),
                ("/users/me/files", Some("/users/{id}/files")),
                ("/users/7/other", Some("/users/*")),
                ("/users/7/files/1", Some("/users/*")),
                ("/api", Some("/api/*")),
                ("/api/", Some("/api/*")),
                ("/api/search", Some("/api/search")),
                ("/api/search/x", Some("/api/*")),
                ("/api/x/y/z", Some("/api/*")),
                ("/other", None),
            ],
        );
    }

    #[test]
    fn last_name_of_a_pattern_may_be_empty() {
        check(
            &["/users/{id}"],
            &[("/users/", Some("/users/{id}")), ("/users", Some("/users/{id}")), ("/", None)],
        );
        check(&["/users/{id}", "/users"], &[("/users/", Some("/users")), ("/users/7", Some("/users/{id}"))]);
        check(&["/users/{id}/export"], &[("/users", None), ("/users/", None)]);
    }

    #[test]
    fn a_pattern_for_the_rest_of_everything_matches_everything() {
        check(&["/*", "/{a}/b"], &[("/", Some("/*")), ("/x", Some("/*")), ("/x/b", Some("/{a}/b"))]);
    }

    #[test]
    fn patterns_are_spelled_as_paths_are() {
        check(
            &["/käse", "/a~b", "/%7euser"],
            &[
                ("/k%c3%a4se", Some("/käse")),
                ("/K%C3%A4SE", Some("/käse")),
                ("/A%7eB", Some("/a~b")),
                ("/~user", Some("/%7euser")),
            ],
        );
    }

    #[test]
    fn what_is_no_pattern_is_named() {
        let error = Routes::new(&["/a".to_owned(), "login".to_owned()]).expect_err("no slash");
        assert_eq!(error.to_string(), "`login` is not a path pattern (it must begin with `/`)");
    }
}
