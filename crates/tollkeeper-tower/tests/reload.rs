//! A layer that was built from a config file reloads it, and never mixes old and new settings.

mod support;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use support::{Server, everything};
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
