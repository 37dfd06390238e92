//! Receipts of admitted requests: what each limit charged, and which slots are held.
//!
//! How much of a charge can be refunded depends on when it was made, so a refund needs its receipt.
//! Inside the process a receipt is plain data; it becomes text, authenticated with a secret of the store,
//! when it leaves the process.

use crate::algorithm::Past;
use crate::facts::Facts;
use crate::invalid_request::InvalidRequest;
use crate::key::Key;
use crate::lease::Lease;
use crate::policy::Policy;
use crate::quota::{Algorithm, CheckedQuota, Quota};
use crate::siphash::{self, Secret};
use crate::time::{Span, Time};
use crate::toll::{Due, MAX_COST, number};

/// The receipt of an admitted toll, valid for one refund or one settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge(Receipt);

/// The receipt of held slots, valid until they are released or expire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot(Receipt);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Receipt {
    id: u64,
    at: Time,
    ttl: Option<Span>,
    items: Vec<Item>,
}

/// The part of a receipt that belongs to one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The key that was charged.
    pub key: ItemKey,
    /// The quota it was charged under.
    pub quota: CheckedQuota,
    /// The units charged.
    pub cost: u64,
    /// How many microseconds earlier than epoch-aligned windows this key's windows begin: 0 unless staggered.
    pub shift: u64,
    /// Where the charge is recorded: tick, timestamp or window number.
    pub mark: u64,
    /// Whether the charge was made to a state that several keys share, because the store was full.
    pub shared: bool,
    /// The index of the key's value that decides on which server its state is stored.
    partition: Option<u8>,
    /// The fact that held the cost; `None` if the limit charged the cost of the request.
    fact: Option<Box<str>>,
}

/// The key of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemKey {
    /// The bytes of the key.
    Whole(Box<[u8]>),
    /// A key that is too long to be part of a receipt: its family, and the name that the store uses for it.
    Short(Box<[u8]>, Short),
}

/// The name that a store uses for a key that is too long to be part of a receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Short {
    /// A hash of the key.
    pub name: u128,
    /// The tag that decides on which server the key is stored, at most 128 bytes; empty if the name decides.
    pub tag: Box<str>,
}

/// For a store that does not partition its keys.
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

    /// The charge, with the values that an algorithm needs to refund it.
    pub fn past(&self) -> Past {
        Past { cost: self.cost, count: self.quota.count(), tick: self.mark, window: self.mark }
    }

    /// The key that was charged; without its values if the key is [`ItemKey::Short`].
    pub fn key(&self) -> Key<'_> {
        let (ItemKey::Whole(bytes) | ItemKey::Short(bytes, _)) = &self.key;
        Key::from_bytes(bytes).expect("an item holds a valid key").parted(self.partition)
    }

    /// The name of the limit.
    fn limit(&self) -> &str {
        self.key().limit()
    }

    /// Time from which no unit of it can be refunded: its bucket has drained it, its window no longer
    /// counts, or its timestamps have left the log.
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

/// The correction of one item of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Leave the item unchanged.
    Keep,
    /// Give back this many units.
    GiveBack(u64),
    /// Charge this many more units.
    Add(u64),
}

/// The correction of one item of a charge, with the quota and the rates of the current policy.
#[derive(Clone, Copy, Debug)]
pub struct KeyCorrection {
    /// The quota with which the state is read.
    pub quota: CheckedQuota,
    /// The earlier charge.
    pub past: Past,
    /// The correction.
    pub change: Change,
}

/// The items of a charge that a refund or a settlement corrects, and their new costs.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Costs<'a> {
    /// All items in full: the request did not happen.
    All,
    /// The items that charged the cost of the request.
    Request(u64),
    /// The items that charged one of these facts.
    Facts(&'a Facts<'a>),
}

impl Charge {
    pub(crate) fn new(id: u64, at: Time, ttl: Option<Span>, items: Vec<Item>) -> Charge {
        Charge(Receipt { id, at, ttl, items })
    }

