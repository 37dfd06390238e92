//! A node: a limiter on a stack of stores, with a clock of its own.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tollkeeper::store::{Leased, LeasedSettings, Resilient, ResilientSettings, Store};
use tollkeeper::{Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, StoreChoice, Time};

use super::client::Client;

/// What a stack of stores is built from.
pub struct Environment {
    /// The client of the simulated store.
    pub client: Client,
    /// The clock of the node.
    pub clock: Clock,
    /// How long to wait for the store, and what to do without it.
    pub settings: ResilientSettings,
    /// Runs a task in the background.
    pub spawn: Spawn,
}

/// Runs a task in the background.
pub type Spawn = Arc<dyn Fn(Pin<Box<dyn Future<Output = ()> + Send>>) + Send + Sync>;

/// Builds the stores of a node.
pub type Stack = fn(Environment) -> Arc<dyn Store>;

/// The exact path: every check asks the store.
pub fn exact(environment: Environment) -> Arc<dyn Store> {
    let Environment { client, clock, settings, .. } = environment;
    Arc::new(Resilient::new(client, settings, local(clock)))
}

/// The shipped path: what a node knows for certain it answers without the store, and limits may be leased.
pub fn leased(environment: Environment) -> Arc<dyn Store> {
    let Environment { client, clock, settings, spawn } = environment;
    let resilient = Resilient::new(client, settings, local(clock.clone()));
    Arc::new(Leased::spawning(resilient, LeasedSettings::default(), clock, move |task| spawn(task)))
}

/// A local store for a node that sees few keys.
pub fn local(clock: Clock) -> MemoryStore {
    MemoryStore::new(Capacity { max_keys: 64, ..Capacity::default() }, clock)
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").field("client", &self.client).field("settings", &self.settings).finish()
    }
}

/// A node while it runs.
#[derive(Debug)]
pub struct Node {
    /// Its limiter.
    pub limiter: Limiter,
    /// Its clock.
    pub clock: ManualClock,
    /// How many times it has started.
    pub incarnation: u64,
    /// It does nothing before this time.
    pub paused_until: u64,
    /// It cannot reach the store before this time.
    pub cut_off_until: u64,
    /// Tasks that were woken while it was paused.
    pub set_aside: Vec<u64>,
    /// How often its time went on without it: pauses, and steps of its clock.
    pub disturbances: u64,
    rate: Rate,
    /// When the next sleeping task wakes, unless tasks ran or the clock was set since.
    wake: Option<u64>,
    has_run: bool,
}

/// Maps the time of the simulation to the time of a node.
#[derive(Clone, Copy, Debug)]
struct Rate {
    since: u64,
    showed: u64,
    parts_per_million: i64,
}

impl Rate {
    fn shows(&self, now: u64) -> u64 {
        let pace = u64::try_from(1_000_000 + self.parts_per_million).expect("clocks go forward");
        self.showed + (now - self.since) * pace / 1_000_000
    }

    /// The first time at which it shows `local`.
    fn when(&self, local: u64) -> u64 {
        let pace = u64::try_from(1_000_000 + self.parts_per_million).expect("clocks go forward");
        self.since + (local.saturating_sub(self.showed) * 1_000_000).div_ceil(pace)
    }
}

impl Node {
    /// Starts a node whose clock shows `shows`.
    pub fn start(
        limits: Vec<Limit>,
        now: u64,
        shows: u64,
        parts_per_million: i64,
        stack: impl FnOnce(Clock) -> Arc<dyn Store>,
    ) -> Node {
        let clock = ManualClock::new(Time::from_micros(shows));
        let store = stack(Clock::manual(&clock));
        let choice = StoreChoice::Other(store, Clock::manual(&clock));
        let builder = limits.into_iter().fold(Limiter::builder(), |builder, limit| builder.limit(limit));
        Node {
            limiter: builder.store(choice).build().expect("valid limits"),
            clock,
            incarnation: 0,
            paused_until: 0,
            cut_off_until: 0,
            set_aside: Vec::new(),
            disturbances: 0,
            rate: Rate { since: now, showed: shows, parts_per_million },
            wake: None,
            has_run: false,
        }
    }

    /// Sets the clock to what it shows at this time of the simulation, before a task reads it, and wakes the tasks whose
    /// time has come.
    pub fn tick(&mut self, now: u64) {
        let shows = Time::from_micros(self.rate.shows(now));
        if shows > self.clock.now() {
            self.clock.set(shows);
        }
        self.has_run = true;
    }

    /// Sets the clock forward.
    pub fn jump(&mut self, now: u64, by: u64) {
        let showed = self.rate.shows(now) + by;
        self.rate = Rate { since: now, showed, ..self.rate };
        self.has_run = true;
        self.disturbances += 1;
    }

    /// When the next task that sleeps on its clock wakes.
    pub fn next_wake(&mut self) -> Option<u64> {
        if std::mem::take(&mut self.has_run) {
            self.wake = self.clock.next_wake().map(|local| self.rate.when(local.as_micros()));
        }
        Some(self.wake?.max(self.paused_until))
    }

    /// Whether it is paused.
    pub fn is_paused(&self, now: u64) -> bool {
        now < self.paused_until
    }

    /// What its clock shows.
    pub fn shows(&self, now: u64) -> u64 {
        self.rate.shows(now)
    }
}
