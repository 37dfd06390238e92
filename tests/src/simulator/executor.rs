//! A single-threaded executor: polls the tasks that were woken, in the order in which they were woken.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

/// A task.
pub type Task = Pin<Box<dyn Future<Output = ()>>>;

/// The tasks of all nodes. A task belongs to a node and is polled only while that node runs.
#[derive(Default)]
pub struct Executor {
    tasks: BTreeMap<u64, (usize, Task, Waker)>,
    woken: Arc<Mutex<VecDeque<u64>>>,
}

struct TaskWaker {
    task: u64,
    woken: Arc<Mutex<VecDeque<u64>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<TaskWaker>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<TaskWaker>) {
        lock(&self.woken).push_back(self.task);
    }
}

impl Executor {
    /// Adds a task of a node; it is polled soon.
    pub fn spawn(&mut self, task: u64, node: usize, future: Task) {
        let waker = Waker::from(Arc::new(TaskWaker { task, woken: Arc::clone(&self.woken) }));
        self.tasks.insert(task, (node, future, waker));
        lock(&self.woken).push_back(task);
    }

    /// Drops a task; false if it is done.
    pub fn abort(&mut self, task: u64) -> bool {
        self.tasks.remove(&task).is_some()
    }

    /// Drops all tasks of a node.
    pub fn abort_all_of(&mut self, node: usize) -> usize {
        let before = self.tasks.len();
        self.tasks.retain(|_, (of, ..)| *of != node);
        before - self.tasks.len()
    }

    /// The next woken task and its node.
    pub fn next_woken(&mut self) -> Option<(u64, usize)> {
        loop {
            let task = lock(&self.woken).pop_front()?;
            if let Some((node, ..)) = self.tasks.get(&task) {
                return Some((task, *node));
            }
        }
    }

    /// Polls a task.
    pub fn poll(&mut self, task: u64) {
        let Some((_, future, waker)) = self.tasks.get_mut(&task) else { return };
        if future.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
            self.tasks.remove(&task);
        }
    }

    /// Wakes tasks that were set aside.
    pub fn wake(&mut self, tasks: impl IntoIterator<Item = u64>) {
        lock(&self.woken).extend(tasks);
    }

    /// The tasks that are not done.
    pub fn pending(&self) -> impl Iterator<Item = u64> {
        self.tasks.keys().copied()
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tasks.keys()).finish()
    }
}

/// A lock of a simulation, which has one thread.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
