//! Histories of one key for the twins: compares each step of the Rust algorithms with Lua on a real server.
//!
//! A history runs on a [`OneKey`] first, which records every step with its time. One script call then folds thousands
//! of steps, and each must give the same result: the verdict, the reported numbers, and the bytes of the state.

use tollkeeper::store::redis::script::{Driver, Kinds, Script};
use tollkeeper::store::redis::state;
use tollkeeper::store::redis::wire::{self, Value};
use tollkeeper_core::algorithm::{
    self, Effect, KeyRequest, Past, Report, State, Step, StoredState, concurrency,
};
use tollkeeper_core::{Algorithm, CheckedQuota, Outcome, Span, Time};

use crate::cases::{Act, Case};
use crate::one_key::OneKey;
use crate::redis::Client;

/// The script that runs histories in Lua.
pub const FOLD: &str = include_str!("fold.lua");

/// The result of one step in Rust, which Lua must reproduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Row {
    /// A check or a peek: the outcome, and whether the state was moved.
    Asked(Outcome, bool),
    /// A release or a renewal: whether the slot was held.
    Held(bool),
    /// A lease: how many units were granted.
    Granted(u64),
    /// Any other step.
    Done,
}

/// A step, as it was made in Rust.
#[derive(Clone, Debug)]
pub struct Made {
    op: u8,
    now: u64,
    quota: CheckedQuota,
    amount: u64,
    shift: u64,
    hold: Option<Span>,
    past: Option<Past>,
    who: u64,
    /// The result in Rust.
    pub row: Row,
    /// The bytes of the state after the step; only the length for logs and slots.
    after: After,
    /// Time from which that state equals a fresh one.
    fresh: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum After {
    Bytes(Vec<u8>),
    Length(usize),
}

/// A recorded history.
#[derive(Clone, Debug)]
pub struct History {
    key: OneKey,
    begin: Vec<u8>,
    /// Its steps.
    pub steps: Vec<Made>,
}

impl History {
    /// A fresh key; a concurrency limit starts with `held` slots taken.
    pub fn new(quota: CheckedQuota, now: u64, held: u64) -> History {
        let mut key = OneKey::new(quota, now);
        if held > 0 {
            key.occupy(held);
        }
        let begin = key.state().map(state::encode).unwrap_or_default();
        History { key, begin, steps: Vec::new() }
    }

    /// Runs all moves of a case.
    pub fn of(case: &Case) -> History {
        let mut history = History::new(case.quotas[0], case.start, case.held);
        (history.key.shift, history.key.hold) = (case.shift, case.hold);
        let (mut retry, mut receipts) = (None, Vec::new());
        for (number, one) in case.moves.iter().enumerate() {
            history.lease_now_and_then(number);
            history.key.now += one.wait.micros(&history.key, retry);
            let past = |receipts: &Vec<Past>, before_last: usize| {
                receipts.len().checked_sub(before_last + 1).map(|index| receipts[index])
            };
            match one.act {
                Act::Check(cost) => {
                    let cost = cost.number(&history.key);
                    let (outcome, receipt) = history.check(cost);
                    receipts.extend(receipt);
                    retry = outcome.retry.or(retry);
                }
                Act::Collect => {
                    history.peek(1);
                    history.collect();
                }
                Act::Refund(before_last, eighths) => {
                    if let Some(past) = past(&receipts, before_last) {
                        history.give_back((past.cost * eighths / 8).max(1), &past);
                    }
                }
                Act::Settle(_, cost) => {
                    let more = cost.number(&history.key).min(1 << 31);
                    history.add(more);
                }
                Act::Release(before_last) => history.release(before_last),
                Act::Renew(before_last) => history.renew(before_last),
                Act::Change(index) => history.key.quota = case.quotas[index],
                Act::Back(step) => {
                    history.key.now = history.key.now.saturating_sub(step.micros(&history.key));
                    history.refund_occasionally(&receipts);
                }
                Act::Forward(step) => {
                    let latest = crate::cases::LATEST.max(history.key.now);
                    history.key.now = (history.key.now + step.micros(&history.key)).min(latest);
                    history.refund_occasionally(&receipts);
                }
            }
        }
        history
    }

    /// The key, for changes of its clock or quota.
    pub fn key(&mut self) -> &mut OneKey {
        &mut self.key
    }

    /// Checks.
    pub fn check(&mut self, cost: u64) -> (Outcome, Option<Past>) {
        let answer = self.key.check(cost);
        let who = self.key.slots_taken();
        self.made(1, cost, None, who, Row::Asked(answer.outcome, answer.moved));
        (answer.outcome, answer.past)
    }

    /// Peeks.
    pub fn peek(&mut self, cost: u64) -> Outcome {
        let outcome = self.key.peek(cost);
        let request = self.request(cost);
        let stored = self.key.state().map_or(StoredState::Nothing, State::stored);
        let moved = algorithm::step(&self.key.quota, stored, &request).effect.moved();
        self.made(2, cost, None, 0, Row::Asked(outcome, moved));
        outcome
    }

