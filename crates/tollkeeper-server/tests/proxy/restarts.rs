//! Stopping: requests in flight finish, new ones go to the next process, and none is lost.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};

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
    let (stop, served, reused) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (stop, served, reused) = (&stop, &served, &reused);
            scope.spawn(move || load(address, worker % 2 == 0, stop, served, reused));
        }
        for _ in 0..20 {
            let before = served.load(SeqCst);
            eventually("requests are served", || served.load(SeqCst) > before + 50);
            let next = start(&upstream, &folder, &address.to_string());
            let old = std::mem::replace(&mut current, next);
            old.signal("TERM");
            assert_eq!(old.ended().code, Some(0));
        }
        stop.store(true, SeqCst);
    });
    println!(
        "{} requests over 20 restarts, {} on used connections",
        served.load(SeqCst),
        reused.load(SeqCst)
    );
}

/// Sends requests, each on a new connection or on the last one, as long as the proxy does not announce its end.
fn load(address: SocketAddr, keeps: bool, stop: &AtomicBool, served: &AtomicUsize, reused: &AtomicUsize) {
    let mut kept: Option<Client> = None;
    while !stop.load(SeqCst) {
        let is_reused = kept.is_some();
        let mut client = kept.take().unwrap_or_else(|| Client::to(address));
        client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
        let Some(answer) = client.try_answer() else {
            // A used connection may be closed while it is idle: clients open a new one then (RFC 9112, 9.3.1).
            assert!(is_reused, "a request on a new connection was lost");
            continue;
        };
        assert_eq!(answer.status, 200, "{answer:?}");
        served.fetch_add(1, SeqCst);
        reused.fetch_add(usize::from(is_reused), SeqCst);
        kept = Some(client).filter(|_| keeps && answer.header("connection") != Some("close"));
    }
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
