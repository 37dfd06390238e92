//! What an application takes on with the library: few crates, and a core that stands alone.

use std::collections::BTreeSet;
use std::process::Command;

/// The crates that a package needs to run with these features, itself included.
fn crates(package: &str, features: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .args([
            "--manifest-path",
            concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"),
            "--package",
            package,
            "--features",
            features,
        ])
        .output()
        .expect("cargo runs: it runs this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names of crates");
    // `name version`, and what comes behind only says where it is from and that it was shown before.
    text.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn an_embedder_takes_on_fewer_than_ten_crates() {
    let crates = crates("tollkeeper", "");
    println!("{} crates: {}", crates.len(), crates.iter().cloned().collect::<Vec<_>>().join(", "));
    assert!(crates.iter().any(|name| name.starts_with("tollkeeper-core ")), "{crates:?}");
    assert!(crates.len() < 10, "{} crates: {crates:?}", crates.len());
}

#[test]
fn an_embedder_with_the_tower_layer_takes_on_fifteen_crates_at_most() {
    let crates = crates("tollkeeper-tower", "");
    println!("{} crates: {}", crates.len(), crates.iter().cloned().collect::<Vec<_>>().join(", "));
    assert!(crates.iter().any(|name| name.starts_with("tower-service ")), "{crates:?}");
    assert!(crates.len() <= 15, "{} crates: {crates:?}", crates.len());
}

#[test]
fn the_core_depends_on_nothing() {
    let crates = crates("tollkeeper-core", "");
    assert_eq!(crates.len(), 1, "{crates:?}");
}

#[test]
fn a_store_on_redis_takes_on_no_reader_of_config_files() {
    let (with, without) = (crates("tollkeeper", "config"), crates("tollkeeper", "redis"));
    for name in ["granit-parser ", "notify ", "toml "] {
        assert!(with.iter().any(|found| found.starts_with(name)), "{name}reads config files: {with:?}");
        assert!(!without.iter().any(|found| found.starts_with(name)), "{without:?}");
    }
}
