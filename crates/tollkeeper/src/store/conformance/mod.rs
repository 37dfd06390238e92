//! The conformance suite: the guarantees of a limiter on every store.
//!
//! To test an implementation of [`Store`], implement [`TestedStore`], which opens it, and call [`run`]:
//!
//! ```
//! use std::collections::HashMap;
//! use std::sync::{Arc, Mutex};
//!
//! use tollkeeper::MemoryStore;
//! use tollkeeper::store::Store;
//! use tollkeeper::store::conformance::{self, TestedStore};
//!
//! #[derive(Default)]
//! struct Memory(Mutex<HashMap<String, MemoryStore>>);
//!
//! impl TestedStore for Memory {
//!     fn name(&self) -> &str {
//!         "memory"
//!     }
//!
//!     fn open(&self, namespace: &str) -> Arc<dyn Store> {
//!         let mut stores = self.0.lock().unwrap();
//!         Arc::new(stores.entry(namespace.to_owned()).or_default().clone())
//!     }
//! }
//!
//! conformance::run(Memory::default()).assert_passed();
//! ```
//!
//! A case uses only the store's clock, which every decision reports. So it can assert to the microsecond when a result
//! must change, and still does not depend on the speed of the machine. The whole suite takes some seconds, most of which
//! are waits for a limit to refill.

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
use std::sync::Arc;
use std::time::Duration;

use crate::store::Store;
use crate::{Limiter, Policy, Time};
use world::World;

/// A store to run the suite on.
pub trait TestedStore: Send + Sync + 'static {
    /// The title of its column: `Redis 6.2`.
    fn name(&self) -> &str;

    /// Opens the store, with connections of its own. Stores of one namespace share all states, stores of different
    /// namespaces none. A namespace is a short text of `a-z 0-9 -`; every case has another.
    fn open(&self, namespace: &str) -> Arc<dyn Store>;

    /// A limiter on [the store](TestedStore::open).
    fn limiter(&self, namespace: &str, policy: Policy) -> Limiter {
        Limiter::with_store(policy, self.open(namespace))
    }

    /// The states and markers of a namespace, with their expiry; `None` if the store cannot list them.
    fn keys(&self, _namespace: &str) -> Option<Vec<StoredKey>> {
        None
    }

    /// Whether several servers may decide one toll: then their clocks differ, and a refusal may keep its charges for
    /// another round trip, until they are rolled back.
    fn rolls_back(&self) -> bool {
        false
    }

    /// Failed calls to the store, if any. They are reported with a failed case; see [`Trouble::is_transient`].
    fn trouble(&self, _namespace: &str) -> Option<Trouble> {
        None
    }
}

/// A key that a store keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKey {
    /// Its name in the store.
    pub name: String,
    /// When the store deletes it; `None` if never.
    pub expires: Option<Time>,
}

/// Failed calls to a store.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// What failed, for the report.
    pub what: String,
    /// Whether a busy machine may be the reason, as for a timeout: then the case runs again.
    pub is_transient: bool,
}

/// The results of all cases on one store.
#[derive(Debug)]
pub struct Results {
    /// The name of the store.
    pub store: String,
    /// One for each case, in order: its claim, and why it failed.
    pub cases: Vec<(&'static str, Result<(), String>)>,
}

/// Timeout of a case.
const STUCK: Duration = Duration::from_secs(120);

/// How often a case runs when external circumstances disturb it.
const ATTEMPTS: usize = 4;

/// A claim that must hold on every store.
struct Case {
    name: &'static str,
    run: Box<dyn Fn(World) -> Trial>,
}

/// A running case.
type Trial = Pin<Box<dyn Future<Output = ()>>>;

/// Runs every case on this store, one after the other.
pub fn run(store: impl TestedStore) -> Results {
    let store: Arc<dyn TestedStore> = Arc::new(store);
    let cases = cases().into_iter().map(|case| (case.name, attempts(&store, &case))).collect();
    Results { store: store.name().to_owned(), cases }
}

impl Results {
    /// The failures: case, store and reason.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.cases.iter().filter_map(|(name, result)| Some((name, result.as_ref().err()?)));
        failed.map(|(name, why)| format!("`{name}` on {}: {why}", self.store)).collect()
    }

    /// # Panics
    ///
    /// If a case failed, with a list of all that did.
    pub fn assert_passed(&self) {
        let failures = self.failures();
        assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
    }
}

/// A table of cases by stores, followed by every failure.
pub fn table(columns: &[Results]) -> String {
    let mut text = String::new();
    let names: Vec<&str> = cases().iter().map(|case| case.name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or_default();
    let line = |text: &mut String, name: &str, cells: &[&str]| {
        write!(text, "{name:width$}").expect("writing to a string cannot fail");
        for (cell, column) in cells.iter().zip(columns) {
            write!(text, "  {cell:size$}", size = column.store.len().max(6))
                .expect("writing to a string cannot fail");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    };
    line(&mut text, "", &columns.iter().map(|column| &*column.store).collect::<Vec<_>>());
    for (row, name) in names.iter().enumerate() {
        let cell = |column: &Results| if column.cases[row].1.is_ok() { "ok" } else { "FAILED" };
        line(&mut text, name, &columns.iter().map(cell).collect::<Vec<_>>());
    }
    for failure in columns.iter().flat_map(Results::failures) {
        writeln!(text, "{failure}").expect("writing to a string cannot fail");
    }
    text
}

/// Runs a case, and again while external circumstances disturb it.
fn attempts(store: &Arc<dyn TestedStore>, case: &Case) -> Result<(), String> {
    let mut attempts = 1;
    loop {
        match attempt(store, case) {
            Ok(()) => return Ok(()),
            Err(Failed { why, circumstances: None }) => return Err(why),
            Err(Failed { why, circumstances: Some(circumstances) }) if attempts == ATTEMPTS => {
                return Err(format!("{why} ({circumstances})"));
            }
            Err(Failed { circumstances, .. }) => {
                eprintln!("`{}` on {} once more: {circumstances:?}", case.name, store.name());
                attempts += 1;
            }
        }
    }
}

/// Why a case failed, and the external circumstances, if any, that may be the reason.
struct Failed {
    why: String,
    circumstances: Option<String>,
}

fn attempt(store: &Arc<dyn TestedStore>, case: &Case) -> Result<(), Failed> {
    let hour = || std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() / 3_600;
    let began = hour();
    let world = World::new(store);
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
    result.map_err(|why| match world.trouble() {
        // Windows end with the hour, and with them what a case may expect.
        _ if hour() != began => Failed { why, circumstances: Some("an hour ended meanwhile".to_owned()) },
        None => Failed { why, circumstances: None },
        // If the machine stalls for a second, connections are given up, which is not what the suite tests. Any other
        // failure of the store is.
        Some(Trouble { what, is_transient }) => {
            Failed { why: format!("{why} {what}"), circumstances: is_transient.then_some(what) }
        }
    })
}

/// All cases.
fn cases() -> Vec<Case> {
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
