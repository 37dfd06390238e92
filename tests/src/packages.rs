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
    run(Command::new(root.join("tools/clients")).arg("node").env_remove("CARGO_TARGET_DIR"));
    npm(&["--no-save", "../tollkeeper-0.1.0.tgz"]);
    folder
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
    let wheel = run(Command::new(root.join("clients/python/build")).env_remove("CARGO_TARGET_DIR"));
    pip(&[Path::new("--force-reinstall"), Path::new("--no-deps"), Path::new(wheel.trim())]);
    venv
}
