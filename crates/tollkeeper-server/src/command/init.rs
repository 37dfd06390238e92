//! `tollkeeper init`: prints policy templates to start from.

use std::process::ExitCode;

use anyhow::bail;

use crate::command::say;

/// A policy template.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    /// Its name.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// The config file.
    pub text: &'static str,
    /// Its tests.
    pub tests: &'static str,
}

/// All templates.
pub const TEMPLATES: [Template; 5] = [
    Template {
        name: "public-api",
        purpose: "an API on the internet: plans by key, a generous limit by address, one expensive route",
        text: include_str!("../templates/public-api.yaml"),
        tests: include_str!("../templates/public-api.tests.yaml"),
    },
    Template {
        name: "b2b",
        purpose: "customers with many users: a limit for each user, daily quotas by plan, an override for one customer",
        text: include_str!("../templates/b2b.yaml"),
        tests: include_str!("../templates/b2b.tests.yaml"),
    },
    Template {
        name: "login",
        purpose: "logins: failed passwords by account and by address, password resets",
        text: include_str!("../templates/login.yaml"),
        tests: include_str!("../templates/login.tests.yaml"),
    },
    Template {
        name: "llm",
        purpose: "language models: requests, tokens by minute and day, concurrent streams",
        text: include_str!("../templates/llm.yaml"),
        tests: include_str!("../templates/llm.tests.yaml"),
    },
    Template {
        name: "internal",
        purpose: "calls between services: limits by caller, a shadow limit, a queue in front of a fragile service",
        text: include_str!("../templates/internal.yaml"),
        tests: include_str!("../templates/internal.tests.yaml"),
    },
];

/// Prints a template or its tests, or the list of templates.
pub fn run(name: Option<&str>, tests: bool) -> anyhow::Result<ExitCode> {
    let Some(name) = name else {
        for template in TEMPLATES {
            say(format_args!("{:<12}{}", template.name, template.purpose))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(template) = TEMPLATES.iter().find(|template| template.name == name) else {
        let names = TEMPLATES.map(|template| template.name).join(", ");
        bail!("unknown policy `{}` (available: {names})", name.escape_debug());
    };
    let text = if tests { template.tests } else { template.text };
    say(text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}
