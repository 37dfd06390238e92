//! The seed corpus of `fuzz/` for rate limit requests: each as it is, truncated anywhere, and with any byte changed.

mod rls_bodies;

use std::fs;
use std::path::Path;

#[test]
fn any_request_is_answered_or_refused_with_a_reason() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/rls");
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let body = fs::read(entry.unwrap().path()).unwrap();
        rls_bodies::check(&body);
        for index in 0..body.len() {
            rls_bodies::check(&body[..index]);
            for change in [0x01, 0x02, 0x07, 0x08, 0x10, 0x40, 0x80, 0xff] {
                let mut changed = body.clone();
                changed[index] ^= change;
                rls_bodies::check(&changed);
            }
        }
        count += 1;
    }
    assert!(count >= 10, "the seed corpus is incomplete: {count} files");
}
