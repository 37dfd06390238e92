//! The limits in front of the upstream: exact admission, slots, refunds by status, headers.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};

use tollkeeper_core::digest::{hex, sha256};

use crate::Proxy;
use crate::support::eventually;
use crate::upstream::{Upstream, read_request};

const SLOTS: &str = "limits: [{ name: slots, algorithm: concurrency, limit: 2 }]\n";

#[test]
fn exactly_the_limit_is_admitted() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), "limits: [{ name: day, rate: 20/day }]\n", &[]);
    let (admitted, start) = (AtomicUsize::new(0), Barrier::new(8));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = proxy.client();
                start.wait();
                for _ in 0..10 {
                    let answer = client.request("GET", "/x", "");
                    match answer.status {
                        200 => drop(admitted.fetch_add(1, SeqCst)),
                        429 => {
                            assert_eq!(answer.header("content-type"), Some("application/problem+json"));
                            assert!(answer.header("retry-after").is_some(), "{answer:?}");
                        }
                        _ => panic!("{answer:?}"),
                    }
                }
            });
        }
    });
    assert_eq!((admitted.load(SeqCst), upstream.count()), (20, 20));
    let requests = |result| {
        proxy.metric(&format!(
            "tollkeeper_requests_total{{transport=\"proxy\",route=\"\",result=\"{result}\"}}"
        ))
    };
    assert_eq!((requests("allowed"), requests("refused")), (20.0, 60.0));
}

#[test]
fn upstream_rate_limit_headers_are_replaced() {
    let upstream = Upstream::answering(|_| {
        b"HTTP/1.1 200 OK\r\nx-ratelimit-limit: 7\r\nratelimit: \"theirs\";r=1\r\nretry-after: 9\r\n\
          ratelimit-reset: 3\r\ncontent-length: 0\r\n\r\n"
            .to_vec()
    });
    let proxy = Proxy::start(&upstream.url(), "headers: []\nlimits: [{ name: day, rate: 20/day }]\n", &[]);
    let answer = proxy.client().request("GET", "/x", "");
    for name in ["x-ratelimit-limit", "ratelimit", "ratelimit-reset"] {
        assert_eq!(answer.header(name), None, "{answer:?}");
    }
    assert_eq!(answer.header("retry-after"), Some("9"), "it is the upstream's advice");
}

#[test]
fn charge_is_refunded_by_the_status_of_the_upstream() {
    let upstream = Upstream::answering(|request| {
        let status = if request.starts_with(b"GET /missing") { "404 Not Found" } else { "200 OK" };
        format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").into_bytes()
    });
    let config = "limits: [{ name: day, rate: 2/day, refund_when: { status: 404 } }]\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut client = proxy.client();
    let statuses: Vec<u16> = ["/missing", "/missing", "/missing", "/x", "/x", "/x"]
        .map(|path| client.request("GET", path, "").status)
        .into();
    assert_eq!(statuses, [404, 404, 404, 200, 200, 429]);
}

/// An upstream that answers when its barrier is reached by the test, too.
fn waiting(release: &Arc<Barrier>) -> Upstream {
    let release = Arc::clone(release);
    Upstream::answering(move |request| {
        if request.starts_with(b"GET /wait") {
            release.wait();
        }
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec()
    })
}

#[test]
fn slot_is_held_until_the_response_has_ended() {
    let release = Arc::new(Barrier::new(3));
    let upstream = waiting(&release);
    let proxy = Proxy::start(&upstream.url(), SLOTS, &[]);
    let mut held = [proxy.client(), proxy.client()];
    for (index, client) in held.iter_mut().enumerate() {
        client.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
        eventually("the request arrives", || upstream.count() == index + 1);
    }
    let mut other = proxy.client();
    assert_eq!(other.request("GET", "/x", "").status, 429);
    release.wait();
    for client in &mut held {
        assert_eq!(client.answer().status, 200);
    }
    assert_eq!(other.request("GET", "/x", "").status, 200);
}

