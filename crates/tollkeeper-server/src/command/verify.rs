//! `tollkeeper verify`: judges histories of admissions by the contract of each limit.
//!
//! Every line is kept in 16 bytes, and every key once, so ten million admissions take 160 MB. The lines of one key are
//! then put in order and judged by the functions that the tests of the product use.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, anyhow, bail};
use serde_json::json;
use tollkeeper::policy::Grant;
use tollkeeper::{Algorithm, CheckedQuota, Policy, Rule, Span};
use tollkeeper_core::contract::{Admission, Breach, Contract, Judgement};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_engine::api::redact;

use crate::command::args::Verify;
use crate::command::{config, say, table};
use crate::history::Line;

/// How many keys of each limit are printed, the one that needed most of its limit first.
const SHOWN: usize = 20;

/// Times from here on are rejected: they are beyond the year 100,000.
const END: u64 = 1 << 61;

/// Prints what each key needed of its limit: exit 0 if all contracts were kept, 1 if one was broken.
pub fn run(args: &Verify) -> anyhow::Result<ExitCode> {
    let config = config(Some(&args.config))?;
    let nodes = u64::try_from(config.redis.nodes)?;
    let mut history = History::new(&config.policy, nodes);
    if args.histories.is_empty() {
        history.read("standard input", io::stdin().lock())?;
    }
    for file in &args.histories {
        let opened = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
        history.read(&file.display().to_string(), BufReader::new(opened))?;
    }
    let report = history.judge();
    if args.json {
        say(report.as_json())?
    } else {
        report.print()?
    }
    Ok(ExitCode::from(u8::from(!report.kept())))
}

/// The admissions of all keys.
struct History<'p> {
    policy: &'p Policy,
    nodes: u64,
    rules: HashMap<&'p str, &'p Rule>,
    keys: Vec<Key<'p>>,
    /// The index in `keys` of each key.
    places: HashMap<Identity<'p>, u32>,
    admissions: Vec<AdmissionLine>,
    /// Lines that no contract covers: slots, and admissions by the failure policy `allow`.
    unjudged: u64,
}

/// What makes a key. Its period is part of it: tiers with different periods count apart.
#[derive(PartialEq, Eq, Hash)]
struct Identity<'p> {
    limit: &'p str,
    values: Box<[Option<Box<str>>]>,
    period: Span,
    is_local: bool,
}

/// A key and the contract that it is judged by.
struct Key<'p> {
    limit: &'p str,
    values: Box<[Option<Box<str>>]>,
    algorithm: Algorithm,
    /// Nodes decided without the store: together they admit at most `max(limit, nodes)`.
    is_local: bool,
    contract: Contract,
}

/// One line: 16 bytes.
#[derive(Clone, Copy)]
struct AdmissionLine {
    at: u64,
    cost: u32,
    key: u32,
}