    /// Refunds.
    pub fn give_back(&mut self, part: u64, past: &Past) {
        if self.key.quota.algorithm() != Algorithm::Concurrency {
            self.key.give_back(part, past);
            self.made(3, part, Some(*past), 0, Row::Done);
        }
    }

    /// Refunds some charges from before a clock step, after every other step.
    fn refund_occasionally(&mut self, receipts: &[Past]) {
        if let Some(past) = receipts.last().filter(|_| receipts.len().is_multiple_of(2)) {
            self.give_back(past.cost.div_ceil(2), past);
        }
    }

    /// Charges more.
    pub fn add(&mut self, more: u64) {
        if self.key.quota.algorithm() != Algorithm::Concurrency {
            self.key.add(more);
            self.made(4, more, None, 0, Row::Done);
        }
    }

    /// Grants units in advance.
    pub fn lease(&mut self, want: u64, raise: u64) -> u64 {
        let units = self.key.lease(want, raise);
        let past = Past { cost: raise, count: 0, tick: 0, window: 0 };
        self.made(9, want, Some(past), 0, Row::Granted(units));
        units
    }

    /// Grants units now and then, of every size and with every raise.
    fn lease_now_and_then(&mut self, number: usize) {
        let quota = self.key.quota;
        let is_leased = matches!(
            quota.algorithm(),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingWindow
        );
        if is_leased && number.is_multiple_of(7) {
            let number = number as u64;
            let want = 1 + (quota.limit() / 50 + 1) * number % (quota.limit() + 3);
            let raise = match quota.algorithm().has_burst() {
                true => quota.capacity() / 16 * (number % 20),
                false => 0,
            };
            self.lease(want, raise);
        }
    }

    fn release(&mut self, before_last: u64) {
        let who = self.key.slots_taken().saturating_sub(before_last);
        self.release_slot(who);
    }

    /// Releases the n-th slot.
    pub fn release_slot(&mut self, who: u64) -> bool {
        let held = self.key.release(who);
        self.made(5, 0, None, who, Row::Held(held));
        held
    }

    fn renew(&mut self, before_last: u64) {
        let who = self.key.slots_taken().saturating_sub(before_last);
        self.renew_slot(who);
    }

    /// Renews the n-th slot.
    pub fn renew_slot(&mut self, who: u64) -> bool {
        let held = self.key.renew(who);
        self.made(6, 0, None, who, Row::Held(held));
        held
    }

    fn collect(&mut self) {
        self.key.collect();
        if self.key.state().is_none() {
            self.made(7, 0, None, 0, Row::Done);
        }
    }

    fn request(&self, cost: u64) -> KeyRequest {
        KeyRequest { now: Time::from_micros(self.key.now), cost, shift: self.key.shift, hold: self.key.hold }
    }

    fn made(&mut self, op: u8, amount: u64, past: Option<Past>, who: u64, row: Row) {
        let OneKey { quota, shift, hold, now, .. } = self.key;
        let after = match self.key.state() {
            None if is_packed(&quota) => After::Bytes(Vec::new()),
            None => After::Length(0),
            Some(State::SlidingLog(log)) => After::Length(log.len()),
            Some(State::Concurrency(slots)) => After::Length(22 * slots.len()),
            Some(state) => After::Bytes(state::encode(state)),
        };
        let fresh = self.key.state().map_or(0, |state| state.fresh_at(&quota, shift).as_micros());
        self.steps.push(Made { op, now, quota, amount, shift, hold, past, who, row, after, fresh });
    }
}

fn is_packed(quota: &CheckedQuota) -> bool {
    !matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::Concurrency)
}

/// The folding script, with the twins as they are or mutated.
pub fn script(mutate: impl FnOnce(String) -> String) -> Script {
    Script::of(mutate(Script::new(Driver::new(FOLD), Kinds::ALL).text().to_owned()))
}

/// Folds histories in Lua and returns the first difference from Rust, if any.
pub fn differs(client: &mut Client, script: &Script, histories: &[History]) -> Option<String> {
    let answer = client.run(script, &[], &[&written(histories)]);
    let Ok(Value::List(parts)) = answer else { return Some(format!("{answer:?}")) };
    let [Value::Bytes(rows), Value::List(finals)] = &parts[..] else { panic!("rows and states: {parts:?}") };
    let mut rows = Rows(rows);
    // The first entry is the state before the first history.
    for (history, last) in histories.iter().zip(&finals[1..]) {
        let mut before = history.begin.clone();
        for (index, made) in history.steps.iter().enumerate() {
            if let Some(why) = rows.differs(made, &mut before) {
                let steps: Vec<String> =
                    history.steps[..=index].iter().map(|made| format!("{made:?}")).collect();
                return Some(format!("{why}\n{}", steps.join("\n")));
            }
        }
        let left = history.key.state().map(state::encode).unwrap_or_default();
        if *last != Value::Bytes(left) {
            return Some(format!("the last state differs: {:?}", history.steps.last()));
        }
    }
    (!rows.0.is_empty()).then(|| format!("{} bytes are left", rows.0.len()))
}

