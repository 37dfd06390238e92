//! Tracks the busiest, the most refused and the starved keys, in bounded memory.
//!
//! Every thread records its decisions in a stripe of its own; the stripes are merged when the result is read. Counts
//! cover the last five to ten minutes, so that yesterday's busy keys do not show.

mod by_hash;
mod counters;
pub mod sketch;
pub mod starved;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::digest::{hex, sha256};
use tollkeeper::LimitDecision;
use tollkeeper::store::Key;
use tollkeeper::{Mode, Span, Time, random};
use tollkeeper_core::fingerprint::{self, Fingerprinter, Midstate};

use self::sketch::Sketch;
use self::starved::{Refusals, Starved};

/// The number of stripes; with more threads than that, some share one.
const STRIPES: usize = 8;
/// The length of a counting window, in minutes; the previous window is kept, too.
const MINUTES: u64 = 5;
/// The longest key that is stored unshortened, in bytes.
const MAX_KEY: usize = 256;
/// A refused key of a limit with a longer period is not starved: it has used its quota.
const MAX_STARVED_PERIOD: Span = Span::from_secs(3_600);

/// Counts checks and refusals by key.
#[derive(Debug)]
pub struct TopKeys {
    stripes: [Mutex<Stripe>; STRIPES],
    /// Hashes keys under a random secret, so that clients cannot construct collisions.
    prints: Fingerprinter,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Stripe {
    /// The current window and the previous one.
    now: Window,
    before: Window,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct Window {
    number: u64,
    checked: Sketch,
    refused: Sketch,
    would_refuse: Sketch,
}

/// The top keys, highest counts first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// When counting began, in seconds since the epoch.
    pub since: u64,
    /// By number of checks.
    pub busiest: Vec<Count>,
    /// By number of refusals.
    pub refused: Vec<Count>,
    /// By number of requests that limits in shadow mode would have refused.
    pub would_refuse: Vec<Count>,
}

/// The count of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The limit.
    pub limit: String,
    /// The values of its facts.
    pub key: Vec<Option<String>>,
    /// The lower bound of the count, such as 1,200.
    pub count: u64,
    /// The upper bound is `count + error`; 0 if the count is exact.
    pub error: u64,
    /// Whether `key` has the values themselves. Otherwise long ones are cut.
    pub whole: bool,
}

impl Default for TopKeys {
    fn default() -> TopKeys {
        TopKeys { stripes: Default::default(), prints: Fingerprinter::new(&random::secret()) }
    }
}

impl TopKeys {
    /// Starts to record a decision that was charged, or would have been, in the stripe of this thread.
    #[inline]
    pub fn note(&self, time: Time, thread: usize) -> Note<'_> {
        let minute = time.as_micros() / 60_000_000;
        let mut stripe = lock(&self.stripes[thread % STRIPES]);
        stripe.rotate(minute / MINUTES);
        Note { top_keys: self, stripe, minute }
    }

    /// The hash state that the hashes of a limit's keys start from. It excludes the period: a key that changes to a tier
    /// with another period stays the same key here.
    pub fn family(&self, limit: &str) -> Midstate {
        self.prints.family(limit.as_bytes())
    }

    /// The hash of limit and values.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "64 of the 128 bits are enough for a sketch")]
    fn hash(&self, family: Midstate, key: Key<'_>) -> u64 {
        fingerprint::finish(key.values().fold(family, |before, value| self.prints.value(before, value)))
            as u64
    }

    /// The `most` busiest and the `most` refused keys.
    pub fn top(&self, most: usize) -> Top {
        self.top_at(most, minute())
    }

    fn top_at(&self, most: usize, minute: u64) -> Top {
        let number = minute / MINUTES;
        let (mut checked, mut refused, mut would_refuse) = (Sum::default(), Sum::default(), Sum::default());
        for stripe in &self.stripes {
            let stripe = lock(stripe);
            let windows = [&stripe.now, &stripe.before].into_iter();
            for window in windows.filter(|window| window.number + 1 >= number) {
                checked.add(&window.checked);
                refused.add(&window.refused);
                would_refuse.add(&window.would_refuse);
            }
        }
        let since = number.saturating_sub(1) * MINUTES * 60;
        Top {
            since,
            busiest: checked.top(most),
            refused: refused.top(most),
            would_refuse: would_refuse.top(most),
        }
    }

    /// How many keys of each limit are starved: refused in each of the last five minutes.
    pub fn starved(&self) -> HashMap<Box<str>, u64> {
        self.starved_at(minute())
    }

    fn starved_at(&self, minute: u64) -> HashMap<Box<str>, u64> {
        let mut starved = Starved::new(minute);
        self.stripes.iter().for_each(|stripe| starved.add(&lock(stripe).refusals));
        starved.count()
    }
}

