//! Runs programs in other languages. Their packages are installed once, only into `target/languages`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};

use crate::binary;

/// A folder in `target/languages`.
pub fn folder(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let target = test.ancestors().nth(3).expect("target/PROFILE/deps/test");
    let folder = target.join("languages").join(name);
    fs::create_dir_all(&folder).expect("`target` is writable");
    folder
}

/// Runs a program that must succeed, and returns its standard output.
pub fn run(command: &mut Command) -> String {
    let output = command.output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", command.get_program().display()));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {complaint}");
    String::from_utf8_lossy(&output.stdout).replace('\r', "")
}

/// Runs a test runner of another language on this build of `tollkeeper`, without the proxies of the environment. If a
/// test fails, this one does, with all that it printed.
pub fn run_tests(runner: &mut Command) {
    runner.env("TOLLKEEPER", binary::tollkeeper());
    for proxy in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        runner.env_remove(proxy);
    }
    let output = runner.output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", runner.get_program().display()));
    let [printed, complaint] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{printed}{complaint}");
}

/// A folder in which Node.js finds these packages, such as `express@5`.
pub fn node(name: &str, packages: &[&str]) -> PathBuf {
    let folder = folder(name);
    installed(&folder.join("installed"), || {
        let quietly = ["install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"];
        run(Command::new("npm").args(quietly).args(packages).current_dir(&folder));
    });
    folder
}

/// Creates a Python virtual environment with FastAPI, Starlette and uvicorn, and returns its `bin` folder.
pub fn python() -> PathBuf {
    let venv = folder("python").join("venv");
    installed(&folder("python").join("installed"), || {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        run(Command::new(venv.join("bin/pip")).args(["install", "--quiet", "fastapi", "uvicorn", "httpx"]));
    });
    venv.join("bin")
}

/// Runs `install` unless an earlier test did.
fn installed(marker: &Path, install: impl FnOnce()) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !marker.exists() {
        install();
        fs::write(marker, "").expect("`target` is writable");
    }
}

/// A process that is killed on drop.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Killed {
    /// Starts a process.
    pub fn start(command: &mut Command) -> Killed {
        let started = command.spawn();
        Killed(started.unwrap_or_else(|error| panic!("{}: {error}", command.get_program().display())))
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        // It may have exited already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        self.kill();
    }
}
