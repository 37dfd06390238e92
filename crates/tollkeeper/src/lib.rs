//! A rate limiter with stated contracts, embedded in one process or shared by many through Redis.
//!
//! A [`Limiter`] has limits and a store. It takes facts about a request, decides whether the request may pass,
//! and charges it if so:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tollkeeper::{Limit, Limiter, Quota, facts};
//!
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"))
//!     .limit(Limit::new("per-ip", Quota::per_minute(1000)).by("ip"))
//!     .build()?;
//!
//! let decision = limiter.check(&facts! { "user" => "alice", "ip" => "192.0.2.7" }).await?;
//! if decision.allowed() {
//!     // Serve the request.
//! } else {
//!     println!("retry in {:?}", decision.retry_after());
//! }
//! # assert!(decision.allowed());
//! # Ok(()) }
//! ```
//!
//! A check fails only on invalid input from the caller (a cost of zero, an `ip` that is not an address). A refused
//! request is not an error; it is a [`Decision`]. Code without async calls `.wait()` instead of `.await`.
//!
//! By default all state is in this process, in a [`MemoryStore`]. Clones of a limiter share it, across any number of
//! threads.
//!
//! # Limits and facts
//!
//! *Facts* are names and values: what is known about a request. A [`Limit`] has a [`Quota`], the facts that key it
//! ([`by`](Limit::by): each value, or each combination of values, has its own count), and conditions under which it
//! applies. The [`Algorithm`] defines what a quota means; each has a contract, and `docs/algorithms.md` in the
//! repository helps to choose one.
//!
//! ```
//! use std::time::Duration;
//! use tollkeeper::{Algorithm, Allowance, Limit, Policy, Quota};
//!
//! let policy = Policy::new(vec![
//!     // A burst makes it a token bucket; without one it is a sliding window.
//!     Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user").allow("health-check"),
//!     // Exactly five in any 15 minutes, only on the login route.
//!     Limit::new("login", Quota::per(5, Duration::from_secs(900)))
//!         .by("email")
//!         .when("route", "/login")
//!         .algorithm(Algorithm::SlidingLog),
//!     // The fact `plan` picks the tier; one customer has an override.
//!     Limit::tiered("plan", "plan")
//!         .by("api_key")
//!         .tier("free", Quota::per_day(1_000))
//!         .tier("enterprise", Allowance::Unlimited)
//!         .default_tier("free")
//!         .override_for("acme", Quota::per_day(50_000)),
//!     // Five at the same time.
//!     Limit::new("exports", Quota::slots(5)).by("user"),
//! ]);
//! assert!(policy.is_ok());
//!
//! // All mistakes are reported at once, each with the name of its limit.
//! let mistakes = Policy::new(vec![Limit::new("per-user", Quota::per_minute(0)).by("the user")]);
//! assert!(mistakes.is_err());
//! ```
//!
//! All limits that apply must allow the request. If one refuses, nothing is charged to any of them. A limit that is
//! keyed by an absent fact is skipped, unless [`Limit::missing`] is set. The fact `ip` is always an address; IPv6
//! addresses are keyed by their first 64 bits.
//!
//! [`Limiter::replace`] replaces the limits at run time. Counts are kept where name, period and algorithm
//! stay the same.
//!
//! # Reading a decision
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota, Retry, Span, Verdict, facts};
//! # let limit = Limit::new("per-user", Quota::per_hour(10).burst(10)).by("user");
//! # let limiter = Limiter::builder().limit(limit).build()?;
//! let alice = facts! { "user" => "alice" };
//! let decision = limiter.check(&alice).cost(7).await?;
//! let outcome = decision.limit("per-user").unwrap().outcome();
//! assert_eq!((outcome.limit, outcome.remaining), (10, 3));
//!
//! // Refused: the binding limit, and how long to wait. The wait is exact: if no other request arrives, the request
//! // passes then, and not a microsecond earlier.
//! let decision = limiter.check(&alice).cost(4).await?;
//! assert_eq!(decision.binding().unwrap().name(), "per-user");
//! assert!(decision.retry_after().unwrap() <= Span::from_secs(360));
//!
//! // A cost of 11 never fits into a burst of 10.
//! let decision = limiter.check(&alice).cost(11).await?;
//! assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never });
//! # Ok(()) }
//! ```
//!
//! [`limits`](DecidedToll::limits) lists every limit that applied, including those in [`Mode::Shadow`], which count what
//! they would refuse and refuse nothing. [`Limiter::peek`] decides without charging; [`Limiter::usage`] reports the
//! current state of each limit. A [`LeakyBucket`](Algorithm::LeakyBucket) admits requests with a
//! [`delay`](DecidedToll::delay), for which the caller holds them.
//!
//! # Refunds and reservations
//!
//! An admitted request has a [`Charge`], which can be refunded ([`refund`](Limiter::refund)) or corrected
//! ([`settle`](Limiter::settle)) once. For work whose cost is known only afterwards, reserve an estimate. A window
//! refunds a surplus in full while it still counts; a token bucket refunds only what it has not refilled in the meantime.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::time::Duration;
//! # use tollkeeper::{Correction, Costs, Limit, Limiter, Quota, facts};
//! // This limit charges the number in the fact `tokens`.
//! let tokens = Limit::new("llm-tokens", Quota::per_minute(100_000)).by("api_key").cost("tokens");
//! let limiter = Limiter::builder().limit(tokens).build()?;
//!
//! let estimate = facts! { "api_key" => "k1", "tokens" => 30_000 };
//! let reserved = limiter.reserve(&estimate, Duration::from_secs(60)).await?;
//! let charge = reserved.charge().expect("admitted, so it has a charge");
//! // … the call, which used 12,345 tokens …
//! let actual = facts! { "tokens" => 12_345 };
//! assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Done);
//! assert_eq!(limiter.refund(&charge).await, Correction::Repeated);
//! # Ok(()) }
//! ```
//!
//! [`Limiter::acquire`] takes a slot of each concurrency limit and returns a [`SlotGuard`] that releases it when
//! dropped.
//!
//! # Waiting
//!
//! [`Limiter::until_allowed`] waits until the request is admitted. Callers of one key wait in a FIFO queue, only the
//! first asks the store, and nothing is charged before admission. Dropping the future leaves the queue. A refusal that
//! waiting cannot resolve is returned at once.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota, facts};
//! let limit = Limit::new("upstream", Quota::per_second(200).burst(1));
//! let limiter = Limiter::builder().limit(limit).build()?;
//! for _ in 0..3 {
//!     assert!(limiter.until_allowed(&facts! {}).await?.allowed()); // one each 5 ms
//! }
//! # Ok(()) }
//! ```
//!
//! # The hot path
//!
//! A [`Handle`] is one limit, looked up once: it takes the value of the fact instead of facts, and returns a small
//! value instead of a [`Decision`]. It shares its counts with the limiter and follows [`Limiter::replace`].
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota};
//! # let limit = Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
//! # let limiter = Limiter::builder().limit(limit).build()?;
//! let per_user = limiter.handle("per-user")?;
//! if per_user.check("alice")?.allowed {
//!     // Serve the request.
//! }
//! # assert_eq!(per_user.check("alice")?.outcome().remaining, 18);
//! # Ok(()) }
//! ```
//!
//! # Clock and tests
//!
//! The store decides by its own clock: wall time at its start plus monotonic time since. In tests, give it a
//! [`ManualClock`] and advance that, so that no test has to sleep:
//!
//! ```
//! use tollkeeper::{Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota, Span, Time, facts};
//!
//! let manual = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
//! let store = MemoryStore::new(Capacity::default(), Clock::manual(&manual));
//! let policy = Policy::new(vec![Limit::new("per-user", Quota::per_minute(60).burst(1)).by("user")]).unwrap();
//! let limiter = Limiter::embedded(policy, store);
//!
//! let alice = facts! { "user" => "alice" };
//! assert!(limiter.check(&alice).wait().unwrap().allowed());
//! let refused = limiter.check(&alice).wait().unwrap();
//! assert_eq!(refused.retry_after(), Some(Span::from_secs(1)));
//!
//! manual.advance(Span::from_secs(1));
//! assert!(limiter.check(&alice).wait().unwrap().allowed());
//! ```
//!
//! # Snapshots
//!
//! A store made by [`MemoryStore::open`] continues with the counts of the last run. It is saved to its file every ten
//! seconds and when its last clone is dropped; a crash loses the counts since the last save. A damaged file is moved
//! aside, and the store starts empty and reports why. A file that another process saves to is not opened.
//! [`MemoryStore::snapshots`] reports the state of saving, and [`MemoryStore::close`] saves a last time and returns
//! the error that dropping the store would hide.
//!
//! ```
//! use tollkeeper::{Capacity, Clock, MemoryStore, Restored, Snapshots};
//!
//! # let folder = std::env::temp_dir().join(format!("tollkeeper-doc-{}", std::process::id()));
//! # std::fs::create_dir(&folder)?;
//! # let path = folder.join("state");
//! let (store, restored) = MemoryStore::open(Capacity::default(), Clock::system(), Snapshots::to(&path))?;
//! match restored {
//!     Restored::Nothing => println!("the first run"),
//!     Restored::Keys(keys) => println!("restored {keys} keys"),
//!     Restored::Refused(error) => println!("starting empty: {error}"),
//! }
//! # assert_eq!(store.keys(), 0);
//! store.close()?;
//! # drop(store);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Capacity`] caps what a store holds. Only a state that equals a fresh one is dropped. When a full store has none,
//! new keys share states, so that no limit is ever exceeded.
//!
//! # Stores
//!
//! [`Limiter::builder`] takes the URL of a store. The module [`store`] has what only those need who implement a store,
//! and the tests that every store must pass.
//!
//! # The config file
//!
//! With the feature `config`, `Limiter::from_config("tollkeeper.yaml")` reads limits and settings from YAML,
//! TOML or JSON, and `config::Follow` follows its changes. `docs/config.md` in the repository lists
//! every key.

