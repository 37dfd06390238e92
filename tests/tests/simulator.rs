//! Plays thousands of scenarios in the simulator: see `tests/src/simulator`.
//!
//! `TOLLKEEPER_SEEDS` sets the number of scenarios. A failing seed prints the command that replays it, shrunk.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use tollkeeper_tests::simulator::mutants::{self, Mistake, Mistaken};
use tollkeeper_tests::simulator::scenario::LEAST_REQUESTS;
use tollkeeper_tests::simulator::server::{Server, Simulated};
use tollkeeper_tests::simulator::tally::Kind;
use tollkeeper_tests::simulator::{
    Kept, Profile, Scenario, Stack, Tally, Violation, World, exact, replay_command, smallest,
};

/// What a test plays: which scenarios, on which stores.
#[derive(Clone, Copy)]
struct Play {
    /// The name in the command that replays a seed.
    name: &'static str,
    profile: Profile,
    stack: Stack,
}

const PLAYS: [Play; 2] = [
    Play { name: "exact", profile: Profile::Exact, stack: exact },
    Play { name: "exact-large", profile: Profile::Large, stack: exact },
];

#[test]
fn exact_path_keeps_its_contracts() {
    let tally = play_all(PLAYS[0], 0..seeds(10_000));
    assert_eq!(tally.missing(), [""; 0], "some faults never happened");
}

#[test]
fn large_limits_keep_their_contracts() {
    play_all(PLAYS[1], 0..seeds(1_000));
}

#[test]
fn a_scenario_is_played_the_same_way_twice() {
    for seed in 0..20 {
        assert_eq!(play(PLAYS[0], seed, &Kept::ALL), play(PLAYS[0], seed, &Kept::ALL), "seed {seed}");
    }
}

#[test]
fn charging_a_refused_request_is_caught() {
    caught(exact, || Mistaken::new(Mistake::RefusalCharges));
    caught(exact, || Mistaken::new(Mistake::PartialCharge));
}

#[test]
fn refunding_twice_is_caught() {
    caught(exact, || Mistaken::new(Mistake::RefundTwice));
}

#[test]
fn expiring_a_state_early_is_caught() {
    caught(exact, || Mistaken::new(Mistake::EarlyExpiry));
}

#[test]
fn clamping_a_level_is_caught() {
    caught(exact, || Mistaken::new(Mistake::ClampedLevel));
}

#[test]
fn undivided_local_share_is_caught() {
    caught(mutants::undivided_share, || Simulated::new(0));
}

#[test]
fn local_share_that_does_not_last_is_caught() {
    caught(mutants::forgotten_share, || Simulated::new(0));
}

#[test]
fn sending_a_toll_again_is_caught() {
    caught(mutants::resent_toll, || Simulated::new(0));
}

#[test]
fn admitting_without_an_answer_is_caught() {
    caught(mutants::failure_admits, || Simulated::new(0));
}

#[test]
fn answering_after_the_deadline_is_caught() {
    caught(mutants::late_answers, || Simulated::new(0));
}

/// Plays seeds until the mistake shows.
fn caught<S: Server>(stack: Stack, server: impl Fn() -> S) {
    for seed in 0..10_000 {
        let scenario = Scenario::new(Profile::Exact, seed);
        if let Err(violation) = World::run(&scenario, &Kept::ALL, stack, &mut server()) {
            let first = violation.0.lines().next().unwrap_or_default();
            println!("caught after {} seeds: {first:.200}", seed + 1);
            return;
        }
    }
    panic!("the mistake was not noticed");
}

/// Plays what `SIMULATE` names, as printed by a failure; without it, one scenario.
#[test]
fn replay() {
    let wanted = std::env::var("SIMULATE").unwrap_or_else(|_| "exact:1:all".to_owned());
    let parts: Vec<&str> = wanted.split(':').collect();
    let [name, seed, kept] = parts[..] else { panic!("SIMULATE is `{wanted}`: try exact:1:all") };
    let of_that_name = PLAYS.iter().find(|play| play.name == name);
    let chosen = of_that_name.unwrap_or_else(|| panic!("no play is named `{name}`"));
    let (seed, kept) = (seed.parse().expect("a number"), kept.parse::<Kept>().expect("indexes"));
    let scenario = Scenario::new(chosen.profile, seed);
    println!("{:#?}\n{:#?} {:?}", scenario.versions, scenario.settings, scenario.weather);
    let actions = scenario.actions.iter().enumerate().filter(|(index, _)| kept.has(*index));
    actions.for_each(|(index, action)| println!("{index:>5} {action:?}"));
    match play(*chosen, seed, &kept) {
        Ok(tally) => println!("{tally}"),
        Err(violation) => panic!("{violation}"),
    }
}

/// Plays a range of seeds on all cores and adds up what happened. Panics with the first failure, shrunk.
fn play_all(one: Play, seeds: Range<u64>) -> Tally {
    let began = Instant::now();
    let (next, tally, failed) = (AtomicU64::new(seeds.start), Mutex::new(Tally::default()), Mutex::new(None));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut own = Tally::default();
                while failed.lock().expect("no panic").is_none() {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match play(one, seed, &Kept::ALL) {
                        Ok(played) => own.add(&played),
                        Err(violation) => *failed.lock().expect("no panic") = Some((seed, violation)),
                    }
                }
                tally.lock().expect("no panic").add(&own);
            });
        }
    });
    if let Some((seed, violation)) = failed.into_inner().expect("no panic") {
        fail(one, seed, violation);
    }
    let tally = tally.into_inner().expect("no panic");
    let (count, took) = (seeds.end - seeds.start, began.elapsed());
    println!("{}: {count} seeds in {took:.1?}\n{tally}", one.name);
    assert!(tally.of(Kind::Checks) >= count * LEAST_REQUESTS);
    tally
}

fn play(one: Play, seed: u64, kept: &Kept) -> Result<Tally, Violation> {
    let scenario = Scenario::new(one.profile, seed);
    // Half of the stores drop a state as soon as it equals a fresh one, the others up to a second later.
    let mut server = Simulated::new(seed % 2 * (seed % 1_000_000));
    World::run(&scenario, kept, one.stack, &mut server)
}

fn fail(one: Play, seed: u64, violation: Violation) -> ! {
    let len = Scenario::new(one.profile, seed).actions.len();
    let (kept, violation) = smallest(len, violation, |kept| play(one, seed, kept).err());
    panic!("seed {seed}: {violation}\n\nreplay it with\n    {}\n", replay_command(one.name, seed, &kept));
}

/// The number of scenarios: `TOLLKEEPER_SEEDS`, or this.
fn seeds(usually: u64) -> u64 {
    match std::env::var("TOLLKEEPER_SEEDS") {
        Ok(seeds) => seeds.parse().expect("TOLLKEEPER_SEEDS is a number"),
        Err(_) => usually,
    }
}
