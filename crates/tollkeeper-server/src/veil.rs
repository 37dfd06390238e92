//! Values that were hashed because they are secrets: of them a dozen digits are shown, enough to tell one
//! from another and too little to be used.

use std::borrow::Cow;

use tollkeeper::config::HttpSettings;
use tollkeeper::digest::{hex, sha256};

/// The facts whose values are not shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Veil(Vec<String>);

/// As much of a hash as is shown.
const SHOWN: usize = 12;

impl Veil {
    /// The facts that the config hashes.
    pub fn of(http: &HttpSettings) -> Veil {
        Veil(http.facts.iter().filter(|fact| fact.hash).map(|fact| fact.name.clone()).collect())
    }

    /// The value of a fact as it may be shown. Who asks through the API may send what a gateway would have
    /// hashed: that is hashed here.
    pub fn over<'v>(&self, fact: &str, value: &'v str) -> Cow<'v, str> {
        if !self.0.iter().any(|hashed| hashed == fact) {
            return Cow::Borrowed(value);
        }
        let is_hash = value.len() == 32 && value.bytes().all(|byte| byte.is_ascii_hexdigit());
        match is_hash {
            true => Cow::Borrowed(&value[..SHOWN]),
            false => Cow::Owned(hex(&sha256(value.as_bytes())[..SHOWN / 2])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hashed_fact_is_a_dozen_digits_whoever_hashed_it() {
        let veil = Veil(vec!["api_key".to_owned()]);
        let hash = hex(&sha256(b"secret"));
        assert_eq!(veil.over("api_key", "secret"), hash[..12]);
        assert_eq!(veil.over("api_key", &hash[..32]), hash[..12]);
        assert_eq!(veil.over("user", "alice"), "alice");
    }
}