#[test]
fn slot_is_released_when_the_client_leaves() {
    let release = Arc::new(Barrier::new(3));
    let upstream = waiting(&release);
    let proxy = Proxy::start(&upstream.url(), SLOTS, &[]);
    let mut held = vec![proxy.client(), proxy.client()];
    for (index, client) in held.iter_mut().enumerate() {
        client.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
        eventually("the request arrives", || upstream.count() == index + 1);
    }
    let mut other = proxy.client();
    assert_eq!(other.request("GET", "/x", "").status, 429);
    drop(held);
    eventually("a slot is free", || other.request("GET", "/x", "").status == 200);
    release.wait();
}

#[test]
fn slot_is_released_when_the_upstream_fails() {
    let upstream = Upstream::serving(|upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap();
        upstream.record(&request);
    });
    let proxy = Proxy::start(&upstream.url(), SLOTS, &[]);
    let mut client = proxy.client();
    for _ in 0..5 {
        assert_eq!(client.request("GET", "/x", "").status, 502);
    }
}

#[test]
fn tunnel_holds_a_slot_until_it_is_closed() {
    let upstream = Upstream::serving(|upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap();
        upstream.record(&request);
        let switch = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(switch).unwrap();
        let mut byte = [0];
        while stream.read(&mut byte).is_ok_and(|count| count > 0) {
            stream.write_all(&byte).unwrap();
        }
    });
    let proxy = Proxy::start(&upstream.url(), SLOTS, &[]);
    let open = || {
        let mut client = proxy.client();
        client.send(b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
        let answer = client.try_head().unwrap();
        (client, answer.status)
    };
    let mut tunnels = vec![open(), open()];
    for (tunnel, status) in &mut tunnels {
        assert_eq!(*status, 101);
        tunnel.send(b"hello");
        let mut echo = [0; 5];
        tunnel.stream.read_exact(&mut echo).unwrap();
        assert_eq!(&echo, b"hello");
    }
    assert_eq!(open().1, 429, "both slots are held");
    tunnels.pop();
    eventually("the slot of a closed tunnel is free", || open().1 == 101);
}

/// An upstream that switches to this protocol, with this header.
fn switching(upgrade: &'static str, header: &'static str) -> Upstream {
    Upstream::answering(move |_| {
        let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade";
        format!("{head}\r\nupgrade: {upgrade}\r\n{header}\r\n\r\n").into_bytes()
    })
}

#[test]
fn upgrade_response_has_only_our_rate_limits() {
    let upgrade = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let config = "headers: []\nlimits: [{ name: day, rate: 20/day }]\n";
    let upstream = switching("WebSocket", "x-ratelimit-limit: 7");
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut client = proxy.client();
    client.send(upgrade);
    let answer = client.try_head().unwrap();
    assert_eq!((answer.status, answer.header("upgrade")), (101, Some("websocket")), "{answer:?}");
    assert_eq!(answer.header("x-ratelimit-limit"), None, "{answer:?}");
    // A protocol that the client did not ask for.
    let upstream = switching("h2c", "x-a: b");
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut client = proxy.client();
    client.send(upgrade);
    assert_eq!(client.answer().status, 502);
}

/// A delay that is longer than `timeout` is a refusal, and charges nothing: the next delay would not be shorter either.
#[test]
fn delay_above_the_timeout_is_refused() {
    let upstream = Upstream::ok();
    let config =
        "limits: [{ name: slow, algorithm: leaky-bucket, rate: 1/h, burst: 10 }]\nproxy: { timeout: 5s }\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut client = proxy.client();
    assert_eq!(client.request("GET", "/x", "").status, 200);
    for _ in 0..3 {
        let answer = client.request("GET", "/x", "");
        let retry: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert_eq!(answer.status, 429, "{answer:?}");
        // Each that was charged would add an hour.
        assert!((3_000..=3_600 * 11 / 10).contains(&retry), "{answer:?}");
    }
    assert_eq!(upstream.count(), 1);
}

