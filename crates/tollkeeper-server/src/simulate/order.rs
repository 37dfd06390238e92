//! Puts the lines of a log into the order of their arrival, and spreads whole seconds.
//!
//! Servers write a line when a request ends, so lines are not in the order in which requests arrived. Lines are held
//! until the log is ten seconds ahead of them. Stamps of whole seconds would put all requests of a second at one
//! instant: the i-th of n lines of a second is put at `second + floor(i * 10^6 / n)` microseconds.

use std::collections::{BTreeMap, VecDeque};

use super::batch::{self, Batch, BatchEntry};
use super::logged::Logged;
use super::time::{SECOND, Stamp};

/// How long lines are held.
const WINDOW: u64 = 10 * SECOND;
/// The most lines that are held.
const MOST: usize = 1_000_000;
/// The size at which a new chunk is begun.
const CHUNK: usize = 256 << 10;

/// Lines that are held until their order is known.
#[derive(Debug)]
pub struct Order {
    settings: OrderSettings,
    /// Lines with stamps of whole seconds, by second, in file order.
    unspread: BTreeMap<u64, Vec<Held>>,
    /// Lines whose arrival is known, by its second.
    ready: BTreeMap<u64, Vec<Held>>,
    held: usize,
    /// The highest stamp so far.
    latest: u64,
    /// The arrival of the last line that was passed on.
    released: u64,
    /// How many lines came too late to be put in order.
    pub late: u64,
    chunks: Chunks,
    sequence: u64,
}

/// How time is reconstructed.
#[derive(Clone, Copy, Debug)]
pub struct OrderSettings {
    /// Whether stamps are those of the end of a request.
    pub is_end: bool,
    /// Whether lines of one second are spread over it.
    pub spread: bool,
    /// Lines that arrived earlier are dropped.
    pub from: u64,
    /// Lines that arrived at this time or later are dropped.
    pub until: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    entry: BatchEntry,
    sequence: u64,
    place: Place,
}

/// Where the parts of a held line are.
#[derive(Clone, Copy, Debug)]
struct Place {
    chunk: u64,
    start: usize,
    end: usize,
}

impl Order {
    /// An empty order.
    pub fn new(settings: OrderSettings) -> Order {
        Order {
            settings,
            unspread: BTreeMap::new(),
            ready: BTreeMap::new(),
            held: 0,
            latest: 0,
            released: 0,
            late: 0,
            chunks: Chunks::default(),
            sequence: 0,
        }
    }

    /// Adds a line, and passes on to `out` what is now in order.
    pub fn add(&mut self, stamp: Stamp, logged: &Logged, out: &mut impl FnMut(BatchEntry, &[u8])) {
        let place = self.chunks.push(logged);
        let held = Held { entry: batch::entry(logged, stamp.micros), sequence: self.sequence, place };
        self.sequence += 1;
        self.held += 1;
        if self.settings.spread && stamp.is_whole {
            self.unspread.entry(stamp.micros / SECOND).or_default().push(held);
        } else {
            self.ready(held);
        }
        if stamp.micros > self.latest {
            self.latest = stamp.micros;
            self.release(self.latest.saturating_sub(WINDOW), out);
        }
        while self.held > MOST {
            self.release_oldest(out);
        }
    }

    /// Passes on all lines.
    pub fn finish(&mut self, out: &mut impl FnMut(BatchEntry, &[u8])) {
        self.release(u64::MAX, out);
    }

    /// Takes the duration of a line into account, and holds it until its arrival.
    fn ready(&mut self, mut held: Held) {
        if self.settings.is_end {
            let BatchEntry { arrival, duration, .. } = held.entry;
            held.entry.arrival = arrival.saturating_sub(duration.unwrap_or(0));
        }
        self.ready.entry(held.entry.arrival / SECOND).or_default().push(held);
    }

    /// Passes on the lines of all seconds that end at `before` or earlier.
    fn release(&mut self, before: u64, out: &mut impl FnMut(BatchEntry, &[u8])) {
        let second = before / SECOND;
        while let Some(first) = self.unspread.first_entry().filter(|first| *first.key() < second) {
            let (second, lines) = first.remove_entry();
            self.spread(second, lines);
        }
        while let Some(first) = self.ready.first_entry().filter(|first| *first.key() < second) {
            let lines = first.remove();
            self.pass_on(lines, out);
        }
    }

