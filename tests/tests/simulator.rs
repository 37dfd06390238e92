//! Plays thousands of scenarios in the simulator: see `tests/src/simulator`.
//!
//! `TOLLKEEPER_SEEDS` sets the number of scenarios. A failing seed prints the command that replays it, shrunk.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use tollkeeper_tests::redis;
use tollkeeper_tests::simulator::mutants::{self, Mistake, Mistaken};
use tollkeeper_tests::simulator::scenario::LEAST_REQUESTS;
use tollkeeper_tests::simulator::scripted::{Connection, Scripted};
use tollkeeper_tests::simulator::server::{Server, Simulated};
use tollkeeper_tests::simulator::tally::Kind;
use tollkeeper_tests::simulator::{
    Kept, Profile, Scenario, Stack, Tally, Violation, World, exact, leased, replay_command, smallest,
};

/// A simulation allocates about as much as it computes.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a test plays: which scenarios, on which stores.
#[derive(Clone, Copy)]
struct Play {
    /// The name in the command that replays a seed.
    name: &'static str,
    profile: Profile,
    stack: Stack,
}

const PLAYS: [Play; 6] = [
    Play { name: "exact", profile: Profile::Exact, stack: exact },
    Play { name: "exact-large", profile: Profile::Large, stack: exact },
    Play { name: "exact-scripts", profile: Profile::Exact, stack: exact },
    Play { name: "bounded", profile: Profile::Exact, stack: leased },
    Play { name: "leased", profile: Profile::Leased, stack: leased },
    Play { name: "leased-scripts", profile: Profile::Leased, stack: leased },
];

#[test]
fn exact_path_keeps_its_contracts() {
    let tally = play_all(PLAYS[0], 0..seeds(10_000), &simulated);
    assert_eq!(tally.missing(&LEASED), [""; 0], "some faults never happened");
}

/// What only nodes with leases do.
const LEASED: [Kind; 5] = [Kind::Leases, Kind::Spent, Kind::Scarce, Kind::Bounded, Kind::BoundJudged];

#[test]
fn bounded_path_keeps_its_contracts() {
    let tally = play_all(PLAYS[3], 0..seeds(10_000), &simulated);
    assert_eq!(tally.missing(&LEASED[..3]), [""; 0], "some faults never happened");
}

#[test]
fn leased_path_keeps_its_contracts() {
    let tally = play_all(PLAYS[4], 0..seeds(10_000), &simulated);
    assert_eq!(tally.missing(&[Kind::Slots, Kind::Compared]), [""; 0], "some faults never happened");
}

/// Scenarios beyond the usual range that found a bug, or that the simulator judged wrongly.
#[test]
fn seeds_that_failed_before_pass() {
    let failed = [
        ("exact", 30_360),
        ("exact", 120_524),
        ("exact", 248_414),
        ("bounded", 27_400),
        ("leased", 18_190),
        ("leased", 103_495),
        ("leased", 379_028),
    ];
    for (name, seed) in failed {
        let one = PLAYS.into_iter().find(|play| play.name == name).expect("a play of that name");
        play_all(one, seed..seed + 1, &simulated);
    }
}

#[test]
fn large_limits_keep_their_contracts() {
    play_all(PLAYS[1], 0..seeds(1_000), &simulated);
}

/// The same scenarios, decided by the product's scripts.
#[test]
fn scripts_keep_the_contracts() {
    let server = redis::Server::start();
    play_all(PLAYS[2], 0..seeds(1_000).min(10_000), &|thread| scripted(&server, thread));
}

#[test]
fn scripts_keep_the_contracts_with_leases() {
    let server = redis::Server::start();
    let tally = play_all(PLAYS[5], 0..seeds(1_000).min(10_000), &|thread| scripted(&server, thread));
    assert!(tally.of(Kind::Spent) > 10_000);
}

#[test]
fn a_scenario_is_played_the_same_way_twice() {
    let (first, second) = (simulated(0), simulated(1));
    for seed in 0..20 {
        let played = play(PLAYS[0], seed, &Kept::ALL, &first);
        assert_eq!(played, play(PLAYS[0], seed, &Kept::ALL, &second), "seed {seed}");
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
    let server = name.ends_with("-scripts").then(redis::Server::start);
    let stores = server.as_ref().map_or_else(|| simulated(0), |server| scripted(server, 0));
    match play(*chosen, seed, &kept, &stores) {
        Ok(tally) => println!("{tally}"),
        Err(violation) => panic!("{violation}"),
    }
}

/// Plays a range of seeds on all cores and adds up what happened. Panics with the first failure, shrunk.
fn play_all(one: Play, seeds: Range<u64>, stores: &(dyn Fn(usize) -> Stores + Sync)) -> Tally {
    let began = Instant::now();
    let (next, tally, failed) = (AtomicU64::new(seeds.start), Mutex::new(Tally::default()), Mutex::new(None));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (next, tally, failed) = (&next, &tally, &failed);
            scope.spawn(move || {
                let (store, mut own) = (stores(thread), Tally::default());
                while failed.lock().expect("no panic").is_none() {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match play(one, seed, &Kept::ALL, &store) {
                        Ok(played) => {
                            let requests = played.of(Kind::Checks);
                            assert!(requests >= LEAST_REQUESTS, "scenario {seed} has {requests} requests");
                            own.add(&played);
                        }
                        Err(violation) => *failed.lock().expect("no panic") = Some((seed, violation)),
                    }
                }
                tally.lock().expect("no panic").add(&own);
            });
        }
    });
    if let Some((seed, violation)) = failed.into_inner().expect("no panic") {
        let (len, store) = (Scenario::new(one.profile, seed).actions.len(), stores(0));
        let (kept, violation) = smallest(len, violation, |kept| play(one, seed, kept, &store).err());
        panic!("seed {seed}: {violation}\n\nreplay it with\n    {}\n", replay_command(one.name, seed, &kept));
    }
    let tally = tally.into_inner().expect("no panic");
    let (count, took) = (seeds.end - seeds.start, began.elapsed());
    println!("{}: {count} seeds in {took:.1?}\n{tally}", one.name);
    tally
}

fn play(one: Play, seed: u64, kept: &Kept, stores: &Stores) -> Result<Tally, Violation> {
    World::run(&Scenario::new(one.profile, seed), kept, one.stack, &mut *stores(seed))
}

/// Makes an empty store for a seed. Each thread has its own.
type Stores = Box<dyn Fn(u64) -> Box<dyn Server>>;

/// Half of the stores drop a state as soon as it equals a fresh one, the others up to a second later.
fn simulated(_thread: usize) -> Stores {
    Box::new(|seed| Box::new(Simulated::new(seed % 2 * (seed * 977 % 1_000_000))))
}

/// The scripts on a real server.
fn scripted(server: &redis::Server, thread: usize) -> Stores {
    let connection = Rc::new(RefCell::new(Connection::new(server.connect(), thread)));
    Box::new(move |_| Box::new(Scripted::new(Rc::clone(&connection))))
}

/// The number of scenarios: `TOLLKEEPER_SEEDS`, or this.
fn seeds(usually: u64) -> u64 {
    match std::env::var("TOLLKEEPER_SEEDS") {
        Ok(seeds) => seeds.parse().expect("TOLLKEEPER_SEEDS is a number"),
        Err(_) => usually,
    }
}
