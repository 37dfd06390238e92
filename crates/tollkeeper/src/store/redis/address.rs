//! Server addresses with their TLS and login settings, and the lookup of the current primary at sentinels.

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

/// Timeout of a call to one sentinel.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(250);
/// Timeout of the probe whether a server answers in plain text.
const PLAIN_TEXT_TIMEOUT: Duration = Duration::from_millis(250);

/// One server, or the primary that the sentinels name.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    endpoint: Endpoint,
    settings: Arc<ConnectionSettings>,
}

#[derive(Clone, Debug)]
enum Endpoint {
    Host(Host),
    Unix(PathBuf),
    Sentinel { hosts: Vec<Host>, master: String },
}

/// The settings that all connections of a store share.
#[derive(Debug)]
struct ConnectionSettings {
    tls: Option<TlsCertificates>,
    credentials: Option<Credentials>,
    database: u32,
}

/// Certificates for a TLS connection, as PEM.
#[derive(Clone, Default)]
pub struct RedisTls {
    /// The certificate authorities to trust; `None` for those of the system.
    pub ca: Option<Vec<u8>>,
    /// The client certificate to present, and its private key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// Never shows the private key.
impl fmt::Debug for RedisTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ca, identity) = (self.ca.is_some(), self.identity.is_some());
        f.debug_struct("RedisTls").field("ca", &ca).field("identity", &identity).finish()
    }
}

impl Address {
    /// The addresses in a URL: several for a cluster, otherwise one.
    pub(crate) fn of(url: &RedisUrl, tls: RedisTls) -> Vec<Address> {
        let (endpoints, database) = match &url.servers {
            Servers::One { host, database } => (vec![Endpoint::Host(host.clone())], *database),
            Servers::Unix { path } => (vec![Endpoint::Unix(path.into())], 0),
            Servers::Cluster { hosts } => (hosts.iter().cloned().map(Endpoint::Host).collect(), 0),
            Servers::Sentinel { hosts, master, database } => {
                (vec![Endpoint::Sentinel { hosts: hosts.clone(), master: master.clone() }], *database)
            }
        };
        let tls = url.tls.then(|| {
            // rustls needs a process-wide crypto provider. If the application has installed one, it stays.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
            TlsCertificates {
                client_tls: tls
                    .identity
                    .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
                root_cert: tls.ca,
            }
        });
        let settings = Arc::new(ConnectionSettings { tls, credentials: url.credentials.clone(), database });
        endpoints.into_iter().map(|endpoint| Address { endpoint, settings: Arc::clone(&settings) }).collect()
    }

    /// Another server of the same store, with the same connection settings.
    pub(crate) fn neighbour(&self, host: Host) -> Address {
        Address { endpoint: Endpoint::Host(host), settings: Arc::clone(&self.settings) }
    }

    /// A client for this server, or for the primary that the sentinels name now.
    pub(crate) async fn client(&self) -> Result<Client, String> {
        let address = match &self.endpoint {
            Endpoint::Unix(path) => ConnectionAddr::Unix(path.clone()),
            Endpoint::Host(host) => self.settings.at(host),
            Endpoint::Sentinel { hosts, master } => {
                self.settings.at(&self.settings.primary(hosts, master).await?)
            }
        };
        self.settings.client(address)
    }

    /// Whether a server that should speak TLS answers in plain text. The probe, a `PING`, contains no secret.
    pub(crate) async fn speaks_plain_text(&self) -> bool {
        let (Some(_), Endpoint::Host(host)) = (&self.settings.tls, &self.endpoint) else { return false };
        let first_byte = async {
            let stream = TcpStream::connect((&*host.name, host.port)).await?;
            stream.writable().await?;
            stream.try_write(b"PING\r\n")?;
            stream.readable().await?;
            let mut first = [0];
            stream.try_read(&mut first)?;
            std::io::Result::Ok(first)
        };
        // The first byte of `+PONG`, or of an error such as `-NOAUTH`.
        matches!(tokio::time::timeout(PLAIN_TEXT_TIMEOUT, first_byte).await, Ok(Ok([b'+' | b'-'])))
    }

    /// The primary that the sentinels name; `None` without sentinels, or if none of them answers.
    pub(crate) async fn primary(&self) -> Option<Host> {
        match &self.endpoint {
            Endpoint::Sentinel { hosts, master } => self.settings.primary(hosts, master).await.ok(),
            Endpoint::Host(_) | Endpoint::Unix(_) => None,
        }
    }

    /// The name of the primary, and a client for each sentinel that can receive its announcements (RESP3).
    pub(crate) fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        let Endpoint::Sentinel { hosts, master } = &self.endpoint else { return None };
        let clients =
            hosts.iter().filter_map(|host| self.settings.sentinel(host, ProtocolVersion::RESP3).ok());
        Some((master, clients.collect()))
    }
}

impl ConnectionSettings {
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

    /// A client for a sentinel. Sentinels have passwords of their own, if any, and no databases.
    fn sentinel(&self, host: &Host, protocol: ProtocolVersion) -> RedisResult<Client> {
        let settings = RedisConnectionInfo::default().set_protocol(protocol).set_skip_set_lib_name();
        let info = self.at(host).into_connection_info()?.set_redis_settings(settings);
        match &self.tls {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    /// Asks the sentinels in turn until one names the primary.
    async fn primary(&self, hosts: &[Host], master: &str) -> Result<Host, String> {
        let mut last = "the URL lists no sentinels".to_owned();
        for host in hosts {
            match tokio::time::timeout(SENTINEL_TIMEOUT, self.ask(host, master)).await {
                Ok(Ok(primary)) => return Ok(primary),
                Ok(Err(why)) => last = format!("sentinel {host}: {why}"),
                Err(_) => last = format!("sentinel {host}: no answer within {SENTINEL_TIMEOUT:?}"),
            }
        }
        Err(last)
    }

    async fn ask(&self, sentinel: &Host, master: &str) -> Result<Host, String> {
        let wrong = |error: redis::RedisError| error.to_string();
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(SENTINEL_TIMEOUT));
        let client = self.sentinel(sentinel, ProtocolVersion::RESP2).map_err(wrong)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(wrong)?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("get-master-addr-by-name").arg(master);
        let found: Option<(String, u16)> = command.query_async(&mut connection).await.map_err(wrong)?;
        let (name, port) = found.ok_or_else(|| format!("unknown master `{master}`"))?;
        Ok(Host { name, port })
    }
}

/// Never shows the user or the password.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.endpoint {
            Endpoint::Host(host) => write!(f, "{host}"),
            Endpoint::Unix(path) => write!(f, "{}", path.display()),
            Endpoint::Sentinel { master, .. } => write!(f, "the master `{master}`"),
        }
    }
}
