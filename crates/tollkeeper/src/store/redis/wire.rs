//! Encodes tolls as script arguments, and decodes the script's reply into decisions.
//!
//! ```text
//! batch   nonce 6, packed keys 2, quotas 2, the quotas, then each due
//! quota   kind 1 (1 to 6, in the order of Algorithm::ALL), tick 3 (µs), count 7, burst 7, period 7 (ticks)
//! due     key 2, quota 2 (both from 1), shape 1, cost 4, and with shape 8: shift 7, hold 7, taker 8
//! shape   1 more dues of this toll follow, 2 shadow, 4 peek, 8 as above, 16 other tolls of the batch use this key
//!         too, 32 the toll is refused whatever its limits in Redis decide, 64 a lease: see [`lease`]
//! hold    0 for none, else one more than the longest delay (µs)
//! ```
//!
//! All are big-endian unsigned integers, with their width in bytes. Each key is sent once: packed states first, then
//! logs and slots. Limits that grant nothing (a count of 0) are not sent: they are decided here, and shape 32 tells
//! the script.
//!
//! ```text
//! reply   nonce 6, time 7 (µs), refused tolls 2, form 1, the number of each refused toll 2 (from 1, counting the
//!         tolls that were sent), the packed states, and a record of each log and of each key of slots
//! form    1: every state has 12 bytes, zeros for a missing one; 0: every state has its length 1 before it
//! log     allowed 1, used 7, stamp 7, passes 7 (0 for never), next 7, fresh 7
//! slots   allowed 1, held 7, first 7
//! ```
//!
//! Every script repeats the nonce of its call, so that a reply is never mistaken for that of another call: a string
//! begins with it, a list has it as its first element, and a number (below 4) has 4 times the nonce added. Replies to
//! plain commands have other types or ranges than these.
//!
//! The reply contains the packed states as they were read. Every toll of the batch is decided once more on them,
//! here, to compute the numbers that callers see. The script computes such numbers only for logs, because their
//! stamps are not sent.

mod lease;
mod undo;

use std::collections::HashMap;
use std::fmt;

use tollkeeper_core::algorithm::{self, Ask, Effect, Past, Report, Seen, State, Step, concurrency};
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Algorithm, Change, Due, Fix, LimitReply, Quota, Reply, Time, Toll};

use crate::store::Correction;

use super::script::{self, Kinds, Script};
use super::state::{self, push, take};
use lease::LeaseTerms;
pub use lease::granted;

/// A reply of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nil, or a type that no script of ours returns.
    Nothing,
    /// An integer.
    Number(i64),
    /// A string.
    Bytes(Vec<u8>),
    /// An array.
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

/// A script call: the script, its keys and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The script to run.
    pub script: &'static Script,
    /// The keys.
    pub keys: Vec<String>,
    /// The arguments. The first begins with the nonce.
    pub args: Vec<Vec<u8>>,
    nonce: Nonce,
}

impl Call {
    /// A call whose first argument consists of the nonce and `first`.
    pub(crate) fn new(script: &'static Script, nonce: Nonce, keys: Vec<String>, first: &[u8]) -> Call {
        let mut argument = Vec::with_capacity(6 + first.len());
        push(&mut argument, 6, nonce.0);
        argument.extend_from_slice(first);
        Call { script, keys, args: vec![argument], nonce }
    }

    /// A reply that is a string, without the nonce.
    fn bytes<'a>(&self, reply: &'a Value) -> Result<&'a [u8], Malformed> {
        let Value::Bytes(bytes) = reply else { return Err(Malformed) };
        let mut rest = &bytes[..];
        if number(&mut rest, 6)? == self.nonce.0 { Ok(rest) } else { Err(Malformed) }
    }

    /// A reply that is a number below 4, without the nonce.
    fn number(&self, reply: &Value) -> Result<u64, Malformed> {
        let Value::Number(number) = reply else { return Err(Malformed) };
        let number = u64::try_from(*number).map_err(|_| Malformed)?;
        if number >> 2 == self.nonce.0 { Ok(number & 3) } else { Err(Malformed) }
    }

    /// A reply that is a list, without the nonce.
    pub(crate) fn list<'a>(&self, reply: &'a Value) -> Result<&'a [Value], Malformed> {
        match reply {
            Value::List(list) => match &list[..] {
                [Value::Number(nonce), rest @ ..] if u64::try_from(*nonce) == Ok(self.nonce.0) => Ok(rest),
                _ => Err(Malformed),
            },
            _ => Err(Malformed),
        }
    }
}

/// A reply that does not belong to its call: it has another nonce, or a form that no script of ours returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store sent a reply that does not belong to the call")
    }
}

impl std::error::Error for Malformed {}