    /// Makes room by passing on the oldest second that is held.
    #[cold]
    fn release_oldest(&mut self, out: &mut impl FnMut(BatchEntry, &[u8])) {
        let unspread = self.unspread.first_key_value().map(|(second, _)| *second);
        let ready = self.ready.first_key_value().map(|(second, _)| *second);
        if let Some(second) = unspread.filter(|second| ready.is_none_or(|ready| *second <= ready)) {
            let lines = self.unspread.remove(&second).unwrap_or_default();
            self.spread(second, lines);
        }
        if let Some((_, lines)) = self.ready.pop_first() {
            self.pass_on(lines, out);
        }
    }

    fn spread(&mut self, second: u64, lines: Vec<Held>) {
        let count = u64::try_from(lines.len()).expect("at most a million");
        for (index, mut held) in (0..).zip(lines) {
            held.entry.arrival = second * SECOND + index * SECOND / count;
            self.ready(held);
        }
    }

    fn pass_on(&mut self, mut lines: Vec<Held>, out: &mut impl FnMut(BatchEntry, &[u8])) {
        lines.sort_by_key(|held| (held.entry.arrival, held.sequence));
        for mut held in lines {
            self.held -= 1;
            if (self.settings.from..self.settings.until).contains(&held.entry.arrival) {
                if held.entry.arrival < self.released {
                    self.late += 1;
                    held.entry.arrival = self.released;
                }
                self.released = held.entry.arrival;
                out(held.entry, self.chunks.get(held.place));
            }
            self.chunks.free(held.place);
        }
    }
}

/// The encoded parts of held lines, in chunks that are freed when all of their lines are gone.
#[derive(Debug, Default)]
struct Chunks {
    chunks: VecDeque<Chunk>,
    /// The number of the first chunk.
    first: u64,
    spare: Vec<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Chunk {
    bytes: Vec<u8>,
    lines: usize,
}

impl Chunks {
    fn push(&mut self, logged: &Logged) -> Place {
        if self.chunks.back().is_none_or(|chunk| chunk.bytes.len() >= CHUNK) {
            let bytes = self.spare.pop().unwrap_or_default();
            self.chunks.push_back(Chunk { bytes, lines: 0 });
        }
        let number = self.first + u64::try_from(self.chunks.len()).expect("few chunks") - 1;
        let chunk = self.chunks.back_mut().expect("one was pushed");
        let start = chunk.bytes.len();
        batch::encode(logged, &mut chunk.bytes);
        chunk.lines += 1;
        Place { chunk: number, start, end: chunk.bytes.len() }
    }

    fn get(&self, place: Place) -> &[u8] {
        &self.chunks[self.index(place)].bytes[place.start..place.end]
    }

    fn free(&mut self, place: Place) {
        let index = self.index(place);
        self.chunks[index].lines -= 1;
        while let Some(front) =
            self.chunks.front().filter(|chunk| chunk.lines == 0 && chunk.bytes.len() >= CHUNK)
        {
            debug_assert_eq!(front.lines, 0);
            let mut bytes = self.chunks.pop_front().map(|chunk| chunk.bytes).unwrap_or_default();
            self.first += 1;
            if self.spare.len() < 4 {
                bytes.clear();
                self.spare.push(bytes);
            }
        }
    }

    fn index(&self, place: Place) -> usize {
        usize::try_from(place.chunk - self.first).expect("few chunks")
    }
}

/// Collects what is in order into batches.
#[derive(Debug)]
pub struct Batches {
    size: usize,
    current: Batch,
}

impl Batches {
    /// Batches of this many requests.
    pub fn new(size: usize) -> Batches {
        Batches { size: size.max(1), current: Batch::default() }
    }

    /// Adds a request; the batch, if it is full now.
    pub fn push(&mut self, entry: BatchEntry, parts: &[u8]) -> Option<Batch> {
        self.current.push(entry, parts);
        (self.current.len() == self.size).then(|| std::mem::take(&mut self.current))
    }

