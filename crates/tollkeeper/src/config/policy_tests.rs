//! Reads files of policy tests, with the reader of config files: the same formats, variables and messages.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use tollkeeper_core::Span;

use super::document::{MapEntry, Node, Value};
use super::excerpt::{self, quoted};
use super::fields::{Fields, Located, Scope};
use super::report::{Position, Problems};
use super::suggest::nearest;
use super::units::{self, InvalidValue};
use super::{Config, Format, ReadError, Report, content, document, expand, key_table, raw, with_report};

/// A file of policy tests.
#[derive(Clone, Debug)]
pub struct TestFile {
    /// What is tested.
    pub policy: TestPolicy,
    /// When each test starts, as it is written.
    pub start: Option<Placed<String>>,
    /// The tests.
    pub tests: Vec<PolicyTest>,
}

/// What a file of policy tests tests.
#[derive(Clone, Debug)]
pub enum TestPolicy {
    /// This config file.
    File(PathBuf),
    /// The limits in the test file.
    Inline(Box<Config>),
}

/// A value and where it is in its file; lines and columns count from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// The value.
    pub value: T,
    /// Its line.
    pub line: usize,
    /// Its column.
    pub column: usize,
}

/// A test of a policy.
#[derive(Clone, Debug)]
pub struct PolicyTest {
    /// What it shows.
    pub name: Placed<String>,
    /// Its rows.
    pub rows: Vec<TestRow>,
}

/// A request of a test, and what is expected of it.
#[derive(Clone, Debug)]
pub struct TestRow {
    /// The time since the start of the test.
    pub at: Placed<Span>,
    /// The facts or the HTTP request.
    pub input: RowInput,
    /// What it costs; `None` if the row does not say so.
    pub cost: Option<u64>,
    /// How often it is repeated.
    pub times: u64,
    /// The time between repetitions.
    pub every: Span,
    /// The status of the response.
    pub status: Option<u16>,
    /// What is asked.
    pub verb: TestVerb,
    /// The name of the slot or charge that it gets.
    pub name: Option<String>,
    /// The name of the slot or charge that it is about.
    pub of: Option<Placed<String>>,
    /// The result of each repetition.
    pub expect: Placed<Expect>,
    /// The binding limit.
    pub by: Option<Placed<String>>,
    /// The time until a retry can pass.
    pub retry_after: Option<Placed<Span>>,
    /// How long it is held.
    pub delay: Option<Placed<Span>>,
    /// What is left of limits.
    pub remaining: Vec<Placed<(String, u64)>>,
    /// Exactly the limits that apply.
    pub limits: Option<Placed<Vec<String>>>,
    /// Exactly the shadow limits that would refuse.
    pub would_refuse: Option<Placed<Vec<String>>>,
    /// Rate-limit headers of the response.
    pub headers: Vec<Placed<(String, String)>>,
}

/// What is known of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowInput {
    /// Its facts.
    Facts(Vec<(String, String)>),
    /// The request itself.
    Request(TestRequest),
}

/// An HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestRequest {
    /// Method and target: `POST /login`.
    pub line: String,
    /// Its headers.
    pub headers: Vec<(String, String)>,
    /// Its body.
    pub body: Option<String>,
    /// The address that it comes from.
    pub peer: std::net::IpAddr,
}

/// What a row asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TestVerb {
    /// Decide and charge.
    Check,
    /// Decide.
    Peek,
    /// Take a slot.
    Acquire,
    /// Give a slot back.
    Release,
    /// Charge an estimate that can be settled for this long.
    Reserve(Span),
    /// Correct a charge to its actual cost.
    Settle,
    /// Give a charge back.
    Refund,
}

/// What is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expect {
    /// The request passes; a release, settlement or refund has an effect.
    Allowed,
    /// It is refused for now; a release, settlement or refund has no effect.
    Refused,
    /// It is refused, and waiting does not help.
    Never,
    /// The middleware answers with this status instead of deciding.
    Status(u16),
    /// The request is invalid, by the code of the HTTP API.
    Code(String),
}

/// The codes of invalid requests.
const CODES: [&str; 6] =
    ["invalid_fact", "invalid_cost", "invalid_ttl", "missing_field", "too_many", "unknown_limit"];
/// The words of `expect`.
const WORDS: [&str; 3] = ["allowed", "refused", "never"];

impl TestFile {
    /// Reads a file, with variables from the environment of this process.
    pub fn read(path: &Path) -> Result<TestFile, ReadError> {
        let format = Format::of_file(path)?;
        let (text, _) = content(path)?;
        let environment = |name: &str| std::env::var(name).ok();
        let name = path.display().to_string();
        TestFile::parse(&name, format, &text, &environment).map_err(ReadError::Invalid)
    }

