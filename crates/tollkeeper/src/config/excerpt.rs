//! Lines of a file as they may be shown: cut to what fits, nothing in them that a terminal would obey,
//! no passwords, and an underline that is right under tabs and wide characters.

use std::ops::Range;

use unicode_width::UnicodeWidthChar;

/// The widest line that is shown, in columns.
const WIDEST: usize = 100;
/// How much of a line is shown before the place in question, when it must be cut.
const BEFORE: usize = 40;
const TAB: &str = "    ";

/// A line with something underlined.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excerpt {
    pub(super) line: String,
    /// The blanks before the underline.
    pub(super) indent: String,
    pub(super) underline: String,
}

/// Line and column of a byte, both from 1; the column counts characters.
pub(super) fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..at.min(text.len())];
    let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    // Bytes that continue a character are not counted; nor is a mark of the byte order, which nobody sees.
    let is_first = |byte: &&u8| !matches!(**byte, 0x80..=0xbf);
    let column = 1 + before[start..].iter().filter(is_first).count();
    (line, column - usize::from(line == 1 && column > 1 && text.starts_with('\u{feff}')))
}

/// The first line of a place with the place underlined; nothing if there is nothing to see.
pub(super) fn around(text: &str, span: &Range<usize>) -> Option<Excerpt> {
    let at = floor(text, span.start);
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
    let line = text[start..end].trim_end_matches('\r');
    if line.trim().is_empty() {
        return None;
    }
    // One character may be many columns, so a line of a megabyte is cut before anything else looks at it.
    let (at, end) = (at - start, floor(text, span.end.max(at)).saturating_sub(start).min(line.len()));
    let at = at.min(line.len());
    let window_start = line[..at].char_indices().rev().take(WIDEST).last().map_or(at, |(index, _)| index);
    let window_end = line[at..]
        .char_indices()
        .take(WIDEST)
        .last()
        .map_or(at, |(index, char)| at + index + char.len_utf8());
    let stars = secrets(line);
    let cells = line[window_start..window_end].char_indices().map(|(index, char)| {
        let index = window_start + index;
        let shown = if stars.iter().any(|star| star.contains(&index)) { "*".to_owned() } else { cell(char) };
        let width = shown.chars().map(|char| char.width().unwrap_or(0)).sum::<usize>();
        Cell { index, shown, width }
    });
    let cells: Vec<Cell> = cells.collect();
    let left: usize = cells.iter().filter(|cell| cell.index < at).map(|cell| cell.width).sum();
    let total: usize = cells.iter().map(|cell| cell.width).sum();
    let cut_left = if window_start == 0 && total <= WIDEST { 0 } else { left.saturating_sub(BEFORE) };
    let cut_left = if window_start == 0 && left + BEFORE / 2 <= WIDEST { 0 } else { cut_left };
    let mut drawn = Excerpt { line: String::new(), indent: String::new(), underline: String::new() };
    if cut_left > 0 || window_start > 0 {
        drawn.line.push('…');
        drawn.indent.push(' ');
    }
    let mut column = 0;
    let mut cut = window_end < line.len();
    for cell in cells {
        column += cell.width;
        if column <= cut_left && cell.width > 0 {
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

/// One character of a line as it is drawn.
struct Cell {
    index: usize,
    shown: String,
    width: usize,
}

/// A text of others inside a message, cut and harmless.
pub(super) fn printable(text: &str, longest: usize) -> String {
    let mut shown: String = text.chars().take(longest).map(harmless).collect();
    if text.chars().nth(longest).is_some() {
        shown.push('…');
    }
    shown
}

/// A text of the file as it is quoted in a message.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let cut: String = text.chars().take(LONGEST).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("`{}{dots}`", cut.escape_debug().to_string().replace("\\\"", "\"").replace("\\'", "'"))
}

fn cell(char: char) -> String {
    match char {
        '\t' => TAB.to_owned(),
        _ => harmless(char).to_string(),
    }
}

/// Itself, unless a terminal would obey it or a reader be misled by it.
fn harmless(char: char) -> char {
    let invisible = matches!(
        char,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    if char.is_control() || invisible { '\u{fffd}' } else { char }
}

/// What stands in a line between the scheme of a URL and its last `@`: who and which password. Any word
/// that begins like the URL of a store counts, because a mistyped URL still holds the password.
fn secrets(line: &str) -> Vec<Range<usize>> {
    let Some(last) = line.rfind('@') else { return Vec::new() };
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

/// The end of the last character that ends at or before this byte.
fn floor(text: &str, at: usize) -> usize {
    text.floor_char_boundary(at.min(text.len()))
}
