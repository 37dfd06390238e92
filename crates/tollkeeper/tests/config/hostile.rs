//! Hostile input: every file is rejected with a short report, quickly and with little memory.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use tollkeeper::config::{Config, Format, Report};

/// Generous for a busy machine: without the bounds of the reader, these inputs would take hours.
const TIME_LIMIT: Duration = Duration::from_secs(20);

const FORMATS: [Format; 3] = [Format::Yaml, Format::Toml, Format::Json];

fn parse(format: Format, text: &[u8]) -> Result<(Config, Report), Report> {
    let start = Instant::now();
    let parsed = Config::parse("file", format, text, &|_| None);
    let report = match &parsed {
        Ok((_, report)) | Err(report) => report,
    };
    let message = report.to_string();
    assert!(message.len() < 100_000, "{format:?}: a report of {} bytes", message.len());
    assert!(!report.coloured().contains('\0'), "{format:?}");
    assert!(start.elapsed() < TIME_LIMIT, "{format:?}: {:?}", start.elapsed());
    parsed
}

/// The first line of the report on an invalid text.
fn rejected(format: Format, text: &[u8]) -> String {
    let report = parse(format, text).expect_err("the text is not a valid config");
    assert!(report.errors() > 0, "{format:?}");
    report.to_string().lines().next().expect("the report is not empty").to_owned()
}

#[test]
fn file_of_ten_megabytes_is_rejected() {
    for format in FORMATS {
        let message = rejected(format, &b"a".repeat(10 << 20));
        assert_eq!(
            message,
            "file:1:1: error: the file is larger than 4 MiB (no config needs that: is it the right file?)"
        );
    }
}

#[test]
fn long_repetitive_files_are_parsed_quickly() {
    for pattern in [
        "a", "[", "{", "- ", "a: ", "\"", "=", "=\n", "a.", "[a]\n", "a=1\n", "${A}", "!x ", "&a ", "*a ",
        "? ", "é", "\t", "#", "{a: ", "[1,", "a:\n", "- a\n", "\n", "'", "|\n", "%", "{\"a\":", "[[a]]\n",
        "a = [[", "a={a=",
    ] {
        let text = pattern.repeat((64 << 10) / pattern.len());
        for format in FORMATS {
            let _ = parse(format, text.as_bytes());
        }
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = |open: &str, close: &str| open.repeat(100_000) + &close.repeat(100_000);
    for (format, text) in [
        (Format::Yaml, "limits: ".to_owned() + &deep("[", "]")),
        (Format::Yaml, deep("{a: ", "}")),
        (Format::Yaml, deep("- ", "")),
        (Format::Yaml, (0..1_000).fold(String::new(), |text, depth| text + &" ".repeat(depth) + "a:\n")),
        (Format::Json, deep("[", "]")),
        (Format::Json, deep("{\"a\":", "}")),
        (Format::Toml, "a = ".to_owned() + &deep("[", "]")),
        (Format::Toml, "a = ".to_owned() + &deep("{a=", "}")),
        (Format::Toml, "a.".repeat(100_000) + "a = 1"),
        (Format::Toml, "[".to_owned() + &"a.".repeat(100_000) + "a]"),
    ] {
        let message = rejected(format, text.as_bytes());
        assert!(message.contains("is nested more than 32 deep"), "{format:?}: {message}");
    }
}

#[test]
fn aliases_do_not_explode() {
    let mut text = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n".to_owned();
    for level in 1..=30 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        let _ = writeln!(text, "a{level}: &a{level} [{aliases}]");
    }
    assert!(rejected(Format::Yaml, text.as_bytes()).contains("the file has more than 500000 values"));

    let mut text = "a0: &a0 [x]\n".to_owned();
    for level in 1..=1_000 {
        let _ = writeln!(text, "a{level}: &a{level} [*a{}]", level - 1);
    }
    assert!(rejected(Format::Yaml, text.as_bytes()).contains("is nested more than 32 deep"));

    let long = "x".repeat(1 << 20);
    let text = format!("a: &a {long}\nb: [{}]\n", vec!["*a"; 1_000].join(", "));
    assert!(rejected(Format::Yaml, text.as_bytes()).contains("more than 8 MiB of text"));

    assert!(
        rejected(Format::Yaml, b"limits: &a [*a]")
            .contains("this alias is inside the value that it refers to")
    );
}

#[test]
fn merged_keys_do_not_explode() {
    let mut text = "limits:\n  - &m0 { name: a, rate: 1/s }\n".to_owned();
    for level in 1..2_000 {
        let _ = writeln!(text, "  - &m{level} {{ <<: [*m{}, *m{}], x{level}: 1 }}", level - 1, level - 1);
    }
    rejected(Format::Yaml, text.as_bytes());
}

