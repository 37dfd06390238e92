//! The warnings about a config file, each with a code to look it up and to silence it.

use std::fmt;

use super::suggest::nearest;
use super::units::InvalidValue;

/// A part of a config file that is valid but probably a mistake. It prints as its code, such as `W001`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Warning {
    /// No enforced limit applies to every HTTP request on every route.
    NotCovered,
    /// A limit uses a header that any client can send.
    ClientHeader,
    /// A limit names a header fact with upper-case letters.
    HeaderCase,
    /// A fact is trusted, but there are no trusted proxies.
    NoProxies,
    /// A trusted fact is not read from a header.
    TrustedNotHeader,
    /// `share` rounds a number by more than 10 %.
    Rounded,
    /// Two leaky buckets can apply to one request.
    LeakyBuckets,
    /// No listener takes slots of a concurrency limit.
    NoSlots,
    /// No fact of the config supplies a cost.
    CostNotSupplied,
    /// A condition can never match.
    NeverMatches,
    /// A condition names a route that is not listed.
    UnknownRoute,
    /// The tiers of a limit have different periods.
    TierPeriods,
    /// A file that the config names does not exist.
    MissingFile,
    /// A limit is too small to be leased.
    TooSmallToLease,
    /// A limit is leased, but the store is in memory.
    LeasedInMemory,
}

impl Warning {
    /// All warnings, in the order of their codes.
    pub const ALL: [Warning; 15] = [
        Warning::NotCovered,
        Warning::ClientHeader,
        Warning::HeaderCase,
        Warning::NoProxies,
        Warning::TrustedNotHeader,
        Warning::Rounded,
        Warning::LeakyBuckets,
        Warning::NoSlots,
        Warning::CostNotSupplied,
        Warning::NeverMatches,
        Warning::UnknownRoute,
        Warning::TierPeriods,
        Warning::MissingFile,
        Warning::TooSmallToLease,
        Warning::LeasedInMemory,
    ];

    /// The code. The meaning of a code never changes.
    pub const fn code(self) -> &'static str {
        match self {
            Warning::NotCovered => "W001",
            Warning::ClientHeader => "W002",
            Warning::HeaderCase => "W003",
            Warning::NoProxies => "W004",
            Warning::TrustedNotHeader => "W005",
            Warning::Rounded => "W006",
            Warning::LeakyBuckets => "W007",
            Warning::NoSlots => "W008",
            Warning::CostNotSupplied => "W009",
            Warning::NeverMatches => "W010",
            Warning::UnknownRoute => "W011",
            Warning::TierPeriods => "W012",
            Warning::MissingFile => "W014",
            Warning::TooSmallToLease => "W015",
            Warning::LeasedInMemory => "W016",
        }
    }

    /// What the warning means and how to fix it, in sentences.
    pub const fn explanation(self) -> &'static str {
        match self {
            Warning::NotCovered => {
                "No enforced limit applies to every HTTP request on every route. Add one `by: ip` (or without `by`, or \
                 with `missing: share` or `deny`), without `when` and `unless`."
            }
            Warning::ClientHeader => {
                "A limit uses a fact from a header that any client can send with any value. Make the fact `trusted`, so \
                 that only `trusted_proxies` can set it. The headers `authorization` and `cookie` and facts with \
                 `hash: true` are exempt: the application that verifies a secret rejects an invented one."
            }
            Warning::HeaderCase => {
                "A limit names a fact such as `header.X-User`, which does not exist: header names are in lower case."
            }
            Warning::NoProxies => {
                "A fact is `trusted`, but `http.trusted_proxies` is empty, so the fact is always absent."
            }
            Warning::TrustedNotHeader => {
                "A fact is `trusted`, but is read from a cookie, the query or the body. Gateways forward these as the \
                 client sent them. Let the gateway set a header instead."
            }
            Warning::Rounded => {
                "`share` rounds a count, a burst or a number of slots by more than 10 %. Use a larger count over a longer \
                 period."
            }
            Warning::LeakyBuckets => {
                "Two leaky buckets can apply to one request, and each delays requests independently of the other. Make \
                 one of them a token bucket."
            }
            Warning::NoSlots => {
                "There is a concurrency limit, but neither HTTP nor the proxy listens: gRPC and RESP never take slots."
            }
            Warning::CostNotSupplied => {
                "A limit charges the number in a fact (`cost`), no entry of `http.facts` has this name, and \
                 `cost_missing` is not set: every HTTP request through the middleware, the proxy or a gateway is \
                 rejected. Add the fact, or set `cost_missing`. If all callers send the fact themselves, set \
                 `cost_missing: error`."
            }
            Warning::NeverMatches => {
                "A pattern of `when` or `unless` can never match: methods are in upper case, hosts in lower case."
            }
            Warning::UnknownRoute => {
                "A pattern of `when` or `unless` for `route` matches none of `http.routes`. The fact `route` is always \
                 one of these patterns exactly as listed there, or `unmatched`."
            }
            Warning::TierPeriods => {
                "The tiers of a limit have different periods. Counts are kept by period, so a client that changes its \
                 tier starts with a fresh count."
            }
            Warning::MissingFile => {
                "A file that `tls` names, or `redis` while the store is on Redis, does not exist, so `serve` would not \
                 start. Only `validate` checks this, and reports it as an error. Silence it to validate the file of another \
                 machine."
            }
            Warning::TooSmallToLease => {
                "A limit has `consistency: leased`, but it, a tier or an override is so small that units taken in advance \
                 would expire unused: it is `exact` instead. The message says what would be large enough."
            }
            Warning::LeasedInMemory => {
                "A limit has `consistency: leased`, but the store is in this process, where every request is decided \
                 exactly and at once. Leave it out, or use a store on Redis."
            }
        }
    }

    /// Parses a code.
    pub(super) fn parse(text: &str) -> Result<Warning, InvalidValue> {
        if let Some(warning) = Warning::ALL.into_iter().find(|warning| warning.code() == text) {
            return Ok(warning);
        }
        let codes = Warning::ALL.iter().map(|warning| warning.code());
        let help = match nearest(text, codes) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("a code is `W001` to `{}`", Warning::ALL[Warning::ALL.len() - 1]),
        };
        Err(InvalidValue::new(format!("there is no warning {}", super::excerpt::quoted(text)), help))
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_numbered_in_order() {
        // W013 is not used any more: `tollkeeper proxy` needs no section `proxy`.
        for (number, warning) in (1..).filter(|number| *number != 13).zip(Warning::ALL) {
            assert_eq!(warning.code(), format!("W{number:03}"));
            assert_eq!(Warning::parse(warning.code()).ok(), Some(warning));
        }
    }

    #[test]
    fn unknown_code_gets_a_suggestion() {
        assert_eq!(
            Warning::parse("W01").expect_err("unknown").to_string(),
            "there is no warning `W01` (did you mean `W001`?)"
        );
        assert_eq!(Warning::parse("w002").expect_err("unknown").help, "did you mean `W002`?");
        assert_eq!(Warning::parse("all").expect_err("unknown").help, "a code is `W001` to `W016`");
    }
}
