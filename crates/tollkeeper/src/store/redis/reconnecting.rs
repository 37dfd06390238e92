//! A connection to one Redis server that reconnects whenever it breaks.
//!
//! Calls wait for a connection only during the very first attempt. After that, a call without a connection fails
//! at once, and is known not to have run. The pause between attempts grows and has a random part, so that a
//! thousand nodes do not reconnect in the same millisecond.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::address::Address;
use super::call_error::{CallError, Redirect};
use super::eviction::Eviction;
use super::session::Env;
use super::wire::Malformed;
use crate::random;
use crate::sync::{Mutex, lock};

/// The timeout of an attempt to connect and of a reply, after which the connection is closed. A much shorter one
/// would break all connections to a server that pauses for a moment, to fork or to write to its disk.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The first and the longest pause between two attempts, each lengthened by up to a half. So a server that
/// comes back just after an attempt has failed is found within 1.6 s, and is then used at once: see
/// [`Remote::arrivals`](crate::store::Remote::arrivals).
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(400));
/// After a connection that lived for less, the pause keeps growing.
const STABLE: Duration = Duration::from_secs(1);

/// A connection that a background task restores whenever it breaks.
pub(crate) struct ReconnectingConnection {
    state: watch::Receiver<ConnectionState>,
    /// The number of the last connection that was found broken. Calls in flight find out one after the other,
    /// some of them after the next connection was made, and must not close that one.
    broken: watch::Sender<u64>,
    /// The command that the Redis user has no permission for, and the message about it.
    forbidden: Mutex<Option<(Vec<u8>, Arc<str>)>>,
    reconnector: JoinHandle<()>,
}

/// A reply that was not parsed yet.
#[derive(Debug)]
pub(crate) struct RawReply {
    pub(crate) value: Value,
    /// The number of the connection that it came over.
    pub(crate) connection: u64,
}

#[derive(Clone)]
enum ConnectionState {
    /// The first attempt is under way.
    Connecting,
    /// Connected: the number of this connection, from 1, and its handle.
    Up(u64, MultiplexedConnection),
    /// Not connected, for this reason.
    Down(Arc<str>),
}

impl ReconnectingConnection {
    /// Starts to connect in the background.
    pub(crate) fn to(env: &Env, address: Address, eviction: Arc<Eviction>) -> ReconnectingConnection {
        let (publish, state) = watch::channel(ConnectionState::Connecting);
        let (broken, seen) = watch::channel(0);
        let reconnector = env.runtime.spawn(keep_connected(address, eviction, publish, seen));
        ReconnectingConnection { state, broken, forbidden: Mutex::default(), reconnector }
    }

    /// Sends a command and waits for the reply.
    pub(crate) async fn call(&self, command: &Cmd) -> Result<RawReply, CallError> {
        let (number, mut connection) = self.connection().await?;
        let reply = connection.send_packed_command(command).await.and_then(Value::extract_error);
        self.note_permission(command, &reply);
        let value = reply.map_err(|error| self.failed(number, &error))?;
        Ok(RawReply { value, connection: number })
    }

    /// Sends a command for keys that are being migrated to this server, and waits for the reply.
    pub(crate) async fn call_asking(&self, command: &Cmd) -> Result<RawReply, CallError> {
        let (number, mut connection) = self.connection().await?;
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command.clone());
        let replies = connection.send_packed_commands(&both, 0, 2).await;
        let replies = replies.map_err(|error| self.failed(number, &error))?;
        let reply = replies.into_iter().last().unwrap_or(Value::Nil);
        let value = reply.extract_error().map_err(|error| self.failed(number, &error))?;
        Ok(RawReply { value, connection: number })
    }

    /// Closes the connection that a malformed reply came over: if the reply belongs to another call, so may all
    /// later ones.
    pub(crate) fn malformed(&self, connection: u64, malformed: Malformed) -> CallError {
        self.broke(connection);
        CallError::WrongReply(malformed.to_string())
    }

    /// Records that the Redis user has no permission for a command, until it has. The connection stays usable.
    fn note_permission(&self, command: &Cmd, reply: &RedisResult<Value>) {
        let Some(redis::Arg::Simple(name)) = command.args_iter().next() else { return };
        let mut forbidden = lock(&self.forbidden);
        let known = forbidden.as_ref().is_some_and(|(known, _)| known == name);
        match reply {
            Ok(_) if known => *forbidden = None,
            Err(error) if !known && error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                *forbidden = Some((name.to_owned(), advice(error).into()));
            }
            _ => {}
        }
    }

    /// Classifies an error, and closes a connection that can no longer be used.
    fn failed(&self, number: u64, error: &RedisError) -> CallError {
        let error = CallError::of(error);
        let unusable = matches!(
            error,
            CallError::Unknown { usable: false, .. }
                | CallError::NotSent(_)
                | CallError::Redirected(Redirect::NotPrimary)
        );
        if unusable {
            self.broke(number);
        }
        error
    }

    fn broke(&self, number: u64) {
        self.broken.send_if_modified(|last| {
            let is_new = *last < number;
            *last = number.max(*last);
            is_new
        });
    }

    /// Closes the connection, so that the next one looks up the primary again.
    pub(crate) fn reconnect(&self) {
        if let ConnectionState::Up(number, _) = *self.state.borrow() {
            self.broke(number);
        }
    }

    /// Waits for the first attempt, and returns the number of the connection; 0 without a connection.
    pub(crate) async fn ready(&self) -> u64 {
        self.connection().await.map_or(0, |(number, _)| number)
    }

    /// Why the server cannot be used: no connection, or a missing permission. `None` if it can.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        match &*self.state.borrow() {
            ConnectionState::Down(why) => Some(Arc::clone(why)),
            ConnectionState::Connecting | ConnectionState::Up(..) => {
                lock(&self.forbidden).as_ref().map(|(_, why)| Arc::clone(why))
            }
        }
    }

    /// The number of connections made so far.
    pub(crate) fn arrivals(&self) -> u64 {
        match *self.state.borrow() {
            ConnectionState::Up(number, _) => number,
            ConnectionState::Connecting | ConnectionState::Down(_) => *self.broken.borrow(),
        }
    }

    /// Whether a call would fail for lack of a connection.
    pub(crate) fn is_down(&self) -> bool {
        match *self.state.borrow() {
            ConnectionState::Up(number, _) => self.is_broken(number),
            ConnectionState::Connecting => false,
            ConnectionState::Down(_) => true,
        }
    }

    /// Whether a connection was found broken. The background task learns it a moment later.
    fn is_broken(&self, number: u64) -> bool {
        *self.broken.borrow() >= number
    }

    async fn connection(&self) -> Result<(u64, MultiplexedConnection), CallError> {
        let mut state = self.state.clone();
        let state = state.wait_for(|state| !matches!(state, ConnectionState::Connecting)).await;
        match state.as_deref() {
            Ok(ConnectionState::Up(number, _)) if self.is_broken(*number) => {
                Err(CallError::NotSent("the connection broke".to_owned()))
            }
            Ok(ConnectionState::Up(number, connection)) => Ok((*number, connection.clone())),
            Ok(ConnectionState::Down(why)) => Err(CallError::NotSent(why.to_string())),
            Ok(ConnectionState::Connecting) | Err(_) => {
                Err(CallError::NotSent("the store was closed".to_owned()))
            }
        }
    }
}

