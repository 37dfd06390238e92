//! Every example runs and prints what it documents; the README shows the first one.
//!
//! Cargo builds the examples before it runs all tests of a package, but not before a single test: run this with
//! `cargo test -p tollkeeper`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

macro_rules! examples {
    ($($name:ident: $prints:expr;)*) => {
        const EXAMPLES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                assert_prints(stringify!($name), &[], $prints);
            }
        )*
    };
}

// Each example with part of its output.
examples! {
    concurrency: "a third is refused; retry in 1s";
    handle: "1000 of 200000 checks passed";
    hot_swap: "version 2: 100 a day, and 92 are left";
    layered: "bob: refused; 2 of 3 left at `per-user`; 0 of 4 left at `per-ip`";
    quickstart: "request 6: refused by `per-user`, try in 12 s";
    reserve_settle: "settled 12,345: 87655 left";
    shadow: "`search` would have refused 2 of 5";
    snapshot: "second run: 1 key restored; 4 more are allowed: false";
    tiers: "k1 used 10 on `free`, moves to `pro` and has 90 left";
    until_allowed: "client 5 passed";
}

/// The example `pictures` draws `docs/pictures`, so a change to an algorithm shows up as a changed picture.
#[test]
fn pictures_match_the_drawing_code() {
    let drawn = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pictures");
    fs::create_dir_all(&drawn).unwrap();
    assert_prints("pictures", &[&drawn], "drew 10 pictures");
    let committed = package().join("../../docs/pictures");
    assert_eq!(names(&drawn), names(&committed), "the files in docs/pictures");
    for name in names(&committed) {
        let same = fs::read(drawn.join(&name)).unwrap() == fs::read(committed.join(&name)).unwrap();
        assert!(same, "{name} is outdated: run `cargo run --example pictures -- docs/pictures`");
    }
}

#[test]
fn every_example_is_tested() {
    let mut tested: Vec<String> = EXAMPLES.iter().map(|name| format!("{name}.rs")).collect();
    tested.push("pictures".to_owned());
    tested.sort_unstable();
    assert_eq!(names(&package().join("examples")), tested);
}

#[test]
fn readme_shows_the_quickstart_example() {
    let readme = fs::read_to_string(package().join("../../README.md")).unwrap();
    let quickstart = fs::read_to_string(package().join("examples/quickstart.rs")).unwrap();
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0)).collect();
    assert_eq!(blocks.len(), 1, "the README has one Rust block");
    assert!(quickstart.contains(blocks[0]), "examples/quickstart.rs does not contain:\n{}", blocks[0]);
}

#[test]
fn llm_page_shows_a_part_of_its_example() {
    let page = fs::read_to_string(package().join("../../docs/llm.md")).unwrap();
    let example = fs::read_to_string(package().join("examples/reserve_settle.rs")).unwrap();
    let (_, rest) = page.split_once("```rust\n").expect("the page has a Rust block");
    let (shown, _) = rest.split_once("```").expect("the block is closed");
    assert!(example.contains(shown), "examples/reserve_settle.rs does not contain:\n{shown}");
}

/// Runs an example, which has assertions of its own, and checks that it succeeds and prints `expected`.
fn assert_prints(name: &str, arguments: &[&Path], expected: &str) {
    let test = std::env::current_exe().expect("the path of the test binary");
    let built = test.ancestors().nth(2).expect("target/debug/deps/test").join("examples").join(name);
    let built = built.with_extension(std::env::consts::EXE_EXTENSION);
    assert!(built.exists(), "{} is not built: run `cargo test -p tollkeeper`", built.display());
    let run = Command::new(&built).args(arguments).output().expect("the example starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{name} failed:\n{stdout}{stderr}");
    assert!(stdout.contains(expected), "{name} does not print `{expected}`:\n{stdout}");
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The sorted names of the files and folders in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("readable").file_name().into_string().expect("ASCII")).collect();
    names.sort_unstable();
    names
}
