//! What must hold of any path and any forwarded address, over a corpus and over random texts.

#[path = "support/claims.rs"]
mod claims;

use std::fs;
use std::path::Path;

/// Every file of a folder beside this one.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let files = fs::read_dir(folder).expect("a folder");
    let files: Vec<Vec<u8>> =
        files.map(|file| fs::read(file.expect("readable").path()).expect("readable")).collect();
    assert!(files.len() >= 10);
    files
}

/// Texts made of what matters, in any order.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }

    fn text(&mut self, atoms: &[&str]) -> String {
        (0..self.below(12)).map(|_| atoms[self.below(atoms.len())]).collect()
    }
}

#[test]
fn every_path_has_one_spelling_whatever_it_is_made_of() {
    for seed in corpus("paths") {
        claims::path(&String::from_utf8_lossy(&seed));
    }
    let atoms = [
        "/", "//", ".", "..", "a", "B", "login", ";", "=", "%", "%2e", "%2E", "%2f", "%25", "%41", "%c3%a4",
        "%zz", "2", "5", "ä", "~", " ", "\\", "?", "*",
    ];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..50_000 {
        let text = random.text(&atoms);
        claims::path(&text);
        claims::path(&format!("/{text}"));
    }
}

#[test]
fn nobody_chooses_who_he_is_whatever_he_sends() {
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
    let mut random = Random(0xbf58_476d_1ce4_e5b9);
    for _ in 0..20_000 {
        let text = random.text(&atoms);
        claims::forwarded(text.as_bytes());
        claims::one_address(text.as_bytes());
    }
}
