//! Several limits through one prepared handle.

mod support;

use support::{limiter, secs};
use tollkeeper::{Algorithm, HandleError, Limit, Mode, Quota, facts};

fn three() -> [Limit; 3] {
    [
        Limit::new("per-user", Quota::per_minute(60).burst(3)).by("user"),
        Limit::new("per-tenant", Quota::per_minute(10)).by("tenant"),
        Limit::new("per-route", Quota::per_minute(2)).by("route").algorithm(Algorithm::SlidingLog),
    ]
}

#[test]
fn layers_are_charged_all_or_nothing() {
    let (limiter, clock) = limiter(three());
    let layers = limiter.layers(["per-user", "per-tenant", "per-route"]).expect("plain limits");
    let left = |values| layers.peek(values).expect("valid").limits.map(|limit| limit.outcome().remaining);
    assert!(layers.check(["alice", "acme", "/a"]).expect("valid").allowed);
    assert!(layers.check(["alice", "acme", "/a"]).expect("valid").allowed);
    assert_eq!(left(["alice", "acme", "/a"]), [1, 8, 0]);

    let refused = layers.check(["alice", "acme", "/a"]).expect("valid");
    assert!(!refused.allowed);
    assert_eq!(refused.limits.map(|limit| limit.allowed), [true, true, false]);
    assert_eq!(left(["alice", "acme", "/a"]), [1, 8, 0]);
    assert!(layers.check(["alice", "acme", "/b"]).expect("valid").allowed);
    assert!(!layers.check(["alice", "acme", "/b"]).expect("valid").allowed);
    clock.advance(secs(1));
    assert!(layers.check(["alice", "acme", "/b"]).expect("valid").allowed);
}

#[test]
fn layers_share_their_counters_with_the_limiter() {
    let (limiter, _) = limiter(three());
    let layers = limiter.layers(["per-tenant", "per-user"]).expect("plain limits");
    assert!(layers.check_cost(["acme", "alice"], 2).expect("valid").allowed);
    let facts = facts! { "user" => "alice", "tenant" => "acme" };
    let decision = limiter.check(&facts).wait().expect("valid");
    assert_eq!(decision.limit("per-user").expect("applies").outcome().remaining, 0);
    assert_eq!(decision.limit("per-tenant").expect("applies").outcome().remaining, 7);
    assert!(!layers.check(["acme", "alice"]).expect("valid").allowed);
    assert!(layers.check(["acme", "bob"]).expect("valid").allowed);
}

#[test]
fn layers_follow_a_swap() {
    let (limiter, _) = limiter(three());
    let layers = limiter.layers(["per-user", "per-tenant"]).expect("plain limits");
    assert!(layers.check_cost(["alice", "acme"], 3).expect("valid").allowed);
    assert!(!layers.check(["alice", "acme"]).expect("valid").allowed);
    let [user, tenant, route] = three();
    limiter.replace(vec![route.clone(), tenant.clone(), user.clone().mode(Mode::Shadow)]).expect("valid");
    assert!(layers.check(["alice", "acme"]).expect("valid").allowed, "a shadow limit refuses no request");
    limiter.replace(vec![user, route]).expect("valid");
    let error = layers.check(["alice", "acme"]).expect_err("one limit was removed");
    assert_eq!(error, HandleError::UnknownLimit("per-tenant".to_owned()));
}

#[test]
fn invalid_input_of_layers_is_an_error_without_charge() {
    let (limiter, _) = limiter(three());
    let duplicate = limiter.layers(["per-user", "per-user"]).expect_err("named twice");
    assert_eq!(duplicate.to_string(), "duplicate limit `per-user` (name each limit once)");
    assert!(limiter.layers(["per-user", "unknown"]).is_err());

    let layers = limiter.layers(["per-user", "per-tenant"]).expect("plain limits");
    for (values, cost, message) in [
        (["alice", ""], 1, "fact `value`: the value is empty"),
        (["alice", "acme"], 0, "the cost is 0 (at least 1; to look without paying, use peek)"),
        (["alice", "acme"], 1 << 63, "the cost 9223372036854775808 is too large (at most 2147483648)"),
    ] {
        assert_eq!(layers.check_cost(values, cost).expect_err(message).to_string(), message);
    }
    let untouched = layers.peek(["alice", "acme"]).expect("valid").limits;
    assert_eq!(untouched.map(|limit| limit.outcome().remaining), [3, 10]);
}
