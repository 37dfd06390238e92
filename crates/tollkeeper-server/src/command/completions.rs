//! `tollkeeper completions`: prints completion scripts for bash, zsh, fish and other shells.

use std::process::ExitCode;

use clap::CommandFactory as _;

use crate::command::args::Arguments;
use crate::command::say;

/// Prints the completion script of a shell.
pub fn run(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "tollkeeper", &mut text);
    say(String::from_utf8_lossy(&text).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
