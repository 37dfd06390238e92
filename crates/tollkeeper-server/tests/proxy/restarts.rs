//! Stopping: requests in flight finish, new ones go to the next process, and none is lost.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

use hyper::Request;

use crate::support::{Client, Folder, Server, eventually, tollkeeper};
use crate::upstream::Upstream;
use crate::{Proxy, UNLIMITED};

fn start(upstream: &Upstream, folder: &Folder, listen: &str) -> Server {
    let file = folder.path().join("tollkeeper.yaml");
    let mut command = tollkeeper();
    command.args(["proxy", &upstream.url(), "--http", "127.0.0.1:0", "--listen", listen, "--config"]);
    let server = Server::launch(command.arg(file));
    server.listens("proxy");
    server
}

/// New connections and long-lived ones, while one process follows another.
#[test]
fn twenty_restarts_under_load_lose_no_request() {
    let upstream = Upstream::ok();
    let folder = Folder::new();
    folder.write("tollkeeper.yaml", &format!("proxy: {{ reuse_port: true }}\n{UNLIMITED}"));
    let mut current = start(&upstream, &folder, "127.0.0.1:0");
    let address = current.listens("proxy");
    let load = Load {
        address,
        stop: AtomicBool::new(false),
        served: AtomicUsize::new(0),
        reused: AtomicUsize::new(0),
        lost: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let load = &load;
            scope.spawn(move || load.run(worker));
        }
        for _ in 0..20 {
            let before = load.served.load(SeqCst);
            eventually("requests are served", || load.served.load(SeqCst) > before + 50);
            let next = start(&upstream, &folder, &address.to_string());
            let old = std::mem::replace(&mut current, next);
            old.signal("TERM");
            assert_eq!(old.ended().code, Some(0));
        }
        load.stop.store(true, SeqCst);
    });
    let lost = load.lost.into_inner().unwrap();
    let (served, reused) = (load.served.into_inner(), load.reused.into_inner());
    println!(
        "{served} requests over 20 restarts, {reused} on used connections, {} sent again by the client",
        lost.len()
    );
    for request in upstream.take() {
        let is_lost = lost.iter().any(|path| request.starts_with(format!("GET {path} ").as_bytes()));
        assert!(!is_lost, "a request that got no response was forwarded: {}", request.escape_ascii());
    }
}

/// Requests, each on a new connection or on the last one, as long as the proxy does not announce its end.
struct Load {
    address: SocketAddr,
    stop: AtomicBool,
    served: AtomicUsize,
    /// Those of them on used connections.
    reused: AtomicUsize,
    /// The paths of requests without a response.
    lost: Mutex<Vec<String>>,
}

impl Load {
    fn run(&self, worker: usize) {
        let (keeps, mut kept) = (worker.is_multiple_of(2), None);
        for number in 0.. {
            if self.stop.load(SeqCst) {
                return;
            }
            let is_reused = kept.is_some();
            let mut client: Client = kept.take().unwrap_or_else(|| Client::to(self.address));
            let path = format!("/{worker}/{number}");
            client.send(format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes());
            let Some(answer) = client.try_answer() else {
                // A used connection may be closed while it is idle: clients open a new one then (RFC 9112, 9.3.1).
                assert!(is_reused, "a request on a new connection was lost");
                self.lost.lock().unwrap().push(path);
                continue;
            };
            assert_eq!(answer.status, 200, "{answer:?}");
            self.served.fetch_add(1, SeqCst);
            self.reused.fetch_add(usize::from(is_reused), SeqCst);
            kept = Some(client).filter(|_| keeps && answer.header("connection") != Some("close"));
        }
    }
}

/// Tunnels have 10 s like requests, and HTTP/2 clients learn that the connection takes no more of them.
#[tokio::test(flavor = "multi_thread")]
async fn draining_says_goaway_and_ends_tunnels() {
    let release = Arc::new(Barrier::new(2));
    let upstream = Upstream::answering({
        let release = Arc::clone(&release);
        move |request| {
            if request.starts_with(b"GET /ws") {
                let head =
                    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
                return head.to_vec();
            }
            if request.starts_with(b"GET /wait") {
                release.wait();
            }
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec()
        }
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut tunnel = proxy.client();
    tunnel.send(b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
    assert_eq!(tunnel.try_head().unwrap().status, 101);
    let stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = |path: &str| Request::get(format!("http://a/{path}")).body(()).unwrap();
    let response = client.send_request(request("wait"), true).unwrap().0;
    eventually("both requests arrive", || upstream.count() == 2);
    proxy.api.signal("TERM");
    let refused = loop {
        match client.send_request(request("x"), true) {
            Ok((response, _)) => drop(response.await),
            Err(error) => break error,
        }
        match client.ready().await {
            Ok(ready) => client = ready,
            Err(error) => break error,
        }
    };
    assert!(refused.is_go_away() && refused.is_remote(), "{refused}");
    release.wait();
    assert_eq!(response.await.unwrap().status(), 200, "a request that had begun is finished");
    drop(connection);
    let ended = proxy.api.ended();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("closed 1 connections with requests in flight"), "{}", ended.log);
    assert_eq!(tunnel.stream.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn request_in_flight_is_finished() {
    let release = Arc::new(Barrier::new(2));
    let upstream = Upstream::answering({
        let release = Arc::clone(&release);
        move |_| {
            release.wait();
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec()
        }
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = proxy.client();
    client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    let address = proxy.address;
    proxy.api.signal("TERM");
    eventually("the listener is closed", || TcpStream::connect(address).is_err());
    release.wait();
    let answer = client.answer();
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")), "{answer:?}");
    assert_eq!(proxy.api.ended().code, Some(0));
}