impl Drop for ReconnectingConnection {
    fn drop(&mut self) {
        self.reconnector.abort();
    }
}

impl fmt::Debug for ReconnectingConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectingConnection").field("trouble", &self.trouble()).finish()
    }
}

/// Connects, and reconnects whenever the connection breaks, until the owner is dropped.
async fn keep_connected(
    address: Address,
    eviction: Arc<Eviction>,
    publish: watch::Sender<ConnectionState>,
    mut broken: watch::Receiver<u64>,
) {
    let mut pause = PAUSES.0;
    let mut logged = None;
    let mut number = 0;
    loop {
        match connect(&address).await {
            Ok(connection) => {
                if logged.take().is_some() {
                    tracing::info!("connected to {address}");
                }
                number += 1;
                let began = Instant::now();
                publish.send_replace(ConnectionState::Up(number, connection.clone()));
                // Concurrently with the calls, so that none of them waits for it.
                let check_eviction = async {
                    eviction.check(&address.to_string(), connection).await;
                    std::future::pending::<Infallible>().await
                };
                let is_closed = tokio::select! {
                    broke = broken.wait_for(|last| *last >= number) => broke.is_err(),
                    never = check_eviction => match never {},
                };
                if is_closed {
                    return;
                }
                publish.send_replace(ConnectionState::Down("the connection broke".into()));
                if began.elapsed() >= STABLE {
                    pause = PAUSES.0;
                    continue;
                }
            }
            Err(why) => {
                // Once for each reason, not once for each attempt.
                if logged.as_ref() != Some(&why) {
                    tracing::warn!("cannot use {address}: {why}");
                    logged = Some(why.clone());
                }
                publish.send_replace(ConnectionState::Down(why.into()));
            }
        }
        tokio::time::sleep(pause.mul_f64(1.0 + f64::from(random::secret().0[0]) / 512.0)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Connects, and checks that the server is a primary and that its user may run scripts.
async fn connect(address: &Address) -> Result<MultiplexedConnection, String> {
    let attempt = async {
        let client = address.client().await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(Some(TIMEOUT))
            .set_pipeline_buffer_size(1024);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(|error| advice(&error))?;
        match redis::cmd("ROLE").query_async::<Vec<Value>>(&mut connection).await {
            Ok(role) => match role.first() {
                Some(Value::BulkString(role)) if role == b"master" => {}
                _ => return Err("the server is a replica, which is read-only (use the primary)".to_owned()),
            },
            // Without permission for `ROLE`, a replica is found out at the first write.
            Err(error) if matches!(CallError::of(&error), CallError::Refused(_)) => {}
            Err(error) => return Err(advice(&error)),
        }
        // Without permission for scripts the connection is of no use.
        let script = redis::cmd("EVAL").arg("return 1").arg(0).query_async::<Value>(&mut connection).await;
        match script {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Err(advice(&error)),
            _ => Ok(connection),
        }
    };
    let late = |_| Err(format!("no answer within {TIMEOUT:?}"));
    let connected = tokio::time::timeout(TIMEOUT, attempt).await.unwrap_or_else(late);
    if connected.is_err() && address.speaks_plain_text().await {
        return Err(
            "the server does not speak TLS there (write `redis` for `rediss` in the URL of the store, or \
                    name the port that does)"
                .to_owned(),
        );
    }
    connected
}

/// The text of an error, with advice how to fix it.
fn advice(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let help = match error.kind() {
        ErrorKind::AuthenticationFailed => "check user and password in the URL of the store",
        _ if text.contains("WRONGPASS") || text.contains("NOAUTH") => {
            "check user and password in the URL of the store"
        }
        _ if text.contains("DB index is out of range") => "check the database number in the store's URL",
        ErrorKind::Server(ServerErrorKind::NoPerm) => {
            "the user of the store runs scripts: grant it `+eval`, `+evalsha` and the other rights that \
             docs/redis.md lists"
        }
        _ if error.is_connection_refusal() => "is it running, and is this its address?",
        _ => return text,
    };
    format!("{text} ({help})")
}
