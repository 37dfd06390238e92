//! Which keys come most, which are refused most, and which get nothing: in bounded room.
//!
//! Every thread notes what it decides in a part of its own; the parts are put together when somebody asks.
//! Counts are of the last five to ten minutes: what was busy yesterday is not.

mod by_hash;
mod counters;
pub mod sketch;
pub mod starved;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tollkeeper::decision::LimitDecision;
use tollkeeper::digest::{hex, sha256};
use tollkeeper::fingerprint::{self, Fingerprinter, Midstate};
use tollkeeper::{Key, Mode, Span, Time, random};

use self::sketch::Sketch;
use self::starved::{Refusals, Starved};

/// How many parts: with more threads than that, some share one.
const STRIPES: usize = 8;
/// How long counts are collected before they begin anew; those before are kept as long.
const MINUTES: u64 = 5;
/// The longest key that is kept as it is.
const WHOLE_KEY: usize = 256;
/// A key of a limit with a longer period is not called starved: it has had its share.
const LONGEST: Span = Span::from_secs(3_600);

/// What was noted.
#[derive(Debug)]
pub struct TopKeys {
    stripes: [Mutex<Stripe>; STRIPES],
    /// Under a secret of its own: nobody can make keys that are taken for each other.
    prints: Fingerprinter,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Stripe {
    /// Of this stretch of time, and of the one before.
    now: Stretch,
    before: Stretch,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct Stretch {
    number: u64,
    asked: Sketch,
    refused: Sketch,
}

/// Keys, those with the highest counts first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// When counting began, in seconds since the epoch.
    pub since: u64,
    /// By how often they were asked for.
    pub asked: Vec<Count>,
    /// By how often they were refused.
    pub refused: Vec<Count>,
}

/// How often a key came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The limit.
    pub limit: String,
    /// The values of its facts.
    pub key: Vec<Option<String>>,
    /// At least so often.
    pub count: u64,
    /// And at most so often more.
    pub error: u64,
}

impl Default for TopKeys {
    fn default() -> TopKeys {
        TopKeys { stripes: Default::default(), prints: Fingerprinter::new(&random::secret()) }
    }
}

impl TopKeys {
    /// Begins to note a decision that was charged, or would have been, on the part of this thread.
    #[inline]
    pub fn note(&self, time: Time, thread: usize) -> Note<'_> {
        let minute = time.as_micros() / 60_000_000;
        let mut stripe = lock(&self.stripes[thread % STRIPES]);
        stripe.turn(minute / MINUTES);
        Note { top_keys: self, stripe, minute }
    }

    /// What the hashes of a limit's keys begin with. Not with the period: a tier with another one is the same key
    /// here.
    pub fn family(&self, limit: &str) -> Midstate {
        self.prints.family(limit.as_bytes())
    }

    /// Stands for limit and values.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "half of it is enough for a sketch")]
    fn hash(&self, family: Midstate, key: Key<'_>) -> u64 {
        fingerprint::finish(key.values().fold(family, |before, value| self.prints.value(before, value)))
            as u64
    }

    /// The `most` busiest keys and the `most` that were refused.
    pub fn top(&self, most: usize) -> Top {
        self.top_at(most, minute())
    }

    fn top_at(&self, most: usize, minute: u64) -> Top {
        let stretch = minute / MINUTES;
        let (mut asked, mut refused) = (Sum::default(), Sum::default());
        for stripe in &self.stripes {
            let stripe = lock(stripe);
            for part in [&stripe.now, &stripe.before].into_iter().filter(|part| part.number + 1 >= stretch) {
                asked.add(&part.asked);
                refused.add(&part.refused);
            }
        }
        let since = stretch.saturating_sub(1) * MINUTES * 60;
        Top { since, asked: asked.top(most), refused: refused.top(most) }
    }

    /// How many keys of each limit get nothing.
    pub fn starved(&self) -> HashMap<Box<str>, u64> {
        self.starved_at(minute())
    }

    fn starved_at(&self, minute: u64) -> HashMap<Box<str>, u64> {
        let mut starved = Starved::new(minute);
        self.stripes.iter().for_each(|stripe| starved.add(&lock(stripe).refusals));
        starved.count()
    }
}

