//! Hashed facts: the same key on every transport, and clients cannot pass the hash of another value.

mod envoy_oracle;
mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::json;
use support::*;
use tollkeeper_core::digest::{hex, sha256};
use tonic::transport::Channel;

use crate::envoy_oracle::{Code, RateLimitServiceClient, codes, descriptor, question};

/// Six requests a day for each customer.
fn config() -> String {
    format!(
        "http:
  trusted_proxies: [127.0.0.1]
  facts:
    api_key: {{ from: header.authorization, strip: \"Bearer \", normalize: [trim, lowercase], hash: true }}
limits:
  - {{ name: customer, by: api_key, rate: 6/day, algorithm: fixed-window, overrides: {{ \"Big-Corp\": 7/day }} }}
admin: {{ token_sha256: {} }}
",
        hex(&sha256(b"boss"))
    )
}

fn hash(text: &str) -> String {
    hex(&sha256(text.as_bytes())[..16])
}

fn start(folder: &Folder) -> Server {
    let file = folder.write("tollkeeper.yaml", &config());
    let file = file.to_str().expect("the path is UTF-8");
    Server::with(&["--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--config", file])
}

/// The remaining units from `/v1/usage`: 5 of 6 after one request.
fn remaining(server: &Server, value: &str) -> u64 {
    let usage = admin(server, &format!("GET /v1/usage?api_key={value}"));
    usage.json()["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{}", usage.text()))
}

fn admin(server: &Server, call: &str) -> Answer {
    let (method, path) = call.split_once(' ').expect("a method and a path");
    server.client().request_with(method, path, &["authorization: Bearer boss"], b"")
}

fn over_resp(server: &Server, value: &str) {
    let mut stream = TcpStream::connect(server.listens("resp")).expect("the RESP listener accepts");
    write!(stream, "TK.CHECK api_key {value}\r\nQUIT\r\n").expect("the command is sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("the reply is UTF-8");
    assert!(reply.contains("allowed\r\n:1"), "{reply}");
    assert!(!reply.contains(&hash(value)), "a reply shows at most twelve digits of a hash: {reply}");
}

async fn over_grpc(server: &Server, value: &str) {
    let address = format!("http://{}", server.listens("grpc"));
    let channel =
        Channel::from_shared(address).expect("valid URL").connect().await.expect("the gRPC listener accepts");
    let asked = question([descriptor([("api_key", value)])]);
    let answer =
        RateLimitServiceClient::new(channel).should_rate_limit(asked).await.expect("the call succeeds");
    assert_eq!(codes(&answer.into_inner()).0, Code::Ok);
}

#[tokio::test]
async fn hashed_key_is_the_same_on_every_transport() {
    let folder = Folder::new();
    let server = start(&folder);
    // Forward auth reads the header; on the other transports the caller sends the raw value.
    let gateway = [
        "X-Original-Method: GET",
        "X-Original-URI: /",
        "X-Forwarded-For: 192.0.2.7",
        "Authorization: bearer  CUST-1",
    ];
    assert_eq!(server.client().request_with("GET", "/v1/auth/nginx", &gateway, b"").status, 200);
    assert_eq!(remaining(&server, "cust-1"), 5);
    assert!(server.check(r#"{"api_key":"Cust-1"}"#));
    assert!(server.check(&format!(r#"{{"api_key":{{"sha256":"{}"}}}}"#, hash("cust-1"))));
    assert_eq!(remaining(&server, "cust-1"), 3);
    over_resp(&server, "CUST-1");
    over_grpc(&server, "cust-1 ").await;
    for value in
        ["cust-1", &format!("sha256:{}", hash("cust-1")), &format!("sha256:{}", &hash("cust-1")[..12])]
    {
        assert_eq!(remaining(&server, value), 1, "{value}");
    }
    assert!(server.check(r#"{"api_key":"cust-1"}"#));
    assert!(!server.check(r#"{"api_key":"cust-1"}"#));
    let top = admin(&server, "GET /v1/top").json();
    assert_eq!(top["busiest"][0]["key"], json!([format!("sha256:{}", &hash("cust-1")[..12])]));
    let shown = top["busiest"][0]["key"][0].as_str().expect("a string").to_owned();
    let deleted = admin(&server, &format!("DELETE /v1/state?limit=customer&api_key={shown}"));
    assert_eq!(deleted.json(), json!({ "done": true }), "a shown hash identifies the key in other calls");
    assert_eq!(remaining(&server, "cust-1"), 6);
}

#[tokio::test]
async fn client_cannot_send_the_hash_of_another() {
    let folder = Folder::new();
    let server = start(&folder);
    for text in [hash("cust-1"), format!("sha256:{}", hash("cust-1"))] {
        let gateway = ["X-Forwarded-Method: GET", "X-Forwarded-Uri: /", &format!("Authorization: {text}")];
        assert_eq!(server.client().request_with("GET", "/v1/auth", &gateway, b"").status, 200);
        assert!(server.check(&format!(r#"{{"api_key":"{text}"}}"#)));
        over_resp(&server, &text);
        over_grpc(&server, &text).await;
        assert_eq!(remaining(&server, "cust-1"), 6);
        let own = format!("sha256:{}", hash(&text));
        assert_eq!(remaining(&server, &own), 2, "the text is hashed like any other value");
    }
    // The hash of a customer with an override does not get that customer's quota, either.
    assert!(server.check(&format!(r#"{{"api_key":"{}"}}"#, hash("big-corp"))));
    assert_eq!(remaining(&server, &format!("sha256:{}", hash(&hash("big-corp")))), 5);
}

#[test]
fn override_matches_by_value_and_by_hash() {
    let folder = Folder::new();
    let server = start(&folder);
    for value in ["big-corp", "BIG-corp", &format!("sha256:{}", hash("big-corp"))] {
        assert_eq!(remaining(&server, value), 7, "{value}");
    }
    assert!(server.check(&format!(r#"{{"api_key":{{"sha256":"{}"}}}}"#, hash("big-corp").to_uppercase())));
    assert_eq!(remaining(&server, "big-corp"), 6);
}

#[test]
fn unusable_hash_is_an_error() {
    let folder = Folder::new();
    let server = start(&folder);
    let usage = |value: &str| admin(&server, &format!("GET /v1/usage?api_key={value}")).error();
    let invalid = (400, "invalid_fact".to_owned(), Some("facts.api_key".to_owned()));
    assert_eq!(usage("sha256:0123456789ab"), invalid, "this short hash was never shown");
    assert_eq!(usage("sha256:0123"), invalid);
    let check = |facts: &str| server.post("/v1/check", &format!(r#"{{"facts":{facts}}}"#)).error();
    assert_eq!(check(r#"{"api_key":{"sha256":"0123456789ab"}}"#), invalid);
    let user = (400, "invalid_fact".to_owned(), Some("facts.user".to_owned()));
    assert_eq!(check(&format!(r#"{{"user":{{"sha256":"{}"}}}}"#, hash("x"))), user, "`user` is not hashed");
}
