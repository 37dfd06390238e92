//! A proxy in front of a Redis server that injects network faults.
//!
//! It parses commands and replies, so it can forward a command and lose its reply, or truncate a reply. It keeps TCP's
//! guarantees: nothing is lost from the middle of a stream, so a connection that has lost something is reset or stays
//! silent. Only [`Loss::Slip`] and [`Fault::Repeat`] do what a broken proxy between node and server would.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream, unix};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// A network fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None,
    /// Replies are delayed.
    Delay(Duration),
    /// All data is dropped, in both directions: a connection with a pending command never gets a reply.
    Drop,
    /// Connections are reset, new ones right after the connect.
    Reset,
    /// A connection delivers half of its next reply to a script, and closes.
    Cut,
    /// Nothing is read from either side; the data arrives when the fault is over.
    Stall,
    /// New connections are reset; existing ones work.
    Shut,
    /// One in `n` replies to a script is lost, although the script ran.
    Lose(u64, Loss),
    /// One in `n` replies to a script arrives twice, as with a broken proxy.
    Repeat(u64),
}

/// What happens to a connection whose reply was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It is reset.
    Reset,
    /// It still forwards commands, but no more replies.
    Silence,
    /// It continues, so the next reply takes the place of the lost one.
    Slip,
}

/// A running proxy. Stops on drop.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
}

/// Traffic counters of a proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that were made.
    pub connections: u64,
    /// Scripts forwarded to the server.
    pub scripts: u64,
    /// Replies of the server that did not arrive, or only in part.
    pub lost: u64,
}

#[derive(Debug)]
struct Shared {
    server: PathBuf,
    fault: watch::Sender<Fault>,
    connections: AtomicU64,
    scripts: AtomicU64,
    replies: AtomicU64,
    lost: AtomicU64,
}

impl Proxy {
    /// Starts a proxy in front of the server with this socket.
    pub fn before(server: PathBuf) -> Proxy {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a thread");
        // A std listener, because the test may run in another runtime and cannot block on this one.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        listener.set_nonblocking(true).expect("a socket");
        let shared = Arc::new(Shared {
            server,
            fault: watch::Sender::new(Fault::None),
            connections: AtomicU64::new(0),
            scripts: AtomicU64::new(0),
            replies: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        });
        let listening = Arc::clone(&shared);
        runtime.spawn(async move {
            listen(TcpListener::from_std(listener).expect("a socket"), listening).await;
        });
        Proxy { address, shared, runtime: Some(runtime) }
    }

    /// The address to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the fault, for existing connections as well.
    pub fn fault(&self, fault: Fault) {
        self.shared.fault.send_replace(fault);
    }

    /// The traffic so far.
    pub fn traffic(&self) -> Traffic {
        let Shared { connections, scripts, lost, .. } = &*self.shared;
        Traffic {
            connections: connections.load(Relaxed),
            scripts: scripts.load(Relaxed),
            lost: lost.load(Relaxed),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // In the background, because this may run in another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((node, _)) = listener.accept().await else { continue };
        shared.connections.fetch_add(1, Relaxed);
        if *shared.fault.borrow() == Fault::Shut {
            reset(&node);
            continue;
        }
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // The server is down, so the proxy refuses as well.
            let Ok(server) = UnixStream::connect(&shared.server).await else { return reset(&node) };
            let _ = node.set_nodelay(true);
            Connection::new(shared).carry(node, server).await;
        });
    }
}

/// Lets the connection end in a reset when it is dropped.
fn reset(node: &TcpStream) {
    let _ = node.set_zero_linger();
}

/// One connection of a node, as both directions see it.
struct Connection {
    shared: Arc<Shared>,
    fault: watch::Receiver<Fault>,
    /// For each command in flight, whether it is a script.
    asked: Mutex<VecDeque<bool>>,
    /// Whether commands or replies were lost; after that no more are forwarded in that direction.
    deaf: Mutex<(bool, bool)>,
}

/// Data for a node, with its delivery time.
enum Delivery {
    Bytes(Instant, Vec<u8>),
    End,
    Reset,
}

impl Connection {
    fn new(shared: Arc<Shared>) -> Connection {
        let fault = shared.fault.subscribe();
        Connection { shared, fault, asked: Mutex::default(), deaf: Mutex::default() }
    }

    /// Forwards until one side closes, or a fault ends the connection.
    async fn carry(self, node: TcpStream, server: UnixStream) {
        // Not split: a dropped half would send FIN, which a reset does not.
        let (from_server, to_server) = server.into_split();
        let (outgoing, deliveries) = mpsc::unbounded_channel();
        let commands = pin!(self.commands(&node, to_server));
        let replies = pin!(self.replies(from_server, outgoing));
        let deliveries = pin!(deliver(&node, deliveries));
        let mut fault = self.fault.clone();
        let resets = pin!(fault.wait_for(|fault| *fault == Fault::Reset));
        // The reply direction ends when its end is delivered.
        let end = tokio::select! {
            _ = commands => Delivery::End,
            end = deliveries => end,
            () = async { let _ = replies.await; std::future::pending().await } => Delivery::End,
            _ = resets => Delivery::Reset,
        };
        if matches!(end, Delivery::Reset) {
            reset(&node);
        }
    }

