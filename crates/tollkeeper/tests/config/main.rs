//! The config file, as its users meet it: files that are right, files that are not and what is said of
//! them, and files that were never meant to be a config.

use std::fs;
use std::path::{Path, PathBuf};

use tollkeeper::config::{Config, Format};

#[test]
fn yaml_toml_and_json_of_one_shape_are_one_config() {
    let yaml = good("full.yaml");
    for other in ["full.toml", "full.json"] {
        assert_eq!(format!("{:#?}", good(other)), format!("{yaml:#?}"), "{other}");
    }
}

fn good(name: &str) -> Config {
    let path = folder("good").join(name);
    let text = fs::read(&path).expect(name);
    let parsed = Config::parse(name, Format::of(&path).expect(name), &text, &|_| None);
    let (config, report) = parsed.unwrap_or_else(|report| panic!("{name}:\n{report}"));
    assert!(report.is_empty(), "{name}:\n{report}");
    config
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(name)
}
