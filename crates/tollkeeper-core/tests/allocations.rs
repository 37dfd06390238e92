//! Checks that a request that matches a few limits is decided without allocations.
//!
//! Run with `--nocapture` to see the numbers.

#![expect(unsafe_code, reason = "implementing a global allocator, here a counting one, is unsafe")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use tollkeeper_core::algorithm::StoredState;
use tollkeeper_core::{
    Algorithm, Allowance, Decision, Facts, Limit, LimitReply, Missing, Mode, Policy, Quota, Reply, Time,
    Verb, facts,
};

/// The system allocator with a counter per thread, because tests run in parallel.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends may allocate after its counter was destroyed.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is forwarded unchanged to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract, which is that of the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn policy(limits: impl IntoIterator<Item = Limit>) -> Arc<Policy> {
    Arc::new(Policy::new(limits.into_iter().collect()).expect("valid limits"))
}

fn limits(count: usize) -> impl Iterator<Item = Limit> {
    (0..count).map(|number| Limit::new(format!("limit-{number}"), Quota::per_minute(100)))
}

/// Decides the request as an empty store would, and counts the allocations for the facts, the toll and the
/// store's reply.
#[expect(clippy::disallowed_macros, reason = "prints the counts for people to read")]
fn check<'f>(
    case: &str,
    policy: &Arc<Policy>,
    facts: impl FnOnce() -> Facts<'f>,
    matched: usize,
    expected: usize,
) {
    let now = Time::from_micros(1_760_000_000_000_000);
    let before = COUNT.get();
    let facts = black_box(facts());
    let toll = black_box(policy.toll(Verb::Check, &facts, 1).expect("a valid request"));
    let mut reply = Reply::new(now, 7);
    for due in toll.dues() {
        let step = due.step(StoredState::Nothing, now);
        reply.push(LimitReply::Step { step, charged: step.allowed });
    }
    let allocations = COUNT.get() - before;
    let decision = black_box(Decision::new(toll, reply));
    black_box((decision.verdict(), decision.binding()));
    assert_eq!(COUNT.get() - before - allocations, 1, "{case}: a decision is one box");
    println!("{case}: {matched} of {} limits matched, {allocations} allocations", policy.rules().len());
    assert_eq!((decision.toll().len(), allocations), (matched, expected), "{case}");
}

#[test]
fn the_allocator_counts_allocations() {
    let before = COUNT.get();
    black_box(vec![1, 2, 3]);
    assert_eq!(COUNT.get() - before, 1);
}

#[test]
fn one_decision_after_another_allocates_nothing() {
    let policy = policy([Limit::new("per-user", Quota::per_minute(100)).by("user")]);
    let decide = |user: &str| {
        let mut decision = Decision::undecided(&policy, Verb::Check);
        decision.toll_mut().add(&facts! { "user" => user }, 1).expect("a valid request");
        black_box(decision)
    };
    drop(decide("alice"));
    let references = Arc::strong_count(&policy);
    let before = COUNT.get();
    drop(decide("bob"));
    assert_eq!((COUNT.get() - before, Arc::strong_count(&policy)), (0, references));
    // What a long value takes outside of the box is not kept.
    drop(decide(&"a".repeat(1000)));
    assert_eq!(Arc::strong_count(&policy), 1);
}

#[test]
fn limits_that_do_not_match_allocate_nothing() {
    let alice = || facts! { "user" => "alice", "ip" => "2001:db8::7", "route" => "/a" };
    let hundred = |change: fn(Limit) -> Limit| policy(limits(100).map(change));
    check("when", &hundred(|limit| limit.when("route", "/login")), alice, 0, 0);
    check("unless", &hundred(|limit| limit.unless("route", "/*")), alice, 0, 0);
    check("allow", &hundred(|limit| limit.by("user").allow("alice")), alice, 0, 0);
    check("allow a network", &hundred(|limit| limit.by("ip").allow("2001:db8::/32")), alice, 0, 0);
    check("off", &hundred(|limit| limit.mode(Mode::Off)), alice, 0, 0);
    let unlimited = |limit: Limit| limit.by("user").override_for("alice", Allowance::Unlimited);
    check("unlimited", &hundred(unlimited), alice, 0, 0);
}

/// The first 64 limits are marked inline; a longer policy needs one allocation.
#[test]
fn skipped_limits_allocate_once_beyond_64() {
    let anonymous = || facts! { "route" => "/a" };
    check("64 skipped", &policy(limits(64).map(|limit| limit.by("user"))), anonymous, 0, 0);
    check("128 skipped", &policy(limits(128).map(|limit| limit.by("user"))), anonymous, 0, 1);
}

#[test]
fn a_few_limits_with_short_values_allocate_nothing() {
    let alice =
        || facts! { "user" => "alice", "ip" => "192.0.2.7", "route" => "/api/search", "plan" => "pro" };
    let usual = || {
        [
            Limit::new("per-ip", Quota::per_minute(1000)).by("ip"),
            Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"),
            Limit::new("search", Quota::per_second(10)).by("user").by("route").when("route", "/api/*"),
        ]
    };
    check("three limits", &policy(usual()), alice, 3, 0);
    let others = limits(97).map(|limit| limit.when("route", "/login"));
    check("three limits among others", &policy(usual().into_iter().chain(others)), alice, 3, 0);

    let four = [
        Limit::tiered("plan", "plan")
            .by("user")
            .tier("free", Quota::per_minute(60))
            .tier("pro", Quota::per_minute(600))
            .default_tier("free")
            .override_for("acme", Allowance::Unlimited),
        Limit::new("daily", Quota::per_day(1000)).by("user").algorithm(Algorithm::FixedWindow).stagger(),
        Limit::new("tokens", Quota::per_minute(100_000)).by("key").missing(Missing::Share).cost("tokens"),
        Limit::new("log", Quota::per(5, Duration::from_secs(900))).by("ip").algorithm(Algorithm::SlidingLog),
    ];
    let facts =
        || facts! { "user" => "alice", "plan" => "gold", "tokens" => 250, "ip" => "2001:db8:1:2:3:4:5:6" };
    check("four limits with everything", &policy(four), facts, 4, 0);
}
