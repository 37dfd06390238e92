//! The policy in force, read millions of times a second and replaced once in a while.
//!
//! Each thread keeps a share of it that no other thread touches, with a counter of its own: reading is
//! a comparison of two numbers, and threads do not wait for each other's cache lines. A share is renewed
//! when the number says that the policy has been replaced.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tollkeeper_core::Policy;

/// A policy that can be replaced while it is in use.
#[derive(Debug)]
pub(crate) struct Current {
    /// Tells one of these from another.
    id: usize,
    /// Counts replacements, from 1.
    epoch: AtomicU64,
    policy: Mutex<Arc<Policy>>,
}

/// A thread's share of a policy.
struct Share {
    id: usize,
    epoch: u64,
    policy: Arc<Policy>,
}

/// How many policies a thread keeps shares of: most programs have one.
const SHARES: usize = 4;

thread_local! {
    static KEPT: RefCell<[Option<Share>; SHARES]> = const { RefCell::new([const { None }; SHARES]) };
}

static MADE: AtomicUsize = AtomicUsize::new(0);

impl Current {
    pub(crate) fn new(policy: Policy) -> Current {
        let id = MADE.fetch_add(1, Ordering::Relaxed);
        Current { id, epoch: AtomicU64::new(1), policy: Mutex::new(Arc::new(policy)) }
    }

    /// Reads the policy; `epoch` is another number whenever the policy is another.
    #[inline]
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Arc<Policy>, u64) -> T) -> T {
        let epoch = self.epoch.load(Ordering::Acquire);
        KEPT.with_borrow_mut(|kept| {
            let kept = &mut kept[self.id % SHARES];
            match kept {
                Some(share) if share.id == self.id && share.epoch == epoch => {}
                _ => *kept = Some(self.take()),
            }
            let share = kept.as_ref().expect("taken above");
            read(&share.policy, share.epoch)
        })
    }

    /// This thread's share of the policy.
    #[inline]
    pub(crate) fn share(&self) -> Arc<Policy> {
        self.read(|policy, _| Arc::clone(policy))
    }

    /// Puts another policy in force, under the version that `next` makes of the last.
    pub(crate) fn replace(&self, policy: Policy, next: impl FnOnce(u64) -> u64) -> Arc<Policy> {
        let mut current = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        let policy = Arc::new(policy.with_version(next(current.version())));
        *current = Arc::clone(&policy);
        self.epoch.fetch_add(1, Ordering::Release);
        policy
    }

    /// The policy in force.
    pub(crate) fn get(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn take(&self) -> Share {
        let policy = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        // Replaced only under the lock, so this number belongs to this policy.
        let epoch = self.epoch.load(Ordering::Relaxed);
        Share { id: self.id, epoch, policy: Arc::new(Policy::clone(&policy)) }
    }
}
