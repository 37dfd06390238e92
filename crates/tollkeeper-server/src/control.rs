//! Runtime control: the active limits, config reload, access tokens, TLS, systemd and the open-file limit.

pub mod access;
pub mod active_limits;
pub mod reload;
pub mod rlimit;
pub mod systemd;
pub mod tls;