    /// Its id, unique in the store for as long as it can be refunded.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// When it was made, on the store's clock.
    pub fn time(&self) -> Time {
        self.0.at
    }

    /// What each limit charged.
    pub fn items(&self) -> &[Item] {
        &self.0.items
    }

    /// When it becomes void: a reservation at the end of its time to live, any other charge when no unit of
    /// it can be refunded.
    pub fn void_at(&self) -> Time {
        match self.0.ttl {
            Some(ttl) => self.0.at + ttl,
            None => self.0.items.iter().map(Item::void_at).max().unwrap_or(self.0.at),
        }
    }

    /// Prepares these changes, one for each item, under the current policy.
    ///
    /// The limit may have changed since the charge was made, and the tier of the caller is not known here.
    /// So the state is drained by the slowest rate that may be active, and the charge is assumed to have
    /// drained by the fastest: a refund never returns too much.
    ///
    /// A charge to a leased bucket counts as older than it is: see [`Lease::refund_age`].
    pub fn corrections(&self, policy: &Policy, changes: &[Change]) -> Vec<KeyCorrection> {
        assert_eq!(changes.len(), self.0.items.len(), "one change for every item");
        let fix = |(item, change): (&Item, &Change)| {
            let family = item.key().family();
            let rule = policy.find(item.limit()).map(|(_, rule)| rule);
            let current = rule.into_iter().flat_map(|rule| rule.quotas_of(family));
            let current = current.chain(policy.override_of(item.key()));
            let (mut slowest, mut fastest) = (item.quota, item.quota.count());
            for quota in current {
                fastest = fastest.max(quota.count());
                if quota.count() < slowest.count() {
                    slowest = *quota;
                }
            }
            let tick = item.mark.saturating_sub(Lease::refund_age(item.key(), policy));
            let past = Past { count: fastest, tick, ..item.past() };
            KeyCorrection { quota: slowest, past, change: *change }
        };
        self.0.items.iter().zip(changes).map(fix).collect()
    }

    /// The change of each item for a refund of these costs. A refund of 0 units, or of a cost that no item
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

    /// The change of each item for a settlement to these actual costs. Costs that no item charged are an
    /// error.
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

    /// The change of each item for a refund of the limits whose names are `chosen`; other items are kept.
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

    /// The error for costs that match no item: names the costs that this charge can be corrected by.
    fn unmatched(&self, costs: Costs<'_>) -> InvalidRequest {
        let mut facts: Vec<String> =
            self.0.items.iter().filter_map(|item| item.fact.as_deref()).map(str::to_owned).collect();
        facts.sort_unstable();
        facts.dedup();
        InvalidRequest::NothingToCorrect { by_cost: !matches!(costs, Costs::Facts(_)), facts }
    }

    /// The receipt as text, authenticated with the store's secret. Keys longer than 128 bytes are replaced
    /// by `short`, the name that the store uses for them.
    pub fn seal<S: Into<Short>>(&self, secret: &Secret, short: impl Fn(Key<'_>) -> S) -> String {
        self.0.seal(b'c', secret, short)
    }

    /// Reads a receipt that was sealed with this secret; `None` if the text is anything else.
    pub fn open(text: &str, secret: &Secret) -> Option<Charge> {
        Receipt::open(b'c', text, secret).map(Charge)
    }
}

impl Slot {
    pub(crate) fn new(id: u64, at: Time, items: Vec<Item>) -> Slot {
        Slot(Receipt { id, at, ttl: None, items })
    }

    /// Its id: the same in all limits in which it holds a slot.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The limits in which it holds a slot.
    pub fn items(&self) -> &[Item] {
        &self.0.items
    }

