//! Two addresses behind one name: balance, ejection and return.

use std::sync::Mutex;

use tokio::net::TcpListener;
use tollkeeper::config::{Config, Format};

use super::super::connect::TlsFiles;
use super::*;

fn settings(proxy: &str) -> ProxySettings {
    let text = format!("limits: []\nproxy: {proxy}\n");
    let parsed = Config::parse("tollkeeper.yaml", Format::Yaml, text.as_bytes(), &|_| None);
    parsed.expect("a valid config").0.proxy
}

async fn upstream(endpoints: Vec<Endpoint>) -> Upstream {
    let counters = Arc::new(Counters::default());
    let target: UpstreamUrl = "http://app.test".parse().expect("a URL");
    let connector = Connector::new(&target, &TlsFiles::default(), Arc::clone(&counters)).expect("no TLS");
    let upstream = Upstream::new(Resolver::List(Mutex::new(endpoints)), connector, counters);
    upstream.resolve().await;
    upstream
}

async fn listen(at: &str) -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind(at).await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    (listener, Endpoint::Tcp(address))
}

/// How often each address is picked.
fn picks(upstream: &Upstream, count: usize) -> Vec<usize> {
    let addresses = upstream.addresses();
    let mut picked = vec![0; addresses.len()];
    for _ in 0..count {
        let address = upstream.pick(None).expect("there are addresses");
        picked[addresses.iter().position(|other| Arc::ptr_eq(other, &address)).expect("a known one")] += 1;
    }
    picked
}

#[tokio::test]
async fn requests_are_balanced_over_all_addresses() {
    let (_one, first) = listen("127.0.0.1:0").await;
    let (_two, second) = listen("127.0.0.1:0").await;
    let upstream = upstream(vec![first, second]).await;
    let picked = picks(&upstream, 10_000);
    assert!(picked.iter().all(|count| (4_500..=5_500).contains(count)), "{picked:?}");
    // The busier one gets no more until both are equally busy.
    let busy = upstream.pick(None).expect("there are addresses");
    let _call =
        upstream.connect(&busy, WantedConnection::default(), &settings("{}")).await.expect("it listens");
    assert!((0..100).all(|_| !Arc::ptr_eq(&upstream.pick(None).expect("there are addresses"), &busy)));
}

#[tokio::test]
async fn failing_address_is_ejected_and_used_again() {
    let (one, first) = listen("127.0.0.1:0").await;
    let (_two, second) = listen("127.0.0.1:0").await;
    let settings = settings("{ health: { failures: 3, eject: 100ms } }");
    let upstream = upstream(vec![first.clone(), second]).await;
    let addresses = upstream.addresses();
    let index = addresses.iter().position(|address| address.endpoint == first).expect("it was resolved");
    let (dead, alive) = (&addresses[index], &addresses[1 - index]);
    drop(one);
    for _ in 0..3 {
        assert!(!upstream.is_ejected(dead));
        let error = upstream
            .connect(dead, WantedConnection::default(), &settings)
            .await
            .expect_err("nothing listens");
        upstream.failed(dead, error, &settings.health);
    }
    assert!(upstream.is_ejected(dead));
    assert_eq!(upstream.counters.ejected.load(Relaxed), 1);
    assert!((0..100).all(|_| upstream.pick(None).is_some_and(|picked| Arc::ptr_eq(&picked, alive))));
    // At most half of the addresses are ejected.
    (0..10).for_each(|_| upstream.failed(alive, UpstreamError::Reset, &settings.health));
    assert!(!upstream.is_ejected(alive));
    let Endpoint::Tcp(address) = first else { panic!("it is a TCP address") };
    let _again = TcpListener::bind(address).await.expect("the port is still free");
    tokio::time::timeout(Duration::from_secs(30), async {
        while picks(&upstream, 10)[index] == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the address is used again");
    let call =
        upstream.connect(dead, WantedConnection::default(), &settings).await.expect("it listens again");
    upstream.succeeded(call.address(), Duration::ZERO);
}

#[tokio::test]
async fn only_address_is_always_tried() {
    let (_one, only) = listen("127.0.0.1:0").await;
    let upstream = upstream(vec![only]).await;
    let address = upstream.pick(None).expect("there is one");
    let settings = settings("{ health: { failures: 1, eject: 1h } }");
    (0..10).for_each(|_| upstream.failed(&address, UpstreamError::Reset, &settings.health));
    assert!(upstream.pick(Some(&address)).is_some() && !upstream.is_ejected(&address));
}

#[tokio::test]
async fn addresses_that_stay_keep_their_state() {
    let (_one, first) = listen("127.0.0.1:0").await;
    let (_two, second) = listen("127.0.0.1:0").await;
    let upstream = upstream(vec![first.clone()]).await;
    let before = upstream.addresses();
    let Resolver::List(list) = &upstream.resolver else { panic!("a list was given") };
    *list.lock().expect("not poisoned") = vec![second.clone(), first];
    upstream.resolve().await;
    let after = upstream.addresses();
    assert_eq!(after.len(), 2);
    assert!(after.iter().any(|address| Arc::ptr_eq(address, &before[0])));
    // DNS servers rotate their answers: another order changes nothing.
    list.lock().expect("not poisoned").reverse();
    upstream.resolve().await;
    assert!(Arc::ptr_eq(&upstream.addresses(), &after));
    // A name that resolves to nothing keeps its addresses.
    *list.lock().expect("not poisoned") = Vec::new();
    upstream.resolve().await;
    assert_eq!(upstream.addresses().len(), 2);
}

/// An HTTP/2 connection that no request has used for `idle_timeout` is closed.
#[tokio::test]
async fn unused_http2_connection_expires() {
    use tokio::io::AsyncReadExt as _;

    let (listener, endpoint) = listen("127.0.0.1:0").await;
    let settings = settings("{ upstream_protocol: http2, idle_timeout: 1ms }");
    let upstream = upstream(vec![endpoint]).await;
    let address = upstream.pick(None).expect("there is one");
    let (call, accepted) =
        tokio::join!(upstream.connect(&address, WantedConnection::default(), &settings), listener.accept());
    drop(call.expect("it listens"));
    let mut stream = accepted.expect("a connection").0;
    let closed = tokio::spawn(async move { stream.read_to_end(&mut Vec::new()).await });
    tokio::time::timeout(Duration::from_secs(30), async {
        while !closed.is_finished() {
            address.pool.close_expired();
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the connection is closed");
}
