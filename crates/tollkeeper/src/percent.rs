//! A percentage from 0 % to 100 %.

use std::fmt;

/// A percentage from 0 % to 100 %, stored in hundredths of a percent (basis points).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u32);

impl Percent {
    /// 100 %.
    pub const ALL: Percent = Percent(10_000);

    /// A whole percentage; more than 100 becomes 100.
    pub const fn new(percent: u32) -> Percent {
        Percent(if percent > 100 { 10_000 } else { percent * 100 })
    }

    /// A percentage in hundredths of a percent; `None` above 10,000.
    pub const fn from_basis_points(points: u32) -> Option<Percent> {
        if points > 10_000 { None } else { Some(Percent(points)) }
    }

    /// The percentage in hundredths of a percent: 10 % is 1,000.
    pub const fn basis_points(self) -> u32 {
        self.0
    }
}

/// Prints as in the config file: `12.5%`.
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
