//! `tollkeeper test`: runs tests of policies.

use std::process::ExitCode;

use crate::command::args::Test;
use crate::command::say;
use crate::policy_test::{FileResult, output};

/// Runs all files: exit 0 if all tests pass, 1 if one fails, 2 if a file cannot be used.
pub fn run(args: &Test) -> anyhow::Result<ExitCode> {
    let mut files = Vec::new();
    let mut is_usable = true;
    for path in &args.files {
        match FileResult::run(path) {
            Ok(file) => files.push(file),
            Err(error) => {
                is_usable = false;
                eprintln!("{error:#}");
            }
        }
    }
    match args.json {
        true => say(output::json(&files, args.coverage))?,
        false => say(output::tap(&files, args.coverage))?,
    }
    Ok(match (is_usable, output::failed(&files)) {
        (false, _) => ExitCode::from(2),
        (true, 0) => ExitCode::SUCCESS,
        (true, _) => ExitCode::FAILURE,
    })
}
