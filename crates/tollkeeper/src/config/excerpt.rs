//! Renders lines of a config file for messages: shortened, without control characters or passwords, underlined.
//!
//! The underline has the right width for tabs and wide characters.

use std::ops::Range;

use unicode_width::UnicodeWidthChar;

use super::report::Position;

/// The widest line that is shown, in columns.
const WIDEST: usize = 100;
/// How many columns before the underlined position are shown when a line is shortened.
const BEFORE: usize = 40;
const TAB: &str = "    ";

/// A line with an underlined part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excerpt {
    pub(super) line: String,
    /// The spaces before the underline.
    pub(super) indent: String,
    pub(super) underline: String,
}

/// Line and column of a byte, both from 1; the column counts characters.
pub(super) fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..at.min(text.len())];
    let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    // Bytes that continue a character are not counted.
    let is_first = |byte: &&u8| !matches!(**byte, 0x80..=0xbf);
    (line, 1 + before[start..].iter().filter(is_first).count())
}

/// The first line of `span`, underlined; `None` if the line is blank or `span` is the file as a whole. Text at
/// `hidden` positions is replaced by stars.
pub(super) fn around(text: &str, span: &Range<usize>, hidden: &[Position]) -> Option<Excerpt> {
    // The position of the file as a whole, which has no line to show.
    if span.end == 0 {
        return None;
    }
    let at = floor(text, span.start);
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
    let line = text[start..end].trim_end_matches('\r');
    if line.trim().is_empty() {
        return None;
    }
    // A line may be a megabyte long, so it is shortened before its characters are examined.
    let (at, end) = (at - start, floor(text, span.end.max(at)).saturating_sub(start).min(line.len()));
    let at = at.min(line.len());
    let window_start = line[..at].char_indices().rev().take(WIDEST).last().map_or(at, |(index, _)| index);
    let window_end = line[at..]
        .char_indices()
        .take(WIDEST)
        .last()
        .map_or(at, |(index, char)| at + index + char.len_utf8());
    let hidden = hidden
        .iter()
        .map(|position| position.start.saturating_sub(start)..position.end.saturating_sub(start));
    let stars: Vec<Range<usize>> = secrets(line).into_iter().chain(hidden).collect();
    let cells = line[window_start..window_end].char_indices().map(|(index, char)| {
        let index = window_start + index;
        let shown = if stars.iter().any(|star| star.contains(&index)) { "*".to_owned() } else { cell(char) };
        let width = shown.chars().map(|char| char.width().unwrap_or(0)).sum::<usize>();
        Cell { index, shown, width }
    });
    let cells: Vec<Cell> = cells.collect();
    let left: usize = cells.iter().filter(|cell| cell.index < at).map(|cell| cell.width).sum();
    let total: usize = cells.iter().map(|cell| cell.width).sum();
    let from_start = window_start == 0 && (total <= WIDEST || left + BEFORE / 2 <= WIDEST);
    let cut_left = if from_start { 0 } else { left.saturating_sub(BEFORE) };
    let mut drawn = Excerpt { line: String::new(), indent: String::new(), underline: String::new() };
    if !from_start {
        drawn.line.push('…');
        drawn.indent.push(' ');
    }
    let mut column = 0;
    let mut cut = window_end < line.len();
    for cell in cells {
        column += cell.width;
        if column <= cut_left {
            continue;
        }
        if column > cut_left + WIDEST {
            cut = true;
            break;
        }
        drawn.line.push_str(&cell.shown);
        if cell.index < at {
            drawn.indent.push_str(&" ".repeat(cell.width));
        } else if cell.index < end {
            drawn.underline.push_str(&"^".repeat(cell.width));
        }
    }
    if cut {
        drawn.line.push('…');
    }
    if drawn.underline.is_empty() {
        drawn.underline.push('^');
    }
    let visible = drawn.line.trim_end().len();
    drawn.line.truncate(visible);
    Some(drawn)
}

/// One character of a line as it is shown.
struct Cell {
    index: usize,
    shown: String,
    width: usize,
}

/// A foreign text for use in a message: shortened, without control characters.
pub(super) fn printable(text: &str, longest: usize) -> String {
    let mut shown: String = text.chars().take(longest).map(harmless).collect();
    if text.chars().nth(longest).is_some() {
        shown.push('…');
    }
    shown
}

/// A text of the file in backticks for use in a message: shortened and escaped.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let cut: String = text.chars().take(LONGEST).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    let escape =
        |char: char| if harmless(char) == char { char.to_string() } else { char.escape_debug().to_string() };
    format!("`{}{dots}`", cut.chars().map(escape).collect::<String>())
}

fn cell(char: char) -> String {
    match char {
        '\t' => TAB.to_owned(),
        _ => harmless(char).to_string(),
    }
}

