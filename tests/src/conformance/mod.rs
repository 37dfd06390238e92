//! The conformance suite: what a limiter promises on every store.
//!
//! A [`Case`] gets a [`World`]: an empty store. It uses only the store's clock, which every decision reports, so it can
//! assert to the microsecond when a result must change and still does not depend on the speed of the machine. [`run`]
//! runs all cases on one store, [`table`] prints the results.

mod corrections;
mod decisions;
mod keys;
mod limits;
mod slots;
mod times;
mod world;

use std::fmt::Write as _;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;

use tollkeeper::FailureKind;
pub use world::{Place, World};

/// Timeout of a case.
const STUCK: Duration = Duration::from_secs(120);

/// A claim that must hold on every store.
pub struct Case {
    /// The claim.
    pub name: &'static str,
    run: Box<dyn Fn(World) -> Trial>,
}

/// A running case.
type Trial = Pin<Box<dyn Future<Output = ()>>>;

/// The results of all cases on one store.
#[derive(Debug)]
pub struct Column {
    /// The name of the store.
    pub store: String,
    /// One for each case, in order; `None` if the store does not exist yet.
    pub results: Option<Vec<Result<(), String>>>,
}

/// All cases.
pub fn cases() -> Vec<Case> {
    fn case<F: Future<Output = ()> + 'static>(name: &'static str, run: fn(World) -> F) -> Case {
        Case { name, run: Box::new(move |world| Box::pin(run(world))) }
    }
    vec![
        case("every algorithm admits exactly its limit", decisions::exactly_the_limit),
        case("a refusal charges nothing", decisions::a_refusal_charges_nothing),
        case("layered limits are charged all or none", decisions::all_or_nothing),
        case("a refusal leaves no new key behind", decisions::no_key_of_a_refusal),
        case("the limit that binds is named", decisions::binding),
        case("peek and usage charge nothing", decisions::peek_and_usage),
        case("a shadow limit counts and never decides", decisions::shadow),
        case("a cost above 1, and one that never fits", decisions::costs),
        case("a cost fact, and a cost of 0", decisions::cost_facts),
        case("0/s refuses all and charges nothing", decisions::nothing_granted),
        case("many at once: exactly the limit", decisions::many_at_once),
        case("a missing fact skips, shares or refuses", limits::missing),
        case("a changed tier of equal period keeps the count", limits::tiers),
        case("an override keeps the count", limits::overrides),
        case("a replaced policy keeps the counts", limits::replaced),
        case("unlimited and off do not limit", limits::unlimited),
        case("two limiters on one store see one count", limits::two_limiters),
        case("a forgotten key is fresh", limits::forget),
        case("no two values share a key", keys::values),
        case("long keys work like any other", keys::long),
        case("equal facts make equal keys", keys::equal),
        case("a key of several sets of facts is charged once", keys::merged),
        case("a retry passes at `retry_after`, not earlier", times::retry),
        case("a key is fresh exactly at its reset", times::reset),
        case("one more unit is free at `next_after`", times::next),
        case("a leaky bucket reports each delay", times::leaky_delay),
        case("a delay above the maximum is refused", times::hold),
        case("staggered windows end at different times", times::staggered),
        case("waiters are admitted in FIFO order", times::until_allowed),
        case("a state expires soon after it is fresh", times::expiry),
        case("a refund in full, in part, and no more", corrections::refund),
        case("a charge is corrected once", corrections::once),
        case("a late refund frees nothing newer", corrections::late),
        case("a refund reaches every limit of the charge", corrections::every_limit),
        case("a surplus is refunded", corrections::surplus),
        case("a shortfall is charged, to twice the limit", corrections::shortfall),
        case("a reservation not settled in time stays", corrections::not_settled),
        case("a receipt as text, opened by another node", corrections::as_text),
        case("a forged or foreign receipt does not open", corrections::forged),
        case("as many slots are held as the limit allows", slots::as_many),
        case("a slot is released once", slots::released_once),
        case("a slot is free again at its TTL", slots::ttl),
        case("a renewed slot gets a full TTL", slots::renewed),
        case("slots and rates are taken all or none", slots::beside_rates),
        case("a slot as text, released by another node", slots::as_text),
        case("a guard releases its slot", slots::guard),
    ]
}

