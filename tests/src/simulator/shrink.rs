//! Shrinks a failing scenario: drops actions, many at once and then one by one, while it still fails.

use std::fmt;
use std::str::FromStr;

use super::world::Violation;

/// The actions of a scenario that are played, by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept(Option<Vec<usize>>);

impl Kept {
    /// All of them.
    pub const ALL: Kept = Kept(None);

    /// Whether the action of this index is played.
    pub fn has(&self, index: usize) -> bool {
        self.0.as_ref().is_none_or(|kept| kept.binary_search(&index).is_ok())
    }
}

/// The smallest part of a failing scenario of `len` actions that still fails, and how.
pub fn smallest(
    len: usize,
    violation: Violation,
    mut fails: impl FnMut(&Kept) -> Option<Violation>,
) -> (Kept, Violation) {
    let (mut kept, mut violation): (Vec<usize>, Violation) = ((0..len).collect(), violation);
    let mut size = len.div_ceil(2);
    while size > 0 {
        let (mut at, mut helped) = (0, false);
        while at < kept.len() {
            let mut fewer = kept.clone();
            fewer.drain(at..kept.len().min(at + size));
            match fails(&Kept(Some(fewer.clone()))) {
                Some(still) => (kept, violation, helped) = (fewer, still, true),
                None => at += size,
            }
        }
        if !helped || size > 1 {
            size /= 2;
        }
    }
    (Kept(Some(kept)), violation)
}

/// The command that plays the kept actions of a seed.
pub fn replay_command(name: &str, seed: u64, kept: &Kept) -> String {
    format!(
        "SIMULATE={name}:{seed}:{kept} cargo test -p tollkeeper-tests --test simulator -- --nocapture replay"
    )
}

/// As ranges: `3,17-20`; `all` for everything.
impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(kept) = &self.0 else { return f.write_str("all") };
        for (number, run) in kept.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if number > 0 { "," } else { "" };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl FromStr for Kept {
    type Err = String;

    fn from_str(text: &str) -> Result<Kept, String> {
        if text == "all" {
            return Ok(Kept::ALL);
        }
        let number = |text: &str| text.parse::<usize>().map_err(|_| format!("`{text}` is not an index"));
        let mut kept = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            match part.split_once('-') {
                Some((first, last)) => kept.extend(number(first)?..=number(last)?),
                None => kept.push(number(part)?),
            }
        }
        Ok(Kept(Some(kept)))
    }
}
