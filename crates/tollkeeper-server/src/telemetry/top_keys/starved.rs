//! Detects starved keys: those refused at least once in each of the last five minutes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::by_hash::ByHash;

/// A key is starved after refusals in this many consecutive minutes.
const MINUTES: u32 = 5;
/// The maximum number of keys that are tracked at a time; further ones are ignored.
const MAX_KEYS: usize = 8_192;

/// The minutes in which each key was refused, as seen by one thread.
#[derive(Debug, Default)]
pub struct Refusals {
    keys: ByHash<Refused>,
    /// The minute of the last sweep of keys that can be forgotten.
    swept: u64,
}

#[derive(Clone, Debug)]
struct Refused {
    limit: Box<str>,
    /// The last minute with a refusal.
    last: u64,
    /// Bit `n` is set if there was a refusal `n` minutes before `last`.
    minutes: u8,
}

impl Refusals {
    /// Records that a key, given by its hash, was refused in this minute.
    pub fn add(&mut self, limit: &str, key: u64, minute: u64) {
        if self.keys.len() >= MAX_KEYS && self.swept != minute {
            self.swept = minute;
            // A key without a refusal in the previous minute has to start over, so it can be dropped.
            self.keys.retain(|_, refused| refused.last + 1 >= minute);
        }
        let full = self.keys.len() >= MAX_KEYS;
        match self.keys.entry(key) {
            Entry::Occupied(mut entry) => {
                let refused = entry.get_mut();
                let since = minute.saturating_sub(refused.last);
                let before = u32::try_from(since).ok().and_then(|since| refused.minutes.checked_shl(since));
                refused.minutes = before.unwrap_or(0) | 1;
                refused.last = refused.last.max(minute);
            }
            Entry::Vacant(entry) if !full => {
                entry.insert(Refused { limit: limit.into(), last: minute, minutes: 1 });
            }
            Entry::Vacant(_) => {}
        }
    }
}

/// The merged refusals of several threads, as of one minute.
#[derive(Debug)]
pub struct Starved {
    minute: u64,
    keys: ByHash<(Box<str>, u32)>,
}

impl Starved {
    /// Starts without refusals.
    pub fn new(minute: u64) -> Starved {
        Starved { minute, keys: ByHash::default() }
    }

    /// Adds the refusals of one thread.
    pub fn add(&mut self, seen: &Refusals) {
        for (key, refused) in &seen.keys {
            // Bit 0 is the current minute, which is not over.
            let since = u32::try_from(self.minute.saturating_sub(refused.last)).unwrap_or(u32::MAX);
            let minutes = u32::from(refused.minutes).checked_shl(since).unwrap_or(0);
            if minutes & COMPLETE != 0 {
                self.keys.entry(*key).or_insert_with(|| (refused.limit.clone(), 0)).1 |= minutes;
            }
        }
    }

    /// How many keys of each limit are starved.
    pub fn count(self) -> HashMap<Box<str>, u64> {
        let mut starved: HashMap<Box<str>, u64> = HashMap::new();
        for (limit, _) in self.keys.into_values().filter(|(_, minutes)| minutes & COMPLETE == COMPLETE) {
            *starved.entry(limit).or_default() += 1;
        }
        starved
    }
}

/// The bits of the last [`MINUTES`] complete minutes.
const COMPLETE: u32 = ((1 << MINUTES) - 1) << 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn starved(seen: &[&Refusals], minute: u64) -> u64 {
        let mut starved = Starved::new(minute);
        seen.iter().for_each(|seen| starved.add(seen));
        starved.count().get("limit").copied().unwrap_or(0)
    }

    #[test]
    fn key_is_starved_after_five_complete_minutes() {
        let mut refusals = Refusals::default();
        for minute in 100..105 {
            assert_eq!(starved(&[&refusals], minute), 0, "{minute}");
            refusals.add("limit", 7, minute);
            refusals.add("limit", 7, minute);
        }
        assert_eq!(starved(&[&refusals], 104), 0, "the fifth minute is not over");
        assert_eq!(starved(&[&refusals], 105), 1);
        assert_eq!(starved(&[&refusals], 106), 0, "no refusal in the last minute");
        refusals.add("limit", 7, 106);
        for minute in 107..111 {
            assert_eq!(starved(&[&refusals], minute), 0, "{minute}");
            refusals.add("limit", 7, minute);
        }
        assert_eq!(starved(&[&refusals], 111), 1);
        assert_eq!(starved(&[&refusals], 1_000), 0);
    }

    #[test]
    fn refusals_of_all_threads_are_merged() {
        let (mut one, mut other) = (Refusals::default(), Refusals::default());
        for minute in 100..105 {
            let half = if minute % 2 == 0 { &mut one } else { &mut other };
            half.add("limit", 7, minute);
        }
        assert_eq!(
            (starved(&[&one], 105), starved(&[&other], 105), starved(&[&one, &other], 105)),
            (0, 0, 1)
        );
    }

    /// Keys that were tracked before the flood stay tracked.
    #[test]
    fn flood_of_keys_is_bounded() {
        let mut refusals = Refusals::default();
        for minute in 100..106 {
            refusals.add("limit", 7, minute);
            for number in 0..20_000 {
                refusals.add("limit", 1_000 + minute * 100_000 + number, minute);
            }
            assert!(refusals.keys.len() <= MAX_KEYS);
        }
        assert_eq!(starved(&[&refusals], 106), 1);
        refusals.add("limit", 1, 200);
        assert_eq!(refusals.keys.len(), 1, "keys without recent refusals are dropped");
    }
}
