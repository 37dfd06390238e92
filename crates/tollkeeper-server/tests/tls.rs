//! HTTPS, tested with curl, which has another TLS implementation.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::*;
use tollkeeper_tests::certificates::Authority;

const LIMITS: &str = "limits: [{ name: per-user, by: user, rate: 100/day, burst: 100 }]\n";

/// A server with a certificate of this authority, and further `tls` settings.
fn serve(folder: &Folder, identity: &(PathBuf, PathBuf), more: &str) -> Server {
    let (cert, key) = identity;
    let tls = format!("tls: {{ cert: {}, key: {}{more} }}\n", cert.display(), key.display());
    Server::with_config(folder, &format!("{tls}{LIMITS}"))
}

/// The response that curl gets when it trusts this authority; `None` without a response.
fn curl(server: &Server, trusted: &Path, options: &[&str]) -> Option<String> {
    let url = format!("https://{}/v1/check", server.address);
    let asked = Command::new("curl")
        .args(["--silent", "--show-error", "--max-time", "20", "--cacert", trusted.to_str().unwrap()])
        .args(["--data", r#"{"facts":{"user":"alice"}}"#])
        .args(options)
        .arg(url)
        .output()
        .expect("curl is installed (`make test` installs what it needs)");
    asked.status.success().then(|| text(&asked.stdout).to_owned())
}

#[test]
fn decisions_need_tls_once_configured() {
    let (authority, stranger, folder) = (Authority::new(), Authority::new(), Folder::new());
    let server = serve(&folder, &authority.certify("server", "IP:127.0.0.1"), "");
    for version in [&["--tlsv1.2", "--tls-max", "1.2"][..], &["--tlsv1.3"]] {
        let answer = curl(&server, &authority.certificate(), version).expect("curl gets a response");
        assert!(answer.starts_with(r#"{"allowed":true"#), "{version:?} {answer}");
    }
    assert_eq!(curl(&server, &authority.certificate(), &["--tls-max", "1.1"]), None, "TLS 1.1 is refused");
    assert_eq!(curl(&server, &stranger.certificate(), &[]), None, "curl trusts no other authority");

    let mut plain = TcpStream::connect(server.address).unwrap();
    plain.set_read_timeout(Some(PATIENCE)).unwrap();
    plain.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    assert!(curl(&server, &authority.certificate(), &[]).is_some(), "other connections are served");
}

#[test]
fn client_without_a_trusted_certificate_is_rejected() {
    let (authority, clients, stranger, folder) =
        (Authority::new(), Authority::new(), Authority::new(), Folder::new());
    let more = format!(", client_ca: {}", clients.certificate().display());
    let server = serve(&folder, &authority.certify("server", "IP:127.0.0.1"), &more);
    let ask = |identity: Option<&(PathBuf, PathBuf)>| {
        let options: Vec<&str> = identity
            .iter()
            .flat_map(|(cert, key)| ["--cert", cert.to_str().unwrap(), "--key", key.to_str().unwrap()])
            .collect();
        curl(&server, &authority.certificate(), &options).is_some()
    };
    assert!(!ask(None));
    assert!(!ask(Some(&stranger.certify("client", "DNS:client"))));
    assert!(ask(Some(&clients.certify("client", "DNS:client"))));
}

#[test]
fn certificates_are_reloaded_and_invalid_ones_ignored() {
    let (first, second, folder) = (Authority::new(), Authority::new(), Folder::new());
    let identity = |authority: &Authority| authority.certify("server", "IP:127.0.0.1");
    let (cert, key) = identity(&first);
    let server = serve(&folder, &(cert.clone(), key.clone()), "");
    assert!(curl(&server, &first.certificate(), &[]).is_some());

    fs::write(&cert, "nonsense").unwrap();
    server.logs("tls.cert: no certificate can be read");
    assert!(curl(&server, &first.certificate(), &[]).is_some(), "the previous certificate stays active");
    let error = Command::new("curl")
        .args(["--silent", "--cacert", first.certificate().to_str().unwrap()])
        .arg(format!("https://{}/v1/limits", server.address))
        .output()
        .unwrap();
    assert!(text(&error.stdout).contains("tls.cert"), "{}", text(&error.stdout));

    let (new_cert, new_key) = identity(&second);
    fs::copy(new_cert, &cert).unwrap();
    fs::copy(new_key, &key).unwrap();
    eventually("the new certificate is served", || curl(&server, &second.certificate(), &[]).is_some());
    assert_eq!(curl(&server, &first.certificate(), &[]), None);
}

#[test]
fn server_does_not_start_with_invalid_certificates() {
    let (authority, folder) = (Authority::new(), Folder::new());
    let (cert, key) = authority.certify("server", "IP:127.0.0.1");
    let (_, other) = authority.certify("other", "IP:127.0.0.1");
    let empty = folder.write("empty.pem", "");
    let missing = folder.path().join("missing.pem");
    for (cert, key, more, expected) in [
        (&missing, &key, String::new(), "tls.cert: no certificate can be read from"),
        (&empty, &key, String::new(), "tls.cert: no certificate can be read from"),
        (&cert, &missing, String::new(), "tls.key: no private key can be read from"),
        (&cert, &cert, String::new(), "tls.key: no private key can be read from"),
        (&cert, &other, String::new(), "does not match the certificate in"),
        (
            &cert,
            &key,
            format!(", client_ca: {}", empty.display()),
            "tls.client_ca: no certificate can be read",
        ),
    ] {
        let tls = format!("tls: {{ cert: {}, key: {}{more} }}\n{LIMITS}", cert.display(), key.display());
        let file = folder.write("tollkeeper.yaml", &tls);
        let ended = run(&["serve", "--http", "127.0.0.1:0", "--config", file.to_str().unwrap()]);
        assert_eq!(ended.status.code(), Some(2), "{tls}");
        assert!(text(&ended.stderr).contains(expected), "{expected}: {}", text(&ended.stderr));
    }
}
