//! Responses to Envoy's rate limit service calls, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod envoy_oracle;

use std::sync::Arc;

use envoy_types::pb::google::protobuf::Duration;
use prost::Message as _;
use tollkeeper::config::{Config, Format};
use tollkeeper::{Clock, ManualClock, MemoryStore, Span, Time};
use tollkeeper_engine::api::active_limits::LimitSource;
use tollkeeper_server::service::Service;
use tollkeeper_server::store::Store;
use tollkeeper_server::transport::grpc::rls::Rls;

use crate::envoy_oracle::{
    Code, RateLimit, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, Unit, codes, costing,
    descriptor, giving, question, remaining,
};

const OK: Code = Code::Ok;
const OVER: Code = Code::OverLimit;

/// The service under test and its clock.
struct Envoy {
    rls: Rls,
    clock: ManualClock,
}

impl Envoy {
    fn with(limits: &str) -> Envoy {
        Envoy::with_config(&format!("limits:\n{limits}"))
    }

    fn with_config(text: &str) -> Envoy {
        let config = Config::parse("test.yaml", Format::Yaml, text.as_bytes(), &|_| None);
        let (config, _) = config.unwrap_or_else(|error| panic!("{error}"));
        // A whole number of days since the epoch, so that windows begin at this time.
        let clock = ManualClock::new(Time::from_micros(20_000 * 86_400 * 1_000_000));
        let store = MemoryStore::new(config.memory.capacity(), Clock::manual(&clock));
        let service = Service::new(config, LimitSource::File, Store::Memory(store)).unwrap();
        Envoy { rls: Rls::new(Arc::new(service)), clock }
    }

    async fn try_ask(&self, question: &RateLimitRequest) -> Result<RateLimitResponse, tonic::Status> {
        let answer = self.rls.answer(&question.encode_to_vec(), None).await?;
        Ok(RateLimitResponse::decode(&answer.encode_to_vec()[..]).expect("Envoy can decode the response"))
    }

    async fn ask(&self, descriptors: impl IntoIterator<Item = RateLimitDescriptor>) -> RateLimitResponse {
        self.try_ask(&question(descriptors)).await.unwrap()
    }

    /// How many sequential requests with this descriptor are admitted.
    async fn passes(&self, descriptor: RateLimitDescriptor) -> u32 {
        for number in 0..100 {
            if self.ask([descriptor.clone()]).await.overall_code() == OVER {
                return number;
            }
        }
        panic!("no limit refuses {descriptor:?}");
    }

    async fn refuses(&self, question: &RateLimitRequest) -> String {
        let status = self.try_ask(question).await.expect_err("the request is invalid");
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        status.message().to_owned()
    }
}

#[tokio::test]
async fn entries_and_domain_become_facts() {
    let envoy = Envoy::with(
        "  - { name: a, when: { domain: test, plan: free }, by: [user, user.2], rate: 2/day, burst: 2 }",
    );
    let asked = descriptor([("user", "alice"), ("plan", "free"), ("user", "second")]);
    assert_eq!(envoy.passes(asked).await, 2);
    assert_eq!(
        envoy.passes(descriptor([("user", "alice"), ("plan", "free"), ("user", "third")])).await,
        2,
        "the second `user` entry is the fact `user.2`, so this is another key"
    );
    let other = RateLimitRequest {
        domain: "other".to_owned(),
        ..question([descriptor([("user", "alice"), ("plan", "free"), ("user", "second")])])
    };
    let answer = envoy.try_ask(&other).await.unwrap();
    assert_eq!(
        (answer.overall_code(), &answer.statuses[0].current_limit),
        (OK, &None),
        "no limit applies to another domain"
    );
    let claims = descriptor([("user", "alice"), ("plan", "free"), ("user", "x"), ("domain", "other")]);
    assert_eq!(envoy.passes(claims).await, 2, "the request's domain wins over an entry of that name");
}

#[tokio::test]
async fn first_of_duplicate_entries_wins() {
    let envoy = Envoy::with("  - { name: a, by: user.2, rate: 1/day, burst: 1 }");
    assert_eq!(envoy.passes(descriptor([("user", "a"), ("user", "b")])).await, 1);
    assert_eq!(envoy.passes(descriptor([("user", "a"), ("user", "b"), ("user.2", "new")])).await, 0);
    assert_eq!(envoy.passes(descriptor([("user.2", "b"), ("user", "a"), ("user", "new")])).await, 0);
}

