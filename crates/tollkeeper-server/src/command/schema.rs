//! `tollkeeper schema`: what editors and checkers need to know of the config file.

use std::process::ExitCode;

use crate::command::say;

/// Prints the JSON schema.
pub fn run() -> anyhow::Result<ExitCode> {
    say(tollkeeper::config::schema().trim_end())?;
    Ok(ExitCode::SUCCESS)
}
