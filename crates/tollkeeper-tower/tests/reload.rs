//! A layer that was built from a config file reloads it, and never mixes old and new settings.

mod support;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use http::HeaderValue;
use support::{Server, everything};
use tollkeeper::http::{HeaderDialect, HttpSettings};
use tollkeeper::{Limit, Limiter, Percent, Quota};
use tollkeeper_tower::RateLimitLayer;

/// A temporary folder that is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("tollkeeper-tower-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for temporary files");
        Folder(folder)
    }

    fn write(&self, text: &str) -> PathBuf {
        let path = self.0.join("tollkeeper.yaml");
        fs::write(self.0.join("new"), text).expect("written");
        fs::rename(self.0.join("new"), &path).expect("renamed");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const BY_USER: &str = "
http: { facts: { who: { from: header.x-user } } }
headers: [draft-07]
limits: [{ name: per-user, by: who, rate: 2/hour }]
";
const BY_KEY: &str = "
http: { facts: { who: { from: header.x-key, hash: true } } }
headers: [x-ratelimit]
limits: [{ name: per-user, by: who, rate: 3/hour, headers: true }]
";

/// Limits and settings of a changed file become active together; an invalid file changes nothing.
#[tokio::test]
async fn reload_is_atomic_and_ignores_invalid_files() {
    let folder = Folder::new("reload");
    let path = folder.write(BY_USER);
    let (sender, mut reloads) = tokio::sync::mpsc::unbounded_channel();
    let layer = RateLimitLayer::from_config_telling(&path, move |reload| {
        sender.send(reload.map_err(|error| error.to_string())).expect("the test waits");
    });
    let (router, _) = everything(layer.unwrap());
    let server = Server::axum(router).await;
    let mut next = async || {
        tokio::time::timeout(Duration::from_secs(30), reloads.recv()).await.expect("within a second").unwrap()
    };

    let response = server.get("/", &[("x-user", "ann")]).await;
    assert_eq!(response.header("ratelimit-policy"), Some("2;w=3600"));
    assert_eq!(response.header("x-ratelimit-limit"), None);
    assert_eq!(server.admitted(3, "/", &[("x-user", "ann")]).await, 1);

    folder.write(BY_KEY);
    assert_eq!(next().await, Ok(()));
    let response = server.get("/", &[("x-user", "ann")]).await;
    assert_eq!(
        (response.status, response.header("ratelimit-policy")),
        (200, None),
        "the fact is no longer read from `x-user`"
    );
    assert_eq!(server.admitted(5, "/", &[("x-key", "k")]).await, 3);

    folder.write("limits: [{ name: per-user, rate: 5/mn }]");
    let error = next().await.expect_err("the file is invalid");
    assert!(error.contains("tollkeeper.yaml:1:"), "{error}");
    assert_eq!(server.admitted(3, "/", &[("x-key", "k")]).await, 0, "the previous limits stay active");
}

/// A setter changes one layer only, whichever setter it is; a service that was wrapped before keeps its settings.
#[tokio::test]
async fn setters_change_neither_clones_nor_services() {
    let limit = Limit::new("all", Quota::per_hour(100));
    let limiter = Limiter::builder().limit(limit).build().unwrap();
    let layer = RateLimitLayer::new(limiter).headers([HeaderDialect::XRateLimit]);
    let before = Server::axum(everything(layer.clone()).0).await;
    let changed = layer
        .clone()
        .headers([HeaderDialect::Draft07])
        .http(HttpSettings { ipv6_prefix: 48, ..HttpSettings::default() })
        .retry_after_jitter(Percent::new(0))
        .cost(|_| 10)
        .on_response(|_, response| drop(response.headers.insert("x-hook", HeaderValue::from_static("yes"))));
    let changed = Server::axum(everything(changed).0).await;
    let after = Server::axum(everything(layer).0).await;
    for (server, is_changed, left) in [(&before, false, "99"), (&changed, true, "89"), (&after, false, "88")]
    {
        let response = server.get("/", &[]).await;
        let dialect = if is_changed { "ratelimit" } else { "x-ratelimit-remaining" };
        let shown = response.header(dialect).expect("the layer's own dialect");
        assert!(shown.contains(left), "all share the counts: {shown}");
        let other = if is_changed { "x-ratelimit-remaining" } else { "ratelimit" };
        assert_eq!((response.header(other), response.header("x-hook")), (None, is_changed.then_some("yes")));
    }
}

/// Settings in code take precedence over the file, before and after it is reloaded; all clones follow it.
#[tokio::test]
async fn settings_in_code_survive_a_reload() {
    let folder = Folder::new("in-code");
    let path = folder.write(BY_USER);
    let (sender, mut reloads) = tokio::sync::mpsc::unbounded_channel();
    let layer = RateLimitLayer::from_config_telling(&path, move |reload| {
        sender.send(reload.map_err(|error| error.to_string())).expect("the test waits");
    });
    let layer = layer.unwrap();
    let changed = Server::axum(everything(layer.clone().headers([HeaderDialect::Ietf])).0).await;
    let plain = Server::axum(everything(layer).0).await;
    let response = changed.get("/", &[("x-user", "ann")]).await;
    assert_eq!(response.header("ratelimit-policy"), Some("\"per-user\";q=2;w=3600"));
    assert_eq!(plain.get("/", &[("x-user", "ann")]).await.header("ratelimit-policy"), Some("2;w=3600"));

    folder.write(BY_KEY);
    let reload = tokio::time::timeout(Duration::from_secs(30), reloads.recv()).await;
    assert_eq!(reload.expect("within a second"), Some(Ok(())));
    let response = changed.get("/", &[("x-key", "k")]).await;
    assert_eq!(
        response.header("ratelimit-policy"),
        Some("\"per-user\";q=3;w=3600"),
        "the limits of the file"
    );
    assert_eq!(response.header("x-ratelimit-limit"), None, "the headers of the code");
    let response = plain.get("/", &[("x-key", "k")]).await;
    assert_eq!(
        (response.header("x-ratelimit-limit"), response.header("ratelimit-policy")),
        (Some("3"), None)
    );
}
