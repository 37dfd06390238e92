//! The report as text: tables, then the timeline, then what to know about the numbers.

use std::fmt::Write as _;

use tollkeeper::{Mode, Span};

use super::{CAVEATS, Report, number, percent, share};
use crate::command::table;
use crate::simulate::plan::NotSimulated;
use crate::simulate::suggest::{Suggestion, Tried};
use crate::simulate::tally::LimitResult;
use crate::simulate::time::Utc;
use crate::simulate::timeline::Timeline;

/// The width of a timeline, in characters.
const COLUMNS: usize = 60;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The report as text, without the final newline.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    if let Some(warning) = report.warning() {
        line(&mut out, &format!("{warning}\n"));
    }
    let lines = &report.lines;
    let counts =
        [(lines.read, "read"), (lines.used, "used"), (lines.unreadable, "unreadable"), (lines.late, "late")];
    let counts = counts.map(|(count, what)| format!("{} {what}", number(count)));
    line(&mut out, &format!("lines:    {}", counts.join(", ")));
    if let Some((from, until)) = report.result.span {
        line(&mut out, &format!("time:     {} to {}", Utc { seconds: from }, Utc { seconds: until }));
    }
    line(&mut out, &format!("requests: {}", verdicts(report)));
    unreadable(&mut out, report);
    line(&mut out, "");
    line(&mut out, &limits(&report.result.limits));
    for limit in &report.result.limits {
        if let Some(delay) = limit.delay {
            let shown = [delay.p50, delay.p99, delay.longest].map(Span::from_micros);
            let [p50, p99, longest] = shown.map(|span| span.readable().to_string());
            line(
                &mut out,
                &format!("delays of {}: half up to {p50}, 99 % up to {p99}, longest {longest}", limit.name),
            );
        }
    }
    not_simulated(&mut out, &report.not_simulated);
    against(&mut out, report);
    algorithms(&mut out, report);
    suggestions(&mut out, report);
    timelines(&mut out, report);
    for checked in &report.fail_if {
        let held = if checked.held { "holds: failed" } else { "does not hold" };
        line(&mut out, &format!("--fail-if '{}': {held} ({})", checked.expr, rounded(checked.value)));
    }
    line(&mut out, "");
    for note in report.notes.iter().map(String::as_str).chain(CAVEATS) {
        line(&mut out, &format!("- {note}"));
    }
    out.truncate(out.trim_end().len());
    out
}

fn line(out: &mut String, line: &str) {
    out.push_str(line);
    out.push('\n');
}

fn rounded(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn verdicts(report: &Report) -> String {
    let counts = report.result.requests;
    let mut text = format!(
        "{} allowed, {} refused ({})",
        number(counts.allowed),
        number(counts.refused),
        percent(counts.refused, counts.total())
    );
    if counts.invalid > 0 {
        write!(text, ", {} invalid: the middleware answers 400", number(counts.invalid)).expect("a string");
    }
    text
}

fn unreadable(out: &mut String, report: &Report) {
    for (reason, count, examples) in report.unreadable.reasons() {
        line(out, &format!("unreadable: {} ({})", reason.reason(), number(count)));
        for example in examples {
            line(out, &format!("  {}: {}", example.place, example.text));
        }
    }
}

/// A key for a terminal.
pub(super) fn key(values: &[Option<String>]) -> String {
    if values.is_empty() {
        return "(all)".to_owned();
    }
    let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").escape_debug().to_string();
    let joined = values.iter().map(shown).collect::<Vec<_>>().join(" ");
    match joined.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &joined[..end]),
        None => joined,
    }
}

pub(super) fn mode(mode: Mode) -> &'static str {
    mode.name()
}

/// The longest wait that a limit reported.
pub(super) fn wait(limit: &LimitResult) -> String {
    match (limit.refused, limit.refused_for_good) {
        (0, _) => "-".to_owned(),
        (_, true) => "never".to_owned(),
        // Rounded up to a millisecond.
        _ => Span::from_millis(limit.longest_wait.as_micros().div_ceil(1_000)).readable().to_string(),
    }
}

/// Keys out of all keys; an estimate is marked.
pub(super) fn keys(limit: &LimitResult) -> String {
    let about = if limit.keys.is_exact && limit.refused_keys.is_exact { "" } else { "≈ " };
    format!("{about}{} of {}", number(limit.refused_keys.count), number(limit.keys.count))
}

pub(super) fn worst(limit: &LimitResult) -> Option<String> {
    let worst = limit.top.first().filter(|top| top.refused > 0)?;
    Some(format!("{} ({})", key(&worst.key), number(worst.refused)))
}

fn limits(limits: &[LimitResult]) -> String {
    let mut table =
        table::with(&["LIMIT", "MODE", "ASKED", "REFUSED", "%", "REFUSED KEYS", "LONGEST WAIT", "WORST KEY"]);
    for limit in limits {
        table.add_row([
            table::cell(&limit.name, None),
            table::cell(mode(limit.mode), None),
            table::cell(number(limit.asked), None),
            table::cell(number(limit.refused), (limit.refused > 0).then_some(false)),
            table::cell(percent(limit.refused, limit.asked), None),
            table::cell(keys(limit), None),
            table::cell(wait(limit), None),
            table::cell(worst(limit).unwrap_or_else(|| "-".to_owned()), None),
        ]);
    }
    table.trim_fmt()
}

fn not_simulated(out: &mut String, limits: &[NotSimulated]) {
    if !limits.is_empty() {
        line(out, "\nnot simulated:");
    }
    for limit in limits {
        line(out, &format!("  {}: {}", limit.name, limit.why));
    }
}

