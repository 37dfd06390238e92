use std::fs;

use serde_json::{Value, json};

use super::*;

const ACCESS: &str = "\
admin: { token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 }
auth:
  token_sha256:
    - 60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752
    - fd61a03af4f77d870fc21e05e7e80678095c92d808cfb3b5c279ee04c74aca13
tls:
  cert: server.pem
  key: server.key
  client_ca: clients.pem
";
const LIMITS: &str =
    "limits:\n  - { name: a, by: user, rate: 10/min, burst: 5 }\n  - { name: b, rate: 5/s }\n";
const ONE: &str = "limits:\n  - { name: a, by: user, rate: 10/min, burst: 5 }\n";
const BROKEN: &str = "limits:\n  - { name: a, rate: 10/soon }\n";

/// A followed file, and a clock that the test advances.
struct Followed {
    progress: Progress,
    now: Instant,
    modified: SystemTime,
    content: String,
}

impl Followed {
    fn new(content: &str) -> Followed {
        let path = Path::new("tollkeeper.yaml");
        let (config, _) = Config::parse_file(path, content.as_bytes()).unwrap();
        Followed {
            progress: Progress::new(path, config.origin),
            now: Instant::now(),
            modified: SystemTime::UNIX_EPOCH,
            content: content.to_owned(),
        }
    }

    fn write(&mut self, content: &str) {
        self.content = content.to_owned();
        self.modified += Duration::from_millis(1);
    }

    fn wait(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
    }

    fn step(&mut self, requested: bool) -> Step {
        let (began, ended) = (self.now, self.now);
        let bytes = self.content.clone().into_bytes();
        self.progress.step(Ok(FileRead { bytes, modified: Some(self.modified), began, ended }), requested)
    }

    /// Reads the file, and returns the names of the applied limits or the reported error.
    fn read(&mut self, requested: bool) -> String {
        match self.step(requested) {
            Step::Nothing => String::new(),
            Step::Report(error) => format!("error: {error}"),
            Step::Apply(reload) => {
                let names: Vec<_> = reload.config.limits.iter().map(|limit| limit.name.clone()).collect();
                let attempt = reload.attempt;
                self.progress.record_attempt(true, reload.config.origin, attempt, self.now);
                format!("active: {}", names.join(" "))
            }
        }
    }
}

/// The templates of `tollkeeper init`, with all settings that control access before or after them.
fn files() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tollkeeper-server/src/templates");
    let read = |name| fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
    let first = ["public-api", "login", "llm"].map(|name| format!("{ACCESS}{}", read(name)));
    let last = ["b2b", "internal"].map(|name| format!("{}{ACCESS}", read(name)));
    first.into_iter().chain(last).collect()
}

/// The limits without their numbers.
fn limits_without_numbers(config: &Config) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                ["rate", "burst", "limit", "ttl"].iter().for_each(|key| drop(fields.remove(*key)));
                fields.values_mut().for_each(strip);
            }
            Value::Array(values) => values.iter_mut().for_each(strip),
            Value::String(text) if text.as_bytes()[..1].iter().all(u8::is_ascii_digit) => *value = json!(0),
            _ => {}
        }
    }
    let mut limits = serde_json::to_value(&config.limits).unwrap();
    strip(&mut limits);
    limits
}

/// The complete file is active and is being written again, with a SIGHUP after each byte: no prefix of it may remove a
/// limit, a token or a setting.
#[test]
fn no_prefix_of_a_file_removes_anything() {
    thread::scope(|scope| {
        for file in files() {
            scope.spawn(move || {
                let path = Path::new("tollkeeper.yaml");
                let (whole, _) = Config::parse_file(path, file.as_bytes()).unwrap();
                let limits = limits_without_numbers(&whole);
                let mut pending = 0;
                for end in 0..file.len() {
                    let Some(prefix) = file.get(..end) else { continue };
                    let mut followed = Followed::new(LIMITS);
                    followed.progress.active = Arc::clone(&whole.origin);
                    followed.write(prefix);
                    match followed.step(true) {
                        Step::Report(_) => {}
                        Step::Nothing => pending += 1,
                        Step::Apply(reload) => {
                            let config = reload.config;
                            assert_eq!(limits_without_numbers(&config), limits, "{prefix}");
                            assert_eq!((config.admin, &config.auth), (whole.admin, &whole.auth), "{prefix}");
                            assert_eq!((&config.tls, &config.http), (&whole.tls, &whole.http), "{prefix}");
                        }
                    }
                }
                assert!(pending > 5, "some prefixes are valid: {pending}");
            });
        }
    });
}

#[test]
fn removal_needs_two_equal_reads_250_ms_apart() {
    let mut followed = Followed::new(LIMITS);
    followed.write(ONE);
    assert_eq!(followed.read(false), "");
    followed.wait(249);
    assert_eq!(followed.read(true), "", "a requested reload does not shorten the wait");
    followed.wait(1);
    assert_eq!(followed.read(false), "active: a");
    assert_eq!(followed.read(false), "", "the change is already active");
}

