//! Overrides of single keys at run time: `limiter.override_for("per-user", "alice").quota(…).set()`.
//!
//! The limiter keeps the list of all overrides, applies it to every policy that is put in force, and removes those that
//! end. A memory store with a snapshot saves the list together with the counts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use tollkeeper_core::policy::{InvalidOverride, Override};
use tollkeeper_core::{Allowance, Policy, Quota, Secret, Span, Time, Value};

use crate::limiter::{Backend, Inner, Limiter};
use crate::random;
use crate::store::memory::SavedOverrides;

/// The most overrides of a limiter.
pub const MAX_OVERRIDES: usize = 100_000;
/// The longest note, in bytes.
pub(crate) const MAX_NOTE: usize = 1_024;
/// The longest time between two looks at the clock while there are overrides that end.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The override of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOverride {
    /// The limit.
    pub limit: String,
    /// The key, as [`Policy::override_key`] makes it of a value.
    pub key: String,
    /// What the key is granted.
    pub granted: Override,
}

/// Why an override was not set.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverrideError {
    /// Limit, value or quota are invalid.
    Invalid(InvalidOverride),
    /// It would have ended before now.
    Ended {
        /// The requested end, in seconds since the epoch.
        until: u64,
    },
    /// The note is longer than 1 KiB.
    LongNote,
    /// There are [`MAX_OVERRIDES`] already.
    Full,
}

impl fmt::Display for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OverrideError::Invalid(invalid) => invalid.fmt(f),
            OverrideError::Ended { until } => {
                write!(f, "`until` {} is in the past", tollkeeper_core::policy::UtcTime(*until))
            }
            OverrideError::LongNote => write!(f, "a note has at most {MAX_NOTE} bytes"),
            OverrideError::Full => write!(f, "there are {MAX_OVERRIDES} overrides already: remove some"),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for OverrideError {}

impl From<InvalidOverride> for OverrideError {
    fn from(invalid: InvalidOverride) -> OverrideError {
        OverrideError::Invalid(invalid)
    }
}

/// An override that is about to be set: see [`Limiter::override_for`].
#[derive(Debug)]
#[must_use = "nothing is changed before `set` or `remove`"]
pub struct OverrideFor<'l> {
    limiter: &'l Limiter,
    limit: String,
    value: String,
    allowance: Allowance,
    until: Option<u64>,
    note: Option<String>,
}

impl OverrideFor<'_> {
    /// Grants this quota instead of the limit's: `Quota::per_minute(500).burst(50)`, or `Quota::slots(5)` for a
    /// concurrency limit.
    pub fn quota(self, quota: Quota) -> Self {
        OverrideFor { allowance: quota.into(), ..self }
    }

    /// Refuses every request. This is the default.
    pub fn blocked(self) -> Self {
        OverrideFor { allowance: Allowance::Nothing, ..self }
    }

    /// Admits every request.
    pub fn unlimited(self) -> Self {
        OverrideFor { allowance: Allowance::Unlimited, ..self }
    }

    /// Ends it at this time, in seconds since the epoch.
    pub fn until(self, unix_seconds: u64) -> Self {
        OverrideFor { until: Some(unix_seconds), ..self }
    }

    /// Says why it is there.
    pub fn note(self, note: impl Into<String>) -> Self {
        OverrideFor { note: Some(note.into()), ..self }
    }

    /// Puts it in force for every request that starts later. The counts of the key are kept if the period stays the
    /// same.
    pub fn set(self) -> Result<KeyOverride, OverrideError> {
        let key = self.limiter.override_key(&self.limit, Value::from(&self.value))?;
        let granted = Override { allowance: self.allowance, until: self.until, note: self.note };
        self.limiter.set_override(KeyOverride { limit: self.limit, key, granted })
    }

    /// Removes the override of this key; false if it had none.
    pub fn remove(self) -> Result<bool, OverrideError> {
        let key = self.limiter.override_key(&self.limit, Value::from(&self.value))?;
        Ok(self.limiter.remove_override(&self.limit, &key))
    }
}