/// What is kept of a toll while it is in flight.
#[derive(Clone, Debug)]
pub struct EncodedToll {
    id: u64,
    charging: bool,
    dues: Vec<EncodedDue>,
    /// Set if this asks for units in advance instead of a decision.
    lease: Option<LeaseTerms>,
}

/// What one limit is asked to decide.
#[derive(Clone, Debug)]
struct EncodedDue {
    /// The name of the state's key; `None` if the limit grants nothing and has no state.
    name: Option<String>,
    quota: Quota,
    enforced: bool,
    /// The units to charge. A cost of 0 is decided like a cost of 1 but never refused, so `ask.cost` differs then.
    cost: u64,
    ask: Ask,
}

impl EncodedToll {
    /// Copies what the call and its reply need from a toll. An admission will carry `id`; `name` gives key names.
    pub fn new(toll: &Toll, id: u64, name: impl Fn(&Due<'_>) -> String) -> EncodedToll {
        let encode = |due: Due<'_>| EncodedDue {
            name: (due.quota.count() > 0).then(|| name(&due)),
            quota: *due.quota,
            enforced: due.enforced(),
            cost: due.cost,
            ask: due.ask(Time::default()),
        };
        let charging = toll.verb().charges();
        let (id, dues) = (if charging { id } else { 0 }, toll.dues().map(encode).collect());
        EncodedToll { id, charging, dues, lease: None }
    }

    /// The ID that its admission will carry; 0 for a toll that does not charge.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The names of the states it needs.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.dues.iter().filter_map(|due| due.name.as_deref())
    }

    /// Whether an enforced limit grants nothing, so that the toll is refused whatever its other limits decide.
    fn is_refused(&self) -> bool {
        self.dues.iter().any(|due| due.enforced && due.name.is_none())
    }
}

/// Tolls that one call decides, in this order.
#[derive(Debug)]
pub struct Batch {
    tolls: Vec<EncodedToll>,
    /// The index of the key of each due that is sent, toll by toll.
    key_indexes: Vec<usize>,
    /// The number of keys with packed states, which come first.
    packed: usize,
    call: Call,
}

/// The decoded reply to a batch.
#[derive(Debug)]
pub struct BatchReply {
    /// One for each toll, in order.
    pub replies: Vec<Reply>,
    /// The number of tolls that Lua decided otherwise than Rust, which is a bug in one of them. The verdict of the
    /// script counts, because it has already written the states.
    pub disagreements: usize,
}

/// The most keys that one batch should have: Lua can pass some thousand values to one command.
pub const MOST_KEYS: usize = 1_000;

