//! A thousand concurrent callers that reserve an estimate and settle their actual use.

#![expect(clippy::unwrap_used, reason = "what helps a test may fail like a test")]

mod support;

use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use support::*;
use tollkeeper_server::control::rlimit;
use tollkeeper_tests::contract::{self, Admission, Rate, Windows};
use tollkeeper_tests::redis;

/// Tokens a minute.
const BUDGET: u64 = 100_000;
const MINUTE: u64 = 60_000_000;
const CALLERS: u64 = 1_000;
/// How often each of them calls, one after the other.
const CALLS: u64 = 4;

/// What was granted to a call, and what became of it. Times are in microseconds since the callers began.
struct Call {
    guess: u64,
    /// `None` if the caller died and never settled.
    used: Option<u64>,
    /// When it was asked for and answered.
    reserved: [u64; 2],
    /// When what was used was told and that was answered.
    settled: [u64; 2],
    /// How long it was until all would be there again, as the answer had it: a window ends then.
    reset_after: u64,
}

impl Call {
    /// What must stay charged.
    fn charged(&self) -> u64 {
        self.used.unwrap_or(self.guess)
    }

    /// What it used of what it was granted.
    fn within(&self) -> u64 {
        self.charged().min(self.guess)
    }

    /// Its use beyond the grant, which is charged on settling and cannot be refused.
    fn beyond(&self) -> u64 {
        self.charged() - self.within()
    }
}

/// The same numbers in every run.
fn random(seed: u64) -> u64 {
    let mut number = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^= number >> 29;
    number = number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number ^ number >> 32
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap()
}

/// For how long a surplus comes back for sure, in microseconds.
type Until = fn(&Call) -> u64;

/// One who calls over one connection until it dies; what was granted to it, and how much of what it wanted was not.
fn caller(number: u64, client: &mut Client, began: Instant, comes_back: Until) -> (Vec<Call>, u64) {
    let (mut calls, mut refused) = (Vec::new(), 0);
    for seed in (number * CALLS..).take(usize::try_from(CALLS).unwrap()) {
        let chance = |what: u64| random(seed + what * CALLERS * CALLS);
        let guess = 100 + chance(0) % 400;
        let body = format!("{{\"facts\":{{\"api_key\":\"k\",\"tokens\":{guess}}},\"ttl\":\"60s\"}}");
        let asked = micros(began.elapsed());
        let answer = client.request("POST", "/v1/reserve", &body);
        let answered = micros(began.elapsed());
        if answer.status == 429 {
            refused += guess;
            continue;
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        let said = answer.json();
        let reset = said["limits"][0]["reset_after"].as_f64().unwrap();
        let reset_after = micros(Duration::from_secs_f64(reset));
        let reserved = [asked, answered];
        let mut call = Call { guess, used: None, reserved, settled: reserved, reset_after };
        if chance(1).is_multiple_of(20) {
            calls.push(call);
            break;
        }
        // One in ten has guessed too little.
        let most = if chance(2).is_multiple_of(10) { guess * 3 / 2 } else { guess };
        let used = chance(3) % (most + 1);
        let charge = said["charge"].as_str().unwrap();
        let body = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":{used}}}}}");
        let asked = micros(began.elapsed());
        let mut settled = client.request("POST", "/v1/settle", &body);
        // A store that misses its deadline may have settled: the call is repeated, and then reports that it was done.
        let repeated = settled.status == 503;
        while settled.status == 503 {
            settled = client.request("POST", "/v1/settle", &body);
        }
        call.settled = [asked, micros(began.elapsed())];
        let done = settled.status == 200 && (repeated || settled.json()["done"] == true);
        let late = call.settled[1] >= call.reserved[0] + comes_back(&call);
        assert!(done || late && matches!(settled.status, 200 | 404), "{settled:?}");
        call.used = Some(used);
        calls.push(call);
    }
    (calls, refused)
}

/// What a thousand callers got, and what was left when they had gone.
struct Run {
    calls: Vec<Call>,
    remaining: u64,
    /// When it was asked what remains and when it was answered, in microseconds since they began.
    looked: [u64; 2],
    /// When that was, in microseconds since the epoch.
    epoch: u64,
}

