//! Keeps the memory of the last decision that each thread dropped, for the next decision of that thread.
//!
//! A decision is one box and holds a reference to its policy. Most threads drop a decision before they make the next
//! one, under the same policy: then neither the allocator nor the reference count of the policy is touched. See
//! `docs/adr/0004-decision-on-the-heap.md` for the numbers.

use std::cell::Cell;

use super::DecidedToll;

thread_local! {
    static SPARE: Cell<Option<Box<DecidedToll>>> = const { Cell::new(None) };
}

/// The memory of a dropped decision, with its old contents; `None` if it is in use.
#[inline]
pub(super) fn take() -> Option<Box<DecidedToll>> {
    // A thread that ends may decide after its spare memory was freed.
    SPARE.try_with(Cell::take).ok().flatten()
}

/// Keeps the memory of a decision, instead of what was kept before. What long keys took outside of the box is freed.
#[inline]
pub(super) fn keep(decided: Box<DecidedToll>) {
    if decided.toll.is_small() {
        let _ = SPARE.try_with(|spare| spare.set(Some(decided)));
    }
}
