//! SipHash-2-4 with 128 bits: authenticates receipts, and staggers the windows of keys.
//!
//! A small, well-studied keyed hash function by Aumasson and Bernstein, implemented here because the core
//! has no dependencies, and tested against the vectors published by its authors.

use core::fmt;

/// Sixteen secret bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    /// Hides the bytes, to keep them out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The keyed hash of a message.
pub fn hash(secret: &Secret, message: &[u8]) -> u128 {
    let (k0, k1) = (word(&secret.0[..8]), word(&secret.0[8..]));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let blocks = message.chunks_exact(8);
    let mut last = [0; 8];
    last[..blocks.remainder().len()].copy_from_slice(blocks.remainder());
    last[7] = message.len().to_le_bytes()[0];
    for block in blocks.chain([&last[..]]) {
        let block = word(block);
        v[3] ^= block;
        rounds(&mut v, 2);
        v[0] ^= block;
    }
    v[2] ^= 0xee;
    rounds(&mut v, 4);
    let low = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    rounds(&mut v, 4);
    let high = v[0] ^ v[1] ^ v[2] ^ v[3];
    u128::from(high) << 64 | u128::from(low)
}

fn rounds(v: &mut [u64; 4], count: usize) {
    for _ in 0..count {
        v[0] = v[0].wrapping_add(v[1]);
        v[2] = v[2].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[1]);
        v[0] = v[0].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].rotate_left(32);
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siphash_matches_the_published_vectors() {
        let secret = Secret(core::array::from_fn(|index| u8::try_from(index).expect("16")));
        let message: Vec<u8> = (0..63).collect();
        for (len, expected) in [
            (0, "a3817f04ba25a8e66df67214c7550293"),
            (1, "da87c1d86b99af44347659119b22fc45"),
            (8, "3b62a9ba6258f5610f83e264f31497b4"),
            (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
            (16, "6ee2a4ca67b054bbfd3315bf85230577"),
        ] {
            let hex: String =
                hash(&secret, &message[..len]).to_le_bytes().map(|byte| format!("{byte:02x}")).concat();
            assert_eq!(hex, expected, "{len} bytes");
        }
    }
}
