//! Random numbers of the operating system: secrets, and numbers that most likely no other call returns.
//!
//! On Linux this is the system call of `rustix`, which the clock needs anyway; elsewhere it is the crate `getrandom`.

use tollkeeper_core::Secret;

/// Sixteen unpredictable bytes.
///
/// # Panics
///
/// If the operating system has no random numbers, as Linux before 3.17.
pub fn secret() -> Secret {
    let mut secret = [0; 16];
    fill(&mut secret);
    Secret(secret)
}

/// A random number that most likely no other call returns.
pub(crate) fn number() -> u64 {
    let mut bytes = [0; 8];
    fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

#[cfg(target_os = "linux")]
fn fill(mut rest: &mut [u8]) {
    use rustix::io::Errno;
    use rustix::rand::{GetRandomFlags, getrandom};

    while !rest.is_empty() {
        match getrandom(&mut *rest, GetRandomFlags::empty()) {
            Ok(filled) => rest = &mut rest[filled..],
            // A signal arrived before the kernel had collected enough entropy, shortly after boot.
            Err(Errno::INTR) => {}
            Err(error) => panic!("the operating system has no random numbers: {error}"),
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn fill(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the operating system has random numbers");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// All bytes are drawn: of 64 secrets, no byte is the same in all.
    #[test]
    fn secrets_are_different_in_every_byte() {
        let secrets: Vec<[u8; 16]> = (0..64).map(|_| secret().0).collect();
        for index in 0..16 {
            let bytes: BTreeSet<u8> = secrets.iter().map(|secret| secret[index]).collect();
            assert!(bytes.len() > 16, "byte {index} has {} values in 64 secrets", bytes.len());
        }
        let numbers: BTreeSet<u64> = (0..64).map(|_| number()).collect();
        assert_eq!(numbers.len(), 64);
    }
}
