//! The Lua source of the algorithms (the *twins*), for stores that decide inside Redis.
//!
//! The functions are pure and use no globals. They are fragments of a script, not modules: the script that
//! includes them must first define these locals: `read` and `pack` (from `struct`), `floor` and `ceil` (from
//! `math`), `sub` and `rep` (from `string`), `concat` (from `table`).
//!
//! A quota is a table: `count` and `period` (in ticks), and for a meter `burst`, `capacity`, `fill` (the
//! ticks until a full meter is empty) and `last` (the last tick before 2^53 µs). Refunds take the earlier
//! charge as a table `past` with `cost`, `count` and `mark`.
//!
//! `tests/tests/twins.rs` checks on a real server that both languages compute the same results.

/// The twin of [`meter`](super::meter).
pub const METER: &str = include_str!("meter.lua");
/// The twin of [`fixed_window`](super::fixed_window).
pub const FIXED_WINDOW: &str = include_str!("fixed_window.lua");
/// The twin of [`sliding_window`](super::sliding_window).
pub const SLIDING_WINDOW: &str = include_str!("sliding_window.lua");
/// The twin of [`sliding_log`](super::sliding_log).
pub const SLIDING_LOG: &str = include_str!("sliding_log.lua");
/// The twin of [`concurrency`](super::concurrency).
pub const CONCURRENCY: &str = include_str!("concurrency.lua");
