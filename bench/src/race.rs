//! Timing: all sides alternate round by round, so that disturbances of the machine affect all of them.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::report::median;

/// How often every side is measured, and for how long.
const ROUNDS: (usize, Duration) = (5, Duration::from_millis(300));
/// The same, where it is about the difference of two times: what disturbs one of them disturbs that more.
const FINE_ROUNDS: (usize, Duration) = (25, Duration::from_millis(60));
/// Duration of the warm-up, which is not measured.
const WARM_UP: Duration = Duration::from_millis(60);
/// Requests between two looks at the clock.
const BLOCK: usize = 256;

/// The load that every side gets.
#[derive(Debug)]
pub struct Load<'r, R> {
    /// The requests, repeated from the start when all were made.
    pub requests: &'r [R],
    /// Number of threads; each starts at another request.
    pub threads: usize,
    /// The expected result of every request: anything else would mean that the wrong thing was measured.
    pub allowed: bool,
}

/// One side, ready to run.
pub struct Side<R> {
    name: &'static str,
    run: Box<Run<R>>,
}

/// Runs for this long, and returns nanoseconds per check.
type Run<R> = dyn Fn(&Load<'_, R>, Duration) -> f64;

/// What a race measured.
#[derive(Clone, Debug)]
pub struct Times {
    /// The side.
    pub side: &'static str,
    /// Nanoseconds per check, of each round.
    pub nanos: Vec<f64>,
}

impl<R: Sync> Side<R> {
    /// A side that decides with `check`.
    pub fn new(name: &'static str, check: impl Fn(&R) -> bool + Sync + 'static) -> Side<R> {
        // The whole loop is compiled for this side: nothing dynamic is called within.
        Side { name, run: Box::new(move |load, lasting| run(load, lasting, &check)) }
    }
}

/// Measures all sides under one load.
pub fn race<R: Sync>(load: &Load<'_, R>, sides: &[Side<R>]) -> Vec<Times> {
    race_for(ROUNDS, load, sides)
}

/// Measures all sides under one load, to see by how much they differ.
pub fn race_finely<R: Sync>(load: &Load<'_, R>, sides: &[Side<R>]) -> Vec<Times> {
    race_for(FINE_ROUNDS, load, sides)
}

fn race_for<R: Sync>(
    (rounds, lasting): (usize, Duration),
    load: &Load<'_, R>,
    sides: &[Side<R>],
) -> Vec<Times> {
    for side in sides {
        (side.run)(load, WARM_UP);
    }
    let mut times: Vec<_> = sides.iter().map(|side| Times { side: side.name, nanos: Vec::new() }).collect();
    for _ in 0..rounds {
        for (side, times) in sides.iter().zip(&mut times) {
            times.nanos.push((side.run)(load, lasting));
        }
    }
    times
}

impl Times {
    /// The round in the middle.
    pub fn median(&self) -> f64 {
        median(&self.nanos)
    }
}

/// Nanoseconds per check, all threads together: with two threads that do not disturb each other it is
/// half of what one thread takes.
fn run<R: Sync>(load: &Load<'_, R>, lasting: Duration, check: &(impl Fn(&R) -> bool + Sync)) -> f64 {
    let blocks: Vec<&[R]> = load.requests.chunks(BLOCK).collect();
    let ready = Barrier::new(load.threads);
    let one = |thread: usize| {
        let (mut checks, mut passed) = (0, 0);
        ready.wait();
        let start = Instant::now();
        for block in blocks.iter().cycle().skip(thread * blocks.len() / load.threads) {
            for request in *block {
                passed += usize::from(check(black_box(request)));
            }
            checks += block.len();
            if start.elapsed() >= lasting {
                break;
            }
        }
        assert_eq!(passed, if load.allowed { checks } else { 0 }, "a side answered otherwise than it should");
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 checks")]
        let per_nano = checks as f64 / start.elapsed().as_nanos() as f64;
        per_nano
    };
    let per_nano: f64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..load.threads).map(|thread| scope.spawn(move || one(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that was measured")).sum()
    });
    1.0 / per_nano
}
