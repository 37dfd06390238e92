//! References to keys: a limit and the values of a key, sealed with a secret of this process.
//!
//! `GET /v1/top` shows hashed facts by twelve digits and cuts long values, so a listed key cannot always be named by
//! what is shown. A reference can be passed back instead. It reveals nothing about the key, because it is encrypted,
//! and clients cannot forge one. It is valid for an hour, on the node that made it.

use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use tollkeeper_core::digest::hex;

/// How long a reference is valid, in seconds.
const VALID_FOR: u64 = 3_600;
const ABSENT: u16 = u16::MAX;

/// Makes and reads references.
#[derive(Debug)]
pub struct KeyRefs(RandomizedNonceKey);

/// A key: the limit, and the values of its facts in the form that keys have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedKey {
    /// The name of the limit.
    pub limit: String,
    /// The value of each fact that the limit is keyed by; `None` for an absent one.
    pub values: Vec<Option<String>>,
}

impl Default for KeyRefs {
    fn default() -> KeyRefs {
        let mut secret = [0; 32];
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        provider.secure_random.fill(&mut secret).expect("the system gives random bytes");
        KeyRefs(RandomizedNonceKey::new(&AES_256_GCM, &secret).expect("a key of 256 bits"))
    }
}

impl KeyRefs {
    /// The reference to a key.
    pub fn seal<'v>(&self, limit: &'v str, values: impl IntoIterator<Item = Option<&'v str>>) -> String {
        self.seal_at(limit, values, now())
    }

    fn seal_at<'v>(
        &self,
        limit: &'v str,
        values: impl IntoIterator<Item = Option<&'v str>>,
        now: u64,
    ) -> String {
        let mut text = now.to_le_bytes().to_vec();
        for value in std::iter::once(Some(limit)).chain(values) {
            let len = value.map_or(ABSENT, |value| u16::try_from(value.len()).expect("at most 1 KiB"));
            text.extend_from_slice(&len.to_le_bytes());
            text.extend_from_slice(value.unwrap_or_default().as_bytes());
        }
        let nonce = self.0.seal_in_place_append_tag(Aad::empty(), &mut text).expect("a few KiB");
        hex(&[&nonce.as_ref()[..], &text].concat())
    }

    /// The key that a reference names; `None` if this process did not make it, or more than an hour ago.
    pub fn open(&self, text: &str) -> Option<NamedKey> {
        self.open_at(text, now())
    }

    fn open_at(&self, text: &str, now: u64) -> Option<NamedKey> {
        let mut bytes = from_hex(text)?;
        let (nonce, sealed) = bytes.split_first_chunk_mut::<NONCE_LEN>()?;
        let opened = self.0.open_in_place(Nonce::from(&*nonce), Aad::empty(), sealed).ok()?;
        let (made, mut rest) = opened.split_first_chunk()?;
        if now.saturating_sub(u64::from_le_bytes(*made)) > VALID_FOR {
            return None;
        }
        let mut texts = Vec::new();
        while let Some((len, after)) = rest.split_first_chunk() {
            let len = u16::from_le_bytes(*len);
            let (value, after) = after.split_at_checked(if len == ABSENT { 0 } else { usize::from(len) })?;
            texts.push((len != ABSENT).then(|| String::from_utf8_lossy(value).into_owned()));
            rest = after;
        }
        let limit = texts.remove(0)?;
        Some(NamedKey { limit, values: texts })
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = text.chars().map(|char| char.to_digit(16)).collect();
    let pairs = digits?;
    let (pairs, []) = pairs.as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| u8::try_from(high * 16 + low).ok()).collect()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [Option<&str>; 3] = [Some("alice"), None, Some("")];

    #[test]
    fn reference_opens_for_an_hour_on_its_node() {
        let (refs, other) = (KeyRefs::default(), KeyRefs::default());
        let text = refs.seal_at("per-user", VALUES, 1_000);
        let key = NamedKey {
            limit: "per-user".to_owned(),
            values: VALUES.map(|value| value.map(str::to_owned)).to_vec(),
        };
        assert_eq!(refs.open_at(&text, 1_000 + VALID_FOR), Some(key.clone()));
        assert_eq!(refs.open_at(&text, 1_001 + VALID_FOR), None, "it has expired");
        assert_eq!(refs.open_at(&text, 0), Some(key), "a clock that goes back invalidates nothing");
        assert_eq!(other.open_at(&text, 1_000), None, "another process made it");
    }

    #[test]
    fn changed_reference_does_not_open() {
        let refs = KeyRefs::default();
        let text = refs.seal("per-user", VALUES);
        for index in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[index] = if changed[index] == b'0' { b'1' } else { b'0' };
            assert_eq!(refs.open(std::str::from_utf8(&changed).unwrap()), None, "{index}");
        }
        for wrong in ["", "0", "00", "zz", "ä", &text[2..], &text[..text.len() - 2]] {
            assert_eq!(refs.open(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn reference_reveals_nothing() {
        let refs = KeyRefs::default();
        let (one, same) = (refs.seal("per-user", VALUES), refs.seal("per-user", VALUES));
        assert_ne!(one, same, "equal keys cannot be recognised");
        assert!(!one.contains(&hex(b"alice")) && !one.contains(&hex(b"per-user")));
    }
}
