//! Blocks a thread until a future is ready, for callers without an async runtime.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Parks the thread until the future is ready. Inside of an async runtime this thread may be the only one that the
/// runtime has, so calls to a remote store are made by the background runtime.
pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    #[cfg(feature = "redis")]
    let _blocked = crate::background::block();
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocking_wait_ends_when_another_thread_wakes_it() {
        let mut asked = 0;
        let future = std::future::poll_fn(move |context| {
            asked += 1;
            let waker = context.waker().clone();
            thread::spawn(move || waker.wake());
            if asked < 3 { Poll::Pending } else { Poll::Ready(asked) }
        });
        assert_eq!(wait(future), 3);
    }
}