impl Limiter {
    /// Starts an override of the key that this value makes under a limit that is keyed by one fact. It takes
    /// precedence over the limit's own overrides and tiers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollkeeper::{Limit, Limiter, Quota, facts};
    ///
    /// let limit = Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
    /// let limiter = Limiter::builder().limit(limit).build()?;
    /// limiter.override_for("per-user", "alice").quota(Quota::per_minute(500).burst(50)).note("ticket 4711").set()?;
    /// limiter.override_for("per-user", "mallory").blocked().set()?;
    ///
    /// let remaining = |user| limiter.check(&facts! { "user" => user }).wait().map(|decision| {
    ///     decision.limit("per-user").unwrap().outcome().remaining
    /// });
    /// assert_eq!((remaining("alice")?, remaining("bob")?), (49, 19));
    /// assert!(!limiter.check(&facts! { "user" => "mallory" }).await?.allowed());
    /// assert!(limiter.override_for("per-user", "mallory").remove()?);
    /// assert!(limiter.check(&facts! { "user" => "mallory" }).await?.allowed());
    /// # Ok(()) }
    /// ```
    ///
    /// On Redis, [`SharedOverrides`](crate::store::redis::SharedOverrides) sets overrides for all nodes.
    pub fn override_for(&self, limit: impl Into<String>, value: impl Into<String>) -> OverrideFor<'_> {
        OverrideFor {
            limiter: self,
            limit: limit.into(),
            value: value.into(),
            allowance: Allowance::Nothing,
            until: None,
            note: None,
        }
    }

    /// All overrides that have not ended, sorted by limit and key. One whose limit is not active, or has another
    /// algorithm now, is listed and not in force.
    pub fn overrides(&self) -> Vec<KeyOverride> {
        self.inner.overrides.lock().all()
    }

    /// How many overrides there are.
    pub fn override_count(&self) -> usize {
        self.inner.overrides.lock().entries.len()
    }

    /// The key of a value of a limit's fact, as overrides name it. For operators, who may pass hashed values.
    pub fn override_key(&self, limit: &str, value: Value<'_>) -> Result<String, InvalidOverride> {
        let policy = self.policy();
        policy.override_key(limit, value)
    }

    /// Checks an override against the policy in force and the clock, without setting it.
    pub fn check_override(&self, wanted: &KeyOverride) -> Result<(), OverrideError> {
        let KeyOverride { limit, key, granted } = wanted;
        if let Some(until) = granted.until.filter(|until| end(*until) <= self.clock().now()) {
            return Err(OverrideError::Ended { until });
        }
        if granted.note.as_ref().is_some_and(|note| note.len() > MAX_NOTE) {
            return Err(OverrideError::LongNote);
        }
        self.policy().with_override(limit, key, Some(granted), Secret([0; 16]))?;
        Ok(())
    }

    /// Sets the override of a key.
    pub fn set_override(&self, wanted: KeyOverride) -> Result<KeyOverride, OverrideError> {
        self.check_override(&wanted)?;
        let mut book = self.inner.overrides.lock();
        let id = (wanted.limit.clone(), wanted.key.clone());
        if book.entries.len() >= MAX_OVERRIDES && !book.entries.contains_key(&id) {
            return Err(OverrideError::Full);
        }
        self.change(&mut book, vec![(id.0, id.1, Some(wanted.granted.clone()))]);
        Ok(wanted)
    }

    /// Removes the override of a key; false if it had none.
    pub fn remove_override(&self, limit: &str, key: &str) -> bool {
        let mut book = self.inner.overrides.lock();
        let id = (limit.to_owned(), key.to_owned());
        let is_known = book.entries.contains_key(&id);
        if is_known {
            self.change(&mut book, vec![(id.0, id.1, None)]);
        }
        is_known
    }

    /// Applies changes that another node has made, all in one step: limit, key, and what is granted, or `None` for a
    /// removal.
    pub fn apply_overrides(&self, changes: Vec<(String, String, Option<Override>)>) {
        self.change(&mut self.inner.overrides.lock(), changes);
    }

    /// Replaces all overrides in one step.
    pub fn replace_overrides(&self, all: Vec<KeyOverride>) {
        let mut book = self.inner.overrides.lock();
        let now = self.clock().now();
        book.entries = all.into_iter().map(|it| ((it.limit, it.key), it.granted)).collect();
        book.entries.retain(|_, granted| granted.until.is_none_or(|until| end(until) > now));
        self.inner.policy.replace(|policy| book.applied(policy.without_overrides()));
        self.keep(&mut book);
    }

    /// Puts a policy in force, with the overrides on top.
    pub(crate) fn install(&self, policy: impl FnOnce(&Policy) -> Policy) -> Arc<Policy> {
        let book = self.inner.overrides.lock();
        self.inner.policy.replace(|last| book.applied(policy(last).without_overrides()))
    }

    fn change(&self, book: &mut Book, changes: Vec<(String, String, Option<Override>)>) {
        self.inner.policy.replace(|policy| {
            let mut policy = policy.clone();
            for (limit, key, granted) in &changes {
                // An override that does not fit the policy in force is kept for the next one. Until then the key has
                // none: the one it had is no longer listed.
                if policy.set_override(limit, key, granted.as_ref(), book.secret).is_err() {
                    let _ = policy.set_override(limit, key, None, book.secret);
                }
            }
            policy
        });
        for (limit, key, granted) in changes {
            match granted {
                Some(granted) => drop(book.entries.insert((limit, key), granted)),
                None => drop(book.entries.remove(&(limit, key))),
            }
        }
        self.keep(book);
    }

    /// Makes sure that overrides that end do.
    fn keep(&self, book: &mut Book) {
        if let Some(watcher) = &book.watcher {
            watcher.unpark();
        } else if book.entries.values().any(|granted| granted.until.is_some()) {
            let inner = Arc::downgrade(&self.inner);
            let watch = std::thread::Builder::new().name("tollkeeper-overrides".to_owned());
            // Without the thread, which only fails to start if the system has none left, overrides do not end.
            book.watcher =
                watch.spawn(move || watch_ends(&inner)).ok().map(|started| started.thread().clone());
        }
    }

    /// Removes the overrides that have ended; the end of the next one.
    fn end_overrides(&self, book: &mut Book) -> Option<Time> {
        let now = self.clock().now();
        let ended: Vec<_> = book
            .entries
            .iter()
            .filter(|(_, granted)| granted.until.is_some_and(|until| end(until) <= now))
            .map(|((limit, key), _)| (limit.clone(), key.clone(), None))
            .collect();
        if !ended.is_empty() {
            self.change(book, ended);
        }
        book.entries.values().filter_map(|granted| granted.until).min().map(end)
    }

    /// Loads the overrides that a memory store has saved, and saves them with its counts from now on.
    pub(crate) fn restore_overrides(&self) {
        let Backend::Memory(store) = &self.inner.backend else { return };
        if let Some(all) = store.overrides().and_then(|bytes| decode(&bytes)) {
            self.replace_overrides(all);
        }
        store.save_overrides(Arc::clone(&self.inner.overrides) as _);
    }
}

