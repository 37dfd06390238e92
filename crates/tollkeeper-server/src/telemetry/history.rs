//! Counts per step of the last five minutes, hour and day, for the charts of `GET /v1/history`.
//!
//! A ticker records once a second what was counted since its last tick, in three rings of cells: seconds, ten seconds
//! and five minutes. Memory is bounded: 948 cells of three numbers for each of at most [`MAX_ROWS`] limits; further
//! limits are summed as `(other)`. A limit that was removed keeps its cells until they are empty. Nothing is persisted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tollkeeper_engine::json::Writer;

/// How many limits have cells of their own.
pub const MAX_ROWS: usize = 200;
/// The name under which the other limits are summed. It is no valid name of a limit.
const OTHER: &str = "(other)";

/// How far back a chart goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// 300 steps of a second.
    FiveMinutes,
    /// 360 steps of ten seconds.
    Hour,
    /// 288 steps of five minutes.
    Day,
}

impl Period {
    const ALL: [Period; 3] = [Period::FiveMinutes, Period::Hour, Period::Day];

    /// The period with this name, such as `5m`.
    pub fn of(name: &str) -> Option<Period> {
        Period::ALL.into_iter().find(|period| period.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Period::FiveMinutes => "5m",
            Period::Hour => "1h",
            Period::Day => "24h",
        }
    }

    /// The length of a step in seconds.
    const fn step(self) -> u64 {
        match self {
            Period::FiveMinutes => 1,
            Period::Hour => 10,
            Period::Day => 300,
        }
    }

    const fn cells(self) -> usize {
        match self {
            Period::FiveMinutes => 300,
            Period::Hour => 360,
            Period::Day => 288,
        }
    }

    /// The index of the first cell of this period in a row, which holds the cells of all periods.
    const fn start(self) -> usize {
        match self {
            Period::FiveMinutes => 0,
            Period::Hour => 300,
            Period::Day => 660,
        }
    }
}

/// The cells of all periods.
const CELLS: usize = 948;

/// What the ticker reads once a second: counts since the start, and the state of the store.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Requests that were allowed, refused, and decided without the store.
    pub requests: [u64; 3],
    /// For each limit that was ever active: allowed, refused, would refuse.
    pub limits: Vec<(Box<str>, [u64; 3])>,
    /// The names of the active limits.
    pub active: BTreeSet<Box<str>>,
    /// The 99th percentile of the store's answers since the last sample, in milliseconds.
    pub p99_ms: Option<f64>,
    /// The breaker: 0 closed, 1 half-open, 2 open.
    pub store: u8,
    /// The number of keys in this process.
    pub keys: u64,
}

/// The history of this process.
#[derive(Debug, Default)]
pub struct History(Mutex<Rings>);

#[derive(Debug, Default)]
struct Rings {
    /// The newest step of each period, and how many steps there are since the start. `None` before the first sample.
    newest: [Option<u64>; 3],
    filled: [usize; 3],
    last: Last,
    requests: Row,
    limits: BTreeMap<Box<str>, Row>,
    other: Option<Row>,
    gauges: Option<Box<[Gauge; CELLS]>>,
}

/// The counts at the last sample.
#[derive(Debug, Default)]
struct Last {
    requests: [u64; 3],
    limits: BTreeMap<Box<str>, [u64; 3]>,
}

/// The cells of one limit, or of all requests.
#[derive(Debug)]
struct Row(Box<[[u32; 3]]>);

impl Default for Row {
    fn default() -> Row {
        Row(vec![[0; 3]; CELLS].into())
    }
}

/// What is shown of the store in one step: the worst state and percentile, and the last number of keys.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    p99_ms: Option<f32>,
    keys: u32,
    store: u8,
}

impl History {
    /// Records a sample, at this time in seconds since the epoch. A clock that goes back adds to the newest step.
    pub fn record(&self, now: u64, sample: &Sample) {
        self.lock().record(now, sample);
    }

    /// Writes the counts of a period as JSON.
    pub fn write(&self, out: &mut Writer, period: Period) {
        self.lock().write(out, period);
    }

    fn lock(&self) -> MutexGuard<'_, Rings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rings {
    fn record(&mut self, now: u64, sample: &Sample) {
        let cells = Period::ALL.map(|period| self.advance(period, now));
        self.limits.retain(|name, row| sample.active.contains(name) || !row.is_empty());
        self.requests.add(cells, &increase(self.last.requests, sample.requests));
        self.last.requests = sample.requests;
        for (name, counts) in &sample.limits {
            let last = self.last.limits.get(name).copied().unwrap_or_default();
            let more = increase(last, *counts);
            if last != *counts {
                self.last.limits.insert(name.clone(), *counts);
            }
            if more != [0; 3] || sample.active.contains(name) {
                self.row(name).add(cells, &more);
            }
        }
        let gauges = self.gauges.get_or_insert_with(|| {
            vec![Gauge::default(); CELLS].into_boxed_slice().try_into().expect("as many cells")
        });
        for cell in cells {
            let gauge = &mut gauges[cell];
            #[expect(clippy::cast_possible_truncation, reason = "a chart needs no more than 24 bits")]
            let p99 = sample.p99_ms.map(|millis| millis as f32);
            gauge.p99_ms = gauge.p99_ms.max_some(p99);
            gauge.keys = u32::try_from(sample.keys).unwrap_or(u32::MAX);
            gauge.store = gauge.store.max(sample.store);
        }
    }