/// Replaces control characters, which a terminal would interpret, and invisible ones, which mislead readers.
fn harmless(char: char) -> char {
    let invisible = matches!(
        char,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    if char.is_control() || invisible { '\u{fffd}' } else { char }
}

/// The credentials in a line: everything between the scheme of a URL and the last `@`. A word that begins with
/// `redis` counts as a URL even if it is mistyped, because it may still hold the password.
fn secrets(line: &str) -> Vec<Range<usize>> {
    let Some(last) = line.rfind('@') else { return bare_passwords(line).collect() };
    let urls = line.match_indices("://").map(|(index, found)| index + found.len());
    let stores = line.match_indices("redis").map(|(index, found)| {
        let rest = &line[index + found.len()..];
        let scheme =
            rest.find(|char: char| !(char.is_ascii_lowercase() || char == '+')).unwrap_or(rest.len());
        let slashes = rest[scheme..].find(|char| !matches!(char, ':' | '/')).unwrap_or(0);
        index + found.len() + scheme + slashes
    });
    urls.chain(stores).filter(|start| *start < last).map(|start| start..last).collect()
}

/// Text after `host:` that is not a port number: a password whose `@` and host are missing.
fn bare_passwords(line: &str) -> impl Iterator<Item = Range<usize>> {
    line.match_indices("://").filter_map(|(index, found)| {
        let mut start = index + found.len();
        let url = line[start..].split([' ', '\t', '"', '\'']).next()?;
        for host in url.split(['/', ',']) {
            let name = host.rfind(']').map_or(0, |bracket| bracket + 1);
            if let Some(colon) = host[name..].find(':').map(|colon| name + colon) {
                let port = &host[colon + 1..];
                if colon == 0 || port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Some(start + colon + 1..line.len());
                }
            }
            start += host.len() + 1;
        }
        None
    })
}

/// The last character boundary at or before this byte.
fn floor(text: &str, at: usize) -> usize {
    text.floor_char_boundary(at.min(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders `text`, with the part between two bars underlined.
    fn drawn(text: &str) -> (String, String) {
        let (before, rest) = text.split_once('|').expect("a bar");
        let (inside, after) = rest.split_once('|').expect("two bars");
        let span = before.len()..before.len() + inside.len();
        let excerpt = around(&format!("{before}{inside}{after}"), &span, &[]).expect("something to see");
        (excerpt.line, excerpt.indent + &excerpt.underline)
    }

    #[test]
    fn underline_matches_the_span() {
        for (text, line, underline) in [
            ("a: |b|\n", "a: b", "   ^"),
            ("x\r\na: |bc| d\r\ny", "a: bc d", "   ^^"),
            ("\ta: |b|", "    a: b", "       ^"),
            ("漢字: |漢| x", "漢字: 漢 x", "      ^^"),
            ("e\u{301}: |b|", "e\u{301}: b", "   ^"),
            ("a: |b\nc|", "a: b", "   ^"),
            ("a:||", "a:", "  ^"),
            ("a: |\u{1b}[31m|", "a: \u{fffd}[31m", "   ^^^^^"),
            ("a: |\u{202e}b|", "a: \u{fffd}b", "   ^^"),
        ] {
            assert_eq!(drawn(text), (line.to_owned(), underline.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn long_lines_are_shortened_around_the_span() {
        for (before, after) in
            [(0, 0), (0, 1_000), (60, 1_000), (1_000, 0), (1_000, 1_000), (100_000, 100_000)]
        {
            let text = format!("{}|HERE|{}", "x".repeat(before), "y".repeat(after));
            let (line, underline) = drawn(&text);
            assert!(line.chars().count() <= WIDEST + 2, "{before} {after}: {line}");
            let at = underline.find('^').expect("underlined");
            let shown: String = line.chars().skip(at).take(4).collect();
            assert_eq!(shown, "HERE", "{before} {after}: {line}");
        }
        let (line, underline) = drawn(&format!("a: |{}|", "z".repeat(5_000)));
        assert!(line.ends_with("z…") && underline.ends_with("^^"), "{line}");
    }

    #[test]
    fn credentials_are_replaced_by_stars() {
        for (line, shown) in [
            ("store: |redis://u:p@h/0|", "store: redis://***@h/0"),
            ("store: |redis://:p@h| # redis://:q@h", "store: redis://*****************@h"),
            ("store: |redis://:pass|", "store: redis://:****"),
            ("store: |rediss+cluster:u:p@h|", "store: rediss+cluster:***@h"),
            ("at: |me@here|", "at: me@here"),
        ] {
            assert_eq!(drawn(line).0, shown, "{line}");
        }
    }

    #[test]
    fn hidden_positions_are_not_shown() {
        let excerpt = around("token: abcdef # x", &(0..5), &[Position::new(7, 13)]).expect("a line");
        assert_eq!(excerpt.line, "token: ****** # x");
    }

    #[test]
    fn positions_count_lines_and_characters_from_one() {
        for (text, at, expected) in
            [("", 0, (1, 1)), ("ab", 1, (1, 2)), ("é=x", 3, (1, 3)), ("a\nb", 2, (2, 1)), ("a\n", 99, (2, 1))]
        {
            assert_eq!(position(text, at), expected, "{text:?} {at}");
        }
    }
}
