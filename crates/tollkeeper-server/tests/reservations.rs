//! A thousand concurrent callers that reserve an estimate and settle their actual use.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use support::*;
use tollkeeper_core::contract::{self, Admission, Rate, Windows};
use tollkeeper_server::control::rlimit;
use tollkeeper_tests::redis;

/// Tokens a minute.
const BUDGET: u64 = 100_000;
const MINUTE: u64 = 60_000_000;
const CALLERS: u64 = 1_000;
/// Sequential reservations of each caller.
const CALLS: u64 = 4;

/// One granted reservation and its settlement. Times are in microseconds since the start of the run.
struct Call {
    estimate: u64,
    /// `None` if the caller died and never settled.
    used: Option<u64>,
    /// When the reserve request was sent, and when its response arrived.
    reserved: [u64; 2],
    /// When the settle request was sent, and when its response arrived.
    settled: [u64; 2],
    /// `reset_after` of the response: the time until the full quota is available, which is the end of a fixed window.
    reset_after: u64,
}

impl Call {
    /// The units that must stay charged: the actual use, or the estimate if the caller died.
    fn charged(&self) -> u64 {
        self.used.unwrap_or(self.estimate)
    }

    /// The used units that the reservation covers.
    fn within(&self) -> u64 {
        self.charged().min(self.estimate)
    }

    /// The used units beyond the reservation, which are charged on settling and cannot be refused.
    fn beyond(&self) -> u64 {
        self.charged() - self.within()
    }
}

/// A deterministic pseudorandom number: the same in every run.
fn random(seed: u64) -> u64 {
    let mut number = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^= number >> 29;
    number = number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number ^ number >> 32
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap()
}

/// How long after the reservation a settlement is guaranteed to return the surplus, in microseconds.
type RefundPeriod = fn(&Call) -> u64;

/// Runs one caller over one connection until it dies or has made all its calls. Returns the granted calls and the sum of
/// the refused estimates.
fn caller(number: u64, client: &mut Client, began: Instant, refund_period: RefundPeriod) -> (Vec<Call>, u64) {
    let (mut calls, mut refused) = (Vec::new(), 0);
    for seed in (number * CALLS..).take(usize::try_from(CALLS).unwrap()) {
        let chance = |draw: u64| random(seed + draw * CALLERS * CALLS);
        let estimate = 100 + chance(0) % 400;
        let body = format!("{{\"facts\":{{\"api_key\":\"k\",\"tokens\":{estimate}}},\"ttl\":\"60s\"}}");
        let asked = micros(began.elapsed());
        let answer = client.request("POST", "/v1/reserve", &body);
        let answered = micros(began.elapsed());
        if answer.status == 429 {
            refused += estimate;
            continue;
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        let reserved_body = answer.json();
        let reset = reserved_body["limits"][0]["reset_after"].as_f64().unwrap();
        let reset_after = micros(Duration::from_secs_f64(reset));
        let reserved = [asked, answered];
        let mut call = Call { estimate, used: None, reserved, settled: reserved, reset_after };
        if chance(1).is_multiple_of(20) {
            calls.push(call);
            break;
        }
        // One call in ten may use up to 1.5 times its estimate.
        let most = if chance(2).is_multiple_of(10) { estimate * 3 / 2 } else { estimate };
        let used = chance(3) % (most + 1);
        let charge = reserved_body["charge"].as_str().unwrap();
        let body = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":{used}}}}}");
        let asked = micros(began.elapsed());
        let mut settled = client.request("POST", "/v1/settle", &body);
        // A store that misses its deadline may still have settled, so the settlement is retried; the retry may then
        // report that it was already done.
        let repeated = settled.status == 503;
        while settled.status == 503 {
            settled = client.request("POST", "/v1/settle", &body);
        }
        call.settled = [asked, micros(began.elapsed())];
        let done = settled.status == 200 && (repeated || settled.json()["done"] == true);
        let late = call.settled[1] >= call.reserved[0] + refund_period(&call);
        assert!(done || late && matches!(settled.status, 200 | 404), "{settled:?}");
        call.used = Some(used);
        calls.push(call);
    }
    (calls, refused)
}

