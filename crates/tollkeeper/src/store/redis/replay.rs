//! Decides the tolls of a batch once more, on the states as the script read them, to compute the numbers that callers
//! see.
//!
//! So every batch also checks that both languages agree. If they do not, the verdict of the script counts.

use tollkeeper_core::algorithm::{self, Effect, KeyRequest, Report, State, Step, StoredState};
use tollkeeper_core::{Algorithm, CheckedQuota, LimitReply, Reply, Time};

use super::state;
use super::wire::{
    self, Batch, CheckReply, EncodedDue, EncodedToll, LeaseTerms, LogRecord, Malformed, StateKey, Value,
};

/// The decoded reply to a batch.
#[derive(Debug)]
pub struct BatchReply {
    /// One for each toll, in order.
    pub replies: Vec<Reply>,
    /// The number of tolls that Lua decided otherwise than Rust, which is a bug in one of them. The verdict of the
    /// script counts, because it has already written the states.
    pub disagreements: usize,
}

impl Batch {
    /// Decodes the reply of the store.
    pub fn read_reply(&self, reply: &Value) -> Result<BatchReply, Malformed> {
        let reply = CheckReply::read(self, reply)?;
        Replay { states: vec![None; self.packed], unread: reply.states.clone(), reply, sent: 0 }
            .all(&self.tolls)
    }

    /// Decides a batch without keys: its tolls have no limits, or only limits that grant nothing.
    pub fn replies_without_store(&self, now: Time) -> Vec<Reply> {
        assert!(self.call().keys.is_empty(), "a batch with keys needs the store");
        let reply = CheckReply::without_states(now);
        let replay = Replay { states: Vec::new(), unread: Vec::new(), reply, sent: 0 };
        replay.all(&self.tolls).expect("there is nothing to decode").replies
    }
}

/// The states of a batch while its tolls are decided once more.
struct Replay<'a> {
    reply: CheckReply<'a>,
    /// The packed states that no due has used yet, as bytes.
    unread: Vec<Option<&'a [u8]>>,
    /// The packed states, as the dues so far have left them.
    states: Vec<Option<State>>,
    /// The number of tolls so far that were sent.
    sent: u64,
}

/// One due of a toll, decided again.
struct Decided {
    request: KeyRequest,
    step: Step,
    log: Option<LogRecord>,
}

