//! Sets of HTTP statuses, for `deduct_when` and `refund_when`.

use core::fmt;

/// A set of HTTP statuses from 100 to 599.
///
/// ```
/// use tollkeeper_core::StatusSet;
///
/// let failures = StatusSet::of([401, 403]).class(5);
/// assert!(failures.contains(401) && failures.contains(503));
/// assert!(!failures.contains(200));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct StatusSet([u64; WORDS]);

const FIRST: u16 = 100;
const LAST: u16 = 599;
const WORDS: usize = 8; // 500 statuses

impl StatusSet {
    /// A set of these statuses; numbers outside 100 to 599 are ignored.
    pub fn of(statuses: impl IntoIterator<Item = u16>) -> StatusSet {
        statuses.into_iter().fold(StatusSet::default(), StatusSet::status)
    }

    /// Adds a status.
    #[must_use]
    pub fn status(mut self, status: u16) -> StatusSet {
        if let Some((word, bit)) = position(status) {
            self.0[word] |= bit;
        }
        self
    }

    /// Adds all statuses that begin with this digit: 5 adds `5xx`.
    #[must_use]
    pub fn class(self, digit: u8) -> StatusSet {
        let first = u16::from(digit) * 100;
        (first..first + 100).fold(self, StatusSet::status)
    }

    /// Whether the set contains this status.
    pub fn contains(&self, status: u16) -> bool {
        position(status).is_some_and(|(word, bit)| self.0[word] & bit != 0)
    }
}

/// The index of the word and the bit of a status.
fn position(status: u16) -> Option<(usize, u64)> {
    let index = usize::from(status.checked_sub(FIRST)?);
    (status <= LAST).then(|| (index / 64, 1 << (index % 64)))
}

impl fmt::Debug for StatusSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries((FIRST..=LAST).filter(|status| self.contains(*status))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_contains_only_what_was_added() {
        let set = StatusSet::of([100, 304, 401, 599, 600, 99, 0, u16::MAX]).class(5).class(9);
        for status in 0..=u16::MAX {
            let expected = matches!(status, 100 | 304 | 401 | 500..=599);
            assert_eq!(set.contains(status), expected, "{status}");
        }
        assert_eq!(format!("{:?}", StatusSet::of([401, 403])), "{401, 403}");
    }
}
