//! Many threads at once: limits are exact for checks, handles, refunds, slots and policy swaps.
//!
//! The clock does not move, so nothing drains, and the number of admitted requests must equal the limit.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use support::*;
use tollkeeper::{Algorithm, Correction, Limit, Limiter, MemoryStore, Quota, facts};

/// Runs `work(round, thread)` on `threads` threads at once in each of `rounds` rounds; after each round one
/// of them runs `between(round)`. A panic in any thread ends all rounds, because the other threads would
/// wait for it forever at the barrier.
fn rounds(threads: usize, rounds: usize, work: impl Fn(usize, usize) + Sync, between: impl Fn(usize) + Sync) {
    let barrier = Barrier::new(threads);
    let panicked = Mutex::new(None);
    let guarded = |part: &dyn Fn()| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(part)) {
            panicked.lock().unwrap().get_or_insert(panic);
        }
    };
    thread::scope(|scope| {
        for number in 0..threads {
            let (barrier, work, between, guarded, panicked) =
                (&barrier, &work, &between, &guarded, &panicked);
            scope.spawn(move || {
                for round in 0..rounds {
                    barrier.wait();
                    guarded(&|| work(round, number));
                    if barrier.wait().is_leader() {
                        guarded(&|| between(round));
                    }
                    barrier.wait();
                    if panicked.lock().unwrap().is_some() {
                        return;
                    }
                }
            });
        }
    });
    if let Some(panic) = panicked.into_inner().unwrap() {
        resume_unwind(panic);
    }
}

fn key(round: usize) -> String {
    format!("round{round}")
}

/// A limit of `count` per minute by user, named after its algorithm.
fn limit(algorithm: Algorithm, count: u64) -> Limit {
    Limit::new(algorithm.name(), Quota::per_minute(count)).by("user").algorithm(algorithm)
}

fn shared(limits: impl IntoIterator<Item = Limit>) -> (MemoryStore, Limiter) {
    let store = store(1_000_000, &clock());
    let limiter = on(&store, limits);
    (store, limiter)
}

#[test]
fn many_threads_admit_exactly_the_limit_on_one_key() {
    for algorithm in RATES {
        let (_, limiter) = shared([limit(algorithm, 50)]);
        let admitted = AtomicU64::new(0);
        rounds(
            64,
            400,
            |round, _| {
                admitted.fetch_add(u64::from(charge(&limiter, &user(&key(round)), 1).allowed()), SeqCst);
            },
            |round| assert_eq!(admitted.swap(0, SeqCst), 50, "{algorithm} in round {round}"),
        );
    }
}

#[test]
fn new_key_checked_by_all_threads_is_one_key() {
    let (store, limiter) = shared([limit(Algorithm::FixedWindow, 10_000)]);
    rounds(
        16,
        300,
        |round, _| assert!(charge(&limiter, &user(&key(round)), 1).allowed()),
        |round| {
            assert_eq!(store.keys(), round + 1);
            assert_eq!(remaining(&limiter, "fixed-window", &user(&key(round))), 10_000 - 16);
        },
    );
}

#[test]
fn handles_and_checks_admit_exactly_the_limit() {
    for algorithm in RATES {
        let (_, limiter) = shared([limit(algorithm, 40)]);
        let handle = limiter.handle(algorithm.name()).unwrap();
        let admitted = AtomicU64::new(0);
        rounds(
            32,
            100,
            |round, number| {
                let key = key(round);
                for attempt in 0..2 {
                    let allowed = if (number + attempt) % 2 == 0 {
                        handle.check(&key).unwrap().allowed
                    } else {
                        charge(&limiter, &user(&key), 1).allowed()
                    };
                    admitted.fetch_add(u64::from(allowed), SeqCst);
                }
            },
            |round| assert_eq!(admitted.swap(0, SeqCst), 40, "{algorithm} in round {round}"),
        );
    }
}

