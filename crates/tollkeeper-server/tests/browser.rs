//! The dashboard in Debian's Chromium, against real servers: runs the scripts in `tests/browser`.
//!
//! Screenshots of every view in light, dark and narrow are written to `target/screenshots`. With
//! `DASHBOARD=src/dashboard`, a script that is run by hand shows edited files without a new build of the server.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder into which `make test` installs what the browser tests need from npm.
fn modules() -> PathBuf {
    let modules = root().join("target/browser");
    let found = modules.join("node_modules/playwright-core").exists();
    assert!(found, "playwright-core is missing: `make test` installs it into target/browser");
    modules
}

/// The path of Chromium.
fn chromium() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("chromium")).find(|file| file.exists());
    found.expect("chromium is missing: `make test` installs the Debian package `chromium`")
}

/// Runs a script, which ends with 0 if everything is as it expects.
fn script(name: &str) {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
    let output = Command::new("timeout")
        .args(["--kill-after=5", "600", "node"])
        .arg(tests.join(name))
        .env("BROWSER_MODULES", modules())
        .env("CHROMIUM", chromium())
        .env("SCREENSHOTS", root().join("target/screenshots"))
        .env("TOLLKEEPER", env!("CARGO_BIN_EXE_tollkeeper"))
        .env_remove("DASHBOARD")
        .output()
        .expect("node runs");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    assert!(output.status.success(), "{name}: {}\n{out}\n{error}", output.status);
}

#[test]
fn numbers_on_the_page_equal_the_metrics() {
    script("numbers.mjs");
}

#[test]
fn sign_in_protects_the_data_and_stays_on_the_origin() {
    script("sign_in.mjs");
}

#[test]
fn refused_key_is_found_and_unblocked() {
    script("drill_down.mjs");
}

#[test]
fn second_tab_loses_nothing() {
    script("policy.mjs");
}

#[test]
fn override_of_an_inactive_limit_can_be_removed() {
    script("overrides.mjs");
}

#[test]
fn upstream_of_a_proxy_is_shown() {
    script("upstream.mjs");
}

#[test]
fn stream_backs_off_and_pauses() {
    script("connection.mjs");
}

#[test]
fn outages_are_shown_and_recover() {
    script("outage.mjs");
}

#[test]
fn hostile_names_are_text() {
    script("hostile.mjs");
}

#[test]
fn every_view_is_accessible_and_fits() {
    script("views.mjs");
}

#[test]
fn every_view_works_with_keys_only() {
    script("keyboard.mjs");
}

#[test]
fn an_hour_of_events_leaves_memory_flat() {
    script("endurance.mjs");
}

#[test]
fn dashboard_passes_the_type_checker() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(here.join("src/dashboard")).expect("the dashboard has files");
    let files = files.map(|file| file.expect("readable").path());
    let files: Vec<PathBuf> = files.filter(|file| file.extension().is_some_and(|end| end == "js")).collect();
    assert_eq!(files.len(), 5);
    let output = Command::new(modules().join("node_modules/.bin/tsc"))
        .args(["--noEmit", "--allowJs", "--checkJs", "--strict", "--noImplicitAny", "false"])
        .args(["--target", "es2023", "--module", "esnext", "--moduleResolution", "bundler"])
        .args(["--lib", "es2023,dom,dom.iterable", "--types", ""])
        .arg(here.join("tests/browser/types.d.ts"))
        .args(files)
        .output()
        .expect("tsc runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
