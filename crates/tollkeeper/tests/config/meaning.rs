//! Tests of the resolved config: limits of the core, defaults, shares, variables, and limits as JSON.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tollkeeper::config::{
    Config, Format, HeaderDialect, Listener, Percent, ReadError, ResponseCondition, StatusPattern, StoreUrl,
};
use tollkeeper::{Algorithm, OnStoreFailure, Span, facts};

use super::{config, environment, files, messages, parse, yaml};

#[test]
fn absent_keys_have_the_documented_defaults() {
    let config = config("limits: [{ name: a, by: ip, rate: 10/s }]");
    assert_eq!(config.store, StoreUrl::Memory);
    assert_eq!((config.memory.max_keys, config.memory.max_log_bytes), (1_000_000, 268_435_456));
    assert_eq!((config.memory.snapshot, config.memory.snapshot_every), (None, Duration::from_secs(10)));
    let redis = &config.redis;
    assert_eq!(
        (redis.prefix.as_str(), redis.deadline, redis.connections, redis.nodes),
        ("tk", Duration::from_millis(10), 2, 1)
    );
    assert_eq!(
        (redis.breaker.failures, redis.breaker.late, redis.breaker.cooldown),
        (5, Percent::new(50), Duration::from_secs(1))
    );
    assert_eq!(config.on_store_failure, OnStoreFailure::Local);
    assert_eq!((config.listen.http, config.listen.proxy), (None, None));
    assert_eq!((config.http.ipv6_prefix, config.policy.ipv6_prefix()), (64, 64));
    assert!(
        config.http.trusted_proxies.is_empty()
            && config.http.facts.is_empty()
            && config.http.routes.is_empty()
    );
    assert_eq!(config.headers, [HeaderDialect::Ietf, HeaderDialect::XRateLimit]);
    assert_eq!(config.grpc.headers, [HeaderDialect::Ietf]);
    assert_eq!(config.retry_after_jitter, Percent::new(10));
    let shown = serde_json::to_value(&config.limits[0]).expect("JSON");
    assert_eq!(
        shown,
        json!({
            "name": "a", "by": ["ip"], "rate": "10/s", "algorithm": "sliding-window", "allow": [], "missing": "skip",
            "mode": "enforce", "stagger": false, "on_store_failure": "local", "headers": true, "consistency": "exact",
            "wait_replicas": 0,
        })
    );
}

#[test]
fn burst_anywhere_selects_token_bucket() {
    for (limit, expected) in [
        ("rate: 5/s", Algorithm::SlidingWindow),
        ("rate: 5/s, burst: 5", Algorithm::TokenBucket),
        ("rate: 0/s, burst: 5", Algorithm::TokenBucket),
        ("rate: 5/s, algorithm: gcra", Algorithm::TokenBucket),
        ("rate: 5/s, overrides: { x: { rate: 5/s, burst: 9 } }", Algorithm::TokenBucket),
        ("tier: t, tiers: { a: 5/s, b: { rate: 5/s, burst: 9 } }, default_tier: a", Algorithm::TokenBucket),
        ("limit: 5, algorithm: concurrency", Algorithm::Concurrency),
    ] {
        let config = config(&format!("limits: [{{ name: a, by: user, {limit} }}]"));
        assert_eq!(config.policy.rules()[0].algorithm(), expected, "{limit}");
        assert_eq!(config.limits[0].algorithm, expected, "{limit}");
    }
}

#[test]
fn share_scales_counts_bursts_and_slots() {
    let text = |share: &str, count: u64, burst: u64, slots: u64| {
        format!(
            "share: {share}
limits:
  - {{ name: a, by: user, rate: {count}/min, burst: {burst}, overrides: {{ x: {{ rate: {count}/s }} }} }}
  - {{ name: b, algorithm: concurrency, limit: {slots} }}
  - {{ name: c, rate: 0/s }}
  - {{ name: d, rate: unlimited }}"
        )
    };
    let scaled = config(&text("1/3", 100, 20, 2));
    let expected = config(&text("1/1", 33, 6, 1));
    assert_eq!(debug(&scaled.policy.rules()), debug(&expected.policy.rules()));
    assert_eq!(
        scaled.limits[0].grant.rate.as_deref(),
        Some("100/min"),
        "shown as in the file, before the share"
    );
}

