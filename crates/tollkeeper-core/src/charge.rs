//! Receipts: what an admitted request paid, and which slot it holds.
//!
//! What may be given back depends on when it was taken, so a refund carries its receipt. In the
//! process a receipt is plain data; it becomes text, authenticated by a secret of the store, only when
//! it leaves.

use crate::algorithm::Past;
use crate::facts::Facts;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota, Rate};
use crate::siphash::{self, Secret};
use crate::time::{Span, Time};
use crate::toll::{Due, InvalidRequest, MAX_COST, number};

/// The receipt of an admitted toll, good for one refund or one settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge(Receipt);

/// The receipt of slots that are held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot(Receipt);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Receipt {
    id: u64,
    at: Time,
    ttl: Option<Span>,
    items: Vec<Item>,
}

/// What was paid at one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The key it was charged to.
    pub key: ItemKey,
    /// The quota it was charged under.
    pub quota: Quota,
    /// What was charged.
    pub cost: u64,
    /// How much earlier than the epoch's the windows of this key begin.
    pub shift: u64,
    /// Where it was entered: tick, stamp or window.
    pub mark: u64,
    /// It was charged to a state shared by several keys.
    pub shared: bool,
    /// Which of the key's values decides where its state is kept.
    partition: Option<u8>,
    /// The fact that held the cost, if it was not the cost of the request.
    fact: Option<Box<str>>,
}

/// The key of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemKey {
    /// The bytes of the key.
    Whole(Box<[u8]>),
    /// A key too long for a text: what it begins with, and what the store calls it.
    Short(Box<[u8]>, Short),
}

/// What a store calls a key that is too long to be written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Short {
    /// Its number.
    pub name: u128,
    /// What decides where it is kept, at most 128 bytes; nothing if its name does.
    pub tag: Box<str>,
}

/// Of a store that keeps all keys in one place.
impl From<u128> for Short {
    fn from(name: u128) -> Short {
        Short { name, tag: "".into() }
    }
}

impl Item {
    pub(crate) fn new(due: &Due<'_>, mark: u64, shared: bool) -> Item {
        Item {
            key: ItemKey::Whole(due.key.to_bytes().into()),
            quota: *due.quota,
            cost: due.cost,
            shift: due.shift,
            mark,
            shared,
            partition: due.key.partition(),
            fact: due.rule.cost_fact().map(Into::into),
        }
    }

    /// What an algorithm must know to give some of it back.
    pub fn past(&self) -> Past {
        Past { cost: self.cost, count: self.quota.count(), tick: self.mark, window: self.mark }
    }

    /// The key it was charged to; without its values if it is too long for a text.
    pub fn key(&self) -> Key<'_> {
        let (ItemKey::Whole(bytes) | ItemKey::Short(bytes, _)) = &self.key;
        Key::from_bytes(bytes).expect("an item holds a key").parted(self.partition)
    }

    /// The name of the limit.
    fn limit(&self) -> &str {
        self.key().limit()
    }

    /// When nothing of it can be given back any more: a bucket has drained it, its window is no longer
    /// looked at, its stamp has left the log.
    fn void_at(&self) -> Time {
        let (period, tick) = (self.quota.period_ticks(), self.quota.tick().span().as_micros());
        let ticks = match self.quota.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.mark.saturating_add(self.cost.saturating_mul(period).div_ceil(self.quota.count()))
            }
            Algorithm::FixedWindow => {
                self.mark.saturating_add(1).saturating_mul(period).saturating_sub(self.shift)
            }
            Algorithm::SlidingWindow => self.mark.saturating_add(2).saturating_mul(period),
            Algorithm::SlidingLog => self.mark.saturating_add(period),
            Algorithm::Concurrency => 0, // slots are released, not given back
        };
        Time::from_micros(ticks.saturating_mul(tick))
    }
}

/// What is to be done to one item of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    Keep,
    /// Give back so much.
    GiveBack(u64),
    /// Charge so much more.
    Add(u64),
}

/// How one item of a charge is corrected under the policy of today.
#[derive(Clone, Copy, Debug)]
pub struct Fix {
    /// The quota that the state is read with.
    pub quota: Quota,
    /// What must be known of the charge.
    pub past: Past,
    /// What is to be done.
    pub change: Change,
}

