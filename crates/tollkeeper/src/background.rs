//! The library's own tokio runtime, on one background thread, for calls from outside of a runtime.
//!
//! It is started when it is first needed, once in each process.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::process::PerProcess;

#[derive(Debug)]
struct Background {
    runtime: Handle,
    /// The thread ends when this is dropped.
    _alive: oneshot::Sender<Infallible>,
}

static BACKGROUND: PerProcess<Background> = PerProcess::new();

thread_local! {
    /// Whether a blocking call holds this thread, so that a runtime that runs on it makes no progress.
    static BLOCKED: Cell<bool> = const { Cell::new(false) };
}

/// The background runtime, started on first use.
pub(crate) fn runtime() -> io::Result<&'static Handle> {
    Ok(&BACKGROUND.get_or_try_init(start)?.runtime)
}

fn start() -> io::Result<Background> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (alive, ended) = oneshot::channel::<Infallible>();
    thread::Builder::new().name("tollkeeper".to_owned()).spawn(move || {
        let _ = runtime.block_on(ended);
    })?;
    Ok(Background { runtime: handle, _alive: alive })
}

/// The current runtime; `None` outside of a runtime and while this thread is blocked.
pub(crate) fn ambient() -> Option<Handle> {
    if BLOCKED.get() { None } else { Handle::try_current().ok() }
}

/// Runs `future` in the runtime that polls it; outside of a runtime, in the background one.
pub(crate) async fn within<F: Future>(future: F) -> io::Result<F::Output> {
    let mut future = pin!(future);
    poll_fn(|context| {
        let entered = if ambient().is_some() { None } else { Some(runtime()?.enter()) };
        let output = future.as_mut().poll(context);
        drop(entered);
        output.map(Ok)
    })
    .await
}

/// Spawns a task on the current runtime; outside of a runtime, on the background one.
pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    match ambient() {
        Some(ambient) => ambient.spawn(task),
        None => runtime()?.spawn(task),
    };
    Ok(())
}

/// Marks this thread as blocked until the value is dropped.
pub(crate) fn block() -> Blocked {
    Blocked(BLOCKED.replace(true))
}

/// Marks its thread as blocked; see [`block`].
pub(crate) struct Blocked(bool);

impl Drop for Blocked {
    fn drop(&mut self) {
        BLOCKED.set(self.0);
    }
}
