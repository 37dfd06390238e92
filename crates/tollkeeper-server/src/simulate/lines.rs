//! Splits blocks of bytes into lines, and keeps account of those that cannot be read.

use std::collections::BTreeMap;

use super::logged::Unreadable;

/// The longest line, in bytes.
pub const LONGEST: usize = 64 << 10;
/// How many lines of each reason are shown.
const SHOWN: usize = 3;
/// How much of a line is shown, in characters.
const SHOWN_CHARS: usize = 200;

/// Splits blocks into lines. A line that is too long is reported once and never stored.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    /// Whether the current line is too long already.
    is_cut: bool,
}

/// A line without its newline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line<'b> {
    /// A whole line.
    Whole(&'b [u8]),
    /// The beginning of a line that is too long.
    Cut(&'b [u8]),
}

impl Lines {
    /// Splits a block; a line that ends in a later block is kept until then.
    pub fn split(&mut self, mut block: &[u8], mut each: impl FnMut(Line<'_>)) {
        while let Some(newline) = memchr::memchr(b'\n', block) {
            let line = &block[..newline];
            block = &block[newline + 1..];
            if self.partial.is_empty() && !self.is_cut {
                each(whole_or_cut(line));
                continue;
            }
            self.append(line);
            self.end(&mut each);
        }
        self.append(block);
    }

    /// The last line, if it has no newline.
    pub fn finish(&mut self, mut each: impl FnMut(Line<'_>)) {
        if !self.partial.is_empty() || self.is_cut {
            self.end(&mut each);
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = (LONGEST + 1).saturating_sub(self.partial.len());
        self.is_cut |= bytes.len() > room;
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn end(&mut self, each: &mut impl FnMut(Line<'_>)) {
        each(match self.is_cut {
            true => Line::Cut(&self.partial),
            false => whole_or_cut(&self.partial),
        });
        self.partial.clear();
        self.is_cut = false;
    }
}

fn whole_or_cut(line: &[u8]) -> Line<'_> {
    if line.len() > LONGEST { Line::Cut(line) } else { Line::Whole(line) }
}

/// The lines of a log that could not be read, by reason.
#[derive(Clone, Debug, Default)]
pub struct UnreadableLines {
    reasons: BTreeMap<Unreadable, Vec<Example>>,
    counts: BTreeMap<Unreadable, u64>,
}

/// A line that is shown.
#[derive(Clone, Debug)]
pub struct Example {
    /// The file and the number of the line: `access.log:12`.
    pub place: String,
    /// Its text, shortened and escaped.
    pub text: String,
}

impl UnreadableLines {
    /// Counts a line.
    pub fn add(&mut self, reason: Unreadable, line: &[u8], place: impl FnOnce() -> String) {
        *self.counts.entry(reason).or_default() += 1;
        let examples = self.reasons.entry(reason).or_default();
        if examples.len() < SHOWN {
            examples.push(Example { place: place(), text: shown(line) });
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Each reason with its count and its first lines.
    pub fn reasons(&self) -> impl Iterator<Item = (Unreadable, u64, &[Example])> {
        self.counts.iter().map(|(reason, count)| (*reason, *count, self.reasons[reason].as_slice()))
    }
}

/// A line as it may be shown: escaped, at most 200 characters, without query strings.
pub fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(8 * SHOWN_CHARS)]);
    let mut out = String::new();
    let mut in_query = false;
    let mut chars = 0;
    for char in text.chars() {
        if in_query && !matches!(char, ' ' | '"' | '\'' | ',') {
            continue;
        }
        in_query = char == '?';
        if chars == SHOWN_CHARS {
            out.push('…');
            break;
        }
        chars += 1;
        if in_query {
            out.push_str("?…");
        } else if char.is_control() || is_invisible(char) {
            out.extend(char.escape_default());
        } else {
            out.push(char);
        }
    }
    out
}

/// Whether a character changes the direction of text or is not visible.
fn is_invisible(char: char) -> bool {
    matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(blocks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        let mut each = |line: Line<'_>| {
            out.push(match line {
                Line::Whole(line) => String::from_utf8_lossy(line).into_owned(),
                Line::Cut(line) => format!("cut {}", line.len()),
            });
        };
        blocks.iter().for_each(|block| lines.split(block, &mut each));
        lines.finish(&mut each);
        out
    }

    #[test]
    fn blocks_are_split_anywhere() {
        let text = b"one\ntwo\n\nthree";
        let expected = ["one", "two", "", "three"];
        assert_eq!(split(&[text]), expected);
        for at in 0..text.len() {
            assert_eq!(split(&[&text[..at], &text[at..]]), expected, "{at}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(split(&bytes), expected);
    }

    #[test]
    fn long_line_is_cut_and_not_stored() {
        let long = vec![b'x'; 10_000_000];
        let blocks: Vec<&[u8]> = long.chunks(100_000).chain([&b"\nshort\n"[..]]).collect();
        assert_eq!(split(&blocks), [format!("cut {}", LONGEST + 1), "short".to_owned()]);
        let fits = vec![b'x'; LONGEST];
        assert_eq!(split(&[&fits, b"\n"])[0].len(), LONGEST);
        let too_long = vec![b'x'; LONGEST + 1];
        assert_eq!(split(&[&too_long])[0], format!("cut {}", LONGEST + 1));
    }

    #[test]
    fn shown_lines_hide_queries_and_control_characters() {
        let line = b"GET /a?token=secret HTTP/1.1 \"http://x/?q=secret\" \x1b[31m\x00\xff\xe2\x80\xae end";
        let text = shown(line);
        assert!(!text.contains("secret") && !text.contains('\u{1b}'), "{text}");
        assert_eq!(text, "GET /a?… HTTP/1.1 \"http://x/?…\" \\u{1b}[31m\\u{0}\u{fffd}\\u{202e} end");
        assert_eq!(shown(&[b'x'; 1_000]).chars().count(), SHOWN_CHARS + 1);
    }
}
