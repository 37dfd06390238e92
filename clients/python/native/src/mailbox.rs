//! Brings answers that wait for Redis to an asyncio event loop.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tollkeeper_engine::{EngineAnswer, EngineCall};

use crate::{Answer, as_tuple, closed, start_ask, start_visit};

/// Answers for one event loop. The engine's threads append them and make a socket readable, and the loop takes all that
/// have arrived at once, so no thread of the engine needs the GIL.
#[pyclass(frozen, module = "tollkeeper._native")]
pub(crate) struct Mailbox {
    inbox: Arc<Inbox>,
    /// Readable while answers are waiting.
    wake_receiver: UnixStream,
}

struct Inbox {
    messages: Mutex<Vec<(u64, Message)>>,
    wake_sender: UnixStream,
}

#[derive(IntoPyObject)]
enum Message {
    Answer(Answer),
    Visit(String),
}

impl Inbox {
    fn put(&self, call: u64, message: Message) {
        let was_empty = {
            let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
            messages.push((call, message));
            messages.len() == 1
        };
        if was_empty {
            // A full socket is readable, and a closed one belongs to a loop that has ended.
            let _ = (&self.wake_sender).write(&[1]);
        }
    }
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new() -> io::Result<Mailbox> {
        let (wake_receiver, wake_sender) = UnixStream::pair()?;
        wake_receiver.set_nonblocking(true)?;
        wake_sender.set_nonblocking(true)?;
        Ok(Mailbox { inbox: Arc::new(Inbox { messages: Mutex::default(), wake_sender }), wake_receiver })
    }

    /// The descriptor to watch.
    fn fileno(&self) -> i32 {
        self.wake_receiver.as_raw_fd()
    }

    /// Makes a call of the HTTP API. Its answer arrives as message `call`.
    fn ask(&self, number: u32, verb: &str, body: &str, call: u64) -> PyResult<()> {
        match start_ask(number, verb, body)? {
            None => self.inbox.put(call, Message::Answer(closed())),
            Some(asked) => {
                self.expect(asked, call, |answered: EngineAnswer| Message::Answer(as_tuple(answered)))
            }
        }
        Ok(())
    }

    /// Decides a request by its head. The answer arrives as message `call`.
    fn visit(&self, number: u32, head: &[u8], own: &str, kind: &str, body: &[u8], call: u64) -> PyResult<()> {
        self.expect(start_visit(number, head, own, kind, body)?, call, Message::Visit);
        Ok(())
    }

    /// Takes all answers that have arrived.
    fn take(&self) -> Vec<(u64, Message)> {
        // The socket first: what arrives after that makes it readable again.
        let mut bytes = [0; 64];
        while matches!((&self.wake_receiver).read(&mut bytes), Ok(64)) {}
        std::mem::take(&mut *self.inbox.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Mailbox {
    fn expect<T: Send + 'static>(&self, asked: EngineCall<T>, call: u64, as_message: fn(T) -> Message) {
        match asked {
            EngineCall::Ready(value) => self.inbox.put(call, as_message(value)),
            EngineCall::Pending(pending) => {
                let inbox = Arc::clone(&self.inbox);
                pending.spawn(move |value| inbox.put(call, as_message(value)));
            }
        }
    }
}