#[tokio::test]
async fn the_remote_address_is_the_ip_canonical_and_masked() {
    let envoy = Envoy::with("  - { name: a, by: ip, rate: 3/day, burst: 3 }");
    let from = |address| descriptor([("remote_address", address)]);
    assert_eq!(envoy.passes(from("192.0.2.7")).await, 3);
    assert_eq!(envoy.passes(from("::ffff:192.0.2.7")).await, 0, "the same address, mapped to IPv6");
    assert_eq!(envoy.passes(from("2001:db8:1:2:3::4")).await, 3);
    assert_eq!(envoy.passes(from("2001:db8:1:2:ffff::1")).await, 0, "the same /64");
    assert_eq!(envoy.passes(from("2001:db8:1:3::1")).await, 3, "another /64");
    assert_eq!(
        envoy.passes(descriptor([("remote_address", "192.0.2.7"), ("ip", "192.0.2.8")])).await,
        3,
        "an entry `ip` takes precedence over `remote_address`"
    );
}

#[tokio::test]
async fn cost_is_for_the_request_or_a_descriptor() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 100/day, algorithm: fixed-window }");
    let alice = || descriptor([("user", "alice")]);
    assert_eq!(remaining(&envoy.ask([alice()]).await), [99], "a cost of 0 for the request means 1");
    let five = RateLimitRequest { hits_addend: 5, ..question([alice()]) };
    assert_eq!(remaining(&envoy.try_ask(&five).await.unwrap()), [94]);
    let bob = descriptor([("user", "bob")]);
    let mixed = RateLimitRequest { hits_addend: 5, ..question([costing(20, alice()), bob]) };
    assert_eq!(remaining(&envoy.try_ask(&mixed).await.unwrap()), [74, 95]);
    let too_much = costing(75, alice());
    assert_eq!(codes(&envoy.ask([too_much]).await), (OVER, vec![OVER]));
    assert_eq!(remaining(&envoy.ask([costing(74, alice())]).await), [0]);
}

#[tokio::test]
async fn cost_0_charges_nothing() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/day, burst: 2 }");
    let peek = || costing(0, descriptor([("user", "alice")]));
    for _ in 0..10 {
        let answer = envoy.ask([peek()]).await;
        assert_eq!((codes(&answer), remaining(&answer)), ((OK, vec![OK]), vec![2]));
    }
    assert_eq!(envoy.passes(descriptor([("user", "alice")])).await, 2);
    assert_eq!(codes(&envoy.ask([peek()]).await), (OVER, vec![OVER]));
}

#[tokio::test]
async fn refused_peek_keeps_the_others_uncharged() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/day, burst: 2 }");
    let (alice, bob) = (descriptor([("user", "alice")]), descriptor([("user", "bob")]));
    assert_eq!(envoy.passes(alice.clone()).await, 2);
    let answer = envoy.ask([costing(0, alice), bob.clone()]).await;
    assert_eq!((codes(&answer), remaining(&answer)), ((OVER, vec![OVER, OK]), vec![0, 2]));
    assert_eq!(envoy.passes(bob.clone()).await, 2, "nothing was charged");
    let answer = envoy.ask([costing(0, descriptor([("user", "carol")])), bob]).await;
    assert_eq!(codes(&answer), (OVER, vec![OK, OVER]), "an allowed peek does not admit the others");
}

#[tokio::test]
async fn refund_is_capped_at_the_used_amount() {
    for limit in [
        "  - { name: a, by: user, rate: 10/day, burst: 10 }",
        "  - { name: a, by: user, rate: 10/day, algorithm: fixed-window }",
        "  - { name: a, by: user, rate: 10/day, algorithm: sliding-window }",
        "  - { name: a, by: user, rate: 10/day, algorithm: sliding-log }",
    ] {
        let envoy = Envoy::with(limit);
        let alice = || descriptor([("user", "alice")]);
        let refund = envoy.ask([giving(3, alice())]).await;
        assert_eq!(
            (codes(&refund), remaining(&refund)),
            ((OK, vec![OK]), vec![10]),
            "{limit}: nothing to refund"
        );
        assert_eq!(envoy.passes(alice()).await, 10, "{limit}: the refund added no units");
        let refund = envoy.ask([giving(3, alice())]).await;
        assert_eq!((codes(&refund), remaining(&refund)), ((OK, vec![OK]), vec![3]), "{limit}");
        assert_eq!(remaining(&envoy.ask([giving(2, alice())]).await), [5], "{limit}: every refund counts");
        assert_eq!(envoy.passes(alice()).await, 5, "{limit}");
        assert_eq!(
            remaining(&envoy.ask([giving(1 << 31, alice())]).await),
            [10],
            "{limit}: capped at the used amount"
        );
        assert_eq!(envoy.passes(alice()).await, 10, "{limit}");
    }
}

