//! The priorities of requests, and the share of the limit that each may fill.

use tollkeeper::Percent;

/// The priority of requests that have none, or one that is not listed.
const NORMAL: &str = "normal";

/// Priorities and their shares of the limit. A request may not fill the part of the limit above its share, so the
/// priority with the smallest share is shed first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Priorities(Vec<(Box<str>, Percent)>);

impl Priorities {
    /// All requests have the same priority and may fill the whole limit.
    pub fn none() -> Priorities {
        Priorities(vec![(NORMAL.into(), Percent::ALL)])
    }

    /// `high` 100 %, `normal` 90 %, `low` 70 %, and those that are listed, which may change these three.
    pub fn with(listed: impl IntoIterator<Item = (String, Percent)>) -> Priorities {
        let shares = [("high", Percent::ALL), (NORMAL, Percent::new(90)), ("low", Percent::new(70))];
        let mut priorities: Vec<(Box<str>, Percent)> =
            shares.into_iter().map(|(name, share)| (name.into(), share)).collect();
        for (name, share) in listed {
            match priorities.iter_mut().find(|(other, _)| **other == *name) {
                Some((_, listed)) => *listed = share,
                None => priorities.push((name.into(), share)),
            }
        }
        Priorities(priorities)
    }

    /// The names, in the order of [`Priorities::shares`].
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// The name of the priority with the smallest share, which is shed first.
    pub fn smallest(&self) -> &str {
        let smallest = self.0.iter().min_by_key(|(_, share)| *share);
        smallest.map(|(name, _)| &**name).expect("`normal` is always a priority")
    }

    /// The share of the limit that each priority may fill.
    pub fn shares(&self) -> Vec<Percent> {
        self.0.iter().map(|(_, share)| *share).collect()
    }

    /// The index and the name of the priority with this name; otherwise of `normal`.
    pub fn find(&self, name: Option<&str>) -> (usize, &str) {
        let of = |wanted: &str| self.names().position(|name| name == wanted);
        let index = name.and_then(of).or_else(|| of(NORMAL)).expect("`normal` is always a priority");
        (index, &self.0[index].0)
    }
}

impl Default for Priorities {
    fn default() -> Priorities {
        Priorities::none()
    }
}