#[test]
fn rewriting_the_file_restarts_the_wait() {
    let mut followed = Followed::new(LIMITS);
    followed.write(ONE);
    assert_eq!(followed.read(false), "");
    followed.wait(200);
    // The same content, written once more.
    followed.write(ONE);
    assert_eq!(followed.read(false), "");
    followed.wait(200);
    assert_eq!(followed.read(false), "");
    followed.wait(50);
    assert_eq!(followed.read(false), "active: a");
}

/// Two equal reads are not enough: the second may happen in the middle of the next write.
#[test]
fn removal_waits_250_ms_after_the_last_change() {
    let mut followed = Followed::new(LIMITS);
    followed.write(ONE);
    assert_eq!(followed.read(false), "");
    followed.wait(250);
    followed.write(ONE);
    assert_eq!(followed.read(false), "");
    followed.wait(249);
    assert_eq!(followed.read(false), "");
    followed.wait(1);
    assert_eq!(followed.read(false), "active: a");
}

#[test]
fn numbers_and_additions_take_effect_at_once() {
    for (before, after, at_once) in [
        (ONE, LIMITS, true),
        (ONE, &*ONE.replace("burst: 5", "burst: 50"), true),
        (ONE, &*ONE.replace("10/min", "9/hour"), true),
        (ONE, &*format!("{ONE}{ACCESS}"), true),
        (ONE, &*ONE.replace(", burst: 5", ""), false),
        (ONE, &*ONE.replace("by: user", "by: use"), false),
        (ONE, &*ONE.replace("name: a", "name: c"), false),
        (ONE, "limits: []\n", false),
        (&*format!("{ONE}{ACCESS}"), ONE, false),
        (
            &*format!("{ONE}{ACCESS}"),
            &*format!("{ONE}{}", ACCESS.replace("  client_ca: clients.pem\n", "")),
            false,
        ),
        (&*format!("share: 1/30\n{ONE}"), &*format!("share: 1/3\n{ONE}"), false),
        (
            &*format!("http: {{ routes: [/a, /b] }}\n{ONE}"),
            &*format!("http: {{ routes: [/a] }}\n{ONE}"),
            false,
        ),
    ] {
        let mut followed = Followed::new(before);
        followed.write(after);
        assert_eq!(!followed.read(false).is_empty(), at_once, "{before}\nbecomes\n{after}");
        followed.wait(250);
        assert_eq!(followed.read(false).is_empty(), at_once, "{before}\nbecomes\n{after}");
    }
}

#[test]
fn invalid_file_is_reported_once() {
    let mut followed = Followed::new(LIMITS);
    followed.write(BROKEN);
    assert_eq!(followed.read(false), "", "the file may be partly written");
    followed.wait(250);
    assert!(followed.read(false).contains("10/soon"));
    followed.wait(1_000);
    assert_eq!(followed.read(false), "", "the error has been reported");
    assert!(followed.read(true).contains("10/soon"), "a requested reload reports it again");
    followed.write(LIMITS);
    assert_eq!(followed.read(false), "active: a b", "the error is cleared");
}

#[test]
fn file_is_compared_with_the_active_config() {
    let mut followed = Followed::new(LIMITS);
    // A reload is requested while the same file is being written again.
    followed.write("limits:\n  - { name: a, by: user");
    assert!(followed.read(true).contains("error"));
    followed.write(LIMITS);
    assert_eq!(followed.read(false), "active: a b");
    // A removal that is undone while it waits.
    followed.write(ONE);
    assert_eq!(followed.read(true), "");
    followed.write(LIMITS);
    assert_eq!(followed.read(false), "");
    followed.wait(1_000);
    followed.write(ONE);
    assert_eq!(followed.read(false), "", "the wait starts again");
}

#[test]
fn failed_apply_is_retried_with_growing_pauses() {
    let mut followed = Followed::new(ONE);
    followed.write(LIMITS);
    let mut pauses = Vec::new();
    for attempt in 1..=10 {
        let Step::Apply(reload) = followed.step(false) else { panic!("attempt {attempt}") };
        assert_eq!(reload.attempt, attempt);
        followed.progress.record_attempt(false, reload.config.origin, attempt, followed.now);
        let began = followed.now;
        while matches!(followed.progress.retry, Some(Retry { at, .. }) if at > followed.now) {
            assert_eq!(followed.read(false), "", "too early");
            followed.wait(500);
        }
        pauses.push(followed.now.duration_since(began).as_millis());
    }
    assert_eq!(pauses, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000, 30_000, 30_000]);
    let Step::Apply(reload) = followed.step(true) else { panic!("a requested reload is applied at once") };
    assert_eq!(reload.attempt, 1);
    followed.progress.record_attempt(false, reload.config.origin, 1, followed.now);
    followed.write(ONE);
    assert_eq!(followed.read(false), "active: a", "the error is cleared");
}

#[test]
fn file_that_keeps_changing_is_reported_once() {
    let mut followed = Followed::new(LIMITS);
    let mut reported = Vec::new();
    for round in 0..100 {
        followed.write(&format!("{ONE}# {round}\n"));
        reported.extend(Some(followed.read(false)).filter(|reported| !reported.is_empty()));
        followed.wait(200);
    }
    let [error] = &reported[..] else { panic!("{reported:?}") };
    assert!(error.contains("keeps changing, and `limits[b]` would be lost"), "{error}");
    followed.wait(250);
    assert_eq!(followed.read(false), "active: a", "a settled file takes effect");
}
