//! What judges the whole product: it knows what was promised and what happened, and nothing of how.

pub mod contract;
