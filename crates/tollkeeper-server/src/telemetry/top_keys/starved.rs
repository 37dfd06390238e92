//! Keys that do not get through: refused at least once in each of the last five minutes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::by_hash::ByHash;

/// How many minutes in a row make a key a starved one.
const MINUTES: u32 = 5;
/// How many keys are watched at a time; more than that are not.
const ROOM: usize = 8_192;

/// When each key was refused, by the minute.
#[derive(Debug, Default)]
pub struct Refusals {
    keys: ByHash<Refused>,
    /// The minute in which there was last a look for keys that can be forgotten.
    swept: u64,
}

#[derive(Clone, Debug)]
struct Refused {
    limit: Box<str>,
    /// The last minute with a refusal.
    last: u64,
    /// Bit `n` says whether there was one `n` minutes before that.
    minutes: u8,
}

impl Refusals {
    /// A key, by its hash, was refused in this minute.
    pub fn add(&mut self, limit: &str, key: u64, minute: u64) {
        if self.keys.len() >= ROOM && self.swept != minute {
            self.swept = minute;
            // Who was not refused a minute ago has to begin anew.
            self.keys.retain(|_, refused| refused.last + 1 >= minute);
        }
        let full = self.keys.len() >= ROOM;
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

/// What several threads saw, put together in one minute.
#[derive(Debug)]
pub struct Starved {
    minute: u64,
    keys: ByHash<(Box<str>, u32)>,
}

impl Starved {
    /// Nothing seen yet.
    pub fn new(minute: u64) -> Starved {
        Starved { minute, keys: ByHash::default() }
    }

    /// Adds what one thread saw.
    pub fn add(&mut self, seen: &Refusals) {
        for (key, refused) in &seen.keys {
            // Bit 0 is this minute, which is not over.
            let since = u32::try_from(self.minute.saturating_sub(refused.last)).unwrap_or(u32::MAX);
            let minutes = u32::from(refused.minutes).checked_shl(since).unwrap_or(0);
            if minutes & WHOLE != 0 {
                self.keys.entry(*key).or_insert_with(|| (refused.limit.clone(), 0)).1 |= minutes;
            }
        }
    }

    /// How many keys of each limit are starved.
    pub fn count(self) -> HashMap<Box<str>, u64> {
        let mut starved: HashMap<Box<str>, u64> = HashMap::new();
        for (limit, _) in self.keys.into_values().filter(|(_, minutes)| minutes & WHOLE == WHOLE) {
            *starved.entry(limit).or_default() += 1;
        }
        starved
    }
}

/// The minutes that are over.
const WHOLE: u32 = ((1 << MINUTES) - 1) << 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn starved(seen: &[&Refusals], minute: u64) -> u64 {
        let mut starved = Starved::new(minute);
        seen.iter().for_each(|seen| starved.add(seen));
        starved.count().get("limit").copied().unwrap_or(0)
    }

    #[test]
    fn five_whole_minutes_in_a_row_and_not_one_less() {
        let mut refusals = Refusals::default();
        for minute in 100..105 {
            assert_eq!(starved(&[&refusals], minute), 0, "{minute}");
            refusals.add("limit", 7, minute);
            refusals.add("limit", 7, minute);
        }
        assert_eq!(starved(&[&refusals], 104), 0, "the fifth is not over");
        assert_eq!(starved(&[&refusals], 105), 1);
        assert_eq!(starved(&[&refusals], 106), 0, "a minute without");
        refusals.add("limit", 7, 106);
        for minute in 107..111 {
            assert_eq!(starved(&[&refusals], minute), 0, "{minute}");
            refusals.add("limit", 7, minute);
        }
        assert_eq!(starved(&[&refusals], 111), 1);
        assert_eq!(starved(&[&refusals], 1_000), 0);
    }

    #[test]
    fn what_threads_saw_apart_counts_together_and_once() {
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

    #[test]
    fn a_flood_of_keys_is_bounded_and_leaves_those_watched_before_it() {
        let mut refusals = Refusals::default();
        for minute in 100..106 {
            refusals.add("limit", 7, minute);
            for number in 0..20_000 {
                refusals.add("limit", 1_000 + minute * 100_000 + number, minute);
            }
            assert!(refusals.keys.len() <= ROOM);
        }
        assert_eq!(starved(&[&refusals], 106), 1);
        refusals.add("limit", 1, 200);
        assert_eq!(refusals.keys.len(), 1, "what has gone quiet makes room");
    }
}
