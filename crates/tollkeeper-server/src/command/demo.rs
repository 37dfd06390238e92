//! `tollkeeper demo`: plays the same burst through every algorithm, and draws what each admits.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::presets;
use serde_json::json;
use tollkeeper::{
    Algorithm, Capacity, Clock, Decision, Limit, Limiter, ManualClock, MemoryStore, Mode, Policy, Quota,
    Retry, SlotGuard, Span, Time, Verdict, facts,
};
use tollkeeper_core::time::Seconds;

use crate::command::args::Demo;
use crate::command::{say, table};

/// The edge of a window.
const START: Time = Time::from_micros(1_760_000_000_000_000);
/// How long a slot is held, in milliseconds.
const HELD: u64 = 3_000;
/// When the requests of the burst arrive, in milliseconds: seven at once, then one by one, then three around the end of
/// the first window.
const BURST: [u64; 14] = [0, 0, 0, 0, 0, 0, 0, 1_000, 1_500, 3_000, 4_900, 4_900, 5_100, 5_100];
/// The time between two rows on a terminal.
const PACE: Duration = Duration::from_millis(120);

/// A request of the demo, and what one algorithm says about it.
struct Played {
    /// When it arrived, in milliseconds.
    at: u64,
    decision: Decision,
    slot: Option<SlotGuard>,
}

/// Plays the burst and draws the picture.
pub fn run(args: &Demo) -> anyhow::Result<ExitCode> {
    let algorithms: Vec<Algorithm> =
        Algorithm::ALL.into_iter().filter(|known| args.algorithm.is_none_or(|only| only == *known)).collect();
    let bursts: Vec<Vec<Played>> = algorithms
        .iter()
        .map(|algorithm| play(*algorithm, 5, Duration::from_secs(5), &BURST))
        .collect::<anyhow::Result<_>>()?;
    let pictures: Vec<Vec<Played>> = algorithms
        .iter()
        .map(|algorithm| play(*algorithm, 10, Duration::from_secs(10), &traffic()))
        .collect::<anyhow::Result<_>>()?;
    if args.json {
        say(as_json(&algorithms, &bursts))?;
        return Ok(ExitCode::SUCCESS);
    }
    say("The same 14 requests under 5 per 5 s (5 at a time, for 3 s each, under concurrency):\n")?;
    // As many columns as fit, and at least one.
    let width = if io::stdout().is_terminal() {
        crossterm::terminal::size().map_or(80, |(width, _)| width)
    } else {
        100
    };
    let columns = ((usize::from(width).saturating_sub(8)) / 26).clamp(1, algorithms.len());
    for (names, bursts) in algorithms.chunks(columns).zip(bursts.chunks(columns)) {
        print_burst(names, bursts)?;
    }
    say("The 72 requests of docs/algorithms.md under 10 per 10 s, a column for each second:\n")?;
    say(picture(&algorithms, &pictures, table::for_people()))?;
    Ok(ExitCode::SUCCESS)
}

/// Sends a request at each of these milliseconds, which ascend.
fn play(algorithm: Algorithm, count: u64, period: Duration, arrivals: &[u64]) -> anyhow::Result<Vec<Played>> {
    let quota = match algorithm {
        Algorithm::Concurrency => Quota::slots(count),
        _ => Quota::per(count, period),
    };
    let clock = ManualClock::new(START);
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    let limit = Limit::new("demo", quota).algorithm(algorithm).mode(Mode::Enforce);
    let limiter = Limiter::embedded(Policy::new(vec![limit])?, store);
    let mut played: Vec<Played> = Vec::new();
    for &at in arrivals {
        clock.set(START + Span::from_millis(at));
        played.iter_mut().filter(|request| request.at + HELD <= at).for_each(|request| request.slot = None);
        let acquired = limiter.acquire(&facts! {}).wait()?;
        played.push(Played { at, decision: acquired.decision, slot: acquired.slot });
    }
    Ok(played)
}

/// The requests of the picture in docs/algorithms.md: a burst, a steady stretch, two bursts around the edge of a
/// window, and after a long silence another burst.
fn traffic() -> Vec<u64> {
    let steady = (0..22).map(|number| 3_250 + 500 * number);
    let edge = [29_600; 10].into_iter().chain([30_400; 10]);
    [0; 15].into_iter().chain(steady).chain(edge).chain([46_000; 15]).collect()
}