/// A decision that is being recorded.
#[derive(Debug)]
pub struct Note<'a> {
    top_keys: &'a TopKeys,
    stripe: MutexGuard<'a, Stripe>,
    minute: u64,
}

impl Note<'_> {
    /// Records the outcome of one limit, whose keys are hashed from this [`TopKeys::family`].
    #[inline]
    pub fn add(&mut self, family: Midstate, answer: &LimitDecision<'_>) {
        let key = self.top_keys.hash(family, answer.key());
        self.stripe.now.checked.add(key, |item| encode(item, answer));
        if !answer.allowed() {
            self.add_refusal(key, answer);
        }
    }

    fn add_refusal(&mut self, key: u64, answer: &LimitDecision<'_>) {
        if answer.rule().mode() != Mode::Enforce {
            return self.stripe.now.would_refuse.add(key, |item| encode(item, answer));
        }
        self.stripe.now.refused.add(key, |item| encode(item, answer));
        if answer.key().period() <= MAX_STARVED_PERIOD {
            self.stripe.refusals.add(answer.name(), key, self.minute);
        }
    }
}

impl Stripe {
    /// Starts a new window when its time has come. A clock that goes back changes nothing.
    fn rotate(&mut self, number: u64) {
        if number > self.now.number {
            let fresh = Window { number, ..Window::default() };
            self.before = std::mem::replace(&mut self.now, fresh);
        }
    }
}

/// The sum of several sketches.
#[derive(Debug, Default)]
struct Sum {
    counts: HashMap<Vec<u8>, u64>,
    error: u64,
}

impl Sum {
    fn add(&mut self, sketch: &Sketch) {
        self.error += sketch.max_error();
        for (key, count) in sketch.counts() {
            *self.counts.entry(key.to_vec()).or_default() += count;
        }
    }

    fn top(self, most: usize) -> Vec<Count> {
        let mut all: Vec<(Vec<u8>, u64)> = self.counts.into_iter().collect();
        all.sort_by(|(key, count), (other, than)| than.cmp(count).then_with(|| key.cmp(other)));
        all.truncate(most);
        all.into_iter().map(|(key, count)| Count::decode(&key, count, self.error)).collect()
    }
}

const ABSENT: u16 = u16::MAX;

/// Encodes limit and values, after a byte that says whether the values are whole; [`Count::decode`] is the inverse.
fn encode(out: &mut Vec<u8>, answer: &LimitDecision<'_>) {
    out.push(1);
    push(out, Some(answer.name()));
    answer.key().texts().for_each(|value| push(out, value));
    if out.len() > MAX_KEY {
        shorten(out, answer.key());
    }
}

fn push(out: &mut Vec<u8>, text: Option<&str>) {
    let len = text.map_or(ABSENT, |text| u16::try_from(text.len()).expect("a value has at most 1 KiB"));
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(text.unwrap_or_default().as_bytes());
}

/// Shortens long values, and adds a hash so that values with the same beginning stay distinct.
#[cold]
fn shorten(out: &mut Vec<u8>, key: Key<'_>) {
    out.clear();
    out.push(0);
    push(out, Some(key.limit()));
    for value in key.texts() {
        let short = value.map(|value| match value.char_indices().nth(24) {
            None => value.to_owned(),
            Some((cut, _)) => format!("{}…{}", &value[..cut], hex(&sha256(value.as_bytes())[..6])),
        });
        push(out, short.as_deref());
    }
}

impl Count {
    /// Decodes what [`encode`] wrote.
    fn decode(bytes: &[u8], count: u64, error: u64) -> Count {
        let (&whole, mut bytes) = bytes.split_first().expect("it begins with a flag");
        let mut next = || {
            let (len, rest) = bytes.split_first_chunk()?;
            let len = u16::from_le_bytes(*len);
            let (text, rest) = rest.split_at(if len == ABSENT { 0 } else { usize::from(len) });
            bytes = rest;
            Some((len != ABSENT).then(|| String::from_utf8_lossy(text).into_owned()))
        };
        let limit = next().flatten().expect("a limit has a name");
        Count { limit, key: std::iter::from_fn(next).collect(), count, error, whole: whole == 1 }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn minute() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 60)
}

#[cfg(test)]
mod tests {
    use tollkeeper::{Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota, Time, facts};

    use super::*;

    /// The minute in which every test starts; it is not the first of its window.
    const START: u64 = 29_000_001;

