//! Matches paths against patterns such as `/login`, `/users/{id}` and `/api/*`; the most specific match is the route.
//!
//! Segment by segment, a literal is more specific than `{name}`, and `{name}` more than `*`. `/api/*` also matches `/api`,
//! because a trailing slash does not make another path; so does `/api/{name}` if no other pattern matches. Literals are
//! compared ignoring case: an application that distinguishes case loses nothing, but one that ignores it could otherwise
//! be called past its limits.
//!
//! The tree is implemented here instead of using `matchit`, which supports neither of these two rules and rejects
//! overlapping patterns.

use std::cmp::Ordering;

use tollkeeper::http::{InvalidRoute, check_route};

use crate::path;

/// The path patterns of an application.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    patterns: Vec<String>,
    root: Node,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// Literal segments in lower case and the nodes that follow them, sorted.
    literals: Vec<(Box<str>, Node)>,
    /// The node after `{name}`.
    any: Option<Box<Node>>,
    /// The index of the pattern that has `*` here.
    rest: Option<usize>,
    /// The index of the pattern that ends here.
    end: Option<usize>,
}

impl Routes {
    /// Compiles patterns; fails at the first that is invalid.
    pub fn new(patterns: &[String]) -> Result<Routes, InvalidRoute> {
        let mut root = Node::default();
        for (index, pattern) in patterns.iter().enumerate() {
            check_route(pattern)?;
            root.add(segments(pattern), index);
        }
        Ok(Routes { patterns: patterns.to_vec(), root })
    }

    /// Whether there are no patterns.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The pattern that a normalised path matches, as it is spelled in the settings.
    pub fn find(&self, path: &str) -> Option<&str> {
        self.root.find(segments(path)).map(|index| self.patterns[index].as_str())
    }
}

/// The path without its first slash; `None` if it has no segments.
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
            literal => {
                let mut normal = String::new();
                path::push_segment(&mut normal, literal);
                let index = match self.search(&normal) {
                    Ok(index) => index,
                    Err(index) => {
                        self.literals.insert(index, (normal.to_ascii_lowercase().into(), Node::default()));
                        index
                    }
                };
                self.literals[index].1.add(rest, pattern);
            }
        }
    }

    /// Finds the most specific pattern. Visits each node at most once, whatever the path, so that no path is expensive.
    fn find(&self, segments: Option<&str>) -> Option<usize> {
        let Some(segments) = segments else {
            // Fastify matches `/users/` with `/users/{id}` and an empty id.
            let empty = || self.any.as_ref().and_then(|any| any.end);
            return self.end.or(self.rest).or_else(empty);
        };
        let (first, rest) = split(segments);
        let literal = self.search(first).ok().and_then(|index| self.literals[index].1.find(rest));
        literal.or_else(|| self.any.as_ref().and_then(|any| any.find(rest))).or(self.rest)
    }

    fn search(&self, segment: &str) -> Result<usize, usize> {
        self.literals.binary_search_by(|(literal, _)| cmp_ignoring_case(literal, segment))
    }
}

/// Compares a lower-case literal with a segment in any case.
fn cmp_ignoring_case(literal: &str, segment: &str) -> Ordering {
    literal.bytes().cmp(segment.bytes().map(|byte| byte.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(patterns: &[&str], cases: &[(&str, Option<&str>)]) {
        let mut patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        for _ in 0..patterns.len() {
            // The order of the patterns must not matter.
            patterns.rotate_left(1);
            let routes = Routes::new(&patterns).expect("valid");
            for (path, expected) in cases {
                assert_eq!(routes.find(&path::normalized(path)), *expected, "{path} among {patterns:?}");
            }
        }
    }

    #[test]
    fn most_specific_pattern_wins() {
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
    fn last_parameter_may_be_empty() {
        check(
            &["/users/{id}"],
            &[("/users/", Some("/users/{id}")), ("/users", Some("/users/{id}")), ("/", None)],
        );
        check(&["/users/{id}", "/users"], &[("/users/", Some("/users")), ("/users/7", Some("/users/{id}"))]);
        check(&["/users/{id}/export"], &[("/users", None), ("/users/", None)]);
    }

    #[test]
    fn wildcard_at_the_root_matches_every_path() {
        check(&["/*", "/{a}/b"], &[("/", Some("/*")), ("/x", Some("/*")), ("/x/b", Some("/{a}/b"))]);
    }

    #[test]
    fn patterns_are_normalized_like_paths() {
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
    fn error_names_the_invalid_pattern() {
        let error = Routes::new(&["/a".to_owned(), "login".to_owned()]).expect_err("no slash");
        assert_eq!(error.to_string(), "`login` is not a path pattern (it must begin with `/`)");
    }
}