#[test]
fn concurrency_is_reloaded() {
    let release = Arc::new(Barrier::new(2));
    let upstream = waiting(&release);
    let config = |max: u32| {
        format!("limits: [{{ name: day, rate: 1000/day }}]\nproxy: {{ concurrency: {{ max: {max} }} }}\n")
    };
    let proxy = Proxy::start(&upstream.url(), &config(1), &[]);
    let mut held = proxy.client();
    held.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    let mut client = proxy.client();
    assert_eq!(client.request("GET", "/x", "").status, 503);
    proxy.folder.write("tollkeeper.yaml", &config(2));
    proxy.api.signal("HUP");
    eventually("there is a second slot", || client.request("GET", "/x", "").status == 200);
    release.wait();
    assert_eq!(held.answer().status, 200);
}

#[test]
fn requests_beyond_the_concurrency_are_shed_and_refunded() {
    let release = Arc::new(Barrier::new(2));
    let upstream = waiting(&release);
    let config = "limits: [{ name: day, rate: 3/day }]\nproxy: { concurrency: { max: 1 } }\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut held = proxy.client();
    held.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    let mut other = proxy.client();
    for _ in 0..10 {
        let shed = other.request("GET", "/x", "");
        assert_eq!((shed.status, shed.header("retry-after")), (503, Some("1")), "{shed:?}");
        assert_eq!(shed.header("content-type"), Some("application/problem+json"), "{shed:?}");
    }
    release.wait();
    assert_eq!(held.answer().status, 200);
    eventually("the slot is free", || proxy.metric("tollkeeper_proxy_in_flight") == 0.0);
    let statuses: Vec<u16> = (0..3).map(|_| other.request("GET", "/x", "").status).collect();
    assert_eq!(statuses, [200, 200, 429], "what was shed is not charged");
    assert_eq!(proxy.metric("tollkeeper_proxy_shed_total{priority=\"normal\"}"), 10.0);
    assert_eq!(proxy.metric("tollkeeper_proxy_concurrency_limit"), 1.0);
}

#[test]
fn low_priority_is_shed_first() {
    let release = Arc::new(Barrier::new(2));
    let upstream = waiting(&release);
    let config = "http: { facts: { class: { from: header.x-class } } }\nlimits: [{ name: day, rate: 1000/day }]\n\
                  proxy: { concurrency: { max: 2, priority: class, priorities: { high: 100%, low: 50% } } }\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut held = proxy.client();
    held.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    let mut client = proxy.client();
    assert_eq!(client.request_with("GET", "/x", &["x-class: low"], b"").status, 503);
    assert_eq!(client.request_with("GET", "/x", &["x-class: high"], b"").status, 200);
    release.wait();
    assert_eq!(held.answer().status, 200);
}

/// A client can neither remove the header that its priority is read from, nor hide its priority in a second line.
#[test]
fn clients_cannot_evade_a_low_priority() {
    let release = Arc::new(Barrier::new(2));
    let upstream = waiting(&release);
    let config = "limits: [{ name: day, rate: 1000/day }]\nproxy: { concurrency: { max: 4, priority: header.x-class, \
                  priorities: { high: 100%, normal: 75%, low: 25% } } }\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let mut held = proxy.client();
    held.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    let mut client = proxy.client();
    let mut status = |headers: &[&str]| client.request_with("GET", "/x", headers, b"").status;
    assert_eq!(status(&[]), 200);
    assert_eq!(status(&["x-class: low"]), 503);
    assert_eq!(status(&["x-class: low", "connection: x-class"]), 503);
    assert_eq!(status(&["x-class: low", "x-class: high"]), 503);
    release.wait();
    assert_eq!(held.answer().status, 200);
}

