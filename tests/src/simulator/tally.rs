//! Counts what happened in simulations, so that a run in which a fault never happened is not mistaken for a proof.

use std::fmt;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names below describe them")]
pub enum Kind {
    // What clients did.
    Checks,
    Admitted,
    Refused,
    Degraded,
    Corrected,
    Repeated,
    Slots,
    Judged,
    Compared,
    Leases,
    Spent,
    Scarce,
    Bounded,
    BoundJudged,
    // What went wrong.
    Late,
    LostRequest,
    LostReply,
    Duplicate,
    Reordered,
    Rejected,
    Partition,
    BreakerOpen,
    Drift,
    ClockJump,
    StoreForward,
    StoreBack,
    Crash,
    Pause,
    Flush,
    Failover,
    Raised,
    Lowered,
    Abandoned,
    Expired,
}

impl Kind {
    /// All kinds, in the order of the enum: faults begin at [`Kind::Late`].
    pub const ALL: [(Kind, &str); 34] = [
        (Kind::Checks, "requests"),
        (Kind::Admitted, "admitted"),
        (Kind::Refused, "refused"),
        (Kind::Degraded, "decided without the store"),
        (Kind::Corrected, "refunds and settlements"),
        (Kind::Repeated, "refunds repeated"),
        (Kind::Slots, "slots released or renewed"),
        (Kind::Judged, "admissions judged by the contract"),
        (Kind::Compared, "verdicts compared with the definition"),
        (Kind::Leases, "leases granted"),
        (Kind::Spent, "admissions from permits"),
        (Kind::Scarce, "refusals because permits were scarce"),
        (Kind::Bounded, "refusals by a denial bound"),
        (Kind::BoundJudged, "of these, compared with the store"),
        (Kind::Late, "answers after the deadline"),
        (Kind::LostRequest, "requests lost"),
        (Kind::LostReply, "replies lost"),
        (Kind::Duplicate, "requests delivered twice"),
        (Kind::Reordered, "requests overtaken"),
        (Kind::Rejected, "connections refused"),
        (Kind::Partition, "partitions"),
        (Kind::BreakerOpen, "requests while a breaker was open"),
        (Kind::Drift, "nodes with drifting clocks"),
        (Kind::ClockJump, "node clocks set forward"),
        (Kind::StoreForward, "store clocks set forward"),
        (Kind::StoreBack, "store clocks set back"),
        (Kind::Crash, "crashes"),
        (Kind::Pause, "pauses"),
        (Kind::Flush, "flushes"),
        (Kind::Failover, "failovers to an older copy"),
        (Kind::Raised, "limits raised"),
        (Kind::Lowered, "limits lowered"),
        (Kind::Abandoned, "callers gone"),
        (Kind::Expired, "states expired"),
    ];
}

/// The counts of one simulation, or of many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally([u64; Kind::ALL.len()]);

impl Default for Tally {
    fn default() -> Tally {
        Tally([0; Kind::ALL.len()])
    }
}

impl Tally {
    /// Counts one more.
    pub fn count(&mut self, kind: Kind) {
        self.0[kind as usize] += 1;
    }

    /// How many there were.
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    /// Adds another.
    pub fn add(&mut self, other: &Tally) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }

    /// The names of what never happened, except for these.
    pub fn missing(&self, except: &[Kind]) -> Vec<&'static str> {
        let missing = |kind: &Kind| self.of(*kind) == 0 && !except.contains(kind);
        Kind::ALL.iter().filter(|(kind, _)| missing(kind)).map(|(_, name)| *name).collect()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Kind::ALL.iter().try_for_each(|(kind, name)| writeln!(f, "{:>12} {name}", self.of(*kind)))
    }
}
