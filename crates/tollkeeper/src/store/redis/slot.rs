//! Which part of a cluster a key belongs to.

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;

/// The slot of a key: by what stands between its first braces, or by all of it.
pub(crate) fn of(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map_or(key, |(tag, _)| if tag.is_empty() { key } else { tag });
    crc16(tag.as_bytes()) % SLOTS
}

/// CRC-16 of XMODEM, bit by bit: keys are short, and a call over the network follows.
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
        // As `CLUSTER KEYSLOT` says.
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
    fn a_tag_decides_if_it_says_anything() {
        assert_eq!(of("a{foo}b"), of("foo"));
        assert_eq!(of("{foo}{bar}"), of("foo"));
        assert_eq!(of("a{}{foo}"), crc16(b"a{}{foo}") % SLOTS);
        assert_eq!(of("a{foo"), crc16(b"a{foo") % SLOTS);
    }
}