    /// Its time to live, from when it was taken or renewed: the shortest of its limits.
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

/// The longest key that is written into a receipt, in bytes.
const MAX_WHOLE_KEY: usize = 128;

impl Receipt {
    fn seal<S: Into<Short>>(&self, kind: u8, secret: &Secret, short: impl Fn(Key<'_>) -> S) -> String {
        // Enough for most receipts: a name, some numbers and a value for each item.
        let mut bytes = Vec::with_capacity(48 + 80 * self.items.len());
        bytes.push(kind);
        for number in [self.id, self.at.as_micros(), self.ttl.map_or(0, Span::as_micros)] {
            push_number(&mut bytes, number);
        }
        for item in &self.items {
            for number in [item.quota.count(), item.quota.burst(), item.cost, item.shift, item.mark] {
                push_number(&mut bytes, number);
            }
            // The index is below 126: see `partition` in `policy/compile.rs`.
            let partition = item.partition.map_or(0, |index| index + 1);
            bytes.push(u8::from(item.shared) | partition << 1);
            push_bytes(&mut bytes, item.fact.as_deref().unwrap_or_default().as_bytes());
            let (key, name) = match &item.key {
                ItemKey::Whole(key) if key.len() <= MAX_WHOLE_KEY => (&key[..], None),
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
        // Compared as one number, so that the time taken does not reveal how many bytes agree.
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
    let key_bytes = take_bytes(rest)?;
    let name = take_bytes(rest)?;
    let key = Key::from_bytes(key_bytes)?;
    let (algorithm, _) = key.algorithm();
    let burst = algorithm.has_burst().then_some(burst);
    let quota = CheckedQuota::new(algorithm, Quota::every(count, key.period()).with_burst(burst)).ok()?;
    let key = match name {
        [] => ItemKey::Whole(key_bytes.into()),
        name => {
            let (name, tag) = name.split_first_chunk()?;
            let tag = core::str::from_utf8(tag).ok()?.into();
            ItemKey::Short(key_bytes.into(), Short { name: u128::from_le_bytes(*name), tag })
        }
    };
    let fact = (!fact.is_empty()).then(|| fact.into());
    let partition = (flags >> 1).checked_sub(1);
    Some(Item { key, quota, cost, shift, mark, shared: flags & 1 != 0, partition, fact })
}

fn push_bytes(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.push(u8::try_from(part.len()).expect("names have at most 64 bytes, keys in receipts 128"));
    bytes.extend_from_slice(part);
}

fn take_bytes<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (len, after) = rest.split_first()?;
    let (part, after) = after.split_at_checked(usize::from(*len))?;
    *rest = after;
    Some(part)
}

/// LEB128: seven bits in each byte, the lowest first.
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

/// Base64 with the URL-safe alphabet, without padding.
fn to_text(bytes: &[u8]) -> String {
    let (triples, rest) = bytes.as_chunks();
    let mut text = Vec::with_capacity(triples.len() * 4 + 4);
    for triple in triples {
        text.extend_from_slice(&encode_triple(*triple));
    }
    if !rest.is_empty() {
        let mut last = [0; 3];
        last[..rest.len()].copy_from_slice(rest);
        text.extend_from_slice(&encode_triple(last)[..=rest.len()]);
    }
    String::from_utf8(text).expect("the alphabet is ASCII")
}

/// Three bytes as four letters.
fn encode_triple([one, two, three]: [u8; 3]) -> [u8; 4] {
    let word = u32::from_be_bytes([0, one, two, three]);
    [18, 12, 6, 0].map(|shift| ALPHABET[(word >> shift & 0x3f) as usize])
}

/// Decodes exactly what [`to_text`] writes: every other spelling of the same bytes is rejected.
fn from_text(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for chunk in text.as_bytes().chunks(4) {
        let mut word = 0u32;
        for char in chunk {
            let digit = ALPHABET.iter().position(|other| other == char)?;
            word = word << 6 | u32::try_from(digit).expect("one of 64");
        }
        word <<= 6 * (4 - chunk.len());
        let [_, triple @ ..] = word.to_be_bytes();
        let (decoded, padding) = triple.split_at(chunk.len() - 1);
        if decoded.is_empty() || padding.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(decoded);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