/// Runs every case on this store, one after the other.
pub fn run(place: &Place) -> Column {
    let mut results = Vec::new();
    for case in cases() {
        let mut attempts = 1;
        let result = loop {
            match attempt(place, &case) {
                Ok(()) => break Ok(()),
                Err(Failed { why, circumstances: None }) => break Err(why),
                Err(Failed { why, circumstances: Some(circumstances) }) if attempts == ATTEMPTS => {
                    break Err(format!("{why} ({circumstances})"));
                }
                Err(Failed { circumstances, .. }) => {
                    println!("`{}` on {} once more: {circumstances:?}", case.name, place.name());
                    attempts += 1;
                }
            }
        };
        results.push(result);
    }
    Column { store: place.name().to_owned(), results: Some(results) }
}

/// How often a case runs when external circumstances disturb it.
const ATTEMPTS: usize = 4;

/// Why a case failed, and the external circumstances, if any, that may be the reason.
struct Failed {
    why: String,
    circumstances: Option<String>,
}

fn attempt(place: &Place, case: &Case) -> Result<(), Failed> {
    let hour = || std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() / 3_600;
    let began = hour();
    let world = World::new(place);
    // A new runtime for each case, so that all its tasks end with it.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let trial = || runtime.block_on(async { tokio::time::timeout(STUCK, (case.run)(world.clone())).await });
    let result = match std::panic::catch_unwind(AssertUnwindSafe(trial)) {
        Ok(Ok(())) => world.check_keys(),
        Ok(Err(_)) => Err(format!("not done after {STUCK:?}")),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            Err(text
                .or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
                .unwrap_or_default())
        }
    };
    result.map_err(|why| {
        // Windows end with the hour, and with them what a case may expect. And if the machine stalls for a second,
        // connections are given up, which is not what the suite tests. Any other store failure is.
        let failures = world.failures();
        let slow = |kind| matches!(kind, FailureKind::Timeout | FailureKind::Connection);
        let circumstances = if hour() != began {
            Some("an hour ended meanwhile".to_owned())
        } else if !failures.is_empty() && failures.iter().all(|(kind, _)| slow(*kind)) {
            Some(format!("{failures:?}"))
        } else {
            None
        };
        let why = if failures.is_empty() { why } else { format!("{why} {failures:?}") };
        Failed { why, circumstances }
    })
}

/// A table of cases by stores, followed by every failure.
pub fn table(columns: &[Column]) -> String {
    let mut text = String::new();
    let names: Vec<&str> = cases().iter().map(|case| case.name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or_default();
    let line = |text: &mut String, name: &str, cells: &[&str]| {
        write!(text, "{name:width$}").expect("writing to a string cannot fail");
        for (cell, column) in cells.iter().zip(columns) {
            write!(text, "  {cell:size$}", size = column.store.len().max(7))
                .expect("writing to a string cannot fail");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    };
    let stores: Vec<&str> = columns.iter().map(|column| &*column.store).collect();
    line(&mut text, "", &stores);
    for (row, name) in names.iter().enumerate() {
        let cells: Vec<&str> = columns.iter().map(|column| column.cell(row)).collect();
        line(&mut text, name, &cells);
    }
    for failure in failures(columns) {
        writeln!(text, "{failure}").expect("writing to a string cannot fail");
    }
    text
}

/// All failures: case, store and reason.
pub fn failures(columns: &[Column]) -> Vec<String> {
    let mut failures = Vec::new();
    for column in columns {
        let results = column.results.iter().flatten();
        for (case, result) in cases().iter().zip(results) {
            if let Err(why) = result {
                failures.push(format!("`{}` on {}: {why}", case.name, column.store));
            }
        }
    }
    failures
}

impl Column {
    /// A store that does not exist yet.
    pub fn missing(store: &str) -> Column {
        Column { store: store.to_owned(), results: None }
    }

    fn cell(&self, row: usize) -> &str {
        match self.results.as_ref().and_then(|results| results.get(row)) {
            Some(Ok(())) => "ok",
            Some(Err(_)) => "FAILED",
            None => "missing",
        }
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}
