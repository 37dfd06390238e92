//! What travels: tolls as the arguments of a script, and its answer as rulings.
//!
//! ```text
//! batch   nonce 6, packed keys 2, quotas 2, the quotas, then each due
//! quota   kind 1 (1 to 6, in the order of Algorithm::ALL), tick 3 (µs), count 7, burst 7, period 7 (ticks)
//! due     key 2, quota 2 (both from 1), shape 1, cost 4, and with shape 8: shift 7, hold 7, taker 8
//! shape   1 more dues of this toll follow, 2 shadow, 4 peek, 8 as above, 16 other tolls ask for this key
//!         too, 32 the toll is refused, whatever is said here
//! hold    0 for none, else one more than the longest delay
//! ```
//!
//! Whole numbers, the highest byte first. Keys come once, packed states first, then logs and slots.
//! Quotas of nothing do not travel: what they say is known here, and the others are told.
//!
//! ```text
//! answer  nonce 6, time 7 (µs), refused tolls 2, form 1, the number of each refused toll 2 (from 1, counting those
//!         that travel), the packed states, and a record of each log and of each key of slots
//! form    1: every state has 12 bytes, zeros for none; 0: every state has its length 1 before it
//! log     allowed 1, used 7, stamp 7, passes 7 (0 for never), next 7, fresh 7
//! slots   allowed 1, held 7, first 7
//! ```
//!
//! Every script repeats the nonce of its call, so that a reply is never taken for that of another call: a string
//! begins with it, a list has it as its first element, and a number (below 4) has 4 times the nonce added. Replies to
//! plain commands have other types or ranges than these.
//!
//! The answer holds the packed states as they were read. Every toll of the batch is decided once more
//! on them, here, which gives the numbers that people are told; the script computes none but for logs,
//! whose stamps do not travel.

mod undo;

use std::collections::HashMap;
use std::fmt;

use tollkeeper_core::algorithm::{self, Ask, Effect, Past, Report, Seen, State, Step, concurrency};
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Algorithm, Change, Due, Fix, LimitReply, Quota, Reply, Time, Toll};

use crate::store::Correction;

use super::script::{self, Kinds, Script};
use super::state::{self, push, take};

/// What Redis answers with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing.
    Nothing,
    /// A whole number.
    Number(i64),
    /// A string.
    Bytes(Vec<u8>),
    /// Several.
    List(Vec<Value>),
}

/// A number that a call carries and its reply repeats: 48 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Nonce(u64);

impl Nonce {
    /// The lowest 48 bits of a number.
    pub fn new(number: u64) -> Nonce {
        Nonce(number & ((1 << 48) - 1))
    }
}

/// A call of a script: its keys and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What is run.
    pub script: &'static Script,
    /// The keys.
    pub keys: Vec<String>,
    /// The arguments. The first begins with the nonce.
    pub args: Vec<Vec<u8>>,
    nonce: Nonce,
}

impl Call {
    /// A call whose first argument begins with the nonce and goes on with `first`.
    pub(crate) fn new(script: &'static Script, nonce: Nonce, keys: Vec<String>, first: &[u8]) -> Call {
        let mut argument = Vec::with_capacity(6 + first.len());
        push(&mut argument, 6, nonce.0);
        argument.extend_from_slice(first);
        Call { script, keys, args: vec![argument], nonce }
    }

    /// A reply that is a string, without the nonce.
    fn bytes<'a>(&self, answer: &'a Value) -> Result<&'a [u8], Malformed> {
        let Value::Bytes(bytes) = answer else { return Err(Malformed) };
        let mut rest = &bytes[..];
        if number(&mut rest, 6)? == self.nonce.0 { Ok(rest) } else { Err(Malformed) }
    }

    /// A reply that is a number below 4, without the nonce.
    fn number(&self, answer: &Value) -> Result<u64, Malformed> {
        let Value::Number(number) = answer else { return Err(Malformed) };
        let number = u64::try_from(*number).map_err(|_| Malformed)?;
        if number >> 2 == self.nonce.0 { Ok(number & 3) } else { Err(Malformed) }
    }

    /// A reply that is a list, without the nonce.
    pub(crate) fn list<'a>(&self, answer: &'a Value) -> Result<&'a [Value], Malformed> {
        match answer {
            Value::List(list) => match &list[..] {
                [Value::Number(nonce), rest @ ..] if u64::try_from(*nonce) == Ok(self.nonce.0) => Ok(rest),
                _ => Err(Malformed),
            },
            _ => Err(Malformed),
        }
    }
}

