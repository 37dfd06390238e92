//! The report as one HTML file with plots. It needs no script to be read; a small one sorts its tables.
//!
//! Everything that comes from a log or a config is escaped, and a content security policy lets nothing run but that
//! script.

use std::fmt::Write as _;

use tollkeeper_core::digest::sha256;

use super::{CAVEATS, Report, number, percent, share, text};
use crate::drawing::{Anchor, Axis, Drawing, escaped};
use crate::simulate::plan::NotSimulated;
use crate::simulate::suggest::Suggestion;
use crate::simulate::tally::{LimitResult, TopKey};
use crate::simulate::time::Utc;
use crate::simulate::timeline::Timeline;

const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");
/// The most columns of a plot over time.
const COLUMNS: usize = 240;
/// The most tables of keys, and the most rows in all of them. These and the following bounds keep the file below
/// 300 KB, whatever the policy is; the JSON has everything.
const KEY_TABLES: usize = 25;
const KEY_ROWS: usize = 180;
/// The longest key that is shown, in characters.
const KEY_CHARS: usize = 120;
/// The most limits of a table or a plot.
const MOST_LIMITS: usize = 80;
/// The most rows of policies side by side.
const AGAINST_ROWS: usize = 180;
/// The most curves.
const CURVES: usize = 20;
const WIDTH: f64 = 900.0;

const ADMITTED: &str = "var(--admitted)";
const REFUSED: &str = "var(--refused)";
const GRID: &str = "var(--grid)";

/// The report as HTML.
pub fn html(report: &Report) -> String {
    let mut page = Page(String::new());
    page.head(report);
    page.summary(report);
    page.limits(&report.result.limits);
    page.not_simulated(&report.not_simulated);
    page.section("Traffic over time", &over_time(&report.result.timeline));
    page.against(report);
    page.algorithms(report);
    page.suggestions(report);
    page.keys(&report.result.limits);
    page.notes(report);
    let _ = write!(page.0, "</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n");
    page.0
}

struct Page(String);

