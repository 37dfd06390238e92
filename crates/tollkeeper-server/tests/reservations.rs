//! A thousand callers who reserve what they guess and settle what they used, at the same time.

#![expect(clippy::unwrap_used, reason = "what helps a test may fail like a test")]

mod support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use support::*;
use tollkeeper_tests::redis;

const BUDGET: u64 = 100_000;
const CALLERS: u64 = 1_000;

/// What became of one caller.
enum Caller {
    /// There was nothing left for its guess.
    Refused(u64),
    /// It said what it had used.
    Settled { guess: u64, used: u64 },
    /// It died, and nobody says what it used.
    Died { guess: u64 },
}

/// The same numbers in every run.
fn random(seed: u64) -> u64 {
    let mut number = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^= number >> 29;
    number = number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number ^ number >> 32
}

fn call(server: &Server, caller: u64) -> Caller {
    let guess = 100 + random(caller) % 400;
    let body = format!("{{\"facts\":{{\"api_key\":\"k\",\"tokens\":{guess}}},\"ttl\":\"60s\"}}");
    let mut client = server.client();
    let answer = client.request("POST", "/v1/reserve", &body);
    if answer.status == 429 {
        return Caller::Refused(guess);
    }
    assert_eq!(answer.status, 200, "{answer:?}");
    if random(caller + CALLERS).is_multiple_of(10) {
        return Caller::Died { guess };
    }
    let charge = answer.json()["charge"].as_str().unwrap().to_owned();
    let used = random(caller + 2 * CALLERS) % (guess + 1);
    let body = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":{used}}}}}");
    let settled = client.request("POST", "/v1/settle", &body);
    assert_eq!((settled.status, settled.json()["done"].as_bool()), (200, Some(true)), "{settled:?}");
    Caller::Settled { guess, used }
}

/// A day instead of a minute, so that all of it falls into one window.
fn settle_on(server: &Server) {
    let (next, callers) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                while let caller @ 0..CALLERS = next.fetch_add(1, SeqCst) {
                    let ended = call(server, caller);
                    callers.lock().unwrap().push(ended);
                }
            });
        }
    });
    let callers = callers.into_inner().unwrap();
    assert_eq!(callers.len() as u64, CALLERS);
    let charged: u64 = callers
        .iter()
        .map(|caller| match caller {
            Caller::Refused(_) => 0,
            Caller::Settled { used, .. } => *used,
            Caller::Died { guess } => *guess,
        })
        .sum();
    let guessed: u64 = callers
        .iter()
        .map(|caller| match caller {
            Caller::Refused(guess) | Caller::Settled { guess, .. } | Caller::Died { guess } => *guess,
        })
        .sum();
    let died = callers.iter().filter(|caller| matches!(caller, Caller::Died { .. })).count();
    let refused = callers.iter().filter(|caller| matches!(caller, Caller::Refused(_))).count();
    println!("{guessed} guessed, {charged} of {BUDGET} charged, {died} died, {refused} refused");
    assert!(died > 0 && refused > 0, "otherwise this shows little");
    assert!(guessed > BUDGET && charged <= BUDGET);
    let peek = server.post("/v1/peek", r#"{"facts":{"api_key":"k","tokens":1}}"#).json();
    assert_eq!(
        peek["limits"][0]["remaining"].as_u64(),
        Some(BUDGET - charged),
        "what was used, and what those guessed who died: no more and no less"
    );
}

#[test]
fn a_thousand_callers_at_once_are_charged_what_they_used_and_the_dead_what_they_guessed() {
    let limits = format!(
        "limits:\n  - {{ name: tokens, by: api_key, rate: {BUDGET}/day, algorithm: fixed-window, cost: tokens }}\n"
    );
    let folder = Folder::new();
    settle_on(&Server::with_config(&folder, &limits));
    let redis = redis::Server::start();
    let file = folder.write("redis.yaml", &format!("redis: {{ deadline: 5s }}\n{limits}"));
    settle_on(&Server::with(&["--store", &redis.url(), "--config", file.to_str().unwrap()]));
}