#[cfg(feature = "redis")]
mod background;
mod clock;
#[cfg(feature = "config")]
pub mod config;
pub mod http;
pub mod json;
mod limiter;
#[cfg(feature = "redis")]
mod log_throttle;
mod percent;
pub mod process;
pub mod random;
pub mod store;
mod sync;
pub mod thread_cached;

pub use clock::{Clock, ManualClock, Sleep};
pub use limiter::ad_hoc::AdHocLimits;
pub use limiter::builder::{BuildError, Builder, StoreChoice};
pub use limiter::handle::{Handle, HandleError, KeyDecision, KeyDecisions, Layers};
pub use limiter::multi_request::MultiRequest;
pub use limiter::observer::{Observer, Op, Permits};
pub use limiter::operation::Operation;
pub use limiter::overrides::{KeyOverride, MAX_OVERRIDES, OverrideError, OverrideFor};
pub use limiter::request::{Acquire, Acquired, Acquiring, Deciding, Request, Waiting};
pub use limiter::slot_guard::SlotGuard;
pub use limiter::{ForgetError, KeyState, Limiter};
pub use percent::Percent;
pub use store::memory::{Capacity, MemoryStore, Restored, SnapshotError, SnapshotStatus, Snapshots};
pub use store::{Correction, Unavailable};
pub use tollkeeper_core::{
    Algorithm, Allowance, Approximation, Charge, CheckedQuota, Consistency, CostMissing, CostProblem, Costs,
    DecidedToll, Decision, DeclaredFact, Facts, InvalidFact, InvalidPolicy, InvalidQuota, InvalidRequest,
    Limit, LimitDecision, MatchedLimits, Missing, Mode, OnStoreFailure, Outcome, Policy, Quota, Reason,
    Retry, Rule, Slot, Span, StatusSet, Time, Value, Verb, Verdict,
};
pub use tollkeeper_core::{facts, policy};

/// Runs the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