fn written(histories: &[History]) -> Vec<u8> {
    let mut quotas: Vec<CheckedQuota> = Vec::new();
    let mut body = Vec::new();
    for history in histories {
        let begin = Made {
            op: 8,
            now: 0,
            quota: history.key.quota,
            amount: history.begin.len() as u64,
            shift: 0,
            hold: None,
            past: None,
            who: 0,
            row: Row::Done,
            after: After::Length(0),
            fresh: 0,
        };
        for made in std::iter::once(&begin).chain(&history.steps) {
            let quota = quotas.iter().position(|quota| *quota == made.quota).unwrap_or_else(|| {
                quotas.push(made.quota);
                quotas.len() - 1
            });
            let past = made.past.unwrap_or(Past { cost: 0, count: 0, tick: 0, window: 0 });
            let hold = made.hold.map_or(0, |hold| hold.as_micros() + 1);
            body.push(made.op);
            push(&mut body, 7, made.now);
            push(&mut body, 2, quota as u64 + 1);
            for number in [made.amount, made.shift, hold, past.cost, past.count, past.tick] {
                push(&mut body, 7, number);
            }
            push(&mut body, 8, made.who);
            if made.op == 8 {
                body.extend_from_slice(&history.begin);
            }
        }
    }
    let mut argument = Vec::new();
    push(&mut argument, 2, quotas.len() as u64);
    quotas.iter().for_each(|quota| wire::push_quota(&mut argument, quota));
    argument.extend_from_slice(&body);
    argument
}

fn push(bytes: &mut Vec<u8>, width: usize, number: u64) {
    bytes.extend_from_slice(&number.to_be_bytes()[8 - width..]);
}

/// The rows that Lua returned.
struct Rows<'a>(&'a [u8]);

impl Rows<'_> {
    fn number(&mut self, width: usize) -> u64 {
        let (number, rest) = self.0.split_at(width);
        self.0 = rest;
        number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Reads Lua's row of a step that found the state `before`, and returns what differs.
    fn differs(&mut self, made: &Made, before: &mut Vec<u8>) -> Option<String> {
        let row = match made.op {
            1 | 2 => self.asked(made, before),
            5 | 6 => Row::Held(self.number(1) == 1),
            9 => Row::Granted(self.number(7)),
            _ => Row::Done,
        };
        let after = if is_packed(&made.quota) {
            let len = usize::try_from(self.number(1)).expect("a length");
            let (bytes, rest) = self.0.split_at(len);
            self.0 = rest;
            *before = bytes.to_vec();
            After::Bytes(bytes.to_vec())
        } else {
            After::Length(usize::try_from(self.number(4)).expect("a length"))
        };
        let has_fresh =
            (made.op <= 6 || made.op == 9) && matches!(&after, After::Bytes(bytes) if !bytes.is_empty());
        let fresh = if has_fresh { self.number(7) } else { made.fresh };
        if row != made.row {
            return Some(format!("Lua returns {row:?}"));
        }
        if after != made.after {
            return Some(format!("Lua stores {after:?}"));
        }
        (fresh != made.fresh).then(|| format!("in Lua it is fresh at {fresh}"))
    }

    /// The outcome derived from Lua's row, for the state that Lua had before.
    fn asked(&mut self, made: &Made, before: &[u8]) -> Row {
        let Made { quota, now, shift, hold, amount, .. } = *made;
        let request = KeyRequest { now: Time::from_micros(now), cost: amount, shift, hold };
        let (allowed, moved) = (self.number(1) == 1, self.number(1) == 1);
        let charged = allowed && made.op == 1;
        let outcome = match quota.algorithm() {
            Algorithm::SlidingLog => {
                let [used, _stamp, passes, next, fresh] = std::array::from_fn(|_| self.number(7));
                let used = used + if charged { amount } else { 0 };
                let report = Report {
                    remaining: quota.count().saturating_sub(used),
                    passes: (amount <= quota.count()).then_some(passes),
                    next,
                    fresh: Some(fresh),
                    departs: now,
                };
                algorithm::tell(&quota, &request, allowed, &report)
            }
            Algorithm::Concurrency => {
                let (held, first) = (self.number(7), self.number(7));
                let first = if held == 0 { u64::MAX } else { first };
                let step = concurrency::Step { allowed, moved, held, first };
                let step = Step { allowed, effect: Effect::Concurrency(step) };
                algorithm::outcome(&quota, StoredState::Nothing, &request, &step, charged)
            }
            _ => {
                let state = state::decode(&quota, before);
                let stored = state.as_ref().map_or(StoredState::Nothing, State::stored);
                let step = Step { allowed, ..algorithm::step(&quota, stored, &request) };
                algorithm::outcome(&quota, stored, &request, &step, charged)
            }
        };
        Row::Asked(outcome, moved)
    }
}