impl Batch {
    /// Encodes these tolls as one call.
    pub fn new(tolls: Vec<EncodedToll>, nonce: Nonce) -> Batch {
        let mut names: HashMap<&str, (usize, bool)> = HashMap::new();
        let (mut packed, mut wide) = (Vec::new(), Vec::new());
        let mut kinds = Kinds::default();
        if tolls.iter().any(|toll| toll.lease.is_some()) {
            kinds = kinds.with_leases();
        }
        for due in tolls.iter().flat_map(|toll| &toll.dues) {
            let Some(name) = &due.name else { continue };
            kinds = kinds.with(due.quota.algorithm());
            let keys = if is_packed(&due.quota) { &mut packed } else { &mut wide };
            names.entry(name).and_modify(|(_, shared)| *shared = true).or_insert_with(|| {
                keys.push(name);
                (keys.len(), false)
            });
        }
        let mut quotas: Vec<Quota> = Vec::new();
        let (mut body, mut key_indexes) = (Vec::new(), Vec::new());
        for toll in &tolls {
            let mut rest = toll.dues.iter().filter(|due| due.name.is_some()).peekable();
            while let Some(due) = rest.next() {
                let (position, shared) = names[due.name.as_deref().expect("filtered")];
                let key = if is_packed(&due.quota) { position } else { packed.len() + position };
                key_indexes.push(key - 1);
                let quota = quotas.iter().position(|quota| *quota == due.quota).unwrap_or_else(|| {
                    quotas.push(due.quota);
                    quotas.len() - 1
                });
                let more = rest.peek().is_some();
                push_due(&mut body, toll, due, DueContext { key, quota: quota + 1, more, shared });
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
        Batch { tolls, key_indexes, packed, call }
    }

    /// The call to make. A batch without keys needs none: see [`Batch::replies_without_store`].
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// Decodes the reply of the store.
    pub fn read_reply(&self, reply: &Value) -> Result<BatchReply, Malformed> {
        self.replay(CheckReply::read(self.call.bytes(reply)?, self.packed)?)
    }

    /// Decides a batch without keys: its tolls have no limits, or only limits that grant nothing.
    pub fn replies_without_store(&self, now: Time) -> Vec<Reply> {
        assert!(self.call.keys.is_empty(), "a batch with keys needs the store");
        let reply = CheckReply { now, refused: Vec::new(), states: Vec::new(), records: &[] };
        self.replay(reply).expect("there is nothing to decode").replies
    }

    /// Decides every toll again, on the states as they were read.
    fn replay(&self, mut reply: CheckReply<'_>) -> Result<BatchReply, Malformed> {
        let mut states: Vec<Option<State>> = vec![None; self.packed];
        let mut unread = reply.states.clone();
        let mut key_indexes = self.key_indexes.iter();
        let mut decoded = BatchReply { replies: Vec::with_capacity(self.tolls.len()), disagreements: 0 };
        let mut sent = 0;
        for toll in &self.tolls {
            if let Some(terms) = &toll.lease {
                sent += 1;
                let key = *key_indexes.next().expect("a lease has a key");
                if let Some(bytes) = unread[key].take() {
                    states[key] = state::decode(&toll.dues[0].quota, bytes);
                }
                let granted = terms.replay(&toll.dues[0], &states[key], reply.now);
                // The script's verdict counts, but units that it did not charge are not granted.
                let has_granted = !reply.refused.contains(&sent);
                decoded.disagreements += usize::from(granted.is_some() != has_granted);
                let (units, state) = match granted.filter(|_| has_granted) {
                    Some((units, state)) => (units, Some(state)),
                    None => (0, states[key].take()),
                };
                decoded.replies.push(lease::reply(reply.now, units, state.as_ref()));
                states[key] = state;
                continue;
            }
            let mut steps: Vec<Decided> = Vec::with_capacity(toll.dues.len());
            for due in &toll.dues {
                let ask = Ask { now: reply.now, ..due.ask };
                let mut decided = match &due.name {
                    None => Decided::new(algorithm::step(&due.quota, Seen::Nothing, &ask)),
                    Some(_) => {
                        let key = *key_indexes.next().expect("every due that is sent has a key");
                        let mut decided = if key < self.packed {
                            if let Some(bytes) = unread[key].take() {
                                states[key] = state::decode(&due.quota, bytes);
                            }
                            let seen = states[key].as_ref().map_or(Seen::Nothing, State::seen);
                            Decided::new(algorithm::step(&due.quota, seen, &ask))
                        } else {
                            reply.record(&due.quota)?
                        };
                        decided.key = Some(key);
                        decided
                    }
                };
                decided.ask = ask;
                decided.step.allowed |= due.cost == 0 && due.quota.count() > 0;
                steps.push(decided);
            }
            if steps.iter().any(|decided| decided.key.is_some()) {
                sent += 1;
                let admitted = !reply.refused.contains(&sent);
                decoded.disagreements += usize::from(overrule(&toll.dues, &mut steps, admitted));
            }
            let admitted = toll.dues.iter().zip(&steps).all(|(due, one)| one.step.allowed || !due.enforced);
            let mut toll_reply = Reply::new(reply.now, toll.id);
            for (due, decided) in toll.dues.iter().zip(steps) {
                let Decided { key, ask, step, log } = decided;
                let charged = toll.charging && admitted && step.allowed && due.cost > 0;
                if let Some(key) = key.filter(|key| *key < self.packed)
                    && (charged || toll.charging && step.effect.moved())
                {
                    let state = states[key].take();
                    states[key] = algorithm::apply(&due.quota, state, &ask, &step, charged, toll.id);
                }
                toll_reply.push(match log {
                    Some(log) => log.reply(&due.quota, &ask, step.allowed, charged),
                    None => LimitReply::Step { step, charged },
                });
            }
            decoded.replies.push(toll_reply);
        }
        Ok(decoded)
    }
}

/// One due of a toll, decided again.
struct Decided {
    /// The index of its key; `None` if it was not sent.
    key: Option<usize>,
    ask: Ask,
    step: Step,
    log: Option<LogRecord>,
}

impl Decided {
    fn new(step: Step) -> Decided {
        let ask = Ask { now: Time::default(), cost: 1, shift: 0, hold: None };
        Decided { key: None, ask, step, log: None }
    }
}

/// Changes the steps to the verdict of the script, if they differ from it. Returns whether they did.
fn overrule(dues: &[EncodedDue], steps: &mut [Decided], admitted: bool) -> bool {
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

/// The reply of `check.lua`.
struct CheckReply<'a> {
    now: Time,
    refused: Vec<u64>,
    states: Vec<Option<&'a [u8]>>,
    records: &'a [u8],
}

impl<'a> CheckReply<'a> {
    /// Decodes a reply with `packed` packed states.
    fn read(bytes: &'a [u8], packed: usize) -> Result<CheckReply<'a>, Malformed> {
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
        Ok(CheckReply { now, refused, states, records: rest })
    }

    /// Takes the next record of a log or of slots.
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

/// Takes `len` bytes off the front.
fn part<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], Malformed> {
    let (part, after) = rest.split_at_checked(len).ok_or(Malformed)?;
    *rest = after;
    Ok(part)
}

fn number(rest: &mut &[u8], width: usize) -> Result<u64, Malformed> {
    part(rest, width).map(|mut part| take(&mut part, width))
}

/// What the script computed for a log, whose stamps are not sent.
#[derive(Clone, Copy)]
struct LogRecord {
    used: u64,
    stamp: u64,
    passes: u64,
    next: u64,
    fresh: u64,
}

impl LogRecord {
    fn reply(self, quota: &Quota, ask: &Ask, allowed: bool, charged: bool) -> LimitReply {
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

/// How a due relates to the rest of its batch.
struct DueContext {
    /// The number of its key, from 1.
    key: usize,
    /// The number of its quota, from 1.
    quota: usize,
    /// Whether more dues of the same toll follow.
    more: bool,
    /// Whether other dues of the batch use the same key.
    shared: bool,
}

fn push_due(body: &mut Vec<u8>, toll: &EncodedToll, due: &EncodedDue, context: DueContext) {
    let DueContext { key, quota, more, shared } = context;
    if let Some(terms) = &toll.lease {
        return terms.push(body, key, quota, due.ask.shift, shared);
    }
    let algorithm = due.quota.algorithm();
    let hold = due.ask.hold.filter(|_| algorithm == Algorithm::LeakyBucket);
    let extended = algorithm == Algorithm::Concurrency || hold.is_some() || due.ask.shift > 0;
    let flags = [more, !due.enforced, !toll.charging, extended, shared, toll.is_refused()];
    let shape = flags.into_iter().rev().fold(0, |shape, flag| shape << 1 | u64::from(flag));
    push(body, 2, key as u64);
    push(body, 2, quota as u64);
    push(body, 1, shape);
    push(body, 4, due.cost);
    if extended {
        push(body, 7, due.ask.shift);
        push(body, 7, hold.map_or(0, |hold| hold.as_micros().min(FOR_EVER) + 1));
        push(body, 8, toll.id);
    }
}

/// Longer than any delay, in µs: no time is after 2^53 µs.
const FOR_EVER: u64 = 1 << 53;

/// Appends a quota in the form that `quota_read` of `state.lua` expects.
pub fn push_quota(bytes: &mut Vec<u8>, quota: &Quota) {
    push(bytes, 1, quota.algorithm() as u64 + 1);
    push(bytes, 3, quota.tick().span().as_micros());
    push(bytes, 7, quota.count());
    push(bytes, 7, quota.burst());
    push(bytes, 7, quota.period_ticks());
}

/// Whether states of this quota are a few numbers, which are read and sent as one string: neither a log nor slots.
fn is_packed(quota: &Quota) -> bool {
    !matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::Concurrency)
}

/// The call that corrects items of a charge whose keys share a cluster slot. `names` gives the names of an item's
/// state and of its marker.
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

/// The facts of a charge that its correction needs.
struct Correcting {
    shift: u64,
    cost: u64,
    count: u64,
    tick: u64,
}

/// Begins the argument of a correction, which changes nothing from `void_at` on.
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

/// Decodes the reply to a correction.
pub fn corrected(call: &Call, reply: &Value) -> Result<Correction, Malformed> {
    match call.number(reply)? {
        0 => Ok(Correction::Unknown),
        1 => Ok(Correction::Repeated),
        2 => Ok(Correction::Done),
        _ => Err(Malformed),
    }
}

/// Checks the reply to an undo. Its number is ignored: callers do not learn it.
pub(crate) fn undone(call: &Call, reply: &Value) -> Result<(), Malformed> {
    call.number(reply).map(drop)
}

/// What to do with a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// Give it back.
    Release,
    /// Restart its time to live.
    Renew,
}

/// The call that releases or renews the slot with this ID in the states of these keys.
pub fn handling(nonce: Nonce, slot: u64, handling: Handling, keys: Vec<String>) -> Call {
    let mut call = Call::new(script::slots(), nonce, keys, &[u8::from(handling == Handling::Renew)]);
    call.args.push(slot.to_be_bytes().to_vec());
    call
}

/// Decodes the reply to [`handling`]: whether the slot was still held.
pub fn handled(call: &Call, reply: &Value) -> Result<bool, Malformed> {
    match call.number(reply)? {
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
        let number = |nonce: i64, result: i64| Value::Number(4 * nonce + result);
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
