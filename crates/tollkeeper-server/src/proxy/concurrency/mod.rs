//! Limits the requests in flight to an upstream: a fixed number, or one that adapts to its latency.
//!
//! ```text
//! let mut permit = gate.enter(priority).await?;  // `Shed`: 503 with Retry-After: 1, and the charge is refunded
//! permit.sent(Instant::now());                   // the request with its body is on its way: latency counts from here
//! permit.head(Ending::of(response.status()));    // or `Ending::Failed` after a timeout
//! ```
//!
//! Then `permit` moves into the response body or the tunnel, and frees its slot when it is dropped. [`Gate`] has the
//! queue, the lock and the clock; [`slots`] and [`step`] are functions on values.

pub mod gate;
pub mod priorities;
pub mod slots;
pub mod step;

#[cfg(test)]
mod simulations;
#[cfg(test)]
mod simulator;

pub use gate::{Gate, GatePermit, GateSettings, GateView, LimitSettings, Shed};
pub use priorities::Priorities;
pub use step::{Bounds, Ending};
