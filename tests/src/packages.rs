//! Builds the packages of `clients/` and installs them into `target/clients`, with the frameworks that their tests need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::languages::run;
use crate::page::root;

/// The folder in which the Node package and the frameworks of its tests are installed.
pub fn node() -> PathBuf {
    let (root, folder) = (root(), root().join("target/clients/npm"));
    fs::create_dir_all(&folder).expect("`target` is writable");
    let npm = |arguments: &[&str]| {
        let quietly =
            ["--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", "--loglevel=error"];
        run(Command::new("npm").arg("install").args(quietly).args(arguments).current_dir(&folder));
    };
    // The frameworks are installed again only if their versions change.
    let (wanted, present) = (root.join("clients/node/test/package.json"), folder.join("package.json"));
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    if read(&wanted) != read(&present) || !folder.join("node_modules/express").exists() {
        fs::copy(&wanted, &present).expect("`target` is writable");
        npm(&[]);
    }
    let package = built("node");
    npm(&["--no-save", package.to_str().expect("a path in UTF-8")]);
    folder
}

/// Builds a package with `tools/clients`, and returns the path that it prints.
pub fn built(part: &str) -> PathBuf {
    let root = root();
    let printed = run(Command::new(root.join("tools/clients")).arg(part).env_remove("CARGO_TARGET_DIR"));
    root.join(printed.trim())
}

/// A virtual environment with the Python package and the frameworks of its tests.
pub fn python() -> PathBuf {
    let (root, venv) = (root(), root().join("target/clients/venv"));
    let wanted = root.join("clients/python/tests/requirements.txt");
    let present = venv.join("requirements.txt");
    let pip = |arguments: &[&Path]| {
        let quietly = ["install", "--quiet", "--disable-pip-version-check"];
        run(Command::new(venv.join("bin/pip")).args(quietly).args(arguments));
    };
    // The frameworks are installed again only if their versions change.
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    if read(&wanted) != read(&present) {
        fs::create_dir_all(root.join("target/clients")).expect("`target` is writable");
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv));
        pip(&[Path::new("--requirement"), &wanted]);
        fs::copy(&wanted, &present).expect("`target` is writable");
    }
    pip(&[Path::new("--force-reinstall"), Path::new("--no-deps"), &built("python")]);
    venv
}

/// The test files of a folder, as the part of their name between `prefix` and `suffix`, sorted.
pub fn test_files(folder: &str, prefix: &str, suffix: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(folder)).expect("a folder").map(|entry| entry.expect("readable"));
    let names = entries.map(|entry| entry.file_name().into_string().expect("a name in UTF-8"));
    let part = |name: String| Some(name.strip_prefix(prefix)?.strip_suffix(suffix)?.to_owned());
    let mut files: Vec<String> = names.filter_map(part).collect();
    files.sort();
    files
}

/// Declares one test per test file of a package, which runs it with `passes(file)`, and one that no file is left out:
/// `test_files!("clients/node/test", "", ".test.mjs", [page, redis])`.
#[macro_export]
macro_rules! test_files {
    ($folder:literal, $prefix:literal, $suffix:literal, [$($name:ident),+ $(,)?]) => {
        $(#[test]
        fn $name() {
            passes(concat!($prefix, stringify!($name), $suffix));
        })+

        #[test]
        fn every_file_is_run() {
            let files = $crate::packages::test_files($folder, $prefix, $suffix);
            assert_eq!(files, [$(stringify!($name)),+]);
        }
    };
}