/// Prints a row for each request, with what each of these algorithms says: one by one on a terminal.
fn print_burst(algorithms: &[Algorithm], bursts: &[Vec<Played>]) -> anyhow::Result<()> {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(
        std::iter::once("TIME".to_owned()).chain(algorithms.iter().map(|name| name.name().to_uppercase())),
    );
    for index in 0..BURST.len() {
        let time = format!("{:.1} s", Duration::from_millis(BURST[index]).as_secs_f64());
        let cells = bursts.iter().map(|burst| {
            let decision = &burst[index].decision;
            table::cell(said(decision), Some(decision.allowed()))
        });
        table.add_row(std::iter::once(table::cell(time, None)).chain(cells));
    }
    let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    for line in lines {
        say(line)?;
        if table::for_people() {
            runtime.block_on(tokio::time::sleep(PACE));
        }
    }
    say("")
}

/// What a limit says about a request: `allowed 3/5`, `refused, retry in 0.6 s`.
fn said(decision: &Decision) -> String {
    let outcome = decision.limits().next().expect("the limit applies to every request").outcome();
    let used = outcome.limit - outcome.remaining;
    match decision.verdict() {
        Verdict::Allow { delay } if delay > Span::ZERO => {
            format!("allowed {used}/{}, waits {}", outcome.limit, delay.readable())
        }
        Verdict::Allow { .. } => format!("allowed {used}/{}", outcome.limit),
        Verdict::Deny { retry: Retry::After(retry) } => format!("refused, retry in {}", retry.readable()),
        Verdict::Deny { retry: Retry::Never } => "refused".to_owned(),
    }
}

/// Two lines for each algorithm: what it admits in each second above, what it refuses below.
fn picture(algorithms: &[Algorithm], pictures: &[Vec<Played>], coloured: bool) -> String {
    let (green, red, plain) = if coloured { ("\x1b[32m", "\x1b[31m", "\x1b[0m") } else { ("", "", "") };
    let mut out = String::new();
    for (algorithm, requests) in algorithms.iter().zip(pictures) {
        let heights = |allowed: bool| -> String {
            let count = |second: u64| {
                let within = requests.iter().filter(|request| request.at / 1_000 == second);
                within.filter(|request| request.decision.allowed() == allowed).count()
            };
            let bars: String = (0..=50).map(|second| bar(count(second))).collect();
            bars.trim_end().to_owned()
        };
        let admitted = requests.iter().filter(|request| request.decision.allowed()).count();
        let _ =
            writeln!(out, "{:<15} {green}{:<51}{plain} {admitted} of 72", algorithm.name(), heights(true));
        let _ = writeln!(out, "{:<15} {red}{}{plain}", "", heights(false));
    }
    let _ = writeln!(out, "{:<15} 0 s       10 s      20 s      30 s      40 s      50 s", "");
    let _ =
        write!(out, "{:<15} {green}▁ to █ admitted{plain}, {red}below refused{plain}: 1 to 15 requests", "");
    out
}

/// A bar for 0 to 15 requests.
fn bar(count: usize) -> char {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    BARS[count.div_ceil(2).min(8)]
}

fn as_json(algorithms: &[Algorithm], bursts: &[Vec<Played>]) -> serde_json::Value {
    let seconds = |span: Span| Seconds(span).to_string().parse::<f64>().unwrap_or_default();
    let rows = algorithms.iter().zip(bursts).map(|(algorithm, burst)| {
        let requests: Vec<_> = burst
            .iter()
            .map(|Played { at, decision, .. }| {
                let outcome = decision.limits().next().expect("the limit applies to every request").outcome();
                json!({
                    "at": seconds(Span::from_millis(*at)),
                    "allowed": decision.allowed(),
                    "limit": outcome.limit,
                    "remaining": outcome.remaining,
                    "retry_after": decision.retry_after().map(seconds),
                    "delay": seconds(decision.delay()),
                })
            })
            .collect();
        json!({ "name": algorithm.name(), "requests": requests })
    });
    json!({ "algorithms": rows.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_shows_every_request_once() {
        for algorithm in Algorithm::ALL {
            let requests = play(algorithm, 10, Duration::from_secs(10), &traffic()).unwrap();
            assert_eq!(requests.len(), 72);
            let drawn = picture(&[algorithm], &[requests], false);
            let first: Vec<&str> = drawn.lines().collect();
            assert!(first[0].starts_with(algorithm.name()) && first[0].contains(" of 72"), "{drawn}");
            assert!(!drawn.contains('\x1b'));
        }
    }

    #[test]
    fn bar_grows_with_the_count() {
        let bars: String = (0..=15).map(bar).collect();
        assert_eq!(bars, " ▁▁▂▂▃▃▄▄▅▅▆▆▇▇█");
    }
}
