//! Fuzzes config files in every format: rejected with a report or parsed, never a panic. Parsed limits mean the same
//! after they are printed and parsed again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tollkeeper::config::{Config, Format};

fn environment(name: &str) -> Option<String> {
    (name.len() % 2 == 0).then(|| "5".repeat(name.len()))
}

fuzz_target!(|data: &[u8]| {
    for format in [Format::Yaml, Format::Toml, Format::Json] {
        let parsed = Config::parse("config", format, data, &environment);
        let report = match &parsed {
            Ok((_, report)) | Err(report) => report,
        };
        let shown = report.to_string();
        assert!(shown.chars().all(|char| char == '\n' || !char.is_control()), "{shown:?}");
        let _ = report.coloured();
        let Ok((config, _)) = &parsed else {
            assert!(report.errors() > 0, "rejected without an error");
            continue;
        };
        let limits = serde_json::to_string(&config.limits).expect("JSON");
        let prefix = config.http.ipv6_prefix;
        let text =
            format!(r#"{{"share":"{}","http":{{"ipv6_prefix":{prefix}}},"limits":{limits}}}"#, config.share);
        if text.contains("${") {
            continue;
        }
        let (again, _) = Config::parse("again", Format::Json, text.as_bytes(), &|_| None)
            .unwrap_or_else(|report| panic!("{text}\n{report}"));
        assert_eq!(format!("{:?}", again.policy), format!("{:?}", config.policy), "{text}");
    }
});