#[test]
fn limit_overrides_on_store_failure() {
    let config = config(
        "on_store_failure: deny\nlimits: [{ name: a, rate: 1/s }, { name: b, rate: 1/s, on_store_failure: allow }]",
    );
    let policies: Vec<OnStoreFailure> =
        config.policy.rules().iter().map(|rule| rule.on_store_failure()).collect();
    assert_eq!(policies, [OnStoreFailure::Deny, OnStoreFailure::Allow]);
}

#[test]
fn ipv6_prefix_reaches_the_policy() {
    assert_eq!(
        config("http: { ipv6_prefix: 48 }\nlimits: [{ name: a, rate: 1/s }]").policy.ipv6_prefix(),
        48
    );
}

/// `PUT /v1/limits` accepts the output of `GET /v1/limits`.
#[test]
fn limit_as_json_gives_the_same_policy() {
    for path in files("good") {
        let name = path.display();
        let (config, _) = parse(&path).unwrap_or_else(|report| panic!("{name}: {report}"));
        let limits = serde_json::to_string_pretty(&config.limits).expect("JSON");
        let text = format!(r#"{{ "limits": {limits} }}"#);
        let again = config.with_limits("limits.json", text.as_bytes());
        let (again, _) = again.unwrap_or_else(|report| panic!("{name}: {report}"));
        assert_eq!(debug(&again.policy), debug(&config.policy), "{name}");
        assert_eq!(again.limits, config.limits, "{name}");
    }
}

#[test]
fn replacing_limits_keeps_other_settings() {
    let base = config(
        "share: 1/2\non_store_failure: deny\nhttp: { ipv6_prefix: 48 }\nlimits: [{ name: a, by: ip, rate: 10/s }]",
    );
    let (other, report) =
        base.with_limits("body", br#"{"limits":[{"name":"b","by":"ip","rate":"20/s"}]}"#).expect("valid");
    assert!(report.is_empty(), "{report}");
    let same = config(
        "share: 1/2\non_store_failure: deny\nhttp: { ipv6_prefix: 48 }\nlimits: [{ name: b, by: ip, rate: 20/s }]",
    );
    assert_eq!(format!("{other:?}"), format!("{same:?}"));
    for (text, expected) in [
        (
            r#"{"limits":[],"share":"1/1"}"#,
            "body:1:14: error: only `limits` can be replaced, not `share` (leave it out)",
        ),
        (
            r#"{"limits":[{"name":"a"}]}"#,
            "body:1:12: error: limit `a`: neither `rate` nor `limit` is set (such as `rate: 100/min`)",
        ),
        (
            r#"{"limits":[{"name":"a","rate":"${MANY}/s"}]}"#,
            "body:1:31: error: limit `a`: count `${MANY}` is not a whole number (digits only, such as `1000`)",
        ),
        ("", "body:1:1: error: the file is empty (a config has at least `limits:`)"),
    ] {
        let report = base.with_limits("body", text.as_bytes()).expect_err(text);
        assert_eq!(report.to_string().lines().next(), Some(expected), "{text}");
    }
}

#[test]
fn response_conditions_are_parsed() {
    let config = config(
        "limits: [{ name: a, rate: 1/s, deduct_when: { status: 401 }, refund_when: { status: [304, 5xx] } }]",
    );
    let limit = &config.limits[0];
    assert_eq!(limit.deduct_when, Some(ResponseCondition { status: vec![StatusPattern::Code(401)] }));
    let refund = limit.refund_when.as_ref().expect("set above");
    let matched: Vec<u16> = [200, 304, 400, 499, 500, 503, 599]
        .into_iter()
        .filter(|status| refund.statuses().contains(*status))
        .collect();
    assert_eq!(matched, [304, 500, 503, 599]);
    let shown: Value = serde_json::to_value(limit).expect("JSON");
    assert_eq!(shown["refund_when"], json!({ "status": [304, "5xx"] }));
}

#[test]
fn variables_are_expanded_in_every_kind_of_value() {
    for (text, expected) in [
        ("limits: [{ name: a, rate: '${RATE:-7/s}' }]", "7/s"),
        ("limits: [{ name: a, rate: '${MANY}/day' }]", "500000/day"),
        ("limits: [{ name: a, rate: '${EMPTY:-3}/${NONE:-min}' }]", "3/min"),
        ("limits: [{ name: a, rate: 1/s, burst: '${NONE:-5}' }]", "1/s"),
    ] {
        assert_eq!(config(text).limits[0].grant.rate.as_deref(), Some(expected), "{text}");
    }
    let json = br#"{ "memory": { "max_keys": "${MANY}" }, "limits": [{ "name": "a", "rate": "1/s", "headers": "${NONE:-false}" }] }"#;
    let (config, _) = Config::parse("x.json", Format::Json, json, &environment).expect("valid");
    assert_eq!(config.memory.max_keys, 500_000);
    assert!(!config.limits[0].headers);
    let cost = "limits: [{ name: a, rate: 1/s, by: '$x' }]";
    assert_eq!(
        messages(cost)[0],
        "limit `a`: `$x` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        "a `$` without a brace is not expanded"
    );
}

/// The only variable is a password, and every kind of value uses it.
#[test]
fn environment_values_are_never_shown() {
    let mut text =
        "store: ${PASSWORD}\nshare: ${PASSWORD}\nretry_after_jitter: ${PASSWORD}\nheaders: ['${PASSWORD}']\n"
            .to_owned();
    text += "on_store_failure: ${PASSWORD}\nlisten: { http: '${PASSWORD}' }\nredis: { prefix: '${PASSWORD} ', deadline: '${PASSWORD}' }\n";
    text += "memory: { max_keys: '${PASSWORD}', snapshot_every: '${PASSWORD}' }\nadmin: { token_sha256: '${PASSWORD}' }\n";
    text += "http: { trusted_proxies: ['${PASSWORD}'], client_address: '${PASSWORD}', routes: ['${PASSWORD}'], facts: { a: { from: '${PASSWORD}', hash: '${PASSWORD}' } } }\n";
    text += "limits:\n  - { name: 'A${PASSWORD}', by: ['${PASSWORD} ', '${PASSWORD} '], rate: '${PASSWORD}', cost: '${PASSWORD} ', tier: '${PASSWORD} ', default_tier: '${PASSWORD}', tiers: { a: '${PASSWORD}' }, deduct_when: { status: '${PASSWORD}' } }\n";
    text += "  - { name: b, by: ip, allow: ['${PASSWORD}'], rate: '9${MANY}00000/s' }\n  - '${PASSWORD}'\n";
    let report = yaml(&text).expect_err("every value is invalid");
    assert!(report.errors() > 20, "{report}");
    for text in [report.to_string(), report.coloured(), format!("{report:?}")] {
        assert!(!text.contains("hunter2") && !text.contains("950000000000"), "{text}");
    }
}

#[test]
fn store_password_is_never_shown() {
    for store in [
        "redis://app:hunter2@127.0.0.1:99999",
        "redis://:hunter2@",
        "redis://:hunter2",
        "redis://app:hunter2",
        "redis://app:7hunter2",
        "redis://h1:7000,h2:hunter2",
        "redis://hunter2@127.0.0.1:x",
        "redis://hunter2@127.0.0.1",
        "redis://app:p@hunter2@127.0.0.1:x",
        "redis://app:p/hunter2@127.0.0.1:x",
        "redis://app:hunter2/p@127.0.0.1/x",
        "redis://app:%20hunter2%zz@127.0.0.1",
        "redis://127.0.0.1?password=hunter2@",
        "redis+sentinel://h1/hunter2@mymaster?x",
        "redis+unix://:hunter2@/run/redis.sock",
        "redis+unix://:hunter2@run/redis.sock",
        "redis:/app:hunter2@127.0.0.1",
        "redis//app:hunter2@127.0.0.1",
        "redsi://app:hunter2@127.0.0.1",
        "rediss+cluster://app:hunter2@h1:1,h2:2/0",
        "redis://app:hunter2@hunter2@127.0.0.1:x",
        "redis://app:hunter2@127.0.0.1/0",
        "redis+sentinel://app:hunter2@h1",
    ] {
        for text in [
            format!("store: {store}\nlimits: []\n"),
            format!("limits: []\nstore: \"{store}\" # {store}\n"),
            format!("store: {store}\nlimits: [\n"),
        ] {
            let shown = match yaml(&text) {
                Ok((config, report)) => format!("{config:?} {report} {report:?}"),
                Err(report) => report.to_string() + &report.coloured() + &format!("{report:?}"),
            };
            assert!(!shown.contains("hunter2"), "{store}: {shown}");
        }
        if let Ok(url) = store.parse::<StoreUrl>() {
            assert!(!format!("{url} {url:?}").contains("hunter2"), "{url}");
        }
    }
}

#[test]
fn store_urls_are_parsed() {
    for (text, shown) in [
        ("memory://", "memory://"),
        ("redis://h", "redis://h:6379/0"),
        ("rediss://:p@h:1/3", "rediss://***@h:1/3"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock"),
        ("redis+cluster://h1:7000,h2:7001", "redis+cluster://h1:7000,h2:7001"),
        ("rediss+sentinel://u:p%40ss@h1,h2:2/mymaster/1", "rediss+sentinel://***@h1:26379,h2:2/mymaster/1"),
    ] {
        assert_eq!(text.parse::<StoreUrl>().map(|url| url.to_string()), Ok(shown.to_owned()));
    }
    let StoreUrl::Redis(url) = "redis://u:p%40ss@h".parse().expect("valid") else { panic!("redis") };
    let credentials = url.credentials.expect("given");
    assert_eq!((credentials.user.as_deref(), credentials.password.as_str()), (Some("u"), "p@ss"));
    for text in [
        "",
        "memory",
        "memory://x",
        "redis://",
        "redis://h:0",
        "redis://h/x",
        "redis://h/-1",
        "redis://a,b",
        "redis+unix://h/x",
        "rediss+unix:///x",
        "redis+cluster://h/1",
        "redis+sentinel://h",
        "redis://u@h",
        "redis://u:%zz@h",
        "http://h",
    ] {
        assert!(text.parse::<StoreUrl>().is_err(), "{text}");
    }
}

#[test]
fn listeners_are_parsed() {
    assert_eq!("[::1]:0".parse::<Listener>().map(|listener| listener.to_string()), Ok("[::1]:0".to_owned()));
    for (text, help) in [
        (":8080", "try `127.0.0.1:8080`"),
        ("8080", "try `127.0.0.1:8080`"),
        ("*:8080", "for all addresses of the machine, `0.0.0.0:8080`"),
        ("example.org:80", "such as `127.0.0.1:8080` or `[::1]:8080`, or `off`"),
        ("127.0.0.1:99999", "such as `127.0.0.1:8080` or `[::1]:8080`, or `off`"),
        ("127.0.0.1", "such as `127.0.0.1:8080` or `[::1]:8080`, or `off`"),
    ] {
        let error = text.parse::<Listener>().expect_err(text);
        assert_eq!(error.to_string(), format!("`{text}` is not an address with a port ({help})"));
    }
}

#[test]
fn yaml_aliases_and_merges_equal_the_expanded_file() {
    let short = config(
        "limits:
  - &base { name: a, by: user, rate: 5/s, missing: deny }
  - { <<: *base, name: b }
  - { <<: [{ rate: 7/s }, *base], name: c, by: &ip ip }
  - { name: d, by: *ip, rate: 1/s }",
    );
    let long = config(
        "limits:
  - { name: a, by: user, rate: 5/s, missing: deny }
  - { name: b, by: user, rate: 5/s, missing: deny }
  - { name: c, by: ip, rate: 7/s, missing: deny }
  - { name: d, by: ip, rate: 1/s }",
    );
    assert_eq!(short.limits, long.limits);
}

#[test]
fn file_extension_selects_the_format() {
    let folder = super::folder("good");
    for name in ["full.yaml", "full.toml", "full.json"] {
        assert_eq!(Config::read(&folder.join(name)).expect(name).0.limits.len(), 8);
    }
    for (path, reason) in [
        ("full.yaml/x.yaml", "Not a directory"),
        ("absent.yaml", "No such file"),
        ("full", "its extension must be .yaml, .yml, .toml or .json"),
    ] {
        let error = Config::read(&folder.join(path)).expect_err(path);
        assert!(matches!(error, ReadError::Unreadable { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    let broken = super::folder("broken").join("rate-month.yaml");
    assert!(matches!(Config::read(&broken), Err(ReadError::Invalid(_))));
    assert_eq!(Format::of(Path::new("a.yml")), Some(Format::Yaml));
    assert_eq!(Format::of(Path::new("a.YAML")), None);
}

#[test]
fn messages_contain_no_rust_types() {
    for path in files("broken").iter().filter(|path| path.extension().is_some_and(|ending| ending == "txt")) {
        let report = std::fs::read_to_string(path).expect("readable");
        for line in report.lines().filter(|line| !line.starts_with("  | ")) {
            for word in
                ["u64", "usize", "i64", "f64", "String", "Vec", "Option", "struct", "enum", "variant", "::"]
            {
                assert!(
                    !line.replace("::ffff", "").replace("[::1]", "").contains(word),
                    "{}: {line}",
                    path.display()
                );
            }
            assert!(!line.ends_with('.'), "{}: {line}", path.display());
        }
    }
}

/// No warning is given without a reason.
#[test]
fn good_limits_give_no_warnings() {
    for text in [
        "limits: [{ name: a, by: ip, rate: 1/s }]",
        "limits: [{ name: a, rate: 1/s }]",
        "limits: [{ name: a, by: user, missing: share, rate: 1/s }]",
        "limits: [{ name: a, by: [ip, route], when: { method: '*' }, rate: 1/s }]",
        "share: 1/2\nlimits: [{ name: a, by: ip, rate: 1000/s, burst: 19 }]",
    ] {
        assert_eq!(messages(text), [""; 0], "{text}");
    }
}

fn debug(value: &dyn std::fmt::Debug) -> String {
    format!("{value:#?}")
}

/// Calls of the library normalise and hash raw values in the same way as values from a header.
#[test]
fn declared_facts_are_hashed_in_every_call() {
    let text = "http: { facts: { api_key: { from: header.x-key, normalize: [lowercase], hash: true } } }
limits: [{ name: a, by: api_key, rate: 2/day, allow: [Internal] }]";
    let limiter = config(text).limiter().expect("memory");
    let allowed = |key: &str| limiter.check(&facts! { "api_key" => key }).wait().expect("valid").allowed();
    assert_eq!(["Cust-1", "cust-1", "CUST-1"].map(allowed), [true, true, false]);
    assert!((0..3).all(|_| allowed("INTERNAL")), "on the `allow` list");
    let cust_1 = facts! { "api_key" => "cust-1" };
    assert_eq!(limiter.forget("a", &cust_1).wait(), Ok(true));
    assert!(allowed("Cust-1"));
    assert!(limiter.handle("a").is_err(), "the text of a hashed fact is not its key");

    let twice = text.replace("allow: [Internal]", "overrides: { Acme: 3/day, acme: 4/day }");
    let messages = messages(&twice);
    assert!(
        messages.iter().any(|message| message.contains("acme")),
        "one customer, two overrides: {messages:?}"
    );
}

#[test]
fn refusal_log_is_a_bounded_rate() {
    let (config, _) = yaml("limits: []\nlog: { refusals: 10/s }").expect("valid");
    let quota = config.log.refusals.expect("it is on");
    assert_eq!((quota.count(), quota.burst(), quota.period()), (10, 10, Span::from_secs(1)));
    let (off, _) = yaml("limits: []\nlog: {}").expect("valid");
    assert_eq!(off.log.refusals, None);
    for (value, expected) in [
        ("unlimited", "`log.refusals`: the refusal log needs a bounded rate"),
        ("0/s", "`log.refusals`: a rate of 0 logs no refusals"),
        ("yes", "`log.refusals`: `yes` is not a rate"),
    ] {
        let messages = messages(&format!("limits: []\nlog: {{ refusals: {value} }}"));
        assert!(messages[0].starts_with(expected), "{messages:?}");
    }
}