/// Which items of a charge a new cost is for.
#[derive(Clone, Copy, Debug)]
pub enum Costs<'a> {
    /// All: the request did not happen.
    All,
    /// Those that charge the cost of the request.
    Request(u64),
    /// Those that charge one of these facts.
    Facts(&'a Facts<'a>),
}

impl Charge {
    pub(crate) fn new(id: u64, at: Time, ttl: Option<Span>, items: Vec<Item>) -> Charge {
        Charge(Receipt { id, at, ttl, items })
    }

    /// Its number, unique in the store for as long as it can be refunded.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// When it was made, on the store's clock.
    pub fn time(&self) -> Time {
        self.0.at
    }

    /// What was paid at each limit.
    pub fn items(&self) -> &[Item] {
        &self.0.items
    }

    /// When it is void: a reservation at the end of its time, a plain charge when nothing is left of it.
    pub fn void_at(&self) -> Time {
        match self.0.ttl {
            Some(ttl) => self.0.at + ttl,
            None => self.0.items.iter().map(Item::void_at).max().unwrap_or(self.0.at),
        }
    }

    /// What these changes, one for each item, come to under the policy of today.
    ///
    /// Since the charge was made its limit may have changed, and which tier the caller is in is not
    /// known here. So the state is drained by the slowest rate that may be in force, and what has
    /// drained of the charge is taken to be as much as the fastest allows: never too much is given back.
    pub fn fixes(&self, policy: &Policy, changes: &[Change]) -> Vec<Fix> {
        assert_eq!(changes.len(), self.0.items.len(), "there is a change for every item");
        let fix = |(item, change): (&Item, &Change)| {
            let family = item.key().family();
            let rule = policy.find(item.limit()).map(|(_, rule)| rule);
            let today = rule.into_iter().flat_map(|rule| rule.quotas_of(family));
            let (mut slowest, mut fastest) = (item.quota, item.quota.count());
            for quota in today {
                fastest = fastest.max(quota.count());
                if quota.count() < slowest.count() {
                    slowest = *quota;
                }
            }
            Fix { quota: slowest, past: Past { count: fastest, ..item.past() }, change: *change }
        };
        self.0.items.iter().zip(changes).map(fix).collect()
    }

    /// What a refund of these costs means for each item. A refund of nothing, or of a cost that no item
    /// charged, is an error.
    pub fn refund(&self, costs: Costs<'_>) -> Result<Vec<Change>, InvalidRequest> {
        let changes = self.changes(costs, |charged, asked| {
            let asked = asked.unwrap_or(charged);
            if asked > charged {
                return Err(InvalidRequest::MoreThanCharged { asked, charged });
            }
            Ok(Change::GiveBack(asked))
        })?;
        let is_nothing = |change: &Change| matches!(change, Change::Keep | Change::GiveBack(0));
        if !matches!(costs, Costs::All) && changes.iter().all(is_nothing) {
            return Err(InvalidRequest::ZeroRefund);
        }
        Ok(changes)
    }

    /// What these actual costs mean for each item. Costs that no item charged are an error.
    pub fn settle(&self, costs: Costs<'_>) -> Result<Vec<Change>, InvalidRequest> {
        self.changes(costs, |charged, actual| {
            let actual = actual.unwrap_or(charged);
            Ok(if actual <= charged {
                Change::GiveBack(charged - actual)
            } else {
                Change::Add(actual - charged)
            })
        })
    }

    /// What to do with each item to give back what the limits that are `chosen` by name took, and keep
    /// the rest.
    pub fn refund_of(&self, chosen: impl Fn(&str) -> bool) -> Vec<Change> {
        let change = |item: &Item| match chosen(item.limit()) {
            true => Change::GiveBack(item.cost),
            false => Change::Keep,
        };
        self.0.items.iter().map(change).collect()
    }