/// The granted calls of all callers, and the remaining budget after the last one.
struct Run {
    calls: Vec<Call>,
    remaining: u64,
    /// When the final peek was sent and when its response arrived, in microseconds since the start of the run.
    peeked: [u64; 2],
    /// The start of the run, in microseconds since the Unix epoch.
    epoch: u64,
}

fn run(server: &Server, refund_period: RefundPeriod) -> Run {
    // Each connection takes a file descriptor on both sides.
    rlimit::raise();
    let callers = usize::try_from(CALLERS).unwrap();
    assert!(rlimit::connections(0) > callers, "`ulimit -Hn` is too low for this test");
    let mut clients: Vec<Client> = (0..CALLERS).map(|_| server.client()).collect();
    let open = || fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    eventually("all callers are connected", || open() >= callers);

    let (began, epoch) = (Instant::now(), micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap()));
    let start = Barrier::new(callers);
    let ended: Vec<(Vec<Call>, u64)> = thread::scope(|scope| {
        let spawn = |(number, client)| {
            let start = &start;
            let work = move || {
                start.wait();
                caller(number, client, began, refund_period)
            };
            thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap()
        };
        let all: Vec<_> = (0..).zip(&mut clients).map(spawn).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let refused: u64 = ended.iter().map(|(_, refused)| refused).sum();
    let calls: Vec<Call> = ended.into_iter().flat_map(|(calls, _)| calls).collect();

    let asked = micros(began.elapsed());
    let peek = server.post("/v1/peek", r#"{"facts":{"api_key":"k","tokens":1}}"#).json();
    let peeked = [asked, micros(began.elapsed())];
    let remaining = peek["limits"][0]["remaining"].as_u64().unwrap();

    let sum = |of: fn(&Call) -> u64| calls.iter().map(of).sum::<u64>();
    let (estimated, charged) = (sum(|call| call.estimate), sum(Call::charged));
    let died = calls.iter().filter(|call| call.used.is_none()).count();
    let more = calls.iter().filter(|call| call.charged() > call.estimate).count();
    println!(
        "{} of {} calls granted in {:.1} s: {estimated} reserved, {charged} used of {BUDGET}/min, {remaining} left, \
         {refused} refused; {died} callers died, {more} calls used more than they reserved",
        calls.len(),
        CALLERS * CALLS,
        Duration::from_micros(asked).as_secs_f64(),
    );
    assert!(
        died > 0 && more > 0 && refused > 0 && estimated > BUDGET,
        "the run must have deaths, overuse and refusals, and reserve more than the budget"
    );
    Run { calls, remaining, peeked, epoch }
}

impl Run {
    /// The actual use, timed by the arrival of each response, and the longest time between a request and its response.
    fn history(&self) -> (Vec<Admission>, u64) {
        let use_of = |call: &Call| Admission { at: call.reserved[1], cost: call.within() };
        let late = self.calls.iter().map(|call| call.reserved[1] - call.reserved[0]).max().unwrap();
        (self.calls.iter().map(use_of).collect(), late)
    }

    /// Asserts that the remaining units are the budget minus all charges that still count. A charge is only known to lie
    /// between two times: `may` tells whether it can still count, `must` whether it certainly does. Both nearly always
    /// agree.
    fn charged_exactly(
        &self,
        reserved: impl Fn(&Call) -> [u64; 2],
        may: impl Fn([u64; 2]) -> bool,
        must: impl Fn([u64; 2]) -> bool,
    ) {
        let sum = |counts: &dyn Fn([u64; 2]) -> bool| -> u64 {
            let of = |call: &Call| {
                u64::from(counts(reserved(call))) * call.within()
                    + u64::from(counts(call.settled)) * call.beyond()
            };
            self.calls.iter().map(of).sum()
        };
        let (least, most) = (BUDGET.saturating_sub(sum(&may)), BUDGET.saturating_sub(sum(&must)));
        assert!(
            (least..=most).contains(&self.remaining),
            "{} left, expected {least} to {most}: the budget minus the actual use and the estimates of callers that died",
            self.remaining
        );
    }
}

fn limits(algorithm: &str) -> String {
    format!(
        "redis: {{ deadline: 5s }}\nlimits:\n  \
         - {{ name: tokens, by: api_key, rate: {BUDGET}/min, algorithm: {algorithm}, cost: tokens }}\n"
    )
}

fn on_memory(algorithm: &str) -> (Folder, Server) {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &limits(algorithm));
    (folder, server)
}

fn on_redis(algorithm: &str) -> (Folder, redis::Server, Server) {
    let (folder, redis) = (Folder::new(), redis::Server::start());
    let file = folder.write("tollkeeper.yaml", &limits(algorithm));
    let server = Server::with(&["--store", &redis.url(), "--config", file.to_str().unwrap()]);
    (folder, redis, server)
}

/// Fixed windows of a minute: a response reports when its window ends, so the store's time is known to the microsecond.
fn in_windows(server: &Server) {
    /// The largest clock difference between client and store, in microseconds.
    const CLOCK_SKEW: u64 = 10_000;
    let run = run(server, |call| call.reset_after);
    let at = |call: &Call| {
        let about = run.epoch + call.reserved[1];
        // The nearest end of a window.
        let end = (about + call.reset_after + MINUTE / 2) / MINUTE * MINUTE;
        end - call.reset_after
    };
    let history: Vec<Admission> =
        run.calls.iter().map(|call| Admission { at: at(call), cost: call.within() }).collect();
    let needed = contract::fixed_window(&history, Windows { period: MINUTE, offset: 0 });
    assert!(needed <= BUDGET.into(), "{needed} used in one window");

    let windows = |times: [u64; 2]| {
        [(run.epoch + times[0] - CLOCK_SKEW) / MINUTE, (run.epoch + times[1] + CLOCK_SKEW) / MINUTE]
    };
    let now = windows(run.peeked);
    run.charged_exactly(
        |call| [at(call).saturating_sub(run.epoch); 2],
        |times| {
            let [first, last] = windows(times);
            first <= now[1] && last >= now[0]
        },
        |times| windows(times).iter().chain(&now).all(|window| *window == now[1]),
    );
}

#[test]
fn thousand_callers_are_charged_their_actual_use() {
    let (_folder, server) = on_memory("fixed-window");
    in_windows(&server);
    let (_folder, _redis, server) = on_redis("fixed-window");
    in_windows(&server);
}

#[test]
fn thousand_callers_stay_within_a_sliding_log() {
    let (_folder, server) = on_memory("sliding-log");
    let run = run(&server, |_| MINUTE);
    let (history, late) = run.history();
    let needed = contract::any_period(&history, MINUTE - late);
    assert!(needed <= BUDGET.into(), "{needed} used in one minute");
    let [asked, answered] = run.peeked;
    run.charged_exactly(
        |call| call.reserved,
        |times| times[1] + MINUTE > asked,
        |times| times[0] + MINUTE > answered,
    );
}

/// A bucket refills during the run, so a settlement returns only units that were not refilled in the meantime.
fn in_a_bucket(server: &Server) {
    let run = run(server, |_| 0);
    let (history, late) = run.history();
    let needed = contract::bucket(&history, Rate { count: BUDGET, period: MINUTE, tick: late });
    assert!(needed <= BUDGET.into(), "{needed} used beyond the rate");
    let used: u64 = run.calls.iter().map(Call::charged).sum();
    let refilled = (BUDGET * run.peeked[1]).div_ceil(MINUTE);
    assert!(run.remaining + used <= BUDGET + refilled, "{} left after {used} were used", run.remaining);
}

#[test]
fn thousand_callers_stay_within_a_bucket() {
    let (_folder, server) = on_memory("token-bucket");
    in_a_bucket(&server);
    let (_folder, _redis, server) = on_redis("token-bucket");
    in_a_bucket(&server);
}