/// Removes overrides when they end, until none is left that does, or the limiter is dropped.
fn watch_ends(inner: &Weak<Inner>) {
    loop {
        let Some(limiter) = inner.upgrade().map(|inner| Limiter { inner }) else { return };
        let mut book = limiter.inner.overrides.lock();
        let Some(next) = limiter.end_overrides(&mut book) else {
            book.watcher = None;
            return;
        };
        drop(book);
        let wait = Duration::from(next.since(limiter.clock().now())).min(LONGEST_WAIT);
        // While the thread waits, it does not keep the limiter alive.
        drop(limiter);
        std::thread::park_timeout(wait);
    }
}

/// The list of overrides.
#[derive(Debug)]
pub(crate) struct OverrideBook(Mutex<Book>);

#[derive(Debug)]
struct Book {
    entries: BTreeMap<(String, String), Override>,
    secret: Secret,
    /// The thread that removes overrides that end, while there are any.
    watcher: Option<Thread>,
}

impl Default for OverrideBook {
    fn default() -> OverrideBook {
        let book = Book { entries: BTreeMap::new(), secret: random::secret(), watcher: None };
        OverrideBook(Mutex::new(book))
    }
}

impl SavedOverrides for OverrideBook {
    fn to_bytes(&self) -> Vec<u8> {
        let all = self.lock().all();
        encode(&all)
    }
}

impl OverrideBook {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn all(&self) -> Vec<KeyOverride> {
        let entry = |((limit, key), granted): (&(String, String), &Override)| KeyOverride {
            limit: limit.clone(),
            key: key.clone(),
            granted: granted.clone(),
        };
        self.entries.iter().map(entry).collect()
    }

