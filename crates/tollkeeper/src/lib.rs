//! A rate limiter with stated contracts, to be embedded in one process.
//!
//! A [`Limiter`] holds limits and a store. It is told facts about a request, decides whether the request
//! may pass, and charges it if so:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tollkeeper::{Limit, Limiter, Quota, facts};
//!
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"))
//!     .limit(Limit::new("per-ip", Quota::per_minute(1000)).by("ip"))
//!     .build()
//!     .await?;
//!
//! let decision = limiter.check(&facts! { "user" => "alice", "ip" => "192.0.2.7" }).await?;
//! if decision.allowed() {
//!     // Serve the request.
//! } else {
//!     println!("come again in {:?}", decision.retry_after());
//! }
//! # assert!(decision.allowed());
//! # Ok(()) }
//! ```
//!
//! The error of a check is only ever the caller's input (a cost of zero, an `ip` that is no address). A
//! refused request is not an error; it is a [`Decision`]. Without async, `.wait()` takes the place of
//! `.await`.
//!
//! All state is in this process, in a [`MemoryStore`]. Clones of a limiter are one limiter, for any number
//! of threads.
//!
//! # Limits and facts
//!
//! *Facts* are names and values: whatever is known of a request. A [`Limit`] says how much ([`Quota`]), of
//! what ([`by`](Limit::by): each value of that fact, or each combination of several, has a count of its
//! own), and when it applies. What a quota means is up to its [`Algorithm`]; each keeps a contract, and
//! `docs/algorithms.md` in the repository says which to take.
//!
//! ```
//! use std::time::Duration;
//! use tollkeeper::{Algorithm, Allowance, Limit, Policy, Quota};
//!
//! let policy = Policy::new(vec![
//!     // A burst makes it a token bucket; without one it is a sliding window.
//!     Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user").allow("health-check"),
//!     // Exactly five in any quarter of an hour, only where people log in.
//!     Limit::new("login", Quota::per(5, Duration::from_secs(900)))
//!         .by("email")
//!         .when("route", "/login")
//!         .algorithm(Algorithm::SlidingLog),
//!     // The fact `plan` picks what a key is granted; one customer has terms of its own.
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
//! All limits that apply must allow. If one refuses, nothing is charged to any of them. A limit that is
//! keyed by a fact the request does not have is skipped, unless [`Limit::missing`] says otherwise. The fact
//! `ip` is always an address; IPv6 addresses count by their first 64 bits.
//!
//! [`Limiter::replace`] puts other limits in force while the program runs. Counts are kept wherever name,
//! period and algorithm stay.
//!
//! # What a decision tells
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota, Retry, Span, Verdict, facts};
//! # let limit = Limit::new("per-user", Quota::per_hour(10).burst(10)).by("user");
//! # let limiter = Limiter::builder().limit(limit).build().await?;
//! let alice = facts! { "user" => "alice" };
//! let decision = limiter.check(&alice).cost(7).await?;
//! let outcome = decision.limit("per-user").unwrap().outcome();
//! assert_eq!((outcome.limit, outcome.remaining), (10, 3));
//!
//! // Refused: the limit that binds, and how long to wait. That is exact: if nobody else comes, the
//! // request passes then, and not a microsecond earlier.
//! let decision = limiter.check(&alice).cost(4).await?;
//! assert_eq!(decision.binding().unwrap().name(), "per-user");
//! assert!(decision.retry_after().unwrap() <= Span::from_secs(360));
//!
//! // Eleven never fit into ten.
//! let decision = limiter.check(&alice).cost(11).await?;
//! assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never });
//! # Ok(()) }
//! ```
//!
//! [`Decision::limits`] lists what every limit that applied has to say, those in [`Mode::Shadow`] too, which
//! count what they would refuse and refuse nothing. [`Limiter::peek`] says what a check would and charges
//! nothing; [`Limiter::usage`] says how each limit stands. A [`LeakyBucket`](Algorithm::LeakyBucket) admits
//! requests with a [`delay`](Decision::delay), and the caller holds them that long.
//!
//! # Refunds and reservations
//!
//! An admitted request has a [`Charge`]: the receipt that [`refund`](Limiter::refund) gives back, or
//! [`settle`](Limiter::settle) corrects, once. For work whose cost is known only afterwards, reserve an
//! estimate. A window gives a surplus back in full while it still counts; a token bucket only what it has
//! not refilled meanwhile.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::time::Duration;
//! # use tollkeeper::{Correction, Costs, Limit, Limiter, Quota, facts};
//! // This limit charges the number in the fact `tokens`.
//! let tokens = Limit::new("llm-tokens", Quota::per_minute(100_000)).by("api_key").cost("tokens");
//! let limiter = Limiter::builder().limit(tokens).build().await?;
//!
//! let estimate = facts! { "api_key" => "k1", "tokens" => 30_000 };
//! let reserved = limiter.reserve(&estimate, Duration::from_secs(60)).await?;
//! let charge = reserved.charge().expect("admitted, so there is a receipt");
//! // … the call, which turns out to take 12,345 …
//! let actual = facts! { "tokens" => 12_345 };
//! assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Done);
//! assert_eq!(limiter.refund(&charge).await, Correction::Repeated);
//! # Ok(()) }
//! ```
//!
//! [`Limiter::acquire`] takes a slot of each concurrency limit and gives a [`SlotGuard`], which releases it
//! when dropped.
//!
//! # Waiting
//!
//! [`Limiter::until_allowed`] waits its turn: callers that want the same key stand in line, only the first
//! asks, and nothing is charged before a request is admitted. Dropping the future leaves the line. What no
//! waiting can cure is returned at once.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota, facts};
//! let limit = Limit::new("upstream", Quota::per_second(200).burst(1));
//! let limiter = Limiter::builder().limit(limit).build().await?;
//! for _ in 0..3 {
//!     assert!(limiter.until_allowed(&facts! {}).await?.allowed()); // one each 5 ms
//! }
//! # Ok(()) }
//! ```
//!
//! # The hot path
//!
//! A [`Handle`] is one limit, prepared: it takes the value of the fact instead of facts, and answers with
//! a small value instead of a [`Decision`]. It shares its counts with the limiter and follows
//! [`Limiter::replace`].
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tollkeeper::{Limit, Limiter, Quota};
//! # let limit = Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
//! # let limiter = Limiter::builder().limit(limit).build().await?;
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
//! The store decides by its own clock: wall time when it was made, and since then time that nobody can set
//! back. In tests, give it a [`ManualClock`] and turn that by hand, so that no test has to sleep:
//!
//! ```
//! use tollkeeper::{Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota, Span, Time, facts};
//!
//! let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
//! let store = MemoryStore::new(Capacity::default(), Clock::manual(&hand));
//! let policy = Policy::new(vec![Limit::new("per-user", Quota::per_minute(60).burst(1)).by("user")]).unwrap();
//! let limiter = Limiter::embedded(policy, store);
//!
//! let alice = facts! { "user" => "alice" };
//! assert!(limiter.check(&alice).wait().unwrap().allowed());
//! let refused = limiter.check(&alice).wait().unwrap();
//! assert_eq!(refused.retry_after(), Some(Span::from_secs(1)));
//!
//! hand.advance(Span::from_secs(1));
//! assert!(limiter.check(&alice).wait().unwrap().allowed());
//! ```
//!
//! # Snapshots
//!
//! A store made by [`MemoryStore::open`] goes on where the last one stopped. It is saved to its file every
//! ten seconds, and when its last clone is dropped; a crash loses what came after the last save. A file
//! that is not whole is moved aside, and the store starts empty and says why. A file that another process
//! saves to is not opened. [`MemoryStore::snapshots`] tells how saving goes, and [`MemoryStore::close`] saves a last time
//! and returns what went wrong, which dropping the store cannot.
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
//!     Restored::Keys(keys) => println!("{keys} keys go on"),
//!     Restored::Refused(error) => println!("starting empty: {error}"),
//! }
//! # assert_eq!(store.keys(), 0);
//! store.close()?;
//! # drop(store);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Capacity`] caps what a store holds. A state is dropped only when it is as good as a fresh one; when a
//! full store has none such, new keys share states, so that no limit is ever exceeded.
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
mod limiter;
#[cfg(feature = "redis")]
mod log_throttle;
mod percent;
#[cfg(feature = "redis")]
mod process;
pub mod random;
pub mod store;
mod sync;
pub mod thread_cached;

pub use clock::{Clock, ManualClock, Sleep};
pub use limiter::ad_hoc::AdHocLimits;
pub use limiter::builder::{Backend, BuildError, Builder};
pub use limiter::handle::{Handle, HandleError, Layers, Passage, Passages};
pub use limiter::multi_request::MultiRequest;
pub use limiter::observer::{Observer, Op};
pub use limiter::operation::Operation;
pub use limiter::single_limit;
pub use limiter::slot_guard::SlotGuard;
pub use limiter::{Acquire, Acquired, Acquiring, Deciding, ForgetError, Limiter, Request, Waiting};
pub use percent::Percent;
pub use store::memory::{Capacity, MemoryStore, Restored, SnapshotError, SnapshotStatus, Snapshots};
#[cfg(feature = "redis")]
pub use store::remote::{Failure, FailureKind, PartialToll, Remote, RemoteResult, Server, Split};
#[cfg(feature = "redis")]
pub use store::resilient::{BreakerSettings, BreakerState, Resilient, ResilientSettings};
pub use store::{Correction, Store, StoreFuture, Unavailable};
pub use tollkeeper_core::*;

/// Runs the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
