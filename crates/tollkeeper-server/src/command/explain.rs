//! `tollkeeper explain`: shows which limits apply to a request, why, and with which key.

use std::process::ExitCode;

use serde_json::json;
use tollkeeper::Mode;
use tollkeeper::policy::Applicability;

use crate::command::args::Explain;
use crate::command::{config, operator_facts, say, table};

/// Prints for each limit whether it applies to the request.
pub fn run(args: &Explain) -> anyhow::Result<ExitCode> {
    let config = config(args.config.as_deref())?;
    let facts = operator_facts(&args.facts, config.policy.declared())?;
    let explained = config.policy.explain(&facts)?;
    let key = |applicability: &Applicability<'_>| match applicability {
        Applicability::Applies { key, .. } => Some(key.clone()),
        _ => None,
    };
    if args.json {
        let limits: Vec<_> = explained
            .iter()
            .map(|limit| {
                json!({
                    "name": limit.rule.name(),
                    "applies": limit.applicability.applies(),
                    "why": limit.applicability.to_string(),
                    "key": key(&limit.applicability),
                    "cost": limit.rule.cost_fact(),
                })
            })
            .collect();
        say(json!({ "limits": limits }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = table::with(&["LIMIT", "WHY", "KEY"]);
    for limit in &explained {
        let shadow = if limit.rule.mode() == Mode::Shadow { " (shadow: counted, never refused)" } else { "" };
        let applies = limit.applicability.applies().then_some(true);
        table.add_row([
            table::cell(limit.rule.name(), applies),
            table::cell(format!("{}{shadow}", limit.applicability), None),
            table::cell(key(&limit.applicability).unwrap_or_else(|| "-".to_owned()), None),
        ]);
    }
    say(table.trim_fmt())?;
    if !explained.iter().any(|limit| limit.applicability.applies()) {
        say("no limit applies: the request is allowed")?;
    }
    Ok(ExitCode::SUCCESS)
}
