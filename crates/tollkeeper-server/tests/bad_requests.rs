//! Invalid requests: they get the right error, charge nothing, and do not affect other clients.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::io::{Read as _, Write as _};
use std::thread;

use serde_json::{Value, json};
use support::*;

/// Asserts that nothing was charged so far, and that the server serves other clients.
fn untouched(server: &Server, after: &str) {
    let peek = server.post("/v1/peek", ALICE);
    assert_eq!(peek.status, 200, "{after}");
    let limit = &peek.json()["limits"][0];
    assert_eq!((&limit["remaining"], &limit["reset_after"]), (&json!(5), &json!(0)), "{after}");
    assert_eq!(charged(server), 0.0, "{after}");
    assert_eq!(server.metric("tollkeeper_keys"), 0.0, "{after}");
}

/// How many checks the limit of the built-in policy has decided: unlike a bucket, this does not refill.
fn charged(server: &Server) -> f64 {
    let with = |result| format!("tollkeeper_checks_total{{limit=\"demo\",result=\"{result}\"}}");
    ["allowed", "refused", "would_refuse"].iter().map(|result| server.metric(&with(result))).sum()
}

const ALICE: &str = r#"{"facts":{"user":"alice"}}"#;

/// `text` padded with spaces to exactly this many bytes.
fn padded(text: &str, size: usize) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    assert!(bytes.len() <= size);
    bytes.resize(size, b' ');
    bytes
}

fn fact(name: &str, value: &str) -> String {
    json!({ "facts": { name: value } }).to_string()
}

/// A check with this many different facts.
fn facts(count: usize) -> String {
    let facts: Vec<String> = (0..count).map(|number| format!("\"f{number}\":{number}")).collect();
    format!("{{\"facts\":{{{}}}}}", facts.join(","))
}

fn batch(check: &str, count: usize) -> String {
    format!("{{\"checks\":[{}]}}", vec![check; count].join(","))
}

