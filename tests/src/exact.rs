//! Limits and sizes shared by `tests/exact.rs` and its child processes.

use tollkeeper::{Algorithm, Facts, Limit, Quota, facts};

/// Number of processes, tasks per process, and requests per task.
pub const PROCESSES: usize = 8;
#[expect(missing_docs, reason = "above")]
pub const TASKS: usize = 64;
#[expect(missing_docs, reason = "above")]
pub const REQUESTS: usize = 20;

/// The limit of all processes together; smaller than the sums of the other two limits.
pub const ALL: u64 = 4_000;
/// The limit of each process.
pub const PER_PROCESS: u64 = 700;
/// The limit of each of two routes.
pub const PER_ROUTE: u64 = 2_500;

/// Three limits of different algorithms: one key for all processes, one per process, one per route.
pub fn limits() -> Vec<Limit> {
    vec![
        Limit::new("per-process", Quota::per_day(PER_PROCESS).burst(PER_PROCESS)).by("process"),
        Limit::new("all", Quota::per_day(ALL)).algorithm(Algorithm::FixedWindow),
        Limit::new("per-route", Quota::per_day(PER_ROUTE)).by("route").algorithm(Algorithm::SlidingLog),
    ]
}

/// The facts of a request of this process and task.
pub fn facts(process: usize, task: usize) -> Facts<'static> {
    facts! { "process" => process as u64, "route" => ["/a", "/b"][task % 2] }
}
