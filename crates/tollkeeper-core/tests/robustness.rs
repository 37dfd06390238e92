//! Parsers of untrusted bytes accept any input without a panic.

use tollkeeper_core::net::Network;
use tollkeeper_core::{Charge, Key, Secret, Slot};

/// A pseudo-random generator (xorshift) that gives the same numbers in every run.
struct Random(u64);

impl Random {
    fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, from: &[u8]) -> Vec<u8> {
        let len = self.number() >> 32 & 0x7f;
        (0..len).map(|_| from[usize::try_from(self.number() >> 32).expect("32 bits") % from.len()]).collect()
    }
}

#[test]
fn parsers_do_not_panic_on_random_bytes() {
    let secret = Secret([9; 16]);
    let any: Vec<u8> = (0..=255).collect();
    let alphabets: [&[u8]; 5] = [
        &any,
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
        b"0123456789abcdef:./",
        b"\x00\x01\x02\x03\xff",
        "0:./ffüß€\u{10ffff}".as_bytes(),
    ];
    let mut random = Random(8);
    let (mut keys, mut networks) = (0, 0);
    for round in 0..200_000 {
        let bytes = random.bytes(alphabets[round % alphabets.len()]);
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(Charge::open(&text, &secret), None, "{text:?}");
        assert_eq!(Slot::open(&text, &secret), None, "{text:?}");
        if let Some(key) = Key::from_bytes(&bytes) {
            assert_eq!(key.to_bytes(), bytes);
            assert!(key.to_string().starts_with(key.limit()));
            keys += 1;
        }
        networks += usize::from(text.parse::<Network>().is_ok());
    }
    assert!(keys > 100, "only {keys} of 200000 inputs were keys");
    assert!(networks > 10, "only {networks} of 200000 inputs were networks");
}