fn against(out: &mut String, report: &Report) {
    if report.against.is_empty() {
        return;
    }
    let mut table = table::with(&["POLICY", "LIMIT", "ASKED", "REFUSED", "%", "REFUSED KEYS"]);
    let own = (&report.policy, &report.result);
    let others = report.against.iter().map(|against| (&against.policy, &against.result));
    for (policy, result) in std::iter::once(own).chain(others) {
        let counts = result.requests;
        let total = ["(requests)".to_owned(), number(counts.total()), number(counts.refused)];
        let [name, asked, refused] = total;
        let share = percent(counts.refused, counts.total());
        table.add_row([policy.escape_debug().to_string(), name, asked, refused, share, "-".to_owned()]);
        for limit in &result.limits {
            table.add_row([
                String::new(),
                limit.name.clone(),
                number(limit.asked),
                number(limit.refused),
                percent(limit.refused, limit.asked),
                keys(limit),
            ]);
        }
    }
    line(out, &format!("\n{}", table.trim_fmt()));
    for against in report.against.iter().filter(|against| !against.not_simulated.is_empty()) {
        line(out, &format!("\n{}:", against.policy.escape_debug()));
        not_simulated(out, &against.not_simulated);
    }
}

fn algorithms(out: &mut String, report: &Report) {
    if report.algorithms.is_empty() {
        return;
    }
    let mut table = table::with(&["LIMIT", "ALGORITHM", "ASKED", "REFUSED", "%"]);
    for row in &report.algorithms {
        table.add_row([
            row.name.clone(),
            row.algorithm.name().to_owned(),
            number(row.asked),
            number(row.refused),
            percent(row.refused, row.asked),
        ]);
    }
    line(out, &format!("\n{}", table.trim_fmt()));
}

fn suggestions(out: &mut String, report: &Report) {
    let Some(target) = report.suggest_share else { return };
    line(out, "");
    for suggestion in &report.suggest {
        line(out, &sentence(suggestion, target));
        if !suggestion.is_monotone {
            let mut table = table::with(&["COUNT", "REFUSED", "REFUSED KEYS"]);
            for Tried { count, share: refused, keys } in &suggestion.tried {
                table.add_row([number(*count), share(*refused), number(*keys)]);
            }
            line(out, &table.trim_fmt());
        }
    }
}

/// What is suggested for a limit.
pub(super) fn sentence(suggestion: &Suggestion, target: f64) -> String {
    let Suggestion { name, written, answer, is_monotone, tried } = suggestion;
    let Some(answer) = answer else {
        let most = tried.last().map_or(0, |tried| tried.count);
        return match is_monotone {
            true => format!("{name}: even {} refuses more than {}", number(most), share(target)),
            false => format!("{name}: a higher limit sometimes refuses more, so there is no single answer:"),
        };
    };
    let Tried { share: refused, keys, .. } = answer.at;
    let below = answer.below.map_or_else(String::new, |below| {
        format!("; {} would refuse {}", number(below.count), share(below.share))
    });
    format!(
        "{name}: `{}` refuses {} and {} key{} (now {}{below})",
        answer.line(),
        share(refused),
        number(keys),
        if keys == 1 { "" } else { "s" },
        number(*written)
    )
}

fn timelines(out: &mut String, report: &Report) {
    let all = &report.result.timeline;
    if all.intervals().len() < 2 {
        return;
    }
    let names = report.result.limits.iter().map(|limit| limit.name.chars().count());
    let width = names.chain(["requests".len()]).max().unwrap_or(0);
    line(out, "");
    let (from, until) = (all.intervals().next(), all.intervals().last());
    let (from, until) =
        (from.map_or(0, |interval| interval.0), until.map_or(0, |interval| interval.0 + all.width()));
    let mut row = |name: &str, what: &str, timeline: &Timeline, pick: fn((u64, u64, u64)) -> u64| {
        let columns = columns(timeline, from, until, pick);
        let most = columns.iter().max().copied().unwrap_or(0);
        if most > 0 {
            line(out, &format!("{name:width$}  {what:8}{}  most {}", sparkline(&columns), number(most)));
        }
    };
    row("requests", "", all, |(_, asked, _)| asked);
    for limit in &report.result.limits {
        row(&limit.name, "refused", &limit.timeline, |(_, _, refused)| refused);
    }
}

/// Sums of a timeline in equal parts of the time.
fn columns(timeline: &Timeline, from: u64, until: u64, pick: fn((u64, u64, u64)) -> u64) -> Vec<u64> {
    let span = (until - from).max(1);
    let columns = COLUMNS.min(usize::try_from(span).unwrap_or(COLUMNS));
    let mut sums = vec![0; columns];
    for interval in timeline.intervals() {
        let at = interval.0.saturating_sub(from) * columns as u64 / span;
        sums[usize::try_from(at).unwrap_or(0).min(columns - 1)] += pick(interval);
    }
    sums
}

fn sparkline(columns: &[u64]) -> String {
    let most = columns.iter().max().copied().unwrap_or(0).max(1);
    let bar = |count: &u64| match *count {
        0 => ' ',
        count => BARS[usize::try_from((count * 8).div_ceil(most) - 1).unwrap_or(7).min(7)],
    };
    columns.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparkline_shows_every_count_that_is_not_zero() {
        assert_eq!(sparkline(&[0, 1, 50, 100]), " ▁▄█");
        assert_eq!(sparkline(&[0, 0]), "  ");
    }

    #[test]
    fn keys_cannot_write_to_the_terminal() {
        assert_eq!(key(&[Some("\u{1b}[31m\n".to_owned()), None]), "\\u{1b}[31m\\n -");
        assert_eq!(key(&[]), "(all)");
        assert_eq!(key(&[Some("x".repeat(100))]).chars().count(), 61);
    }
}