#[test]
fn invalid_check_names_code_message_and_field() {
    let server = Server::start();
    let mut client = server.client();
    let deep = format!(r#"{{"facts":{}"#, "[".repeat(60_000));
    let deeper = format!(r#"{{"facts":{{"a":{}"#, r#"{"a":"#.repeat(10_000));
    let huge = format!(r#"{{"facts":{{"user":{}}}}}"#, "9".repeat(1_025));
    let cases: &[(&str, &str, Option<&str>, &str)] = &[
        // Invalid or truncated JSON.
        ("", "invalid_json", None, "ends too early"),
        (" \n", "invalid_json", None, "ends too early"),
        ("user=alice", "invalid_json", None, "{\"facts\":{\"user\":\"alice\"}"),
        ("null", "invalid_json", None, "a check must be an object"),
        ("\"alice\"", "invalid_json", None, "a check must be an object"),
        ("[]", "invalid_json", None, "a check must be an object"),
        ("{", "invalid_json", None, "at byte 1"),
        (r#"{"facts""#, "invalid_json", None, "ends too early"),
        (r#"{"facts":{"user":"alice"}"#, "invalid_json", None, "ends too early"),
        (r#"{"facts":{"user":"alice}}"#, "invalid_json", None, "unterminated string"),
        (r#"{"facts":{"user":"alice"}}}"#, "invalid_json", None, "unexpected data after the end"),
        (r#"{"facts":{"user":"alice"}} {"facts":{}}"#, "invalid_json", None, "unexpected data after the end"),
        (r#"{"facts":{"user":"alice",}}"#, "invalid_json", None, "a name in double quotes"),
        (r#"{"facts":{user:"alice"}}"#, "invalid_json", None, "a name in double quotes"),
        (r#"{"facts":{'user':'alice'}}"#, "invalid_json", None, "a name in double quotes"),
        (r#"{"facts":{"user":'alice'}}"#, "invalid_json", None, "strings in double quotes"),
        (r#"{"facts":{"user":"alice"} /* all */}"#, "invalid_json", None, "`,` or `}`"),
        (r#"{"facts":{"user":NaN}}"#, "invalid_json", None, "expected a value"),
        (r#"{"facts":{"user":Infinity}}"#, "invalid_json", None, "expected a value"),
        (r#"{"facts":{"user":-Infinity}}"#, "invalid_json", None, "a number begins with a digit"),
        (r#"{"facts":{"user":01}}"#, "invalid_json", None, "a number begins with a digit"),
        (r#"{"facts":{"user":0x1f}}"#, "invalid_json", None, "`,` or `}`"),
        (r#"{"facts":{"user":"\ud800"}}"#, "invalid_json", None, "surrogate"),
        (r#"{"facts":{"user":"\u00"}}"#, "invalid_json", None, "four hexadecimal digits"),
        ("{\"facts\":{\"user\":\"a\nb\"}}", "invalid_json", None, "control characters"),
        ("{\"facts\":{\"user\":\"a\0b\"}}", "invalid_json", None, "control characters"),
        ("\u{feff}{\"facts\":{}}", "invalid_json", None, "a check must be an object"),
        (r#"{"facts":{},"cost":NaN}"#, "invalid_json", None, "expected a value"),
        // Fields.
        ("{}", "missing_field", Some("facts"), "`facts` is missing"),
        (r#"{"cost":1}"#, "missing_field", Some("facts"), "`facts` is missing"),
        (
            r#"{"facts":{"user":"alice"},"costs":1}"#,
            "unknown_field",
            Some("costs"),
            "only `facts` and `cost`",
        ),
        (r#"{"Facts":{"user":"alice"}}"#, "unknown_field", Some("Facts"), "only `facts` and `cost`"),
        (r#"{"user":"alice"}"#, "unknown_field", Some("user"), "only `facts` and `cost`"),
        (r#"{"facts":{"user":"alice"},"":1}"#, "unknown_field", Some(""), "only `facts` and `cost`"),
        (r#"{"facts":{"user":"alice"},"facts":{"user":"alice"}}"#, "duplicate_field", Some("facts"), "twice"),
        (r#"{"facts":{"user":"alice"},"f\u0061cts":{}}"#, "duplicate_field", Some("facts"), "twice"),
        (r#"{"cost":1,"facts":{"user":"alice"},"cost":1}"#, "duplicate_field", Some("cost"), "twice"),
        (r#"{"facts":{"user":"alice","user":"bob"}}"#, "duplicate_field", Some("facts.user"), "twice"),
        (r#"{"facts":{"user":"alice","us\u0065r":"alice"}}"#, "duplicate_field", Some("facts.user"), "twice"),
        (r#"{"facts":{"user":"","user":"alice"}}"#, "duplicate_field", Some("facts.user"), "twice"),
        // Facts.
        (r#"{"facts":null}"#, "invalid_fact", Some("facts"), "an object of names and values"),
        (r#"{"facts":"user"}"#, "invalid_fact", Some("facts"), "an object of names and values"),
        (r#"{"facts":[["user","alice"]]}"#, "invalid_fact", Some("facts"), "an object of names and values"),
        (&deep, "invalid_fact", Some("facts"), "an object of names and values"),
        (&deeper, "invalid_fact", Some("facts.a"), "an object must be a hash of 32 hexadecimal digits"),
        (r#"{"facts":{"user":null}}"#, "invalid_fact", Some("facts.user"), "leave the fact out"),
        (r#"{"facts":{"user":["alice"]}}"#, "invalid_fact", Some("facts.user"), "not a list"),
        (r#"{"facts":{"user":{"id":7}}}"#, "invalid_fact", Some("facts.user"), "an object must be a hash"),
        (r#"{"facts":{"user":1.5}}"#, "invalid_fact", Some("facts.user"), "whole"),
        (r#"{"facts":{"user":1e3}}"#, "invalid_fact", Some("facts.user"), "whole"),
        (r#"{"facts":{"user":1E400}}"#, "invalid_fact", Some("facts.user"), "whole"),
        (&huge, "invalid_fact", Some("facts.user"), "1025 bytes (at most 1024"),
        (r#"{"facts":{"":"alice"}}"#, "invalid_fact", Some("facts."), "a name is 1 to 64"),
        (r#"{"facts":{"us er":"alice"}}"#, "invalid_fact", Some("facts.us er"), "a name is 1 to 64"),
        (r#"{"facts":{"usér":"alice"}}"#, "invalid_fact", Some("facts.usér"), "a name is 1 to 64"),
        (r#"{"facts":{"user\u0000":"alice"}}"#, "invalid_fact", Some("facts.user\0"), "a name is 1 to 64"),
        (
            r#"{"facts":{"ip":"nowhere","user":"alice"}}"#,
            "invalid_fact",
            Some("facts.ip"),
            "not an IP address",
        ),
        (
            r#"{"facts":{"user":"alice","ip":"192.0.2.7:80"}}"#,
            "invalid_fact",
            Some("facts.ip"),
            "not an IP address",
        ),
        (
            r#"{"facts":{"user":"alice","ip":"192.0.2.0/24"}}"#,
            "invalid_fact",
            Some("facts.ip"),
            "not an IP address",
        ),
        (
            r#"{"facts":{"user":"alice","ip":3221225985}}"#,
            "invalid_fact",
            Some("facts.ip"),
            "not an IP address",
        ),
        (r#"{"facts":{"user":"alice","ip":true}}"#, "invalid_fact", Some("facts.ip"), "not an IP address"),
        // Costs.
        (r#"{"facts":{"user":"alice"},"cost":0}"#, "invalid_cost", Some("cost"), "use peek"),
        (r#"{"facts":{"user":"alice"},"cost":-0}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":-1}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":1.0}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":1e0}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":"1"}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":true}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":null}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":[1]}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (r#"{"facts":{"user":"alice"},"cost":{}}"#, "invalid_cost", Some("cost"), "from 1 to 2147483648"),
        (
            r#"{"facts":{"user":"alice"},"cost":2147483649}"#,
            "invalid_cost",
            Some("cost"),
            "at most 2147483648",
        ),
        (
            r#"{"facts":{"user":"alice"},"cost":4294967297}"#,
            "invalid_cost",
            Some("cost"),
            "at most 2147483648",
        ),
        (
            r#"{"facts":{"user":"alice"},"cost":9223372036854775808}"#,
            "invalid_cost",
            Some("cost"),
            "2147483648",
        ),
        (
            r#"{"facts":{"user":"alice"},"cost":18446744073709551616}"#,
            "invalid_cost",
            Some("cost"),
            "2147483648",
        ),
        (
            r#"{"facts":{"user":"alice"},"cost":18446744073709551617}"#,
            "invalid_cost",
            Some("cost"),
            "2147483648",
        ),
    ];
    for (body, code, location, message) in cases {
        let shown: String = body.chars().take(80).collect();
        for path in ["/v1/check", "/v1/peek"] {
            let answer = client.request("POST", path, body);
            assert_eq!(
                answer.error(),
                (400, (*code).to_owned(), location.map(str::to_owned)),
                "{path} {shown}"
            );
            assert_eq!(answer.header("content-type"), Some("application/json"));
            assert_eq!(answer.header("retry-after"), None);
            let error = answer.json();
            let reported = error["error"]["message"].as_str().unwrap();
            assert!(reported.contains(message), "{shown}: {reported}");
            assert!(reported.len() < 300, "{shown}: a message is a sentence, not {} bytes", reported.len());
            assert_eq!(error["error"].as_object().unwrap().len(), 3, "{error}");
            assert_eq!(error.as_object().unwrap().len(), 1, "{error}");
        }
        untouched(&server, &shown);
    }
}

#[test]
fn invalid_utf8_is_refused_with_its_position() {
    let server = Server::start();
    let mut client = server.client();
    for (wrong, problem) in [
        (&b"\xff"[..], "a byte that never occurs in UTF-8"),
        (b"\xc3", "an incomplete sequence"),
        (b"\xc0\x80", "an overlong NUL"),
        (b"\xed\xa0\x80", "a surrogate"),
        (b"\xf5\x80\x80\x80", "a code point beyond Unicode"),
        (b"\x80", "a lone continuation byte"),
    ] {
        for (before, after) in
            [(&b"{\"facts\":{\"user\":\""[..], &b"\"}}"[..]), (b"{\"facts\":{\"", b"\":1}}"), (b"", b"")]
        {
            let answer = client.request_with("POST", "/v1/check", &[], &[before, wrong, after].concat());
            assert_eq!(answer.error(), (400, "invalid_json".to_owned(), None), "{problem}");
            let reported = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(
                reported.contains(&format!("at byte {}: invalid UTF-8", before.len())),
                "{problem}: {reported}"
            );
        }
        untouched(&server, problem);
    }
}

#[test]
fn documented_size_limits_are_exact() {
    let server = Server::start();
    let mut client = server.client();
    let (longest, longer) = ("n".repeat(64), "n".repeat(65));
    for fits in [
        fact("user", &"x".repeat(1_024)),
        fact("user", &"é".repeat(512)),
        fact("user", &"😀".repeat(256)),
        fact("user", &"\0".repeat(1_024)),
        fact("user", "\r\n\t\"\\\u{7f}"),
        fact(&longest, "alice"),
        fact("A-Za-z0-9._:/-", "alice"),
        facts(64),
        r#"{"facts":{"user":9223372036854775808}}"#.to_owned(),
        r#"{"facts":{"user":-99999999999999999999}}"#.to_owned(),
        r#"{"facts":{"user":true}}"#.to_owned(),
        r#"{"facts":{"user":""}}"#.to_owned(),
        r#"{"facts":{},"cost":2147483648}"#.to_owned(),
        r#"{"facts":{"user":"alice"},"cost":1}"#.to_owned(),
    ] {
        let answer = client.request("POST", "/v1/peek", &fits);
        assert_eq!(answer.status, 200, "{fits}: {answer:?}");
    }
    for (too_large, code, location) in [
        (fact("user", &"x".repeat(1_025)), "invalid_fact", "facts.user".to_owned()),
        (fact("user", &("é".repeat(512) + "x")), "invalid_fact", "facts.user".to_owned()),
        (fact("user", &"x".repeat(60_000)), "invalid_fact", "facts.user".to_owned()),
        (fact(&longer, "alice"), "invalid_fact", format!("facts.{longest}")),
        (fact(&"n".repeat(60_000), "alice"), "invalid_fact", format!("facts.{longest}")),
        (facts(65), "too_many", "facts".to_owned()),
        (facts(4_000), "too_many", "facts".to_owned()),
        (json!({ "facts": {}, "u".repeat(60_000): 1 }).to_string(), "unknown_field", "u".repeat(64)),
    ] {
        let shown: String = too_large.chars().take(80).collect();
        let answer = client.request("POST", "/v1/check", &too_large);
        assert_eq!(answer.error(), (400, code.to_owned(), Some(location)), "{shown}");
        assert!(answer.body.len() < 500, "{shown}: the response does not repeat the request");
        untouched(&server, &shown);
    }
    // A query string has the same limits.
    let query = |facts: &str| format!("/v1/usage?{facts}");
    let many: Vec<String> = (0..65).map(|number| format!("f{number}=1")).collect();
    assert_eq!(server.get(&query(&many[..64].join("&"))).status, 200);
    for (facts, code, location) in [
        (many.join("&"), "too_many", "facts"),
        (format!("user={}", "x".repeat(1_025)), "invalid_fact", "facts.user"),
        ("user=%ff".to_owned(), "invalid_fact", "facts.user"),
        ("user=%4".to_owned(), "invalid_fact", "facts.user"),
        ("us%20er=1".to_owned(), "invalid_fact", "facts.us er"),
        ("=1".to_owned(), "invalid_fact", "facts."),
        ("ip=nowhere".to_owned(), "invalid_fact", "facts.ip"),
        ("user=alice&user=bob".to_owned(), "duplicate_field", "facts.user"),
        ("user=alice&us%65r=bob".to_owned(), "duplicate_field", "facts.user"),
    ] {
        let answer = server.get(&query(&facts));
        assert_eq!(answer.error(), (400, code.to_owned(), Some(location.to_owned())), "{facts}");
    }
    untouched(&server, "queries");
}

#[test]
fn body_limit_is_64_kib_chunked_or_not() {
    let server = Server::start();
    let at_most = 64 << 10;
    for path in ["/v1/peek", "/v1/check"] {
        // A check without the fact of the limit's key charges nothing.
        let (fits, too_large) = (padded(r#"{"facts":{}}"#, at_most), padded(ALICE, at_most + 1));
        let mut client = server.client();
        assert_eq!(client.request_with("POST", path, &[], &fits).status, 200);
        for piece in [1_000, 65_536] {
            assert_eq!(client.chunked(path, &fits, piece).status, 200, "pieces of {piece}");
        }

        let mut client = server.client();
        let answer = client.request_with("POST", path, &[], &too_large);
        assert_eq!(answer.error(), (413, "too_large".to_owned(), None));
        assert!(answer.text().contains("64 KiB"), "{}", answer.text());
        assert_eq!(client.last_answers().len(), 0, "the rest of the body is not read as a request");
        untouched(&server, path);
        for piece in [1_000, 65_537, 200_000] {
            let mut client = server.client();
            let answer = client.chunked(path, &too_large, piece);
            assert_eq!(answer.error(), (413, "too_large".to_owned(), None), "pieces of {piece}");
            assert_eq!(client.last_answers().len(), 0);
            untouched(&server, path);
        }
    }
}

#[test]
fn batch_limit_is_1_mib_and_1_000_checks() {
    let server = Server::start();
    let mut client = server.client();
    let (path, empty) = ("/v1/check/batch", r#"{"facts":{}}"#);
    let decisions = |answer: Answer| {
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["decisions"].as_array().unwrap().len()
    };
    assert_eq!(decisions(client.request("POST", path, &batch(empty, 0))), 0);
    assert_eq!(decisions(client.request("POST", path, &batch(empty, 1_000))), 1_000);
    let full = padded(&batch(empty, 1_000), 1 << 20);
    assert_eq!(decisions(client.request_with("POST", path, &[], &full)), 1_000);
    assert_eq!(decisions(client.chunked(path, &full, 65_536)), 1_000);

    for (body, status, code, location) in [
        (batch(ALICE, 1_001).into_bytes(), 400, "too_many", Some("checks")),
        (batch("0", 300_000).into_bytes(), 400, "too_many", Some("checks")),
        (padded(&batch(ALICE, 1), (1 << 20) + 1), 413, "too_large", None),
        (b"{}".to_vec(), 400, "missing_field", Some("checks")),
        (b"[]".to_vec(), 400, "invalid_json", None),
        (ALICE.as_bytes().to_vec(), 400, "unknown_field", Some("facts")),
        (
            format!(r#"{{"checks":[{ALICE}],"checks":[{ALICE}]}}"#).into_bytes(),
            400,
            "duplicate_field",
            Some("checks"),
        ),
        (format!(r#"{{"checks":[{ALICE}],"cost":1}}"#).into_bytes(), 400, "unknown_field", Some("cost")),
        (format!(r#"{{"checks":{ALICE}}}"#).into_bytes(), 400, "invalid_json", Some("checks")),
        (format!(r#"{{"checks":[{ALICE},]}}"#).into_bytes(), 400, "invalid_json", None),
        (format!(r#"{{"checks":[{ALICE}]"#).into_bytes(), 400, "invalid_json", None),
        (
            format!(r#"{{"checks":[{ALICE},{}]}}"#, "[".repeat(500_000)).into_bytes(),
            400,
            "invalid_json",
            None,
        ),
        ([batch(ALICE, 1).as_bytes(), b"\xff"].concat(), 400, "invalid_json", None),
    ] {
        let shown: String = String::from_utf8_lossy(&body).chars().take(80).collect();
        let expected = (status, code.to_owned(), location.map(str::to_owned));
        assert_eq!(server.client().request_with("POST", path, &[], &body).error(), expected, "{shown}");
        assert_eq!(server.client().chunked(path, &body, 10_000).error(), expected, "{shown}");
        untouched(&server, &shown);
    }
}

#[test]
fn wrong_content_length_charges_nothing() {
    let server = Server::start();
    let head = |length: &str| {
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{ALICE}")
    };
    // Content-Length is larger than the body, and the client closes its side.
    for length in ["27", "1000", "65536"] {
        let mut client = server.client();
        client.send(head(length).as_bytes());
        client.finish();
        for answer in client.last_answers() {
            assert_eq!(answer.error().0, 400, "{length}");
        }
        untouched(&server, length);
    }
    // Content-Length is smaller than the body: the rest is not a request.
    for length in ["0", "5", "25"] {
        let mut client = server.client();
        client.send(head(length).as_bytes());
        let answers = client.last_answers();
        assert!(answers.iter().all(|answer| (400..=499).contains(&answer.status)), "{length}: {answers:?}");
        assert!((1..=2).contains(&answers.len()), "{length}: {answers:?}");
        assert_eq!(answers[0].error().1, "invalid_json", "{length}");
        untouched(&server, length);
    }
    // An invalid or huge length: refused before the body.
    for length in
        ["-1", "+26", "0x1a", "26.0", "26 26", "18446744073709551616", "99999999999999999999", "", "a"]
    {
        let mut client = server.client();
        client.send(head(length).as_bytes());
        let answers = client.last_answers();
        assert!(
            answers.len() <= 1 && answers.iter().all(|answer| answer.status == 400),
            "{length}: {answers:?}"
        );
        untouched(&server, length);
    }
    let mut client = server.client();
    client.send(head("18446744073709551613").as_bytes());
    let answers = client.last_answers();
    assert!(
        answers.len() <= 1 && answers.iter().all(|answer| matches!(answer.status, 400 | 413)),
        "{answers:?}"
    );
    untouched(&server, "2^64 - 3");
}

#[test]
fn expect_continue_is_answered_with_100_or_413() {
    let server = Server::start();
    let head = |length: usize| {
        format!(
            "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let mut client = server.client();
    client.send(head(ALICE.len()).as_bytes());
    assert_eq!(client.answer().status, 100);
    assert_eq!(charged(&server), 0.0, "nothing is charged before the body has arrived");
    client.send(ALICE.as_bytes());
    assert_eq!(client.answer().status, 200);
    assert_eq!(charged(&server), 1.0);

    let mut client = server.client();
    client.send(head((64 << 10) + 1).as_bytes());
    assert_eq!(
        client.answer().error(),
        (413, "too_large".to_owned(), None),
        "refused before the body is sent"
    );
    assert_eq!(client.last_answers().len(), 0);
    assert_eq!(charged(&server), 1.0);
}

/// Sends these bytes and expects at most one response, a 4xx, and then the end of the connection.
fn refused(server: &Server, bytes: &[u8], what: &str) {
    let mut client = server.client();
    client.send(bytes);
    let answers = client.last_answers();
    assert!(answers.len() <= 1, "{what}: {answers:?}");
    assert!(answers.iter().all(|answer| (400..=499).contains(&answer.status)), "{what}: {answers:?}");
    untouched(server, what);
}

#[test]
fn floods_of_headers_and_endless_lines_are_refused() {
    let server = Server::start();
    let body = format!("content-length: {}\r\n\r\n{ALICE}", ALICE.len());
    let with =
        |headers: &str| format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\n{headers}{body}").into_bytes();
    let many: String = (0..1_000).map(|number| format!("x-{number}: 1\r\n")).collect();
    refused(&server, &with(&many), "a thousand headers");
    refused(&server, &with(&format!("x: {}\r\n", "y".repeat(64 << 10))), "a header of 64 KiB");
    refused(&server, &with(&format!("{}: y\r\n", "x".repeat(64 << 10))), "a name of 64 KiB");
    refused(&server, &with(&format!("x: {}", "y".repeat(1 << 20))), "a header of 1 MiB without an end");
    let line = |length: usize| {
        format!("GET /v1/usage?user={} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x".repeat(length))
    };
    refused(&server, line(1 << 20).as_bytes(), "a request line of 1 MiB");
    refused(&server, line(64 << 10).as_bytes(), "a request line of 64 KiB");
    refused(&server, "G".repeat(1 << 20).as_bytes(), "a method of 1 MiB");
    refused(&server, "\r\n".repeat(1 << 19).as_bytes(), "1 MiB of empty lines");

    let mut client = server.client();
    let few: Vec<String> = (0..50).map(|number| format!("x-{number}: {}", "y".repeat(100))).collect();
    let few: Vec<&str> = few.iter().map(String::as_str).collect();
    assert_eq!(client.request_with("GET", "/healthz", &few, b"").status, 200, "fifty headers are accepted");
}

#[test]
fn bytes_that_are_not_http_are_refused() {
    let server = Server::start();
    let mut state = 7_u32;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    })
    .take(100_000)
    .collect();
    // Prefixes of a request, from a client that disconnects.
    for bytes in [&b""[..], b"\r\n\r\n", b"POST", b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\n"] {
        let mut client = server.client();
        client.send(bytes);
        client.finish();
        assert_eq!(client.last_answers().len(), 0);
    }
    untouched(&server, "truncated heads");
    for (bytes, what) in [
        (&noise[..], "noise"),
        (&[0; 4_096], "zeros"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "the beginning of TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", "the beginning of HTTP/2"),
        (b"*1\r\n$4\r\nPING\r\n", "RESP"),
        (b"POST /v1/check\r\n\r\n", "HTTP/0.9"),
        (b"POST /v1/check HTTP/9.9\r\nhost: localhost\r\n\r\n", "HTTP/9.9"),
        (b"POST  /v1/check HTTP/1.1\r\nhost: localhost\r\n\r\n", "two blanks"),
        (b"POST /v1/\x00check HTTP/1.1\r\nhost: localhost\r\n\r\n", "a NUL in the path"),
        (b"POST /v1/check HTTP/1.1\r\nhost localhost\r\n\r\n", "a header without a colon"),
        (b"POST /v1/check HTTP/1.1\r\nho\x00st: localhost\r\n\r\n", "a NUL in a name"),
        (b"POST /v1/check HTTP/1.1\r\nhost: local\x00host\r\n\r\n", "a NUL in a header"),
    ] {
        refused(&server, bytes, what);
    }
}

#[test]
fn ambiguous_framing_cannot_smuggle_a_request() {
    let server = Server::start();
    let smuggled = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{ALICE}",
        ALICE.len()
    );
    let with = |headers: &str, body: &str| {
        let length = body.len() + smuggled.len();
        let headers = headers.replace("ALL", &length.to_string());
        format!("POST /v1/peek HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n{body}{smuggled}").into_bytes()
    };
    let none = "0\r\n\r\n";
    for (headers, body) in [
        ("content-length: ALL\r\ntransfer-encoding: chunked", none),
        ("transfer-encoding: chunked\r\ncontent-length: ALL", none),
        ("content-length: 0\r\ntransfer-encoding: chunked", none),
        ("content-length: ALL\r\ntransfer-encoding:\tchunked", none),
        ("content-length: ALL\r\nTransfer-Encoding: Chunked", none),
        ("content-length: 0\r\ncontent-length: ALL", ""),
        ("content-length: ALL\r\ncontent-length: 0", ""),
        ("content-length: 0, ALL", ""),
        ("content-length : 0\r\ncontent-length: ALL", ""),
        ("transfer-encoding : chunked\r\ncontent-length: ALL", none),
        ("x: y\r\n transfer-encoding: chunked\r\ncontent-length: ALL", none),
        ("transfer-encoding: chunked, identity\r\ncontent-length: ALL", none),
        ("transfer-encoding: xchunked\r\ncontent-length: ALL", none),
        ("transfer-encoding: identity\r\ncontent-length: ALL", none),
        ("transfer-encoding: chunked\r\ntransfer-encoding: identity", none),
        ("transfer-encoding: \x0bchunked\r\ncontent-length: ALL", none),
        ("transfer-encoding: chunked", "0x0\r\n\r\n"),
        ("transfer-encoding: chunked", "-1\r\n\r\n"),
        ("transfer-encoding: chunked", "\r\n\r\n"),
        ("transfer-encoding: chunked", "fffffffffffffffff\r\n\r\n"),
        ("transfer-encoding: chunked", "10000000000000000\r\n\r\n"),
        ("transfer-encoding: chunked", "1\r\n{0\r\n\r\n"),
        ("transfer-encoding: chunked", "1\n{\n0\n\n"),
    ] {
        refused(&server, &with(headers, body), &format!("{headers:?} {body:?}"));
    }
    // HTTP/1.0 has no chunked bodies.
    let old = format!("POST /v1/peek HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n{none}{smuggled}");
    refused(&server, old.as_bytes(), "a chunked body in HTTP/1.0");
    // A body with an unknown framing is not read, and must not be taken for the next request.
    for path in ["/nowhere", "/healthz", "/v1/limits"] {
        let mut client = server.client();
        let length = smuggled.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
        let probe = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        client.send(format!("{head}{smuggled}{probe}").as_bytes());
        let answers = client.last_answers();
        assert!(matches!(answers[0].error().0, 404 | 405), "{path}: {answers:?}");
        assert!(answers[1..].iter().all(|answer| answer.text() == "ok\n"), "{path}: {answers:?}");
        untouched(&server, path);
    }
}

#[test]
fn aborted_request_charges_nothing() {
    let server = Server::start();
    let errors = "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"error\"}";
    let sized =
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", ALICE.len());
    let chunked =
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    let mut aborted = 0.0;
    for at in 0..ALICE.len() {
        let half = &ALICE[..at];
        // A chunked body is incomplete before its last chunk, even if it contains the complete check.
        let chunk = format!("{:x}\r\n{ALICE}\r\n", ALICE.len());
        for bytes in [
            format!("{sized}{half}"),
            format!("{chunked}{:x}\r\n{half}", ALICE.len()),
            format!("{chunked}{chunk}"),
        ] {
            server.client().send(bytes.as_bytes());
            aborted += 1.0;
        }
    }
    eventually("each aborted request is counted as an error", || server.metric(errors) >= aborted);
    untouched(&server, "truncated bodies");
}

#[test]
fn slow_body_times_out() {
    let server = Server::start();
    let errors = "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"error\"}";
    let head = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n";
    let (mut silent, mut slow) = (server.client(), server.client());
    silent.send(format!("{head}{ALICE}").as_bytes());
    slow.send(format!("{head}{ALICE}").as_bytes());
    eventually("both time out, although one keeps sending", || {
        slow.send(b" ");
        server.metric(errors) == 2.0
    });
    for mut client in [silent, slow] {
        let answers = client.last_answers();
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert_eq!(answers[0].error(), (400, "invalid_json".to_owned(), None));
        assert!(answers[0].text().contains("did not arrive within 10 s"), "{}", answers[0].text());
    }
    untouched(&server, "slow bodies");
}

#[test]
fn request_that_meets_over_256_limits_is_too_many() {
    // Whether limits with `when` apply together is only known with the request, so the config is valid.
    let limits: String = (0..257)
        .map(|number| {
            format!("  - {{ name: l{number}, when: {{ wide: \"*\" }}, by: user, rate: 2/day, burst: 2 }}\n")
        })
        .collect();
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", &format!("limits:\n{limits}"));
    let server = Server::launch(
        tollkeeper().args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--config"]).arg(file),
    );
    let wide = r#"{"facts":{"user":"alice","wide":"yes"}}"#;
    for path in ["/v1/check", "/v1/peek", "/v1/reserve", "/v1/acquire"] {
        let body =
            if path == "/v1/reserve" { wide.replace("}}", r#"},"ttl":"60s"}"#) } else { wide.to_owned() };
        let too_many = (400, "too_many".to_owned(), Some("facts".to_owned()));
        assert_eq!(server.post(path, &body).error(), too_many, "{path}");
    }
    let mut resp = Client::to(server.resp());
    resp.send(b"TK.CHECK user alice wide yes\r\nTK.CHECK user alice\r\nQUIT\r\n");
    let mut replies = String::new();
    resp.stream.read_to_string(&mut replies).unwrap();
    assert!(replies.starts_with("-ERR too_many more than 256 limits and keys apply"), "{replies}");
    assert!(replies.ends_with("+OK\r\n"), "the connection stays open: {replies}");
    assert_eq!(server.metric("tollkeeper_keys"), 0.0, "nothing was charged");
}

/// Larger than the socket buffers of both sides, so the client is still sending when the response arrives.
#[test]
fn client_that_sends_all_of_its_body_first_reads_the_413() {
    let server = Server::start();
    let body = padded(ALICE, 4 << 20);
    let head = |path: &str, how: &str| format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{how}\r\n\r\n");
    let length = format!("content-length: {}", body.len());
    let chunks: Vec<u8> = body
        .chunks(60_000)
        .flat_map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat())
        .collect();
    for (path, how, bytes, status) in [
        ("/v1/check", &*length, &body, 413),
        ("/v1/check/batch", &*length, &body, 413),
        ("/v1/check", "transfer-encoding: chunked", &chunks, 413),
        // Other errors that are answered without reading the body.
        ("/v1/nothing", &*length, &body, 404),
        ("/healthz", &*length, &body, 405),
    ] {
        let mut client = server.client();
        client.stream.write_all(head(path, how).as_bytes()).unwrap();
        for piece in bytes.chunks(64 << 10) {
            client.stream.write_all(piece).unwrap_or_else(|error| panic!("{path}, {how}: {error}"));
        }
        let answers = client.last_answers();
        assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [status], "{path}, {how}");
    }
    untouched(&server, "bodies that are too large");
}

/// A field of `/proc/PID/status`, in KiB.
fn memory(server: &Server, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn two_thousand_bad_requests_leave_no_memory_behind() {
    /// Four concurrent connections, each with a body of 1 MiB, its parsed form, and a response.
    const AT_MOST_KIB: u64 = 48 << 10;

    let server = Server::start();
    let deep = format!(r#"{{"checks":[{}"#, "[".repeat(1_000_000));
    let junk = batch(&format!("\"{}\"", "x".repeat(1_000)), 1_000);
    let bodies: [(&str, Vec<u8>); 8] = [
        ("/v1/check", padded(ALICE, (64 << 10) + 1)),
        ("/v1/check", facts(4_000).into_bytes()),
        ("/v1/check", fact("user", &"x".repeat(60_000)).into_bytes()),
        ("/v1/check", vec![0xff; 64 << 10]),
        ("/v1/check/batch", padded(&batch(ALICE, 1), 2 << 20)),
        ("/v1/check/batch", deep.into_bytes()),
        ("/v1/check/batch", junk.into_bytes()),
        ("/v1/check/batch", batch("0", 500_000).into_bytes()),
    ];
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..500 {
                    let (path, body) = &bodies[round % bodies.len()];
                    let mut client = server.client();
                    let answer = if round % 16 < 8 {
                        client.request_with("POST", path, &[], body)
                    } else {
                        client.chunked(path, body, 65_536)
                    };
                    let errors = answer.json();
                    match errors.get("decisions") {
                        Some(Value::Array(decisions)) => {
                            assert!(
                                decisions.iter().all(|decision| decision["error"]["code"] == "invalid_json")
                            );
                        }
                        _ => assert!(matches!(answer.error().0, 400 | 413), "{answer:?}"),
                    }
                }
            });
        }
    });
    let most = memory(&server, "VmHWM");
    assert!(most < AT_MOST_KIB, "peak memory was {most} KiB");
    untouched(&server, "two thousand bad requests");
}