/// A column of a table: its title, and whether it has numbers.
type Column = (&'static str, bool);

impl Page {
    fn add(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn head(&mut self, report: &Report) {
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'",
            base64(&sha256(STYLE.as_bytes())),
            base64(&sha256(SCRIPT.as_bytes()))
        );
        let title = escaped(&format!("Simulation of {}", cut(&report.policy)));
        self.add(&format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>"
        ));
    }

    fn summary(&mut self, report: &Report) {
        if let Some(warning) = report.warning() {
            self.add(&format!("<p class=\"warning\">{}</p>", escaped(&warning)));
        }
        let counts = report.result.requests;
        self.add(&format!(
            "<p><strong>{} of {} requests refused ({}).</strong></p>",
            number(counts.refused),
            number(counts.total()),
            percent(counts.refused, counts.total())
        ));
        let lines = &report.lines;
        let mut sentence = format!(
            "{} lines read, {} used, {} unreadable, {} late.",
            number(lines.read),
            number(lines.used),
            number(lines.unreadable),
            number(lines.late)
        );
        if let Some((from, until)) = report.result.span {
            let _ = write!(sentence, " From {} to {}.", Utc { seconds: from }, Utc { seconds: until });
        }
        if counts.invalid > 0 {
            let _ = write!(sentence, " {} requests would be answered with 400.", number(counts.invalid));
        }
        self.add(&format!("<p class=\"muted\">{sentence}</p>"));
        for checked in &report.fail_if {
            let held = if checked.held { "holds: the command failed" } else { "does not hold" };
            self.add(&format!("<p>--fail-if <code>{}</code> {held}.</p>", escaped(&checked.expr)));
        }
    }

    fn section(&mut self, title: &str, content: &str) {
        if !content.is_empty() {
            self.add(&format!("<h2>{}</h2>\n{content}", escaped(title)));
        }
    }

    fn table(&mut self, columns: &[Column], rows: &[Vec<Cell>]) {
        let class = |is_number: bool| if is_number { " class=\"number\"" } else { "" };
        let mut out = String::from("<div class=\"scroll\" tabindex=\"0\"><table>\n<thead><tr>");
        for (title, is_number) in columns {
            let _ = write!(
                out,
                "<th scope=\"col\"{}><button type=\"button\">{title}</button></th>",
                class(*is_number)
            );
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for row in rows {
            out.push_str("<tr>");
            for (cell, (_, is_number)) in row.iter().zip(columns) {
                let value = cell.value.map_or_else(String::new, |value| format!(" data-value=\"{value}\""));
                let class = if cell.is_key { " class=\"key\"" } else { class(*is_number) };
                let _ = write!(out, "<td{class}{value}>{}</td>", escaped(&cell.text));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody></table></div>");
        self.add(&out);
    }

    fn limits(&mut self, limits: &[LimitResult]) {
        self.add("<h2>Limits</h2>");
        let columns = [
            ("Limit", false),
            ("Mode", false),
            ("Asked", true),
            ("Refused", true),
            ("Share", true),
            ("Refused keys", true),
            ("Longest wait", true),
            ("Worst key", false),
        ];
        let rows: Vec<Vec<Cell>> = limits
            .iter()
            .take(MOST_LIMITS)
            .map(|limit| {
                vec![
                    Cell::text(&limit.name),
                    Cell::text(text::mode(limit.mode)),
                    Cell::count(limit.asked),
                    Cell::count(limit.refused),
                    Cell::of(percent(limit.refused, limit.asked), limit.share()),
                    Cell::of(text::keys(limit), limit.refused_keys.count as f64),
                    Cell::of(text::wait(limit), limit.longest_wait.as_micros() as f64),
                    Cell::key(text::worst(limit).unwrap_or_else(|| "-".to_owned())),
                ]
            })
            .collect();
        self.table(&columns, &rows);
        for (limit, delay) in limits.iter().filter_map(|limit| Some((limit, limit.delay?))) {
            let shown = [delay.p50, delay.p99, delay.longest].map(tollkeeper::Span::from_micros);
            let [p50, p99, longest] = shown.map(|span| span.readable().to_string());
            let name = escaped(&limit.name);
            self.add(&format!(
                "<p>Delays of {name}: half up to {p50}, 99 % up to {p99}, longest {longest}.</p>"
            ));
        }
    }

    fn not_simulated(&mut self, limits: &[NotSimulated]) {
        if limits.is_empty() {
            return;
        }
        self.add("<h2>Not simulated</h2>\n<ul>");
        for limit in limits.iter().take(MOST_LIMITS) {
            self.add(&format!("<li>{}: {}</li>", escaped(&limit.name), escaped(&limit.why)));
        }
        self.add("</ul>");
    }

    fn against(&mut self, report: &Report) {
        if report.against.is_empty() {
            return;
        }
        self.add("<h2>Policies side by side</h2>");
        let columns =
            [("Policy", false), ("Limit", false), ("Asked", true), ("Refused", true), ("Share", true)];
        let mut rows = Vec::new();
        let others = report.against.iter().map(|against| (&against.policy, &against.result));
        for (policy, result) in std::iter::once((&report.policy, &report.result)).chain(others) {
            let counts = result.requests;
            let row = |name: &str, asked: u64, refused: u64| {
                let part = if asked == 0 { 0.0 } else { refused as f64 / asked as f64 };
                let share = Cell::of(percent(refused, asked), part);
                vec![Cell::text(policy), Cell::text(name), Cell::count(asked), Cell::count(refused), share]
            };
            rows.push(row("(requests)", counts.total(), counts.refused));
            let limits = result.limits.iter().take(MOST_LIMITS);
            rows.extend(limits.map(|limit| row(&limit.name, limit.asked, limit.refused)));
        }
        rows.truncate(AGAINST_ROWS);
        self.table(&columns, &rows);
    }

    fn algorithms(&mut self, report: &Report) {
        let bars: Vec<(String, f64)> = report
            .algorithms
            .iter()
            .take(MOST_LIMITS)
            .map(|row| {
                let part = if row.asked == 0 { 0.0 } else { row.refused as f64 / row.asked as f64 };
                (format!("{}: {}", row.name, row.algorithm), part)
            })
            .collect();
        self.section("Refused share by algorithm", &shares(&bars));
    }

    fn suggestions(&mut self, report: &Report) {
        let Some(target) = report.suggest_share else { return };
        self.add(&format!("<h2>Limits that refuse at most {}</h2>", share(target)));
        for suggestion in report.suggest.iter().take(CURVES) {
            self.add(&format!("<p>{}</p>", code_marked(&text::sentence(suggestion, target))));
            self.add(&curve(suggestion, target));
        }
    }

    fn keys(&mut self, limits: &[LimitResult]) {
        let shown = limits.iter().filter(|limit| limit.top.iter().any(|key| key.refused > 0));
        let shown: Vec<&LimitResult> = shown.take(KEY_TABLES).collect();
        let most = KEY_ROWS / shown.len().max(1);
        for limit in shown {
            self.add(&format!("<h2>Keys of {}</h2>", escaped(&limit.name)));
            let refused: Vec<&TopKey> =
                limit.top.iter().filter(|key| key.refused > 0).take(most.max(1)).collect();
            let columns = [
                ("Key", false),
                ("Asked", true),
                ("Refused", true),
                ("Share", true),
                ("First refusal", true),
                ("Last refusal", true),
            ];
            let time = |second: Option<u64>| match second {
                Some(seconds) => Cell::of(Utc { seconds }.to_string(), seconds as f64),
                None => Cell::text("-"),
            };
            let rows: Vec<Vec<Cell>> = refused
                .iter()
                .map(|key| {
                    let part = key.refused as f64 / key.asked.max(1) as f64;
                    vec![
                        Cell::key(text::key(&key.key)),
                        Cell::count(key.asked),
                        Cell::count(key.refused),
                        Cell::of(percent(key.refused, key.asked), part),
                        time(key.refusals.map(|(first, _)| first)),
                        time(key.refusals.map(|(_, last)| last)),
                    ]
                })
                .collect();
            self.table(&columns, &rows);
        }
    }

    fn notes(&mut self, report: &Report) {
        self.add("<h2>What to know</h2>\n<ul>");
        if report.result.limits.len() > MOST_LIMITS {
            let most = format!("This page has the first {MOST_LIMITS} limits; --json has all.");
            self.add(&format!("<li>{most}</li>"));
        }
        for note in report.notes.iter().map(String::as_str).chain(CAVEATS) {
            self.add(&format!("<li>{}</li>", escaped(note)));
        }
        self.add("</ul>");
    }
}

/// A cell of a table, with the number that it is sorted by.
struct Cell {
    text: String,
    value: Option<f64>,
    is_key: bool,
}

impl Cell {
    fn text(text: &str) -> Cell {
        Cell { text: cut(text), value: None, is_key: false }
    }

    fn key(text: String) -> Cell {
        Cell { text: cut(&text), value: None, is_key: true }
    }

    fn count(count: u64) -> Cell {
        Cell::of(number(count), count as f64)
    }

    fn of(text: String, value: f64) -> Cell {
        Cell { text, value: Some(value), is_key: false }
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(KEY_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A sentence with the text between backquotes as code.
fn code_marked(sentence: &str) -> String {
    let mut out = String::new();
    for (index, part) in sentence.split('`').enumerate() {
        let part = escaped(part);
        match index % 2 {
            0 => out.push_str(&part),
            _ => {
                let _ = write!(out, "<code>{part}</code>");
            }
        }
    }
    out
}

/// Requests and refusals over time, as columns.
fn over_time(timeline: &Timeline) -> String {
    let intervals: Vec<(u64, u64, u64)> = timeline.intervals().collect();
    let (Some(first), Some(last)) = (intervals.first(), intervals.last()) else { return String::new() };
    let (from, until) = (first.0, last.0 + timeline.width());
    let columns = COLUMNS.min(intervals.len());
    let mut sums = vec![(0, 0); columns];
    for (time, asked, refused) in &intervals {
        let at = usize::try_from((time - from) * columns as u64 / (until - from)).unwrap_or(0);
        let (sum, refusals) = &mut sums[at.min(columns - 1)];
        *sum += asked;
        *refusals += refused;
    }
    let most = sums.iter().map(|(asked, _)| *asked).max().unwrap_or(1).max(1);
    let title =
        format!("Requests over time; at most {} in one column, of which some were refused", number(most));
    let mut drawing = Drawing::inline(WIDTH, 260.0, &title);
    let level = Axis { from: (0.0, 220.0), to: (most as f64, 30.0) };
    let (left, right) = (70.0, WIDTH - 10.0);
    for step in [0.0, 0.5, 1.0] {
        let y = level.pixel(most as f64 * step);
        drawing.line((left, y), (right, y), GRID);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most the highest count"
        )]
        let label = number((most as f64 * step) as u64);
        drawing.text((left - 8.0, y + 4.0), Anchor::End, "label", &label);
    }
    let width = (right - left) / columns as f64;
    for (index, (asked, refused)) in sums.iter().enumerate() {
        let x = left + width * index as f64;
        let bar = (width * 0.9).max(0.6);
        for (count, colour) in [(*asked, ADMITTED), (*refused, REFUSED)] {
            if count > 0 {
                let y = level.pixel(count as f64);
                drawing.rectangle((x, y), (bar, level.from.1 - y), colour);
            }
        }
    }
    drawing.text((left, 244.0), Anchor::Start, "label", &Utc { seconds: from }.to_string());
    drawing.text((right, 244.0), Anchor::End, "label", &Utc { seconds: until }.to_string());
    drawing.rectangle((left, 6.0), (12.0, 12.0), ADMITTED);
    drawing.text((left + 18.0, 16.0), Anchor::Start, "label", "requests");
    drawing.rectangle((left + 100.0, 6.0), (12.0, 12.0), REFUSED);
    drawing.text((left + 118.0, 16.0), Anchor::Start, "label", "refused");
    drawing.done()
}

/// Shares as bars, each with its name.
fn shares(bars: &[(String, f64)]) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let most = bars.iter().map(|(_, part)| *part).fold(0.0, f64::max).max(1e-9);
    let mut drawing =
        Drawing::inline(WIDTH, 26.0 * bars.len() as f64 + 8.0, "Refused share by limit and algorithm");
    let axis = Axis { from: (0.0, 330.0), to: (most, WIDTH - 90.0) };
    for (index, (name, part)) in bars.iter().enumerate() {
        let y = 26.0 * index as f64 + 4.0;
        drawing.text((320.0, y + 14.0), Anchor::End, "label", &cut(name));
        let end = axis.pixel(*part);
        drawing.rectangle((axis.from.1, y), ((end - axis.from.1).max(0.5), 18.0), REFUSED);
        drawing.text((end + 6.0, y + 14.0), Anchor::Start, "label", &share(*part));
    }
    drawing.done()
}

/// The refused share of every count that was tried. The counts have a logarithmic scale.
fn curve(suggestion: &Suggestion, target: f64) -> String {
    let tried = &suggestion.tried;
    let (Some(first), Some(last)) = (tried.first(), tried.last()) else { return String::new() };
    if tried.len() < 2 {
        return String::new();
    }
    let title =
        format!("Refused share of {} by its count, from {} to {}", suggestion.name, first.count, last.count);
    let mut drawing = Drawing::inline(WIDTH, 260.0, &cut(&title));
    let log = |count: u64| (count as f64).log2();
    let most = tried.iter().map(|tried| tried.share).fold(target, f64::max).max(1e-9);
    let level = Axis { from: (0.0, 215.0), to: (most, 20.0) };
    let counts = Axis { from: (log(first.count), 80.0), to: (log(last.count), WIDTH - 20.0) };
    for step in [0.0, 0.5, 1.0] {
        let y = level.pixel(most * step);
        drawing.line((80.0, y), (WIDTH - 20.0, y), GRID);
        drawing.text((72.0, y + 4.0), Anchor::End, "label", &share(most * step));
    }
    let points: Vec<(f64, f64)> =
        tried.iter().map(|tried| (counts.pixel(log(tried.count)), level.pixel(tried.share))).collect();
    drawing.polyline(&points, ADMITTED);
    let y = level.pixel(target);
    drawing.line((80.0, y), (WIDTH - 20.0, y), REFUSED);
    for count in [first.count, suggestion.written, last.count] {
        let x = counts.pixel(log(count));
        drawing.line((x, 215.0), (x, 220.0), "var(--muted)");
        drawing.text((x, 234.0), Anchor::Middle, "label", &number(count));
    }
    if let Some(answer) = &suggestion.answer {
        let point = (counts.pixel(log(answer.at.count)), level.pixel(answer.at.share));
        drawing.line((point.0, 215.0), (point.0, point.1), REFUSED);
        drawing.rectangle((point.0 - 4.0, point.1 - 4.0), (8.0, 8.0), REFUSED);
        drawing.text((point.0, 252.0), Anchor::Middle, "name", &number(answer.at.count));
    }
    drawing.done()
}

/// Base64 with padding, for the hashes of a content security policy.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let byte = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for index in 0..4 {
            let digit = usize::try_from(bits >> (18 - 6 * index) & 63).unwrap_or(0);
            out.push(if index <= three.len() { char::from(DIGITS[digit]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_has_its_padding() {
        assert_eq!(
            ["", "f", "fo", "foo", "foobar"].map(|text| base64(text.as_bytes())),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYmFy"]
        );
    }

    #[test]
    fn code_is_marked_and_escaped() {
        assert_eq!(code_marked("a: `rate: <5>` b"), "a: <code>rate: &lt;5&gt;</code> b");
    }
}
