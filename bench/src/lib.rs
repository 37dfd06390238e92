//! Benchmarks of Tollkeeper against its peers.
//!
//! Each side implements a small trait of [`sides`], gets the same requests from [`keys`], is timed in alternating
//! rounds by [`race`], and is printed and saved as JSON by [`report`]. [`served`] starts servers, [`paced`] sends
//! requests to them on a schedule. [`middleware`] has the tower layers. [`fleet`] runs several processes on one Redis, each of which is a [`node`].

pub mod fleet;
pub mod keys;
pub mod middleware;
pub mod node;
pub mod ours;
pub mod paced;
pub mod peers;
pub mod race;
pub mod report;
pub mod served;
pub mod sides;
