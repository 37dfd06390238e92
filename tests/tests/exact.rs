//! Many nodes on one Redis: together they admit exactly the limit, with at most one round trip for a request.

use std::future::{poll_fn, ready};
use std::io::{BufRead, BufReader, Write};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::task::Poll;

use tollkeeper::{Algorithm, Approximation, Consistency, Facts, Limit, Limiter, Quota, facts};
use tollkeeper_tests::exact::{self, ALL, PER_PROCESS, PER_ROUTE, PROCESSES, REQUESTS, TASKS};
use tollkeeper_tests::redis::{Program, Server, leased_limiter, limiter};
use tollkeeper_tests::round_trips::Proxy;

async fn remaining(limiter: &Limiter, limit: &str, facts: &Facts<'_>) -> u64 {
    let usage = limiter.usage(facts).await.expect("valid");
    assert_eq!(usage.degraded(), None);
    usage.limit(limit).expect("valid").outcome().remaining
}

/// A `redis-caller` process. Killed on drop.
struct Caller(Child);

impl Drop for Caller {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs all processes at once and returns how many requests of each were admitted, and how many script calls decided
/// them all. `None` if the store did not decide every request because the machine stalled.
fn admitted(server: &Server, url: &str) -> Option<(Vec<u64>, u64)> {
    let mut callers: Vec<_> = (0..PROCESSES)
        .map(|process| {
            let mut child = Command::new(env!("CARGO_BIN_EXE_redis-caller"))
                .args([url, &process.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("cargo builds the caller for this test");
            let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
            (Caller(child), lines)
        })
        .collect();
    for (_, lines) in &mut callers {
        assert_eq!(lines.next().expect("valid").expect("valid"), "ready");
    }
    let before = server.script_calls();
    for (Caller(child), _) in &mut callers {
        child.stdin.take().expect("piped").write_all(b"go\n").expect("valid");
    }
    let mut admitted = Vec::new();
    let mut exact = 0;
    for (_, lines) in &mut callers {
        let line = lines.next().expect("valid").expect("valid");
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().expect("valid")).collect();
        admitted.push(numbers[0]);
        exact += numbers[1];
    }
    (exact == ASKED).then(|| (admitted, server.script_calls()[0] - before[0]))
}

const ASKED: u64 = (PROCESSES * TASKS * REQUESTS) as u64;

/// Eight processes with 64 tasks each; a refused request charges none of its three limits.
#[tokio::test]
async fn eight_processes_admit_exactly_the_limit() {
    let (server, url, (admitted, calls)) = (0..5)
        .find_map(|_| {
            let server = Server::start();
            let url = server.url();
            let figures = admitted(&server, &url)?;
            Some((server, url, figures))
        })
        .expect("the store answers in one of five attempts");
    println!(
        "{ASKED} checks of three limits from {PROCESSES} processes: {admitted:?} admitted, {calls} calls"
    );
    assert_eq!(admitted.iter().sum::<u64>(), ALL);
    assert!(calls <= ASKED, "never more than one call for a check");

    let limiter = limiter(&url, exact::limits());
    assert_eq!(remaining(&limiter, "all", &exact::facts(0, 0)).await, 0);
    for (process, admitted) in admitted.iter().enumerate() {
        let left = remaining(&limiter, "per-process", &exact::facts(process, 0)).await;
        assert_eq!(
            PER_PROCESS - left,
            *admitted,
            "process {process} was charged for its admitted requests only"
        );
    }
    let mut routes = 0;
    for task in 0..2 {
        routes += PER_ROUTE - remaining(&limiter, "per-route", &exact::facts(0, task)).await;
    }
    assert_eq!(routes, ALL, "the routes were charged for the admitted requests only");
    drop(server);
}

/// Three layered limits.
fn layered() -> Vec<Limit> {
    vec![
        Limit::new("per-user", Quota::per_day(100).burst(100)).by("user"),
        Limit::new("all", Quota::per_day(1_000)).algorithm(Algorithm::FixedWindow),
        Limit::new("per-route", Quota::per_day(1_000)).by("route"),
    ]
}

#[tokio::test]
async fn single_check_of_three_limits_is_one_round_trip() {
    let server = Server::on_a_port(Program::Redis, "port", &[]);
    let proxy = Proxy::to(server.port());
    let limiter = limiter(&format!("redis://127.0.0.1:{}", proxy.port()), layered());
    let facts = facts! { "user" => "alice", "route" => "/" };
    // Warm up both connections: the first call of a script takes one more round trip to load it.
    for _ in 0..8 {
        limiter.peek(&facts).await.expect("valid");
    }
    let (turns, before) = (proxy.turns(), server.script_calls());
    for number in 0..200 {
        let before = proxy.scripts();
        let decision = limiter.check(&facts).await.expect("valid");
        assert_eq!((decision.allowed(), decision.degraded()), (number < 100, None), "admitted and refused");
        assert_eq!(proxy.scripts() - before, 1, "check {number}");
    }
    let after = server.script_calls();
    assert_eq!((after[0] - before[0], after[1]), (200, before[1]), "one call for each check, none repeated");
    let others = (proxy.turns() - turns).saturating_sub(200);
    println!(
        "200 checks of three limits: 200 round trips, 200 scripts, {others} round trips in the background"
    );
    // A new key costs no extra round trip.
    for number in 0..20 {
        let before = proxy.scripts();
        let user = format!("new-{number}");
        limiter.check(&facts! { "user" => &user, "route" => &user }).await.expect("valid");
        assert_eq!(proxy.scripts() - before, 1, "one script for a new key");
    }
}

#[tokio::test]
async fn corrections_and_slots_are_one_round_trip_each() {
    let server = Server::on_a_port(Program::Redis, "port", &[]);
    let proxy = Proxy::to(server.port());
    let slots = Limit::new("slots", Quota::slots(10)).by("user");
    let limits = layered().into_iter().chain([slots]).collect();
    let limiter = limiter(&format!("redis://127.0.0.1:{}", proxy.port()), limits);
    let facts = facts! { "user" => "alice", "route" => "/" };
    // The first round loads the scripts, the second is measured.
    for round in 0..2 {
        let before = server.script_calls()[1];
        let mut counted = proxy.scripts();
        let mut turns = || {
            let turns = proxy.scripts() - counted;
            counted += turns;
            turns
        };
        let charge = limiter.check(&facts).await.expect("valid").charge().expect("valid");
        let checked = turns();
        limiter.refund(&charge).await;
        let refunded = turns();
        let slot = limiter.acquire(&facts).await.expect("valid").slot.expect("valid").keep();
        let acquired = turns();
        assert!(limiter.renew(&slot).await.unwrap());
        let renewed = turns();
        assert!(limiter.release(&slot).await.unwrap());
        let all = [checked, refunded, acquired, renewed, turns()];
        println!("check, refund, acquire, renew, release: {all:?} round trips");
        if round == 1 {
            assert_eq!((all, server.script_calls()[1]), ([1; 5], before));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_in_flight_share_round_trips_and_scripts() {
    let server = Server::on_a_port(Program::Redis, "port", &[]);
    let proxy = Proxy::to(server.port());
    let limiter = limiter(&format!("redis://127.0.0.1:{}", proxy.port()), layered());
    for _ in 0..8 {
        limiter.peek(&facts! { "user" => "alice", "route" => "/" }).await.expect("valid");
    }
    let (turns, called) = (proxy.scripts(), server.script_calls());
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let user = format!("user-{}", task % 20);
                let facts = facts! { "user" => &user, "route" => "/" };
                let mut admitted = 0;
                for _ in 0..50 {
                    let decision = limiter.check(&facts).await.expect("valid");
                    assert_eq!(decision.degraded(), None);
                    admitted += u64::from(decision.allowed());
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.expect("valid");
    }
    assert_eq!(admitted, 1_000);
    let (asked, turns, called) = (64 * 50, proxy.scripts() - turns, server.script_calls()[0] - called[0]);
    println!("{asked} checks of three limits, 64 in flight: {turns} round trips, {called} scripts");
    assert!(turns <= called && called < asked, "checks share calls, and never take more than one each");
}

/// Each decision shows how much its predecessors have left, so a request that overtakes another is detected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_decided_in_arrival_order() {
    const ROUNDS: usize = 300;
    const REQUESTS: u64 = 400;
    let server = Server::start();
    let count = |algorithm: Algorithm| {
        let name = algorithm.name();
        Limit::new(name, Quota::per_day(REQUESTS)).by("user").when("kind", name).algorithm(algorithm)
    };
    let kinds = [Algorithm::FixedWindow, Algorithm::SlidingLog, Algorithm::SlidingWindow];
    let all = Limit::new("all", Quota::per_day(REQUESTS)).by("user").algorithm(Algorithm::FixedWindow);
    let limiter = limiter(&server.url(), kinds.map(count).into_iter().chain([all]).collect());
    // A new node first fetches the secret that all nodes share.
    limiter.peek(&facts! { "user" => "first" }).await.expect("valid");
    for round in 0..ROUNDS {
        // The first round counts, too, although the server does not know most of the scripts yet.
        let user = format!("user-{round}");
        let mut asked = Vec::new();
        for number in 0..REQUESTS {
            let (limiter, user) = (limiter.clone(), user.clone());
            let kind = kinds[usize::try_from(number / 7).expect("few") % kinds.len()].name();
            let mut check: Pin<Box<dyn Future<Output = u64> + Send>> = Box::pin(async move {
                let decision =
                    limiter.check(&facts! { "user" => &user, "kind" => kind }).await.expect("valid");
                assert_eq!((decision.allowed(), decision.degraded()), (true, None));
                decision.limit("all").expect("it applies").outcome().remaining
            });
            // A request arrives with its first poll.
            let left = poll_fn(|context| Poll::Ready(check.as_mut().poll(context))).await;
            asked.push(if let Poll::Ready(left) = left { Box::pin(ready(left)) } else { check });
        }
        for (number, check) in asked.into_iter().enumerate() {
            let left = check.await;
            assert_eq!(left, REQUESTS - 1 - number as u64, "round {round}: request {number} was overtaken");
        }
    }
    let [calls, _] = server.script_calls();
    println!("{ROUNDS} rounds of {REQUESTS} requests: {calls} calls");
}

/// The first request needs a script that the server does not know yet, and is sent again with its text. The second
/// needs one that it knows, and would be decided first.
#[tokio::test]
async fn request_with_unknown_script_is_not_overtaken() {
    let server = Server::start();
    let limiter = limiter(
        &server.url(),
        vec![
            Limit::new("per-user", Quota::per_hour(1)).by("user"),
            Limit::new("per-path", Quota::per_hour(9)).algorithm(Algorithm::FixedWindow).by("path"),
        ],
    );
    assert!(limiter.check(&facts! { "user" => "known script" }).await.unwrap().allowed());
    // Both are sent before the server replies to the first.
    server.signal("STOP");
    let mut checks = Vec::new();
    for facts in [facts! { "user" => "alice", "path" => "/" }, facts! { "user" => "alice" }] {
        let limiter = limiter.clone();
        checks.push(tokio::spawn(async move { limiter.check(&facts).await.unwrap().allowed() }));
        // This thread runs all tasks: by now the check was sent, or waits.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    server.signal("CONT");
    let [first, second] = checks.try_into().expect("two checks");
    assert_eq!((first.await.unwrap(), second.await.unwrap()), (true, false));
}

/// A node asks for permits in the background, in the call that decides its next check.
#[tokio::test]
async fn lease_and_check_share_one_script_call() {
    let server = Server::start();
    let limits = vec![
        Limit::new("hot", Quota::per_second(1_000).burst(100_000))
            .by("user")
            .consistency(Consistency::Leased),
        Limit::new("other", Quota::per_day(1_000)).by("tenant"),
    ];
    let limiter = leased_limiter(&server.url(), limits);
    // The first round connects and loads the scripts, the second is measured.
    for user in ["alice", "bob"] {
        let hot = facts! { "user" => user };
        let before = server.script_calls();
        for _ in 0..4 {
            let decision = limiter.check(&hot).await.expect("valid");
            assert_eq!((decision.allowed(), decision.limit("hot").unwrap().approximation()), (true, None));
        }
        // Four units are worth a lease, which is asked for now.
        assert!(limiter.check(&facts! { "tenant" => "acme" }).await.expect("valid").allowed());
        let decision = limiter.check(&hot).await.expect("valid");
        let after = server.script_calls();
        if user == "bob" {
            assert_eq!(
                [after[0] - before[0], after[1] - before[1]],
                [5, 0],
                "five of six checks, and the lease"
            );
            assert_eq!(decision.limit("hot").unwrap().approximation(), Some(Approximation::Permits));
        }
    }
}