#[tokio::test]
async fn refunds_need_no_receipts() {
    // The store remembers about a hundred used receipts; refunds without a receipt must not use that up.
    let envoy = Envoy::with_config(
        "memory: { max_keys: 1600 }\nlimits:\n  - { name: a, by: user, rate: 10/day, algorithm: fixed-window }",
    );
    let alice = || descriptor([("user", "alice")]);
    for number in 0..1_000 {
        envoy.ask([alice()]).await;
        let refund = envoy.ask([giving(1, alice())]).await;
        assert_eq!(remaining(&refund), [10], "{number}");
        envoy.clock.advance(Span::from_micros(20_000));
    }
}

#[tokio::test]
async fn refund_to_a_zero_limit_is_a_peek() {
    let envoy = Envoy::with(
        "  - { name: none, by: user, rate: 0/s }\n  - { name: strict, by: plan, rate: 5/s, missing: deny }",
    );
    let refund = envoy.ask([giving(3, descriptor([("user", "alice")]))]).await;
    assert_eq!(codes(&refund), (OK, vec![OK]));
    assert_eq!(codes(&envoy.ask([descriptor([("user", "alice")])]).await), (OVER, vec![OVER]));
}

#[tokio::test]
async fn refused_request_refunds_nothing() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 1/day, burst: 1 }");
    let [alice, bob] = ["alice", "bob"].map(|user| descriptor([("user", user)]));
    envoy.ask([alice.clone()]).await;
    envoy.ask([bob.clone()]).await;
    let answer = envoy.ask([giving(1, bob.clone()), alice]).await;
    assert_eq!(codes(&answer), (OVER, vec![OK, OVER]));
    assert_eq!(envoy.passes(bob).await, 0);
}

#[tokio::test]
async fn descriptors_are_all_charged_or_none() {
    let envoy = Envoy::with(
        "  - { name: per-user, by: user, rate: 10/day, burst: 10 }\n  - { name: per-path, by: path, rate: 2/day, burst: 2 }",
    );
    let both = || [descriptor([("user", "alice")]), descriptor([("path", "/")])];
    assert_eq!(remaining(&envoy.ask(both()).await), [9, 1]);
    assert_eq!(remaining(&envoy.ask(both()).await), [8, 0]);
    for _ in 0..20 {
        let answer = envoy.ask(both()).await;
        assert_eq!((codes(&answer), remaining(&answer)), ((OVER, vec![OK, OVER]), vec![8, 0]));
    }
    let reversed = envoy.ask(both().into_iter().rev()).await;
    assert_eq!(codes(&reversed), (OVER, vec![OVER, OK]), "statuses are in the order of descriptors");
    assert_eq!(envoy.passes(descriptor([("user", "alice")])).await, 8);
}

#[tokio::test]
async fn the_same_key_is_charged_once_at_the_largest_cost() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 100/day, burst: 100 }");
    let alice = |path| descriptor([("user", "alice"), ("path", path)]);
    let answer = envoy.ask([costing(2, alice("/a")), costing(7, alice("/b")), alice("/c")]).await;
    assert_eq!(remaining(&answer), [93, 93, 93]);
}

#[tokio::test]
async fn binding_limit_is_reported_in_envoy_units() {
    let limit = |requests_per_unit, unit: Unit| {
        Some(RateLimit { requests_per_unit, unit: unit.into(), name: "a".to_owned() })
    };
    for (rate, expected) in [
        ("7/s", limit(7, Unit::Second)),
        ("7/min", limit(7, Unit::Minute)),
        ("7/h", limit(7, Unit::Hour)),
        ("7/day", limit(7, Unit::Day)),
        ("7/7d", limit(7, Unit::Week)),
        ("7/30d", limit(7, Unit::Month)),
        ("7/365d", limit(7, Unit::Year)),
        ("7/30s", None),
        ("7/1001ms", None),
        ("7/2min", None),
    ] {
        let envoy =
            Envoy::with(&format!("  - {{ name: a, by: user, rate: {rate}, algorithm: fixed-window }}"));
        let answer = envoy.ask([descriptor([("user", "alice")]), descriptor([("nothing", "x")])]).await;
        assert_eq!(
            (&answer.statuses[0].current_limit, remaining(&answer)),
            (&expected, vec![6, 0]),
            "{rate}"
        );
        assert_eq!(answer.statuses[1].current_limit, None, "no limit applies");
        assert_eq!(answer.statuses[1].duration_until_reset, None);
    }
    let envoy = Envoy::with("  - { name: a, by: user, rate: 7/min, burst: 20 }");
    let answer = envoy.ask([descriptor([("user", "alice")])]).await;
    assert_eq!((&answer.statuses[0].current_limit, remaining(&answer)), (&limit(7, Unit::Minute), vec![19]));
}

