use super::*;

fn problem(name: &str, value: &str) -> Option<FactProblem> {
    Facts::new().insert(name, value).err().map(|error| error.problem)
}

#[test]
fn invalid_names_and_values_are_rejected() {
    let long = "x".repeat(1025);
    for (name, value, expected) in [
        ("user", "alice", None),
        ("header.x-user:id/1", "", None),
        ("user", "with\0nul and\nnewline", None),
        ("user", &long[..1024], None),
        ("", "x", Some(FactProblem::Name)),
        ("a b", "x", Some(FactProblem::Name)),
        ("a\0b", "x", Some(FactProblem::Name)),
        ("größe", "x", Some(FactProblem::Name)),
        (&long[..65], "x", Some(FactProblem::Name)),
        ("user", &long, Some(FactProblem::TooLong(1025))),
        ("ip", "192.0.2.256", Some(FactProblem::NotAnAddress)),
        ("ip", "localhost", Some(FactProblem::NotAnAddress)),
    ] {
        assert_eq!(problem(name, value), expected, "{name:?} {value:?}");
    }
    let mut facts = Facts::new();
    let error = facts.insert_bytes("user", b"\xff").expect_err("not UTF-8");
    assert_eq!(error.problem, FactProblem::NotUtf8);
}

#[test]
fn put_ip_equals_put() {
    for before in [facts! {}, facts! { "user" => "alice" }, facts! { "ip" => "192.0.2.1", "user" => "alice" }]
    {
        for ip in ["192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"] {
            let ip: IpAddr = ip.parse().expect(ip);
            let (mut put, mut put_ip) = (before.clone(), before.clone());
            put.put("ip", ip);
            put_ip.put_ip(ip.into());
            assert_eq!(format!("{put_ip:?}"), format!("{put:?}"), "{ip} after {before:?}");
        }
    }
}

/// `facts!` writes a few valid facts at once. Names, order, values and problems must be those of facts added one by one.
#[test]
fn facts_at_once_equal_facts_one_by_one() {
    let long = "x".repeat(1025);
    let check = |list: [(&'static str, Value<'static>); 5], count: usize| {
        let mut one_by_one = Facts::new();
        list.iter().take(count).for_each(|(name, value)| one_by_one.put(*name, value.clone()));
        let (name, value) = (|index: usize| list[index].0, |index: usize| list[index].1.clone());
        let at_once = match count {
            1 => facts! { name(0) => value(0) },
            2 => facts! { name(0) => value(0), name(1) => value(1) },
            3 => facts! { name(0) => value(0), name(1) => value(1), name(2) => value(2) },
            4 => {
                facts! { name(0) => value(0), name(1) => value(1), name(2) => value(2), name(3) => value(3) }
            }
            _ => facts! {
                name(0) => value(0),
                name(1) => value(1),
                name(2) => value(2),
                name(3) => value(3),
                name(4) => value(4),
            },
        };
        assert_eq!(format!("{at_once:?}"), format!("{one_by_one:?}"));
    };
    for first in [
        "alice".into(),
        "".into(),
        Value::from(7),
        long.into(),
        Value::from_hash(&"a".repeat(32)).expect("a hash"),
    ] {
        for second in ["user", "ip", "plan", "a name of more than sixteen bytes"] {
            for value in ["192.0.2.7", "::ffff:192.0.2.7", "no address"] {
                for count in 1..=5 {
                    let list = [
                        ("user", first.clone()),
                        (second, value.into()),
                        ("route", "/login".into()),
                        ("tokens", 250.into()),
                        ("plan", "pro".into()),
                    ];
                    check(list, count);
                }
            }
        }
    }
}

#[test]
fn more_than_64_facts_are_too_many() {
    let names: Vec<String> = (0..65).map(|number| format!("fact{number}")).collect();
    let mut facts = Facts::new();
    for name in &names[..64] {
        facts.insert(name, "x").expect("64 facts");
    }
    facts.insert(&names[3], "replaced").expect("replaces a fact");
    assert_eq!(facts.insert(&names[64], "x").expect_err("the 65th").problem, FactProblem::TooMany);
    assert_eq!(facts.iter().count(), 64);
    assert_eq!(facts.get("fact3").expect("present").to_string(), "replaced");
}

/// Facts that outlive the strings they were made from, as a caller with names from a file or a header needs them.
#[test]
fn names_and_values_may_be_owned() {
    fn of_header(name: &str, value: &str) -> Facts<'static> {
        let mut facts = Facts::new().with(format!("header.{name}"), value.to_owned());
        facts.put(name.to_uppercase(), 1);
        facts.put(name.to_uppercase(), 2);
        facts.insert_bytes(format!("raw.{name}"), b"bytes").expect("valid");
        facts
    }
    let facts = of_header("team", "red");
    let found: Vec<_> = facts.iter().map(|(name, value)| (name, value.to_string())).collect();
    let expected = [("header.team", "red"), ("TEAM", "2"), ("raw.team", "bytes")];
    assert_eq!(found, expected.map(|(name, value)| (name, value.to_owned())));
    assert_eq!(facts.get("header.team"), facts.clone().get("header.team"));
    let invalid = Facts::new().insert("a b".to_owned(), "x").expect_err("an invalid name");
    assert_eq!((invalid.name.as_str(), invalid.problem), ("a b", FactProblem::Name));
}

