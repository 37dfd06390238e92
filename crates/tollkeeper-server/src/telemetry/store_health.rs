//! Logs problems of the memory store: each kind at once, then once a minute while it lasts.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};
use tollkeeper::{MemoryStore, SnapshotStatus};

const INTERVAL: Duration = Duration::from_secs(1);
/// The time between two lines about the same problem.
const PAUSE: Duration = Duration::from_secs(60);

/// Checks the store once a second, while this future is polled.
pub async fn watch(store: MemoryStore) {
    let mut health = Health::default();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for line in health.update(&StoreStatus::of(&store), Instant::now()) {
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

/// The counters of a store at one time.
#[derive(Clone, Debug)]
struct StoreStatus {
    snapshots: Option<SnapshotStatus>,
    overflows: u64,
    corrections_refused: u64,
}

impl StoreStatus {
    fn of(store: &MemoryStore) -> StoreStatus {
        StoreStatus {
            snapshots: store.snapshots(),
            overflows: store.overflows(),
            corrections_refused: store.corrections_refused(),
        }
    }
}

/// What has been logged so far, to log each problem at most once in [`PAUSE`].
#[derive(Debug, Default)]
struct Health {
    snapshots: Repeated,
    failing: bool,
    overflows: Repeated,
    corrections: Repeated,
}

impl Health {
    fn update(&mut self, status: &StoreStatus, now: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(snapshots) = &status.snapshots {
            let path = snapshots.path.display();
            if self.snapshots.is_due(snapshots.failing || snapshots.failures > self.snapshots.logged, now) {
                self.snapshots.logged = snapshots.failures;
                let cause = snapshots.last_failure.as_deref().unwrap_or("unknown cause");
                lines.push(Line::Problem(format!(
                    "the snapshot {path} was not written: {cause} (a restart would lose the counts of the last {} s; \
                     {} attempts have failed so far)",
                    snapshots.age.as_secs(),
                    snapshots.failures
                )));
                self.failing = true;
            }
            if self.failing && !snapshots.failing {
                lines.push(Line::Solved(format!("the snapshot {path} is written again")));
                self.failing = false;
            }
        }
        if let Some(times) = self.overflows.increase(status.overflows, now) {
            lines.push(Line::Problem(format!(
                "the store is full: {times} times a new key had to share a counter with others since the last such \
                 line (raise memory.max_keys)"
            )));
        }
        if let Some(times) = self.corrections.increase(status.corrections_refused, now) {
            lines.push(Line::Problem(format!(
                "the store has no room for more refund records: {times} refunds were refused since the last such line \
                 and can be retried (raise memory.max_keys)"
            )));
        }
        lines
    }
}

/// A counter whose growth is logged at most once in [`PAUSE`].
#[derive(Debug, Default)]
struct Repeated {
    /// The count that was logged last.
    logged: u64,
    logged_at: Option<Instant>,
}

impl Repeated {
    /// The growth since it was logged last, if it is due to be logged now.
    fn increase(&mut self, count: u64, now: Instant) -> Option<u64> {
        let more = count - self.logged;
        self.is_due(more > 0, now).then(|| {
            self.logged = count;
            more
        })
    }

    /// Whether a problem is due to be logged now; if so, starts the next pause.
    fn is_due(&mut self, problem: bool, now: Instant) -> bool {
        let quiet = self.logged_at.is_some_and(|at| now.duration_since(at) < PAUSE);
        let due = problem && !quiet;
        if due {
            self.logged_at = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use tollkeeper::{Capacity, Clock, Snapshots};

    use super::*;

    fn status(overflows: u64, corrections_refused: u64) -> StoreStatus {
        StoreStatus { snapshots: None, overflows, corrections_refused }
    }

    #[test]
    fn problem_is_logged_at_once_then_once_a_minute() {
        let mut health = Health::default();
        let begin = Instant::now();
        assert!(health.update(&status(0, 0), begin).is_empty());
        let mut lines = Vec::new();
        for second in 1..=180 {
            let now = begin + Duration::from_secs(second);
            lines.extend(
                health.update(&status(10 * second, second / 150), now).into_iter().map(|line| (second, line)),
            );
        }
        let logged: Vec<u64> = lines.iter().map(|(second, _)| *second).collect();
        assert_eq!(logged, [1, 61, 121, 150], "{lines:?}");
        assert!(
            matches!(&lines[1].1, Line::Problem(text) if text.contains("600 times a new key")),
            "{lines:?}"
        );
        assert!(
            matches!(&lines[3].1, Line::Problem(text) if text.contains("1 refunds were refused")),
            "{lines:?}"
        );
        let rest = health.update(&status(1_800, 1), begin + Duration::from_secs(181));
        assert!(
            matches!(&rest[..], [Line::Problem(text)] if text.contains("590 times a new key")),
            "{rest:?}"
        );
        assert!(
            health.update(&status(1_800, 1), begin + Duration::from_secs(600)).is_empty(),
            "no new problem"
        );
    }

    /// Also when it works again.
    #[test]
    fn failing_snapshot_is_logged_once_a_minute() {
        let folder = std::env::temp_dir().join(format!("tollkeeper-health-{}", std::process::id()));
        let snapshots = Snapshots { path: folder.join("state"), every: Duration::from_secs(3_600) };
        let (store, _) =
            MemoryStore::open(Capacity::default(), Clock::system(), snapshots).expect("no lock is held");
        let bad = StoreStatus::of(&store);
        let status = bad.snapshots.clone().expect("it is saved");
        assert!(status.failing, "there is no such folder");
        let mut health = Health::default();
        let begin = Instant::now();
        let mut update = |failures, failing, second| {
            let mut status = status.clone();
            (status.failures, status.failing) = (failures, failing);
            health.update(
                &StoreStatus { snapshots: Some(status), ..bad.clone() },
                begin + Duration::from_secs(second),
            )
        };
        assert_eq!(update(0, false, 0), []);
        let lines = update(1, true, 1);
        assert!(
            matches!(&lines[..], [Line::Problem(text)] if text.contains("/state") && text.contains("No such file")),
            "{lines:?}"
        );
        for second in 2..60 {
            assert_eq!(update(second, true, second), [], "{second}");
        }
        assert_eq!(update(60, true, 61).len(), 1);
        let lines = update(60, false, 62);
        assert!(matches!(&lines[..], [Line::Solved(text)] if text.contains("is written again")), "{lines:?}");
        assert_eq!(update(60, false, 200), []);
        // A snapshot that failed and worked again between two updates.
        assert_eq!(update(61, false, 201).len(), 2);
        // A snapshot that is not retried for an hour.
        let hour = (300..3_900).filter(|second| !update(62, true, *second).is_empty()).count();
        assert_eq!(hour, 60);
    }
}
