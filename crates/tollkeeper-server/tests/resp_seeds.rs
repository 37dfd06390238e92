//! The seeds of the fuzz targets for the Redis protocol, and thousands of mutations of them.

use std::fs;
use std::path::Path;

use tollkeeper_tests::cases::Random;

#[path = "../../../fuzz/resp.rs"]
mod resp;

fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/resp");
    let files = fs::read_dir(folder).expect("the seed folder exists");
    files.map(|file| fs::read(file.expect("a folder entry").path()).expect("a readable file")).collect()
}

#[test]
fn seeds_parse_alike_however_they_are_split() {
    let seeds = seeds();
    assert!(seeds.len() >= 15, "{} seeds", seeds.len());
    seeds.iter().for_each(|seed| resp::any_bytes(seed));
    let mut random = Random::new(11);
    for _ in 0..20_000 {
        let (one, other) = (&seeds[random.below(seeds.len())], &seeds[random.below(seeds.len())]);
        let mut bytes =
            [&one[..random.below(one.len() + 1)], &other[random.below(other.len() + 1)..]].concat();
        if !bytes.is_empty() {
            let index = random.below(bytes.len());
            bytes[index] = b"*$\r\n\"'\\- 019aP\0\xff"[random.below(16)];
        }
        resp::any_bytes(&bytes);
    }
}

#[test]
fn wire_format_matches_the_redis_protocol_crate() {
    seeds().iter().for_each(|seed| resp::encoded(seed));
    let mut random = Random::new(12);
    for _ in 0..2_000 {
        let bytes: Vec<u8> = (0..random.below(60)).map(|_| random.below(256).to_le_bytes()[0]).collect();
        resp::encoded(&bytes);
    }
}
