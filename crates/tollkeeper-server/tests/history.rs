//! The history of counts: nothing is lost, and memory is bounded.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![expect(unsafe_code, reason = "implementing a global allocator, here a counting one, is unsafe")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use serde_json::Value;
use tollkeeper_engine::json::Writer;
use tollkeeper_server::telemetry::history::{History, MAX_ROWS, Period, Sample};

struct Counting;

thread_local! { static HELD: Cell<isize> = const { Cell::new(0) }; }

fn count(bytes: usize, sign: isize) {
    // A thread that ends may allocate after its counter was destroyed.
    let _ = HELD.try_with(|held| held.set(held.get() + sign * bytes.cast_signed()));
}

// SAFETY: every call is forwarded unchanged to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller upholds the contract, which is that of the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const START: u64 = 1_760_000_000;

fn read(history: &History, span: &str) -> Value {
    let mut out = Writer::default();
    history.write(&mut out, Period::of(span).unwrap());
    serde_json::from_str(&out.finish()).unwrap()
}

fn sum(counts: &Value) -> u64 {
    counts.as_array().unwrap().iter().filter_map(Value::as_u64).sum()
}

fn sample(limits: &[(String, [u64; 3])], requests: [u64; 3]) -> Sample {
    Sample {
        requests,
        limits: limits.iter().map(|(name, counts)| (name.as_str().into(), *counts)).collect(),
        active: limits.iter().map(|(name, _)| name.as_str().into()).collect(),
        ..Sample::default()
    }
}

/// Pseudo-random numbers: xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Random increments at random times, with gaps and steps back of the clock. A model keeps every increment with the
/// time at which it was recorded.
#[test]
fn sums_equal_counters_over_gaps_and_clock_steps() {
    for seed in 1..=40 {
        let (mut random, history) = (Random(seed * 0x9e37_79b9), History::default());
        let (mut now, mut newest, mut total) = (START, START, [0; 3]);
        let mut limits = vec![("a".to_owned(), [0; 3]), ("__proto__".to_owned(), [0; 3])];
        let mut recorded: Vec<(u64, [u64; 3])> = Vec::new();
        for _ in 0..300 {
            now = match random.below(12) {
                _ if recorded.is_empty() => START,
                0 => now - random.below(100),
                1 => now + random.below(500),
                2 => now + random.below(4_000) * u64::from(random.below(8) == 0),
                _ => now + 1,
            };
            newest = newest.max(now);
            let more = [random.below(50), random.below(5), random.below(2)];
            recorded.push((newest, more));
            for (count, more) in total.iter_mut().zip(more) {
                *count += more;
            }
            limits[0].1 = total;
            limits[1].1[0] += 1;
            history.record(now, &sample(&limits, total));
        }
        for (span, step, cells) in [("5m", 1, 300), ("1h", 10, 360), ("24h", 300, 288)] {
            let shown = read(&history, span);
            // The oldest step that is still shown.
            let first = (newest / step).saturating_sub(cells - 1) * step;
            let within = recorded.iter().filter(|(at, _)| at / step * step >= first);
            let expected = within.fold([0; 4], |sum, (_, more)| {
                [sum[0] + more[0], sum[1] + more[1], sum[2] + more[2], sum[3] + 1]
            });
            let of = |counts: &Value, names: [&str; 3]| names.map(|name| sum(&counts[name]));
            assert_eq!(
                of(&shown["requests"], ["allowed", "refused", "degraded"]),
                expected[..3],
                "{seed} {span}"
            );
            let limit = &shown["limits"]["a"];
            assert_eq!(of(limit, ["allowed", "refused", "would_refuse"]), expected[..3], "{seed} {span}");
            assert_eq!(sum(&shown["limits"]["__proto__"]["allowed"]), expected[3], "{seed} {span}");
            assert_eq!(shown["until"].as_u64().unwrap(), (newest / step + 1) * step);
            let began =
                shown["keys"].as_array().unwrap().iter().filter(|count| !count.is_null()).count() as u64;
            assert_eq!(began, cells.min(newest / step - START / step + 1).max(1), "{seed} {span}");
        }
    }
}

/// 150 KB for 10 limits, 1.2 MB for 100 and 2.5 MB for any number.
#[test]
fn memory_is_bounded() {
    for (count, most) in [(10, 150_000), (100, 1_200_000), (2_000, 2_700_000)] {
        let limits: Vec<_> = (0..count).map(|number| (format!("limit-{number}"), [number, 0, 0])).collect();
        let sample = sample(&limits, [0; 3]);
        let before = HELD.get();
        let history = History::default();
        for second in 0..1_000 {
            history.record(START + second, &sample);
        }
        let held = HELD.get() - before;
        println!("{count} limits: {held} bytes");
        assert!(held <= most, "{count} limits: {held} bytes");
    }
}

#[test]
fn limits_beyond_the_rows_are_summed() {
    let limits: Vec<_> = (0..500).map(|number| (format!("limit-{number:03}"), [1, 2, 3])).collect();
    let history = History::default();
    history.record(START, &sample(&limits, [500, 0, 0]));
    let shown = read(&history, "5m")["limits"].as_object().unwrap().clone();
    assert_eq!(shown.len(), MAX_ROWS + 1);
    assert_eq!(sum(&shown["limit-000"]["refused"]), 2);
    assert_eq!(sum(&shown["(other)"]["refused"]), 2 * 300);
    let all: u64 = shown.values().map(|counts| sum(&counts["would_refuse"])).sum();
    assert_eq!(all, 3 * 500, "nothing is lost");
}

#[test]
fn removed_limit_keeps_its_row_until_it_is_empty() {
    let history = History::default();
    let mut sample = sample(&[("old".to_owned(), [7, 0, 0])], [7, 0, 0]);
    history.record(START, &sample);
    sample.active.clear();
    history.record(START + 3_600, &sample);
    assert_eq!(sum(&read(&history, "24h")["limits"]["old"]["allowed"]), 7);
    assert_eq!(sum(&read(&history, "1h")["limits"]["old"]["allowed"]), 0);
    history.record(START + 86_400, &sample);
    history.record(START + 86_401, &sample);
    assert_eq!(read(&history, "24h")["limits"], serde_json::json!({}));
}
