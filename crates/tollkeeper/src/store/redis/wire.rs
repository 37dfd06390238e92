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
//! logs and slots. Limits that grant nothing (a count of 0) are not sent: they are decided by this process, and shape
//! 32 tells the script.
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
//! The reply contains the packed states as they were read, on which [`replay`](super::replay) decides every toll once
//! more to compute the numbers that callers see. The script computes such numbers only for logs, because their stamps
//! are not sent.

mod lease;
mod undo;

use std::collections::HashMap;
use std::fmt;

use tollkeeper_core::algorithm::{KeyRequest, Past, concurrency};
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Algorithm, Change, CheckedQuota, Due, KeyCorrection, Span, Time, Toll};

use crate::store::Correction;

use super::script::{self, Kinds, Script};
use super::state::{push, take};
pub use lease::granted;
pub(super) use lease::{LeaseTerms, reply as lease_reply};

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
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store sent a reply that does not belong to the call")
    }
}

impl std::error::Error for Malformed {}

/// What is kept of a toll while it is in flight.
#[derive(Clone, Debug)]
pub struct EncodedToll {
    pub(super) id: u64,
    pub(super) charging: bool,
    pub(super) dues: Vec<EncodedDue>,
    /// Set if this asks for units in advance instead of a decision.
    pub(super) lease: Option<LeaseTerms>,
}

/// What one limit is asked to decide.
#[derive(Clone, Debug)]
pub(super) struct EncodedDue {
    pub(super) state: StateKey,
    pub(super) quota: CheckedQuota,
    pub(super) enforced: bool,
    /// The units to charge. A cost of 0 is decided like a cost of 1 but never refused, so `request.cost` differs then.
    pub(super) cost: u64,
    pub(super) request: KeyRequest,
}

/// Where the state of a due is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StateKey {
    /// Nowhere: the limit grants nothing and has no state.
    Nowhere,
    /// Under this name.
    Named(String),
    /// Under the key of its batch that has this index.
    Indexed(usize),
}

impl EncodedDue {
    /// The name of its key; `None` if it has none, or if it belongs to a batch.
    fn name(&self) -> Option<&str> {
        if let StateKey::Named(name) = &self.state { Some(name) } else { None }
    }

    /// The longest delay that the caller accepts; `None` unless this is a leaky bucket.
    fn hold(&self) -> Option<Span> {
        self.request.hold.filter(|_| self.quota.algorithm() == Algorithm::LeakyBucket)
    }
}

impl EncodedToll {
    /// Copies what the call and its reply need from a toll. An admission will carry `id`; `name` gives key names.
    pub fn new(toll: &Toll, id: u64, name: impl Fn(&Due<'_>) -> String) -> EncodedToll {
        let encode = |due: Due<'_>| EncodedDue {
            state: if due.quota.count() > 0 { StateKey::Named(name(&due)) } else { StateKey::Nowhere },
            quota: *due.quota,
            enforced: due.enforced(),
            cost: due.cost,
            request: due.request(Time::default()),
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
        self.dues.iter().filter_map(EncodedDue::name)
    }

    /// Whether an enforced limit grants nothing, so that the toll is refused whatever its other limits decide.
    fn is_refused(&self) -> bool {
        self.dues.iter().any(|due| due.enforced && due.state == StateKey::Nowhere)
    }
}

/// Tolls that one call decides, in this order.
#[derive(Debug)]
pub struct Batch {
    pub(super) tolls: Vec<EncodedToll>,
    /// The number of keys with packed states, which come first.
    pub(super) packed: usize,
    call: Call,
}

/// The most keys that one batch should have: Lua can pass some thousand values to one command.
pub const MOST_KEYS: usize = 1_000;

impl Batch {
    /// Encodes these tolls as one call.
    pub fn new(mut tolls: Vec<EncodedToll>, nonce: Nonce) -> Batch {
        let keys = BatchKeys::of(&tolls);
        let packed = keys.packed;
        let mut names = vec![String::new(); keys.keys.len()];
        let mut places = keys.places.iter();
        let mut quotas: Vec<CheckedQuota> = Vec::new();
        let (mut body, mut kinds, mut all_plain) = (Vec::new(), Kinds::default(), true);
        for toll in &mut tolls {
            let mut left = toll.names().count();
            let (is_refused, id, charging) = (toll.is_refused(), toll.id, toll.charging);
            for due in &mut toll.dues {
                let StateKey::Named(name) = &mut due.state else { continue };
                let key = &keys.keys[*places.next().expect("every name has a place")];
                let index = if is_packed(&due.quota) { key.position } else { packed + key.position };
                names[index] = std::mem::take(name);
                due.state = StateKey::Indexed(index);
                kinds = kinds.with(due.quota.algorithm());
                let quota = quotas.iter().position(|quota| *quota == due.quota).unwrap_or_else(|| {
                    quotas.push(due.quota);
                    quotas.len() - 1
                });
                left -= 1;
                if let Some(terms) = &toll.lease {
                    (kinds, all_plain) = (kinds.with_leases(), false);
                    terms.push(&mut body, [index + 1, quota + 1], due.request.shift, key.is_shared);
                    continue;
                }
                let shape = Shape::of(due, [left > 0, !charging, key.is_shared, is_refused]);
                all_plain &= shape.is_plain(due);
                push_due(&mut body, due, id, [index + 1, quota + 1], shape);
            }
        }
        let script = match keys.places.len() {
            _ if !all_plain => script::check(kinds),
            1 => script::bucket(),
            _ => script::buckets(),
        };
        let mut argument = Vec::with_capacity(10 + 25 * quotas.len() + body.len());
        push(&mut argument, 6, nonce.0);
        push(&mut argument, 2, packed as u64);
        push(&mut argument, 2, quotas.len() as u64);
        quotas.iter().for_each(|quota| push_quota(&mut argument, quota));
        argument.extend_from_slice(&body);
        let call = Call { script, keys: names, args: vec![argument], nonce };
        Batch { tolls, packed, call }
    }

