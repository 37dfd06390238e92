//! What is in force and who may change it: limits, reload, access, TLS and the process's own limits.

pub mod access;
pub mod active_limits;
pub mod reload;
pub mod rlimit;
pub mod systemd;
pub mod tls;