impl Replay<'_> {
    fn all(mut self, tolls: &[EncodedToll]) -> Result<BatchReply, Malformed> {
        let mut decoded = BatchReply { replies: Vec::with_capacity(tolls.len()), disagreements: 0 };
        let mut steps = Vec::new();
        for toll in tolls {
            if let Some(terms) = &toll.lease {
                let (reply, disagrees) = self.grant(&toll.dues[0], terms);
                decoded.replies.push(reply);
                decoded.disagreements += usize::from(disagrees);
                continue;
            }
            steps.clear();
            for due in &toll.dues {
                steps.push(self.decide(due)?);
            }
            decoded.disagreements += usize::from(self.overrule(&toll.dues, &mut steps));
            decoded.replies.push(self.finish(toll, &steps));
        }
        Ok(decoded)
    }

    /// Grants units in advance, on the state that the dues before it left. Returns the reply, and whether the script
    /// disagrees: its verdict counts, but units that it did not charge are not granted.
    fn grant(&mut self, due: &EncodedDue, terms: &LeaseTerms) -> (Reply, bool) {
        self.sent += 1;
        let StateKey::Indexed(key) = due.state else { unreachable!("only limits with a state are leased") };
        self.read(due, key);
        let granted = terms.replay(due, self.states[key].clone(), self.reply.now);
        let has_granted = !self.reply.refused.contains(&self.sent);
        let disagrees = granted.is_some() != has_granted;
        let units = match granted.filter(|_| has_granted) {
            Some((units, state)) => {
                self.states[key] = Some(state);
                units
            }
            None => 0,
        };
        (wire::lease_reply(self.reply.now, units, self.states[key].as_ref()), disagrees)
    }

    /// Decodes the state of a due at its first use.
    fn read(&mut self, due: &EncodedDue, key: usize) {
        if let Some(bytes) = self.unread[key].take() {
            self.states[key] = state::decode(&due.quota, bytes);
        }
    }

    /// Decides one due on the state that the dues before it left.
    fn decide(&mut self, due: &EncodedDue) -> Result<Decided, Malformed> {
        let request = KeyRequest { now: self.reply.now, ..due.request };
        let mut log = None;
        let mut step = match due.state {
            StateKey::Indexed(key) if key < self.states.len() => {
                self.read(due, key);
                let stored = self.states[key].as_ref().map_or(StoredState::Nothing, State::stored);
                algorithm::step(&due.quota, stored, &request)
            }
            StateKey::Indexed(_) if due.quota.algorithm() == Algorithm::SlidingLog => {
                let record = self.reply.log_record()?;
                log = Some(record);
                Step { allowed: record.allowed, effect: Effect::None }
            }
            StateKey::Indexed(_) => {
                let step = self.reply.slots_record()?;
                Step { allowed: step.allowed, effect: Effect::Concurrency(step) }
            }
            StateKey::Nowhere | StateKey::Named(_) => {
                algorithm::step(&due.quota, StoredState::Nothing, &request)
            }
        };
        step.allowed |= due.cost == 0 && due.quota.count() > 0;
        Ok(Decided { request, step, log })
    }

    /// Changes the steps of a toll to the verdict of the script, if they differ from it. Returns whether they did.
    fn overrule(&mut self, dues: &[EncodedDue], steps: &mut [Decided]) -> bool {
        if dues.iter().all(|due| due.state == StateKey::Nowhere) {
            return false;
        }
        self.sent += 1;
        let admitted = !self.reply.refused.contains(&self.sent);
        if is_admitted(dues, steps) == admitted {
            return false;
        }
        let enforced = dues.iter().zip(steps).filter(|(due, _)| due.enforced).map(|(_, decided)| decided);
        match admitted {
            true => enforced.for_each(|decided| decided.step.allowed = true),
            false => enforced.take(1).for_each(|decided| decided.step.allowed = false),
        }
        true
    }

    /// Charges a toll whose verdict is known, and returns its reply.
    fn finish(&mut self, toll: &EncodedToll, steps: &[Decided]) -> Reply {
        let admitted = is_admitted(&toll.dues, steps);
        let mut reply = Reply::new(self.reply.now, toll.id);
        for (due, Decided { request, step, log }) in toll.dues.iter().zip(steps) {
            let charged = toll.charging && admitted && step.allowed && due.cost > 0;
            if let StateKey::Indexed(key) = due.state
                && let Some(state) = self.states.get_mut(key)
                && (charged || toll.charging && step.effect.moved())
            {
                *state = algorithm::apply(&due.quota, state.take(), request, step, charged, toll.id);
            }
            reply.push(match log {
                Some(log) => log_reply(log, &due.quota, request, step.allowed, charged),
                None => LimitReply::Step { step: *step, charged },
            });
        }
        reply
    }
}

/// Whether all enforced limits allow the toll.
fn is_admitted(dues: &[EncodedDue], steps: &[Decided]) -> bool {
    dues.iter().zip(steps).all(|(due, decided)| decided.step.allowed || !due.enforced)
}

/// The numbers of a log, of which the script computed all that depends on its stamps.
fn log_reply(
    log: &LogRecord,
    quota: &CheckedQuota,
    request: &KeyRequest,
    allowed: bool,
    charged: bool,
) -> LimitReply {
    let used = log.used + if charged { request.cost } else { 0 };
    let report = Report {
        remaining: quota.count().saturating_sub(used),
        passes: (request.cost <= quota.count()).then_some(log.passes),
        next: log.next,
        fresh: Some(log.fresh),
        departs: request.now.as_micros(),
    };
    LimitReply::Outcome { outcome: algorithm::tell(quota, request, allowed, &report), mark: log.stamp }
}
