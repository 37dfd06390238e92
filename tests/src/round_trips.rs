//! A proxy that counts round trips.
//!
//! A turn is everything that the client sends until a reply arrives, together with that reply, however many commands it
//! contains. So the number of turns is the number of round trips that the client has waited for.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// A proxy between its clients and a local server.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    turns: AtomicU64,
    scripts: AtomicU64,
    closing: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

/// The side that sent last on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastSender {
    Server,
    Client { script: bool },
}

impl Proxy {
    /// Starts a proxy to this port.
    pub fn to(server: u16) -> Proxy {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
        let port = listener.local_addr().expect("the proxy listens").port();
        let shared = Arc::new(Shared::default());
        let accepting = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || accept(&listener, server, &shared))
        };
        Proxy { port, shared, accepting: Some(accepting) }
    }

    /// Port of the proxy.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Number of turns on all connections.
    pub fn turns(&self) -> u64 {
        self.shared.turns.load(SeqCst)
    }

    /// Number of turns with a script call (EVALSHA).
    pub fn scripts(&self) -> u64 {
        self.shared.scripts.load(SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, SeqCst);
        // Errors mean that a connection is closed already.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        for stream in self.shared.streams.lock().expect("not poisoned").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn accept(listener: &TcpListener, server: u16, shared: &Arc<Shared>) {
    while let Ok((client, _)) = listener.accept() {
        if shared.closing.load(SeqCst) {
            return;
        }
        let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
        let both = [client, server];
        for stream in &both {
            stream.set_nodelay(true).expect("the socket is open");
            let mut streams = shared.streams.lock().expect("not poisoned");
            streams.push(stream.try_clone().expect("the socket is open"));
        }
        let [client, server] = both;
        let [client_too, server_too] =
            [&client, &server].map(|stream| stream.try_clone().expect("the socket is open"));
        let last_sender = Arc::new(Mutex::new(LastSender::Server));
        let (up, down) = ((Arc::clone(shared), Arc::clone(&last_sender)), last_sender);
        thread::spawn(move || {
            carry(client, server, |bytes| up.0.client_sent(&mut up.1.lock().expect("no panic"), bytes))
        });
        thread::spawn(move || {
            carry(server_too, client_too, |_| *down.lock().expect("no panic") = LastSender::Server);
        });
    }
}

impl Shared {
    /// Counts data of a client: one turn if the server sent last.
    fn client_sent(&self, last_sender: &mut LastSender, bytes: &[u8]) {
        let script = bytes.windows(9).any(|word| word == b"\r\nEVALSHA");
        let counted = match *last_sender {
            LastSender::Server => {
                self.turns.fetch_add(1, SeqCst);
                false
            }
            LastSender::Client { script } => script,
        };
        if script && !counted {
            self.scripts.fetch_add(1, SeqCst);
        }
        *last_sender = LastSender::Client { script: script || counted };
    }
}

/// Forwards data after passing it to `inspect`, until one side closes.
fn carry(mut from: TcpStream, mut to: TcpStream, mut inspect: impl FnMut(&[u8])) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        inspect(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