    /// A policy without overrides, with all of these.
    fn applied(&self, mut policy: Policy) -> Policy {
        for ((limit, key), granted) in &self.entries {
            // An override that does not fit this policy is kept for the next one.
            let _ = policy.set_override(limit, key, Some(granted), self.secret);
        }
        policy
    }
}

fn end(until: u64) -> Time {
    Time::from_micros(until.saturating_mul(1_000_000))
}

/// An override as one line of text: `rate 500 60000000 50 1795564800 a note`; `-` where there is no number.
pub(crate) fn to_line(granted: &Override) -> String {
    let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    let quota = match granted.allowance {
        Allowance::Nothing => "blocked - - -".to_owned(),
        Allowance::Quota(quota) => match quota.period() {
            Some(period) => {
                let burst = number(quota.explicit_burst());
                format!("rate {} {} {burst}", quota.count(), period.as_micros())
            }
            None => format!("slots {} - -", quota.count()),
        },
        _ => "unlimited - - -".to_owned(),
    };
    format!("{quota} {} {}", number(granted.until), granted.note.as_deref().unwrap_or_default())
}

/// Reads the text of [`to_line`]; `None` if it is not one.
pub(crate) fn from_line(line: &str) -> Option<Override> {
    let mut words = line.splitn(6, ' ');
    let kind = words.next()?;
    let mut number = || match words.next()? {
        "-" => Some(None),
        digits => digits.parse::<u64>().ok().map(Some),
    };
    let (count, period, burst, until) = (number()?, number()?, number()?, number()?);
    let allowance = match (kind, count, period) {
        ("rate", Some(count), Some(period)) => {
            Quota::every(count, Span::from_micros(period)).with_burst(burst).into()
        }
        ("slots", Some(count), None) => Quota::slots(count).into(),
        ("blocked", None, None) => Allowance::Nothing,
        ("unlimited", None, None) => Allowance::Unlimited,
        _ => return None,
    };
    let note = words.next().filter(|note| !note.is_empty()).map(str::to_owned);
    Some(Override { allowance, until, note })
}

/// The overrides as bytes, for the snapshot of a store: the length and text of each limit, key and line.
fn encode(all: &[KeyOverride]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for KeyOverride { limit, key, granted } in all {
        for text in [limit, key, &to_line(granted)] {
            bytes.extend_from_slice(&u32::try_from(text.len()).expect("a few KiB").to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Option<Vec<KeyOverride>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let mut text = || {
            let (len, rest) = bytes.split_first_chunk()?;
            let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
            let (text, rest) = rest.split_at_checked(len)?;
            bytes = rest;
            Some(std::str::from_utf8(text).ok()?.to_owned())
        };
        let (limit, key, line) = (text()?, text()?, text()?);
        all.push(KeyOverride { limit, key, granted: from_line(&line)? });
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<KeyOverride> {
        let quota = Quota::per_minute(500);
        let samples = [
            (quota.burst(50).into(), Some(1_795_564_800), Some("ticket 4711: a\nnote")),
            (quota.into(), None, None),
            (Quota::slots(9).into(), None, Some("-")),
            (Allowance::Nothing, Some(7), None),
            (Allowance::Unlimited, None, None),
        ];
        let sample = |(index, (allowance, until, note)): (usize, (Allowance, Option<u64>, Option<&str>))| {
            let granted = Override { allowance, until, note: note.map(str::to_owned) };
            KeyOverride { limit: "per-user".to_owned(), key: format!("user {index}\0"), granted }
        };
        samples.into_iter().enumerate().map(sample).collect()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(decode(&encode(&samples())), Some(samples()));
        assert_eq!(decode(&[]), Some(Vec::new()));
        let bytes = encode(&samples());
        for cut in 1..bytes.len() {
            let cut = decode(&bytes[..cut]);
            assert!(cut.is_none_or(|some| some.len() < samples().len()), "a part is never all of them");
        }
    }

    #[test]
    fn unknown_lines_are_rejected() {
        for line in [
            "",
            "rate",
            "rate 5 - - - ",
            "slots - - - - ",
            "other - - - - ",
            "rate x 60 - - ",
            "blocked 5 - - - ",
        ] {
            assert_eq!(from_line(line), None, "{line}");
        }
    }
}