#[test]
fn layered_limits_are_each_exact_and_all_or_nothing() {
    // Keys of three limits, mostly in different shards, locked in different orders by different threads.
    let limits = [
        Limit::new("by-user", Quota::per_minute(20)).by("user").algorithm(Algorithm::FixedWindow),
        Limit::new("by-ip", Quota::per_minute(30)).by("ip").algorithm(Algorithm::SlidingLog),
        Limit::new("by-round", Quota::per_minute(45)).by("round").algorithm(Algorithm::TokenBucket),
    ];
    let (_, limiter) = shared(limits);
    let users = ["u", "v", "w", "x"];
    let admitted = Mutex::new(Vec::new());
    let identity = |round: usize, number: usize| {
        let ip = format!("10.{}.{}.{}", number / 4 % 2, round / 250, round % 250);
        (format!("{}{round}", users[number % 4]), ip)
    };
    rounds(
        64,
        300,
        |round, number| {
            let (user, ip) = identity(round, number);
            let facts = facts! { "user" => &user, "ip" => &ip, "round" => round };
            for _ in 0..2 {
                let decision = charge(&limiter, &facts, 1);
                let charged = decision.charge().map_or(0, |charge| charge.items().len());
                assert_eq!(charged, if decision.allowed() { 3 } else { 0 });
                if decision.allowed() {
                    admitted.lock().unwrap().push((user.clone(), ip.clone()));
                }
            }
        },
        |round| {
            let admitted = std::mem::take(&mut *admitted.lock().unwrap());
            // 128 requests, and every limit could refuse: the tightest is exhausted, and none is exceeded.
            assert_eq!(admitted.len(), 45, "round {round}");
            for (user, ip) in (0..64).map(|number| identity(round, number)) {
                let facts = facts! { "user" => &user, "ip" => &ip, "round" => round };
                let by_user = admitted.iter().filter(|(other, _)| *other == user).count() as u64;
                let by_ip = admitted.iter().filter(|(_, other)| *other == ip).count() as u64;
                assert!(by_user <= 20 && by_ip <= 30);
                assert_eq!(remaining(&limiter, "by-user", &facts), 20 - by_user, "round {round}");
                assert_eq!(remaining(&limiter, "by-ip", &facts), 30 - by_ip, "round {round}");
                assert_eq!(remaining(&limiter, "by-round", &facts), 0, "round {round}");
            }
        },
    );
}

#[test]
fn swaps_that_keep_counters_admit_exactly_the_limit() {
    let limits = |round: usize| {
        let other = Limit::new("other", Quota::per_minute(1_000)).by("user");
        let same = || limit(Algorithm::TokenBucket, 30);
        // The limit is alone, at another index, or has another condition: its counters stay.
        match round % 3 {
            0 => vec![same()],
            1 => vec![other, same()],
            _ => vec![same().unless("route", "/health"), other],
        }
    };
    let (_, limiter) = shared(limits(0));
    let admitted = AtomicU64::new(0);
    let swaps = while_swapping(&limiter, limits, || {
        rounds(
            16,
            300,
            |round, _| {
                for _ in 0..4 {
                    admitted.fetch_add(u64::from(charge(&limiter, &user(&key(round)), 1).allowed()), SeqCst);
                }
            },
            |round| assert_eq!(admitted.swap(0, SeqCst), 30, "round {round}"),
        );
    });
    assert_eq!(limiter.policy().version(), 1 + swaps, "every swap has a version of its own");
}

/// Replaces the policy in a loop while `run` runs; returns the number of swaps.
fn while_swapping(limiter: &Limiter, limits: impl Fn(usize) -> Vec<Limit> + Sync, run: impl FnOnce()) -> u64 {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let swapper = scope.spawn(|| {
            let mut swaps = 0;
            while !stop.load(SeqCst) {
                swaps += 1;
                limiter.replace(limits(swaps)).unwrap();
            }
            swaps as u64
        });
        let result = catch_unwind(AssertUnwindSafe(run));
        stop.store(true, SeqCst);
        let swaps = swapper.join().unwrap();
        result.unwrap_or_else(|panic| resume_unwind(panic));
        swaps
    })
}

#[test]
fn handles_follow_swaps_that_reorder_limits() {
    let limits = |round: usize| {
        let mut all = vec![Limit::new("a", Quota::per_minute(1)).by("user")];
        all.insert(round % 2, limit(Algorithm::TokenBucket, 30));
        all
    };
    let (_, limiter) = shared(limits(0));
    let handle = limiter.handle("token-bucket").unwrap();
    let admitted = AtomicU64::new(0);
    while_swapping(&limiter, limits, || {
        rounds(
            16,
            300,
            |round, _| {
                for _ in 0..4 {
                    let passage = handle.check(&key(round)).unwrap();
                    assert_eq!(
                        passage.outcome().limit,
                        30,
                        "the handle uses its own limit, not its neighbour"
                    );
                    admitted.fetch_add(u64::from(passage.allowed), SeqCst);
                }
            },
            |round| assert_eq!(admitted.swap(0, SeqCst), 30, "round {round}"),
        );
    });
}

