//! `--suggest`: the smallest limit that refuses at most a given share, found by trying counts.
//!
//! Each candidate runs in a world that holds only that limit, so that refusals by other limits do not blur the answer.

use tollkeeper::config::{Config, EffectiveLimit};

use super::engine::WorldSpec;
use super::plan;
use super::tally::{Detail, LimitResult};
use super::world::WorldResult;

/// How many counts are tried in each pass.
const CANDIDATES: u64 = 24;
/// The lowest and the highest candidate of the first pass are the written count divided and multiplied by this.
const FACTOR: u64 = 16;

/// A part of requests: `0.1%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareTarget(pub f64);

impl std::str::FromStr for ShareTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<ShareTarget, String> {
        let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
        match number {
            Some(percent) if (0.0..100.0).contains(&percent) => Ok(ShareTarget(percent / 100.0)),
            _ => Err("a percentage below 100, such as 0.1%".to_owned()),
        }
    }
}

/// The search for one limit.
#[derive(Clone, Debug)]
pub struct Search {
    limit: EffectiveLimit,
    target: f64,
    /// The counts that were tried, each with what the limit refused, in ascending order.
    tried: Vec<Tried>,
}

/// A count that was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tried {
    /// The count of the rate.
    pub count: u64,
    /// The part of what was asked that was refused, from 0 to 1.
    pub share: f64,
    /// How many keys were refused at least once.
    pub keys: u64,
}

/// The answer for one limit.
#[derive(Clone, Debug)]
pub struct Suggestion {
    /// The limit.
    pub name: String,
    /// The count that is written in the config.
    pub written: u64,
    /// The smallest count that refuses at most the target; `None` if none of those tried does, or if a higher count
    /// refused more.
    pub answer: Option<SuggestedRate>,
    /// Whether a higher count never refused more than a lower one.
    pub is_monotone: bool,
    /// Every count that was tried.
    pub tried: Vec<Tried>,
}

/// A count with its neighbour and what to write.
#[derive(Clone, Debug)]
pub struct SuggestedRate {
    /// What the count refuses.
    pub at: Tried,
    /// The next lower count that was tried.
    pub below: Option<Tried>,
    /// The rate for the config.
    pub rate: String,
    /// The burst for the config, if the limit has one.
    pub burst: Option<u64>,
}

impl SuggestedRate {
    /// The line for the config.
    pub fn line(&self) -> String {
        let burst = self.burst.map_or_else(String::new, |burst| format!(", burst: {burst}"));
        format!("rate: {}{burst}", self.rate)
    }
}

impl Search {
    /// Searches for all limits whose count can be varied.
    pub fn all(config: &Config, target: ShareTarget) -> Vec<Search> {
        let limits = config.limits.iter().filter(|limit| plan::has_one_rate(limit));
        limits.map(|limit| Search { limit: limit.clone(), target: target.0, tried: Vec::new() }).collect()
    }

    /// The counts to try next.
    pub fn candidates(&self) -> Vec<u64> {
        let (written, _) = plan::written(&self.limit).expect("only limits with a rate are searched");
        if self.tried.is_empty() { around(written) } else { self.bracket() }
    }

    /// The worlds that try these counts, as a group. A count that the algorithm does not support is left out.
    pub fn worlds(&self, config: &Config, group: usize) -> Vec<(u64, WorldSpec)> {
        let world = |count: u64| {
            let config = plan::with_count(config, &self.limit, count).ok()?;
            Some((count, WorldSpec { config, group, detail: Detail::Counts }))
        };
        self.candidates().into_iter().filter_map(world).collect()
    }

    /// Notes what a count refused.
    pub fn add(&mut self, count: u64, result: &WorldResult) {
        let Some(limit) = result.limits.first() else { return };
        let tried = Tried { count, share: LimitResult::share(limit), keys: limit.refused_keys.count };
        let at = self.tried.partition_point(|other| other.count < count);
        if self.tried.get(at).is_none_or(|other| other.count != count) {
            self.tried.insert(at, tried);
        }
    }

    /// The counts between the smallest that passes and its lower neighbour.
    fn bracket(&self) -> Vec<u64> {
        let Some(index) = self.first_passing() else { return Vec::new() };
        let low = index.checked_sub(1).map_or(0, |below| self.tried[below].count);
        let high = self.tried[index].count;
        let between = high - low - 1;
        if between <= CANDIDATES {
            return (low + 1..high).collect();
        }
        (1..=CANDIDATES).map(|step| low + step * (high - low) / (CANDIDATES + 1)).collect()
    }

    fn first_passing(&self) -> Option<usize> {
        self.tried.iter().position(|tried| tried.share <= self.target)
    }

    /// The answer.
    pub fn finish(self) -> anyhow::Result<Suggestion> {
        let is_monotone = self.tried.windows(2).all(|pair| pair[1].share <= pair[0].share);
        let answer = match self.first_passing().filter(|_| is_monotone) {
            None => None,
            Some(index) => {
                let grant = plan::scaled(&self.limit, self.tried[index].count)?;
                Some(SuggestedRate {
                    at: self.tried[index],
                    below: index.checked_sub(1).map(|below| self.tried[below]),
                    rate: grant.rate.unwrap_or_default(),
                    burst: grant.burst,
                })
            }
        };
        let written = plan::written(&self.limit).map_or(0, |(count, _)| count);
        Ok(Suggestion { name: self.limit.name, written, answer, is_monotone, tried: self.tried })
    }
}

/// Counts around a written one, in equal ratios.
fn around(written: u64) -> Vec<u64> {
    let ratio = |step: u64| {
        let exponent = 2.0 * step as f64 / (CANDIDATES - 1) as f64 - 1.0;
        let count = written as f64 * (FACTOR as f64).powf(exponent);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most 16 times a count"
        )]
        let count = count.round() as u64;
        count.max(1)
    };
    let mut counts: Vec<u64> = (0..CANDIDATES).map(ratio).collect();
    counts.dedup();
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_candidates_are_around_the_written_count() {
        let counts = around(100);
        assert_eq!((counts.len(), counts[0], counts[23]), (24, 6, 1_600));
        assert!(counts.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(around(1)[0], 1);
        assert_eq!(around(1).last(), Some(&16));
    }

    #[test]
    fn bracket_has_every_count_or_24_of_them() {
        let limit = br#"limits: [{ name: a, rate: 100/min }]"#;
        let format = tollkeeper::config::Format::Yaml;
        let (config, _) = Config::parse("a.yaml", format, limit, &|_| None).expect("valid");
        let mut search = Search::all(&config, ShareTarget(0.1)).remove(0);
        search.tried =
            [(10, 0.5), (20, 0.05), (30, 0.0)].map(|(count, share)| Tried { count, share, keys: 0 }).into();
        assert_eq!(search.candidates(), (11..20).collect::<Vec<u64>>());
        search.tried.remove(0);
        assert_eq!(search.candidates(), (1..20).collect::<Vec<u64>>(), "nothing below was tried");
        search.tried =
            [(1_000, 0.5), (2_000, 0.05)].map(|(count, share)| Tried { count, share, keys: 0 }).into();
        let counts = search.candidates();
        assert_eq!((counts.len(), counts[0], counts[23]), (24, 1_040, 1_960));
        search.tried.truncate(1);
        assert!(search.candidates().is_empty(), "no count passes");
    }
}
