//! Times all sides in alternating rounds, so that noise of the machine affects all of them.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::report::median;

/// Rounds of each side, and the duration of one.
const ROUNDS: (usize, Duration) = (5, Duration::from_millis(300));
/// The same for the difference of two sides, which is noisier than the times themselves: more and shorter rounds.
const FINE_ROUNDS: (usize, Duration) = (25, Duration::from_millis(60));
/// Duration of the warm-up before the first round.
const WARM_UP: Duration = Duration::from_millis(60);
/// Requests between two reads of the clock.
const BLOCK: usize = 256;

/// The load that every side gets.
#[derive(Debug)]
pub struct Load<'r, R> {
    /// The requests, repeated in a loop.
    pub requests: &'r [R],
    /// Number of threads; each starts at a different request.
    pub threads: usize,
    /// The expected result of every request; a different one ends the run.
    pub allowed: bool,
}

/// One side, ready to run.
pub struct Side<R> {
    name: &'static str,
    run: Box<Run<R>>,
}

/// Runs for this long, and returns nanoseconds per check.
type Run<R> = dyn Fn(&Load<'_, R>, Duration) -> f64;

/// The times of one side.
#[derive(Clone, Debug)]
pub struct Times {
    /// Name of the side.
    pub side: &'static str,
    /// Nanoseconds per check of each round.
    pub nanos: Vec<f64>,
}

impl<R: Sync> Side<R> {
    /// A side that decides with `check`.
    pub fn new(name: &'static str, check: impl Fn(&R) -> bool + Sync + 'static) -> Side<R> {
        // The loop is monomorphized for this side: only the call of `run` is dynamic.
        Side { name, run: Box::new(move |load, lasting| run(load, lasting, &check)) }
    }
}

/// Measures all sides under one load.
pub fn race<R: Sync>(load: &Load<'_, R>, sides: &[Side<R>]) -> Vec<Times> {
    race_for(ROUNDS, load, sides)
}

/// Measures all sides under one load in many short rounds, for the difference between two sides.
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
    /// The median round.
    pub fn median(&self) -> f64 {
        median(&self.nanos)
    }
}

/// Nanoseconds per check over all threads: two threads without contention take half of the time of one.
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
        assert_eq!(passed, if load.allowed { checks } else { 0 }, "a side returned an unexpected decision");
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 checks")]
        let per_nano = checks as f64 / start.elapsed().as_nanos() as f64;
        per_nano
    };
    let per_nano: f64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..load.threads).map(|thread| scope.spawn(move || one(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic in a measured thread")).sum()
    });
    1.0 / per_nano
}
