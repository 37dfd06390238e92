//! The errors of an invalid policy, with messages that name the fix.

use core::fmt;

use crate::facts;
use crate::lease::NotLeased;
use crate::net::InvalidNetwork;
use crate::quota::{Algorithm, InvalidQuota};
use crate::toll::{MAX_COST, MAX_DUES};

/// All mistakes in a list of limits.
#[derive(Clone, PartialEq, Eq)]
pub struct InvalidPolicy(pub Vec<InvalidLimit>);

/// One mistake in a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidLimit {
    /// The index of the limit in the list, from 0.
    pub index: usize,
    /// The name of the limit.
    pub name: String,
    /// The invalid part.
    pub part: Part,
    /// Why it is invalid.
    pub problem: LimitProblem,
}

/// A part of a limit, so that a config reader can report its position.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the keys of the config file")]
#[non_exhaustive]
pub enum Part {
    Name,
    Rate,
    By,
    When,
    Unless,
    Allow,
    TierFact,
    Tier(String),
    DefaultTier,
    Override(String),
    Cost,
    CostMissing,
    Stagger,
    Partition,
    Consistency,
    DeductWhen,
    RefundWhen,
}

/// Why a limit is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitProblem {
    /// The name is empty, too long, or has other characters than `a-z 0-9 . _ -`.
    Name,
    /// An earlier limit has the same name.
    DuplicateName,
    /// A fact has an invalid name.
    FactName(String),
    /// A fact is listed twice in `by`.
    DuplicateFact(String),
    /// The limit has tiers, but no fact that picks one.
    TiersWithoutFact,
    /// A fact picks the tier, but there are no tiers.
    NoTiers,
    /// There is no default tier for requests that name no tier, or one that is not listed.
    NoDefaultTier,
    /// The default tier is not listed.
    UnknownTier(String),
    /// A tier or an override is listed twice.
    Twice(String),
    /// `allow` or an override on a limit that is not keyed by exactly one fact.
    NeedsOneFact,
    /// An entry of `allow` for `ip` is neither an address nor a network.
    Network(String),
    /// An override for `ip` is not an address.
    Address(String),
    /// `cost_missing` on a limit that charges no fact.
    CostMissingWithoutCost,
    /// `cost_missing` charges more than any request may cost.
    CostMissingTooLarge(u64),
    /// Windows of this algorithm cannot be staggered.
    StaggerWithout(Algorithm),
    /// The fact of `partition` is not one that the limit is keyed by.
    PartitionNotInBy(String),
    /// `consistency: leased` on a limit whose algorithm has no leases.
    NotLeased(Algorithm),
    /// This key of the config needs refunds, which this algorithm does not support.
    GivesNothingBack(&'static str, Algorithm),
    /// A concurrency limit with a rate.
    RateOfSlots,
    /// Slots for an algorithm other than concurrency.
    SlotsOf(Algorithm),
    /// The numbers are invalid.
    Quota(InvalidQuota),
    /// With this limit, more limits apply to the same request than one toll can hold.
    TooManyApply,
}

impl fmt::Display for LimitProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitProblem::Name => write!(f, "a name is 1 to {} of `a-z 0-9 . _ -`", facts::MAX_NAME),
            LimitProblem::DuplicateName => f.write_str("another limit has this name (names are unique)"),
            LimitProblem::FactName(fact) => {
                write!(
                    f,
                    "`{}` is not the name of a fact (1 to {} of `A-Z a-z 0-9 . _ : / -`)",
                    fact.escape_debug(),
                    facts::MAX_NAME
                )
            }
            LimitProblem::DuplicateFact(fact) => {
                write!(f, "`{}` is listed twice in `by` (keep one)", fact.escape_debug())
            }
            LimitProblem::TiersWithoutFact => {
                f.write_str("it has tiers but no fact that picks one (name it with `tier`)")
            }
            LimitProblem::NoTiers => f.write_str("a fact picks the tier but there are no tiers (list them)"),
            LimitProblem::NoDefaultTier => f.write_str(
                "requests without a known tier get nothing (name one of the tiers in `default_tier`)",
            ),
            LimitProblem::UnknownTier(tier) => {
                write!(f, "the default tier `{}` is not one of the tiers", tier.escape_debug())
            }
            LimitProblem::Twice(name) => write!(f, "`{}` is listed twice (keep one)", name.escape_debug()),
            LimitProblem::NeedsOneFact => {
                f.write_str("`allow` and overrides compare one value: key the limit by exactly one fact")
            }
            LimitProblem::Network(text) => {
                write!(f, "`{}` is {InvalidNetwork}", text.escape_debug())
            }
            LimitProblem::Address(text) => {
                write!(
                    f,
                    "`{}` is not an IP address (such as `192.0.2.7`; an override is for one address)",
                    text.escape_debug()
                )
            }
            LimitProblem::CostMissingWithoutCost => {
                f.write_str("`cost_missing` without `cost` (name the fact that holds the cost)")
            }
            LimitProblem::CostMissingTooLarge(cost) => {
                write!(f, "`cost_missing` is {cost}, but a cost is at most {MAX_COST}")
            }
            LimitProblem::StaggerWithout(algorithm) => {
                write!(f, "{algorithm} cannot be staggered (only fixed-window can)")
            }
            LimitProblem::PartitionNotInBy(fact) => {
                write!(
                    f,
                    "`partition` is `{}`, which is not one of the facts in `by` (use one of them)",
                    fact.escape_debug()
                )
            }
            LimitProblem::NotLeased(algorithm) => {
                write!(f, "{} (leave out `consistency: leased`)", NotLeased::Algorithm(*algorithm))
            }
            LimitProblem::GivesNothingBack(key, algorithm) => {
                write!(f, "`{key}` gives charges back, which {algorithm} cannot (leave it out)")
            }
            LimitProblem::RateOfSlots => {
                f.write_str("a concurrency limit has slots, not a rate (`limit: 5`)")
            }
            LimitProblem::SlotsOf(algorithm) => write!(f, "{algorithm} has a rate, not slots (`rate: 5/s`)"),
            LimitProblem::Quota(error) => write!(f, "{error}"),
            LimitProblem::TooManyApply => write!(
                f,
                "more than {MAX_DUES} limits by the same facts apply to the same request, which would always be refused \
                 (narrow them with `when`)"
            ),
        }
    }
}

impl fmt::Display for InvalidLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limit `{}`: ", self.name.escape_debug())?;
        match &self.part {
            Part::Tier(name) => write!(f, "tier `{}`: ", name.escape_debug())?,
            Part::Override(value) => write!(f, "override `{}`: ", value.escape_debug())?,
            _ => {}
        }
        write!(f, "{}", self.problem)
    }
}

impl fmt::Display for InvalidPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index > 0 { "; " } else { "" };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for InvalidPolicy {}
