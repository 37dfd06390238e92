//! The network between nodes and store: what becomes of each message.

use crate::cases::Random;

use super::scenario::Weather;

/// What becomes of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The connection is refused: the call certainly does not run.
    Rejected,
    /// It runs after each of these delays, in microseconds: never, once or twice.
    Sent(Vec<Leg>),
}

/// One delivery of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leg {
    /// How long the request takes.
    pub there: u64,
    /// How long the reply takes; `None` if it is lost.
    pub back: Option<u64>,
}

impl Weather {
    /// The fate of a call. It depends on the seed, the task and the number of the call in its task, and not on other
    /// calls: so it stays the same when a failing scenario is shrunk.
    pub fn fate(&self, seed: u64, task: u64, number: u64) -> Fate {
        let mut random = Random::new(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ task << 20 ^ number);
        let mut chance = |of: u64| random.within(0, 999) < of;
        if chance(self.rejects) {
            return Fate::Rejected;
        }
        let (lost, silent, twice) =
            (chance(self.loses_requests), chance(self.loses_replies), chance(self.duplicates));
        let mut leg = |silent: bool| {
            let there = self.delay(&mut random);
            let back = self.delay(&mut random);
            Leg { there, back: (!silent).then_some(back) }
        };
        let mut legs = Vec::new();
        if !lost {
            legs.push(leg(silent));
        }
        if twice {
            legs.push(leg(false));
        }
        Fate::Sent(legs)
    }

    fn delay(&self, random: &mut Random) -> u64 {
        let longest = if random.within(0, 999) < self.delays { self.slow } else { self.usual };
        random.within(20, longest)
    }
}
