//! What happens in one simulation, as plain data that follows from its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tollkeeper::store::{BreakerSettings, ResilientSettings};
use tollkeeper::{Algorithm, Consistency, Limit, Mode, OnStoreFailure, Quota, Span};
use tollkeeper_core::CheckedQuota;
use tollkeeper_core::lease::Lease;

use crate::cases::Random;

/// The limits, the nodes, and what happens to them.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed that it follows from.
    pub seed: u64,
    /// The number of nodes, which is also their setting `nodes`.
    pub nodes: usize,
    /// How long a node waits for the store, and what it does without it.
    pub settings: ResilientSettings,
    /// The limits in force, first and after each change. Names, algorithms and periods never change.
    pub versions: Vec<Vec<Limit>>,
    /// The limits whose buckets drain at several rates: those with tiers, and those whose count changes.
    pub several_rates: BTreeSet<String>,
    /// For each limit, by how many ticks a refund counts a charge as older: the longest life of its leases, in the
    /// version in which that is shortest.
    pub least_ages: BTreeMap<String, u64>,
    /// How much faster than the store's clock the clock of each node runs, in parts per million.
    pub drift: Vec<i64>,
    /// How the network treats messages.
    pub weather: Weather,
    /// Whether every verdict of the store can be compared with the definition of its algorithm: the limits stay and the
    /// store's clock is not set back.
    pub is_steady: bool,
    /// In the order of time.
    pub actions: Vec<Action>,
}

/// Something that happens at a time.
#[derive(Clone, Copy, Debug)]
pub struct Action {
    /// In microseconds since the start.
    pub at: u64,
    /// What happens.
    pub what: What,
}

/// Something that happens.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// A client asks a node.
    Request(Request),
    /// A node cannot reach the store for this long, in microseconds.
    Partition(usize, u64),
    /// A node does nothing for this long; its clock goes on.
    Pause(usize, u64),
    /// A node starts anew, with a clock that shows this much more than the last one did.
    Crash(usize, u64),
    /// The clock of a node is set forward.
    Jump(usize, u64),
    /// The clock of the store is set forward, or back.
    Step(i64),
    /// The store loses everything.
    Flush,
    /// A replica of the store catches up.
    Copy,
    /// The replica takes over: what happened since it caught up is lost.
    Failover,
    /// A node puts another version of the limits in force.
    Limits(usize, usize),
}

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The node that is asked.
    pub node: usize,
    /// The number of the user, and of the tenant.
    pub user: u64,
    #[expect(missing_docs, reason = "above")]
    pub tenant: u64,
    /// The cost.
    pub cost: u64,
    /// Whether the client is in the larger tier.
    pub pro: bool,
    /// What is asked for.
    pub verb: RequestKind,
    /// What happens after an admission, and how many microseconds later.
    pub then: Option<(u64, Then)>,
    /// The client goes away after this many microseconds.
    pub gone: Option<u64>,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the verbs of a limiter")]
pub enum RequestKind {
    Check,
    Peek,
    Usage,
    Reserve,
    Acquire,
}

/// What a client does after an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Gives all of it back.
    Refund,
    /// Gives a part of it back.
    RefundPart(u64),
    /// Settles to this cost.
    Settle(u64),
    /// Releases its slot.
    Release,
    /// Renews its slot.
    Renew,
    /// Has the limit `limit-0` forget the key.
    Forget,
}

/// How the network treats messages: each is the chance in a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// A request never arrives.
    pub loses_requests: u64,
    /// A reply never arrives.
    pub loses_replies: u64,
    /// A request arrives twice.
    pub duplicates: u64,
    /// The connection is refused at once.
    pub rejects: u64,
    /// A message takes up to [`Weather::slow`] instead of [`Weather::usual`].
    pub delays: u64,
    /// The longest usual delay of a message, in microseconds.
    pub usual: u64,
    /// The longest delay.
    pub slow: u64,
}

/// Which limits a scenario has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// All algorithms, with counts so small that every limit refuses often.
    Exact,
    /// Buckets and windows that are large enough to be leased, and requests that are heavy enough to use them up.
    Large,
    /// The same, leased. Requests come in pulses, about one life of a lease apart.
    Leased,
}

/// Times are in 2030, so that a real Redis does not find keys expired that were written at a simulated time.
pub const START: u64 = 1_900_000_000_000_000;

/// The fewest requests of a scenario.
pub const LEAST_REQUESTS: u64 = 300;

