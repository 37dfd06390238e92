//! The reference store: a map and the pure functions of the core, with the time as an argument.
//!
//! Every other store must give the same results.

use std::collections::{BTreeMap, BTreeSet};

use tollkeeper::Correction;
use tollkeeper::store::{LeaseGrant, LeaseRequest};
use tollkeeper_core::algorithm::{self, Effect, State, Step, StoredState, concurrency};
use tollkeeper_core::charge::{Item, ItemKey};
use tollkeeper_core::{Algorithm, Change, Charge, Due, KeyCorrection, LimitReply, Reply, Slot, Time, Toll};

/// States by the bytes of their key.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    states: BTreeMap<Vec<u8>, (State, Time)>,
    markers: BTreeSet<(Vec<u8>, u64)>,
}

impl Reference {
    /// Decides a toll.
    pub fn decide(&mut self, toll: &Toll, now: Time, id: u64) -> Reply {
        let charging = toll.verb().charges();
        let dues: Vec<Due<'_>> = toll.dues().collect();
        let keys: Vec<Vec<u8>> = dues.iter().map(|due| due.key.to_bytes()).collect();
        let step = |(due, key): (&Due<'_>, &Vec<u8>)| due.step(self.stored(key), now);
        let steps: Vec<Step> = dues.iter().zip(&keys).map(step).collect();
        let admitted = dues.iter().zip(&steps).all(|(due, step)| step.allowed || !due.enforced());
        let mut ruling = Reply::new(now, if charging { id } else { 0 });
        for ((due, key), step) in dues.iter().zip(keys).zip(steps) {
            let charged = charging && admitted && step.allowed && due.cost > 0;
            ruling.push(match step.effect {
                Effect::SlidingLog(_) => {
                    let outcome = due.outcome(self.stored(&key), now, &step, charged);
                    LimitReply::Outcome { outcome, mark: step.effect.mark() }
                }
                _ => LimitReply::Step { step, charged },
            });
            if charged || charging && step.effect.moved() {
                let state = self.states.remove(&key).map(|(state, _)| state);
                let state = due.apply(state, now, &step, charged, id).expect("a quota above zero");
                let fresh = state.fresh_at(due.quota, due.shift);
                self.states.insert(key, (state, fresh));
            }
        }
        ruling
    }

    /// Grants units in advance.
    pub fn lease(&mut self, request: &LeaseRequest, now: Time) -> LeaseGrant {
        let due = request.toll.get(0);
        let key = due.key.to_bytes();
        let state = self.states.get(&key).map(|(state, _)| state.clone());
        let (want, raise) = (request.want, request.lease.raise);
        match algorithm::lease(due.quota, state.clone(), now, due.shift, want, raise) {
            Some((units, state)) => {
                self.states.insert(key, (state.clone(), state.fresh_at(due.quota, due.shift)));
                LeaseGrant { units, state: Some(state), time: now }
            }
            None => LeaseGrant { units: 0, state, time: now },
        }
    }

    /// Applies the corrections of a refund or a settlement.
    pub fn correct(&mut self, charge: &Charge, corrections: &[KeyCorrection], now: Time) -> Correction {
        if charge.void_at() <= now {
            return Correction::Unknown;
        }
        let marker = |item: &Item| (key_of(item), charge.id());
        if charge.items().iter().any(|item| self.markers.contains(&marker(item))) {
            return Correction::Repeated;
        }
        for (item, fix) in charge.items().iter().zip(corrections) {
            self.markers.insert(marker(item));
            let state = self.states.get(&key_of(item)).map(|(state, _)| state.clone());
            let state = match (fix.change, state) {
                (Change::Keep, _) | (Change::GiveBack(_), None) => continue,
                // A leaky bucket refunds nothing, so nothing is written.
                (Change::GiveBack(_), Some(_)) if fix.quota.algorithm() == Algorithm::LeakyBucket => continue,
                (Change::GiveBack(part), Some(state)) => {
                    algorithm::give_back(&fix.quota, state, now, item.shift, part, &fix.past)
                }
                (Change::Add(more), state) => algorithm::add(&fix.quota, state, now, item.shift, more),
            };
            let fresh = state.fresh_at(&fix.quota, item.shift);
            self.states.insert(key_of(item), (state, fresh));
        }
        Correction::Done
    }

    /// Releases a slot, or renews it.
    pub fn handle(&mut self, slot: &Slot, renew: bool, now: Time) -> bool {
        let mut held = false;
        for item in slot.items() {
            let Some((State::Concurrency(slots), fresh)) = self.states.get_mut(&key_of(item)) else {
                continue;
            };
            held |= match renew {
                true => concurrency::renew(slots, now.as_micros(), slot.id()),
                false => concurrency::release(slots, now.as_micros(), slot.id()),
            };
            *fresh = Time::from_micros(concurrency::fresh_at(slots));
        }
        held
    }

    /// Deletes the state of a key; false if there was none.
    pub fn forget(&mut self, key: &[u8]) -> bool {
        self.states.remove(key).is_some()
    }

    /// Deletes the states that equal a fresh one since before `now`, and returns how many those were.
    pub fn expire(&mut self, now: Time) -> u64 {
        let before = self.states.len();
        self.states.retain(|_, (_, fresh)| *fresh > now);
        (before - self.states.len()) as u64
    }

    /// Forgets which charges were corrected.
    pub fn forget_corrections(&mut self) {
        self.markers.clear();
    }

    /// Changes the state of a key, if there is one.
    pub fn change(&mut self, key: &[u8], change: impl FnOnce(&mut State)) {
        if let Some((state, _)) = self.states.get_mut(key) {
            change(state);
        }
    }

    /// Every non-empty state, with the bytes of its key and the time from which it equals a fresh one.
    pub fn states(&self) -> impl Iterator<Item = (&[u8], &State, Time)> {
        let all = self.states.iter().map(|(key, (state, fresh))| (&key[..], state, *fresh));
        all.filter(|(_, state, _)| match state {
            State::SlidingLog(log) => !log.is_empty(),
            State::Concurrency(slots) => !slots.is_empty(),
            _ => true,
        })
    }

    fn stored(&self, key: &[u8]) -> StoredState<'_> {
        self.states.get(key).map_or(StoredState::Nothing, |(state, _)| state.stored())
    }
}

fn key_of(item: &Item) -> Vec<u8> {
    match &item.key {
        ItemKey::Whole(bytes) => bytes.to_vec(),
        ItemKey::Short(..) => panic!("only sealed receipts have short keys"),
    }
}