#[test]
fn numbers_and_addresses_have_a_text() {
    let facts = facts! {
        "n" => 1, "min" => i64::MIN, "max" => u64::MAX, "yes" => true,
        "ip" => "::ffff:192.0.2.7", "peer" => IpAddr::from([10, 0, 255, 9]),
    };
    let text = |name| facts.get(name).expect(name).to_string();
    assert_eq!(text("n"), "1");
    assert_eq!(text("min"), "-9223372036854775808");
    assert_eq!(text("max"), "18446744073709551615");
    assert_eq!(text("yes"), "true");
    assert_eq!(text("ip"), "192.0.2.7");
    assert_eq!(text("peer"), "10.0.255.9");
}

#[test]
fn ipv4_text_matches_the_standard_library() {
    for octet in 0..=255 {
        let ip = core::net::Ipv4Addr::new(octet, 255 - octet, 0, 100);
        assert_eq!(Value::from(IpAddr::V4(ip)).to_string(), ip.to_string());
    }
}

/// GHSA-5847-rm3g-23mw: an IPv4 client must not get a second budget by another spelling.
#[test]
fn addresses_are_canonical_in_every_spelling() {
    let mapped: IpAddr = "::ffff:192.0.2.7".parse().expect("an address");
    for value in [
        Value::from("192.0.2.7"),
        Value::from("::ffff:192.0.2.7"),
        Value::from("::FFFF:C000:207"),
        Value::from("0:0:0:0:0:ffff:192.0.2.7"),
        Value::from(mapped),
        Value::Ip(mapped),
    ] {
        let facts = facts! { "ip" => value.clone(), "peer" => Value::Ip(mapped) };
        assert_eq!(facts.get("ip").expect("present").to_string(), "192.0.2.7", "{value:?}");
        assert_eq!(facts.get("peer").expect("present").to_string(), "192.0.2.7", "{value:?}");
    }
    let facts = facts! { "ip" => "2001:DB8:0:0::1" };
    assert_eq!(facts.get("ip").expect("present").to_string(), "2001:db8::1");
}

#[test]
fn values_are_equal_if_their_texts_are() {
    assert_eq!(Value::from(1), Value::from("1"));
    assert_eq!(Value::from(true), Value::from("true"));
    assert_eq!(Value::from(IpAddr::from([192, 0, 2, 7])), Value::from("192.0.2.7".to_owned()));
    assert_ne!(Value::from(1), Value::from("01"));
    assert_ne!(Value::from("a"), Value::from("A"));
}

#[test]
fn a_repeated_name_replaces_the_value_in_place() {
    let facts = facts! { "a" => "1", "b" => "2", "a" => "3" };
    let found: Vec<_> = facts.iter().map(|(name, value)| (name, value.to_string())).collect();
    assert_eq!(found, [("a", "3".to_owned()), ("b", "2".to_owned())]);
    assert_eq!(facts! { "a" => "1", "a" => "" }.get("a"), None);
    assert_eq!(facts! { "a" => "1" }.get("A"), None);
}

#[test]
fn put_stores_the_first_problem() {
    let facts = facts! { "user" => "alice", "a b" => "x", "" => "y" };
    let error = facts.check().expect_err("a space in a name");
    assert_eq!(error.to_string(), "fact `a b`: a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`");
}

#[test]
fn every_error_says_what_would_be_valid() {
    let (long, wide) = ("x".repeat(1025), "ü".repeat(513));
    for (name, value, message) in [
        ("a\nb", "x".as_bytes(), r"fact `a\nb`: a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`"),
        ("user", long.as_bytes(), "fact `user`: the value has 1025 bytes (at most 1024; hash longer ones)"),
        ("user", wide.as_bytes(), "fact `user`: the value has 1026 bytes (at most 1024; hash longer ones)"),
        ("user", b"\xff", "fact `user`: the value is not UTF-8 (hash or encode bytes)"),
        (
            "ip",
            b"192.0.2.7:80",
            "fact `ip`: the value is not an IP address (such as `192.0.2.7` or `2001:db8::1`)",
        ),
    ] {
        let error = Facts::new().insert_bytes(name, value).expect_err(message);
        assert_eq!(error.to_string(), message);
    }
    assert_eq!(Facts::new().insert("ip", 7).expect_err("a number").problem, FactProblem::NotAnAddress);
    for (problem, message) in [
        (FactProblem::TooMany, "fact `last`: more than 64 facts in one request"),
        (FactProblem::Empty, "fact `last`: the value is empty"),
    ] {
        assert_eq!(InvalidFact { name: "last".to_owned(), problem }.to_string(), message);
    }
}

#[test]
fn errors_cut_a_long_name_between_characters() {
    let error = Facts::new().insert("x".repeat(1000), "x").expect_err("too long");
    assert_eq!(error.name, "x".repeat(64));
    let name = "x".to_owned() + &"ü".repeat(100);
    let error = Facts::new().insert(&name, "x").expect_err("too long");
    assert_eq!(error.name, "x".to_owned() + &"ü".repeat(31));
}

#[test]
fn an_empty_value_is_absent() {
    let facts = facts! { "user" => "", "ip" => "" };
    assert_eq!((facts.get("user"), facts.get("ip")), (None, None));
    assert_eq!(facts.check(), Ok(()));
}

#[test]
fn longest_number_and_address_fit_the_buffer() {
    let ip: IpAddr = "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255".parse().expect("an address");
    assert_eq!(Value::from(ip).to_string(), "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
    let compatible: IpAddr = "::255.255.255.255".parse().expect("an address");
    assert_eq!(Value::from(compatible).to_string(), compatible.to_string());
    assert_eq!(Value::Number(i64::MIN).to_string(), i64::MIN.to_string());
}
