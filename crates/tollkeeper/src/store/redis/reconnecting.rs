//! One connection to one server, made again whenever it breaks.
//!
//! Nobody waits for a connection that is not there, but at the very start: a call on a broken link fails
//! at once and is known not to have run. Between attempts there is a pause that grows, with a random part,
//! so that a thousand nodes do not come back in the same millisecond.

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
use super::call_error::{Elsewhere, Fate};
use super::eviction::Eviction;
use super::session::Env;
use super::wire::Malformed;
use crate::random;
use crate::sync::{Mutex, lock};

/// How long an attempt may take, and an answer, before the connection is given up. Much less would break all
/// connections of a server that stands still for a moment, to fork or to write to its disk.
const PATIENCE: Duration = Duration::from_secs(1);
/// The first and the longest pause between two attempts, each made longer by up to a half. So a server that
/// comes back just after an attempt has begun in vain is found within 1.6 s, and is then asked at once: see
/// [`Remote::arrivals`](crate::Remote::arrivals).
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(400));
/// A connection that lived for less is no reason to be in a hurry with the next.
const STEADY: Duration = Duration::from_secs(1);

/// A connection that comes back.
pub(crate) struct Link {
    state: watch::Receiver<State>,
    /// The number of the last connection that was found broken. Calls that were on their way find out one
    /// after the other, some of them when the next connection is there, and must not break that.
    broken: watch::Sender<u64>,
    /// The command that the user may not use, and what was said of it.
    forbidden: Mutex<Option<(Vec<u8>, Arc<str>)>>,
    keeper: JoinHandle<()>,
}

#[derive(Clone)]
enum State {
    /// The first attempt is on its way.
    Begun,
    /// It is there, and has this number.
    Up(u64, MultiplexedConnection),
    /// It is not there, because of this.
    Down(Arc<str>),
}

impl Link {
    /// Begins to connect.
    pub(crate) fn to(env: &Env, address: Address, eviction: Arc<Eviction>) -> Link {
        let (publish, state) = watch::channel(State::Begun);
        let (broken, seen) = watch::channel(0);
        let keeper = env.runtime.spawn(keep(address, eviction, publish, seen));
        Link { state, broken, forbidden: Mutex::default(), keeper }
    }

    /// Sends a command and reads the reply.
    pub(crate) async fn call<T>(
        &self,
        command: &Cmd,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        let (number, mut connection) = self.connection().await?;
        let answer = connection.send_packed_command(command).await.and_then(Value::extract_error);
        self.note_rights(command, &answer);
        let value = answer.map_err(|error| self.failed(number, &error))?;
        self.read(number, value, read)
    }

    /// Sends a command for keys that are on their way to this server, and reads the reply.
    pub(crate) async fn call_asking<T>(
        &self,
        command: &Cmd,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        let (number, mut connection) = self.connection().await?;
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command.clone());
        let answers = connection.send_packed_commands(&both, 0, 2).await;
        let answers = answers.map_err(|error| self.failed(number, &error))?;
        let answer = answers.into_iter().last().unwrap_or(Value::Nil);
        let value = answer.extract_error().map_err(|error| self.failed(number, &error))?;
        self.read(number, value, read)
    }

    /// Reads a reply. If it belongs to another call, so may all that follow: the connection is given up.
    fn read<T>(
        &self,
        number: u64,
        value: Value,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        read(value).map_err(|malformed| {
            self.broke(number);
            Fate::Foreign(malformed.to_string())
        })
    }

    /// Remembers that the user may not use a command, until it may. The connection is as good as before.
    fn note_rights(&self, command: &Cmd, answer: &RedisResult<Value>) {
        let Some(redis::Arg::Simple(name)) = command.args_iter().next() else { return };
        let mut forbidden = lock(&self.forbidden);
        let known = forbidden.as_ref().is_some_and(|(known, _)| known == name);
        match answer {
            Ok(_) if known => *forbidden = None,
            Err(error) if !known && error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                *forbidden = Some((name.to_owned(), advice(error).into()));
            }
            _ => {}
        }
    }

    /// What became of the call; a connection that cannot be used any more is given up.
    fn failed(&self, number: u64, error: &RedisError) -> Fate {
        let fate = Fate::of(error);
        let gone = matches!(
            fate,
            Fate::Unknown { usable: false, .. } | Fate::NotSent(_) | Fate::Elsewhere(Elsewhere::NotPrimary)
        );
        if gone {
            self.broke(number);
        }
        fate
    }

    fn broke(&self, number: u64) {
        self.broken.send_if_modified(|last| {
            let news = *last < number;
            *last = number.max(*last);
            news
        });
    }

    /// Gives the connection up, so that the next one asks again where to go.
    pub(crate) fn give_up(&self) {
        if let State::Up(number, _) = *self.state.borrow() {
            self.broke(number);
        }
    }

    /// The number of the connection, once the first attempt is over; 0 if there is none.
    pub(crate) async fn ready(&self) -> u64 {
        self.connection().await.map_or(0, |(number, _)| number)
    }

    /// Why there is no connection, or one that is of little use.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        match &*self.state.borrow() {
            State::Down(why) => Some(Arc::clone(why)),
            State::Begun | State::Up(..) => lock(&self.forbidden).as_ref().map(|(_, why)| Arc::clone(why)),
        }
    }

    /// How many connections there have been.
    pub(crate) fn arrivals(&self) -> u64 {
        match *self.state.borrow() {
            State::Up(number, _) => number,
            State::Begun | State::Down(_) => *self.broken.borrow(),
        }
    }

    /// Whether a call would find no connection.
    pub(crate) fn is_down(&self) -> bool {
        matches!(*self.state.borrow(), State::Down(_))
    }

    async fn connection(&self) -> Result<(u64, MultiplexedConnection), Fate> {
        let mut state = self.state.clone();
        let state = state.wait_for(|state| !matches!(state, State::Begun)).await;
        match state.as_deref() {
            Ok(State::Up(number, connection)) => Ok((*number, connection.clone())),
            Ok(State::Down(why)) => Err(Fate::NotSent(why.to_string())),
            Ok(State::Begun) | Err(_) => Err(Fate::NotSent("the store was closed".to_owned())),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("trouble", &self.trouble()).finish()
    }
}