impl Scenario {
    /// The scenario of a seed.
    pub fn new(profile: Profile, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ (profile as u64) << 56);
        let squeezes = profile == Profile::Leased && random.one_in(2);
        let nodes = random.below(4) + 1 + usize::from(squeezes);
        let changes = random.one_in(3);
        let steps_back = random.one_in(5);
        let settings = ResilientSettings {
            deadline: Duration::from_micros(random.within(4, 12) * 1_000),
            breaker: BreakerSettings {
                failures: u32::try_from(random.within(2, 5)).expect("small"),
                cooldown: Span::from_micros(random.within(10, 150) * 1_000),
                ..BreakerSettings::default()
            },
            nodes: u32::try_from(nodes).expect("small"),
        };
        let limits = if squeezes && random.one_in(2) { 1 } else { 1 + random.below(3) };
        let first: Vec<Draft> = (0..limits).map(|index| Draft::new(&mut random, profile, index)).collect();
        let mut drafts = vec![first];
        if changes {
            for _ in 0..random.within(1, 3) {
                let changed = drafts[0].iter().map(|draft| draft.changed(&mut random)).collect();
                drafts.push(changed);
            }
        }
        let largest = drafts.iter().flatten().map(Draft::limit).max().unwrap_or(1);
        let weather = Weather::new(&mut random);
        // A crystal is off by at most some hundred parts per million, and time is adjusted by at most 500. The contracts
        // assume less than a thousandth.
        let most_drift = random.pick(&[0, 0, 400, 999]);
        let drift = (0..nodes).map(|_| signed(&mut random, most_drift)).collect();
        let mut scenario = Scenario {
            seed,
            nodes,
            settings,
            versions: drafts.iter().map(|limits| limits.iter().map(Draft::build).collect()).collect(),
            several_rates: (0..drafts[0].len())
                .filter(|limit| has_rates(&drafts, *limit))
                .map(name)
                .collect(),
            least_ages: (0..drafts[0].len()).map(|limit| (name(limit), least_age(&drafts, limit))).collect(),
            drift,
            weather,
            is_steady: !changes && !steps_back && profile != Profile::Leased,
            actions: Vec::new(),
        };
        if squeezes {
            scenario.add_squeezes(&mut random, &drafts[0]);
        } else {
            scenario.add_requests(&mut random, profile, largest, &drafts[0]);
        }
        if !squeezes || random.one_in(2) {
            scenario.add_faults(&mut random, steps_back, if changes { drafts.len() } else { 1 });
        }
        scenario.actions.sort_by_key(|action| action.at);
        scenario
    }

    /// How many requests it has.
    pub fn requests(&self) -> u64 {
        self.actions.iter().filter(|action| matches!(action.what, What::Request(_))).count() as u64
    }

    fn add_requests(&mut self, random: &mut Random, profile: Profile, largest: u64, limits: &[Draft]) {
        let (users, tenants) = (random.within(1, 3), random.within(1, 2));
        let usual_gap = random.pick(&[100, 1_000, 4_000]);
        let heaviest = match profile {
            Profile::Exact => random.pick(&[1, 2, largest]),
            Profile::Large => (largest / random.pick(&[16, 64])).max(1),
            Profile::Leased => (largest / random.pick(&[8, 32, 128])).max(1),
        };
        let life = limits.iter().filter_map(|limit| limit.life(1)).max().unwrap_or(50_000);
        let pulses = profile == Profile::Leased && !random.one_in(4);
        let corrections = random.one_in(2);
        // Some clients stick to one node for a while, as behind a load balancer with affinity.
        let sticky = random.one_in(3);
        let (mut at, mut node) = (0, 0);
        for _ in 0..random.within(LEAST_REQUESTS, LEAST_REQUESTS + 60) {
            at += match random.within(0, 99) {
                0..=5 if pulses => pulse(random, life),
                6..=60 if pulses => random.within(0, 3),
                0..=39 => random.within(0, 3),
                40..=97 => random.within(0, usual_gap),
                _ => random.within(0, 100_000),
            };
            if !sticky || random.one_in(30) {
                node = random.below(self.nodes);
            }
            let verb = match random.within(0, 19) {
                0 => RequestKind::Peek,
                1 => RequestKind::Usage,
                2..=3 => RequestKind::Reserve,
                4..=7 => RequestKind::Acquire,
                _ => RequestKind::Check,
            };
            let then = (corrections && random.one_in(3)).then(|| {
                let amount = random.within(1, heaviest + 2);
                let then = match random.within(0, 9) {
                    0..=3 => Then::Refund,
                    4..=5 => Then::RefundPart(amount),
                    6..=8 => Then::Settle(amount),
                    _ => Then::Forget,
                };
                (random.within(0, 60_000), then)
            });
            let then = if verb == RequestKind::Acquire {
                let then = random.pick(&[Then::Release, Then::Release, Then::Renew]);
                (!random.one_in(4)).then(|| (random.within(0, 120_000), then))
            } else {
                then
            };
            let cost = if random.one_in(4) { random.within(1, heaviest) } else { heaviest.div_ceil(8) };
            self.actions.push(Action {
                at,
                what: What::Request(Request {
                    node,
                    user: random.within(1, users),
                    tenant: random.within(1, tenants),
                    cost,
                    pro: random.one_in(3),
                    verb,
                    then,
                    gone: random.one_in(40).then(|| random.within(0, 3_000)),
                }),
            });
        }
    }

    /// Rounds that try to spend the same units twice. A node takes permits of the first limit and keeps them nearly to
    /// their end. Then a rival uses up the limit, and the node spends its permits.
    fn add_squeezes(&mut self, random: &mut Random, limits: &[Draft]) {
        let squeeze = Squeeze::new(random, limits);
        let rivals_are_exact = random.one_in(2);
        if rivals_are_exact {
            // A rival without leases takes all that is left: no unit of it is lost in unspent permits.
            let exact = |draft: &Draft| Draft { consistency: Consistency::Exact, ..*draft }.build();
            self.versions.push(limits.iter().map(exact).collect());
        }
        // Most answers are prompt, so that the limit is used up at once; some take nearly until the deadline.
        self.weather = match random.within(0, 2) {
            0 => Weather { usual: 20, ..Weather::default() },
            1 => Weather { usual: 20, delays: 0, ..self.weather },
            _ => {
                let slow = random.pick(&[5_000, 8_000, 11_000]);
                Weather { usual: 200, delays: random.pick(&[0, 100, 400]), slow, ..self.weather }
            }
        };
        // The clock of the node that holds permits may be the slowest, so that it spends them as late as it can.
        let holder = random.below(self.nodes);
        if random.one_in(2) {
            self.drift[holder] = -999;
        }
        let mut at = 0;
        while self.requests() < LEAST_REQUESTS {
            let holder = if random.one_in(4) { random.below(self.nodes) } else { holder };
            let rival = (holder + 1 + random.below(self.nodes - 1)) % self.nodes;
            if rivals_are_exact {
                self.actions.push(Action { at, what: What::Limits(rival, self.versions.len() - 1) });
                self.actions.push(Action { at, what: What::Limits(holder, 0) });
            }
            at = squeeze.add_round(random, &mut self.actions, at, holder, rival);
        }
        self.actions.sort_by_key(|action| action.at);
    }

    fn add_faults(&mut self, random: &mut Random, steps_back: bool, versions: usize) {
        let end = self.actions.last().map_or(0, |last| last.at);
        let mut add = |at: u64, what| self.actions.push(Action { at, what });
        for _ in 0..random.within(0, 6) {
            let (at, node) = (random.within(0, end), random.below(self.nodes));
            match random.within(0, 7) {
                0..=1 => add(at, What::Partition(node, random.within(1_000, 200_000))),
                2 => add(at, What::Pause(node, random.within(1_000, 100_000))),
                3 => add(at, What::Crash(node, random.within(0, 5_000_000))),
                4 => add(at, What::Jump(node, random.within(1, 500_000))),
                5 => add(at, What::Flush),
                6 => {
                    add(at.saturating_sub(random.within(0, 50_000)), What::Copy);
                    add(at, What::Failover);
                }
                _ => add(at, What::Step(i64::try_from(random.within(1, 2_000_000)).expect("small"))),
            }
        }
        if steps_back {
            add(
                random.within(0, end),
                What::Step(-i64::try_from(random.within(1, 3_000_000)).expect("small")),
            );
        }
        if versions > 1 {
            for _ in 0..random.within(1, 6) {
                let (at, version) = (random.within(0, end), random.below(versions));
                for node in 0..self.nodes {
                    add(at + random.within(0, 30_000), What::Limits(node, version));
                }
            }
        }
    }
}

