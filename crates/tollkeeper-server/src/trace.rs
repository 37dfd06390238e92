//! Traces: a decision as a span of whoever asked for it.
//!
//! Only of requests that bring a `traceparent` that is sampled: the caller decides what is worth tracing, and
//! one who traces one in a thousand pays for one in a thousand. A span names limits, never the values of keys.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tollkeeper::Decision;

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
    /// Whose it is.
    pub parent: Parent,
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

    /// Keeps a decision that was begun then and is made now.
    pub fn record(&self, parent: Parent, name: &'static str, began: Instant, decision: &Decision) {
        let took = began.elapsed();
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let ended = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos);
        let (secret, counter) = &self.numbers;
        let id = secret.hash_one(counter.fetch_add(1, Relaxed)).to_ne_bytes();
        let began = ended.saturating_sub(nanos(took));
        let span = Span { parent, id, name, began, ended, attributes: attributes(decision) };
        // Nobody waits for a collector.
        if self.waiting.try_send(span).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }

    /// How many found no room since this was last asked.
    pub fn take_lost(&self) -> u64 {
        self.lost.swap(0, Relaxed)
    }
}

fn attributes(decision: &Decision) -> Vec<(&'static str, Attribute)> {
    let names = |refused: bool| {
        let limits = decision.limits().filter(|answer| !(refused && answer.allowed()));
        Attribute::Names(limits.map(|answer| answer.name().to_owned()).collect())
    };
    let mut all = vec![
        ("tollkeeper.allowed", Attribute::Truth(decision.allowed())),
        ("tollkeeper.limits", names(false)),
        ("tollkeeper.refused_by", names(true)),
    ];
    if let Some(binding) = decision.binding() {
        all.push(("tollkeeper.binding", Attribute::Text(binding.name().to_owned())));
    }
    if let Some(retry) = decision.retry_after() {
        all.push((
            "tollkeeper.retry_after",
            Attribute::Seconds(Duration::from_micros(retry.as_micros()).as_secs_f64()),
        ));
    }
    if let Some(by) = decision.degraded() {
        all.push(("tollkeeper.degraded", Attribute::Text(by.name().to_owned())));
    }
    all
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
}