/// A reply that does not belong to its call: it repeats another nonce, or no script of ours gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store sent a reply that does not belong to the call")
    }
}

impl std::error::Error for Malformed {}

/// A toll that is on its way to the store.
#[derive(Clone, Debug)]
pub struct EncodedToll {
    id: u64,
    charging: bool,
    dues: Vec<Asking>,
}

/// What is asked of one limit.
#[derive(Clone, Debug)]
struct Asking {
    /// Where the state is; nowhere if the quota is nothing.
    name: Option<String>,
    quota: Quota,
    enforced: bool,
    /// What is charged; an `ask` of 0 looks as 1 does.
    cost: u64,
    ask: Ask,
}

impl EncodedToll {
    /// What must be known of a toll when its answer comes. An admission will carry the number `id`.
    pub fn new(toll: &Toll, id: u64, name: impl Fn(&Due<'_>) -> String) -> EncodedToll {
        let asking = |due: Due<'_>| Asking {
            name: (due.quota.count() > 0).then(|| name(&due)),
            quota: *due.quota,
            enforced: due.enforced(),
            cost: due.cost,
            ask: due.ask(Time::default()),
        };
        let charging = toll.verb().charges();
        EncodedToll { id: if charging { id } else { 0 }, charging, dues: toll.dues().map(asking).collect() }
    }

    /// The number that its admission will carry.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The names of the states it asks for.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.dues.iter().filter_map(|due| due.name.as_deref())
    }

    /// An enforced limit grants nothing: whatever the others say, it does not pass.
    fn is_refused(&self) -> bool {
        self.dues.iter().any(|due| due.enforced && due.name.is_none())
    }
}

/// Tolls that are decided by one call, in this order.
#[derive(Debug)]
pub struct Batch {
    asked: Vec<EncodedToll>,
    /// Of each due that travels, toll by toll: its key.
    places: Vec<usize>,
    packed: usize,
    call: Call,
}

/// What came of a batch.
#[derive(Debug)]
pub struct Rulings {
    /// One for each toll, in order.
    pub rulings: Vec<Reply>,
    /// How many tolls Lua decided otherwise than Rust does, which is a mistake in one of them. The
    /// store's verdict counts: what it wrote is written.
    pub disagreements: usize,
}

/// The most keys that one batch should hold: Lua can hand over some thousand values at once.
pub const MOST_KEYS: usize = 1_000;

impl Batch {
    /// Puts these tolls together.
    pub fn new(asked: Vec<EncodedToll>, nonce: Nonce) -> Batch {
        let mut names: HashMap<&str, (usize, bool)> = HashMap::new();
        let (mut packed, mut wide) = (Vec::new(), Vec::new());
        let mut kinds = Kinds::default();
        for due in asked.iter().flat_map(|asked| &asked.dues) {
            let Some(name) = &due.name else { continue };
            kinds = kinds.with(due.quota.algorithm());
            let keys = if is_packed(&due.quota) { &mut packed } else { &mut wide };
            names.entry(name).and_modify(|(_, again)| *again = true).or_insert_with(|| {
                keys.push(name);
                (keys.len(), false)
            });
        }
        let mut quotas: Vec<Quota> = Vec::new();
        let (mut body, mut places) = (Vec::new(), Vec::new());
        for one in &asked {
            let mut rest = one.dues.iter().filter(|due| due.name.is_some()).peekable();
            while let Some(due) = rest.next() {
                let (place, again) = names[due.name.as_deref().expect("filtered")];
                let key = if is_packed(&due.quota) { place } else { packed.len() + place };
                places.push(key - 1);
                let quota = quotas.iter().position(|quota| *quota == due.quota).unwrap_or_else(|| {
                    quotas.push(due.quota);
                    quotas.len() - 1
                });
                let more = rest.peek().is_some();
                push_due(&mut body, one, due, Place { key, quota: quota + 1, more, again });
            }
        }
        let mut argument = Vec::with_capacity(10 + 25 * quotas.len() + body.len());
        push(&mut argument, 6, nonce.0);
        push(&mut argument, 2, packed.len() as u64);
        push(&mut argument, 2, quotas.len() as u64);
        quotas.iter().for_each(|quota| push_quota(&mut argument, quota));
        argument.extend_from_slice(&body);
        let keys: Vec<String> = packed.iter().chain(&wide).map(|name| name.to_string()).collect();
        let call = Call { script: script::check(kinds), keys, args: vec![argument], nonce };
        let packed = packed.len();
        Batch { asked, places, packed, call }
    }

