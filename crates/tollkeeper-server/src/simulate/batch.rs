//! Batches of requests in one piece of memory, from the reader of a log to the worlds that decide them.

use std::net::IpAddr;

use super::logged::{Logged, Part};

/// A request, without the bytes of its parts.
#[derive(Clone, Copy, Debug)]
pub struct BatchEntry {
    /// When it arrived, in microseconds since 1970.
    pub arrival: u64,
    /// How long it took, if the log says so.
    pub duration: Option<u64>,
    /// The status of its response, if the log says so.
    pub status: Option<u16>,
    /// The address that its connection came from.
    pub peer: Option<IpAddr>,
    start: usize,
    end: usize,
}

/// Requests in the order of their arrival.
#[derive(Debug, Default)]
pub struct Batch {
    entries: Vec<BatchEntry>,
    bytes: Vec<u8>,
}

impl Batch {
    /// The number of requests.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has no requests.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The requests.
    pub fn entries(&self) -> &[BatchEntry] {
        &self.entries
    }

    /// The parts of a request.
    pub fn parts(&self, entry: &BatchEntry) -> Parts<'_> {
        Parts(&self.bytes[entry.start..entry.end])
    }

    /// Adds a request with its encoded parts.
    pub fn push(&mut self, entry: BatchEntry, parts: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(parts);
        self.entries.push(BatchEntry { start, end: self.bytes.len(), ..entry });
    }
}

/// Encodes the parts of a line; [`Parts`] reads them.
pub fn encode(logged: &Logged, out: &mut Vec<u8>) {
    for (part, bytes) in logged.parts() {
        let (tag, index) = match part {
            Part::Method => (0, 0),
            Part::Target => (1, 0),
            Part::Host => (2, 0),
            Part::Header(index) => (3, index),
            Part::Twin(index) => (4, index),
            Part::Fact(index) => (5, index),
        };
        let len = u32::try_from(bytes.len()).expect("a line has at most 64 KiB");
        out.push(tag);
        out.extend_from_slice(&u16::to_le_bytes(index));
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(bytes);
    }
}

/// A request of these numbers whose parts are stored elsewhere.
pub fn entry(logged: &Logged, arrival: u64) -> BatchEntry {
    let Logged { duration, status, peer, .. } = *logged;
    BatchEntry { arrival, duration, status, peer, start: 0, end: 0 }
}

/// The parts of a request.
#[derive(Clone, Debug)]
pub struct Parts<'b>(&'b [u8]);

impl<'b> Iterator for Parts<'b> {
    type Item = (Part, &'b [u8]);

    fn next(&mut self) -> Option<(Part, &'b [u8])> {
        let (head, rest) = self.0.split_first_chunk::<7>()?;
        let index = u16::from_le_bytes([head[1], head[2]]);
        let len = u32::from_le_bytes([head[3], head[4], head[5], head[6]]);
        let (bytes, rest) = rest.split_at(usize::try_from(len).expect("a line has at most 64 KiB"));
        self.0 = rest;
        let part = match head[0] {
            0 => Part::Method,
            1 => Part::Target,
            2 => Part::Host,
            3 => Part::Header(index),
            4 => Part::Twin(index),
            _ => Part::Fact(index),
        };
        Some((part, bytes))
    }
}
