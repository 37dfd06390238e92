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

/// A value of which each thread keeps its own copy, a share.
pub trait Shareable: Send + Sync + Sized + 'static {
    /// A copy that has no reference counter in common with the original.
    fn share(&self) -> Self;

    /// The thread-local variable that holds a thread's shares.
    fn shares() -> &'static LocalKey<Shares<Self>>;
}

/// The shares of one thread.
#[derive(Debug)]
pub struct Shares<T>(RefCell<[Option<Share<T>>; SHARES]>);

#[derive(Debug)]
struct Share<T> {
    id: usize,
    epoch: u64,
    current: Arc<T>,
}

/// How many values of a type a thread keeps shares of. Most programs have one.
const SHARES: usize = 4;

impl<T> Shares<T> {
    /// No shares yet.
    #[expect(clippy::new_without_default, reason = "created in `thread_local!`, which needs a `const fn`")]
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

/// A value that can be replaced while threads read it.
#[derive(Debug)]
pub struct ThreadCached<T> {
    /// Distinguishes this value from others of the same type: 0 for the first.
    id: usize,
    /// The version of the value: 1, incremented by each replacement.
    epoch: AtomicU64,
    current: Mutex<Arc<T>>,
}

/// How many have been created, for the next `id`.
static MADE: AtomicUsize = AtomicUsize::new(0);

impl<T: Shareable> ThreadCached<T> {
    /// Starts with this value.
    pub fn new(first: T) -> ThreadCached<T> {
        let id = MADE.fetch_add(1, Ordering::Relaxed);
        ThreadCached { id, epoch: AtomicU64::new(1), current: Mutex::new(Arc::new(first)) }
    }

    /// Calls `read` with this thread's share of the current value and its version, which every replacement changes.
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
                // Called from within `read`: the outer call keeps reading its share, which must not be replaced.
                own = self.take();
                &own
            };
            read(&share.current, share.epoch)
        })
    }

    /// This thread's share of the current value.
    #[inline]
    pub fn share(&self) -> Arc<T> {
        self.read(|current, _| Arc::clone(current))
    }

    /// Replaces the value with what `next` makes of the current one. Concurrent calls wait for each other.
    pub fn replace(&self, next: impl FnOnce(&T) -> T) -> Arc<T> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(next(&current));
        self.epoch.fetch_add(1, Ordering::Release);
        Arc::clone(&current)
    }

    /// The current value itself, whose reference counter all threads share.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes a new share of the current value.
    #[cold]
    fn take(&self) -> Share<T> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // The version only changes under the lock, so it belongs to this value.
        let epoch = self.epoch.load(Ordering::Relaxed);
        Share { id: self.id, epoch, current: Arc::new(current.share()) }
    }
}
