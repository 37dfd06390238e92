//! Runs the tests of the Python package, `clients/python/tests`, against the wheel that `clients/python/build` builds, with
//! real frameworks from PyPI. Everything is built and installed into `target/clients`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tollkeeper_tests::languages::{run, run_tests};
use tollkeeper_tests::packages;
use tollkeeper_tests::page::root;

tollkeeper_tests::test_files!(
    "clients/python/tests",
    "test_",
    ".py",
    [bypasses, engine, fork, frameworks, limits_storage, memory, middleware, page, redis, server_mode]
);

#[test]
fn types_are_complete_and_accept_the_examples() {
    let folder = root().join("clients/python");
    let mut mypy = Command::new(installed().join("bin/mypy"));
    mypy.args(["--cache-dir", "/dev/null", "--no-error-summary"]).current_dir(&folder);
    run(mypy.env("MYPYPATH", folder.join("python")).args(["-p", "tollkeeper"]));
    let mut mypy = Command::new(installed().join("bin/mypy"));
    run(mypy.args(["--cache-dir", "/dev/null", "--strict", "tests/examples.py"]).current_dir(&folder));
}

/// Without the extension, the engine says what to do, and server mode is unaffected.
#[test]
fn missing_extension_is_explained() {
    let folder = root().join("target/clients/without-extension");
    fs::create_dir_all(&folder).expect("`target` is writable");
    let copy = format!(
        "cp -r clients/python/python/tollkeeper '{0}' && rm -f '{0}'/tollkeeper/*.so",
        folder.display()
    );
    run(Command::new("sh").args(["-c", &copy]).current_dir(root()));
    let script = "from tollkeeper import Limiter, TollkeeperError\n\
                  Limiter(server='http://127.0.0.1:8080')\n\
                  try: Limiter(limits=[])\n\
                  except TollkeeperError as error: print(error)";
    let mut python = Command::new("python3");
    let printed = run(python.args(["-c", script]).current_dir(&folder).env("PYTHONPATH", &folder));
    assert!(
        printed.starts_with("not_built: the engine is not built: run `pip install ./clients/python`"),
        "{printed}"
    );
}

/// `pip install ./clients/python` builds the extension itself.
#[test]
fn pip_installs_the_folder() {
    let installed = installed();
    let venv = root().join("target/clients/pip");
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv));
    let mut pip = Command::new(venv.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check"]).arg(root().join("clients/python"));
    // So that dependencies are compiled once.
    run(pip.env("CARGO_TARGET_DIR", installed.with_file_name("cargo")));
    let script = "from tollkeeper import Limiter; print(Limiter(limits=[{'name': 'all', 'rate': '1/s'}]).check({}).remaining)";
    let printed = run(Command::new(venv.join("bin/python")).args(["-c", script]).current_dir(&venv));
    assert_eq!(printed, "0\n");
}

fn passes(file: &str) {
    let installed = installed();
    let mut pytest = Command::new(installed.join("bin/python"));
    pytest.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider", file]);
    pytest.current_dir(root().join("clients/python/tests")).env("PYTHONDONTWRITEBYTECODE", "1");
    pytest.env_remove("PYTHONPATH");
    run_tests(&mut pytest);
}

/// A virtual environment with the package and the frameworks.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(packages::python)
}
