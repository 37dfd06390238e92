//! Recognises the format of a log by its first lines.

use std::fmt;

use super::{Format, FormatName, Mapping};
use crate::simulate::logged::{Context, Logged};

/// The formats that are recognised. The others have no lines of their own.
const KNOWN: [FormatName; 6] = [
    FormatName::Combined,
    FormatName::Common,
    FormatName::Caddy,
    FormatName::Traefik,
    FormatName::Envoy,
    FormatName::Tollkeeper,
];

/// No format, or more than one, has lines like these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undetected {
    /// The formats that have.
    pub formats: Vec<FormatName>,
    /// The first line.
    pub line: Vec<u8>,
}

impl fmt::Display for Undetected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = super::super::lines::shown(&self.line);
        match self.formats.as_slice() {
            [] => write!(
                f,
                "no known format has lines such as\n  {line}\npass --format: {}",
                Suggestion(&self.line)
            ),
            formats => {
                let names: Vec<String> = formats.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "several formats have lines such as\n  {line}\npass --format {}",
                    names.join(" or --format ")
                )
            }
        }
    }
}

/// The options for a log with this first line.
struct Suggestion<'l>(&'l [u8]);

impl fmt::Display for Suggestion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.first() {
            Some(b'{') => "for JSON, --format json --time FIELD --fact ip=FIELD --fact path=FIELD",
            _ if self.0.contains(&b',') && !self.0.contains(&b'"') => {
                "for comma-separated values with a header, --format csv --time COLUMN --fact ip=COLUMN"
            }
            _ => "for nginx, the text of its log_format in quotes: --format '$remote_addr - [$time_local] …'",
        })
    }
}

/// The format that more than half of the lines have.
pub fn detect(lines: &[Vec<u8>], mapping: &Mapping, context: &Context) -> Result<FormatName, Undetected> {
    // Where facts are is of no interest yet: a field that the format does not have is reported later.
    let mapping = Mapping { fields: Vec::new(), ..mapping.clone() };
    let context = Context { facts: mapping.facts(), ..context.clone() };
    let mut logged = Logged::default();
    let mut matches = |name: &FormatName| {
        let Ok(mut format) = Format::new(name, &mapping) else { return false };
        let read = lines.iter().filter(|line| {
            logged.clear();
            format.read(line, &mut logged, &context).is_ok() && logged.finish(&context).is_ok()
        });
        2 * read.count() > lines.len()
    };
    let formats: Vec<FormatName> = KNOWN.into_iter().filter(&mut matches).collect();
    match <[FormatName; 1]>::try_from(formats) {
        Ok([format]) => Ok(format),
        Err(formats) => Err(Undetected { formats, line: lines.first().cloned().unwrap_or_default() }),
    }
}