/// The numbers of the limit that is used up in rounds.
#[derive(Clone, Copy, Debug)]
struct Squeeze {
    burst: u64,
    period: u64,
    /// How long it takes until the limit is unused again, in microseconds.
    refill: u64,
    life: u64,
    /// What a rival can use up, which is in the largest tier.
    whole: u64,
    has_tiers: bool,
}

impl Squeeze {
    fn new(random: &mut Random, limits: &[Draft]) -> Squeeze {
        let draft = limits[0];
        let times = draft.tier.max(1);
        // Permits of the larger tier live longer.
        let life = draft.life(if random.one_in(4) { times } else { 1 });
        Squeeze {
            burst: draft.limit(),
            period: draft.period,
            refill: draft.period * draft.limit() / draft.count,
            life: life.unwrap_or(50_000),
            whole: draft.limit() * times,
            has_tiers: times > 1,
        }
    }

    /// Adds one round, and returns when it ends.
    fn add_round(
        &self,
        random: &mut Random,
        actions: &mut Vec<Action>,
        began: u64,
        holder: usize,
        rival: usize,
    ) -> u64 {
        let Squeeze { burst, period, life, .. } = *self;
        let pro = self.has_tiers && random.one_in(4);
        let mut add = |at: u64, node, cost: u64, pro, then| {
            let (user, tenant, verb, gone) = (1, 1, RequestKind::Check, None);
            let cost = cost.max(1);
            let request = Request { node, user, tenant, cost, pro, verb, then, gone };
            actions.push(Action { at, what: What::Request(request) });
        };
        let mut at = began;
        // The first request asks the store, and the node takes a lease after it. A charge that is given back after the
        // lease must not take its raise along.
        let first = burst / random.pick(&[2, 8, 16, 80, 300]);
        let refund = random.one_in(3).then(|| (random.within(200, 3_000), Then::Refund));
        add(at, holder, first, pro, refund);
        let (small, gap) = (burst / random.pick(&[80, 300, 800]), random.pick(&[50, 2_000]));
        for _ in 0..random.pick(&[0, 0, 2, 10]) {
            at += random.within(0, gap);
            let then = random.one_in(12).then(|| (random.within(0, 40_000), Then::Refund));
            add(at, holder, small, pro, then);
        }
        // A node spends permits until a thousandth and 2 ms before the end of their life.
        let (end, margin) = (at + life, life / 1_000);
        at = match random.within(0, 7) {
            0 => (at / period + 1) * period + random.within(0, 3_000),
            1 => end - random.within(0, life / 2),
            2 => end - random.within(0, (life / 2).min(12_000)),
            3 => end + random.within(0, 2_000),
            4 => end - random.within(0, 1_000),
            5..=6 => end - margin - 2_000 - random.within(0, 300),
            _ => end + random.within(0, margin),
        };
        // Halves, so that nothing is left.
        for halving in 1..=20 {
            let cost = self.whole >> halving;
            (0..2).for_each(|_| add(at, rival, cost, self.has_tiers, None));
            if cost == 0 {
                break;
            }
        }
        at += random.within(0, 30);
        for halving in 3..=20 {
            let cost = burst >> halving;
            for _ in 0..2 {
                add(at, holder, cost, pro, None);
                at += random.within(0, 10);
            }
            if cost == 0 {
                break;
            }
        }
        at + random.within(0, self.refill * 2)
    }
}