#[test]
fn identical_requests_in_flight_share_one_call() {
    const CLIENTS: usize = 20;
    let release = Arc::new(Barrier::new(2));
    let upstream = waiting(&release);
    let config =
        "limits: [{ name: day, rate: 20/day }]\nproxy: { single_flight: [{ by: [host, path, query] }] }\n";
    let proxy = Proxy::start(&upstream.url(), config, &["--debug-headers"]);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    }
    eventually("all requests have been charged", || {
        proxy.metric("tollkeeper_checks_total{limit=\"day\",result=\"allowed\"}") == CLIENTS as f64
    });
    eventually("the leader has arrived", || upstream.count() == 1);
    release.wait();
    let answers: Vec<_> = clients.iter_mut().map(crate::support::Client::answer).collect();
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.text() == "ok"), "{answers:?}");
    let shared = answers.iter().filter(|answer| answer.header("x-tollkeeper-shared") == Some("1")).count();
    assert_eq!((shared, upstream.count()), (CLIENTS - 1, 1));
    assert!(
        answers.iter().all(|answer| answer.header("x-ratelimit-remaining").is_some()),
        "each has its own"
    );
    assert_eq!(proxy.metric("tollkeeper_proxy_shared_total{result=\"shared\"}"), (CLIENTS - 1) as f64);
    let refused = proxy.client().request("GET", "/wait", "");
    assert_eq!(refused.status, 429, "every follower was charged");
}

/// The header that a limit reads identifies a caller, also if it is not declared, and if the limit was set through the API.
#[test]
fn single_flight_does_not_mix_api_keys() {
    let limit = "{ name: keys, by: header.x-api-key, rate: 20/day }";
    for (from_file, put) in [(limit, None), ("", Some(limit))] {
        let release = Arc::new(Barrier::new(3));
        let upstream = Upstream::answering({
            let release = Arc::clone(&release);
            move |request| {
                release.wait();
                let text = String::from_utf8_lossy(request);
                let key = text.lines().find_map(|line| line.strip_prefix("x-api-key: ")).unwrap();
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{key}", key.len()).into_bytes()
            }
        });
        let digest = hex(&sha256(b"boss"));
        let config = format!(
            "admin: {{ token_sha256: {digest} }}\nlimits: [{from_file}]\n\
             proxy: {{ single_flight: [{{ by: [host, path, query] }}] }}\n"
        );
        let proxy = Proxy::start(&upstream.url(), &config, &[]);
        if put.is_some() {
            let limits = r#"{"limits":[{"name":"keys","by":"header.x-api-key","rate":"20/day"}]}"#;
            let token = "authorization: Bearer boss";
            let put = proxy.api.client().request_with("PUT", "/v1/limits", &[token], limits.as_bytes());
            assert_eq!(put.status, 200, "{put:?}");
        }
        let mut clients = [("ann", proxy.client()), ("bob", proxy.client())];
        for (key, client) in &mut clients {
            client.send(format!("GET /x HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\n\r\n").as_bytes());
        }
        eventually("each caller makes its own call", || upstream.count() == 2);
        release.wait();
        for (key, client) in &mut clients {
            assert_eq!(client.answer().text(), *key);
        }
    }
}

/// A load balancer that passes `Connection` on would let a client remove the header that it sets.
#[test]
fn connection_cannot_remove_what_limits_read() {
    let upstream = Upstream::ok();
    let config = "http: { client_address: header.x-client, facts: { user: { from: header.x-user } } }\n\
                  limits: [{ name: user, by: user, rate: 1/day }, { name: plan, by: header.x-plan, rate: 9/day }]\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let named = ["connection: x-user, x-plan, x-client", "x-user: b", "x-plan: c", "x-client: 192.0.2.7"];
    let mut client = proxy.client();
    assert_eq!(client.request_with("GET", "/x", &named, b"").status, 200);
    let arrived = upstream.take().concat().to_ascii_lowercase();
    let arrived = String::from_utf8_lossy(&arrived);
    assert!(named[1..].iter().all(|header| arrived.contains(header)), "{arrived}");
    assert_eq!(client.request_with("GET", "/x", &named, b"").status, 429, "the limit applies");
}