impl<'p> History<'p> {
    fn new(policy: &'p Policy, nodes: u64) -> History<'p> {
        let rules = policy.rules().iter().map(|rule| (rule.name(), rule)).collect();
        let (keys, places, admissions) = (Vec::new(), HashMap::new(), Vec::new());
        History { policy, nodes, rules, keys, places, admissions, unjudged: 0 }
    }

    fn read(&mut self, name: &str, mut lines: impl BufRead) -> anyhow::Result<()> {
        let (mut text, mut number) = (Vec::new(), 0);
        loop {
            text.clear();
            number += 1;
            let read = lines.read_until(b'\n', &mut text);
            if read.with_context(|| format!("cannot read {name}"))? == 0 {
                return Ok(());
            }
            if !text.trim_ascii().is_empty() {
                self.add(text.trim_ascii()).with_context(|| format!("{name}:{number}"))?;
            }
        }
    }

    fn add(&mut self, text: &[u8]) -> anyhow::Result<()> {
        let line: Line<'_> = serde_json::from_slice(text).map_err(malformed)?;
        let Some(&rule) = self.rules.get(&*line.limit) else {
            bail!("the config has no limit `{}`", line.limit);
        };
        if line.key.len() != rule.by().len() {
            let (given, wanted) = (line.key.len(), rule.by().len());
            bail!("`key` has {given} values, but limit `{}` is keyed by {wanted} facts", rule.name());
        }
        if line.cost > MAX_COST || line.t >= END {
            bail!("`t` must be in microseconds and below 2^61, `cost` at most 2^31");
        }
        let is_local = match line.degraded.as_deref() {
            None => false,
            Some("local") => true,
            Some("allow") => return self.skip(),
            Some(other) => bail!("`degraded` is `{other}` (local or allow)"),
        };
        let values = || line.key.iter().map(Option::as_deref);
        let (quota, shift) = match &line.overridden {
            Some(overridden) => {
                let quota =
                    overridden.quota(rule.algorithm()).map_err(|error| anyhow!("`override`: {error}"))?;
                (quota, line.shift.unwrap_or(0))
            }
            None => {
                let grant = self.grant(rule, &line)?;
                let Grant::Limited { quota, .. } = grant else {
                    bail!("limit `{}` grants this key everything: it has no admissions to log", rule.name());
                };
                (*quota, line.shift.unwrap_or_else(|| rule.shift(grant, values())))
            }
        };
        if shift > 0 && shift >= quota.period().as_micros() {
            bail!("`shift` is {shift}, but must be less than the period of limit `{}`", rule.name());
        }
        let Some(contract) = Contract::of(&quota, shift) else { return self.skip() };
        let identity = Identity {
            limit: rule.name(),
            values: values().map(|value| value.map(Into::into)).collect(),
            period: quota.period(),
            is_local,
        };
        let next = u32::try_from(self.keys.len()).context("too many keys")?;
        let (keys, nodes) = (&mut self.keys, self.nodes);
        let place = *self.places.entry(identity).or_insert_with_key(|identity| {
            let (limit, values) = (identity.limit, identity.values.clone());
            keys.push(Key { limit, values, algorithm: quota.algorithm(), is_local, contract });
            next
        });
        let key = &mut keys[place as usize];
        key.contract = key.contract.or(&quota).at_least(if is_local { nodes } else { 0 });
        let cost = u32::try_from(line.cost)?;
        self.admissions.push(AdmissionLine { at: line.t, cost, key: place });
        Ok(())
    }

    fn skip(&mut self) -> anyhow::Result<()> {
        self.unjudged += 1;
        Ok(())
    }

    /// What the limit grants: its override for this key, else the tier, else the largest tier.
    fn grant(&self, rule: &'p Rule, line: &Line<'_>) -> anyhow::Result<&'p Grant> {
        if let [Some(value)] = &line.key[..] {
            let declared = self.policy.declared();
            let shown = |of: &str| redact::shown(declared, &rule.by()[0], of).into_owned();
            if let Some((_, grant)) = rule.overrides().find(|(of, _)| *of == &**value || shown(of) == **value)
            {
                return Ok(grant);
            }
        }
        if let Some(tier) = line.tier.as_deref() {
            let found = rule.tiers().find(|(name, _)| *name == tier);
            return match found {
                Some((_, grant)) => Ok(grant),
                None => bail!("limit `{}` has no tier `{tier}`", rule.name()),
            };
        }
        let size = |grant: &Grant| match grant {
            Grant::Limited { quota, .. } => Some((quota.limit(), per_day(quota))),
            _ => None,
        };
        let largest = rule.tiers().map(|(_, grant)| grant).max_by_key(|grant| size(grant));
        Ok(largest.unwrap_or_else(|| rule.default_tier()))
    }

    fn judge(mut self) -> Report<'p> {
        self.admissions.sort_unstable_by_key(|entry| (entry.key, entry.at));
        let mut judged = Vec::with_capacity(self.keys.len());
        for run in self.admissions.chunk_by(|one, other| one.key == other.key) {
            let history: Vec<Admission> =
                run.iter().map(|entry| Admission { at: entry.at, cost: entry.cost.into() }).collect();
            let place = run[0].key;
            judged.push((place, history.len() as u64, self.keys[place as usize].contract.judge(&history)));
        }
        let mut keys: Vec<Option<Key<'p>>> = self.keys.into_iter().map(Some).collect();
        let mut judged: Vec<Judged<'p>> = judged
            .into_iter()
            .filter_map(|(place, admissions, judgement)| {
                Some(Judged { key: keys[place as usize].take()?, admissions, judgement })
            })
            .collect();
        // By limit, and within a limit the key that needed the largest part first.
        let order = |limit: &str| self.policy.find(limit).map_or(0, |(index, _)| index);
        judged.sort_by_cached_key(|one| {
            let Judgement { needed, limit, .. } = one.judgement;
            let part = (needed << 32) / limit.max(1);
            (order(one.key.limit), one.key.is_local, std::cmp::Reverse(part), one.key.shown())
        });
        Report { judged, unjudged: self.unjudged }
    }
}

/// Why a line is not an admission. The line of the file is known already.
fn malformed(error: serde_json::Error) -> anyhow::Error {
    let (column, why) = (error.column(), error.to_string());
    let why = why.split(" at line ").next().unwrap_or_default();
    anyhow!("column {column}: {why} (a line is like {EXAMPLE})")
}

const EXAMPLE: &str = r#"{"t":1794829062000000,"limit":"per-user","key":["alice"],"cost":1}"#;

