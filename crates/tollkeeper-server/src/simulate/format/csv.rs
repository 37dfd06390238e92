//! Comma-separated values with a header, quoted as in RFC 4180. Values contain no newlines.

use super::{Headers, Mapping, Says};
use crate::simulate::logged::{Context, Logged, Role, Unreadable};

/// A CSV format. Its columns are known when its header has been read.
#[derive(Clone, Debug)]
pub struct Csv {
    roles: Vec<(String, Role)>,
    /// The header, and the roles of each column.
    header: Option<(Vec<u8>, Vec<Vec<Role>>)>,
    scratch: Vec<u8>,
}

impl Csv {
    pub(super) fn new(mapping: &Mapping) -> Result<Csv, String> {
        if mapping.time.is_none() {
            return Err("--format csv needs --time COLUMN: which column is the time?".to_owned());
        }
        let roles = mapping.roles().map(|(column, role)| (column.to_owned(), role)).collect();
        Ok(Csv { roles, header: None, scratch: Vec::new() })
    }

    pub(super) fn says(&self, header: &[u8], facts: &[String]) -> Result<Says, String> {
        let columns = columns(header).ok_or("the header is not a line of comma-separated values")?;
        if let Some((missing, _)) = self.roles.iter().find(|(column, _)| !columns.contains(column)) {
            return Err(format!("the header has no column `{missing}` (it has {})", columns.join(", ")));
        }
        Ok(Says::of(self.roles.iter().map(|(_, role)| role), Headers::These(Vec::new()), facts))
    }

    /// Reads a line; false if it is the header, which every file may have.
    pub(super) fn read(
        &mut self,
        line: &[u8],
        logged: &mut Logged,
        context: &Context,
    ) -> Result<bool, Unreadable> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some((header, roles)) = &self.header else {
            let columns = columns(line).ok_or(Unreadable::Shape)?;
            let of_column = |column: &String| {
                let roles = self.roles.iter().filter(|(name, _)| name == column);
                roles.map(|(_, role)| role.clone()).collect()
            };
            self.header = Some((line.to_vec(), columns.iter().map(of_column).collect()));
            return Ok(false);
        };
        if line == header.as_slice() {
            return Ok(false);
        }
        let mut rest = Some(line);
        for roles in roles {
            let (value, after) =
                value(rest.ok_or(Unreadable::Shape)?, &mut self.scratch).ok_or(Unreadable::Shape)?;
            rest = after;
            if !value.is_empty() {
                for role in roles {
                    logged.set(role, value, context)?;
                }
            }
        }
        if rest.is_some() { Err(Unreadable::Shape) } else { Ok(true) }
    }
}

fn columns(line: &[u8]) -> Option<Vec<String>> {
    let (mut rest, mut names, mut scratch) =
        (Some(line.strip_suffix(b"\r").unwrap_or(line)), Vec::new(), Vec::new());
    while let Some(line) = rest {
        let (name, after) = value(line, &mut scratch)?;
        names.push(String::from_utf8_lossy(name).into_owned());
        rest = after;
    }
    Some(names)
}

/// The first value, and the rest after its comma; `None` if its quotes are unbalanced.
fn value<'l, 's>(line: &'l [u8], scratch: &'s mut Vec<u8>) -> Option<(&'s [u8], Option<&'l [u8]>)>
where
    'l: 's,
{
    let Some(quoted) = line.strip_prefix(b"\"") else {
        return Some(match memchr::memchr(b',', line) {
            Some(comma) => (&line[..comma], Some(&line[comma + 1..])),
            None => (line, None),
        });
    };
    scratch.clear();
    let mut rest = quoted;
    loop {
        let quote = memchr::memchr(b'"', rest)?;
        scratch.extend_from_slice(&rest[..quote]);
        rest = &rest[quote + 1..];
        match rest.first() {
            // Two quotes are one.
            Some(b'"') => scratch.push(b'"'),
            Some(b',') => return Some((scratch, Some(&rest[1..]))),
            None => return Some((scratch, None)),
            Some(_) => return None,
        }
        rest = &rest[1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> Vec<Result<String, Unreadable>> {
        let fields = vec![("user".to_owned(), "who".to_owned())];
        let mapping = Mapping { fields, time: Some("at".to_owned()), ..Mapping::default() };
        let context = Context { latest: u64::MAX, facts: mapping.facts(), ..Context::default() };
        let mut csv = Csv::new(&mapping).expect("a time");
        let mut read = |line: &&str| {
            let mut logged = Logged::default();
            if !csv.read(line.as_bytes(), &mut logged, &context)? {
                return Ok("header".to_owned());
            }
            let stamp = logged.finish(&context)?;
            let user = logged.parts().map(|(_, bytes)| String::from_utf8_lossy(bytes).into_owned()).next();
            Ok(format!("{} {}", stamp.micros, user.unwrap_or_default()))
        };
        lines.iter().map(&mut read).collect()
    }

    #[test]
    fn quotes_are_read_as_in_rfc_4180() {
        let ok = |text: &str| Ok(text.to_owned());
        let lines = read(&["at,who,x", "1,alice,", "2,\"b,o\"\"b\",y\r", "3,,\"\"", "at,who,x", "4,\"\",z"]);
        let expected = [
            ok("header"),
            ok("1000000 alice"),
            ok("2000000 b,o\"b"),
            ok("3000000 "),
            ok("header"),
            ok("4000000 "),
        ];
        assert_eq!(lines, expected);
        let wrong = read(&["at,who,x", "1,alice", "1,alice,x,y", "1,\"alice,x", "1,\"a\"b,x", "1,a\"b,x"]);
        let shape = Err(Unreadable::Shape);
        assert_eq!(wrong[1..], [shape.clone(), shape.clone(), shape.clone(), shape, ok("1000000 a\"b")]);
    }

    #[test]
    fn missing_column_is_named() {
        let fields = vec![("user".to_owned(), "whom".to_owned())];
        let mapping = Mapping { fields, time: Some("at".to_owned()), ..Mapping::default() };
        let error =
            Csv::new(&mapping).unwrap().says(b"at,who", &mapping.facts()).expect_err("no such column");
        assert_eq!(error, "the header has no column `whom` (it has at, who)");
    }
}
