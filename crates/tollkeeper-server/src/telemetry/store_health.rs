//! Logs what goes wrong in the memory store: each kind of problem at once, then once a minute while it lasts.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};
use tollkeeper::{MemoryStore, SnapshotStatus};

const EVERY: Duration = Duration::from_secs(1);
/// The time between two lines about the same problem.
const PAUSE: Duration = Duration::from_secs(60);

/// Looks at the store once a second, for as long as this is awaited.
pub async fn watch(store: MemoryStore) {
    let mut health = Health::default();
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for line in health.look(&Seen::of(&store), Instant::now()) {
            match line {
                Line::Problem(text) => tracing::warn!("{text}"),
                Line::Solved(text) => tracing::info!("{text}"),
            }
        }
    }
}

/// A line for the log.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Problem(String),
    Solved(String),
}

/// What there is to see of a store.
#[derive(Clone, Debug)]
struct Seen {
    snapshots: Option<SnapshotStatus>,
    overflows: u64,
    corrections_refused: u64,
}

impl Seen {
    fn of(store: &MemoryStore) -> Seen {
        Seen {
            snapshots: store.snapshots(),
            overflows: store.overflows(),
            corrections_refused: store.corrections_refused(),
        }
    }
}

/// What has been logged so far.
#[derive(Debug, Default)]
struct Health {
    snapshots: Repeated,
    failing: bool,
    overflows: Repeated,
    corrections: Repeated,
}

impl Health {
    fn look(&mut self, seen: &Seen, now: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(status) = &seen.snapshots {
            let path = status.path.display();
            if self.snapshots.is_due(status.failing || status.failures > self.snapshots.told, now) {
                self.snapshots.told = status.failures;
                let cause = status.last_failure.as_deref().unwrap_or("unknown cause");
                lines.push(Line::Problem(format!(
                    "the snapshot {path} was not written: {cause} (a restart would lose the counts of the last {} s; \
                     {} attempts have failed so far)",
                    status.age.as_secs(),
                    status.failures
                )));
                self.failing = true;
            }
            if self.failing && !status.failing {
                lines.push(Line::Solved(format!("the snapshot {path} is written again")));
                self.failing = false;
            }
        }
        if let Some(times) = self.overflows.news(seen.overflows, now) {
            lines.push(Line::Problem(format!(
                "the store is full: {times} times a new key had to share its count with others since this was last \
                 logged (raise memory.max_keys)"
            )));
        }
        if let Some(times) = self.corrections.news(seen.corrections_refused, now) {
            lines.push(Line::Problem(format!(
                "the store has no room to remember more refunds: {times} were refused since this was last logged, \
                 and may be tried again (raise memory.max_keys)"
            )));
        }
        lines
    }
}

/// A count of which news are told at most once in [`PAUSE`].
#[derive(Debug, Default)]
struct Repeated {
    told: u64,
    at: Option<Instant>,
}

impl Repeated {
    /// By how much the count has grown since it was told last, if it is to be told now.
    fn news(&mut self, count: u64, now: Instant) -> Option<u64> {
        let more = count - self.told;
        self.is_due(more > 0, now).then(|| {
            self.told = count;
            more
        })
    }

    /// Whether a problem is to be logged now.
    fn is_due(&mut self, problem: bool, now: Instant) -> bool {
        let quiet = self.at.is_some_and(|at| now.duration_since(at) < PAUSE);
        let due = problem && !quiet;
        if due {
            self.at = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use tollkeeper::{Capacity, Clock, Snapshots};

    use super::*;

    fn seen(overflows: u64, corrections_refused: u64) -> Seen {
        Seen { snapshots: None, overflows, corrections_refused }
    }

    #[test]
    fn a_problem_is_logged_at_once_and_then_once_a_minute() {
        let mut health = Health::default();
        let begin = Instant::now();
        assert!(health.look(&seen(0, 0), begin).is_empty());
        let mut lines = Vec::new();
        for second in 1..=180 {
            let now = begin + Duration::from_secs(second);
            lines.extend(
                health.look(&seen(10 * second, second / 150), now).into_iter().map(|line| (second, line)),
            );
        }
        let told: Vec<u64> = lines.iter().map(|(second, _)| *second).collect();
        assert_eq!(told, [1, 61, 121, 150], "{lines:?}");
        assert!(
            matches!(&lines[1].1, Line::Problem(text) if text.contains("600 times a new key")),
            "{lines:?}"
        );
        assert!(
            matches!(&lines[3].1, Line::Problem(text) if text.contains("refunds: 1 were refused")),
            "{lines:?}"
        );
        let rest = health.look(&seen(1_800, 1), begin + Duration::from_secs(181));
        assert!(
            matches!(&rest[..], [Line::Problem(text)] if text.contains("590 times a new key")),
            "{rest:?}"
        );
        assert!(health.look(&seen(1_800, 1), begin + Duration::from_secs(600)).is_empty(), "it is over");
    }

    #[test]
    fn a_snapshot_that_fails_is_logged_once_a_minute_and_when_it_works_again() {
        let folder = std::env::temp_dir().join(format!("tollkeeper-health-{}", std::process::id()));
        let snapshots = Snapshots { path: folder.join("state"), every: Duration::from_secs(3_600) };
        let (store, _) =
            MemoryStore::open(Capacity::default(), Clock::system(), snapshots).expect("no lock is held");
        let bad = Seen::of(&store);
        let status = bad.snapshots.clone().expect("it is saved");
        assert!(status.failing, "there is no such folder");
        let mut health = Health::default();
        let begin = Instant::now();
        let mut look = |failures, failing, second| {
            let mut status = status.clone();
            (status.failures, status.failing) = (failures, failing);
            health.look(&Seen { snapshots: Some(status), ..bad.clone() }, begin + Duration::from_secs(second))
        };
        assert_eq!(look(0, false, 0), []);
        let told = look(1, true, 1);
        assert!(
            matches!(&told[..], [Line::Problem(text)] if text.contains("/state") && text.contains("No such file")),
            "{told:?}"
        );
        for second in 2..60 {
            assert_eq!(look(second, true, second), [], "{second}");
        }
        assert_eq!(look(60, true, 61).len(), 1);
        let told = look(60, false, 62);
        assert!(matches!(&told[..], [Line::Solved(text)] if text.contains("is written again")), "{told:?}");
        assert_eq!(look(60, false, 200), []);
        // One that failed and worked again between two looks.
        assert_eq!(look(61, false, 201).len(), 2);
        // One that is not tried again for an hour.
        let hour = (300..3_900).filter(|second| !look(62, true, *second).is_empty()).count();
        assert_eq!(hour, 60);
    }
}
