//! A value that threads read millions of times a second and that is rarely replaced, such as the active policy.
//!
//! Each thread caches a share of it that no other thread touches, with a reference counter of its own. A read compares
//! two version numbers, and threads do not contend for cache lines. A thread renews its share when the version shows
//! that the value was replaced.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::LocalKey;

use tollkeeper_core::Policy;

/// Something that threads keep shares of.
pub trait Shareable: Send + Sync + Sized + 'static {
    /// A copy that has no counter in common with the original.
    fn share(&self) -> Self;

    /// Where a thread keeps its shares.
    fn shares() -> &'static LocalKey<Shares<Self>>;
}

/// The shares of a thread.
#[derive(Debug)]
pub struct Shares<T>(RefCell<[Option<Share<T>>; SHARES]>);

#[derive(Debug)]
struct Share<T> {
    id: usize,
    epoch: u64,
    current: Arc<T>,
}

/// How many of a kind a thread keeps shares of: most programs have one.
const SHARES: usize = 4;

impl<T> Shares<T> {
    /// None yet.
    #[expect(clippy::new_without_default, reason = "made by `thread_local`, which wants a constant")]
    pub const fn new() -> Shares<T> {
        Shares(RefCell::new([const { None }; SHARES]))
    }
}

impl Shareable for Policy {
    fn share(&self) -> Policy {
        self.clone()
    }

    #[inline]
    fn shares() -> &'static LocalKey<Shares<Policy>> {
        thread_local! { static POLICIES: Shares<Policy> = const { Shares::new() } }
        &POLICIES
    }
}

/// Something that can be replaced while it is in use.
#[derive(Debug)]
pub struct ThreadCached<T> {
    /// Tells one of these from another.
    id: usize,
    /// Counts replacements, from 1.
    epoch: AtomicU64,
    current: Mutex<Arc<T>>,
}

static MADE: AtomicUsize = AtomicUsize::new(0);

impl<T: Shareable> ThreadCached<T> {
    /// Puts the first in force.
    pub fn new(first: T) -> ThreadCached<T> {
        let id = MADE.fetch_add(1, Ordering::Relaxed);
        ThreadCached { id, epoch: AtomicU64::new(1), current: Mutex::new(Arc::new(first)) }
    }

    /// Reads what is in force, by this thread's share of it; `epoch` is another number whenever it was replaced.
    #[inline]
    pub fn read<R>(&self, read: impl FnOnce(&Arc<T>, u64) -> R) -> R {
        let epoch = self.epoch.load(Ordering::Acquire);
        T::shares().with(|Shares(shares)| {
            let (mut borrowed, own);
            let share = if let Ok(shares) = shares.try_borrow_mut() {
                borrowed = shares;
                let share = &mut borrowed[self.id % SHARES];
                match share {
                    Some(share) if share.id == self.id && share.epoch == epoch => {}
                    _ => *share = Some(self.take()),
                }
                share.as_ref().expect("taken above")
            } else {
                // Called within `read`: what the outer one reads stays as it is.
                own = self.take();
                &own
            };
            read(&share.current, share.epoch)
        })
    }

    /// This thread's share of it.
    #[inline]
    pub fn share(&self) -> Arc<T> {
        self.read(|current, _| Arc::clone(current))
    }

    /// Puts what `next` makes of the last in force. Who replaces it at the same time waits.
    pub fn replace(&self, next: impl FnOnce(&T) -> T) -> Arc<T> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(next(&current));
        self.epoch.fetch_add(1, Ordering::Release);
        Arc::clone(&current)
    }

    /// What is in force, in common with everybody else.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn take(&self) -> Share<T> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // Replaced only under the lock, so this number belongs to this one.
        let epoch = self.epoch.load(Ordering::Relaxed);
        Share { id: self.id, epoch, current: Arc::new(current.share()) }
    }
}
