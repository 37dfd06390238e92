//! A rule: which requests may share a response, and what must be equal for that.

/// The facts that a response usually depends on.
const WHOLE_TARGET: [&str; 3] = ["host", "path", "query"];

/// Which requests may share a response: those that match `when`, if they have the same host, path, query and other facts
/// in `by`, the same method, and the same `Accept`, `Accept-Encoding`, `Accept-Language`, `Origin` and headers that change the
/// protocol, host, path or method, such as `X-Forwarded-Proto`.
///
/// Host, path and query are compared as sent: a normalised path would mix `/files` and `/files/`, to which servers
/// respond differently. `query` is the whole query string, `query.NAME` one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SingleFlightRule {
    pub(super) by: Vec<String>,
    pub(super) when: Vec<(String, String)>,
}

impl SingleFlightRule {
    /// A rule for all requests, keyed by host, path and query.
    pub fn new() -> SingleFlightRule {
        SingleFlightRule::keyed_only_by(WHOLE_TARGET)
    }

    /// A rule that is keyed by these facts only. Requests that differ in anything else get the same response: without
    /// `host`, `path` and `query` this is right only if the service ignores the missing ones.
    pub fn keyed_only_by(facts: impl IntoIterator<Item = impl Into<String>>) -> SingleFlightRule {
        SingleFlightRule { by: facts.into_iter().map(Into::into).collect(), when: Vec::new() }
    }

    /// Keys the rule by one more fact, such as `header.authorization`.
    #[must_use]
    pub fn by(mut self, fact: impl Into<String>) -> SingleFlightRule {
        self.by.push(fact.into());
        self
    }

    /// Applies the rule only if the fact matches the pattern, as [`Limit::when`](tollkeeper::Limit::when) does.
    #[must_use]
    pub fn when(mut self, fact: impl Into<String>, pattern: impl Into<String>) -> SingleFlightRule {
        self.when.push((fact.into(), pattern.into()));
        self
    }

    pub(super) fn is_by(&self, fact: &str) -> bool {
        self.by.iter().any(|other| other == fact)
    }
}

impl Default for SingleFlightRule {
    fn default() -> SingleFlightRule {
        SingleFlightRule::new()
    }
}
