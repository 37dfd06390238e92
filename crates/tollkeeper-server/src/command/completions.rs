//! `tollkeeper completions`: for bash, zsh, fish and others.

use std::io;
use std::process::ExitCode;

use clap::CommandFactory as _;

use crate::args::Arguments;

/// Prints what the shell needs.
pub fn run(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    clap_complete::generate(shell, &mut Arguments::command(), "tollkeeper", &mut io::stdout());
    Ok(ExitCode::SUCCESS)
}