    fn changes(
        &self,
        costs: Costs<'_>,
        change: impl Fn(u64, Option<u64>) -> Result<Change, InvalidRequest>,
    ) -> Result<Vec<Change>, InvalidRequest> {
        match costs {
            Costs::Request(cost) if cost > MAX_COST => return Err(InvalidRequest::Cost(cost)),
            Costs::Facts(facts) => facts.check().map_err(InvalidRequest::Fact)?,
            _ => {}
        }
        let of = |item: &Item| match (costs, &item.fact) {
            (Costs::All, _) => change(item.cost, None),
            (Costs::Request(cost), None) => change(item.cost, Some(cost)),
            (Costs::Facts(facts), Some(fact)) => match facts.get(fact) {
                None => Ok(Change::Keep),
                value => {
                    let cost = number(value).map_err(|problem| InvalidRequest::CostFact {
                        limit: item.limit().to_owned(),
                        fact: fact.to_string(),
                        problem,
                    })?;
                    change(item.cost, Some(cost))
                }
            },
            _ => Ok(Change::Keep),
        };
        let changes = self.0.items.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        if !matches!(costs, Costs::All) && changes.iter().all(|change| *change == Change::Keep) {
            return Err(self.unmatched(costs));
        }
        Ok(changes)
    }

    /// The error for costs that concern no item, with what this charge can be corrected by.
    fn unmatched(&self, costs: Costs<'_>) -> InvalidRequest {
        let mut facts: Vec<String> =
            self.0.items.iter().filter_map(|item| item.fact.as_deref()).map(str::to_owned).collect();
        facts.sort_unstable();
        facts.dedup();
        InvalidRequest::NothingToCorrect { by_cost: !matches!(costs, Costs::Facts(_)), facts }
    }

    /// The receipt as text that only this store can have written. Keys above 128 bytes go by `short`,
    /// the name that the store has for them.
    pub fn seal<S: Into<Short>>(&self, secret: &Secret, short: impl Fn(Key<'_>) -> S) -> String {
        self.0.seal(b'c', secret, short)
    }

    /// Reads a text that this store wrote; nothing if it did not.
    pub fn open(text: &str, secret: &Secret) -> Option<Charge> {
        Receipt::open(b'c', text, secret).map(Charge)
    }
}

impl Slot {
    pub(crate) fn new(id: u64, at: Time, items: Vec<Item>) -> Slot {
        Slot(Receipt { id, at, ttl: None, items })
    }

    /// Its number: the same in all the limits it is held in.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Where it is held.
    pub fn items(&self) -> &[Item] {
        &self.0.items
    }

    /// How long it is held at most, from when it was taken or renewed.
    pub fn ttl(&self) -> Span {
        self.0.items.iter().map(|item| item.quota.period()).min().unwrap_or(Span::ZERO)
    }

