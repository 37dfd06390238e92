//! TLS connections to Redis with a private CA and a client certificate, and the errors when either is wrong.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tollkeeper::config::{Config, Format, RedisSettings, StoreUrl};
use tollkeeper::store::redis::{RedisOptions, RedisStore, RedisTls};
use tollkeeper::store::{Resilient, ResilientSettings};
use tollkeeper::{Limit, Limiter, MemoryStore, OnStoreFailure, Policy, Quota, facts};
use tollkeeper_tests::certificates::Authority;
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{PATIENCE, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;

struct Encrypted {
    server: Server,
    authority: Authority,
}

/// Settings of a server that accepts only clients with a certificate of the same CA as its own.
fn settings(authority: &Authority, alternatives: &str) -> [String; 4] {
    let (certificate, key) = authority.certify("server", alternatives);
    [
        format!("tls-cert-file {}", certificate.display()),
        format!("tls-key-file {}", key.display()),
        format!("tls-ca-cert-file {}", authority.certificate().display()),
        "tls-auth-clients yes".to_owned(),
    ]
}

fn encrypted(alternatives: &str) -> Encrypted {
    let authority = Authority::new();
    let settings = settings(&authority, alternatives);
    let server = Server::on_a_port(Program::Redis, "tls-port", &settings.each_ref().map(|line| &**line));
    Encrypted { server, authority }
}

impl Encrypted {
    fn ca(&self) -> Option<Vec<u8>> {
        Some(read(&self.authority.certificate()))
    }

    fn identity(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        identity(&self.authority)
    }
}

fn identity(authority: &Authority) -> Option<(Vec<u8>, Vec<u8>)> {
    let (certificate, key) = authority.certify("client", "DNS:client");
    Some((read(&certificate), read(&key)))
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

fn open(url: &str, tls: RedisTls) -> RedisStore {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
    RedisStore::open(&url, RedisOptions { tls, ..RedisOptions::default() })
}

fn limiter(store: RedisStore) -> Limiter {
    let limit = Limit::new("per-user", Quota::per_day(3)).by("user").on_store_failure(OnStoreFailure::Deny);
    let settings = ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
    let store = Resilient::new(store, settings, MemoryStore::default());
    Limiter::with_store(Policy::new(vec![limit]).unwrap(), Arc::new(store))
}

/// The reported reason why a store cannot be used; the failure policy decides a check meanwhile.
async fn trouble(store: RedisStore) -> String {
    let started = Instant::now();
    let why = loop {
        if let Some(why) = store.trouble() {
            break why;
        }
        assert!(started.elapsed() < PATIENCE, "no trouble is reported");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let decision = limiter(store).check(&facts! { "user" => "alice" }).await.unwrap();
    assert_eq!((decision.allowed(), decision.degraded()), (false, Some(OnStoreFailure::Deny)), "{why}");
    println!("{why}");
    why.to_string()
}

#[tokio::test]
async fn private_ca_and_client_certificate_connect() {
    let encrypted = encrypted("IP:127.0.0.1,DNS:localhost");
    for host in ["127.0.0.1", "localhost"] {
        let tls = RedisTls { ca: encrypted.ca(), identity: encrypted.identity() };
        let store = open(&format!("rediss://{host}:{}", encrypted.server.port()), tls);
        let limiter = limiter(store.clone());
        for number in 0..4 {
            let decision = limiter.check(&facts! { "user" => host }).await.unwrap();
            assert_eq!(
                (decision.allowed(), decision.degraded()),
                (number < 3, None),
                "{:?}",
                store.trouble()
            );
        }
        assert_eq!(store.trouble(), None);
    }
}

/// Checks work over TLS with the private CA, and fail with another CA.
async fn all_connections_are_encrypted(url: &str, authority: &Authority) {
    let ca = || Some(read(&authority.certificate()));
    let store = open(url, RedisTls { ca: ca(), identity: identity(authority) });
    let limiter = limiter(store.clone());
    // Enough users that every server of a cluster gets some keys.
    for user in 0..20 {
        let user = user.to_string();
        for number in 0..4 {
            let decision = limiter.check(&facts! { "user" => &user }).await.unwrap();
            let expected = (number < 3, None);
            assert_eq!((decision.allowed(), decision.degraded()), expected, "{:?}", store.trouble());
        }
    }
    let other_ca = Authority::new();
    let tls = RedisTls { ca: Some(read(&other_ca.certificate())), identity: identity(authority) };
    let why = trouble(open(url, tls)).await;
    assert!(why.contains("certificate") && why.contains("UnknownIssuer"), "{why}");
}

#[tokio::test]
async fn cluster_connections_are_encrypted() {
    let authority = Authority::new();
    let own = settings(&authority, "IP:127.0.0.1");
    let more = own.iter().map(|line| &**line).chain(["tls-cluster yes", "tls-replication yes"]);
    let (certificate, key) = authority.certify("client", "DNS:client");
    let [ca, certificate, key] =
        [authority.certificate(), certificate, key].map(|path| path.display().to_string());
    let words = ["--tls", "--cacert", &ca, "--cert", &certificate, "--key", &key];
    let cluster = Cluster::with("tls-port", &more.collect::<Vec<_>>(), &words);
    all_connections_are_encrypted(&cluster.url().replace("redis+", "rediss+"), &authority).await;
}

#[tokio::test]
async fn sentinel_and_primary_connections_are_encrypted() {
    let authority = Authority::new();
    let own = settings(&authority, "IP:127.0.0.1");
    let more: Vec<&str> = own.iter().map(|line| &**line).chain(["tls-replication yes"]).collect();
    let sentinels = Sentinels::with("tls-port", &more);
    let url = sentinels.url().replace("redis+", "rediss+");
    all_connections_are_encrypted(&url, &authority).await;
    // The new primary after a failover is reached over TLS, too.
    let store =
        open(&url, RedisTls { ca: Some(read(&authority.certificate())), identity: identity(&authority) });
    let limiter = limiter(store.clone());
    sentinels.sentinel().text("SENTINEL FAILOVER mymaster");
    let started = Instant::now();
    loop {
        let user = format!("{:?}", started.elapsed());
        let decision = limiter.check(&facts! { "user" => &user }).await.unwrap();
        if decision.degraded().is_none() && sentinels.replica.is_primary() && !sentinels.primary.is_primary()
        {
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{:?}", store.trouble());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn server_with_unknown_ca_is_rejected_with_a_reason() {
    let encrypted = encrypted("IP:127.0.0.1");
    let url = format!("rediss://127.0.0.1:{}", encrypted.server.port());
    let other_ca = Authority::new();
    let tls = RedisTls { ca: Some(read(&other_ca.certificate())), identity: encrypted.identity() };
    let why = trouble(open(&url, tls)).await;
    assert!(why.contains("certificate") && why.contains("UnknownIssuer"), "{why}");
    // Without a configured CA, the system's CAs do not know the server either.
    let why = trouble(open(&url, RedisTls { ca: None, identity: encrypted.identity() })).await;
    assert!(why.contains("certificate") && why.contains("UnknownIssuer"), "{why}");
}

#[tokio::test]
async fn certificate_for_another_name_is_rejected() {
    let encrypted = encrypted("DNS:cache.internal");
    let tls = RedisTls { ca: encrypted.ca(), identity: encrypted.identity() };
    let why = trouble(open(&format!("rediss://127.0.0.1:{}", encrypted.server.port()), tls)).await;
    assert!(why.contains("certificate not valid for name"), "{why}");
}

#[tokio::test]
async fn missing_client_certificate_is_reported() {
    let encrypted = encrypted("IP:127.0.0.1");
    let tls = RedisTls { ca: encrypted.ca(), identity: None };
    let why = trouble(open(&format!("rediss://127.0.0.1:{}", encrypted.server.port()), tls)).await;
    assert!(why.to_lowercase().contains("certificate"), "{why}");
}

#[tokio::test]
async fn tls_mismatch_is_reported_and_does_not_hang() {
    let encrypted = encrypted("IP:127.0.0.1");
    trouble(open(&format!("redis://127.0.0.1:{}", encrypted.server.port()), RedisTls::default())).await;
    let plain = Server::on_a_port(Program::Redis, "port", &[]);
    for user in ["", "user:secret@"] {
        let tls = RedisTls { ca: encrypted.ca(), identity: None };
        let why = trouble(open(&format!("rediss://{user}127.0.0.1:{}", plain.port()), tls)).await;
        assert!(why.contains("does not speak TLS there") && why.contains("`redis`"), "{why}");
    }
    // A server that never replies may speak TLS or not, so the error must not blame the scheme.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://127.0.0.1:{}", silent.local_addr().unwrap().port());
    let why = trouble(open(&url, RedisTls { ca: encrypted.ca(), identity: None })).await;
    assert_eq!(why, "no answer within 1s");
}

#[tokio::test]
async fn file_without_certificate_or_key_is_named() {
    let encrypted = encrypted("IP:127.0.0.1");
    let (certificate, key) = encrypted.authority.certify("client", "DNS:client");
    let empty = encrypted.authority.certificate().with_file_name("empty.pem");
    fs::write(&empty, "# no certificate yet\n").unwrap();
    let url: StoreUrl = format!("rediss://127.0.0.1:{}", encrypted.server.port()).parse().unwrap();
    let StoreUrl::Redis(url) = url else { panic!("a Redis URL") };
    let text = b"limits: [{ name: per-ip, by: ip, rate: 1/s }]";
    let (config, _) = Config::parse("tollkeeper.yaml", Format::Yaml, text, &|_| None).unwrap();
    let complete = RedisSettings {
        ca: Some(encrypted.authority.certificate()),
        cert: Some(certificate.clone()),
        key: Some(key.clone()),
        ..config.redis
    };
    assert!(Resilient::open(&url, &complete).is_ok());
    let gone = empty.with_file_name("gone.pem");
    for (settings, path, reason) in [
        (RedisSettings { ca: Some(empty.clone()), ..complete.clone() }, &empty, "no certificate"),
        (
            RedisSettings { cert: Some(key), ..complete.clone() },
            &complete.key.clone().unwrap(),
            "no certificate",
        ),
        (
            RedisSettings { key: Some(certificate), ..complete.clone() },
            &complete.cert.clone().unwrap(),
            "no private key",
        ),
        (RedisSettings { ca: Some(gone.clone()), ..complete.clone() }, &gone, "No such file"),
    ] {
        let error = Resilient::open(&url, &settings).map(drop).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()) && error.contains(reason), "{error}");
    }
}

#[tokio::test]
async fn invalid_certificate_is_reported() {
    let encrypted = encrypted("IP:127.0.0.1");
    let url = format!("rediss://127.0.0.1:{}", encrypted.server.port());
    for invalid in ["", "invalid", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let tls = RedisTls { ca: Some(invalid.into()), identity: encrypted.identity() };
        let why = trouble(open(&url, tls)).await;
        assert!(why.contains("certificate") || why.contains("trust anchors"), "{invalid:?}: {why}");
    }
    let (certificate, _) = encrypted.identity().unwrap();
    let identity = Some((certificate, b"invalid".to_vec()));
    let why = trouble(open(&url, RedisTls { ca: encrypted.ca(), identity })).await;
    assert!(why.contains("key"), "{why}");
}