#[tokio::test]
async fn hidden_limit_is_not_reported() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 1/day, burst: 1, headers: false }");
    for code in [OK, OVER] {
        let answer = envoy.ask([descriptor([("user", "alice")])]).await;
        assert_eq!(codes(&answer), (code, vec![code]));
        assert_eq!(answer.statuses[0].current_limit, None, "Envoy would send it to the client in headers");
    }
}

#[tokio::test]
async fn the_time_until_reset_is_rounded_up() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/min, burst: 2 }");
    let until = async || {
        let status = envoy.ask([descriptor([("user", "alice")])]).await.statuses.remove(0);
        let Duration { seconds, nanos, .. } = status.duration_until_reset.unwrap();
        assert_eq!(nanos, 0);
        (status.code(), seconds)
    };
    assert_eq!(until().await, (OK, 30), "until the bucket is full again");
    envoy.clock.advance(Span::from_micros(500_000));
    assert_eq!(until().await, (OK, 60), "59.5 s");
    assert_eq!(until().await, (OVER, 30), "29.5 s until a retry can pass");
    envoy.clock.advance(Span::from_micros(29_499_999));
    assert_eq!(until().await, (OVER, 1), "1 µs");
    envoy.clock.advance(Span::from_micros(1));
    assert_eq!(until().await.0, OK);
}

#[tokio::test]
async fn request_that_never_fits_has_no_reset() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/min, burst: 2 }");
    let answer = envoy.ask([costing(3, descriptor([("user", "alice")]))]).await;
    assert_eq!((codes(&answer), remaining(&answer)), ((OVER, vec![OVER]), vec![2]));
    assert_eq!(answer.statuses[0].duration_until_reset, None);
}

#[tokio::test]
async fn leaky_bucket_refuses_instead_of_delaying() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 1/s, burst: 5, algorithm: leaky-bucket }");
    let alice = || descriptor([("user", "alice")]);
    assert_eq!(envoy.passes(alice()).await, 1, "the next request would have to be delayed");
    envoy.clock.advance(Span::from_micros(999_999));
    assert_eq!(envoy.passes(alice()).await, 0);
    envoy.clock.advance(Span::from_micros(1));
    assert_eq!(envoy.passes(alice()).await, 1);
}

#[tokio::test]
async fn concurrency_limits_are_skipped() {
    let envoy = Envoy::with("  - { name: slots, by: user, algorithm: concurrency, limit: 1, ttl: 60s }");
    for hits in [1, 0, 1, 1] {
        let answer = envoy.ask([costing(hits, descriptor([("user", "alice")]))]).await;
        assert_eq!((codes(&answer), remaining(&answer)), ((OK, vec![OK]), vec![0]));
    }
}

#[tokio::test]
async fn bad_input_is_refused_with_the_reason_and_charges_nothing() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/day, burst: 2 }");
    let alice = || descriptor([("user", "alice")]);
    let no_domain = RateLimitRequest { domain: String::new(), ..question([alice()]) };
    assert!(envoy.refuses(&no_domain).await.contains("domain"));
    assert!(envoy.refuses(&question([])).await.contains("descriptors"));
    for (wrong, reason) in [
        (descriptor([("", "x")]), "name"),
        (descriptor([("a b", "x")]), "`a b`"),
        (descriptor([("ip", "nowhere")]), "IP address"),
        (costing((1 << 31) + 1, alice()), "cost"),
        (giving((1 << 31) + 1, alice()), "cost"),
    ] {
        let message = envoy.refuses(&question([alice(), wrong.clone()])).await;
        assert!(message.contains(reason), "{wrong:?}: {message}");
    }
    let many = (0..64).map(|number| (format!("key-{number}"), "x".to_owned()));
    let mut many: Vec<_> = many.map(|(key, value)| envoy_oracle::Entry { key, value }).collect();
    many.truncate(64);
    let many = RateLimitDescriptor { entries: many, ..Default::default() };
    assert!(envoy.refuses(&question([many])).await.contains("63 entries"));
    assert_eq!(envoy.passes(alice()).await, 2);
}

