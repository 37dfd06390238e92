//! Fuzzes receipts and keys from untrusted text: invalid text is rejected, never a panic, and valid text round-trips
//! exactly.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tollkeeper::store::{Key, Secret};
use tollkeeper::{Charge, Slot};

fuzz_target!(|data: &[u8]| {
    let secret = Secret([7; 16]);
    if let Ok(text) = std::str::from_utf8(data) {
        if let Some(charge) = Charge::open(text, &secret) {
            assert_eq!(charge.seal(&secret, |_| 1), text);
        }
        let _ = Slot::open(text, &secret);
    }
    if let Some(key) = Key::from_bytes(data) {
        assert_eq!(key.to_bytes(), data);
        assert!(!key.to_string().is_empty());
    }
});
