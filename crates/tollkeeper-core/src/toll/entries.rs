//! The entries of a toll: each a limit with a grant and a cost, and the values of its key.

use crate::inline::Inline;
use crate::invalid_request::InvalidRequest;
use crate::key::Key;
use crate::policy::{Policy, Rule};
use crate::time::Span;
use crate::toll::{Due, MAX_DUES};

/// The entries of a toll, each key once.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries {
    list: Inline<Entry, 4>,
    /// The encoded values of all keys.
    values: Inline<u8, 96>,
    /// Indices of the entries of all sets of facts but the last, sorted by key. Empty while there is only one set.
    by_key: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) rule: u32,
    grant: u32,
    values_start: u32,
    values_end: u32,
    cost: u64,
    shift: u64,
}

/// Where the values of the next entry start.
#[derive(Clone, Copy)]
pub(super) struct Mark(pub(super) usize);

impl Entries {
    #[inline(always)]
    pub(super) fn clear(&mut self) {
        self.list.truncate(0);
        self.values.truncate(0);
        self.by_key.clear();
    }

    /// Whether the values are inside: then it takes at most a few kilobytes of the heap.
    #[inline]
    pub(super) fn is_small(&self) -> bool {
        self.values.is_inline()
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    #[inline]
    pub(super) fn iter(&self) -> core::slice::Iter<'_, Entry> {
        self.list.iter()
    }

    /// The due of the entry with this index.
    #[inline(always)]
    pub(super) fn due<'t>(&'t self, policy: &'t Policy, hold: Option<Span>, index: usize) -> Due<'t> {
        let entry = &self.list[index];
        let rule = &policy.rules()[entry.rule as usize];
        let (quota, family) = policy.quota_of(entry.rule as usize, rule, entry.grant).expect(LIMITED);
        let key = rule.place(Key::new(family, self.values_of(entry)));
        Due { rule, quota, key, cost: entry.cost, shift: entry.shift, hold }
    }

    /// Some of the entries.
    pub(super) fn part(&self, indices: &[usize]) -> Entries {
        let mut part = Entries { values: self.values.clone(), ..Entries::default() };
        indices.iter().for_each(|index| part.list.push(self.list[*index]));
        part
    }

    /// Starts an entry: its values follow, and then [`Entries::push`], [`Entries::merge`] or [`Entries::undo`].
    #[inline(always)]
    pub(super) fn start(&self) -> Mark {
        Mark(self.values.len())
    }

    /// The values, to be appended to.
    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> &mut Inline<u8, 96> {
        &mut self.values
    }

    /// The values since the start of an entry.
    pub(super) fn values_since(&self, start: Mark) -> &[u8] {
        &self.values[start.0..]
    }

    /// Drops the values since the start of an entry.
    pub(super) fn undo(&mut self, start: Mark) {
        self.values.truncate(start.0);
    }

    /// Ends an entry. The grant must not be unlimited.
    #[inline(always)]
    pub(super) fn push(&mut self, policy: &Policy, rule: usize, grant: u32, cost: u64, start: Mark) {
        let entry = self.entry(policy, rule, grant, cost, start);
        self.list.push(entry);
    }

    /// As [`Entries::push`], unless an earlier set of facts has the same key: that is paid once, at the larger cost and
    /// under the smaller quota. Returns the index of the entry.
    #[inline(always)]
    pub(super) fn merge(
        &mut self,
        policy: &Policy,
        rule: usize,
        grant: u32,
        cost: u64,
        start: Mark,
    ) -> Result<usize, InvalidRequest> {
        let entry = self.entry(policy, rule, grant, cost, start);
        // Each limit makes one key per set of facts, so only entries of earlier sets are compared.
        if !self.by_key.is_empty()
            && let Some(same) = self.merge_into_earlier(policy, entry)
        {
            return Ok(same);
        }
        let index = self.list.len();
        if index == MAX_DUES {
            return Err(InvalidRequest::TooManyDues);
        }
        self.list.push(entry);
        Ok(index)
    }

    #[inline(always)]
    fn entry(&self, policy: &Policy, rule: usize, grant: u32, cost: u64, start: Mark) -> Entry {
        let limit = &policy.rules()[rule];
        let shift = if limit.stagger { self.shift(policy, limit, (rule, grant), start) } else { 0 };
        let (values_start, values_end) = (index_u32(start.0), index_u32(self.values.len()));
        Entry { rule: index_u32(rule), grant, values_start, values_end, cost, shift }
    }

    #[cold]
    fn shift(&self, policy: &Policy, limit: &Rule, (rule, grant): (usize, u32), start: Mark) -> u64 {
        let (quota, family) = policy.quota_of(rule, limit, grant).expect(LIMITED);
        limit.shift_of(quota, || Key::new(family, self.values_since(start)))
    }

    // The entry is passed by value, so that it stays in registers until it is pushed.
    #[cold]
    fn merge_into_earlier(&mut self, policy: &Policy, entry: Entry) -> Option<usize> {
        let wanted = self.key_order(policy, &entry);
        let compare = |index: &u32| self.key_order(policy, &self.list[*index as usize]).cmp(&wanted);
        let found = self.by_key.binary_search_by(compare).ok()?;
        let same = self.by_key[found] as usize;
        let size = |entry: &Entry| {
            let (quota, _) = policy.quota(entry.rule as usize, entry.grant).expect(LIMITED);
            (quota.limit(), quota.count())
        };
        let merged = &mut self.list[same];
        merged.cost = merged.cost.max(entry.cost);
        if size(&entry) < size(merged) {
            merged.grant = entry.grant;
        }
        self.undo(Mark(entry.values_start as usize));
        Some(same)
    }

    /// Starts another set of facts: sorts the entries of the earlier ones, so that equal keys are found by binary search.
    #[cold]
    pub(super) fn start_set(&mut self, policy: &Policy) {
        for index in self.by_key.len()..self.list.len() {
            let wanted = self.key_order(policy, &self.list[index]);
            let before = |other: &u32| self.key_order(policy, &self.list[*other as usize]) < wanted;
            let at = self.by_key.partition_point(before);
            self.by_key.insert(at, index_u32(index));
        }
    }

    /// Orders entries by key: equal exactly for equal keys.
    fn key_order<'t>(&'t self, policy: &'t Policy, entry: &Entry) -> (u32, &'t [u8], &'t [u8]) {
        let (_, family) = policy.quota(entry.rule as usize, entry.grant).expect(LIMITED);
        (entry.rule, &**family, self.values_of(entry))
    }

    #[inline(always)]
    fn values_of(&self, entry: &Entry) -> &[u8] {
        &self.values[entry.values_start as usize..entry.values_end as usize]
    }
}

const LIMITED: &str = "unlimited grants make no entry";

#[inline(always)]
pub(super) fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("a policy has fewer than 2^32 limits, a toll fewer than 2^32 bytes of values")
}