    /// Moves a period forward to this time, clearing the cells of the steps between, and returns the index of the
    /// newest cell.
    fn advance(&mut self, period: Period, now: u64) -> usize {
        let (index, cells) = (period as usize, period.cells());
        let step = now / period.step();
        let steps = match self.newest[index] {
            None => 1,
            Some(newest) => usize::try_from(step.saturating_sub(newest)).unwrap_or(usize::MAX).min(cells),
        };
        let newest = self.newest[index].map_or(step, |newest| newest.max(step));
        self.newest[index] = Some(newest);
        self.filled[index] = self.filled[index].saturating_add(steps).min(cells);
        for back in 0..steps as u64 {
            let cell = cell(period, newest - back);
            self.requests.0[cell] = [0; 3];
            self.limits.values_mut().chain(&mut self.other).for_each(|row| row.0[cell] = [0; 3]);
            if let Some(gauges) = &mut self.gauges {
                gauges[cell] = Gauge::default();
            }
        }
        cell(period, newest)
    }

    /// The row of a limit: its own, or that of all limits beyond [`MAX_ROWS`].
    fn row(&mut self, name: &str) -> &mut Row {
        if self.limits.len() >= MAX_ROWS && !self.limits.contains_key(name) {
            return self.other.get_or_insert_default();
        }
        self.limits.entry(name.into()).or_default()
    }

    fn write(&self, out: &mut Writer, period: Period) {
        let index = period as usize;
        let newest = self.newest[index].unwrap_or_default();
        let (cells, filled) = (period.cells(), self.filled[index]);
        // Oldest first; `None` for the steps before the start.
        let steps = || {
            (0..cells)
                .rev()
                .map(|back| (back < filled).then(|| cell(period, newest.wrapping_sub(back as u64))))
        };
        let counts = |out: &mut Writer, row: &Row, names: [&str; 3]| {
            for (index, name) in names.into_iter().enumerate() {
                out.raw(if index > 0 { ",\"" } else { "{\"" });
                out.raw(name);
                out.raw("\":");
                out.list(steps(), |out, cell| {
                    out.or_null(cell, |out, cell| out.number(row.0[cell][index].into()));
                });
            }
            out.raw("}");
        };
        out.raw("{\"step\":");
        out.number(period.step());
        out.raw(",\"until\":");
        out.number((newest + 1) * period.step());
        out.raw(",\"requests\":");
        counts(out, &self.requests, ["allowed", "refused", "degraded"]);
        out.raw(",\"limits\":{");
        let named = self.limits.iter().map(|(name, row)| (&**name, row));
        for (index, (name, row)) in named.chain(self.other.iter().map(|row| (OTHER, row))).enumerate() {
            out.raw(if index > 0 { "," } else { "" });
            out.text(name);
            out.raw(":");
            counts(out, row, ["allowed", "refused", "would_refuse"]);
        }
        out.raw("},\"store\":{\"p99_ms\":");
        let gauge = |cell: Option<usize>| Some(self.gauges.as_ref()?[cell?]);
        out.list(steps(), |out, cell| {
            out.or_null(gauge(cell).and_then(|gauge| gauge.p99_ms), |out, p99| out.raw(&p99.to_string()));
        });
        out.raw(",\"state\":");
        out.list(steps(), |out, cell| {
            out.or_null(gauge(cell), |out, gauge| out.number(gauge.store.into()));
        });
        out.raw("},\"keys\":");
        out.list(steps(), |out, cell| out.or_null(gauge(cell), |out, gauge| out.number(gauge.keys.into())));
        out.raw("}");
    }
}

impl Row {
    fn add(&mut self, cells: [usize; 3], more: &[u64; 3]) {
        for cell in cells {
            for (count, more) in self.0[cell].iter_mut().zip(more) {
                *count = count.saturating_add(u32::try_from(*more).unwrap_or(u32::MAX));
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|cell| *cell == [0; 3])
    }
}

/// The larger of two values that may be absent.
trait MaxSome {
    fn max_some(self, other: Self) -> Self;
}

impl MaxSome for Option<f32> {
    fn max_some(self, other: Option<f32>) -> Option<f32> {
        match (self, other) {
            (Some(one), Some(other)) => Some(one.max(other)),
            (one, other) => one.or(other),
        }
    }
}

/// The index in a row of the cell for this step.
#[expect(clippy::cast_possible_truncation, reason = "a remainder below 360")]
fn cell(period: Period, step: u64) -> usize {
    period.start() + (step % period.cells() as u64) as usize
}

fn increase(last: [u64; 3], now: [u64; 3]) -> [u64; 3] {
    std::array::from_fn(|index| now[index].saturating_sub(last[index]))
}
