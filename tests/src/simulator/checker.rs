//! Judges a simulation: admissions by the contracts, and what nodes answer by what the store did.
//!
//! The store reports every charge that it makes when it makes it, on its own clock, whether or not the reply arrives. So
//! the history of a key is what the store let through, and an answer of a node must follow from it. Decisions that a
//! node makes without the store are judged by the node's share of the quota, on the node's clock.
//!
//! A loss of state splits a history. Up to the loss it must keep the contract; what the surviving copy remembers and
//! what follows must keep it too. Together they admit at most one contract more for each loss, as documented. If the
//! store's clock is set back, windows are judged before and after by themselves; buckets and logs are judged over the
//! step, on a clock that stands still instead.

use std::collections::{BTreeMap, BTreeSet};

use tollkeeper::store::{Change, KeyCorrection, LeaseRequest, LimitReply, Toll};
use tollkeeper::{
    Algorithm, Approximation, Charge, Consistency, Correction, DecidedToll, LimitDecision, OnStoreFailure,
    Policy,
};
use tollkeeper_core::charge::{Item, ItemKey};

use super::history::{History, StoreTime};
use super::scenario::Scenario;
use super::tally::{Kind, Tally};

/// The time of a use on the clock of its node, and its units.
type Use = (u64, u64);

/// The histories of all keys.
#[derive(Debug)]
pub struct Checker {
    nodes: u64,
    /// Compare every verdict with the definition.
    is_steady: bool,
    /// See [`Scenario::least_ages`](super::Scenario::least_ages).
    least_ages: BTreeMap<String, u64>,
    /// The keys of which a node corrected a charge that did not lease their limit at that time.
    exact_corrections: BTreeSet<Vec<u8>>,
    keys: BTreeMap<Vec<u8>, History>,
    copy: BTreeMap<Vec<u8>, History>,
    /// What nodes admitted without the store, by node, incarnation and key.
    local: BTreeMap<(usize, u64, Vec<u8>), History>,
    /// The keys and costs that each admission charged, for every time that it was delivered.
    charges: BTreeMap<u64, Vec<Vec<Charged>>>,
    /// What each node knows of its keys.
    known: Vec<BTreeMap<Vec<u8>, Known>>,
    /// Refusals that a node derived from what it knew, to be compared with the store.
    pub bounded: Vec<Bounded>,
    /// The first violation.
    violation: Option<String>,
    /// What happened.
    pub tally: Tally,
}

/// What a node knows of a key.
#[derive(Debug, Default)]
struct Known {
    /// Whether its last answer was made without the store.
    degraded: bool,
    /// When it used units of the key, on its own clock: admitted, or refused by that key.
    used: Vec<Use>,
}

/// A key, and what it was charged.
type Charged = (Vec<u8>, u64);

impl Checker {
    /// A checker of the store of a scenario.
    pub fn new(scenario: &Scenario) -> Checker {
        Checker {
            nodes: scenario.nodes as u64,
            is_steady: scenario.is_steady,
            least_ages: scenario.least_ages.clone(),
            exact_corrections: BTreeSet::new(),
            keys: BTreeMap::new(),
            copy: BTreeMap::new(),
            local: BTreeMap::new(),
            charges: BTreeMap::new(),
            known: (0..scenario.nodes).map(|_| BTreeMap::new()).collect(),
            bounded: Vec::new(),
            violation: None,
            tally: Tally::default(),
        }
    }

