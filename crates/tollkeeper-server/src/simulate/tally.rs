//! What one limit of a world asked and refused: counts, keys, times, the worst keys.

use std::collections::HashMap;

use tollkeeper::LimitDecision;
use tollkeeper::facts::DeclaredFacts;
use tollkeeper::store::Key;
use tollkeeper::{Algorithm, Mode, Retry, Rule, Span};
use tollkeeper_core::fingerprint::{self, Fingerprinter, Midstate};
use tollkeeper_core::siphash::Secret;
use tollkeeper_engine::api::redact::Redactor;

use super::delays::{DelaySummary, Delays};
use super::distinct::{Distinct, KeyCount};
use super::time::SECOND;
use super::timeline::Timeline;
use crate::telemetry::top_keys::sketch::Sketch;

/// Refusals of more keys than this are forgotten when their keys are not among the most refused.
const MOST_REFUSALS: usize = 4_096;

/// How much is recorded about a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    Full,
    /// Only counts and refused keys, for worlds that are compared.
    Counts,
}

/// What one limit asked and refused.
#[derive(Debug)]
pub struct Tally {
    asked: u64,
    refused: u64,
    refused_keys: Distinct,
    longest_wait: Span,
    /// Whether a refusal was one that no waiting resolves.
    refused_for_good: bool,
    /// How many decisions were made by a state that several keys share.
    shared: u64,
    prints: Fingerprinter,
    family: Midstate,
    details: Option<Box<Details>>,
}

#[derive(Debug, Default)]
struct Details {
    keys: Distinct,
    busiest: Sketch,
    most_refused: Sketch,
    /// The second of the first and of the last refusal of a key.
    refusals: HashMap<u64, (u64, u64)>,
    timeline: Timeline,
    delays: Delays,
}

/// The result of a limit.
#[derive(Clone, Debug)]
pub struct LimitResult {
    /// Its name.
    pub name: String,
    /// Whether it refuses or only would.
    pub mode: Mode,
    /// Its algorithm.
    pub algorithm: Algorithm,
    /// How many requests it applied to.
    pub asked: u64,
    /// How many it refused, or would have.
    pub refused: u64,
    /// Its keys.
    pub keys: KeyCount,
    /// The keys that it refused at least once.
    pub refused_keys: KeyCount,
    /// The longest wait that a refusal reported.
    pub longest_wait: Span,
    /// Whether a refusal was one that no waiting resolves.
    pub refused_for_good: bool,
    /// How many decisions were made by a state that several keys share, because there were too many keys.
    pub shared: u64,
    /// The most refused keys, then the busiest ones.
    pub top: Vec<TopKey>,
    /// Its counts over time.
    pub timeline: Timeline,
    /// The delays of a leaky bucket.
    pub delay: Option<DelaySummary>,
}

impl LimitResult {
    /// The part of what was asked that was refused, from 0 to 1.
    pub fn share(&self) -> f64 {
        if self.asked == 0 { 0.0 } else { self.refused as f64 / self.asked as f64 }
    }
}

/// A key among the most refused or busiest ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopKey {
    /// The values of its facts; hashed ones as 12 digits.
    pub key: Vec<Option<String>>,
    /// How many requests it sent.
    pub asked: u64,
    /// How many of them were refused.
    pub refused: u64,
    /// The second of its first and of its last refusal.
    pub refusals: Option<(u64, u64)>,
    /// By how much `asked` and `refused` may be too low.
    pub error: u64,
}

impl Tally {
    /// An empty tally of a limit.
    pub fn new(rule: &Rule, detail: Detail) -> Tally {
        // The secret is fixed: the same log gives the same report.
        let prints = Fingerprinter::new(&Secret(*b"tollkeeper's log"));
        let details = (detail == Detail::Full).then(Box::default);
        Tally {
            asked: 0,
            refused: 0,
            refused_keys: Distinct::default(),
            longest_wait: Span::ZERO,
            refused_for_good: false,
            shared: 0,
            family: prints.family(rule.name().as_bytes()),
            prints,
            details,
        }
    }

    /// Counts a decision of the limit.
    #[inline]
    pub fn add(&mut self, limit: &LimitDecision<'_>) {
        self.asked += 1;
        let is_refused = !limit.allowed();
        if !is_refused && self.details.is_none() {
            return;
        }
        let hash = self.hash(limit.key());
        if is_refused {
            self.add_refusal(hash, limit);
        }
        let Some(details) = &mut self.details else { return };
        let second = limit.time().as_micros() / SECOND;
        details.keys.add(hash);
        details.busiest.add(hash, |item| encode(item, hash, limit.key()));
        details.timeline.add(second, is_refused);
        if is_refused {
            details.add_refusal(hash, second, limit.key());
        } else if limit.rule().algorithm() == Algorithm::LeakyBucket {
            details.delays.add(limit.outcome().delay.as_micros());
        }
    }

