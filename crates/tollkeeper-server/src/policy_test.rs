//! Runs tests of policies: requests at exact times, and what is expected of each.
//!
//! Each test has a store and a clock of its own. Requests go through the reader of the middleware, and nothing is
//! rounded or jittered.

pub mod coverage;
pub mod output;
pub mod run;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tollkeeper::config::{Config, PolicyTest, TestFile, TestPolicy};

use crate::simulate::time;
use coverage::Coverage;
use run::{Failure, Runner};

/// 2026-01-01T00:00:00Z, in microseconds: the start of every test that has no other.
const START: u64 = 1_767_225_600_000_000;

/// What a file of tests found.
#[derive(Debug)]
pub struct FileResult {
    /// The file.
    pub path: PathBuf,
    /// Each test.
    pub tests: Vec<TestResult>,
    /// What its rows matched.
    pub coverage: Coverage,
}

/// What a test found.
#[derive(Debug)]
pub struct TestResult {
    /// Its name.
    pub name: String,
    /// Every expectation that did not hold.
    pub failures: Vec<Failure>,
}

impl FileResult {
    /// Runs the tests of a file. An error is one of the file or of its policy, not of a test.
    pub fn run(path: &Path) -> anyhow::Result<FileResult> {
        let file = TestFile::read(path)?;
        let config = config(&file, path)?;
        let start = start(&file, path)?;
        check_names(&file.tests, &config, path)?;
        let mut coverage = Coverage::new(&config);
        let tests = run_tests(&file.tests, &config, start, &mut coverage)?;
        Ok(FileResult { path: path.to_owned(), tests, coverage })
    }
}

/// Runs tests on a policy, each on a store of its own whose clock shows `start`.
pub fn run_tests(
    tests: &[PolicyTest],
    config: &Config,
    start: u64,
    coverage: &mut Coverage,
) -> anyhow::Result<Vec<TestResult>> {
    let run = |test: &PolicyTest| {
        let failures = Runner::new(config, start)?.run(test, coverage);
        Ok(TestResult { name: test.name.value.clone(), failures })
    };
    tests.iter().map(run).collect()
}

/// The time at which the tests of a file start, in microseconds since 1970.
pub fn start(file: &TestFile, path: &Path) -> anyhow::Result<u64> {
    let Some(start) = &file.start else { return Ok(START) };
    time::instant(&start.value).map_err(|error| {
        anyhow::anyhow!("{}:{}:{}: `start` must be {error}", path.display(), start.line, start.column)
    })
}

fn config(file: &TestFile, path: &Path) -> anyhow::Result<Config> {
    let name = match &file.policy {
        TestPolicy::Inline(config) => return Ok(Config::clone(config)),
        TestPolicy::File(name) => name,
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let (config, _) = Config::read(&folder.join(name)).with_context(|| format!("{}", path.display()))?;
    Ok(config)
}

/// Fails if a row names a limit that the policy does not have, or a slot or charge that no earlier row has.
fn check_names(tests: &[PolicyTest], config: &Config, path: &Path) -> anyhow::Result<()> {
    let limits: Vec<&str> = config.limits.iter().map(|limit| limit.name.as_str()).collect();
    let mut wrong = Vec::new();
    for test in tests {
        let mut known: Vec<&str> = Vec::new();
        for row in &test.rows {
            let by = row.by.iter().map(|by| (by.value.as_str(), by.line, by.column));
            let remaining = row.remaining.iter().map(|left| (left.value.0.as_str(), left.line, left.column));
            let lists = row.limits.iter().chain(&row.would_refuse);
            let lists =
                lists.flat_map(|list| list.value.iter().map(|name| (name.as_str(), list.line, list.column)));
            for (name, line, column) in by.chain(remaining).chain(lists) {
                if !limits.contains(&name) {
                    let there = limits.join(", ");
                    wrong.push(format!(
                        "{}:{line}:{column}: unknown limit `{}` (there are {there})",
                        path.display(),
                        name.escape_debug()
                    ));
                }
            }
            if let Some(of) = row.of.as_ref().filter(|of| !known.contains(&of.value.as_str())) {
                let name = of.value.escape_debug();
                wrong.push(format!(
                    "{}:{}:{}: no row above has `as: {name}`",
                    path.display(),
                    of.line,
                    of.column
                ));
            }
            known.extend(row.name.as_deref());
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("{}", wrong.join("\n")) }
}
