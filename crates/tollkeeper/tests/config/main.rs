//! The config file: valid files, invalid files with their error reports, and files that were never meant as a config.

mod hostile;
mod meaning;
mod schema;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};

use tollkeeper::config::{Config, Format, Report};

#[test]
fn yaml_toml_and_json_of_one_shape_are_one_config() {
    let yaml = good("full.yaml");
    for other in ["full.toml", "full.json"] {
        assert_eq!(format!("{:#?}", good(other)), format!("{yaml:#?}"), "{other}");
    }
}

#[test]
fn good_files_are_read_without_a_warning() {
    for path in files("good") {
        good(file_name(&path));
    }
}

/// Beside each file that is broken, or that deserves a warning, stands what is said of it.
#[test]
fn what_is_said_of_a_broken_file_stands_beside_it() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in files("broken").into_iter().filter(|path| Format::of(path).is_some()) {
        count += 1;
        let name = file_name(&path);
        let said = match parse(&path) {
            Ok((_, report)) => report.to_string() + "\n",
            Err(report) => report.to_string() + "\n",
        };
        let beside = path.with_extension("txt");
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&beside, &said).expect(name);
        }
        let expected = fs::read_to_string(&beside).unwrap_or_default();
        if said != expected {
            wrong.push(format!("{name}: expected\n{expected}\nsaid\n{said}"));
        }
    }
    let how = "UPDATE=1 cargo test -p tollkeeper --features config --test config writes them anew: read each";
    assert!(wrong.is_empty(), "{}\n{how}", wrong.join("\n\n"));
    assert!(count >= 60, "only {count} broken files");
}

#[test]
fn no_expectation_is_left_without_its_file() {
    for path in files("broken").into_iter().filter(|path| Format::of(path).is_none()) {
        let exists = ["yaml", "toml", "json"].iter().any(|ending| path.with_extension(ending).exists());
        assert!(exists, "{} belongs to no file", path.display());
    }
}

fn good(name: &str) -> Config {
    let (config, report) =
        parse(&folder("good").join(name)).unwrap_or_else(|report| panic!("{name}:\n{report}"));
    assert!(report.is_empty(), "{name}:\n{report}");
    config
}

/// What tests find in the environment.
fn environment(name: &str) -> Option<String> {
    match name {
        "PASSWORD" => Some("hunter2".to_owned()),
        "MANY" => Some("500000".to_owned()),
        "EMPTY" => Some(String::new()),
        _ => None,
    }
}

fn parse(path: &Path) -> Result<(Config, Report), Report> {
    let name = file_name(path);
    let text = fs::read(path).expect(name);
    Config::parse(name, Format::of(path).expect(name), &text, &environment)
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).expect("files of ours have names")
}

/// The files of a folder, in order.
fn files(name: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder(name)).expect(name);
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

fn yaml(text: &str) -> Result<(Config, Report), Report> {
    Config::parse("tollkeeper.yaml", Format::Yaml, text.as_bytes(), &environment)
}

/// The config of a text without mistakes, whatever the warnings.
fn config(text: &str) -> Config {
    yaml(text).unwrap_or_else(|report| panic!("{text}\n{report}")).0
}

/// The messages of a text with mistakes or warnings, without their places.
fn messages(text: &str) -> Vec<String> {
    let report = match yaml(text) {
        Ok((_, report)) | Err(report) => report,
    };
    report.problems().iter().map(|problem| problem.message.clone()).collect()
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(name)
}