    fn add_refusal(&mut self, hash: u64, limit: &LimitDecision<'_>) {
        self.refused += 1;
        self.refused_keys.add(hash);
        let outcome = limit.outcome();
        self.shared += u64::from(outcome.overflow);
        match outcome.retry {
            Some(Retry::After(wait)) => self.longest_wait = self.longest_wait.max(wait),
            Some(Retry::Never) => self.refused_for_good = true,
            None => {}
        }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "64 of the 128 bits are enough to tell keys apart")]
    fn hash(&self, key: Key<'_>) -> u64 {
        fingerprint::finish(key.values().fold(self.family, |before, value| self.prints.value(before, value)))
            as u64
    }

    /// The result, with the `most` top keys.
    pub fn finish(&self, rule: &Rule, declared: &DeclaredFacts, most: usize) -> LimitResult {
        let details = self.details.as_deref();
        LimitResult {
            name: rule.name().to_owned(),
            mode: rule.mode(),
            algorithm: rule.algorithm(),
            asked: self.asked,
            refused: self.refused,
            keys: details.map(|details| details.keys.count()).unwrap_or_default(),
            refused_keys: self.refused_keys.count(),
            longest_wait: self.longest_wait,
            refused_for_good: self.refused_for_good,
            shared: self.shared,
            top: details.map(|details| details.top(rule, declared, most)).unwrap_or_default(),
            timeline: details.map(|details| details.timeline.clone()).unwrap_or_default(),
            delay: details.and_then(|details| details.delays.summary()),
        }
    }
}

impl Details {
    fn add_refusal(&mut self, hash: u64, second: u64, key: Key<'_>) {
        self.most_refused.add(hash, |item| encode(item, hash, key));
        self.refusals.entry(hash).or_insert((second, second)).1 = second;
        if self.refusals.len() > MOST_REFUSALS {
            let kept: Vec<u64> = self.most_refused.counts().map(|(item, _)| decode(item).0).collect();
            self.refusals.retain(|hash, _| kept.contains(hash));
        }
    }

    fn top(&self, rule: &Rule, declared: &DeclaredFacts, most: usize) -> Vec<TopKey> {
        let mut keys: HashMap<u64, (&[u8], u64, u64)> = HashMap::new();
        for (item, asked) in self.busiest.counts() {
            keys.insert(decode(item).0, (item, asked, 0));
        }
        for (item, refused) in self.most_refused.counts() {
            let (_, asked, known) = keys.entry(decode(item).0).or_insert((item, 0, 0));
            // What was refused was asked.
            (*asked, *known) = ((*asked).max(refused), refused);
        }
        let mut keys: Vec<_> = keys.into_iter().collect();
        // The bytes of the key break ties, so that the order is always the same.
        keys.sort_by(|(_, (item, asked, refused)), (_, (other, asked_too, refused_too))| {
            refused_too.cmp(refused).then(asked_too.cmp(asked)).then_with(|| item.cmp(other))
        });
        keys.truncate(most);
        let redactor = Redactor::default();
        let error = self.busiest.max_error().max(self.most_refused.max_error());
        let shown = |values: Vec<Option<String>>| {
            let shown = |fact: &str, value: String| redactor.redact(declared, fact, &value).into_owned();
            let values = values.into_iter().zip(rule.by());
            values.map(|(value, fact)| value.map(|value| shown(fact, value))).collect()
        };
        let top = keys.into_iter().map(|(hash, (item, asked, refused))| TopKey {
            key: shown(decode(item).1),
            asked,
            refused,
            refusals: self.refusals.get(&hash).copied(),
            error,
        });
        top.collect()
    }
}

const ABSENT: u16 = u16::MAX;

/// Encodes the hash and the values of a key; [`decode`] is the inverse.
fn encode(out: &mut Vec<u8>, hash: u64, key: Key<'_>) {
    out.extend_from_slice(&hash.to_le_bytes());
    for value in key.texts() {
        let len = value.map_or(ABSENT, |text| u16::try_from(text.len()).expect("a value has at most 1 KiB"));
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(value.unwrap_or_default().as_bytes());
    }
}

fn decode(item: &[u8]) -> (u64, Vec<Option<String>>) {
    let (hash, mut rest) = item.split_first_chunk().expect("it begins with the hash");
    let mut values = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk() {
        let len = u16::from_le_bytes(*len);
        let (text, after) = after.split_at(if len == ABSENT { 0 } else { usize::from(len) });
        values.push((len != ABSENT).then(|| String::from_utf8_lossy(text).into_owned()));
        rest = after;
    }
    (u64::from_le_bytes(*hash), values)
}