/// The units of a quota in a day, to compare tiers of different periods.
fn per_day(quota: &CheckedQuota) -> u128 {
    u128::from(quota.count()) * 86_400_000_000 / u128::from(quota.period().as_micros().max(1))
}

/// What every key needed.
struct Report<'p> {
    judged: Vec<Judged<'p>>,
    unjudged: u64,
}

struct Judged<'p> {
    key: Key<'p>,
    admissions: u64,
    judgement: Judgement,
}

impl Key<'_> {
    /// The values as text: `alice`, `- b`, `(all)`.
    fn shown(&self) -> String {
        let values: Vec<&str> = self.values.iter().map(|value| value.as_deref().unwrap_or("-")).collect();
        if values.is_empty() { "(all)".to_owned() } else { values.join(" ").escape_debug().to_string() }
    }

    /// The number that the contract is about.
    fn unit(&self) -> &'static str {
        if self.algorithm.has_burst() { "burst" } else { "count" }
    }
}

impl Report<'_> {
    fn kept(&self) -> bool {
        self.judged.iter().all(|one| one.judgement.kept())
    }

    fn broken(&self) -> impl Iterator<Item = (&Judged<'_>, Breach)> {
        self.judged.iter().filter_map(|one| Some((one, one.judgement.first?)))
    }

    fn print(&self) -> anyhow::Result<()> {
        if !self.judged.is_empty() {
            let mut table = table::with(&["LIMIT", "KEY", "DECIDED BY", "ADMISSIONS", "NEEDS", "OF", ""]);
            for keys in self.judged.chunk_by(|one, other| one.key.limit == other.key.limit) {
                for Judged { key, admissions, judgement } in keys.iter().take(SHOWN) {
                    table.add_row([
                        table::cell(key.limit, None),
                        table::cell(key.shown(), None),
                        table::cell(if key.is_local { "nodes" } else { "store" }, None),
                        table::cell(admissions, None),
                        table::cell(format!("{} {}", key.unit(), judgement.needed), None),
                        table::cell(judgement.limit, None),
                        table::cell(if judgement.kept() { "kept" } else { "broken" }, Some(judgement.kept())),
                    ]);
                }
                if let Some(more) = keys.len().checked_sub(SHOWN).filter(|more| *more > 0) {
                    let name = keys[0].key.limit;
                    table.add_row([name.to_owned(), format!("({more} more keys)")]);
                }
            }
            say(table.trim_fmt())?;
        }
        for (one, breach) in self.broken().take(SHOWN) {
            say(format_args!("{}", sentence(one, breach)))?;
        }
        if self.unjudged > 0 {
            say(format_args!("{} lines are of no contract: slots, or admitted by `allow`", self.unjudged))?;
        }
        let (keys, broken) = (self.judged.len(), self.broken().count());
        let admissions: u64 = self.judged.iter().map(|one| one.admissions).sum();
        say(match broken {
            0 => format!("kept: {admissions} admissions of {keys} keys"),
            _ => format!("broken: {broken} of {keys} keys, {admissions} admissions"),
        })
    }

    fn as_json(&self) -> serde_json::Value {
        let keys: Vec<_> = self
            .judged
            .iter()
            .map(|Judged { key, admissions, judgement }| {
                json!({
                    "limit": key.limit,
                    "key": key.values,
                    "algorithm": key.algorithm.name(),
                    "decided_by": if key.is_local { "nodes" } else { "store" },
                    "admissions": admissions,
                    "needed": number(judgement.needed),
                    "of": number(judgement.limit),
                    "kept": judgement.kept(),
                    "first_violation": judgement.first.map(|first| json!({
                        "from": first.from,
                        "until": first.until,
                        "admitted": number(first.admitted),
                        "allowed": number(first.allowed),
                    })),
                })
            })
            .collect();
        json!({ "kept": self.kept(), "keys": keys, "unjudged": self.unjudged })
    }
}

/// The first violation of a key, for people.
fn sentence(one: &Judged<'_>, Breach { from, until, admitted, allowed }: Breach) -> String {
    let (limit, key) = (one.key.limit, one.key.shown());
    let length = Span::from_micros(until - from).readable();
    let date = httpdate::fmt_http_date(
        UNIX_EPOCH + Duration::from_micros(until).min(Duration::from_secs(LAST_DATE)),
    );
    format!(
        "{limit} {key}: {admitted} admitted in {length} up to {until} ({date}), where {allowed} are allowed; \
         the interval begins at {from}"
    )
}

/// The last second that a date can show: the end of the year 9999.
const LAST_DATE: u64 = 253_402_300_799;

/// A total, which is below 2^62 by `contract`; JSON has no larger integers.
fn number(total: u128) -> u64 {
    u64::try_from(total).unwrap_or(u64::MAX)
}
