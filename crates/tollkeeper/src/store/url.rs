//! Parses store URLs such as `redis://app:secret@cache.internal/2`, and prints them without their credentials.

use std::fmt;
use std::str::FromStr;

/// The URL of a store: where the counts are kept.
///
/// ```
/// use tollkeeper::store::url::StoreUrl;
///
/// assert_eq!("memory://".parse(), Ok(StoreUrl::Memory));
/// let redis: StoreUrl = "redis://app:secret@cache.internal/2".parse().unwrap();
/// assert_eq!(redis.to_string(), "redis://***@cache.internal:6379/2");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// In this process: `memory://`.
    #[default]
    Memory,
    /// In Redis or Valkey.
    Redis(RedisUrl),
}

/// How to connect to a Redis store.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    /// Whether connections use TLS: `rediss://` instead of `redis://`.
    pub tls: bool,
    /// The user and password to authenticate with.
    pub credentials: Option<Credentials>,
    /// The servers to connect to.
    pub servers: Servers,
}

/// A user name and a password. Neither is ever printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user name; `None` for the user that Redis calls `default`.
    pub user: Option<String>,
    /// The password.
    pub password: String,
}

/// The servers of a Redis store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Servers {
    /// One server.
    One {
        /// Host and port.
        host: Host,
        /// The database number, such as 0.
        database: u32,
    },
    /// One server on this machine, through a Unix socket.
    Unix {
        /// The path of the socket, such as `/run/redis.sock`.
        path: String,
    },
    /// A Redis Cluster, discovered through some of its servers.
    Cluster {
        /// The servers to discover the cluster from.
        hosts: Vec<Host>,
    },
    /// The server that the sentinels report as the master.
    Sentinel {
        /// The sentinels.
        hosts: Vec<Host>,
        /// The name of the master, such as `mymaster`.
        master: String,
        /// The database number, such as 0.
        database: u32,
    },
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Host {
    /// A host name or an IP address. An IPv6 address has no brackets.
    pub name: String,
    /// The port.
    pub port: u16,
}

impl StoreUrl {
    /// Returns an error if this build was compiled without support for the store.
    pub fn supported(&self) -> Result<(), InvalidStoreUrl> {
        match self {
            StoreUrl::Redis(_) if cfg!(not(feature = "redis")) => Err(InvalidStoreUrl::NO_REDIS),
            StoreUrl::Memory | StoreUrl::Redis(_) => Ok(()),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = InvalidStoreUrl;

    fn from_str(text: &str) -> Result<StoreUrl, InvalidStoreUrl> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(InvalidStoreUrl(
                "the store is not a URL (such as `memory://` or `redis://127.0.0.1:6379`)",
            ));
        };
        let (tls, kind) = match scheme {
            "memory" if rest.is_empty() => return Ok(StoreUrl::Memory),
            "memory" => {
                return Err(InvalidStoreUrl(
                    "`memory://` takes no host or path (its settings belong under `memory:`)",
                ));
            }
            "redis" => (false, ""),
            "rediss" => (true, ""),
            _ => match scheme.split_once('+') {
                Some(("redis", kind @ ("unix" | "cluster" | "sentinel"))) => (false, kind),
                Some(("rediss", kind @ ("cluster" | "sentinel"))) => (true, kind),
                _ => {
                    return Err(InvalidStoreUrl(
                        "there is no such store (`memory://`, `redis://`, `rediss://`, `redis+unix://`, \
                         `redis+cluster://`, `redis+sentinel://`)",
                    ));
                }
            },
        };
        // A password may contain an `@` that is not percent-encoded; a host cannot.
        let (credentials, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(read_credentials(credentials)?), rest),
            None => (None, rest),
        };
        // Other clients accept a password in the query. Here it would end up in a path or a name, which are printed.
        if rest.contains(['?', '#']) {
            return Err(InvalidStoreUrl(
                "a store URL has no query or fragment (a password is before the host: `redis://user:password@host/0`)",
            ));
        }
        let (hosts, path) = rest.split_once('/').map_or((rest, ""), |(hosts, path)| (hosts, path));
        let servers = match kind {
            "unix" if hosts.is_empty() && !path.is_empty() => Servers::Unix { path: format!("/{path}") },
            "unix" => {
                return Err(InvalidStoreUrl(
                    "a socket has an absolute path (such as `redis+unix:///run/redis.sock`)",
                ));
            }
            "cluster" if path.is_empty() => Servers::Cluster { hosts: read_hosts(hosts, 6379)? },
            "cluster" => {
                return Err(InvalidStoreUrl("a cluster has no databases (leave out what follows the `/`)"));
            }
            "sentinel" => {
                let (master, database) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(InvalidStoreUrl(
                        "the name of the master is missing (such as `redis+sentinel://h1:26379,h2:26379/mymaster/0`)",
                    ));
                }
                Servers::Sentinel {
                    hosts: read_hosts(hosts, 26379)?,
                    master: master.to_owned(),
                    database: read_database(database)?,
                }
            }
            _ => match <[Host; 1]>::try_from(read_hosts(hosts, 6379)?) {
                Ok([host]) => Servers::One { host, database: read_database(path)? },
                Err(_) => {
                    return Err(InvalidStoreUrl(
                        "one server is expected (several are `redis+cluster://` or `redis+sentinel://`)",
                    ));
                }
            },
        };
        Ok(StoreUrl::Redis(RedisUrl { tls, credentials, servers }))
    }
}

