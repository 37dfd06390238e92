//! Maps keys to the hash slots of a Redis cluster.

/// The number of hash slots in a cluster.
pub(crate) const SLOTS: u16 = 16_384;

/// The slot of a key: the hash of its tag, the text between its first braces, or of the whole key.
pub(crate) fn of(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map_or(key, |(tag, _)| if tag.is_empty() { key } else { tag });
    crc16(tag.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, bit by bit. A table would not pay: keys are short, and a network call follows.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc: u16, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // Expected values from `CLUSTER KEYSLOT`.
        for (key, slot) in [
            ("123456789", 12_739),
            ("foo", 12_182),
            ("bar", 5_061),
            ("", 0),
            ("tk:1:per-user:b1m:alice", 5_699),
        ] {
            assert_eq!(of(key), slot, "{key}");
        }
    }

    #[test]
    fn non_empty_tag_decides_the_slot() {
        assert_eq!(of("a{foo}b"), of("foo"));
        assert_eq!(of("{foo}{bar}"), of("foo"));
        assert_eq!(of("a{}{foo}"), crc16(b"a{}{foo}") % SLOTS);
        assert_eq!(of("a{foo"), crc16(b"a{foo") % SLOTS);
    }
}