    /// The call to make. A batch without keys needs none: see [`Batch::replies_without_store`].
    pub fn call(&self) -> &Call {
        &self.call
    }
}

/// The reply of a script that decides tolls.
#[derive(Debug)]
pub(super) struct CheckReply<'a> {
    pub(super) now: Time,
    /// The numbers of the refused tolls, from 1, counting the tolls that were sent.
    pub(super) refused: Vec<u64>,
    /// The packed states as they were read; `None` for a missing one.
    pub(super) states: Vec<Option<&'a [u8]>>,
    records: &'a [u8],
}

impl<'a> CheckReply<'a> {
    /// The reply to a batch without keys.
    pub(super) fn without_states(now: Time) -> CheckReply<'static> {
        CheckReply { now, refused: Vec::new(), states: Vec::new(), records: &[] }
    }

    /// Decodes the reply to a batch.
    pub(super) fn read(batch: &Batch, reply: &'a Value) -> Result<CheckReply<'a>, Malformed> {
        let mut rest = batch.call.bytes(reply)?;
        let now = Time::from_micros(number(&mut rest, 7)?);
        let (count, even) = (number(&mut rest, 2)?, number(&mut rest, 1)? == 1);
        let refused = (0..count).map(|_| number(&mut rest, 2)).collect::<Result<_, _>>()?;
        let mut states = Vec::with_capacity(batch.packed);
        for _ in 0..batch.packed {
            let len = if even { 12 } else { number(&mut rest, 1)? };
            let state = part(&mut rest, usize::try_from(len).expect("a byte"))?;
            states.push(state.iter().any(|byte| *byte != 0).then_some(state));
        }
        Ok(CheckReply { now, refused, states, records: rest })
    }

    /// Takes the next record of a log.
    pub(super) fn log_record(&mut self) -> Result<LogRecord, Malformed> {
        let mut record = part(&mut self.records, 36)?;
        let allowed = take(&mut record, 1) == 1;
        let [used, stamp, passes, next, fresh] = std::array::from_fn(|_| take(&mut record, 7));
        Ok(LogRecord { allowed, used, stamp, passes, next, fresh })
    }

    /// Takes the next record of slots.
    pub(super) fn slots_record(&mut self) -> Result<concurrency::Step, Malformed> {
        let mut record = part(&mut self.records, 15)?;
        let allowed = take(&mut record, 1) == 1;
        let [held, first] = std::array::from_fn(|_| take(&mut record, 7));
        let first = if held == 0 { u64::MAX } else { first };
        Ok(concurrency::Step { allowed, moved: false, held, first })
    }
}

/// What the script computed for a log, whose stamps are not sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogRecord {
    pub(super) allowed: bool,
    /// Units in the period before this decision.
    pub(super) used: u64,
    /// The stamp that an admission gets.
    pub(super) stamp: u64,
    pub(super) passes: u64,
    pub(super) next: u64,
    pub(super) fresh: u64,
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

