//! The refusal log: a line for each refused request, up to the rate in `log.refusals`, and the number of lines left out.
//!
//! A request never waits for the log: records go through a bounded queue to a task that writes them. Records beyond the
//! rate or the capacity of the queue are counted. While the log is off, it costs a refusal one atomic load.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};
use tollkeeper::store::StoreFuture;
use tollkeeper::{
    AdHocLimits, Capacity, CheckedQuota, Clock, Decision, KeyDecision, Limiter, MemoryStore, OnStoreFailure,
    Policy, Retry,
};
use tollkeeper_engine::api::redact::Redactor;

use crate::service::Service;

/// The capacity of the queue, in records.
const QUEUE: usize = 1_024;
/// How often the number of lines left out is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Queues refusals for the log, within its rate.
#[derive(Debug)]
pub struct RefusalLog {
    on: AtomicBool,
    /// The rate of the config; `None` while the log is off.
    quota: ArcSwapOption<CheckedQuota>,
    /// An ordinary token bucket that keeps the log to that rate.
    bucket: AdHocLimits,
    records: mpsc::Sender<Refusal>,
    /// The receiver of `records`, until the writing task takes it.
    receiver: Mutex<Option<mpsc::Receiver<Refusal>>>,
    left_out: AtomicU64,
}

/// The record of one refusal.
#[derive(Debug)]
pub struct Refusal {
    limit: String,
    key: Key,
    cost: u64,
    retry: Option<Retry>,
    degraded: Option<OnStoreFailure>,
    transport: &'static str,
    route: Option<Box<str>>,
}

impl Refusal {
    /// The refusal by the binding limit of a decision. Values of hashed facts are redacted, as in `/v1/top`.
    pub fn of(
        decision: &Decision,
        redactor: &Redactor,
        transport: &'static str,
        route: Option<Box<str>>,
    ) -> Option<Refusal> {
        let binding = decision.binding()?;
        let declared = decision.toll().policy().declared();
        let values = binding.key().texts().zip(binding.rule().by());
        let shown = values
            .map(|(value, fact)| value.map(|value| redactor.redact(declared, fact, value).into_owned()));
        Some(Refusal {
            limit: binding.name().to_owned(),
            key: Key(shown.collect()),
            cost: binding.due().cost,
            retry: binding.outcome().retry,
            degraded: binding.degraded(),
            transport,
            route,
        })
    }

    /// The refusal by an ad-hoc limit, which the call itself defined.
    pub fn of_one(command: &str, key: &str, cost: u64, passage: &KeyDecision) -> Refusal {
        Refusal {
            limit: command.to_owned(),
            key: Key(vec![Some(key.to_owned())]),
            cost,
            retry: passage.outcome().retry,
            degraded: passage.degraded(),
            transport: "resp",
            route: None,
        }
    }

    fn write(&self) {
        let (wait, never) = match self.retry {
            Some(Retry::After(span)) => (Some(span), None),
            Some(Retry::Never) => (None, Some(true)),
            None => (None, None),
        };
        tracing::info!(
            limit = self.limit,
            key = ?self.key,
            cost = self.cost,
            retry_after = wait.map(|span| Duration::from(span).as_secs_f64()),
            never,
            degraded = self.degraded.map(OnStoreFailure::name),
            transport = self.transport,
            route = self.route.as_deref(),
            "refused{}",
            wait.map(|span| format!(", retry in {}", span.readable())).unwrap_or_default()
        );
    }
}

/// The values of a key, as a list: `["alice", null]`. Line ends and terminal control characters are escaped.
struct Key(Vec<Option<String>>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let null: &dyn fmt::Debug = &format_args!("null");
        f.debug_list().entries(self.0.iter().map(|value| value.as_ref().map_or(null, |text| text))).finish()
    }
}