/// 64 descriptors over 125 limits would be 8,000 keys: one request must not delay all others.
#[tokio::test]
async fn wide_request_is_refused_and_charges_nothing() {
    let limits: String =
        (0..125).map(|n| format!("  - {{ name: l{n}, by: user, rate: 2/day, burst: 2 }}\n")).collect();
    let envoy = Envoy::with(&limits);
    let users: Vec<String> = (0..64).map(|number| format!("user-{number}")).collect();
    let wide = question(users.iter().map(|user| descriptor([("user", user.as_str())])));
    assert!(envoy.refuses(&wide).await.contains("more than 256 limits and keys"));
    // Two users have 250 keys, and 64 equal descriptors have 125.
    let two = users[..2].iter().map(|user| descriptor([("user", user.as_str())]));
    assert_eq!(envoy.ask(two).await.overall_code(), OK);
    let equal = vec![descriptor([("user", "alice")]); 64];
    assert_eq!(envoy.ask(equal).await.statuses.len(), 64);
    assert_eq!(envoy.passes(descriptor([("user", "user-0")])).await, 1);
    assert_eq!(envoy.passes(descriptor([("user", "user-2")])).await, 2);
}

#[tokio::test]
async fn long_or_non_utf8_values_are_limited() {
    let envoy = Envoy::with("  - { name: a, by: user, rate: 2/day, burst: 2 }");
    let (long, longer) = ("x".repeat(1_025), "x".repeat(70_000));
    assert_eq!(envoy.passes(descriptor([("user", &long)])).await, 2);
    assert_eq!(envoy.passes(descriptor([("user", &longer)])).await, 2, "another long value is another key");
    assert_eq!(envoy.passes(descriptor([("user", &"x".repeat(1_024))])).await, 2);

    // Envoy sends header bytes unchanged, even if they are not UTF-8.
    let mut bytes = question([descriptor([("user", "??")])]).encode_to_vec();
    let at = bytes.windows(2).position(|two| two == b"??").unwrap();
    bytes[at..at + 2].copy_from_slice(b"\xff\xfe");
    let mut allowed = Vec::new();
    for _ in 0..3 {
        allowed.push(envoy.rls.answer(&bytes, None).await.unwrap().overall_code == i32::from(OK));
    }
    assert_eq!(allowed, [true, true, false]);
}

#[tokio::test]
async fn client_headers_use_the_configured_dialect() {
    const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 2/min, burst: 2 }
  - { name: secret, by: user, rate: 100/min, headers: false }
  - { name: per-path, by: path, rate: 10/min, algorithm: fixed-window }
";
    let both = || [descriptor([("user", "alice")]), descriptor([("path", "/")])];
    let headers_of = |answer: RateLimitResponse| -> Vec<(String, String)> {
        answer.response_headers_to_add.into_iter().map(|header| (header.key, header.value)).collect()
    };
    let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let policy = ("ratelimit-policy", r#""per-user";q=2;w=60, "per-path";q=10;w=60"#);

    let envoy = Envoy::with_config(&format!("retry_after_jitter: 0%\n{LIMITS}"));
    assert_eq!(
        headers_of(envoy.ask(both()).await),
        pairs(&[policy, ("ratelimit", r#""per-user";r=1;t=30"#)])
    );
    assert_eq!(
        headers_of(envoy.ask(both()).await),
        pairs(&[policy, ("ratelimit", r#""per-user";r=0;t=30"#)])
    );
    let refused = [("retry-after", "30"), policy, ("ratelimit", r#""per-user";r=0;t=30"#)];
    assert_eq!(headers_of(envoy.ask(both()).await), pairs(&refused));
    let peek_and_charge = [costing(0, descriptor([("user", "alice")])), descriptor([("path", "/")])];
    let only_users = ("ratelimit-policy", r#""per-user";q=2;w=60"#);
    let refused = [("retry-after", "30"), only_users, ("ratelimit", r#""per-user";r=0;t=30"#)];
    assert_eq!(headers_of(envoy.ask(peek_and_charge).await), pairs(&refused), "a refused peek is reported");

    let grpc = |headers: &str| format!("retry_after_jitter: 0%\ngrpc: {{ headers: {headers} }}\n{LIMITS}");
    let envoy = Envoy::with_config(&grpc("[]"));
    assert_eq!(headers_of(envoy.ask(both()).await), []);
    envoy.ask(both()).await;
    assert_eq!(headers_of(envoy.ask(both()).await), pairs(&[("retry-after", "30")]));
    let envoy = Envoy::with_config(&grpc("[draft-07]"));
    let policy = ("ratelimit-policy", "2;w=60, 10;w=60");
    let expected = [policy, ("ratelimit", "limit=2, remaining=1, reset=30")];
    assert_eq!(headers_of(envoy.ask(both()).await), pairs(&expected));
}
