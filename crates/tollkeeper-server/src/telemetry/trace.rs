//! Records decisions as trace spans, children of the caller's span.
//!
//! Over HTTP and gRPC, only requests with a sampled `traceparent` are recorded: the caller chooses what to trace, and a
//! caller that samples one request in a thousand pays for one in a thousand. RESP has no such header, so every decision
//! there starts a trace, while the queue is at most half full; the other half is reserved for sampled requests. A span
//! names limits, never the values of keys.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tollkeeper::{Decision, KeyDecision, OnStoreFailure, Retry};

/// The caller's span, from the `traceparent` header (W3C Trace Context).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The trace id.
    pub trace: [u8; 16],
    /// The span id.
    pub span: [u8; 8],
}

impl Parent {
    /// Parses a header such as `00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`; `None` if it is invalid or not
    /// sampled.
    pub fn read(header: &[u8]) -> Option<Parent> {
        let (text, more) = header.split_at_checked(55)?;
        let version = text[..2].try_into().ok().and_then(hex::<2, 1>)?;
        // Later versions may append fields after another dash.
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

/// Parses hex digits, which the standard requires in lower case.
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

/// One decision with its start and end time.
#[derive(Clone, Debug)]
pub struct Span {
    /// The trace id.
    pub trace: [u8; 16],
    /// The caller's span; `None` if the trace starts here.
    pub parent: Option<[u8; 8]>,
    /// Its own id.
    pub id: [u8; 8],
    /// The operation, such as `check`.
    pub name: &'static str,
    /// In nanoseconds since the epoch.
    pub began: u64,
    /// In nanoseconds since the epoch.
    pub ended: u64,
    /// The decision.
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

/// The queue of spans for the exporter.
#[derive(Debug)]
pub struct Traces {
    queue: mpsc::Sender<Span>,
    lost: AtomicU64,
    /// A random secret and a counter, from which ids are hashed.
    ids: (RandomState, AtomicU64),
}

impl Traces {
    /// A queue with this capacity, and its receiver for the exporter.
    pub fn new(capacity: usize) -> (Traces, mpsc::Receiver<Span>) {
        let (queue, spans) = mpsc::channel(capacity);
        (Traces { queue, lost: AtomicU64::new(0), ids: Default::default() }, spans)
    }

    /// Records a decision of a sampled request, from `began` until now. If the queue is full, counts it as lost.
    pub fn record(
        &self,
        parent: Parent,
        name: &'static str,
        began: Instant,
        outcome: impl FnOnce() -> SpanOutcome,
    ) {
        // A decision never waits for the collector.
        match self.queue.try_reserve() {
            Ok(permit) => permit.send(self.span(parent.trace, Some(parent.span), name, began, outcome())),
            Err(_) => _ = self.lost.fetch_add(1, Relaxed),
        }
    }

    /// Records a decision of a request that cannot carry a `traceparent`, while half of the queue is free. Skipped ones
    /// do not count as lost. `#[cold]`: kept off the path of servers that export no traces.
    #[cold]
    pub fn sample(&self, name: &'static str, began: Instant, outcome: impl FnOnce() -> SpanOutcome) {
        if self.queue.capacity() > self.queue.max_capacity() / 2
            && let Ok(permit) = self.queue.try_reserve()
        {
            let mut trace = [0; 16];
            trace[..8].copy_from_slice(&self.new_id());
            trace[8..].copy_from_slice(&self.new_id());
            permit.send(self.span(trace, None, name, began, outcome()));
        }
    }

    fn span(
        &self,
        trace: [u8; 16],
        parent: Option<[u8; 8]>,
        name: &'static str,
        began: Instant,
        outcome: SpanOutcome,
    ) -> Span {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let ended = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos);
        let began = ended.saturating_sub(nanos(began.elapsed()));
        Span { trace, parent, id: self.new_id(), name, began, ended, attributes: outcome.attributes() }
    }

    fn new_id(&self) -> [u8; 8] {
        let (secret, counter) = &self.ids;
        secret.hash_one(counter.fetch_add(1, Relaxed)).to_ne_bytes()
    }

    /// The number of spans lost since the last call.
    pub fn take_lost(&self) -> u64 {
        self.lost.swap(0, Relaxed)
    }
}

/// The attributes of a span: what was decided, by which limits.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanOutcome {
    allowed: bool,
    limits: Vec<String>,
    refused_by: Vec<String>,
    binding: Option<String>,
    retry_after: Option<Duration>,
    degraded: Option<OnStoreFailure>,
}

impl SpanOutcome {
    /// The attributes of a policy decision.
    pub fn of(decision: &Decision) -> SpanOutcome {
        let refused_by = decision.limits().filter(|answer| !answer.allowed());
        SpanOutcome {
            allowed: decision.allowed(),
            limits: names(decision),
            refused_by: refused_by.map(|answer| answer.name().to_owned()).collect(),
            binding: decision.binding().map(|answer| answer.name().to_owned()),
            retry_after: decision.retry_after().map(duration),
            degraded: decision.degraded(),
        }
    }

    /// The attributes of a decision by an ad-hoc limit, which is named after its command.
    pub fn of_one(name: &str, passage: &KeyDecision) -> SpanOutcome {
        let limits = vec![name.to_owned()];
        let retry = passage.outcome().retry;
        SpanOutcome {
            allowed: passage.allowed,
            refused_by: if passage.allowed { Vec::new() } else { limits.clone() },
            limits,
            binding: Some(name.to_owned()),
            retry_after: if let Some(Retry::After(span)) = retry { Some(duration(span)) } else { None },
            degraded: passage.degraded(),
        }
    }

    /// The attributes of a refund: the limits that were credited. A refund is never refused.
    pub fn of_given(decision: &Decision) -> SpanOutcome {
        SpanOutcome {
            allowed: true,
            limits: names(decision),
            refused_by: Vec::new(),
            binding: None,
            retry_after: None,
            degraded: decision.degraded(),
        }
    }

    /// Merges the attributes of a later decision of the same call.
    #[must_use]
    pub fn and(mut self, more: SpanOutcome) -> SpanOutcome {
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
    fn traceparent_is_parsed_by_the_standard() {
        let parent = Parent::read(GOOD.as_bytes()).unwrap();
        assert_eq!(parent.trace[..4], [0x0a, 0xf7, 0x65, 0x19]);
        assert_eq!(parent.span, [0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31]);
        for (good, expected) in [
            (GOOD.replace("00-", "cc-"), true),
            (GOOD.replace("00-", "cc-") + "-later-fields", true),
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
    fn half_of_the_queue_is_reserved_for_traceparent() {
        let (traces, mut spans) = Traces::new(8);
        let outcome = || SpanOutcome {
            allowed: true,
            limits: Vec::new(),
            refused_by: Vec::new(),
            binding: None,
            retry_after: None,
            degraded: None,
        };
        (0..100).for_each(|_| traces.sample("sampled", Instant::now(), outcome));
        assert_eq!(traces.take_lost(), 0, "skipped samples are not lost spans");
        let parent = Parent::read(GOOD.as_bytes()).unwrap();
        (0..5).for_each(|_| traces.record(parent, "requested", Instant::now(), outcome));
        assert_eq!(traces.take_lost(), 1);
        let names: Vec<&str> = std::iter::from_fn(|| spans.try_recv().ok()).map(|span| span.name).collect();
        assert_eq!(names, [["sampled"; 4], ["requested"; 4]].concat());
    }
}
