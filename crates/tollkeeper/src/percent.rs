//! A part of a hundred.

use std::fmt;

/// A part of a hundred, in hundredths of a percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u32);

impl Percent {
    /// All of it.
    pub const ALL: Percent = Percent(10_000);

    /// So many percent, 100 at most.
    pub const fn new(percent: u32) -> Percent {
        Percent(if percent > 100 { 10_000 } else { percent * 100 })
    }

    /// So many hundredths of a percent, if that is no more than all of it.
    pub const fn from_basis_points(points: u32) -> Option<Percent> {
        if points > 10_000 { None } else { Some(Percent(points)) }
    }

    /// The part in hundredths of a percent: 10 % is 1,000.
    pub const fn basis_points(self) -> u32 {
        self.0
    }
}

/// As it is written in the config: `12.5%`.
impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 100, self.0 % 100);
        match part {
            0 => write!(f, "{whole}%"),
            _ if part.is_multiple_of(10) => write!(f, "{whole}.{}%", part / 10),
            _ => write!(f, "{whole}.{part:02}%"),
        }
    }
}
