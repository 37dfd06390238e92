//! Values that belong to one process: a forked process creates its own.
//!
//! A forked process has a copy of its parent's memory, but only the thread that forked. It must not use what other
//! threads drive, such as a runtime or connections: those threads do not exist, and the sockets are the parent's.

use std::sync::OnceLock;

/// One value per process, created on first use in it. Reading takes no lock, because a lock that another
/// thread held during the fork is never released in the child.
#[derive(Debug)]
pub struct PerProcess<T>(OnceLock<Box<Generation<T>>>);

#[derive(Debug)]
struct Generation<T> {
    process: u32,
    value: T,
    /// The value of a process that was forked from this one.
    forked: PerProcess<T>,
}

impl<T> PerProcess<T> {
    /// No value yet.
    #[expect(clippy::new_without_default, reason = "created in statics, which need a `const fn`")]
    pub const fn new() -> PerProcess<T> {
        PerProcess(OnceLock::new())
    }

    /// The value of this process; `None` if it has not been created.
    pub fn get(&self) -> Option<&T> {
        self.of(std::process::id())
    }

    /// The value of a process, for callers that know its ID without asking the kernel; `None` until that process has made one.
    #[inline]
    pub fn of(&self, process: u32) -> Option<&T> {
        self.find(process).ok()
    }

    /// The newest value: in a forked process that has none yet, its parent's.
    pub fn newest(&self) -> Option<&T> {
        let (mut cell, mut newest) = (self, None);
        while let Some(generation) = cell.0.get() {
            newest = Some(&generation.value);
            cell = &generation.forked;
        }
        newest
    }

    /// The value of this process, created on first use. If several threads create one at the same time, one wins.
    pub fn get_or_try_init<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let process = std::process::id();
        match self.find(process) {
            Ok(value) => Ok(value),
            Err(PerProcess(empty)) => {
                let made = Generation { process, value: make()?, forked: PerProcess::new() };
                Ok(&empty.get_or_init(|| Box::new(made)).value)
            }
        }
    }

    /// The value of a process or, as the error, the empty cell in which to create it.
    fn find(&self, process: u32) -> Result<&T, &PerProcess<T>> {
        let mut cell = self;
        while let Some(generation) = cell.0.get() {
            if generation.process == process {
                return Ok(&generation.value);
            }
            cell = &generation.forked;
        }
        Err(cell)
    }
}
