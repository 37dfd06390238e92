//! `tollkeeper schema`: prints the JSON schema of the config file, for editors and validators.

use std::process::ExitCode;

use crate::command::say;

/// Prints the JSON schema.
pub fn run() -> anyhow::Result<ExitCode> {
    say(tollkeeper::config::schema().trim_end())?;
    Ok(ExitCode::SUCCESS)
}
