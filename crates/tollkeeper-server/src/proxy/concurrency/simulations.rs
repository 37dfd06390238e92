//! The adaptive limit in front of a simulated upstream: loads, and changes of its capacity and latency.

use super::simulator::{Scenario, Second, SimulatedUpstream, run};
use super::step::Bounds;
use tollkeeper::{Percent, Span, Time};

/// 1,500 requests per second.
const NORMAL: SimulatedUpstream = SimulatedUpstream { workers: 30, work: Span::from_millis(20) };
const FEWER_WORKERS: SimulatedUpstream = SimulatedUpstream { workers: 10, ..NORMAL };
const SLOWER_WORK: SimulatedUpstream = SimulatedUpstream { work: Span::from_millis(60), ..NORMAL };
const CAPACITY: u64 = 1_500;
const BOUNDS: Bounds = Bounds { min: 8, max: 512 };
/// How many runs with other random numbers there are for each case.
const SEEDS: u64 = 2;

/// The upstream changes at 60 s and recovers at 120 s.
fn changing(upstream: SimulatedUpstream, load: u64, seed: u64) -> Scenario {
    Scenario {
        upstream: NORMAL,
        changes: vec![(at(60), upstream), (at(120), NORMAL)],
        arrivals: CAPACITY * load / 100,
        priorities: vec![(Percent::ALL, Percent::ALL)],
        bounds: BOUNDS,
        end: at(180),
        seed,
    }
}

fn at(second: u64) -> Time {
    Time::from_micros(second * 1_000_000)
}

/// Checks every second from 30 s after each change to the next one.
fn check(upstream: SimulatedUpstream, load: u64) {
    for seed in 1..=SEEDS {
        let seconds = run(&changing(upstream, load, seed));
        let phases = [(30..60, NORMAL), (90..120, upstream), (150..180, NORMAL)];
        for (settled, upstream) in phases {
            // A quarter more than its workers: enough that none is ever idle.
            let ideal = f64::from(u32::try_from(upstream.workers).unwrap()) * 1.25;
            let work = upstream.work.as_micros() as f64;
            for second in settled {
                let Second { limit, latency, answered, .. } = seconds[second];
                let case = format!("load {load} %, seed {seed}, second {second}: limit {limit}");
                assert!((0.5..=2.0).contains(&(f64::from(limit) / ideal)), "{case}");
                assert!(latency as f64 <= work * 2.0, "{case}, latency {latency} us");
                let demand = (CAPACITY * load / 100) as f64;
                let capacity = upstream.workers as f64 * 1e6 / work;
                // In a second with a probe, some work is lost.
                assert!(answered as f64 >= capacity.min(demand) * 0.8, "{case}, {answered} answered");
            }
        }
        assert!(seconds.iter().all(|second| second.limit >= BOUNDS.min), "load {load} %, seed {seed}");
    }
}

#[test]
fn limit_follows_lost_capacity_at_every_load() {
    for load in [70, 130, 300] {
        check(FEWER_WORKERS, load);
    }
}

#[test]
fn limit_follows_slower_work_at_every_load() {
    for load in [70, 130, 300] {
        check(SLOWER_WORK, load);
    }
}

/// From 30 s to the end, probes included.
#[test]
fn overloaded_upstream_keeps_97_percent_of_its_throughput() {
    let seconds = run(&changing(NORMAL, 130, 1));
    let answered: u64 = seconds[30..].iter().map(|second| second.answered).sum();
    let capacity = CAPACITY * 150;
    assert!(answered * 100 >= capacity * 97, "{answered} of {capacity}");
}

/// 90 of 100 workers are busy, for a second each. Requests of a probe are answered after it, and began when the lowered
/// limit was full: that must not look as if the limit were.
#[test]
fn limit_that_is_not_in_use_does_not_grow() {
    let upstream = SimulatedUpstream { workers: 100, work: Span::from_secs(1) };
    let seconds = run(&Scenario { upstream, changes: Vec::new(), arrivals: 90, ..changing(upstream, 0, 1) });
    for second in &seconds[60..] {
        assert!((90..=200).contains(&second.limit), "limit {}", second.limit);
    }
    // Now and then four fifths of the limit are in use, and a probe follows. A probe every 10 s would shed 6 %.
    let shed: u64 = seconds[60..].iter().map(|second| second.shed[0]).sum();
    assert!(shed * 50 < 90 * 120, "{shed} of 10800 requests were shed");
}

/// Each priority sends a third of the requests; together they are 1.3 times the capacity.
#[test]
fn low_priority_is_shed_before_high() {
    let [high, normal, low] = [100, 90, 70].map(Percent::new);
    let third = Percent::from_basis_points(3_333).unwrap();
    let priorities = vec![(high, third), (normal, third), (low, third)];
    let seconds = run(&Scenario { priorities, ..changing(FEWER_WORKERS, 130, 1) });
    let shed = |seconds: &[Second]| {
        [0, 1, 2].map(|priority| seconds.iter().map(|second| second.shed[priority]).sum::<u64>())
    };
    // 1,950 arrive and 1,500 can be answered in a second: shedding most of the 650 of low priority is enough.
    let [high, normal, low] = shed(&seconds[30..60]);
    assert!(low > 30 * 300, "{low} of low priority were shed");
    assert!(high * 20 < low && normal * 2 < low && high <= normal, "{high}, {normal}, {low} were shed");
    // With a third of the capacity, 500 of the 650 of high priority can be answered, and hardly any other.
    let [high, normal, low] = shed(&seconds[90..120]);
    assert!(high < normal && normal < low, "{high}, {normal}, {low} were shed");
    assert!(low > 30 * 600, "{low} of low priority were shed");
}