/// A decision that is being noted.
#[derive(Debug)]
pub struct Note<'a> {
    top_keys: &'a TopKeys,
    stripe: MutexGuard<'a, Stripe>,
    minute: u64,
}

impl Note<'_> {
    /// Notes what one limit said, whose keys begin with that [`TopKeys::family`].
    #[inline]
    pub fn add(&mut self, family: Midstate, answer: &LimitDecision<'_>) {
        let key = self.top_keys.hash(family, answer.key());
        self.stripe.now.asked.add(key, |thing| write(thing, answer));
        if !answer.allowed() && answer.rule().mode() == Mode::Enforce {
            self.add_refusal(key, answer);
        }
    }

    fn add_refusal(&mut self, key: u64, answer: &LimitDecision<'_>) {
        self.stripe.now.refused.add(key, |thing| write(thing, answer));
        if answer.key().period() <= LONGEST {
            self.stripe.refusals.add(answer.name(), key, self.minute);
        }
    }
}

impl Stripe {
    /// Begins anew when the stretch of time is another. A clock that goes back changes nothing.
    fn turn(&mut self, number: u64) {
        if number > self.now.number {
            let fresh = Stretch { number, ..Stretch::default() };
            self.before = std::mem::replace(&mut self.now, fresh);
        }
    }
}

/// Several sketches put together.
#[derive(Debug, Default)]
struct Sum {
    counts: HashMap<Vec<u8>, u64>,
    slack: u64,
}

impl Sum {
    fn add(&mut self, sketch: &Sketch) {
        self.slack += sketch.slack();
        for (key, count) in sketch.counts() {
            *self.counts.entry(key.to_vec()).or_default() += count;
        }
    }

    fn top(self, most: usize) -> Vec<Count> {
        let mut all: Vec<(Vec<u8>, u64)> = self.counts.into_iter().collect();
        all.sort_by(|(key, count), (other, than)| than.cmp(count).then_with(|| key.cmp(other)));
        all.truncate(most);
        all.into_iter().map(|(key, count)| Count::read(&key, count, self.slack)).collect()
    }
}

const ABSENT: u16 = u16::MAX;

/// Writes limit and values so that they can be read again.
fn write(out: &mut Vec<u8>, answer: &LimitDecision<'_>) {
    push(out, Some(answer.name()));
    answer.key().texts().for_each(|value| push(out, value));
    if out.len() > WHOLE_KEY {
        shorten(out, answer.key());
    }
}

fn push(out: &mut Vec<u8>, text: Option<&str>) {
    let len = text.map_or(ABSENT, |text| u16::try_from(text.len()).expect("a value has at most 1 KiB"));
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(text.unwrap_or_default().as_bytes());
}