/// At most the limit plus the refunded units are admitted.
#[test]
fn parallel_refunds_admit_no_more_than_was_refunded() {
    for algorithm in
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog]
    {
        let (_, limiter) = shared([limit(algorithm, 40)]);
        let (admitted, refunded) = (AtomicU64::new(0), AtomicU64::new(0));
        rounds(
            32,
            100,
            |round, number| {
                let key = key(round);
                for attempt in 0..4 {
                    let decision = charge(&limiter, &user(&key), 1);
                    let Some(charge) = decision.charge() else { continue };
                    admitted.fetch_add(1, SeqCst);
                    if (number + attempt) % 2 == 0 {
                        assert_eq!(now(limiter.refund(&charge)), Correction::Done);
                        refunded.fetch_add(1, SeqCst);
                        assert_eq!(now(limiter.refund(&charge)), Correction::Repeated);
                    }
                }
            },
            |round| {
                let (admitted, refunded) = (admitted.swap(0, SeqCst), refunded.swap(0, SeqCst));
                assert!(
                    admitted <= 40 + refunded,
                    "{algorithm} in round {round}: {admitted} admitted, {refunded} refunded"
                );
                let left = remaining(&limiter, algorithm.name(), &user(&key(round)));
                assert_eq!(left, 40 - (admitted - refunded), "{algorithm} in round {round}");
            },
        );
    }
}

#[test]
fn charge_refunded_by_all_threads_is_refunded_once() {
    let (_, limiter) = shared([limit(Algorithm::FixedWindow, 40), limit(Algorithm::SlidingLog, 40)]);
    let charges: Vec<_> =
        (0..200).map(|round| charge(&limiter, &user(&key(round)), 5).charge().expect("admitted")).collect();
    let done = AtomicU64::new(0);
    rounds(
        16,
        200,
        |round, _| match now(limiter.refund(&charges[round])) {
            Correction::Done => drop(done.fetch_add(1, SeqCst)),
            other => assert_eq!(other, Correction::Repeated),
        },
        |round| {
            assert_eq!(done.swap(0, SeqCst), 1, "round {round}");
            assert_eq!(remaining(&limiter, "fixed-window", &user(&key(round))), 40);
        },
    );
}

#[test]
fn threads_never_hold_more_slots_than_the_limit() {
    let slots = Limit::new("slots", Quota::slots(5)).by("user").ttl(Duration::from_secs(60));
    let (_, limiter) = shared([slots]);
    let (holders, peak, acquired_total) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    rounds(
        32,
        200,
        |_, _| {
            for _ in 0..4 {
                let acquired = now(limiter.acquire(&user("alice"))).unwrap();
                if let Some(guard) = acquired.slot {
                    let now = holders.fetch_add(1, SeqCst) + 1;
                    peak.fetch_max(now, SeqCst);
                    acquired_total.fetch_add(1, SeqCst);
                    thread::yield_now();
                    holders.fetch_sub(1, SeqCst);
                    drop(guard);
                }
            }
        },
        |_| assert_eq!(remaining(&limiter, "slots", &user("alice")), 5, "all slots are released"),
    );
    assert!(peak.load(SeqCst) <= 5, "{peak:?} at once");
    assert!(acquired_total.load(SeqCst) > 200);
}

/// Known keys are not affected.
#[test]
fn cap_holds_while_threads_flood_the_store() {
    const MAX_KEYS: usize = 2_000;
    let store = store(MAX_KEYS, &clock());
    let limiter = on(&store, [limit(Algorithm::TokenBucket, 10), limit(Algorithm::SlidingLog, 10)]);
    charge(&limiter, &user("known"), 10);
    rounds(
        8,
        20,
        |round, number| {
            for flood in 0..100 {
                charge(&limiter, &user(&format!("{round}-{number}-{flood}")), 1);
                assert!(store.keys() <= MAX_KEYS);
                assert!(!charge(&limiter, &user("known"), 1).allowed());
            }
        },
        |_| assert!(store.keys() <= MAX_KEYS),
    );
    assert_eq!(store.keys(), MAX_KEYS);
    assert!(store.overflows() > 0);
}

#[test]
fn key_count_is_exact_under_concurrent_churn() {
    let store = store(1_000, &clock());
    let limiter = on(&store, [limit(Algorithm::SlidingLog, 10), limit(Algorithm::FixedWindow, 10)]);
    rounds(
        16,
        100,
        |round, number| {
            let key = format!("{}-{}", round % 7, number % 5);
            charge(&limiter, &user(&key), 1);
            for limit in ["sliding-log", "fixed-window"] {
                now(limiter.forget(limit, &user(&key))).unwrap();
            }
        },
        |round| {
            for number in 0..5 {
                let key = format!("{}-{number}", round % 7);
                for limit in ["sliding-log", "fixed-window"] {
                    now(limiter.forget(limit, &user(&key))).unwrap();
                }
            }
            assert_eq!((store.keys(), store.log_bytes()), (0, 0), "round {round}");
        },
    );
}
