//! What happens in one simulation, as plain data that follows from its seed.

use std::time::Duration;

use tollkeeper::store::{BreakerSettings, ResilientSettings};
use tollkeeper::{Algorithm, Consistency, Limit, Mode, OnStoreFailure, Policy, Quota, Span};
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
#[derive(Clone, Copy, Debug)]
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
        let nodes = random.below(4) + 1;
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
        let first: Vec<Draft> =
            (0..random.within(1, 3)).map(|index| Draft::new(&mut random, profile, index)).collect();
        let mut drafts = vec![first];
        if changes {
            for _ in 0..random.within(1, 3) {
                let changed = drafts[0].iter().map(|draft| draft.changed(&mut random)).collect();
                drafts.push(changed);
            }
        }
        let largest = drafts.iter().flatten().map(Draft::limit).max().unwrap_or(1);
        let weather = Weather::new(&mut random);
        let drifts = random.one_in(2);
        // A crystal is off by at most some hundred parts per million, and time is adjusted by at most 500.
        let drift = (0..nodes).map(|_| if drifts { signed(&mut random, 400) } else { 0 }).collect();
        let mut scenario = Scenario {
            seed,
            nodes,
            settings,
            versions: drafts.iter().map(|limits| limits.iter().map(Draft::build).collect()).collect(),
            drift,
            weather,
            is_steady: !changes && !steps_back && profile != Profile::Leased,
            actions: Vec::new(),
        };
        if profile == Profile::Leased && random.one_in(2) {
            scenario.add_squeezes(&mut random);
        } else {
            scenario.add_requests(&mut random, profile, largest);
        }
        scenario.add_faults(&mut random, changes, steps_back);
        scenario.actions.sort_by_key(|action| action.at);
        scenario
    }

    fn add_requests(&mut self, random: &mut Random, profile: Profile, largest: u64) {
        let (users, tenants) = (random.within(1, 3), random.within(1, 2));
        let usual_gap = random.pick(&[100, 1_000, 4_000]);
        let heaviest = match profile {
            Profile::Exact => random.pick(&[1, 2, largest]),
            Profile::Large => (largest / random.pick(&[16, 64])).max(1),
            Profile::Leased => (largest / random.pick(&[8, 32, 128])).max(1),
        };
        let life = self.longest_life();
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

    /// Rounds that try to spend the same units twice: one node takes permits of the first limit and keeps them nearly to
    /// their end, then the other nodes use up the limit while the first one spends them.
    fn add_squeezes(&mut self, random: &mut Random) {
        // Most answers are prompt, so that the limit is used up at once; some take nearly until the deadline.
        let slow = random.pick(&[5_000, 8_000, 11_000]);
        self.weather = Weather { usual: 200, delays: random.pick(&[0, 100, 400]), slow, ..self.weather };
        let policy = Policy::new(self.versions[0].clone()).expect("valid limits");
        let rule = &policy.rules()[0];
        let (quota, _) = rule.plain_quota().expect("a quota");
        let largest = rule.largest_count(quota.period());
        let life = Lease::of(quota, largest).map_or(50_000, |lease| lease.life.as_micros());
        let (burst, period) = (quota.limit(), quota.period().as_micros());
        // The clients of the other nodes are in the largest tier.
        let whole = burst * largest / quota.count();
        let mut at = 0;
        let request = |node, cost: u64, pro, then| {
            let (user, tenant, verb, gone) = (1, 1, RequestKind::Check, None);
            What::Request(Request { node, user, tenant, cost: cost.max(1), pro, verb, then, gone })
        };
        while self.actions.len() < usize::try_from(LEAST_REQUESTS).expect("small") {
            let first = random.below(self.nodes);
            let small = (burst / random.pick(&[80, 300, 800])).max(1);
            for _ in 0..random.within(6, 14) {
                let then = random.one_in(12).then(|| (random.within(0, 40_000), Then::Refund));
                self.actions.push(Action { at, what: request(first, small, false, then) });
                at += random.within(0, 2_000);
            }
            // Until the permits are about to expire, or the next window begins.
            at = match random.within(0, 6) {
                0 => (at / period + 1) * period + random.within(0, 3_000),
                1 => at + random.within(life / 2, life),
                2 => at + life - random.within(0, (life / 2).min(12_000)),
                3 => at + life + random.within(0, 2_000),
                _ => at + life - random.within(0, 1_000),
            };
            // Halves, so that nothing is left.
            for halving in 1..=20 {
                let cost = whole >> halving;
                for _ in 0..if halving > 4 && cost > 0 { 1 } else { 2 } {
                    let what = request(random.below(self.nodes), cost, largest > quota.count(), None);
                    self.actions.push(Action { at, what });
                }
                at += random.within(0, 20);
                if cost == 0 {
                    break;
                }
            }
            for _ in 0..random.within(6, 14) {
                self.actions.push(Action { at, what: request(first, small, false, None) });
                at += random.within(0, 400);
            }
            at += random.within(0, quota.window().as_micros() * 2);
        }
        self.actions.sort_by_key(|action| action.at);
    }

    /// The longest life of a lease, in microseconds.
    fn longest_life(&self) -> u64 {
        let policy = Policy::new(self.versions[0].clone()).expect("valid limits");
        let leases = policy.rules().iter().filter_map(|rule| {
            let (quota, _) = rule.plain_quota()?;
            Lease::of(quota, rule.largest_count(quota.period())).ok()
        });
        leases.map(|lease| lease.life.as_micros()).max().unwrap_or(50_000)
    }

    fn add_faults(&mut self, random: &mut Random, changes: bool, steps_back: bool) {
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
        if changes {
            for _ in 0..random.within(1, 6) {
                let (at, version) = (random.within(0, end), random.below(self.versions.len()));
                for node in 0..self.nodes {
                    add(at + random.within(0, 30_000), What::Limits(node, version));
                }
            }
        }
    }
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
    index: u64,
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
    fn new(random: &mut Random, profile: Profile, index: u64) -> Draft {
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
                let most = if profile == Profile::Leased { random.pick(&[2, 4, 16]) } else { 2 };
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

    fn build(&self) -> Limit {
        let allowance = match self.algorithm {
            Algorithm::Concurrency => Quota::slots(self.count),
            _ => self.quota(1),
        };
        let name = format!("limit-{}", self.index);
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