    /// What is to be run; a batch without keys needs no store.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// What the answer of the store means.
    pub fn rulings(&self, answer: &Value) -> Result<Rulings, Malformed> {
        self.fold(Answer::read(self.call.bytes(answer)?, self.packed)?)
    }

    /// What quotas of nothing and tolls without limits say, of a batch without keys.
    pub fn rulings_without_store(&self, now: Time) -> Vec<Reply> {
        assert!(self.call.keys.is_empty(), "there are keys to be asked for");
        let answer = Answer { now, refused: Vec::new(), states: Vec::new(), records: &[] };
        self.fold(answer).expect("nothing to be read").rulings
    }

    /// Decides every toll again, on the states as they were read.
    fn fold(&self, mut answer: Answer<'_>) -> Result<Rulings, Malformed> {
        let mut states: Vec<Option<State>> = vec![None; self.packed];
        let mut unread = answer.states.clone();
        let mut places = self.places.iter();
        let mut rulings = Rulings { rulings: Vec::with_capacity(self.asked.len()), disagreements: 0 };
        let mut sent = 0;
        for asked in &self.asked {
            let mut steps: Vec<Decided> = Vec::with_capacity(asked.dues.len());
            for due in &asked.dues {
                let ask = Ask { now: answer.now, ..due.ask };
                let mut decided = match &due.name {
                    None => Decided::new(algorithm::step(&due.quota, Seen::Nothing, &ask)),
                    Some(_) => {
                        let place = *places.next().expect("every due that travels has a place");
                        let mut decided = if place < self.packed {
                            if let Some(bytes) = unread[place].take() {
                                states[place] = state::decode(&due.quota, bytes);
                            }
                            let seen = states[place].as_ref().map_or(Seen::Nothing, State::seen);
                            Decided::new(algorithm::step(&due.quota, seen, &ask))
                        } else {
                            answer.record(&due.quota)?
                        };
                        decided.place = Some(place);
                        decided
                    }
                };
                decided.ask = ask;
                decided.step.allowed |= due.cost == 0 && due.quota.count() > 0;
                steps.push(decided);
            }
            if steps.iter().any(|decided| decided.place.is_some()) {
                sent += 1;
                let said = !answer.refused.contains(&sent);
                rulings.disagreements += usize::from(overrule(&asked.dues, &mut steps, said));
            }
            let admitted = asked.dues.iter().zip(&steps).all(|(due, one)| one.step.allowed || !due.enforced);
            let mut ruling = Reply::new(answer.now, asked.id);
            for (due, decided) in asked.dues.iter().zip(steps) {
                let Decided { place, ask, step, log } = decided;
                let charged = asked.charging && admitted && step.allowed && due.cost > 0;
                if let Some(place) = place.filter(|place| *place < self.packed)
                    && (charged || asked.charging && step.effect.moved())
                {
                    let state = states[place].take();
                    states[place] = algorithm::apply(&due.quota, state, &ask, &step, charged, asked.id);
                }
                ruling.push(match log {
                    Some(log) => log.said(&due.quota, &ask, step.allowed, charged),
                    None => LimitReply::Step { step, charged },
                });
            }
            rulings.rulings.push(ruling);
        }
        Ok(rulings)
    }
}

/// One due of a toll, decided again.
struct Decided {
    place: Option<usize>,
    ask: Ask,
    step: Step,
    log: Option<LogRecord>,
}

impl Decided {
    fn new(step: Step) -> Decided {
        let ask = Ask { now: Time::default(), cost: 1, shift: 0, hold: None };
        Decided { place: None, ask, step, log: None }
    }
}

/// Makes the steps say what the store said; true if they did not.
fn overrule(dues: &[Asking], steps: &mut [Decided], admitted: bool) -> bool {
    let mut enforced: Vec<&mut Decided> =
        dues.iter().zip(steps).filter(|(due, _)| due.enforced).map(|(_, decided)| decided).collect();
    if enforced.iter().all(|decided| decided.step.allowed) == admitted {
        return false;
    }
    match admitted {
        true => enforced.iter_mut().for_each(|decided| decided.step.allowed = true),
        false => enforced.iter_mut().take(1).for_each(|decided| decided.step.allowed = false),
    }
    true
}

/// The answer of `check.lua`.
struct Answer<'a> {
    now: Time,
    refused: Vec<u64>,
    states: Vec<Option<&'a [u8]>>,
    records: &'a [u8],
}