    async fn commands(&self, node: &TcpStream, mut server: unix::OwnedWriteHalf) -> io::Result<()> {
        let mut fault = self.fault.clone();
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let _ = fault.wait_for(|fault| *fault != Fault::Stall).await;
            node.readable().await?;
            let length = match node.try_read(&mut chunk) {
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                read => read?,
            };
            let _ = fault.wait_for(|fault| *fault != Fault::Stall).await;
            bytes.extend_from_slice(&chunk[..length]);
            while let Some(length) = message(&bytes) {
                let command: Vec<u8> = bytes.drain(..length).collect();
                if *fault.borrow() == Fault::Drop {
                    *lock(&self.deaf) = (true, true);
                }
                if lock(&self.deaf).0 {
                    continue;
                }
                // A script without keys only tests whether scripts may be run.
                let script = command.windows(4).take(16).any(|word| word.eq_ignore_ascii_case(b"EVAL"))
                    && !command.ends_with(b"\r\n0\r\n");
                lock(&self.asked).push_back(script);
                self.shared.scripts.fetch_add(u64::from(script), Relaxed);
                server.write_all(&command).await?;
            }
        }
    }

    async fn replies(
        &self,
        mut server: unix::OwnedReadHalf,
        outgoing: mpsc::UnboundedSender<Delivery>,
    ) -> io::Result<()> {
        let mut fault = self.fault.clone();
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let length = server.read(&mut chunk).await.unwrap_or(0);
            if length == 0 {
                let _ = outgoing.send(Delivery::End);
                return Ok(());
            }
            let _ = fault.wait_for(|fault| *fault != Fault::Stall).await;
            let arrived = Instant::now();
            bytes.extend_from_slice(&chunk[..length]);
            while let Some(length) = message(&bytes) {
                let mut reply: Vec<u8> = bytes.drain(..length).collect();
                let script = lock(&self.asked).pop_front().unwrap_or(false);
                let fault = *fault.borrow();
                if fault == Fault::Drop {
                    *lock(&self.deaf) = (true, true);
                }
                if lock(&self.deaf).1 {
                    continue;
                }
                match fault {
                    Fault::Cut if script => {
                        self.shared.lost.fetch_add(1, Relaxed);
                        reply.truncate(reply.len() / 2);
                        let _ = outgoing.send(Delivery::Bytes(arrived, reply));
                        let _ = outgoing.send(Delivery::End);
                        return Ok(());
                    }
                    Fault::Lose(one_in, loss)
                        if script && self.shared.replies.fetch_add(1, Relaxed) % one_in == one_in - 1 =>
                    {
                        self.shared.lost.fetch_add(1, Relaxed);
                        match loss {
                            Loss::Silence => lock(&self.deaf).1 = true,
                            Loss::Slip => {}
                            Loss::Reset => {
                                let _ = outgoing.send(Delivery::Reset);
                                return Ok(());
                            }
                        }
                    }
                    Fault::Repeat(one_in)
                        if script && self.shared.replies.fetch_add(1, Relaxed) % one_in == one_in - 1 =>
                    {
                        let twice = reply.repeat(2);
                        drop(outgoing.send(Delivery::Bytes(arrived, twice)));
                    }
                    Fault::Delay(delay) => drop(outgoing.send(Delivery::Bytes(arrived + delay, reply))),
                    _ => drop(outgoing.send(Delivery::Bytes(arrived, reply))),
                }
            }
        }
    }
}

/// Delivers what is due to a node until the stream ends, and returns how.
async fn deliver(node: &TcpStream, mut deliveries: mpsc::UnboundedReceiver<Delivery>) -> Delivery {
    while let Some(Delivery::Bytes(due, bytes)) = {
        let next = deliveries.recv().await;
        if let Some(end @ (Delivery::End | Delivery::Reset)) = next {
            return end;
        }
        next
    } {
        tokio::time::sleep_until(due).await;
        let mut left = &bytes[..];
        while !left.is_empty() {
            if node.writable().await.is_err() {
                return Delivery::End;
            }
            match node.try_write(left) {
                Ok(length) => left = &left[length..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Delivery::End,
            }
        }
    }
    Delivery::End
}

/// The length of the first command or reply in `bytes`, if it is complete.
fn message(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|two| two == b"\r\n")? + 2;
    let number = || -> Option<i64> { std::str::from_utf8(&bytes[1..line - 2]).ok()?.parse().ok() };
    let end = match bytes[0] {
        b'$' => number()
            .filter(|length| *length >= 0)
            .map_or(line, |length| line + usize::try_from(length).expect("a length of at least 0") + 2),
        b'*' => {
            let mut end = line;
            for _ in 0..number().unwrap_or(0) {
                end += message(&bytes[end..])?;
            }
            end
        }
        _ => line,
    };
    (end <= bytes.len()).then_some(end)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::message;

    #[test]
    fn message_length_is_found() {
        for (bytes, expected) in [
            ("+OK\r\n+PONG\r\n", Some(5)),
            ("$-1\r\n", Some(5)),
            ("$3\r\nab\r\r\n", Some(9)),
            ("$3\r\nabc", None),
            ("*2\r\n:1\r\n*1\r\n$1\r\na\r\n:7\r\n", Some(19)),
            ("*2\r\n:1\r\n", None),
            ("*-1\r\n", Some(5)),
            ("*0", None),
        ] {
            assert_eq!(message(bytes.as_bytes()), expected, "{bytes:?}");
        }
    }
}