    /// The first violation, if there was one.
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Records a violation, if it is the first.
    pub fn violate(&mut self, message: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(message());
        }
    }

    /// The store decided a toll. Returns whether it charged something.
    pub fn store_decided(&mut self, decided: &DecidedToll, id: u64, now: StoreTime) -> bool {
        if self.is_steady {
            self.compare(decided, now);
        }
        let (charge, slot) = (decided.charge(), decided.slot());
        let charged = charge.iter().flat_map(Charge::items);
        let mut keys = Vec::new();
        for item in charged.chain(slot.iter().flat_map(|slot| slot.items())) {
            let is_steady = self.is_steady;
            let new = || History::new(item.quota, item.shift, is_steady);
            history_of(&mut self.keys, key_of(item), new).admit(id, item.quota, item.cost, now);
            keys.push((key_of(item).to_vec(), item.cost));
        }
        let has_charged = !keys.is_empty();
        if has_charged {
            self.charges.entry(id).or_default().push(keys);
        }
        // A refusal moves a state that is ahead of the clock by its own quota, which may be another than that of admissions.
        for limit in decided.limits().filter(is_moved) {
            if let Some(history) = self.keys.get_mut(&limit.key().to_bytes()) {
                history.in_force(limit.due().quota);
            }
        }
        has_charged
    }

    /// The store granted permits.
    pub fn store_granted(&mut self, request: &LeaseRequest) {
        self.tally.count(Kind::Leases);
        let due = request.toll.get(0);
        let new = || History::new(*due.quota, due.shift, false);
        let key = due.key.to_bytes();
        let least_age = match self.exact_corrections.contains(&key) {
            true => 0,
            false => self.least_ages.get(due.rule.name()).copied().unwrap_or(0),
        };
        let history = self.keys.entry(key).or_insert_with(new);
        history.in_force(due.quota);
        history.oracle = None;
        history.least_age = least_age;
        if !history.leases.contains(&request.lease) {
            history.leases.push(request.lease);
        }
    }

    /// Compares the verdict of every limit with its definition.
    fn compare(&mut self, decided: &DecidedToll, now: StoreTime) {
        for limit in decided.limits() {
            let due = limit.due();
            let expected = match self.keys.get(&due.key.to_bytes()) {
                // A request takes one slot, whatever its cost.
                None => due.is_slot() || due.cost <= due.quota.limit(),
                Some(history) => match history.says(due.quota, due.cost, now) {
                    Some(says) => says,
                    None => continue,
                },
            };
            self.tally.count(Kind::Compared);
            if limit.allowed() != expected {
                let allowed = limit.allowed();
                self.violate(|| {
                    format!(
                        "the store says {allowed} at {} where the definition says {expected}: {due:?}",
                        now.shown
                    )
                });
            }
        }
    }

    /// The store corrected a charge.
    pub fn store_corrected(
        &mut self,
        charge: &Charge,
        corrections: &[KeyCorrection],
        result: Correction,
        now: StoreTime,
    ) {
        match result {
            Correction::Done => self.tally.count(Kind::Corrected),
            Correction::Repeated => self.tally.count(Kind::Repeated),
            _ => {}
        }
        if result != Correction::Done {
            return;
        }
        for (item, fix) in charge.items().iter().zip(corrections) {
            let is_steady = self.is_steady;
            let new = || History::new(item.quota, item.shift, is_steady);
            let history = history_of(&mut self.keys, key_of(item), new);
            if self.exact_corrections.contains(key_of(item)) {
                history.least_age = 0;
            }
            match fix.change {
                Change::Keep => {}
                Change::GiveBack(part) => history.give_back(charge, item, &fix.past, part, now),
                Change::Add(more) => history.settle(more, now),
            }
        }
    }

    /// The store released or renewed a slot.
    pub fn store_handled(&mut self, slot: &tollkeeper::Slot, renew: bool, now: StoreTime) {
        for item in slot.items() {
            if let Some(history) = self.keys.get_mut(key_of(item)) {
                history.handle(slot.id(), renew.then(|| item.quota.period().as_micros()), now.passed);
            }
        }
    }

    /// The store deleted a key because an operator asked for it: a new history begins.
    pub fn store_forgot(&mut self, key: &[u8]) {
        if let Some(history) = self.keys.get_mut(key).filter(|history| history.is_leased()) {
            history.losses += 1;
        } else if let Some(history) = self.keys.remove(key) {
            self.judge(&history, None);
        }
    }

    /// The store lost everything.
    pub fn store_flushed(&mut self) {
        self.judge_all();
        self.keys.retain(|_, history| history.is_leased());
        self.store_stepped_forward();
    }

    /// The store's clock was set forward. For nodes that hold permits this is like a loss of state.
    pub fn store_stepped_forward(&mut self) {
        self.keys.values_mut().filter(|history| history.is_leased()).for_each(|history| history.losses += 1);
    }

    /// The store's clock was set back. Permits of a window can be spent in another one, which begins earlier than its node
    /// knows.
    pub fn store_stepped_back(&mut self) {
        let leased_windows = |history: &&mut History| {
            history.is_leased() && history.quota.algorithm() != Algorithm::TokenBucket
        };
        self.keys.values_mut().filter(leased_windows).for_each(|history| history.losses += 1);
    }

    /// A replica of the store has caught up.
    pub fn store_copied(&mut self) {
        self.copy = self.keys.clone();
    }

    /// The replica took over.
    pub fn store_failed_over(&mut self) {
        self.judge_all();
        let now = std::mem::replace(&mut self.keys, self.copy.clone());
        self.keys.extend(now.into_iter().filter(|(_, history)| history.is_leased()));
        self.store_stepped_forward();
    }

    /// A node decided a request.
    pub fn node_decided(&mut self, by: &Answered<'_>, decided: &DecidedToll) {
        let tally = if decided.allowed() { Kind::Admitted } else { Kind::Refused };
        self.tally.count(tally);
        if decided.degraded().is_some() {
            self.tally.count(Kind::Degraded);
            if by.calls == 0 {
                self.tally.count(Kind::BreakerOpen);
            }
        }
        let charging = decided.toll().verb().charges();
        self.judge_knowledge(by, decided, charging);
        if by.calls > 1 {
            self.violate(|| format!("one request made {} calls to decide", by.calls));
        }
        if by.took > by.deadline && !by.disturbed {
            self.violate(|| format!("an answer took {} us of {} us", by.took, by.deadline));
        }
        if decided.degraded().is_some() && decided.charge().is_some() {
            self.violate(|| "a decision without the store has a charge".to_owned());
        }
        let refuses = |limit: &LimitDecision<'_>| {
            limit.due().enforced() && limit.degraded() == Some(OnStoreFailure::Deny)
        };
        if decided.allowed() && decided.limits().any(|limit| refuses(&limit)) {
            self.violate(|| "admitted although a limit with `deny` had no answer".to_owned());
        }
        if charging && decided.allowed() {
            self.spent(by, decided);
        }
        if decided.degraded().is_none() {
            self.follows(by, decided, charging);
        } else if charging && decided.allowed() {
            self.admitted_locally(by, decided);
        }
    }

    /// What a node answers with the store must be what the store did. Permits were charged when they were granted, so
    /// an admission that spends them is judged here, at the instant it took them.
    fn follows(&mut self, by: &Answered<'_>, decided: &DecidedToll, charging: bool) {
        if !(charging && decided.allowed()) {
            // Of a request that was delivered twice, the second may have been admitted unnoticed.
            if let Some(id) = by.charged.first().copied().filter(|_| !by.delivered_twice) {
                self.violate(|| format!("charged {id} for a request that was refused or only peeked"));
            }
            return;
        }
        let permits: Vec<LimitDecision<'_>> = decided.limits().filter(spends_permits).collect();
        let (charge, slot) = (decided.charge(), decided.slot());
        let items = charge.iter().flat_map(Charge::items).chain(slot.iter().flat_map(|slot| slot.items()));
        let mut items: Vec<(&[u8], u64)> = items.map(|item| (key_of(item), item.cost)).collect();
        items.retain(|(key, _)| permits.iter().all(|limit| limit.key().to_bytes() != *key));
        if items.is_empty() {
            return;
        }
        let id = charge.as_ref().map(Charge::id).or(slot.as_ref().map(tollkeeper::Slot::id));
        let Some(id) = id else { return };
        let charged = self.charges.get(&id).map_or(&[][..], |charged| charged);
        let is_charged = |charged: &Vec<Charged>| {
            charged.iter().map(|(key, cost)| (&key[..], *cost)).eq(items.iter().copied())
        };
        if !by.charged.contains(&id) || !charged.iter().any(is_charged) {
            let message = format!("admitted {id} with {items:?}, but the store charged {charged:?}");
            self.violate(|| message);
        }
    }

    /// An admission that spends permits is judged at the instant it took them.
    fn spent(&mut self, by: &Answered<'_>, decided: &DecidedToll) {
        if !decided.limits().any(|limit| spends_permits(&limit)) {
            return;
        }
        let id = decided.charge().map_or(0, |charge| charge.id());
        for limit in decided.limits().filter(spends_permits) {
            let due = limit.due();
            let new = || History::new(*due.quota, due.shift, false);
            let history = self.keys.entry(due.key.to_bytes()).or_insert_with(new);
            history.admit(id, *due.quota, due.cost, by.asked);
            self.tally.count(Kind::Spent);
        }
    }

    /// Remembers what a node knows of its keys, and the refusals that it derived from that.
    fn judge_knowledge(&mut self, by: &Answered<'_>, decided: &DecidedToll, charging: bool) {
        for (index, limit) in decided.limits().enumerate() {
            let due = limit.due();
            let known = self.known[by.node].entry(limit.key().to_bytes()).or_default();
            if charging && (decided.allowed() || !limit.allowed()) {
                known.used.push((by.local, due.cost));
            }
            match limit.approximation() {
                Some(Approximation::DenialBound) if !limit.allowed() && due.enforced() => {
                    if known.degraded {
                        self.violate(|| format!("a bound outlives an answer without the store: {due:?}"));
                    }
                    self.bounded.push(Bounded { node: by.node, toll: decided.toll().part(&[index]) });
                }
                // The store is asked for every peek.
                Some(_) if !charging => known.degraded = false,
                Some(Approximation::Permits) if !limit.allowed() => self.tally.count(Kind::Scarce),
                Some(_) => {}
                None if limit.degraded().is_some() => known.degraded = true,
                None if limit.asked() => known.degraded = false,
                None => {}
            }
        }
    }

    /// A node received permits, and with them the state of their key.
    pub fn node_granted(&mut self, node: usize, key: &[u8]) {
        if let Some(known) = self.known[node].get_mut(key) {
            known.degraded = false;
        }
    }

    /// A node is about to correct a charge under these limits. If it does not lease a limit that others lease, it does
    /// not know for how long their permits live, and counts the charge as no older than it is.
    pub fn node_corrects(&mut self, charge: &Charge, policy: &Policy) {
        for item in charge.items() {
            let rule = policy.find(item.key().limit());
            if rule.is_none_or(|(_, rule)| rule.consistency() == Consistency::Exact) {
                self.exact_corrections.insert(key_of(item).to_vec());
            }
        }
    }

    /// A node has started anew.
    pub fn node_started(&mut self, node: usize) {
        self.known[node].clear();
    }

    /// How many units of a key a node used since this time on its clock.
    pub fn demand(&self, node: usize, key: &[u8], since: u64) -> u64 {
        let used = self.known[node].get(key).map_or(&[][..], |known| &known.used);
        used.iter().filter(|(at, _)| *at >= since).map(|(_, units)| units).sum()
    }

    fn admitted_locally(&mut self, by: &Answered<'_>, decided: &DecidedToll) {
        let at = StoreTime { shown: by.local, passed: by.local, steps_back: 0 };
        for limit in decided.limits() {
            let due = limit.due();
            if limit.degraded() != Some(OnStoreFailure::Local) || !limit.allowed() || due.cost == 0 {
                continue;
            }
            let id = decided.slot().map_or(0, |slot| slot.id());
            let key = (by.node, by.incarnation, due.key.to_bytes());
            let history = self.local.entry(key).or_insert_with(|| History::new(*due.quota, due.shift, false));
            history.admit(id, *due.quota, due.cost, at);
        }
    }

    /// A node released or renewed a slot that it had granted without the store.
    pub fn node_handled(
        &mut self,
        (node, incarnation): (usize, u64),
        slot: &tollkeeper::Slot,
        renew: bool,
        local: u64,
    ) {
        for item in slot.items() {
            if let Some(history) = self.local.get_mut(&(node, incarnation, key_of(item).to_vec())) {
                history.handle(slot.id(), renew.then(|| item.quota.period().as_micros()), local);
            }
        }
    }

    /// A node forgot its own share of a key.
    pub fn node_forgot(&mut self, node: usize, incarnation: u64, key: &[u8]) {
        if let Some(history) = self.local.remove(&(node, incarnation, key.to_vec())) {
            self.judge(&history, Some(self.nodes));
        }
    }

    /// Judges what is left at the end.
    pub fn finish(&mut self) {
        self.judge_all();
        for history in std::mem::take(&mut self.local).into_values() {
            self.judge(&history, Some(self.nodes));
        }
    }

    fn judge_all(&mut self) {
        let keys = std::mem::take(&mut self.keys);
        keys.values().for_each(|history| self.judge(history, None));
        self.keys = keys;
    }

    /// Judges a history by the contract, or by the share of one of several nodes.
    fn judge(&mut self, history: &History, nodes: Option<u64>) {
        for _ in &history.entries {
            self.tally.count(Kind::Judged);
        }
        if let Some(breach) = history.breach(nodes) {
            let whose = if nodes.is_some() { "a node's share" } else { "the store" };
            self.violate(|| format!("{whose}: {breach}\n{history:?}"));
        }
    }
}