impl RefusalLog {
    /// A log with this rate; off without a quota.
    pub fn new(quota: Option<CheckedQuota>) -> RefusalLog {
        let store = MemoryStore::new(Capacity { max_keys: 16, ..Capacity::default() }, Clock::system());
        let limiter = Limiter::embedded(Policy::new(Vec::new()).expect("no limits are valid"), store);
        let (records, receiver) = mpsc::channel(QUEUE);
        let log = RefusalLog {
            on: AtomicBool::new(false),
            quota: ArcSwapOption::empty(),
            bucket: limiter.ad_hoc("LOG", OnStoreFailure::Local),
            records,
            receiver: Mutex::new(Some(receiver)),
            left_out: AtomicU64::new(0),
        };
        log.change(quota);
        log
    }

    /// Changes the rate, or turns the log on or off.
    pub fn change(&self, quota: Option<CheckedQuota>) {
        self.on.store(quota.is_some(), Relaxed);
        self.quota.store(quota.map(Arc::new));
    }

    /// Whether refusals are logged at all.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Queues a refusal if the rate and the queue allow it, and counts it as left out otherwise.
    pub fn add(&self, refusal: impl FnOnce() -> Option<Refusal>) {
        let quota = self.quota.load();
        let Some(quota) = &*quota else { return };
        let is_allowed = matches!(self.bucket.check("refusals", quota, 1), Ok(StoreFuture::Ready(passage)) if passage.allowed);
        let is_queued = is_allowed && refusal().is_some_and(|refusal| self.records.try_send(refusal).is_ok());
        if !is_queued {
            self.left_out.fetch_add(1, Relaxed);
        }
    }

    fn report_left_out(&self) {
        match self.left_out.swap(0, Relaxed) {
            0 => {}
            count => tracing::info!(count, "{count} more refusals were not logged"),
        }
    }
}

/// Writes queued refusals until `stop` is dropped, then the rest of the queue.
pub async fn write(service: Arc<Service>, mut stop: oneshot::Receiver<()>) {
    let log = &service.refusals;
    let taken = log.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(mut records) = taken else { return };
    let mut ticks = interval(REPORT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            _ = &mut stop => break,
            Some(refusal) = records.recv() => refusal.write(),
            _ = ticks.tick() => log.report_left_out(),
        }
    }
    while let Ok(refusal) = records.try_recv() {
        refusal.write();
    }
    log.report_left_out();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollkeeper::Quota;

    #[test]
    fn keys_are_written_on_one_line() {
        let key =
            |values: &[Option<&str>]| Key(values.iter().map(|value| value.map(str::to_owned)).collect());
        for (values, expected) in [
            (&[][..], "[]"),
            (&[Some("alice"), None], r#"["alice", null]"#),
            (&[Some("a\n\"b\"\u{1b}[31m")], r#"["a\n\"b\"\u{1b}[31m"]"#),
        ] {
            assert_eq!(format!("{:?}", key(values)), expected);
        }
    }

    #[test]
    fn refusals_beyond_the_rate_are_counted() {
        use tollkeeper::{Algorithm, facts};
        let quota = CheckedQuota::new(Algorithm::TokenBucket, Quota::per_day(3).burst(3)).expect("a quota");
        let refusal = || {
            let policy = Policy::new(vec![tollkeeper::Limit::new("none", tollkeeper::Allowance::Nothing)]);
            let limiter = Limiter::embedded(policy.expect("valid"), MemoryStore::default());
            let decision = limiter.check(&facts! {}).wait().expect("valid facts");
            Refusal::of(&decision, &Redactor::default(), "http", None)
        };
        let log = RefusalLog::new(None);
        log.add(|| unreachable!("it is off"));
        assert_eq!((log.is_on(), log.left_out.load(Relaxed)), (false, 0));
        log.change(Some(quota));
        for _ in 0..10 {
            log.add(refusal);
        }
        let queued = QUEUE - log.records.capacity();
        assert_eq!((log.is_on(), queued, log.left_out.load(Relaxed)), (true, 3, 7));
    }
}