    /// The last batch.
    pub fn finish(self) -> Batch {
        self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: OrderSettings = OrderSettings { is_end: true, spread: true, from: 0, until: u64::MAX };

    /// The arrivals of lines with these stamps and durations, in the order in which they are passed on, and how many
    /// were late.
    fn arrivals(settings: OrderSettings, lines: &[(u64, bool, Option<u64>)]) -> (Vec<u64>, u64) {
        let (mut order, mut out) = (Order::new(settings), Vec::new());
        for (micros, is_whole, duration) in lines {
            let mut logged = Logged::default();
            logged.duration = *duration;
            order.add(Stamp { micros: *micros, is_whole: *is_whole }, &logged, &mut |entry, _| {
                out.push(entry.arrival)
            });
        }
        order.finish(&mut |entry, _| out.push(entry.arrival));
        assert_eq!(order.held, 0);
        (out, order.late)
    }

    #[test]
    fn lines_of_one_second_are_spread_in_file_order() {
        let second = 100 * SECOND;
        let lines = [(second, true, None), (second, true, None), (second, true, Some(500_000))];
        assert_eq!(arrivals(SETTINGS, &lines).0, [second, second + 166_666, second + 333_333]);
        let as_they_are = OrderSettings { spread: false, ..SETTINGS };
        assert_eq!(arrivals(as_they_are, &lines).0, [second - 500_000, second, second]);
        let milliseconds = lines.map(|(micros, _, duration)| (micros, false, duration));
        assert_eq!(arrivals(SETTINGS, &milliseconds).0, [second - 500_000, second, second]);
    }

    #[test]
    fn duration_is_subtracted_only_from_the_end() {
        let lines = [(100 * SECOND, false, None), (101 * SECOND, false, Some(2 * SECOND))];
        assert_eq!(arrivals(SETTINGS, &lines).0, [99 * SECOND, 100 * SECOND]);
        let is_start = OrderSettings { is_end: false, ..SETTINGS };
        assert_eq!(arrivals(is_start, &lines).0, [100 * SECOND, 101 * SECOND]);
    }

    #[test]
    fn line_is_late_once_the_log_is_ahead_of_it() {
        let at = |seconds: u64| (seconds * SECOND, false, None);
        let (order, late) = arrivals(SETTINGS, &[at(100), at(105), at(101), at(110), at(102)]);
        assert_eq!((order, late), ([100, 101, 102, 105, 110].map(|second| second * SECOND).to_vec(), 0));
        let (order, late) = arrivals(SETTINGS, &[at(100), at(105), at(120), at(104), at(130)]);
        assert_eq!((order, late), ([100, 105, 105, 120, 130].map(|second| second * SECOND).to_vec(), 1));
    }

    #[test]
    fn range_of_time_is_half_open() {
        let settings = OrderSettings { from: 101 * SECOND, until: 103 * SECOND, ..SETTINGS };
        let lines: Vec<_> = (100..105).map(|second| (second * SECOND, false, None)).collect();
        assert_eq!(arrivals(settings, &lines).0, [101 * SECOND, 102 * SECOND]);
    }

    #[test]
    fn held_lines_are_bounded() {
        let (mut order, mut passed_on) = (Order::new(SETTINGS), 0);
        let stamp = Stamp { micros: 100 * SECOND, is_whole: true };
        for _ in 0..MOST + 5 {
            order.add(stamp, &Logged::default(), &mut |_, _| passed_on += 1);
            assert!(order.held <= MOST);
        }
        order.finish(&mut |_, _| passed_on += 1);
        assert_eq!(passed_on, MOST + 5);
    }

    #[test]
    fn parts_survive_until_they_are_passed_on() {
        let (mut order, mut out) = (Order::new(SETTINGS), Vec::new());
        let mut logged = Logged::default();
        let count = 20_000u64;
        for index in 0..count {
            logged.clear();
            logged.push(super::super::logged::Part::Target, format!("/{index:060}").as_bytes());
            let stamp = Stamp { micros: (100 + index / 500) * SECOND, is_whole: true };
            order.add(stamp, &logged, &mut |_, parts| out.push(parts.to_vec()));
        }
        order.finish(&mut |_, parts| out.push(parts.to_vec()));
        assert_eq!(out.len() as u64, count);
        for (index, parts) in (0..count).zip(&out) {
            assert!(parts.ends_with(format!("/{index:060}").as_bytes()), "{index}");
        }
        assert!(order.chunks.chunks.len() <= 1, "freed");
    }
}
