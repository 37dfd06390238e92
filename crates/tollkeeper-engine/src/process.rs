//! The ID and the tokio runtime of this process. A forked process has only the thread that forked, so it starts a
//! runtime of its own.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::runtime::{Builder, Handle, Runtime};
use tollkeeper::process::PerProcess;

/// A second worker would only take tasks from the first, and time from the application: each batch of calls passes through
/// one task that sends it and one that reads its reply, and neither keeps a core busy.
const WORKERS: usize = 1;

static RUNTIME: PerProcess<Runtime> = PerProcess::new();

/// The ID of this process; 0 until it is first asked for.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Must be called in a forked process before it uses an engine whose store is in memory. Engines on a remote store
/// notice a fork on their own.
pub fn forked() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
}

/// The ID of this process, without asking the kernel with every call.
#[inline]
pub(crate) fn known_id() -> u32 {
    match PROCESS.load(Ordering::Relaxed) {
        0 => {
            forked();
            std::process::id()
        }
        id => id,
    }
}

/// The runtime of this process, started on first use. It never ends, and does not keep the process alive.
pub(crate) fn runtime() -> io::Result<&'static Handle> {
    let start = || {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(WORKERS).thread_name("tollkeeper-engine").enable_all().build()
    };
    Ok(RUNTIME.get_or_try_init(start)?.handle())
}
