//! `tollkeeper simulate`: replays access logs against policies.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use tollkeeper::config::Config;

use crate::command::args::{Simulate, TimeIs};
use crate::command::say;
use crate::simulate::engine::{self, Engine, WorldSpec};
use crate::simulate::fail_if::Condition;
use crate::simulate::format::{self, Format, FormatName, Mapping};
use crate::simulate::logged::Context;
use crate::simulate::order::OrderSettings;
use crate::simulate::plan::{self, NotSimulated};
use crate::simulate::progress::Progress;
use crate::simulate::read::{self, Head, ReadCounts, ReadSettings};
use crate::simulate::report::{self, Against, LineCounts, Report, UnderAlgorithm};
use crate::simulate::source::{Input, Source};
use crate::simulate::suggest::Search;
use crate::simulate::tally::Detail;
use crate::simulate::worker::Names;
use crate::simulate::world::WorldResult;

/// The most policies to compare with.
const MOST_AGAINST: usize = 4;
/// How far in the future a line may be, in microseconds: clocks differ, and offsets are forgotten.
const DAY: u64 = 86_400_000_000;
/// The exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Replays the logs and prints the report: exit 0, 1 if a condition of `--fail-if` holds, 2 on an error.
pub fn run(args: &Simulate) -> anyhow::Result<ExitCode> {
    let interrupted = watch_for_interrupt()?;
    let report = simulate(args, &interrupted)?;
    if !args.quiet {
        eprint_warnings(&report);
    }
    if let Some(file) = &args.html {
        std::fs::write(file, report::html::html(&report)).with_context(|| file.display().to_string())?;
    }
    match args.json {
        true => say(report::json::json(&report))?,
        false => say(report::text::text(&report))?,
    }
    Ok(match () {
        () if interrupted.load(Ordering::Relaxed) => ExitCode::from(INTERRUPTED),
        () => ExitCode::from(u8::from(report.fail_if.iter().any(|checked| checked.held))),
    })
}

fn eprint_warnings(report: &Report) {
    if let Some(warning) = report.warning() {
        eprintln!("{warning}");
    }
    for limit in &report.not_simulated {
        eprintln!("warning: limit `{}` is not simulated: {}", limit.name, limit.why);
    }
    if report.lines.late * 100 > report.lines.used {
        let late = report::percent(report.lines.late, report.lines.used);
        eprintln!("warning: {late} of the lines are late: name the oldest file first");
    }
}

/// The policies, as they are simulated.
struct Policies {
    config: Config,
    not_simulated: Vec<NotSimulated>,
    against: Vec<(String, Config, Vec<NotSimulated>)>,
}