/// The distinct keys of a batch.
struct BatchKeys {
    keys: Vec<BatchKey>,
    /// The number of keys with packed states.
    packed: usize,
    /// For each due that has a key, in order, the index of that key in `keys`.
    places: Vec<usize>,
}

struct BatchKey {
    /// Its position among the keys with packed states, or among the others.
    position: usize,
    /// Whether several dues of the batch use it.
    is_shared: bool,
}

impl BatchKeys {
    fn of(tolls: &[EncodedToll]) -> BatchKeys {
        let mut found: HashMap<&str, usize> = HashMap::with_capacity(tolls.len());
        let mut keys: Vec<BatchKey> = Vec::with_capacity(tolls.len());
        let (mut packed, mut wide, mut places) = (0, 0, Vec::with_capacity(tolls.len()));
        for due in tolls.iter().flat_map(|toll| &toll.dues) {
            let Some(name) = due.name() else { continue };
            let place =
                *found.entry(name).and_modify(|place| keys[*place].is_shared = true).or_insert(keys.len());
            if place == keys.len() {
                let count = if is_packed(&due.quota) { &mut packed } else { &mut wide };
                keys.push(BatchKey { position: *count, is_shared: false });
                *count += 1;
            }
            places.push(place);
        }
        BatchKeys { keys, packed, places }
    }
}

/// How a due is decided, as the flags that precede its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape(u8);

impl Shape {
    const MORE: u8 = 1;
    const EXTENDED: u8 = 8;

    /// The shape of a due. The flags tell whether more dues of its toll follow, whether the toll only peeks, whether
    /// other dues of the batch use the same key, and whether the toll is refused whatever this due decides.
    fn of(due: &EncodedDue, [more, peeks, is_shared, is_refused]: [bool; 4]) -> Shape {
        let extended =
            due.quota.algorithm() == Algorithm::Concurrency || due.hold().is_some() || due.request.shift > 0;
        let flags = [more, !due.enforced, peeks, extended, is_shared, is_refused];
        Shape(flags.into_iter().rev().fold(0, |shape, flag| shape << 1 | u8::from(flag)))
    }

    /// Whether the drivers for plain buckets can decide this due: a bucket that is enforced and charged, without a
    /// delay, whose key no other due of the batch uses.
    fn is_plain(self, due: &EncodedDue) -> bool {
        let is_bucket = matches!(due.quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
        self.0 <= Shape::MORE && is_bucket && due.cost > 0
    }
}

/// Appends a due of the toll with this ID. Its key and its quota are numbered from 1.
fn push_due(body: &mut Vec<u8>, due: &EncodedDue, id: u64, [key, quota]: [usize; 2], shape: Shape) {
    push(body, 2, key as u64);
    push(body, 2, quota as u64);
    push(body, 1, u64::from(shape.0));
    push(body, 4, due.cost);
    if shape.0 & Shape::EXTENDED != 0 {
        push(body, 7, due.request.shift);
        push(body, 7, due.hold().map_or(0, |hold| hold.as_micros().min(FOR_EVER) + 1));
        push(body, 8, id);
    }
}

/// Longer than any delay, in µs: no time is after 2^53 µs.
const FOR_EVER: u64 = 1 << 53;

/// Appends a quota in the form that `quota_read` of `state.lua` expects.
pub fn push_quota(bytes: &mut Vec<u8>, quota: &CheckedQuota) {
    push(bytes, 1, quota.algorithm() as u64 + 1);
    push(bytes, 3, quota.tick().span().as_micros());
    push(bytes, 7, quota.count());
    push(bytes, 7, quota.burst());
    push(bytes, 7, quota.period_ticks());
}

/// Whether states of this quota are a few numbers, which are read and sent as one string: neither a log nor slots.
fn is_packed(quota: &CheckedQuota) -> bool {
    !matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::Concurrency)
}

/// The call that corrects items of a charge whose keys share a cluster slot. `names` gives the names of an item's
/// state and of its marker.
pub fn correction<'a>(
    nonce: Nonce,
    void_at: Time,
    items: impl IntoIterator<Item = (&'a Item, &'a KeyCorrection)>,
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

fn push_correction(argument: &mut Vec<u8>, quota: &CheckedQuota, correcting: &Correcting, change: Change) {
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