    /// A limiter of 3 an hour by user and 30 a day by user and route, whose clock starts at [`START`].
    fn limiter() -> (Limiter, ManualClock) {
        let clock = ManualClock::new(Time::from_micros(START * 60_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        let limits = vec![
            Limit::new("user", Quota::per_hour(3)).by("user"),
            Limit::new("pair", Quota::per_day(30)).by("user").by("route"),
        ];
        (Limiter::embedded(Policy::new(limits).unwrap(), store), clock)
    }

    fn check(limiter: &Limiter, top_keys: &TopKeys, user: &str, thread: usize) {
        let facts = facts! { "user" => user, "route" => "/" };
        let decision = limiter.check(&facts).wait().unwrap();
        let mut note = top_keys.note(decision.time(), thread);
        decision.limits().for_each(|answer| note.add(top_keys.family(answer.name()), &answer));
    }

    fn counts_of(counts: &[Count], limit: &str) -> Vec<(String, u64, u64)> {
        let named = counts.iter().filter(|count| count.limit == limit);
        named.map(|count| (count.key[0].clone().unwrap(), count.count, count.error)).collect()
    }

    #[test]
    fn top_keys_are_merged_from_all_threads() {
        let ((limiter, _), top_keys) = (limiter(), TopKeys::default());
        for turn in 0..30 {
            check(&limiter, &top_keys, "alice", turn);
            if turn % 3 == 0 {
                check(&limiter, &top_keys, "bob", turn);
            }
        }
        check(&limiter, &top_keys, "carol", 0);
        let name = |name: &str, count| (name.to_owned(), count, 0);
        let top = top_keys.top_at(10, START);
        assert_eq!(counts_of(&top.busiest, "user"), [name("alice", 30), name("bob", 10), name("carol", 1)]);
        assert_eq!(counts_of(&top.refused, "user"), [name("alice", 27), name("bob", 7)]);
        assert_eq!(counts_of(&top.refused, "pair"), [], "it refused nothing");
        assert_eq!(top.busiest[0].key.len() + top.busiest[1].key.len(), 3);
        assert_eq!(top_keys.top_at(2, START).busiest.len(), 2);
    }

    #[test]
    fn busiest_key_stays_on_top_among_20_000_keys() {
        let ((limiter, _), top_keys) = (limiter(), TopKeys::default());
        for turn in 0..20_000 {
            check(&limiter, &top_keys, &format!("user-{turn}"), turn);
            if turn % 20 == 0 {
                check(&limiter, &top_keys, "alice", turn);
            }
        }
        let top = top_keys.top_at(1, START).busiest;
        assert_eq!(top[0].key[0].as_deref(), Some("alice"));
        assert!(top[0].count <= 1_000 && 1_000 <= top[0].count + top[0].error, "{top:?}");
        assert!(top[0].error <= 2 * 21_000 / 256, "{top:?}");
    }

    #[test]
    fn old_counts_are_forgotten() {
        let ((limiter, clock), top_keys) = (limiter(), TopKeys::default());
        check(&limiter, &top_keys, "alice", 0);
        clock.advance(Span::from_secs(60 * MINUTES));
        check(&limiter, &top_keys, "bob", 0);
        let stripe = lock(&top_keys.stripes[0]);
        assert_eq!((stripe.now.checked.counts().count(), stripe.before.checked.counts().count()), (2, 2));
        drop(stripe);
        clock.advance(Span::from_secs(60 * MINUTES));
        check(&limiter, &top_keys, "carol", 0);
        let stripe = lock(&top_keys.stripes[0]);
        let names: Vec<_> =
            stripe.before.checked.counts().map(|(key, _)| Count::decode(key, 0, 0).key[0].clone()).collect();
        assert!(names.iter().all(|name| name.as_deref() == Some("bob")), "{names:?}");
    }

    #[test]
    fn long_keys_are_shortened_and_stay_distinct() {
        let ((limiter, _), top_keys) = (limiter(), TopKeys::default());
        let (long, longer) = ("ä".repeat(400), format!("{}b", "ä".repeat(400)));
        for user in [&long, &longer, &longer, "", "short"] {
            check(&limiter, &top_keys, user, 0);
        }
        let top = top_keys.top_at(10, START).busiest;
        let users = counts_of(&top, "user");
        assert_eq!(users.len(), 3, "{users:?}");
        assert_eq!(users[0].1, 2);
        assert!(users.iter().all(|(user, ..)| user.len() <= 80), "{users:?}");
        assert!(top.iter().all(|count| count.whole == (count.key[0].as_deref() == Some("short"))), "{top:?}");
    }

    #[test]
    fn key_refused_every_minute_is_starved() {
        let ((limiter, clock), top_keys) = (limiter(), TopKeys::default());
        for _ in 0..5 {
            for _ in 0..10 {
                check(&limiter, &top_keys, "alice", 1);
            }
            check(&limiter, &top_keys, "bob", 1);
            clock.advance(Span::from_secs(60));
        }
        let starved = top_keys.starved_at(START + 5);
        assert_eq!(starved.get("user"), Some(&1), "{starved:?}: alice; bob was refused in two minutes only");
        assert_eq!(starved.get("pair"), None, "its period is longer than an hour");
    }
}