/// The name of the limit with this index.
fn name(limit: usize) -> String {
    format!("limit-{limit}")
}

/// Whether a bucket of this limit drains at several rates.
fn has_rates(versions: &[Vec<Draft>], limit: usize) -> bool {
    let [first, others @ ..] = versions else { return false };
    first[limit].tier > 1 || others.iter().any(|other| other[limit].count != first[limit].count)
}

/// See [`Scenario::least_ages`].
fn least_age(versions: &[Vec<Draft>], limit: usize) -> u64 {
    let ages = versions.iter().map(|version| {
        let draft = version[limit];
        let lives = [1, draft.tier.max(1)].map(|times| draft.life(times));
        lives.into_iter().flatten().max().unwrap_or(0)
    });
    ages.min().unwrap_or(0)
}

impl Weather {
    fn new(random: &mut Random) -> Weather {
        let mut chance = |most| if random.one_in(2) { 0 } else { random.within(0, most) };
        let (loses_requests, loses_replies, duplicates) = (chance(30), chance(30), chance(30));
        let (rejects, delays) = (chance(20), chance(60));
        Weather {
            loses_requests,
            loses_replies,
            duplicates,
            rejects,
            delays,
            usual: random.pick(&[200, 1_000, 3_000]),
            slow: 40_000,
        }
    }
}

/// A limit that can be changed before it is built.
#[derive(Clone, Copy, Debug)]
struct Draft {
    index: usize,
    algorithm: Algorithm,
    period: u64,
    count: u64,
    burst: u64,
    by: u64,
    shadow: bool,
    stagger: bool,
    on_store_failure: OnStoreFailure,
    consistency: Consistency,
    /// How many times the count and the burst the larger tier has; 0 without tiers.
    tier: u64,
}