impl<'a> Answer<'a> {
    /// Reads an answer that holds so many packed states.
    fn read(bytes: &'a [u8], packed: usize) -> Result<Answer<'a>, Malformed> {
        let mut rest = bytes;
        let now = Time::from_micros(number(&mut rest, 7)?);
        let (count, even) = (number(&mut rest, 2)?, number(&mut rest, 1)? == 1);
        let refused = (0..count).map(|_| number(&mut rest, 2)).collect::<Result<_, _>>()?;
        let mut states = Vec::with_capacity(packed);
        for _ in 0..packed {
            let len = if even { 12 } else { number(&mut rest, 1)? };
            let state = part(&mut rest, usize::try_from(len).expect("a byte"))?;
            states.push(state.iter().any(|byte| *byte != 0).then_some(state));
        }
        Ok(Answer { now, refused, states, records: rest })
    }

    /// What the next log or the next slots said.
    fn record(&mut self, quota: &Quota) -> Result<Decided, Malformed> {
        let is_log = quota.algorithm() == Algorithm::SlidingLog;
        let len = if is_log { 36 } else { 15 };
        let mut record = part(&mut self.records, len)?;
        let allowed = take(&mut record, 1) == 1;
        let mut number = || take(&mut record, 7);
        if is_log {
            let [used, stamp, passes, next, fresh] = std::array::from_fn(|_| number());
            let log = Some(LogRecord { used, stamp, passes, next, fresh });
            return Ok(Decided { log, ..Decided::new(Step { allowed, effect: Effect::None }) });
        }
        let (held, first) = (number(), number());
        let first = if held == 0 { u64::MAX } else { first };
        let step = concurrency::Step { allowed, moved: false, held, first };
        Ok(Decided::new(Step { allowed, effect: Effect::Concurrency(step) }))
    }
}

/// Takes so many bytes of an answer, if there are as many.
fn part<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], Malformed> {
    let (part, after) = rest.split_at_checked(len).ok_or(Malformed)?;
    *rest = after;
    Ok(part)
}

fn number(rest: &mut &[u8], width: usize) -> Result<u64, Malformed> {
    part(rest, width).map(|mut part| take(&mut part, width))
}

/// What a log said: its stamps stay where they are.
#[derive(Clone, Copy)]
struct LogRecord {
    used: u64,
    stamp: u64,
    passes: u64,
    next: u64,
    fresh: u64,
}

impl LogRecord {
    fn said(self, quota: &Quota, ask: &Ask, allowed: bool, charged: bool) -> LimitReply {
        let used = self.used + if charged { ask.cost } else { 0 };
        let report = Report {
            remaining: quota.count().saturating_sub(used),
            passes: (ask.cost <= quota.count()).then_some(self.passes),
            next: self.next,
            fresh: Some(self.fresh),
            departs: ask.now.as_micros(),
        };
        LimitReply::Outcome { outcome: algorithm::tell(quota, ask, allowed, &report), mark: self.stamp }
    }
}

/// Where a due stands in a batch.
struct Place {
    key: usize,
    quota: usize,
    more: bool,
    again: bool,
}

fn push_due(body: &mut Vec<u8>, asked: &EncodedToll, due: &Asking, place: Place) {
    let Place { key, quota, more, again } = place;
    let algorithm = due.quota.algorithm();
    let hold = due.ask.hold.filter(|_| algorithm == Algorithm::LeakyBucket);
    let wordy = algorithm == Algorithm::Concurrency || hold.is_some() || due.ask.shift > 0;
    let flags = [more, !due.enforced, !asked.charging, wordy, again, asked.is_refused()];
    let shape = flags.into_iter().rev().fold(0, |shape, flag| shape << 1 | u64::from(flag));
    push(body, 2, key as u64);
    push(body, 2, quota as u64);
    push(body, 1, shape);
    push(body, 4, due.cost);
    if wordy {
        push(body, 7, due.ask.shift);
        push(body, 7, hold.map_or(0, |hold| hold.as_micros().min(FOR_EVER) + 1));
        push(body, 8, asked.id);
    }
}

/// Longer than any delay: 2^53 µs is the end of time.
const FOR_EVER: u64 = 1 << 53;

/// Writes a quota as `quota_read` of `state.lua` reads it.
pub fn push_quota(bytes: &mut Vec<u8>, quota: &Quota) {
    push(bytes, 1, quota.algorithm() as u64 + 1);
    push(bytes, 3, quota.tick().span().as_micros());
    push(bytes, 7, quota.count());
    push(bytes, 7, quota.burst());
    push(bytes, 7, quota.period_ticks());
}

