//! `tollkeeper init`: ready policies, to begin with and to change.

use std::process::ExitCode;

use anyhow::bail;

use crate::command::say;

/// A policy that is ready to use.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// Its name.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// The file.
    pub text: &'static str,
}

/// All of them.
pub const READY: [Ready; 5] = [
    Ready {
        name: "public-api",
        purpose: "an API on the internet: plans by key, a wide net by address, one dear route",
        text: include_str!("../templates/public-api.yaml"),
    },
    Ready {
        name: "b2b",
        purpose: "customers with many users: fair shares within, daily quotas by plan, own terms for one",
        text: include_str!("../templates/b2b.yaml"),
    },
    Ready {
        name: "login",
        purpose: "passwords: few wrong ones by account, more by address, resets",
        text: include_str!("../templates/login.yaml"),
    },
    Ready {
        name: "llm",
        purpose: "a bill by the token: requests, tokens by minute and day, open streams",
        text: include_str!("../templates/llm.yaml"),
    },
    Ready {
        name: "internal",
        purpose: "services that call each other: by caller, shadow first, a queue before what is fragile",
        text: include_str!("../templates/internal.yaml"),
    },
];

/// Prints a policy, or the list.
pub fn run(name: Option<&str>) -> anyhow::Result<ExitCode> {
    let Some(name) = name else {
        for ready in READY {
            say(format_args!("{:<12}{}", ready.name, ready.purpose))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(ready) = READY.iter().find(|ready| ready.name == name) else {
        let names = READY.map(|ready| ready.name).join(", ");
        bail!("there is no policy `{}` (there are {names})", name.escape_debug());
    };
    say(ready.text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}