fn simulate(args: &Simulate, interrupted: &Arc<AtomicBool>) -> anyhow::Result<Report> {
    let conditions = conditions(&args.fail_if)?;
    if args.against.len() > MOST_AGAINST {
        bail!("--against: at most {MOST_AGAINST} other policies");
    }
    let config = read_config(&args.config)?;
    let against = args.against.iter().map(|file| read_config(file)).collect::<anyhow::Result<Vec<_>>>()?;
    let inputs = Input::all(&args.logs)?;
    let source = Source::open(&inputs)?;

    let configs = || std::iter::once(&config).chain(&against);
    let mapping = Mapping {
        fields: args.facts.clone(),
        time: args.time.clone(),
        time_format: args.time_format.clone(),
        used_facts: plan::used_facts(configs()),
    };
    let mut facts = mapping.used_facts.clone();
    facts.extend(args.only.iter().map(|only| only.fact.clone()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut context = Context {
        wanted: plan::wanted_headers(configs(), &facts),
        facts: mapping.facts(),
        tz: args.tz.unwrap_or_default(),
        latest: u64::try_from(now.as_micros()).unwrap_or(u64::MAX).saturating_add(DAY),
        needs_address: false,
    };
    let head = Head::read(&source, interrupted)?;
    let format = match &args.format {
        FormatName::Auto if head.lines.is_empty() => bail!("no readable line"),
        FormatName::Auto => {
            let name = format::detect(&head.lines, &mapping, &context)
                .map_err(|error| anyhow::anyhow!("{error}"))?;
            Format::new(&name, &mapping)
        }
        name => Format::new(name, &mapping),
    };
    let format = format.map_err(|error| anyhow::anyhow!("--format: {error}"))?;
    let first = head.lines.first().map_or(&[][..], Vec::as_slice);
    let says = format.says(first, &context.facts).map_err(|error| anyhow::anyhow!("--format: {error}"))?;
    context.needs_address = says.address;
    if let Some(only) = args.only.iter().find(|only| !says.can_say(&only.fact, &config.http)) {
        bail!("--only {}: this log does not say `{0}` (--fact {0}=FIELD)", only.fact);
    }

    let (simulated, not_simulated) = plan::simulated(&config, &says)?;
    if simulated.limits.is_empty() {
        let whys: Vec<String> =
            not_simulated.iter().map(|limit| format!("\n  {}: {}", limit.name, limit.why)).collect();
        bail!("no limit can be simulated with this log{}", whys.concat());
    }
    check_names(&conditions, &simulated, &not_simulated)?;
    let names = args.against.iter().map(|file| file.display().to_string());
    let against = names.zip(&against).map(|(name, config)| {
        let (config, not_simulated) = plan::simulated(config, &says)?;
        anyhow::Ok((name, config, not_simulated))
    });
    let against = against.collect::<anyhow::Result<Vec<_>>>()?;
    let policies = Policies { config: simulated, not_simulated, against };

    let is_whole = head.is_whole_seconds(&format, &context);
    let settings = ReadSettings {
        order: OrderSettings {
            is_end: args.time_is.map_or(format.is_end, |time_is| time_is == TimeIs::End),
            spread: is_whole && !args.no_spread,
            from: args.from.unwrap_or(0),
            until: args.until.unwrap_or(u64::MAX),
        },
        context,
        drop_status: args.drop_status.clone(),
        strict: args.strict,
        batch: args.batch,
    };
    let engine = Engine {
        config: &policies.config,
        only: &args.only,
        sample: args.sample,
        names: Names::new(&settings.context, format.has_decided_facts()),
        max_keys: args.max_keys,
        threads: args.threads.unwrap_or_else(engine::threads),
        top: args.top,
    };
    let simulation = Simulation { args, engine, format, settings, inputs: &inputs, interrupted };
    simulation.run(&policies, (source, head), &conditions)
}

fn read_config(file: &Path) -> anyhow::Result<Config> {
    // Warnings of the config are for `validate`.
    let (config, _) = Config::read(file)?;
    Ok(config)
}

fn conditions(texts: &[String]) -> anyhow::Result<Vec<Condition>> {
    let parse = |text: &String| text.parse::<Condition>().context("--fail-if");
    texts.iter().map(parse).collect()
}

/// Fails if a condition names a limit that is not simulated.
fn check_names(
    conditions: &[Condition],
    config: &Config,
    not_simulated: &[NotSimulated],
) -> anyhow::Result<()> {
    for (condition, name) in conditions.iter().filter_map(|condition| Some((condition, condition.limit()?))) {
        if let Some(limit) = not_simulated.iter().find(|limit| limit.name == name) {
            bail!("--fail-if '{}': limit `{name}` is not simulated: {}", condition.text, limit.why);
        }
        if config.limits.iter().all(|limit| limit.name != name) {
            let names: Vec<&str> = config.limits.iter().map(|limit| limit.name.as_str()).collect();
            bail!("--fail-if '{}': unknown limit `{name}` (there are {})", condition.text, names.join(", "));
        }
    }
    Ok(())
}

/// Everything that is needed to read the logs, once or again.
struct Simulation<'a> {
    args: &'a Simulate,
    engine: Engine<'a>,
    format: Format,
    settings: ReadSettings,
    inputs: &'a [Input],
    interrupted: &'a AtomicBool,
}

impl Simulation<'_> {
    fn run(
        &self,
        policies: &Policies,
        opened: (Source, Head),
        conditions: &[Condition],
    ) -> anyhow::Result<Report> {
        let mut notes = Vec::new();
        let mut worlds = vec![spec(&policies.config, 0, Detail::Full)];
        worlds.extend(
            (1..).zip(&policies.against).map(|(group, (_, config, _))| spec(config, group, Detail::Full)),
        );
        let mut group = worlds.len();
        let algorithms = self.algorithm_worlds(&policies.config, group, &mut notes)?;
        let first_algorithm = worlds.len();
        worlds.extend(algorithms.iter().map(|(_, _, spec)| spec.clone()));
        group += 1;
        let mut searches =
            self.args.suggest.map_or_else(Vec::new, |target| Search::all(&policies.config, target));
        self.note_unsearched(&policies.config, &searches, &mut notes);
        let candidates = candidates(&searches, &policies.config, group);
        let first_candidate = worlds.len();
        worlds.extend(candidates.iter().map(|(_, _, spec)| spec.clone()));

        let (results, used, counts) = self.pass(&worlds, opened)?;
        read::check_readable(&counts)?;
        note_results(&mut searches, &candidates, &results[first_candidate..]);
        if !searches.is_empty() {
            self.refine(&mut searches, policies, &mut notes)?;
        }

        let (result, rest) = results.split_first().expect("the config is the first world");
        let against = policies.against.iter().zip(rest).map(|((policy, _, not_simulated), result)| Against {
            policy: policy.clone(),
            result: result.clone(),
            not_simulated: not_simulated.clone(),
        });
        let late = counts.late;
        let lines = LineCounts { read: counts.lines, used, unreadable: counts.unreadable.count(), late };
        self.note_reading(&counts, result, &mut notes);
        Ok(Report {
            policy: self.args.config.display().to_string(),
            lines,
            unreadable: counts.unreadable,
            spread: self.settings.order.spread,
            not_simulated: policies.not_simulated.clone(),
            against: against.collect(),
            algorithms: under_algorithms(&algorithms, &results[first_algorithm..first_candidate]),
            suggest: searches.into_iter().map(Search::finish).collect::<anyhow::Result<_>>()?,
            suggest_share: self.args.suggest.map(|target| target.0),
            fail_if: conditions.iter().map(|condition| condition.check(result, late, used)).collect(),
            result: result.clone(),
            notes,
        })
    }

    /// Reads the logs once, in all these worlds.
    fn pass(
        &self,
        worlds: &[WorldSpec],
        (source, head): (Source, Head),
    ) -> anyhow::Result<(Vec<WorldResult>, u64, ReadCounts)> {
        let progress = Progress::new(&source, !self.args.no_progress && !self.args.quiet);
        let results = self.engine.run(worlds, |send| {
            let logs = (&source, self.inputs);
            read::read(logs, head, &self.format, &self.settings, self.interrupted, &progress, send)
        });
        progress.finish();
        results
    }

    fn algorithm_worlds(
        &self,
        config: &Config,
        group: usize,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Vec<AlgorithmWorld>> {
        if !self.args.algorithms {
            return Ok(Vec::new());
        }
        let mut worlds = Vec::new();
        for algorithm in plan::ALGORITHMS {
            let (changed, unchanged) = plan::with_algorithm(config, algorithm)?;
            for name in &unchanged {
                notes.push(format!("Limit `{name}` cannot be a {algorithm}."));
            }
            worlds.push((algorithm, unchanged, spec(&changed, group, Detail::Counts)));
        }
        Ok(worlds)
    }

    /// Reads the files again, to try the counts between the smallest that passes and its lower neighbour.
    fn refine(
        &self,
        searches: &mut [Search],
        policies: &Policies,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        notes.push("Each suggestion is for its limit alone, as if there were no others.".to_owned());
        let candidates = candidates(searches, &policies.config, 0);
        if candidates.is_empty() || self.interrupted.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.inputs.contains(&Input::Stdin) {
            notes.push(
                "Suggestions come from one pass, because standard input cannot be read again: pass files for exact counts."
                    .to_owned(),
            );
            return Ok(());
        }
        let source = Source::open(self.inputs)?;
        let head = Head::read(&source, self.interrupted)?;
        let worlds: Vec<WorldSpec> = candidates.iter().map(|(_, _, spec)| spec.clone()).collect();
        let (results, ..) = self.pass(&worlds, (source, head))?;
        note_results(searches, &candidates, &results);
        Ok(())
    }

    fn note_unsearched(&self, config: &Config, searches: &[Search], notes: &mut Vec<String>) {
        if self.args.suggest.is_some() {
            for limit in config.limits.iter().filter(|limit| !plan::has_one_rate(limit)) {
                notes.push(format!(
                    "Limit `{}` has no single rate, so nothing is suggested for it.",
                    limit.name
                ));
            }
            debug_assert!(searches.len() <= config.limits.len());
        }
    }

    fn note_reading(&self, counts: &ReadCounts, result: &WorldResult, notes: &mut Vec<String>) {
        if counts.interrupted {
            notes.push("Interrupted: this is the report on the lines that were read.".to_owned());
        }
        if self.settings.order.spread {
            let note = "The log has whole seconds: requests are spread evenly over their second (--no-spread takes \
                        the times as they are).";
            notes.push(note.to_owned());
        }
        if counts.late > 0 {
            let late = report::number(counts.late);
            notes.push(format!("{late} late lines are counted at the time of the lines before them."));
        }
        if result.overflows > 0 {
            notes.push(format!(
                "There are more than {} keys: some share states, so refusals are at most these numbers (--max-keys).",
                report::number(u64::try_from(self.args.max_keys).unwrap_or(u64::MAX))
            ));
        }
        if result.limits.iter().any(|limit| !limit.keys.is_exact || !limit.refused_keys.is_exact) {
            notes.push("Numbers of keys above 100,000 are estimates, off by about 1 %.".to_owned());
        }
        let error = result.limits.iter().flat_map(|limit| &limit.top).map(|top| top.error).max().unwrap_or(0);
        if error > 0 {
            notes.push(format!("Counts of single keys may be up to {} too low.", report::number(error)));
        }
        for limit in result.limits.iter().filter(|limit| limit.asked == 0) {
            notes.push(format!("Limit `{}` applied to no request of this log.", limit.name));
        }
    }
}

/// An algorithm, the limits that cannot have it, and the world of the others.
type AlgorithmWorld = (tollkeeper::Algorithm, Vec<String>, WorldSpec);

fn spec(config: &Config, group: usize, detail: Detail) -> WorldSpec {
    WorldSpec { config: config.clone(), group, detail }
}

fn under_algorithms(worlds: &[AlgorithmWorld], results: &[WorldResult]) -> Vec<UnderAlgorithm> {
    let mut rows: Vec<UnderAlgorithm> = Vec::new();
    for ((algorithm, unchanged, _), result) in worlds.iter().zip(results) {
        for limit in result.limits.iter().filter(|limit| !unchanged.contains(&limit.name)) {
            let (name, algorithm) = (limit.name.clone(), *algorithm);
            rows.push(UnderAlgorithm { name, algorithm, asked: limit.asked, refused: limit.refused });
        }
    }
    // By limit, in the order of the config; the sort is stable, so algorithms keep theirs.
    let first = results.first().map_or(&[][..], |result| &result.limits);
    rows.sort_by_key(|row| first.iter().position(|limit| limit.name == row.name));
    rows
}

/// The worlds of all searches: the index of the search, the count, the world.
fn candidates(searches: &[Search], config: &Config, group: usize) -> Vec<(usize, u64, WorldSpec)> {
    let mut candidates = Vec::new();
    for (index, search) in searches.iter().enumerate() {
        let worlds = search.worlds(config, group + index);
        candidates.extend(worlds.into_iter().map(|(count, spec)| (index, count, spec)));
    }
    candidates
}

fn note_results(searches: &mut [Search], candidates: &[(usize, u64, WorldSpec)], results: &[WorldResult]) {
    for ((index, count, _), result) in candidates.iter().zip(results) {
        searches[*index].add(*count, result);
    }
}

/// Sets the flag on Ctrl-C, so that what was read is still reported; a second one ends the process.
fn watch_for_interrupt() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut interrupts = {
        let _guard = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
    };
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(move || {
        runtime.block_on(async {
            interrupts.recv().await;
            seen.store(true, Ordering::Relaxed);
            interrupts.recv().await;
            #[expect(clippy::disallowed_methods, reason = "a second interrupt ends at once")]
            std::process::exit(i32::from(INTERRUPTED));
        });
    })?;
    Ok(flag)
}