#[test]
fn at_most_a_hundred_errors_are_printed() {
    let text = format!("limits:\n{}", "  - { nmae: a }\n".repeat(5_000));
    let report = parse(Format::Yaml, text.as_bytes()).expect_err("no limit has a name");
    let message = report.to_string();
    assert_eq!(message.matches(": error: ").count(), 100);
    assert_eq!(
        report.errors(),
        15_001,
        "5,000 limits with an unknown key, no name and no rate each, and one error because all apply to one request"
    );
    assert!(message.ends_with("\nand 14901 more"), "{}", &message[message.len() - 100..]);
}

#[test]
fn large_policies_are_read_up_to_10000_limits() {
    let overrides: Vec<String> = (0..50_000).map(|n| format!("\"k{n}\": \"{}/min\"", n + 1)).collect();
    let text = format!(
        "{{\"limits\": [{{\"name\": \"a\", \"by\": \"ip2\", \"rate\": \"1/s\", \"overrides\": {{{}}}}}]}}",
        overrides.join(",")
    );
    let (config, _) = parse(Format::Json, text.as_bytes()).expect("every override is valid");
    assert_eq!(config.limits[0].overrides.0.len(), 50_000);

    let limits: Vec<String> =
        (0..20_000).map(|n| format!("{{\"name\": \"l{n}\", \"by\": \"f{n}\", \"rate\": \"1/s\"}}")).collect();
    let message = rejected(Format::Json, format!("{{\"limits\": [{}]}}", limits.join(",")).as_bytes());
    assert!(message.contains("there are 20000 limits (at most 10000"), "{message}");
}

#[test]
fn random_bytes_are_rejected_in_every_format() {
    let mut random = Random(7);
    for round in 0..300 {
        let length = random.below(2_000);
        let text: Vec<u8> = (0..length).map(|_| random.byte()).collect();
        for format in FORMATS {
            if let Ok((config, _)) = parse(format, &text) {
                panic!("round {round}: {format:?} reads random bytes as {config:?}");
            }
        }
    }
}

/// Valid files with a few characters changed, because almost valid input is the most likely to cause a panic.
#[test]
fn mutated_files_never_panic() {
    let mut random = Random(11);
    let tokens = [
        "", "\n", " ", "[", "]", "{", "}", ":", "\"", "'", "-", "*", "&", "!", "|", ">", "%", "${", "}",
        "\t", "0", "é", "\u{202e}", "null", "\r", "/", "#", "<<", "=",
    ];
    for (format, name) in
        [(Format::Yaml, "full.yaml"), (Format::Toml, "full.toml"), (Format::Json, "full.json")]
    {
        let text = std::fs::read_to_string(super::folder("good").join(name)).expect(name);
        let starts: Vec<usize> = text.char_indices().map(|(start, _)| start).collect();
        for _ in 0..500 {
            let mut changed = text.clone();
            for _ in 0..=random.below(2) {
                let at = starts[random.below(starts.len())];
                if changed.is_char_boundary(at) && changed.is_char_boundary(at + 1) && at < changed.len() {
                    changed.replace_range(at..=at, tokens[random.below(tokens.len())]);
                }
            }
            let _ = parse(format, changed.as_bytes());
        }
    }
}

#[test]
fn line_endings_and_byte_order_marks_are_ignored() {
    for (format, name) in
        [(Format::Yaml, "full.yaml"), (Format::Toml, "full.toml"), (Format::Json, "full.json")]
    {
        let text = std::fs::read_to_string(super::folder("good").join(name)).expect(name);
        let plain = format!("{:?}", parse(format, text.as_bytes()).expect(name).0);
        for other in [text.replace('\n', "\r\n"), format!("\u{feff}{text}")] {
            let (config, report) =
                parse(format, other.as_bytes()).unwrap_or_else(|report| panic!("{name}: {report}"));
            assert_eq!(format!("{config:?}"), plain, "{name}");
            assert!(report.is_empty(), "{name}: {report}");
        }
    }
}

#[test]
fn expanded_variables_are_bounded() {
    let text = format!("limits: [{}]", "\"${BIG}\", ".repeat(50_000));
    let big = "x".repeat(1 << 20);
    let report =
        Config::parse("file", Format::Yaml, text.as_bytes(), &|_| Some(big.clone())).expect_err("too much");
    assert!(report.to_string().contains("the environment variables of this file hold more than 8 MiB"));
}

/// A small random generator with a fixed seed, so that every run is the same.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).expect("31 bits") % end
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).expect("below 256")
    }
}
