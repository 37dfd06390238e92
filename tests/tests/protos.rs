//! The committed code for Envoy's messages matches its protos: generated here and compared; `UPDATE=1` rewrites it.

use std::fs;
use std::path::Path;

use protox::prost::Message as _;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/tollkeeper-server");

#[test]
fn generated_code_matches_the_protos() {
    let (protos, committed) =
        (Path::new(FOLDER).join("proto"), Path::new(FOLDER).join("src/transport/grpc/proto"));
    let made = std::env::temp_dir().join(format!("tollkeeper-protos-{}", std::process::id()));
    fs::create_dir_all(&made).unwrap();
    let described = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], [&protos]).unwrap();
    fs::write(made.join("descriptors.bin"), described.encode_to_vec()).unwrap();
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .out_dir(&made)
        .compile_fds(described)
        .unwrap();

    let mut files: Vec<_> = fs::read_dir(&made).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files.len(), 4, "{files:?}");
    for name in &files {
        let new = fs::read(made.join(name)).unwrap();
        if std::env::var_os("UPDATE").is_some() {
            fs::create_dir_all(&committed).unwrap();
            fs::write(committed.join(name), &new).unwrap();
        }
        let old = fs::read(committed.join(name)).unwrap_or_default();
        assert!(
            old == new,
            "{name:?} does not match the protos: run UPDATE=1 cargo test -p tollkeeper-tests --test protos"
        );
    }
    fs::remove_dir_all(&made).unwrap();
}
