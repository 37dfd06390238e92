//! The IDs of admissions from permits, by which the store recognises that a charge was corrected before.
//!
//! An ID must be one that no other admission has, on any node. It need not be secret: receipts are authenticated.

use crate::random;

/// Shuffles numbers by random words of this node. Shuffling is one to one, so the IDs of a node differ if its numbers do;
/// those of two nodes are as unlikely to be the same as random numbers.
#[derive(Debug)]
pub(super) struct Ids {
    words: [u64; 2],
}

impl Ids {
    pub(super) fn new() -> Ids {
        Ids { words: [random::number(), random::number()] }
    }

    /// The ID for a number that this node uses once.
    #[inline]
    pub(super) fn id(&self, number: u64) -> u64 {
        let [before, after] = self.words;
        shuffled(number ^ before) ^ after
    }
}

/// The last step of SplitMix64: every bit of the number changes half of the bits of the result.
#[inline]
fn shuffled(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_of_several_nodes_differ() {
        let nodes: Vec<Ids> = (0..8).map(|_| Ids::new()).collect();
        let ids: BTreeSet<u64> =
            nodes.iter().flat_map(|node| (0..10_000).map(|number| node.id(number))).collect();
        assert_eq!(ids.len(), 80_000);
    }
}
