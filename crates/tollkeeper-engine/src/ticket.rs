//! Tickets of admitted requests whose end must be reported: to refund by status, and to release slots.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::task::AbortHandle;
use tollkeeper::{Decision, Limiter, Slot, SlotGuard, Span, Time};
use tollkeeper_tower::visit;

use crate::event::{EventKind, Listeners};
use crate::process;

/// The most open tickets: a new one beyond them drops the oldest.
pub(crate) const MAX_OPEN: usize = 1_000_000;
/// How long a ticket may be open. After that, the binding is assumed to have missed the end of the request.
const MAX_AGE: Span = Span::from_secs(600);
/// How often dropped tickets are reported.
const BETWEEN_REPORTS: Span = Span::from_secs(10);

/// The open tickets of an engine.
#[derive(Debug)]
pub(crate) struct Tickets {
    limiter: Limiter,
    listeners: Arc<Listeners>,
    max_open: usize,
    table: Mutex<OpenTickets>,
}

#[derive(Debug, Default)]
struct OpenTickets {
    /// By number, which is also the order in which they were opened.
    open: BTreeMap<u64, Ticket>,
    last: u64,
    /// Dropped since the last report.
    dropped: u64,
    reported: Option<Time>,
}

/// A request that was admitted and has not ended.
#[derive(Debug)]
struct Ticket {
    opened: Time,
    /// `None` once the status of the response is known, or if no limit depends on it.
    decision: Option<Decision>,
    held: Option<RenewedSlot>,
}

/// A slot and the task that renews it.
#[derive(Debug)]
struct RenewedSlot {
    _guard: SlotGuard,
    renewal: Option<AbortHandle>,
}

impl Tickets {
    pub(crate) fn new(limiter: &Limiter, listeners: Arc<Listeners>, max_open: usize) -> Tickets {
        Tickets { limiter: limiter.clone(), listeners, max_open, table: Mutex::default() }
    }

    /// Opens a ticket. Its number is at least 1, and below 2^53.
    pub(crate) fn open(self: &Arc<Tickets>, decision: Option<Decision>, guard: Option<SlotGuard>) -> u64 {
        let opened = self.limiter.clock().now();
        let mut table = self.lock();
        table.last += 1;
        let number = table.last;
        let held =
            guard.map(|guard| RenewedSlot { renewal: self.renew(number, opened, &guard), _guard: guard });
        let mut ended = Vec::new();
        while let Some(oldest) = table.open.first_entry()
            && (oldest.get().opened + MAX_AGE <= opened || table.open.len() >= self.max_open)
        {
            ended.extend(table.open.pop_first());
        }
        table.open.insert(number, Ticket { opened, decision, held });
        let report = table.report(ended.len(), opened);
        drop(table);
        self.end(ended, report);
        number
    }

    /// Refunds the limits that the status does not count for; false if the ticket is unknown.
    pub(crate) fn answered(&self, number: u64, status: u16) -> bool {
        let mut table = self.lock();
        let Some(ticket) = table.open.get_mut(&number) else { return false };
        let decision = ticket.decision.take();
        let ended = if ticket.held.is_none() { table.open.remove(&number) } else { None };
        drop(table);
        let _entered = self.enter();
        if let Some(decision) = decision {
            visit::refund(&self.limiter, &decision, status);
        }
        drop(ended);
        true
    }

    /// Releases the slot; false if the ticket is unknown.
    pub(crate) fn gone(&self, number: u64) -> bool {
        // Entered first, because it is left last: the slot is released while `ended` is dropped.
        let _entered = self.enter();
        let ended = self.lock().open.remove(&number);
        ended.is_some()
    }

    /// Renews a slot at half its time to live, until the ticket ends.
    fn renew(self: &Arc<Tickets>, number: u64, opened: Time, guard: &SlotGuard) -> Option<AbortHandle> {
        let (tickets, limiter, slot) = (Arc::downgrade(self), self.limiter.clone(), guard.slot().clone());
        let half = Span::from_micros(guard.ttl().as_micros() / 2);
        // If no thread can be started, the slot expires after its time to live.
        let runtime = process::runtime().ok()?;
        Some(runtime.spawn(keep(tickets, number, opened + MAX_AGE, limiter, slot, half)).abort_handle())
    }

    /// Drops a ticket whose end was not reported.
    fn expire(&self, number: u64) {
        let mut table = self.lock();
        let ended: Vec<_> = table.open.remove_entry(&number).into_iter().collect();
        let report = table.report(ended.len(), self.limiter.clock().now());
        drop(table);
        self.end(ended, report);
    }

    /// Releases the slots of dropped tickets, outside of the lock.
    fn end(&self, ended: Vec<(u64, Ticket)>, report: Option<u64>) {
        if !ended.is_empty() {
            let _entered = self.enter();
            drop(ended);
        }
        if let Some(dropped) = report {
            let message = format!(
                "forgot {dropped} admitted requests whose end was not reported within 10 minutes, or beyond 1,000,000 at \
                 once: report the end of every response"
            );
            self.listeners.emit(EventKind::Error, message);
        }
    }

    /// The runtime in which a remote store is called.
    fn enter(&self) -> Option<tokio::runtime::EnterGuard<'static>> {
        if self.limiter.is_embedded() { None } else { process::runtime().ok().map(|runtime| runtime.enter()) }
    }

    fn lock(&self) -> MutexGuard<'_, OpenTickets> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenTickets {
    /// Counts dropped tickets; returns how many to report, if it is time to.
    fn report(&mut self, dropped: usize, now: Time) -> Option<u64> {
        self.dropped += u64::try_from(dropped).unwrap_or(u64::MAX);
        if self.dropped == 0 || self.reported.is_some_and(|last| now < last + BETWEEN_REPORTS) {
            return None;
        }
        self.reported = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

async fn keep(tickets: Weak<Tickets>, number: u64, until: Time, limiter: Limiter, slot: Slot, half: Span) {
    loop {
        let left = until.since(limiter.clock().now());
        limiter.clock().sleep(half.min(left)).await;
        if limiter.clock().now() >= until {
            if let Some(tickets) = tickets.upgrade() {
                tickets.expire(number);
            }
            return;
        }
        if limiter.renew(&slot).await == Ok(false) {
            return; // expired: another request may hold the slot by now
        }
    }
}

impl Drop for RenewedSlot {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tollkeeper::{Limit, Quota};

    use super::*;
    use crate::event::EngineEvent;

    #[test]
    fn ticket_beyond_the_cap_drops_the_oldest() {
        let limiter = Limiter::builder().limit(Limit::new("all", Quota::per_hour(9))).build().unwrap();
        let (send, events) = mpsc::channel();
        let listeners = Arc::new(Listeners::default());
        listeners.add(1, Arc::new(move |event: &EngineEvent| send.send(event.clone()).unwrap_or_default()));
        let tickets = Arc::new(Tickets::new(&limiter, listeners, 2));
        let [first, second, third] = [(); 3].map(|()| tickets.open(None, None));
        assert!(!tickets.gone(first), "the oldest was dropped");
        assert!(tickets.gone(second) && tickets.gone(third));
        let event = events.try_recv().unwrap();
        assert!(event.message.starts_with("forgot 1 admitted requests"), "{}", event.message);
    }
}
