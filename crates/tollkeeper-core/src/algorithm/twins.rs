//! The twins: the algorithms again, in Lua, for a store whose state lives in Redis.
//!
//! The functions are pure and use no globals. They are pieces of a script and not modules: whoever
//! assembles one puts these names before them, as locals: `read` and `pack` (of `struct`), `floor` and
//! `ceil` (of `math`), `sub` and `rep` (of `string`), `concat` (of `table`).
//!
//! A quota is a table: `count` and `period` (in ticks), and for a meter `burst`, `capacity`, `fill` (the
//! ticks until a full one is empty) and `last` (the last tick before 2^53 µs). What is given back of an
//! earlier charge depends on `past`: its `cost`, `count` and `mark`.
//!
//! That both languages say the same is tested on a real server: `tests/tests/twins.rs`.

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