/// Whether the store found the state ahead of its clock, which was set back, and moved it.
fn is_moved(limit: &LimitDecision<'_>) -> bool {
    matches!(limit.reply(), LimitReply::Step { step, .. } if step.effect.moved())
}

/// Whether an admission spent permits that this limit's node held, instead of asking the store.
fn spends_permits(limit: &LimitDecision<'_>) -> bool {
    limit.approximation() == Some(Approximation::Permits) && limit.due().cost > 0
}

/// A refusal that a node derived from what it knew.
#[derive(Clone, Debug)]
pub struct Bounded {
    /// The node.
    pub node: usize,
    /// The key and the cost that were refused.
    pub toll: Toll,
}

/// How a node came to its answer.
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// The node.
    pub node: usize,
    /// How many times it had started.
    pub incarnation: u64,
    /// The time on the store's clock when it was asked.
    pub asked: StoreTime,
    /// The time on its own clock when it answered.
    pub local: u64,
    /// How long it took, on its clock.
    pub took: u64,
    /// The longest that it should take.
    pub deadline: u64,
    /// Whether it was paused meanwhile, or its clock was set.
    pub disturbed: bool,
    /// How many tolls it sent.
    pub calls: u64,
    /// The IDs under which the store charged it.
    pub charged: &'a [u64],
    /// Whether the network delivered one of its calls twice.
    pub delivered_twice: bool,
}

/// The history of a key, or a new one.
fn history_of<'h>(
    keys: &'h mut BTreeMap<Vec<u8>, History>,
    key: &[u8],
    new: impl FnOnce() -> History,
) -> &'h mut History {
    if !keys.contains_key(key) {
        keys.insert(key.to_vec(), new());
    }
    keys.get_mut(key).expect("inserted above")
}

fn key_of(item: &Item) -> &[u8] {
    match &item.key {
        ItemKey::Whole(bytes) => bytes,
        ItemKey::Short(..) => panic!("only sealed receipts have short keys"),
    }
}
