//! SHA-256 by aws-lc, which TLS brings along: in the time of a few cycles per byte, on every processor.

use aws_lc_rs::digest::{SHA256, digest};
pub use tollkeeper_core::digest::hex;

/// SHA-256 of these bytes.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    digest(&SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A digest in a config file or of a hashed fact comes from the core, which has its own implementation.
    #[test]
    fn digests_are_those_of_the_core() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1_000).collect();
        for len in [0, 1, 32, 55, 56, 64, 65, 119, 120, 1_000] {
            assert_eq!(sha256(&bytes[..len]), tollkeeper_core::digest::sha256(&bytes[..len]), "{len} bytes");
        }
    }
}
