//! Traces: a decision as a span of whoever asked for it.
//!
//! Over HTTP and gRPC only of requests that bring a `traceparent` that is sampled: the caller decides what is worth
//! tracing, and one who traces one in a thousand pays for one in a thousand. RESP has no word for that, so there every
//! decision begins a trace, as long as there is room that those who asked for theirs do not need. A span names limits,
//! never the values of keys.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tollkeeper::{Decision, KeyDecision, OnStoreFailure, Retry};

/// The span of the caller that a request belongs to: a `traceparent` of the W3C's Trace Context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The trace.
    pub trace: [u8; 16],
    /// The span in it.
    pub span: [u8; 8],
}

impl Parent {
    /// Reads a header such as `00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`; nothing if it is not
    /// one, or not sampled.
    pub fn read(header: &[u8]) -> Option<Parent> {
        let (text, more) = header.split_at_checked(55)?;
        let version = text[..2].try_into().ok().and_then(hex::<2, 1>)?;
        // Later versions may say more, behind another dash.
        let known = match version {
            [0] => more.is_empty(),
            [255] => false,
            _ => more.first().is_none_or(|byte| *byte == b'-'),
        };
        if !known || text[2] != b'-' || text[35] != b'-' || text[52] != b'-' {
            return None;
        }
        let trace = text[3..35].try_into().ok().and_then(hex::<32, 16>)?;
        let span = text[36..52].try_into().ok().and_then(hex::<16, 8>)?;
        let [flags] = text[53..].try_into().ok().and_then(hex::<2, 1>)?;
        let sampled = flags & 1 == 1 && trace != [0; 16] && span != [0; 8];
        sampled.then_some(Parent { trace, span })
    }
}

/// Digits in lower case, as the standard has them.
fn hex<const DIGITS: usize, const BYTES: usize>(text: [u8; DIGITS]) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    for (index, digit) in text.into_iter().enumerate() {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        bytes[index / 2] = bytes[index / 2] << 4 | value;
    }
    Some(bytes)
}

/// One decision, and when it was made.
#[derive(Clone, Debug)]
pub struct Span {
    /// The trace it belongs to.
    pub trace: [u8; 16],
    /// The span of whoever asked, unless the trace begins here.
    pub parent: Option<[u8; 8]>,
    /// Its own number.
    pub id: [u8; 8],
    /// What was asked.
    pub name: &'static str,
    /// In nanoseconds since the epoch.
    pub began: u64,
    /// In nanoseconds since the epoch.
    pub ended: u64,
    /// What was decided.
    pub attributes: Vec<(&'static str, Attribute)>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "by their names")]
pub enum Attribute {
    Text(String),
    Truth(bool),
    Seconds(f64),
    Names(Vec<String>),
}

/// Spans on their way to a collector.
#[derive(Debug)]
pub struct Traces {
    waiting: mpsc::Sender<Span>,
    lost: AtomicU64,
    /// What numbers of spans are made of.
    numbers: (RandomState, AtomicU64),
}

impl Traces {
    /// For so many at a time, and whoever sends them on.
    pub fn new(most: usize) -> (Traces, mpsc::Receiver<Span>) {
        let (waiting, spans) = mpsc::channel(most);
        (Traces { waiting, lost: AtomicU64::new(0), numbers: Default::default() }, spans)
    }

    /// Keeps what somebody who traces has asked for: begun then, decided now.
    pub fn record(&self, parent: Parent, name: &'static str, began: Instant, told: impl FnOnce() -> Told) {
        // Nobody waits for a collector.
        match self.waiting.try_reserve() {
            Ok(room) => room.send(self.span(parent.trace, Some(parent.span), name, began, told())),
            Err(_) => _ = self.lost.fetch_add(1, Relaxed),
        }
    }

    /// Keeps what was asked without a word about traces, while half of the room is free: a sample, of which nothing is
    /// missed. Out of the way of those who trace nothing.
    #[cold]
    pub fn sample(&self, name: &'static str, began: Instant, told: impl FnOnce() -> Told) {
        if self.waiting.capacity() > self.waiting.max_capacity() / 2
            && let Ok(room) = self.waiting.try_reserve()
        {
            let mut trace = [0; 16];
            trace[..8].copy_from_slice(&self.number());
            trace[8..].copy_from_slice(&self.number());
            room.send(self.span(trace, None, name, began, told()));
        }
    }

    fn span(
        &self,
        trace: [u8; 16],
        parent: Option<[u8; 8]>,
        name: &'static str,
        began: Instant,
        told: Told,
    ) -> Span {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let ended = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos);
        let began = ended.saturating_sub(nanos(began.elapsed()));
        Span { trace, parent, id: self.number(), name, began, ended, attributes: told.attributes() }
    }

    fn number(&self) -> [u8; 8] {
        let (secret, counter) = &self.numbers;
        secret.hash_one(counter.fetch_add(1, Relaxed)).to_ne_bytes()
    }

    /// How many found no room since this was last asked.
    pub fn take_lost(&self) -> u64 {
        self.lost.swap(0, Relaxed)
    }
}

/// What was decided, as a span tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    allowed: bool,
    limits: Vec<String>,
    refused_by: Vec<String>,
    binding: Option<String>,
    retry_after: Option<Duration>,
    degraded: Option<OnStoreFailure>,
}