fn run(server: &Server, comes_back: Until) -> Run {
    // A connection is a file on both sides.
    rlimit::raise();
    let callers = usize::try_from(CALLERS).unwrap();
    assert!(rlimit::connections(0) > callers, "`ulimit -Hn` is too low for this test");
    let mut clients: Vec<Client> = (0..CALLERS).map(|_| server.client()).collect();
    let open = || fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    eventually("all callers are connected at once", || open() >= callers);

    let (began, epoch) = (Instant::now(), micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap()));
    let go = Barrier::new(callers);
    let ended: Vec<(Vec<Call>, u64)> = thread::scope(|scope| {
        let spawn = |(number, client)| {
            let go = &go;
            let work = move || {
                go.wait();
                caller(number, client, began, comes_back)
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
    let looked = [asked, micros(began.elapsed())];
    let remaining = peek["limits"][0]["remaining"].as_u64().unwrap();

    let sum = |of: fn(&Call) -> u64| calls.iter().map(of).sum::<u64>();
    let (guessed, charged) = (sum(|call| call.guess), sum(Call::charged));
    let died = calls.iter().filter(|call| call.used.is_none()).count();
    let more = calls.iter().filter(|call| call.charged() > call.guess).count();
    println!(
        "{} of {} calls granted in {:.1} s: {guessed} guessed, {charged} used of {BUDGET}/min, {remaining} left, {refused} \
         refused; {died} died, {more} used more than they guessed",
        calls.len(),
        CALLERS * CALLS,
        Duration::from_micros(asked).as_secs_f64(),
    );
    assert!(died > 0 && more > 0 && refused > 0 && guessed > BUDGET, "otherwise this shows little");
    Run { calls, remaining, looked, epoch }
}

impl Run {
    /// The history of actual use, at the times when the answers were here, and by how much they can be late.
    fn history(&self) -> (Vec<Admission>, u64) {
        let use_of = |call: &Call| Admission { at: call.reserved[1], cost: call.within() };
        let late = self.calls.iter().map(|call| call.reserved[1] - call.reserved[0]).max().unwrap();
        (self.calls.iter().map(use_of).collect(), late)
    }

    /// Demands that what remains is the budget without all that still counts. What was charged between two times may
    /// count or must; these are nearly always the same.
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
            "{} left, not {least} to {most}: what was used, and what those guessed who died",
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

/// Windows of a minute: an answer says when its window ends, so the store's time is known to the microsecond.
fn in_windows(server: &Server) {
    /// What the clocks of both sides may differ by.
    const APART: u64 = 10_000;
    let run = run(server, |call| call.reset_after);
    let at = |call: &Call| {
        let about = run.epoch + call.reserved[1];
        // The end of a window that is nearest to that.
        let end = (about + call.reset_after + MINUTE / 2) / MINUTE * MINUTE;
        end - call.reset_after
    };
    let history: Vec<Admission> =
        run.calls.iter().map(|call| Admission { at: at(call), cost: call.within() }).collect();
    let needed = contract::fixed_window(&history, Windows { period: MINUTE, offset: 0 });
    assert!(needed <= BUDGET.into(), "{needed} used in one window");

    let windows =
        |times: [u64; 2]| [(run.epoch + times[0] - APART) / MINUTE, (run.epoch + times[1] + APART) / MINUTE];
    let now = windows(run.looked);
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
    let [asked, answered] = run.looked;
    run.charged_exactly(
        |call| call.reserved,
        |times| times[1] + MINUTE > asked,
        |times| times[0] + MINUTE > answered,
    );
}

/// A bucket refills while they call, and returns only what it has not refilled meanwhile.
fn in_a_bucket(server: &Server) {
    let run = run(server, |_| 0);
    let (history, late) = run.history();
    let needed = contract::bucket(&history, Rate { count: BUDGET, period: MINUTE, tick: late });
    assert!(needed <= BUDGET.into(), "{needed} used beyond the rate");
    let used: u64 = run.calls.iter().map(Call::charged).sum();
    let refilled = (BUDGET * run.looked[1]).div_ceil(MINUTE);
    assert!(run.remaining + used <= BUDGET + refilled, "{} left of {used} used", run.remaining);
}

#[test]
fn thousand_callers_stay_within_a_bucket() {
    let (_folder, server) = on_memory("token-bucket");
    in_a_bucket(&server);
    let (_folder, _redis, server) = on_redis("token-bucket");
    in_a_bucket(&server);
}
