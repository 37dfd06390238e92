//! Why a request cannot be decided: the typed errors of invalid input, and their texts.

use core::fmt;

use crate::facts::InvalidFact;
use crate::time::Span;
use crate::toll::{MAX_COST, MAX_DUES};

/// Why a request cannot be decided: invalid input of the caller. Nothing is charged.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A fact is invalid.
    Fact(InvalidFact),
    /// The cost is zero.
    ZeroCost,
    /// The cost is above [`MAX_COST`].
    Cost(u64),
    /// The cost fact of a limit is not a number.
    CostFact {
        /// The limit.
        limit: String,
        /// The fact.
        fact: String,
        /// What is wrong with it.
        problem: CostProblem,
    },
    /// There is no limit of this name.
    UnknownLimit(String),
    /// The ttl of a reservation is below a second or above an hour.
    Ttl(Span),
    /// The refund is larger than the charge.
    MoreThanCharged {
        /// The requested refund.
        asked: u64,
        /// The charge.
        charged: u64,
    },
    /// The refund is zero.
    ZeroRefund,
    /// A refund or settlement names a cost or facts that no limit of the charge charged.
    NothingToCorrect {
        /// Whether it names the request's cost, rather than facts.
        by_cost: bool,
        /// The facts that limits of this charge did charge.
        facts: Vec<String>,
    },
    /// The facts do not make a key of the limit: others are missing.
    KeyFacts {
        /// The limit.
        limit: String,
        /// The facts that are absent.
        absent: Vec<String>,
    },
    /// More than [`MAX_DUES`] limits and keys apply to one request.
    TooManyDues,
}

/// What is wrong with a cost fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CostProblem {
    /// It is absent.
    Absent,
    /// It is not a whole number.
    NotANumber,
    /// It is larger than 2^31.
    TooLarge,
}

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidRequest::Fact(error) => write!(f, "{error}"),
            InvalidRequest::ZeroCost => {
                f.write_str("the cost is 0 (at least 1; to look without paying, use peek)")
            }
            InvalidRequest::Cost(cost) => write!(f, "the cost {cost} is too large (at most {MAX_COST})"),
            InvalidRequest::CostFact { limit, fact, problem } => {
                write!(f, "limit `{limit}` charges the number in fact `{fact}`, but {problem}")?;
                match problem {
                    CostProblem::Absent => f.write_str(" (send it, or set the limit's `cost_missing`)"),
                    CostProblem::NotANumber | CostProblem::TooLarge => Ok(()),
                }
            }
            InvalidRequest::UnknownLimit(name) => write!(f, "there is no limit `{}`", name.escape_debug()),
            InvalidRequest::Ttl(ttl) => {
                write!(f, "a reservation cannot last {} (from 1s to 1h)", ttl.readable())
            }
            InvalidRequest::MoreThanCharged { asked, charged } => {
                write!(f, "{asked} cannot be given back: {charged} had been charged")
            }
            InvalidRequest::ZeroRefund => f.write_str(
                "a refund of 0 gives nothing back (at least 1; without a cost, all is given back)",
            ),
            InvalidRequest::NothingToCorrect { by_cost: true, facts } => write!(
                f,
                "no limit of this charge charges the request's cost (it can be corrected by {})",
                Names(facts)
            ),
            InvalidRequest::NothingToCorrect { by_cost: false, facts } if facts.is_empty() => {
                f.write_str("no limit of this charge charges a fact (it can be corrected by `cost`)")
            }
            InvalidRequest::NothingToCorrect { by_cost: false, facts } => {
                write!(f, "no limit of this charge charges one of these facts (it charges {})", Names(facts))
            }
            InvalidRequest::KeyFacts { limit, absent } => {
                let are = if absent.len() == 1 { "is" } else { "are" };
                write!(f, "limit `{limit}` is keyed by {}, which {are} missing", Names(absent))
            }
            InvalidRequest::TooManyDues => write!(
                f,
                "more than {MAX_DUES} limits and keys apply to this request (send fewer descriptors, or narrow the \
                 limits with `when`)"
            ),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for InvalidRequest {}

/// Names of facts in a sentence: `` `tokens`, `images` ``.
struct Names<'n>(&'n [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// A clause about the fact: "it is absent".
impl fmt::Display for CostProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CostProblem::Absent => "it is absent",
            CostProblem::NotANumber => "it is not a whole number",
            CostProblem::TooLarge => "it is larger than 2147483648",
        })
    }
}
