//! A rate limiter with stated contracts, to be embedded in one process.
mod blocking;
mod builder;
mod clock;
mod current;
mod guard;
mod handle;
mod limiter;
mod memory;
mod queue;
mod random;
mod store;
mod sync;

pub use builder::{Backend, BuildError, Builder};
pub use clock::{Clock, ManualClock};
pub use guard::SlotGuard;
pub use handle::{Handle, HandleError, Passage};
pub use limiter::{Acquired, Deciding, Limiter, Request, Waiting};
pub use memory::{Capacity, MemoryStore, Restored, SnapshotError, Snapshots};
pub use store::{Answer, Correction, Store};
pub use tollkeeper_core::*;
