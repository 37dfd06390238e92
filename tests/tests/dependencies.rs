//! Dependency counts: the library needs few crates, and the core none.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::page::root;

/// The crates that a package needs to run with these features, itself included.
fn crates(package: &str, features: &str) -> BTreeSet<String> {
    tree(&root().join("Cargo.toml"), &["--locked", "--offline", "--package", package, "--features", features])
}

/// What `cargo tree` lists.
fn tree(manifest: &Path, arguments: &[&str]) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--edges", "normal", "--prefix", "none", "--format", "{p}", "--manifest-path"])
        .arg(manifest)
        .args(arguments)
        .output()
        .expect("cargo runs: it runs this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names of crates");
    // Each line is `name version`, then only where the crate comes from and whether it was listed before.
    text.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn library_needs_fewer_than_ten_crates() {
    let crates = crates("tollkeeper", "");
    println!("{} crates: {}", crates.len(), crates.iter().cloned().collect::<Vec<_>>().join(", "));
    assert!(crates.iter().any(|name| name.starts_with("tollkeeper-core ")), "{crates:?}");
    assert!(crates.len() < 10, "{} crates: {crates:?}", crates.len());
}

#[test]
fn tower_layer_needs_at_most_fifteen_crates() {
    let crates = crates("tollkeeper-tower", "");
    println!("{} crates: {}", crates.len(), crates.iter().cloned().collect::<Vec<_>>().join(", "));
    assert!(crates.iter().any(|name| name.starts_with("tower-service ")), "{crates:?}");
    assert!(crates.len() <= 15, "{} crates: {crates:?}", crates.len());
}

/// A clone inside another workspace, with the lines that the README says to add.
#[test]
fn path_dependency_works_inside_another_workspace() {
    let readme = fs::read_to_string(root().join("README.md")).expect("the README");
    let from_readme = |line: &str| {
        assert!(readme.contains(line), "the README no longer says `{line}`");
        line.to_owned()
    };
    let exclude = from_readme("exclude = [\"tollkeeper\"]");
    let dependency = from_readme("tollkeeper = { path = \"tollkeeper/crates/tollkeeper\" }");
    let project = Folder::new();
    project.write(
        "Cargo.toml",
        &format!(
            "[package]\nname = \"project\"\nedition = \"2024\"\n[dependencies]\n{dependency}\n[workspace]\n{exclude}\n"
        ),
    );
    fs::create_dir(project.path().join("src")).expect("the temporary folder is writable");
    project.write("src/main.rs", "fn main() {}\n");
    let copied = Command::new("cp")
        .arg("-r")
        .args(["Cargo.toml", "crates", "tests"].map(|name| root().join(name)))
        .arg({
            let clone = project.path().join("tollkeeper");
            fs::create_dir(&clone).expect("the temporary folder is writable");
            clone
        })
        .status();
    assert!(copied.expect("cp runs").success());
    let crates = tree(&project.path().join("Cargo.toml"), &["--offline"]);
    assert!(crates.iter().any(|name| name.starts_with("tollkeeper-core ")), "{crates:?}");
}

#[test]
fn core_has_no_dependencies() {
    let crates = crates("tollkeeper-core", "");
    assert_eq!(crates.len(), 1, "{crates:?}");
}

#[test]
fn redis_feature_needs_no_config_parser() {
    let (with, without) = (crates("tollkeeper", "config"), crates("tollkeeper", "redis"));
    for name in ["granit-parser ", "notify ", "toml "] {
        assert!(with.iter().any(|found| found.starts_with(name)), "{name}reads config files: {with:?}");
        assert!(!without.iter().any(|found| found.starts_with(name)), "{without:?}");
    }
}

/// The table in `docs/rust.md`: the number of crates of the layer and of `tower_governor`, in the versions that the
/// benchmarks use.
#[test]
fn tower_layer_crate_counts_match_docs_and_beat_peer() {
    let page = fs::read_to_string(root().join("docs/rust.md")).expect("the page");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tower_governor");
    fs::create_dir_all(folder.join("src")).expect("`target` is writable");
    fs::write(folder.join("src/lib.rs"), "").expect("`target` is writable");
    for (features, row) in [("", "| none |"), ("axum", "| `axum` |"), ("axum,tonic", "| `axum`, `tonic` |")] {
        let ours = crates("tollkeeper-tower", features).len();
        let theirs = {
            let features: Vec<&str> = features.split(',').filter(|name| !name.is_empty()).collect();
            let manifest = format!(
                "[package]\nname = \"peer\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
                 tower_governor = {{ version = \"0.8\", default-features = false, features = {features:?} }}\n"
            );
            fs::write(folder.join("Cargo.toml"), manifest).expect("`target` is writable");
            fs::copy(root().join("bench/Cargo.lock"), folder.join("Cargo.lock")).expect("bench is locked");
            tree(&folder.join("Cargo.toml"), &["--package", "tower_governor"]).len()
        };
        println!("features `{features}`: tollkeeper-tower {ours} crates, tower_governor {theirs}");
        let line = page.lines().find(|line| line.starts_with(row)).expect("a row for these features");
        assert!(
            line.ends_with(&format!(" | {ours} | {theirs} |")),
            "{ours} and {theirs}, but the page says {line}"
        );
        assert!(ours < theirs, "{ours} and {theirs}");
    }
}