async fn keep(
    address: Address,
    eviction: Arc<Eviction>,
    publish: watch::Sender<State>,
    mut broken: watch::Receiver<u64>,
) {
    let mut pause = PAUSES.0;
    let mut known = None;
    let mut number = 0;
    loop {
        match connect(&address).await {
            Ok(connection) => {
                if known.take().is_some() {
                    tracing::info!("connected to {address}");
                }
                number += 1;
                let began = Instant::now();
                publish.send_replace(State::Up(number, connection.clone()));
                // Beside the calls, so that none of them waits for it.
                let look = async {
                    eviction.look(&address.to_string(), connection).await;
                    std::future::pending::<Infallible>().await
                };
                let is_closed = tokio::select! {
                    broke = broken.wait_for(|last| *last >= number) => broke.is_err(),
                    never = look => match never {},
                };
                if is_closed {
                    return;
                }
                publish.send_replace(State::Down("the connection broke".into()));
                if began.elapsed() >= STEADY {
                    pause = PAUSES.0;
                    continue;
                }
            }
            Err(why) => {
                // LimitReply once for each reason, and not once for each attempt.
                if known.as_ref() != Some(&why) {
                    tracing::warn!("cannot use {address}: {why}");
                    known = Some(why.clone());
                }
                publish.send_replace(State::Down(why.into()));
            }
        }
        tokio::time::sleep(pause.mul_f64(1.0 + f64::from(random::secret().0[0]) / 512.0)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Connects to whoever is primary there.
async fn connect(address: &Address) -> Result<MultiplexedConnection, String> {
    let attempt = async {
        let client = address.client().await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(Some(PATIENCE))
            .set_pipeline_buffer_size(1024);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(|error| advice(&error))?;
        match redis::cmd("ROLE").query_async::<Vec<Value>>(&mut connection).await {
            Ok(role) => match role.first() {
                Some(Value::BulkString(role)) if role == b"master" => {}
                _ => return Err("it is a replica, which cannot count (name the primary)".to_owned()),
            },
            // Who may not ask will find out at the first write.
            Err(error) if matches!(Fate::of(&error), Fate::Refused(_)) => {}
            Err(error) => return Err(advice(&error)),
        }
        // Without this right nothing else is of use.
        let script = redis::cmd("EVAL").arg("return 1").arg(0).query_async::<Value>(&mut connection).await;
        match script {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Err(advice(&error)),
            _ => Ok(connection),
        }
    };
    let late = |_| Err(format!("no answer within {PATIENCE:?}"));
    let connected = tokio::time::timeout(PATIENCE, attempt).await.unwrap_or_else(late);
    if connected.is_err() && address.speaks_plainly().await {
        return Err(
            "the server does not speak TLS there (write `redis` for `rediss` in the URL of the store, or \
                    name the port that does)"
                .to_owned(),
        );
    }
    connected
}

/// What went wrong, and what would be right.
fn advice(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let help = match error.kind() {
        ErrorKind::AuthenticationFailed => "check user and password in the URL of the store",
        _ if text.contains("WRONGPASS") || text.contains("NOAUTH") => {
            "check user and password in the URL of the store"
        }
        _ if text.contains("DB index is out of range") => {
            "check the number of the database in the URL of the store"
        }
        ErrorKind::Server(ServerErrorKind::NoPerm) => {
            "the user of the store runs scripts: grant it `+eval`, `+evalsha` and the other rights that \
             docs/redis.md lists"
        }
        _ if error.is_connection_refusal() => "is it running, and is this its address?",
        _ => return text,
    };
    format!("{text} ({help})")
}