    /// As [`Charge::seal`].
    pub fn seal<S: Into<Short>>(&self, secret: &Secret, short: impl Fn(Key<'_>) -> S) -> String {
        self.0.seal(b's', secret, short)
    }

    /// As [`Charge::open`].
    pub fn open(text: &str, secret: &Secret) -> Option<Slot> {
        Receipt::open(b's', text, secret).map(Slot)
    }
}

/// The longest key that is written out.
const WHOLE_KEY: usize = 128;

impl Receipt {
    fn seal<S: Into<Short>>(&self, kind: u8, secret: &Secret, short: impl Fn(Key<'_>) -> S) -> String {
        // More than most receipts need: a name, some numbers and a value for each item.
        let mut bytes = Vec::with_capacity(48 + 80 * self.items.len());
        bytes.push(kind);
        for number in [self.id, self.at.as_micros(), self.ttl.map_or(0, Span::as_micros)] {
            push_number(&mut bytes, number);
        }
        for item in &self.items {
            for number in [item.quota.count(), item.quota.burst(), item.cost, item.shift, item.mark] {
                push_number(&mut bytes, number);
            }
            // A limit is keyed by fewer than 127 facts: see `partition` of `policy/compile.rs`.
            let partition = item.partition.map_or(0, |place| place + 1);
            bytes.push(u8::from(item.shared) | partition << 1);
            push_bytes(&mut bytes, item.fact.as_deref().unwrap_or_default().as_bytes());
            let (key, name) = match &item.key {
                ItemKey::Whole(key) if key.len() <= WHOLE_KEY => (&key[..], None),
                ItemKey::Whole(_) => (item.key().family(), Some(short(item.key()).into())),
                ItemKey::Short(family, short) => (&family[..], Some(short.clone())),
            };
            push_bytes(&mut bytes, key);
            match name {
                None => push_bytes(&mut bytes, &[]),
                Some(short) => {
                    push_bytes(&mut bytes, &[&short.name.to_le_bytes(), short.tag.as_bytes()].concat())
                }
            }
        }
        bytes.extend_from_slice(&siphash::hash(secret, &bytes).to_le_bytes());
        to_text(&bytes)
    }

    fn open(kind: u8, text: &str, secret: &Secret) -> Option<Receipt> {
        let bytes = from_text(text)?;
        let (signed, code) = bytes.split_last_chunk()?;
        // Compared as one number, not byte by byte: how much of it agrees takes no time to tell.
        if siphash::hash(secret, signed) != u128::from_le_bytes(*code) {
            return None;
        }
        let mut rest = signed.strip_prefix(&[kind])?;
        let id = take_number(&mut rest)?;
        let at = Time::from_micros(take_number(&mut rest)?);
        let ttl = take_number(&mut rest)?;
        let mut items = Vec::new();
        while !rest.is_empty() {
            items.push(take_item(&mut rest)?);
        }
        Some(Receipt { id, at, ttl: (ttl > 0).then_some(Span::from_micros(ttl)), items })
    }
}

fn take_item(rest: &mut &[u8]) -> Option<Item> {
    let [count, burst, cost, shift, mark] = {
        let mut numbers = [0; 5];
        for number in &mut numbers {
            *number = take_number(rest)?;
        }
        numbers
    };
    let (flags, after) = rest.split_first()?;
    *rest = after;
    let fact = core::str::from_utf8(take_bytes(rest)?).ok()?;
    let whole = take_bytes(rest)?;
    let name = take_bytes(rest)?;
    let key = Key::from_bytes(whole)?;
    let (algorithm, _) = key.algorithm();
    let burst = algorithm.has_burst().then_some(burst);
    let quota = Quota::new(algorithm, Rate { count, period: key.period(), burst }).ok()?;
    let key = match name {
        [] => ItemKey::Whole(whole.into()),
        name => {
            let (name, tag) = name.split_first_chunk()?;
            let tag = core::str::from_utf8(tag).ok()?.into();
            ItemKey::Short(whole.into(), Short { name: u128::from_le_bytes(*name), tag })
        }
    };
    let fact = (!fact.is_empty()).then(|| fact.into());
    let partition = (flags >> 1).checked_sub(1);
    Some(Item { key, quota, cost, shift, mark, shared: flags & 1 != 0, partition, fact })
}

fn push_bytes(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.push(u8::try_from(part.len()).expect("names have at most 64 bytes, keys that are written 128"));
    bytes.extend_from_slice(part);
}

fn take_bytes<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (len, after) = rest.split_first()?;
    let (part, after) = after.split_at_checked(usize::from(*len))?;
    *rest = after;
    Some(part)
}

/// Seven bits at a time, the lowest first.
fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Base64 with the alphabet for addresses, without padding.
fn to_text(bytes: &[u8]) -> String {
    let (whole, rest) = bytes.as_chunks();
    let mut text = Vec::with_capacity(whole.len() * 4 + 4);
    for three in whole {
        text.extend_from_slice(&four(*three));
    }
    if !rest.is_empty() {
        let mut last = [0; 3];
        last[..rest.len()].copy_from_slice(rest);
        text.extend_from_slice(&four(last)[..=rest.len()]);
    }
    String::from_utf8(text).expect("the alphabet is ASCII")
}

/// Three bytes as four letters.
fn four([one, two, three]: [u8; 3]) -> [u8; 4] {
    let word = u32::from_be_bytes([0, one, two, three]);
    [18, 12, 6, 0].map(|shift| ALPHABET[(word >> shift & 0x3f) as usize])
}

/// The bytes that [`to_text`] would write so: one receipt is one text, with no second spelling.
fn from_text(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for chunk in text.as_bytes().chunks(4) {
        let mut word = 0u32;
        for char in chunk {
            let digit = ALPHABET.iter().position(|other| other == char)?;
            word = word << 6 | u32::try_from(digit).expect("one of 64");
        }
        word <<= 6 * (4 - chunk.len());
        let [_, three @ ..] = word.to_be_bytes();
        let (whole, rest) = three.split_at(chunk.len() - 1);
        if whole.is_empty() || rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(whole);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
