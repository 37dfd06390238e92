//! Checks properties of paths and forwarding headers with a corpus and with random texts.

#[path = "support/claims.rs"]
mod claims;

use std::fs;
use std::path::Path;

use tollkeeper_tests::cases::Random;

/// The contents of every file in a folder of `tests/corpus`.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let files = fs::read_dir(folder).expect("a folder");
    let files: Vec<Vec<u8>> =
        files.map(|file| fs::read(file.expect("readable").path()).expect("readable")).collect();
    assert!(files.len() >= 10);
    files
}

/// A random sequence of up to 11 atoms.
fn text(random: &mut Random, atoms: &[&str]) -> String {
    (0..random.below(12)).map(|_| atoms[random.below(atoms.len())]).collect()
}

#[test]
fn every_path_has_one_normal_spelling() {
    for seed in corpus("paths") {
        claims::path(&String::from_utf8_lossy(&seed));
    }
    let atoms = [
        "/", "//", ".", "..", "a", "B", "login", ";", "=", "%", "%2e", "%2E", "%2f", "%25", "%41", "%c3%a4",
        "%zz", "2", "5", "ä", "~", " ", "\\", "?", "*",
    ];
    let mut random = Random::new(1);
    for _ in 0..50_000 {
        let text = text(&mut random, &atoms);
        claims::path(&text);
        claims::path(&format!("/{text}"));
    }
}

#[test]
fn clients_cannot_spoof_their_identity() {
    for seed in corpus("addresses") {
        claims::forwarded(&seed);
        claims::one_address(&seed);
    }
    let atoms = [
        "for=",
        "For=",
        "by=",
        "\"",
        "\\",
        ",",
        ", ",
        ";",
        "=",
        "[",
        "]",
        ":",
        "80",
        "_x",
        "unknown",
        "10.0.0.2",
        "1.1.1.1",
        "::1",
        "::ffff:10.0.0.1",
        "2001:db8::1",
        " ",
        "\t",
        "%",
        "ä",
        "0",
    ];
    let mut random = Random::new(2);
    for _ in 0..20_000 {
        let text = text(&mut random, &atoms);
        claims::forwarded(text.as_bytes());
        claims::one_address(text.as_bytes());
    }
}