/// Whether a state is a few numbers, which all fit into one string: not a log, not slots.
fn is_packed(quota: &Quota) -> bool {
    !matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::Concurrency)
}

/// The call that corrects items of a charge, which share a slot; `names` are those of an item's state and
/// of its marker.
pub fn correction<'a>(
    nonce: Nonce,
    void_at: Time,
    items: impl IntoIterator<Item = (&'a Item, &'a Fix)>,
    names: impl Fn(&Item) -> [String; 2],
) -> Call {
    let (mut keys, mut argument) = (Vec::new(), correction_until(void_at));
    for (item, fix) in items {
        keys.extend(names(item));
        let Past { cost, count, tick, .. } = fix.past;
        let correcting = Correcting { shift: item.shift, cost, count, tick };
        push_correction(&mut argument, &fix.quota, &correcting, fix.change);
    }
    Call::new(script::correct(), nonce, keys, &argument)
}

/// What must be known of a charge to correct it.
struct Correcting {
    shift: u64,
    cost: u64,
    count: u64,
    tick: u64,
}

/// The argument of a correction, which is void from then on.
fn correction_until(void_at: Time) -> Vec<u8> {
    let mut argument = Vec::new();
    push(&mut argument, 7, void_at.as_micros().min(FOR_EVER));
    argument
}

fn push_correction(argument: &mut Vec<u8>, quota: &Quota, correcting: &Correcting, change: Change) {
    let (kind, amount) = match change {
        Change::Keep => (0, 0),
        Change::GiveBack(part) => (1, part),
        Change::Add(more) => (2, more),
    };
    push_quota(argument, quota);
    for number in [correcting.shift, correcting.cost, correcting.count, correcting.tick] {
        push(argument, 7, number);
    }
    push(argument, 1, kind);
    push(argument, 7, amount);
}

/// What came of a correction.
pub fn corrected(call: &Call, answer: &Value) -> Result<Correction, Malformed> {
    match call.number(answer)? {
        0 => Ok(Correction::Unknown),
        1 => Ok(Correction::Repeated),
        2 => Ok(Correction::Done),
        _ => Err(Malformed),
    }
}

/// What came of undoing: nothing that anybody is told.
pub(crate) fn undone(call: &Call, answer: &Value) -> Result<(), Malformed> {
    call.number(answer).map(drop)
}

/// What is done to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// It is given back.
    Release,
    /// Its life counts from now.
    Renew,
}

/// The call that releases or renews the slot with this number, of which these are states.
pub fn handling(nonce: Nonce, slot: u64, handling: Handling, keys: Vec<String>) -> Call {
    let mut call = Call::new(script::slots(), nonce, keys, &[u8::from(handling == Handling::Renew)]);
    call.args.push(slot.to_be_bytes().to_vec());
    call
}

/// Whether the slot was held.
pub fn handled(call: &Call, answer: &Value) -> Result<bool, Malformed> {
    match call.number(answer)? {
        held @ (0 | 1) => Ok(held == 1),
        _ => Err(Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replies of all three forms, to the call itself, to another one, and to a plain command such as `UNLINK`.
    #[test]
    fn reply_to_another_call_is_malformed() {
        let call = |nonce| handling(Nonce::new(nonce), 1, Handling::Release, Vec::new());
        let (ours, theirs) = (call(7), call(8));
        let number = |nonce: i64, said: i64| Value::Number(4 * nonce + said);
        assert_eq!(
            (handled(&ours, &number(7, 1)), corrected(&ours, &number(7, 2))),
            (Ok(true), Ok(Correction::Done))
        );
        let list = Value::List(vec![Value::Number(7), Value::Number(1)]);
        assert_eq!(ours.list(&list), Ok(&[Value::Number(1)][..]));
        let bytes = Value::Bytes(b"\0\0\0\0\0\x07state".to_vec());
        assert_eq!(ours.bytes(&bytes), Ok(&b"state"[..]));

        for reply in [number(7, 0), number(7, 1), number(0, 1), Value::Nothing, list.clone(), bytes.clone()] {
            assert_eq!(handled(&theirs, &reply), Err(Malformed), "{reply:?}");
            assert_eq!(corrected(&theirs, &reply), Err(Malformed), "{reply:?}");
            assert_eq!(undone(&theirs, &reply), Err(Malformed), "{reply:?}");
        }
        for reply in [list, number(7, 1), bytes, Value::List(Vec::new())] {
            assert_eq!(
                (theirs.list(&reply), theirs.bytes(&reply)),
                (Err(Malformed), Err(Malformed)),
                "{reply:?}"
            );
        }
    }
}