impl Draft {
    fn new(random: &mut Random, profile: Profile, index: usize) -> Draft {
        let (algorithm, period, count, burst) = match profile {
            Profile::Exact => {
                let algorithm = random.pick(&Algorithm::ALL);
                let most = if algorithm == Algorithm::Concurrency { 6 } else { 30 };
                let period = random.pick(&[1_000, 50_000, 200_000, 1_000_000, 60_000_000]);
                (algorithm, period, random.within(1, most), random.within(1, 20))
            }
            Profile::Large | Profile::Leased => {
                let algorithm = random.pick(&[
                    Algorithm::TokenBucket,
                    Algorithm::TokenBucket,
                    Algorithm::FixedWindow,
                    Algorithm::SlidingWindow,
                ]);
                let period = random.pick(&[200_000, 1_000_000]);
                let count = random.within(256, 4_000);
                // With the largest burst, leases live for up to a second.
                let most = if profile == Profile::Leased { random.pick(&[2, 4, 16, 160]) } else { 2 };
                (algorithm, period, count, random.within(count / 2, count * most))
            }
        };
        Draft {
            index,
            algorithm,
            period,
            count,
            burst,
            by: random.within(0, 2),
            shadow: random.one_in(12),
            stagger: algorithm == Algorithm::FixedWindow && random.one_in(3),
            on_store_failure: random.pick(&[
                OnStoreFailure::Local,
                OnStoreFailure::Local,
                OnStoreFailure::Local,
                OnStoreFailure::Deny,
                OnStoreFailure::Allow,
            ]),
            consistency: match profile {
                Profile::Leased if !random.one_in(6) => Consistency::Leased,
                _ => Consistency::Exact,
            },
            tier: if profile == Profile::Leased && random.one_in(3) { random.within(2, 4) } else { 0 },
        }
    }

    /// The same limit with other numbers.
    fn changed(&self, random: &mut Random) -> Draft {
        let change = |random: &mut Random, number: u64| match random.within(0, 4) {
            0 => number + 1,
            1 => (number - 1).max(1),
            2 => (number / 2).max(1),
            3 => number * 2,
            _ => number,
        };
        let (count, burst) = (change(random, self.count), change(random, self.burst));
        Draft { count, burst, ..*self }
    }

    /// The largest cost that it can admit.
    fn limit(&self) -> u64 {
        if self.algorithm.has_burst() { self.burst } else { self.count }
    }

    /// The quota, with this many times the count and the burst.
    fn quota(&self, times: u64) -> Quota {
        let quota = Quota::per(self.count * times, Duration::from_micros(self.period));
        if self.algorithm.has_burst() { quota.burst(self.burst * times) } else { quota }
    }

    /// The life of a lease under [`Draft::quota`], in microseconds; `None` if it has no leases.
    fn life(&self, times: u64) -> Option<u64> {
        let quota = CheckedQuota::new(self.algorithm, self.quota(times)).ok()?;
        let largest = self.count * self.tier.max(1);
        Lease::of(&quota, largest).ok().map(|lease| lease.life.as_micros())
    }

    fn build(&self) -> Limit {
        let allowance = match self.algorithm {
            Algorithm::Concurrency => Quota::slots(self.count),
            _ => self.quota(1),
        };
        let name = name(self.index);
        let limit = match self.tier {
            0 => Limit::new(name, allowance),
            times => {
                let larger = self.quota(times);
                let tiered = Limit::tiered(name, "plan").tier("free", allowance);
                tiered.tier("pro", larger).default_tier("free")
            }
        };
        let mut limit = limit
            .algorithm(self.algorithm)
            .consistency(self.consistency)
            .on_store_failure(self.on_store_failure);
        if self.algorithm == Algorithm::Concurrency {
            limit = limit.ttl(Duration::from_micros(self.period.max(100_000)));
        }
        if self.by >= 1 {
            limit = limit.by("tenant");
        }
        if self.by == 2 {
            limit = limit.by("user");
        }
        if self.stagger {
            limit = limit.stagger();
        }
        if self.shadow { limit.mode(Mode::Shadow) } else { limit }
    }
}

/// A pause of about this life, or of a part of it.
fn pulse(random: &mut Random, life: u64) -> u64 {
    match random.within(0, 3) {
        0 => random.within(life.saturating_sub(3_000), life + 1_000),
        1 => random.within(life.saturating_sub(life / 500), life + life / 500),
        2 => random.within(0, life),
        _ => random.within(0, 3_000),
    }
}

fn signed(random: &mut Random, most: i64) -> i64 {
    i64::try_from(random.within(0, 2 * most.unsigned_abs())).expect("small") - most
}
