//! Builds and locates the `tollkeeper` binary for tests outside its package.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// The path of the `tollkeeper` binary. Builds it first, because Cargo builds binaries only for the tests of their own
/// package; with the features of `make test`, so that it is up to date there.
pub fn tollkeeper() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).clone()
}

fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/test");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--workspace", "--all-features", "--bin", "tollkeeper", "--locked", "--quiet"])
        .arg("--target-dir")
        .arg(profile.parent().expect("target"))
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.output().expect("cargo runs: it runs this test");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let binary = profile.join("tollkeeper").with_extension(std::env::consts::EXE_EXTENSION);
    assert!(binary.exists(), "cargo built no {}", binary.display());
    binary
}
