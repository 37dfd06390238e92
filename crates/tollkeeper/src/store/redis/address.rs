//! Where a server is, and how to get in: through a URL, or by asking sentinels who is primary.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    ProtocolVersion, RedisConnectionInfo, RedisResult, TlsCertificates,
};
use tokio::net::TcpStream;

use crate::store::url::{Credentials, Host, RedisUrl, Servers};

/// How long one sentinel may take to answer.
const SENTINEL: Duration = Duration::from_millis(250);
/// How long a server may take that is asked whether it speaks plainly.
const KNOCK: Duration = Duration::from_millis(250);

/// One server, or whoever the sentinels call primary.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    place: Place,
    way: Arc<Way>,
}

#[derive(Clone, Debug)]
enum Place {
    Host(Host),
    Unix(PathBuf),
    Sentinel { hosts: Vec<Host>, master: String },
}

/// What all connections of a store have in common.
#[derive(Debug)]
struct Way {
    tls: Option<TlsCertificates>,
    credentials: Option<Credentials>,
    database: u32,
}

/// Certificates for an encrypted connection, as PEM.
#[derive(Clone, Default)]
pub struct RedisTls {
    /// Those that the server's must descend from; without them, those of the system.
    pub ca: Option<Vec<u8>>,
    /// The certificate to present, and its private key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// Without the private key.
impl fmt::Debug for RedisTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ca, identity) = (self.ca.is_some(), self.identity.is_some());
        f.debug_struct("RedisTls").field("ca", &ca).field("identity", &identity).finish()
    }
}

impl Address {
    /// Where a URL leads: one address, but several for a cluster.
    pub(crate) fn of(url: &RedisUrl, tls: RedisTls) -> Vec<Address> {
        let (places, database) = match &url.servers {
            Servers::One { host, database } => (vec![Place::Host(host.clone())], *database),
            Servers::Unix { path } => (vec![Place::Unix(path.into())], 0),
            Servers::Cluster { hosts } => (hosts.iter().cloned().map(Place::Host).collect(), 0),
            Servers::Sentinel { hosts, master, database } => {
                (vec![Place::Sentinel { hosts: hosts.clone(), master: master.clone() }], *database)
            }
        };
        let tls = url.tls.then(|| {
            // Somebody must say who does the arithmetic; whoever has said so before is right.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
            TlsCertificates {
                client_tls: tls
                    .identity
                    .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
                root_cert: tls.ca,
            }
        });
        let way = Arc::new(Way { tls, credentials: url.credentials.clone(), database });
        places.into_iter().map(|place| Address { place, way: Arc::clone(&way) }).collect()
    }

    /// Another server of the same store, entered the same way.
    pub(crate) fn neighbour(&self, host: Host) -> Address {
        Address { place: Place::Host(host), way: Arc::clone(&self.way) }
    }

    /// A client of the server that is there now.
    pub(crate) async fn client(&self) -> Result<Client, String> {
        let address = match &self.place {
            Place::Unix(path) => ConnectionAddr::Unix(path.clone()),
            Place::Host(host) => self.way.at(host),
            Place::Sentinel { hosts, master } => self.way.at(&self.way.primary(hosts, master).await?),
        };
        self.way.client(address)
    }

    /// Whether a server that should be spoken to in cipher answers in plain text. It is told nothing that is
    /// secret.
    pub(crate) async fn speaks_plainly(&self) -> bool {
        let (Some(_), Place::Host(host)) = (&self.way.tls, &self.place) else { return false };
        let answer = async {
            let stream = TcpStream::connect((&*host.name, host.port)).await?;
            stream.writable().await?;
            stream.try_write(b"PING\r\n")?;
            stream.readable().await?;
            let mut first = [0];
            stream.try_read(&mut first)?;
            std::io::Result::Ok(first)
        };
        // `+PONG`, or an error in words.
        matches!(tokio::time::timeout(KNOCK, answer).await, Ok(Ok([b'+' | b'-'])))
    }

    /// Who is primary according to the sentinels, if they are asked.
    pub(crate) async fn primary(&self) -> Option<Host> {
        match &self.place {
            Place::Sentinel { hosts, master } => self.way.primary(hosts, master).await.ok(),
            Place::Host(_) | Place::Unix(_) => None,
        }
    }

    /// The sentinels that say where it is, each as a client that can be told of changes, and the name they know it by.
    pub(crate) fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        let Place::Sentinel { hosts, master } = &self.place else { return None };
        let clients = hosts.iter().filter_map(|host| self.way.sentinel(host, ProtocolVersion::RESP3).ok());
        Some((master, clients.collect()))
    }
}

impl Way {
    fn at(&self, host: &Host) -> ConnectionAddr {
        let (host, port) = (host.name.clone(), host.port);
        match self.tls {
            Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(host, port),
        }
    }

    fn client(&self, address: ConnectionAddr) -> Result<Client, String> {
        let mut redis =
            RedisConnectionInfo::default().set_db(i64::from(self.database)).set_skip_set_lib_name();
        if let Some(credentials) = &self.credentials {
            redis = redis.set_password(&credentials.password);
            if let Some(user) = &credentials.user {
                redis = redis.set_username(user);
            }
        }
        let wrong = |error: redis::RedisError| error.to_string();
        let info: ConnectionInfo = address.into_connection_info().map_err(wrong)?;
        let info = info.set_redis_settings(redis).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        match &self.tls {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()).map_err(wrong),
            None => Client::open(info).map_err(wrong),
        }
    }

    /// A client of a sentinel. They have passwords of their own, if any, and no databases.
    fn sentinel(&self, host: &Host, protocol: ProtocolVersion) -> RedisResult<Client> {
        let settings = RedisConnectionInfo::default().set_protocol(protocol).set_skip_set_lib_name();
        let info = self.at(host).into_connection_info()?.set_redis_settings(settings);
        match &self.tls {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    /// Asks one sentinel after the other.
    async fn primary(&self, hosts: &[Host], master: &str) -> Result<Host, String> {
        let mut last = "no sentinel is named".to_owned();
        for host in hosts {
            match tokio::time::timeout(SENTINEL, self.ask(host, master)).await {
                Ok(Ok(primary)) => return Ok(primary),
                Ok(Err(why)) => last = format!("sentinel {host}: {why}"),
                Err(_) => last = format!("sentinel {host}: no answer within {SENTINEL:?}"),
            }
        }
        Err(last)
    }

    async fn ask(&self, sentinel: &Host, master: &str) -> Result<Host, String> {
        let wrong = |error: redis::RedisError| error.to_string();
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(SENTINEL));
        let client = self.sentinel(sentinel, ProtocolVersion::RESP2).map_err(wrong)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(wrong)?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("get-master-addr-by-name").arg(master);
        let found: Option<(String, u16)> = command.query_async(&mut connection).await.map_err(wrong)?;
        let (name, port) = found.ok_or_else(|| format!("it knows no master `{master}`"))?;
        Ok(Host { name, port })
    }
}

/// Without user and password.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Host(host) => write!(f, "{host}"),
            Place::Unix(path) => write!(f, "{}", path.display()),
            Place::Sentinel { master, .. } => write!(f, "the master `{master}`"),
        }
    }
}