/// Cuts long values, and keeps apart what begins alike.
#[cold]
fn shorten(out: &mut Vec<u8>, key: Key<'_>) {
    out.clear();
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
    /// Reads what [`write`] wrote.
    fn read(mut bytes: &[u8], count: u64, error: u64) -> Count {
        let mut next = || {
            let (len, rest) = bytes.split_first_chunk()?;
            let len = u16::from_le_bytes(*len);
            let (text, rest) = rest.split_at(if len == ABSENT { 0 } else { usize::from(len) });
            bytes = rest;
            Some((len != ABSENT).then(|| String::from_utf8_lossy(text).into_owned()))
        };
        let limit = next().flatten().expect("a limit has a name");
        Count { limit, key: std::iter::from_fn(next).collect(), count, error }
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

    /// The minute in which every test begins, not the first of a stretch.
    const START: u64 = 29_000_001;

    /// A limiter of three for each user and pair, whose clock begins there.
    fn limiter() -> (Limiter, ManualClock) {
        let hand = ManualClock::new(Time::from_micros(START * 60_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&hand));
        let limits = vec![
            Limit::new("user", Quota::per_hour(3)).by("user"),
            Limit::new("pair", Quota::per_day(30)).by("user").by("route"),
        ];
        (Limiter::embedded(Policy::new(limits).unwrap(), store), hand)
    }

    fn check(limiter: &Limiter, top_keys: &TopKeys, user: &str, thread: usize) {
        let facts = facts! { "user" => user, "route" => "/" };
        let decision = limiter.check(&facts).wait().unwrap();
        let mut note = top_keys.note(decision.time(), thread);
        decision.limits().for_each(|answer| note.add(top_keys.family(answer.name()), &answer));
    }

    fn of(counts: &[Count], limit: &str) -> Vec<(String, u64, u64)> {
        let named = counts.iter().filter(|count| count.limit == limit);
        named.map(|count| (count.key[0].clone().unwrap(), count.count, count.error)).collect()
    }

    #[test]
    fn the_busiest_and_the_most_refused_come_first_whatever_thread_saw_them() {
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
        assert_eq!(of(&top.asked, "user"), [name("alice", 30), name("bob", 10), name("carol", 1)]);
        assert_eq!(of(&top.refused, "user"), [name("alice", 27), name("bob", 7)]);
        assert_eq!(of(&top.refused, "pair"), [], "it refused nobody");
        assert_eq!(top.asked[0].key.len() + top.asked[1].key.len(), 3);
        assert_eq!(top_keys.top_at(2, START).asked.len(), 2);
    }

    #[test]
    fn many_thousand_keys_leave_the_busy_one_on_top_within_its_error() {
        let ((limiter, _), top_keys) = (limiter(), TopKeys::default());
        for turn in 0..20_000 {
            check(&limiter, &top_keys, &format!("user-{turn}"), turn);
            if turn % 20 == 0 {
                check(&limiter, &top_keys, "alice", turn);
            }
        }
        let top = top_keys.top_at(1, START).asked;
        assert_eq!(top[0].key[0].as_deref(), Some("alice"));
        assert!(top[0].count <= 1_000 && 1_000 <= top[0].count + top[0].error, "{top:?}");
        assert!(top[0].error <= 2 * 21_000 / 256, "{top:?}");
    }

    #[test]
    fn old_counts_are_forgotten() {
        let ((limiter, hand), top_keys) = (limiter(), TopKeys::default());
        check(&limiter, &top_keys, "alice", 0);
        hand.advance(Span::from_secs(60 * MINUTES));
        check(&limiter, &top_keys, "bob", 0);
        let stripe = lock(&top_keys.stripes[0]);
        assert_eq!((stripe.now.asked.counts().count(), stripe.before.asked.counts().count()), (2, 2));
        drop(stripe);
        hand.advance(Span::from_secs(60 * MINUTES));
        check(&limiter, &top_keys, "carol", 0);
        let stripe = lock(&top_keys.stripes[0]);
        let names: Vec<_> =
            stripe.before.asked.counts().map(|(key, _)| Count::read(key, 0, 0).key[0].clone()).collect();
        assert!(names.iter().all(|name| name.as_deref() == Some("bob")), "{names:?}");
    }

    #[test]
    fn keys_of_any_length_are_told_apart_and_take_little_room() {
        let ((limiter, _), top_keys) = (limiter(), TopKeys::default());
        let (long, longer) = ("ä".repeat(400), format!("{}b", "ä".repeat(400)));
        for user in [&long, &longer, &longer, "", "short"] {
            check(&limiter, &top_keys, user, 0);
        }
        let top = top_keys.top_at(10, START).asked;
        let users = of(&top, "user");
        assert_eq!(users.len(), 3, "{users:?}");
        assert_eq!(users[0].1, 2);
        assert!(users.iter().all(|(user, ..)| user.len() <= 80), "{users:?}");
    }

    #[test]
    fn who_is_refused_minute_after_minute_is_starved_by_limits_of_up_to_an_hour() {
        let ((limiter, hand), top_keys) = (limiter(), TopKeys::default());
        for _ in 0..5 {
            for _ in 0..10 {
                check(&limiter, &top_keys, "alice", 1);
            }
            check(&limiter, &top_keys, "bob", 1);
            hand.advance(Span::from_secs(60));
        }
        let starved = top_keys.starved_at(START + 5);
        assert_eq!(starved.get("user"), Some(&1), "{starved:?}: alice; bob was refused twice");
        assert_eq!(starved.get("pair"), None, "a day is long");
    }
}
