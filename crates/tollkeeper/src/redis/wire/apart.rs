//! A toll whose keys are in different slots of a cluster: parts that are decided apart, what they say
//! together, and how a part that was admitted in vain is undone.

use tollkeeper_core::{Algorithm, Change, Quota, Rate, Ruling, Said, Span, Time};

use super::{Asked, Call, Correcting, push_correction};
use crate::redis::script;

/// The dues of a toll that are in one slot.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// The slot.
    pub(crate) slot: u16,
    /// What is asked there.
    pub(crate) asked: Asked,
    /// The places of its dues in the toll.
    places: Vec<usize>,
}

/// How long a marker of something undone is kept: longer than any call is on its way.
const UNDONE: Span = Span::from_secs(60);

impl Asked {
    /// The parts of a toll, by the slots of its keys. What has no key goes with the first.
    pub(crate) fn apart(self, slot: impl Fn(&str) -> u16) -> Vec<Part> {
        let charging = self.charging && !self.is_refused();
        let mut parts: Vec<Part> = Vec::new();
        let home = self.names().next().map_or(0, &slot);
        for (place, due) in self.dues.into_iter().enumerate() {
            let slot = due.name.as_deref().map_or(home, &slot);
            let part = match parts.iter_mut().find(|part| part.slot == slot) {
                Some(part) => part,
                None => {
                    let asked = Asked { id: self.id, charging, dues: Vec::new() };
                    parts.push(Part { slot, asked, places: Vec::new() });
                    parts.last_mut().expect("pushed")
                }
            };
            part.asked.dues.push(due);
            part.places.push(place);
        }
        parts
    }
}

impl Part {
    /// The same, to be looked at only.
    pub(crate) fn peek(&self) -> Part {
        let asked = Asked { id: 0, charging: false, dues: self.asked.dues.clone() };
        Part { asked, places: self.places.clone(), slot: self.slot }
    }

    /// Whether this part lets the request pass.
    pub(crate) fn allows(&self, ruling: &Ruling) -> bool {
        self.asked.dues.iter().zip(ruling.said()).all(|(due, said)| said.allowed() || !due.enforced)
    }

    /// The calls that give back what this part was charged.
    pub(crate) fn undo(&self, ruling: &Ruling, marker: impl Fn(&str) -> String) -> Vec<Call> {
        let mut correct = Call { script: script::correct(), keys: Vec::new(), args: Vec::new() };
        let mut release = Call { script: script::slots(), keys: Vec::new(), args: Vec::new() };
        let mut argument = super::correction_until(ruling.time() + UNDONE);
        for (due, said) in self.asked.dues.iter().zip(ruling.said()) {
            let Some(name) = due.name.as_ref().filter(|_| said.allowed() && due.cost > 0) else { continue };
            if due.quota.algorithm() == Algorithm::Concurrency {
                release.keys.push(name.clone());
                continue;
            }
            correct.keys.extend([name.clone(), marker(name)]);
            let (cost, count, tick) = (due.cost, due.quota.count(), said.mark());
            let quota = as_bucket(&due.quota);
            let correcting = Correcting { shift: due.ask.shift, cost, count, tick };
            push_correction(&mut argument, &quota, &correcting, Change::GiveBack(cost));
        }
        correct.args.push(argument);
        release.args = vec![b"0".to_vec(), self.asked.id.to_be_bytes().to_vec()];
        [correct, release].into_iter().filter(|call| !call.keys.is_empty()).collect()
    }
}

/// What the parts say together. Each has a time of its own, so their numbers are computed now; what a part
/// was charged in vain is told as it stands without.
pub(crate) fn together(parts: &[(Part, Ruling)], charged: bool) -> Ruling {
    let now = parts.iter().map(|(_, ruling)| ruling.time()).max().unwrap_or(Time::default());
    let id = parts.first().map_or(0, |(part, _)| part.asked.id);
    let mut together = Ruling::new(now, id);
    let places: usize = parts.iter().map(|(part, _)| part.places.len()).sum();
    let all = together.say(places);
    for (part, ruling) in parts {
        for ((due, said), place) in part.asked.dues.iter().zip(ruling.said()).zip(&part.places) {
            let ask = tollkeeper_core::algorithm::Ask { now: ruling.time(), ..due.ask };
            let said = match *said {
                Said::Step { step, charged: was } => Said::Step { step, charged: was && charged },
                said => said,
            };
            let mut outcome = said.outcome(&due.quota, &ask);
            if due.cost == 0 {
                outcome.delay = Span::ZERO;
            } else if matches!(said, Said::Outcome { .. })
                && part.asked.charging
                && part.allows(ruling)
                && !charged
            {
                let taken = if due.quota.algorithm() == Algorithm::Concurrency { 1 } else { due.cost };
                outcome.remaining = (outcome.remaining + taken).min(outcome.limit);
            }
            all[*place] = Said::Outcome { outcome, mark: said.mark() };
        }
    }
    together
}

/// A queue that is left before anybody saw it gives back as a bucket does.
fn as_bucket(quota: &Quota) -> Quota {
    if quota.algorithm() != Algorithm::LeakyBucket {
        return *quota;
    }
    let rate = Rate { count: quota.count(), period: quota.period(), burst: Some(quota.burst()) };
    Quota::new(Algorithm::TokenBucket, rate).expect("the bounds of both are the same")
}
