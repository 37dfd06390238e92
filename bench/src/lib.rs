//! Tollkeeper and its peers, side by side.
//!
//! Whatever is compared stands behind one small trait in [`sides`], meets the same requests from
//! [`keys`], is timed in turns by [`race`], and ends up as lines and JSON in [`report`].
//! Servers are started by [`served`], and asked on a schedule by [`paced`].

pub mod keys;
pub mod ours;
pub mod paced;
pub mod peers;
pub mod race;
pub mod report;
pub mod served;
pub mod sides;
