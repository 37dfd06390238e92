//! The subcommands of `tollkeeper`, and what they share.

pub mod args;
pub mod check;
pub mod client;
pub mod completions;
pub mod demo;
pub mod explain;
pub mod init;
pub mod limit_table;
pub mod limits;
pub mod overrides;
pub mod proxy;
pub mod schema;
pub mod serve;
pub mod simulate;
pub mod table;
pub mod test;
pub mod top;
pub mod unblock;
pub mod usage;
pub mod validate;
pub mod verify;

use std::fmt::Display;
use std::io::{self, Write as _};
use std::path::Path;

use tollkeeper::Facts;
use tollkeeper::config::Config;
use tollkeeper::facts::DeclaredFacts;
use tollkeeper_engine::api::redact::Redactor;

use crate::server;

/// Prints a line to standard output. A closed pipe is an error here, which `main` treats as success.
fn say(line: impl Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// Reads a config file and prints its warnings to standard error; without a file, the built-in config.
fn config(file: Option<&Path>) -> anyhow::Result<Config> {
    let Some(file) = file else { return Ok(server::builtin(serve::BUILTIN)) };
    let (config, report) = Config::read(file)?;
    if !report.is_empty() {
        eprintln!("{report}");
    }
    Ok(config)
}

/// The facts on the command line, for commands that charge nothing. The value of a hashed fact may also be given as
/// `sha256:` and its 32 digits.
fn operator_facts<'p>(pairs: &'p [(String, String)], declared: &DeclaredFacts) -> anyhow::Result<Facts<'p>> {
    let mut facts = facts(pairs)?;
    let redactor = Redactor::default();
    for (name, value) in pairs {
        let value = redactor.value(declared, name, value);
        facts.insert(name, value.map_err(|error| anyhow::anyhow!("fact `{name}`: {error}"))?)?;
    }
    Ok(facts)
}

/// The facts on the command line, as the body of a call to a server.
fn json_facts(pairs: &[(String, String)]) -> anyhow::Result<serde_json::Map<String, serde_json::Value>> {
    let mut facts = serde_json::Map::new();
    for (name, value) in pairs {
        if facts.insert(name.clone(), value.as_str().into()).is_some() {
            anyhow::bail!("fact `{name}` is given twice");
        }
    }
    Ok(facts)
}

/// The facts on the command line. The limiter reports invalid values when it uses them.
fn facts(pairs: &[(String, String)]) -> anyhow::Result<Facts<'_>> {
    let mut facts = Facts::new();
    for (name, value) in pairs {
        if facts.iter().any(|(other, _)| other == name) {
            anyhow::bail!("fact `{name}` is given twice");
        }
        facts.insert(name, value)?;
    }
    Ok(facts)
}
