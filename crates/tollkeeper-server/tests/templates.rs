//! The policy templates of `tollkeeper init`: each is valid without warnings and passes its exercise.
//!
//! `templates/README.txt` says how an exercise is written.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tollkeeper::config::{Config, Format};
use tollkeeper::{Capacity, Clock, Decision, Facts, Limiter, ManualClock, MemoryStore, Retry, Time, Verdict};
use tollkeeper_server::command::init::TEMPLATES;

#[test]
fn every_template_is_valid_without_warnings() {
    for template in TEMPLATES {
        let (_, report) = read(template.name, template.text);
        assert!(report.is_empty(), "{report}");
    }
}

#[test]
fn every_template_passes_its_exercise() {
    for template in TEMPLATES {
        let config = read(template.name, template.text).0;
        let names: BTreeSet<String> =
            config.policy.rules().iter().map(|rule| rule.name().to_owned()).collect();
        let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        let limiter = Limiter::embedded(config.policy, store);
        let mut refused = BTreeSet::new();
        for (position, line) in exercise(template.name) {
            let line = Line::parse(&line)
                .unwrap_or_else(|| panic!("{position}: `{line}` is not a line of an exercise"));
            for time in 1..=line.times {
                let decided = answer(&line.ask(&limiter), &line.expected);
                assert_eq!(decided, line.expected, "{position}, time {time}");
            }
            refused.extend(line.expected.split_once(' ').map(|(_, limit)| limit.to_owned()));
        }
        assert_eq!(refused, names, "{}: the limits that refused, and all limits", template.name);
    }
}

fn read(name: &str, text: &str) -> (Config, tollkeeper::config::Report) {
    Config::parse(&format!("{name}.yaml"), Format::Yaml, text.as_bytes(), &|_| None)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The lines of an exercise with their positions.
fn exercise(name: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/templates/{name}.txt"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(index, line)| (format!("{name}.txt:{}", index + 1), line.to_owned()))
        .collect()
}

struct Line<'l> {
    times: u32,
    acquire: bool,
    cost: u64,
    facts: Vec<(&'l str, &'l str)>,
    expected: String,
}

impl<'l> Line<'l> {
    /// `[TIMES] VERB [cost N] | fact=value … | EXPECTED`
    fn parse(line: &'l str) -> Option<Line<'l>> {
        let [request, facts, expected] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
        let words: Vec<&str> = request.split_whitespace().collect();
        let (times, words) = match words.split_first()? {
            (first, rest) if first.parse::<u32>().is_ok() => (first.parse().ok()?, rest),
            _ => (1, &words[..]),
        };
        let (acquire, cost) = match words {
            ["check"] => (false, 1),
            ["check", "cost", cost] => (false, cost.parse().ok()?),
            ["acquire"] => (true, 1),
            _ => return None,
        };
        let facts = facts.split_whitespace().map(|fact| fact.split_once('=')).collect::<Option<_>>()?;
        Some(Line { times, acquire, cost, facts, expected: expected.trim().to_owned() })
    }

    fn ask(&self, limiter: &Limiter) -> Decision {
        let mut facts = Facts::new();
        for (name, value) in &self.facts {
            facts.insert(*name, *value).expect("a valid fact");
        }
        if !self.acquire {
            return limiter.check(&facts).cost(self.cost).wait().expect("a valid request");
        }
        let acquired = limiter.acquire(&facts).wait().expect("a valid request");
        // Slots are held until the end of the exercise.
        drop(acquired.slot.map(tollkeeper::SlotGuard::keep));
        acquired.decision
    }
}

/// The decision in the notation of an exercise. A refusing shadow limit is reported only if that was expected.
fn answer(decision: &Decision, expected: &str) -> String {
    let binding = || decision.binding().map_or("no limit", |answer| answer.name());
    match decision.verdict() {
        Verdict::Deny { retry: Retry::After(_) } => format!("refused {}", binding()),
        Verdict::Deny { retry: Retry::Never } => format!("never {}", binding()),
        Verdict::Allow { .. } => {
            let shadowed = expected.strip_prefix("shadowed ").and_then(|name| decision.limit(name));
            match shadowed {
                Some(answer) if !answer.outcome().allowed => format!("shadowed {}", answer.name()),
                _ => "allowed".to_owned(),
            }
        }
    }
}
