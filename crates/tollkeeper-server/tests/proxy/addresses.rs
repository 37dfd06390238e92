//! Several addresses behind one name: balance, ejection and return, with a hosts file that only the proxy sees.

use std::io::Write as _;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::support::{Client, Folder, Server, eventually, tollkeeper};
use crate::upstream::read_request;

/// An instance of the service that can be stopped.
struct Instance {
    address: SocketAddr,
    served: Arc<AtomicUsize>,
    stops: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    accepting: JoinHandle<()>,
}

impl Instance {
    fn start(address: SocketAddr) -> Instance {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let (served, stops): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        let streams: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let accepting = std::thread::spawn({
            let (served, stops, streams) = (Arc::clone(&served), Arc::clone(&stops), Arc::clone(&streams));
            move || {
                for mut stream in listener.incoming().map_while(Result::ok) {
                    if stops.load(SeqCst) {
                        return;
                    }
                    streams.lock().unwrap().push(stream.try_clone().unwrap());
                    let served = Arc::clone(&served);
                    std::thread::spawn(move || {
                        let mut buffer = Vec::new();
                        while read_request(&mut stream, &mut buffer).is_some() {
                            served.fetch_add(1, SeqCst);
                            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
                        }
                    });
                }
            }
        });
        Instance { address, served, stops, streams, accepting }
    }

    fn stop(self) -> SocketAddr {
        self.stops.store(true, SeqCst);
        // Wakes the accepting thread.
        drop(TcpStream::connect(self.address));
        self.accepting.join().unwrap();
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.address
    }
}

#[test]
fn all_addresses_are_used_while_they_work() {
    let one = Instance::start((Ipv4Addr::new(127, 0, 0, 2), 0).into());
    let port = one.address.port();
    let two = Instance::start((Ipv4Addr::new(127, 0, 0, 3), port).into());
    let folder = Folder::new();
    let hosts = folder.write("hosts", "127.0.0.2 app.test\n127.0.0.3 app.test\n127.0.0.1 localhost\n");
    let config = "limits: [{ name: all, rate: 1000000/s }]\nproxy: { health: { failures: 3, eject: 1s } }\n";
    let file = folder.write("tollkeeper.yaml", config);
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]);
    command.arg(hosts).arg(tollkeeper().get_program());
    command.args(["proxy", &format!("http://app.test:{port}"), "--listen", "127.0.0.1:0"]);
    command.args(["--http", "127.0.0.1:0", "--config"]).arg(file);
    command.env("TOLLKEEPER_GRPC", "off").env("TOLLKEEPER_RESP", "off");
    let proxy = Server::launch(&mut command);
    let mut client = Client::to(proxy.listens("proxy"));
    let mut status = || client.request("GET", "/x", "").status;

    assert!((0..2_000).all(|_| status() == 200));
    let served = [one.served.load(SeqCst), two.served.load(SeqCst)];
    assert!(served.iter().all(|count| (900..=1_100).contains(count)), "balanced within 10 %: {served:?}");

    let dead = one.stop();
    eventually("the dead address is ejected", || {
        status();
        proxy.metric("tollkeeper_proxy_ejected") == 1.0
    });
    assert!((0..500).all(|_| status() == 200), "no request fails after the ejection");

    let back = Instance::start(dead);
    eventually("the address is used again", || {
        assert_eq!(status(), 200);
        back.served.load(SeqCst) > 0
    });
}