    /// Parses `text`. Messages call it `name`; `environment` returns the values of variables.
    pub fn parse(
        name: &str,
        format: Format,
        text: &[u8],
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<TestFile, Report> {
        let read = with_report(name, text, |text, problems| {
            let mut document = document(format, text, problems)?;
            expand::expand(&mut document, environment, problems.get_mut());
            let fields = Fields::open(&document, &key_table::TEST_FILE, Scope::default(), problems)?;
            Reader { text, problems }.file(&document, &fields)
        });
        read.map(|(file, _)| file)
    }
}

/// A name and its value.
type Pair = (String, String);

struct Reader<'d> {
    text: &'d str,
    problems: &'d RefCell<Problems>,
}

impl Reader<'_> {
    fn file(&self, document: &Node, fields: &Fields<'_>) -> Option<TestFile> {
        fields.require();
        let path = fields.parse("policy", |text| Ok(PathBuf::from(text)));
        let policy = match (path, fields.has("limits")) {
            (Some(path), false) => TestPolicy::File(path.value),
            (None, true) => TestPolicy::Inline(Box::new(self.inline(document)?)),
            (Some(path), true) => {
                fields.error(path.position, "the file has both `policy` and `limits`", "keep one");
                return None;
            }
            (None, false) => {
                let help = "name the config file, or write `limits`";
                fields.error(Position::default(), "the file has no `policy`", help);
                return None;
            }
        };
        let tests = fields.nodes("tests").iter().filter_map(|node| self.test(node)).collect();
        let start = fields.text("start").map(|start| self.placed(start));
        Some(TestFile { policy, start, tests })
    }

    /// A config of the limits in the test file.
    fn inline(&self, document: &Node) -> Option<Config> {
        let is_limits = |entry: &&MapEntry| entry.key == "limits";
        let limits: Vec<MapEntry> = document.entries().iter().filter(is_limits).cloned().collect();
        let document = Node { position: document.position, value: Value::Table(limits) };
        Config::resolve(raw::read(&document, self.problems)?, self.problems)
    }

    fn test(&self, node: &Node) -> Option<PolicyTest> {
        let fields = Fields::open(node, &key_table::TEST, Scope::of("a test: "), self.problems)?;
        fields.require();
        let facts: Vec<(String, String)> =
            fields.value_map("facts").into_iter().map(|located| located.value).collect();
        let name = self.placed(fields.text("name")?);
        let mut rows: Vec<TestRow> = Vec::new();
        for node in fields.nodes("rows") {
            let Some((row, position)) = self.row(node, &facts, &name.value) else { continue };
            let last = rows.last().map_or(Span::ZERO, TestRow::last_at);
            if row.at.value < last {
                let message = format!("this is before the row above, which ends at {last}");
                fields.error(position, message, "rows are in the order of time");
            }
            rows.push(row);
        }
        Some(PolicyTest { name, rows })
    }

    fn row(&self, node: &Node, facts: &[(String, String)], test: &str) -> Option<(TestRow, Position)> {
        let scope = Scope::of(format!("test {}: ", quoted(test)));
        let fields = Fields::open(node, &key_table::ROW, scope, self.problems)?;
        fields.require();
        let span = |key: &str| fields.parse(key, span);
        let verb = self.verb(&fields)?;
        let of = fields.text("of").map(|of| self.placed(of));
        let is_correction = matches!(verb, TestVerb::Release | TestVerb::Settle | TestVerb::Refund);
        if is_correction != of.is_some() {
            let message = match is_correction {
                true => "`of` is missing: which slot or charge?",
                false => "`of` is only for `release`, `settle` and `refund`",
            };
            fields.subject_error(fields.position, message, "name it with `as` in an earlier row");
        }
        let (request_headers, headers) = self.headers(&fields);
        let input = self.input(&fields, facts, request_headers)?;
        let names = |key: &str| {
            let position = fields.key_position(key)?;
            let names = fields.value_list(key).into_iter().map(|located| located.value).collect();
            Some(self.placed(Located { value: names, position, unexpanded: None }))
        };
        let remaining = fields.value_map("remaining").into_iter().filter_map(|located| {
            let Located { value: (name, number), position, unexpanded } = located;
            match units::count(&number) {
                Ok(count) => Some(self.placed(Located { value: (name, count), position, unexpanded })),
                Err(invalid) => {
                    fields.subject_error(position, &invalid.to_string(), "");
                    None
                }
            }
        });
        let remaining = remaining.collect();
        let at = span("at")?;
        let position = at.position;
        let row = TestRow {
            at: self.placed(at),
            input,
            cost: fields.count("cost").map(|cost| cost.value),
            times: fields.count("times")?.value,
            every: span("every")?.value,
            status: fields.count("status").and_then(|status| u16::try_from(status.value).ok()),
            verb,
            name: fields.text("as").map(|name| name.value),
            of,
            expect: self.expect(&fields)?,
            by: fields.text("by").map(|by| self.placed(by)),
            retry_after: span("retry_after").map(|span| self.placed(span)),
            delay: span("delay").map(|span| self.placed(span)),
            remaining,
            limits: names("limits"),
            would_refuse: names("would_refuse"),
            headers,
        };
        Some((row, position))
    }

    fn verb(&self, fields: &Fields<'_>) -> Option<TestVerb> {
        Some(match fields.choice("verb")?.value {
            "peek" => TestVerb::Peek,
            "acquire" => TestVerb::Acquire,
            "release" => TestVerb::Release,
            "reserve" => TestVerb::Reserve(fields.parse("ttl", span)?.value),
            "settle" => TestVerb::Settle,
            "refund" => TestVerb::Refund,
            _ => TestVerb::Check,
        })
    }

    /// The headers of the request, and those that are expected in the response: no client sends rate-limit headers.
    fn headers(&self, fields: &Fields<'_>) -> (Vec<Pair>, Vec<Placed<Pair>>) {
        let is_expected = |name: &str| {
            let name = name.to_ascii_lowercase();
            name == "retry-after" || name.starts_with("ratelimit") || name.starts_with("x-ratelimit")
        };
        let all = fields.value_map("headers").into_iter();
        let (expected, sent): (Vec<_>, Vec<_>) = all.partition(|located| is_expected(&located.value.0));
        let expected = expected.into_iter().map(|located| self.placed(located)).collect();
        (sent.into_iter().map(|located| located.value).collect(), expected)
    }

    fn input(
        &self,
        fields: &Fields<'_>,
        test_facts: &[(String, String)],
        headers: Vec<(String, String)>,
    ) -> Option<RowInput> {
        let own = fields.value_map("facts").into_iter().map(|located| located.value);
        let body = fields.text("body").map(|body| body.value);
        let Some(line) = fields.text("request") else {
            if !headers.is_empty() || body.is_some() || fields.has("peer") {
                let message = "headers, `body` and `peer` are parts of a `request`";
                fields.subject_error(fields.position, message, "add `request: GET /`, or leave them out");
            }
            let mut facts: Vec<(String, String)> = own.collect();
            let added = test_facts.iter().filter(|(name, _)| facts.iter().all(|(known, _)| known != name));
            let added: Vec<_> = added.cloned().collect();
            facts.extend(added);
            return Some(RowInput::Facts(facts));
        };
        if let Some(position) = fields.key_position("facts") {
            fields.subject_error(position, "a row has `facts` or a `request`, not both", "keep one");
        }
        let peer = fields.parse("peer", |text| {
            text.parse().map_err(|_| InvalidValue::new(format!("{} is not an IP address", quoted(text)), ""))
        });
        Some(RowInput::Request(TestRequest { line: line.value, headers, body, peer: peer?.value }))
    }

    fn expect(&self, fields: &Fields<'_>) -> Option<Placed<Expect>> {
        let Located { value: word, position, unexpanded } = fields.value("expect")?;
        let expect = match word.as_str() {
            "allowed" => Expect::Allowed,
            "refused" | "429" => Expect::Refused,
            "never" => Expect::Never,
            code if CODES.contains(&code) => Expect::Code(word),
            number => match number.parse::<u16>() {
                Ok(status) if (400..600).contains(&status) => Expect::Status(status),
                _ => {
                    let message = format!("`expect` cannot be {}", quoted(number));
                    let help = match nearest(number, WORDS.into_iter().chain(CODES)) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => "allowed, refused, never, a status from 400 to 599, or the code of an error"
                            .into(),
                    };
                    fields.subject_error(position, &message, &help);
                    return None;
                }
            },
        };
        Some(self.placed(Located { value: expect, position, unexpanded }))
    }

    fn placed<T>(&self, located: Located<T>) -> Placed<T> {
        let (line, column) = excerpt::position(self.text, located.position.start);
        Placed { value: located.value, line, column }
    }
}

impl TestRow {
    /// The time of its last repetition.
    pub fn last_at(&self) -> Span {
        let repeated = self.every.as_micros().saturating_mul(self.times - 1);
        Span::from_micros(self.at.value.as_micros().saturating_add(repeated))
    }
}

/// A duration that may be zero or in microseconds: `0s`, `599999us`, `15m`.
fn span(text: &str) -> Result<Span, InvalidValue> {
    let zero = ["0", "0s", "0ms", "0us"];
    if zero.contains(&text) {
        return Ok(Span::ZERO);
    }
    let micros = text.strip_suffix("us").and_then(|number| number.parse::<u64>().ok());
    micros.map_or_else(|| units::duration(text), |micros| Ok(Span::from_micros(micros)))
}