impl Told {
    /// What the limits of a policy said.
    pub fn of(decision: &Decision) -> Told {
        let refused_by = decision.limits().filter(|answer| !answer.allowed());
        Told {
            allowed: decision.allowed(),
            limits: names(decision),
            refused_by: refused_by.map(|answer| answer.name().to_owned()).collect(),
            binding: decision.binding().map(|answer| answer.name().to_owned()),
            retry_after: decision.retry_after().map(duration),
            degraded: decision.degraded(),
        }
    }

    /// What a limit said that came with the call, and has the name of its command.
    pub fn of_one(name: &str, passage: &KeyDecision) -> Told {
        let limits = vec![name.to_owned()];
        let retry = passage.outcome().retry;
        Told {
            allowed: passage.allowed,
            refused_by: if passage.allowed { Vec::new() } else { limits.clone() },
            limits,
            binding: Some(name.to_owned()),
            retry_after: if let Some(Retry::After(span)) = retry { Some(duration(span)) } else { None },
            degraded: passage.degraded(),
        }
    }

    /// Which limits were given back to, which refuses nobody.
    pub fn of_given(decision: &Decision) -> Told {
        Told {
            allowed: true,
            limits: names(decision),
            refused_by: Vec::new(),
            binding: None,
            retry_after: None,
            degraded: decision.degraded(),
        }
    }

    /// What was said of the same call behind this.
    #[must_use]
    pub fn and(mut self, more: Told) -> Told {
        self.allowed &= more.allowed;
        self.limits.extend(more.limits);
        self.refused_by.extend(more.refused_by);
        self.binding = self.binding.or(more.binding);
        self.retry_after = self.retry_after.max(more.retry_after);
        self.degraded = self.degraded.or(more.degraded);
        self
    }

    fn attributes(self) -> Vec<(&'static str, Attribute)> {
        let mut all = vec![
            ("tollkeeper.allowed", Attribute::Truth(self.allowed)),
            ("tollkeeper.limits", Attribute::Names(self.limits)),
            ("tollkeeper.refused_by", Attribute::Names(self.refused_by)),
        ];
        all.extend(self.binding.map(|name| ("tollkeeper.binding", Attribute::Text(name))));
        let retry = self.retry_after.map(|after| Attribute::Seconds(after.as_secs_f64()));
        all.extend(retry.map(|seconds| ("tollkeeper.retry_after", seconds)));
        let degraded = self.degraded.map(|by| Attribute::Text(by.name().to_owned()));
        all.extend(degraded.map(|by| ("tollkeeper.degraded", by)));
        all
    }
}

fn names(decision: &Decision) -> Vec<String> {
    decision.limits().map(|answer| answer.name().to_owned()).collect()
}

fn duration(span: tollkeeper::Span) -> Duration {
    Duration::from_micros(span.as_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_parent_is_read_as_the_standard_says() {
        let parent = Parent::read(GOOD.as_bytes()).unwrap();
        assert_eq!(parent.trace[..4], [0x0a, 0xf7, 0x65, 0x19]);
        assert_eq!(parent.span, [0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31]);
        for (good, expected) in [
            (GOOD.replace("00-", "cc-"), true),
            (GOOD.replace("00-", "cc-") + "-what comes later", true),
            (GOOD.replace("-01", "-03"), true),
            (GOOD.replace("-01", "-00"), false),
            (GOOD.replace("-01", "-02"), false),
            (GOOD.replace("00-", "ff-"), false),
            (GOOD.to_owned() + "-more", false),
            (GOOD.replace("00-", "cc-") + "more", false),
            (GOOD.replace("0af7", "0AF7"), false),
            (GOOD.replace("b7ad6b7169203331", "0000000000000000"), false),
            (GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)), false),
            (GOOD[..54].to_owned(), false),
            (GOOD.replace('-', "_"), false),
            (String::new(), false),
        ] {
            assert_eq!(Parent::read(good.as_bytes()), expected.then_some(parent), "{good}");
        }
    }

    #[test]
    fn who_asked_for_a_span_finds_room_whatever_was_sampled() {
        let (traces, mut spans) = Traces::new(8);
        let told = || Told {
            allowed: true,
            limits: Vec::new(),
            refused_by: Vec::new(),
            binding: None,
            retry_after: None,
            degraded: None,
        };
        (0..100).for_each(|_| traces.sample("sampled", Instant::now(), told));
        assert_eq!(traces.take_lost(), 0, "a sample misses nothing");
        let parent = Parent::read(GOOD.as_bytes()).unwrap();
        (0..5).for_each(|_| traces.record(parent, "asked", Instant::now(), told));
        assert_eq!(traces.take_lost(), 1);
        let names: Vec<&str> = std::iter::from_fn(|| spans.try_recv().ok()).map(|span| span.name).collect();
        assert_eq!(names, [["sampled"; 4], ["asked"; 4]].concat());
    }
}
