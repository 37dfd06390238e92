//! Envoy's protobuf messages, generated from `proto/` by `tests/tests/protos.rs`.

#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]

/// The descriptors of all messages and services, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

pub mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                include!("proto/envoy.config.core.v3.rs");
            }
        }
    }
    pub mod extensions {
        pub mod common {
            pub mod ratelimit {
                pub mod v3 {
                    include!("proto/envoy.extensions.common.ratelimit.v3.rs");
                }
            }
        }
    }
    pub mod service {
        pub mod ratelimit {
            pub mod v3 {
                include!("proto/envoy.service.ratelimit.v3.rs");
            }
        }
    }
}
