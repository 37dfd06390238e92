//! How many units of a key this node used recently.

use tollkeeper_core::{Span, Time};

/// Units in the window that just ended and in the current one: the earlier ones count by how much of their window is
/// still recent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heat {
    begin: Time,
    previous: u64,
    current: u64,
}

impl Heat {
    /// Counts units that are used now.
    pub(super) fn add(&mut self, units: u64, now: Time, recent: Span) {
        self.advance(now, recent);
        self.current = self.current.saturating_add(units);
    }

    /// Units used in the last `recent`.
    pub(super) fn units(&mut self, now: Time, recent: Span) -> u64 {
        self.advance(now, recent);
        let left = recent.as_micros().saturating_sub(now.since(self.begin).as_micros());
        // `left` is at most half a second: a product of 2^64 would be 2^45 units a second.
        let previous = self.previous.saturating_mul(left) / recent.as_micros().max(1);
        self.current.saturating_add(previous)
    }

    fn advance(&mut self, now: Time, recent: Span) {
        let age = now.since(self.begin).as_micros();
        if age >= 2 * recent.as_micros() {
            *self = Heat { begin: now, previous: 0, current: 0 };
        } else if age >= recent.as_micros() {
            *self = Heat { begin: self.begin + recent, previous: self.current, current: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_is_what_was_used_recently() {
        let recent = Span::from_millis(30);
        let at = |millis: u64| Time::from_micros(1_000_000 + millis * 1_000);
        let mut heat = Heat::default();
        heat.add(100, at(0), recent);
        assert_eq!(heat.units(at(29), recent), 100);
        assert_eq!(heat.units(at(30), recent), 100);
        assert_eq!(heat.units(at(45), recent), 50);
        heat.add(10, at(45), recent);
        assert_eq!(heat.units(at(50), recent), 43);
        assert_eq!(heat.units(at(60), recent), 10);
        assert_eq!(heat.units(at(120), recent), 0);
    }
}