fn read_credentials(text: &str) -> Result<Credentials, InvalidStoreUrl> {
    let decode = |text: &str| {
        decoded(text).ok_or(InvalidStoreUrl(
            "invalid percent-encoding in the user or the password (write `%` as `%25`)",
        ))
    };
    let (user, password) = text.split_once(':').ok_or(InvalidStoreUrl(
        "the password is missing (`redis://user:password@host`, or `redis://:password@host` without a user)",
    ))?;
    let user = Some(decode(user)?).filter(|user| !user.is_empty());
    Ok(Credentials { user, password: decode(password)? })
}

/// Decodes percent-encoded text; `None` if an escape is invalid or the result is not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

fn read_hosts(text: &str, default_port: u16) -> Result<Vec<Host>, InvalidStoreUrl> {
    let host = |text: &str| {
        let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((name, port)) => (name, port.strip_prefix(':')),
            None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
        };
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b':');
        let port = port.map_or(Some(default_port), |port| port.parse().ok().filter(|port| *port > 0));
        match port {
            Some(port) if !name.is_empty() && name.bytes().all(allowed) => {
                Ok(Host { name: name.to_owned(), port })
            }
            Some(_) => {
                Err(InvalidStoreUrl("the host is not a name or an address (such as `127.0.0.1` or `[::1]`)"))
            }
            None => Err(InvalidStoreUrl(
                "the port is not a number from 1 to 65535 (such as `redis://127.0.0.1:6379`)",
            )),
        }
    };
    text.split(',').map(host).collect()
}

fn read_database(text: &str) -> Result<u32, InvalidStoreUrl> {
    if text.is_empty() {
        return Ok(0);
    }
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or(InvalidStoreUrl("the database is not a number (such as `redis://127.0.0.1:6379/0`)"))
}

/// Prints the URL with its credentials replaced by `***`.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::Memory => f.write_str("memory://"),
            StoreUrl::Redis(url) => write!(f, "{url}"),
        }
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "rediss" } else { "redis" })?;
        f.write_str(match &self.servers {
            Servers::One { .. } => "://",
            Servers::Unix { .. } => "+unix://",
            Servers::Cluster { .. } => "+cluster://",
            Servers::Sentinel { .. } => "+sentinel://",
        })?;
        if self.credentials.is_some() {
            f.write_str("***@")?;
        }
        let list = |hosts: &[Host]| hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        match &self.servers {
            Servers::One { host, database } => write!(f, "{host}/{database}"),
            Servers::Unix { path } => f.write_str(path),
            Servers::Cluster { hosts } => f.write_str(&list(hosts)),
            Servers::Sentinel { hosts, master, database } => write!(f, "{}/{master}/{database}", list(hosts)),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Why a text is not a valid store URL. It does not contain the text, which may include a password.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct InvalidStoreUrl(&'static str);

impl InvalidStoreUrl {
    pub(crate) const NO_REDIS: InvalidStoreUrl =
        InvalidStoreUrl("this build has no Redis store (build it with the feature `redis`)");
}

impl fmt::Display for InvalidStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for InvalidStoreUrl {}
