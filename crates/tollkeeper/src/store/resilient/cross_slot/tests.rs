//! Tolls that span several servers, each of which may be slow or down. The servers here are simulated; real ones are
//! tested in `tests/`.

use std::collections::HashMap;

use tokio::sync::Semaphore;
use tollkeeper_core::{
    Charge, Costs, Decision, Facts, Key, KeyCorrection, Limit, OnStoreFailure, Policy, Quota, Slot, Span,
    Verb, facts,
};

use super::*;
use crate::store::memory::MemoryStore;
use crate::store::remote::{Failure, FailureKind, RemoteResult, Split};
use crate::store::resilient::{BreakerSettings, Resilient, ResilientSettings};
use crate::store::{Correction, Store as _, StoreFuture};

/// Simulated servers: each limit has its own, of the same name.
#[derive(Debug)]
struct Servers {
    servers: HashMap<String, One>,
    /// The limit and the verb of each call, in order.
    asked: Mutex<Vec<(String, Verb)>>,
    /// The limits whose charges were undone, in order.
    undone: Mutex<Vec<String>>,
    /// Undoing a charge waits for one of these permits.
    hands: Semaphore,
}

#[derive(Debug)]
struct One {
    store: MemoryStore,
    mood: Mutex<Mood>,
    /// A slow server waits for one of these permits before each reply.
    answers: Semaphore,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    Well,
    Slow,
    Dead,
}

const NEVER: &str = "not called: every toll here spans several servers";

impl Remote for Servers {
    fn decide(&self, _: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        panic!("{NEVER}")
    }

    fn split(&self, toll: &Toll) -> Split {
        let part = |(index, due): (usize, Due<'_>)| PartialToll {
            server: Server::at(due.rule.name().into()),
            toll: toll.part(&[index]),
            places: vec![index],
            id: 7,
        };
        Split::Apart(toll.dues().enumerate().map(part).collect())
    }

    fn decide_part(&self, part: &PartialToll) -> StoreFuture<'_, RemoteResult<Reply>> {
        let name = part.toll.get(0).rule.name().to_owned();
        lock(&self.asked).push((name.clone(), part.toll.verb()));
        let (one, toll) = (&self.servers[&name], part.toll.clone());
        let mood = *lock(&one.mood);
        StoreFuture::Later(Box::pin(async move {
            if mood == Mood::Dead {
                return Err(Failure::new(FailureKind::Connection, "connection refused"));
            }
            if mood == Mood::Slow {
                one.answers.acquire().await.unwrap().forget();
            }
            Ok(one.store.decide(&toll))
        }))
    }

    fn undo<'a>(&'a self, part: &'a PartialToll, reply: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        StoreFuture::Later(Box::pin(async move {
            self.hands.acquire().await.unwrap().forget();
            let charge = Decision::new(part.toll.clone(), reply.clone()).charge().expect("it was charged");
            let changes = charge.refund(Costs::All).unwrap();
            let name = part.toll.get(0).rule.name();
            let corrections = charge.corrections(part.toll.policy(), &changes);
            assert_eq!(self.servers[name].store.correct(&charge, &corrections), Correction::Done);
            lock(&self.undone).push(name.to_owned());
            Ok(())
        }))
    }

    fn correct<'a>(
        &'a self,
        _: &'a Charge,
        _: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        panic!("{NEVER}")
    }

    fn release<'a>(&'a self, _: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        panic!("{NEVER}")
    }

    fn renew<'a>(&'a self, _: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        panic!("{NEVER}")
    }

    fn forget<'a>(&'a self, _: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        panic!("{NEVER}")
    }

    fn seal_charge(&self, _: &Charge) -> Option<String> {
        panic!("{NEVER}")
    }

    fn open_charge<'a>(&'a self, _: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        panic!("{NEVER}")
    }

    fn seal_slot(&self, _: &Slot) -> Option<String> {
        panic!("{NEVER}")
    }

    fn open_slot<'a>(&'a self, _: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        panic!("{NEVER}")
    }
}

struct Bench {
    store: Arc<Resilient<Servers>>,
    policy: Arc<Policy>,
}

impl Bench {
    /// Limits with these names, counts and failure policies. Charges are undone without delay.
    fn new(limits: &[(&str, u64, OnStoreFailure)]) -> Bench {
        let bench = Bench::with_hands(limits);
        bench.store.remote().hands.add_permits(1_000);
        bench
    }

    /// As [`Bench::new`], but a charge is undone only when the test adds a permit to `hands`.
    fn with_hands(limits: &[(&str, u64, OnStoreFailure)]) -> Bench {
        let one = || One {
            store: MemoryStore::default(),
            mood: Mutex::new(Mood::Well),
            answers: Semaphore::new(0),
        };
        let remote = Servers {
            servers: limits.iter().map(|(name, ..)| ((*name).to_owned(), one())).collect(),
            asked: Mutex::default(),
            undone: Mutex::default(),
            hands: Semaphore::new(0),
        };
        let limit = |(name, count, policy): &(&str, u64, OnStoreFailure)| {
            let limit = Limit::new(*name, Quota::per_day(*count)).by("user").on_store_failure(*policy);
            limit.algorithm(tollkeeper_core::Algorithm::FixedWindow)
        };
        let settings = ResilientSettings {
            deadline: std::time::Duration::from_secs(20),
            breaker: BreakerSettings { cooldown: Span::from_secs(3_600), ..BreakerSettings::default() },
            ..ResilientSettings::default()
        };
        let store = Arc::new(Resilient::new(remote, settings, MemoryStore::default()));
        Bench { store, policy: Arc::new(Policy::new(limits.iter().map(limit).collect()).unwrap()) }
    }

    async fn decide(&self, verb: Verb, facts: &Facts<'_>) -> Decision {
        let toll = self.policy.toll(verb, facts, 1).unwrap();
        let reply = self.store.decide(&toll).await;
        Decision::new(toll, reply)
    }

    async fn check(&self) -> Decision {
        self.decide(Verb::Check, &facts! { "user" => "alice" }).await
    }

    fn mood(&self, server: &str, mood: Mood) {
        *lock(&self.store.remote().servers[server].mood) = mood;
    }

    /// The units that remain at a server, after waiting until this many charges were undone.
    async fn remains(&self, server: &str, undone: usize) -> u64 {
        while lock(&self.store.remote().undone).len() < undone {
            tokio::task::yield_now().await;
        }
        let index = self.policy.find(server).unwrap().0;
        let toll = self.policy.toll(Verb::Usage, &facts! { "user" => "alice" }, 1).unwrap().part(&[index]);
        let reply = self.store.remote().servers[server].store.decide(&toll);
        Decision::new(toll, reply).limit(server).unwrap().outcome().remaining
    }

    /// The calls since the last time this was called.
    fn asked(&self) -> Vec<(String, Verb)> {
        std::mem::take(&mut *lock(&self.store.remote().asked))
    }
}

use OnStoreFailure::{Allow, Deny, Local};

#[tokio::test]
async fn request_admitted_by_all_servers_is_charged_on_all() {
    let bench = Bench::new(&[("one", 10, Deny), ("two", 20, Deny)]);
    let decision = bench.check().await;
    assert_eq!((decision.allowed(), decision.degraded()), (true, None));
    let left = |name| decision.limit(name).unwrap().outcome().remaining;
    assert_eq!([left("one"), left("two")], [9, 19]);
    assert_eq!(decision.charge().unwrap().items().len(), 2);
    assert_eq!([bench.remains("one", 0).await, bench.remains("two", 0).await], [9, 19]);
}

/// The decision already shows the numbers as they will be once the charges are undone.
#[tokio::test]
async fn refusal_is_returned_before_charges_are_undone() {
    let bench = Bench::with_hands(&[("wide", 10, Deny), ("narrow", 1, Deny)]);
    assert!(bench.check().await.allowed());
    let refused = bench.check().await;
    assert!(!refused.allowed());
    assert_eq!(
        refused.limit("wide").unwrap().outcome().remaining,
        9,
        "without the charge that will be undone"
    );
    assert_eq!(bench.remains("wide", 0).await, 8, "the charge is not undone yet");
    bench.store.remote().hands.add_permits(1);
    assert_eq!(bench.remains("wide", 1).await, 9);
}

#[tokio::test]
async fn dropped_request_is_charged_fully_or_not_at_all() {
    let bench = Bench::new(&[("quick", 10, Deny), ("slow", 1, Deny)]);
    bench.mood("slow", Mood::Slow);
    let slow = &bench.store.remote().servers["slow"].answers;
    for (round, left) in [(0, 9), (1, 9)] {
        let request = tokio::spawn({
            let (store, policy) = (Arc::clone(&bench.store), Arc::clone(&bench.policy));
            async move {
                let toll = policy.toll(Verb::Check, &facts! { "user" => "alice" }, 1).unwrap();
                store.decide(&toll).await
            }
        });
        while bench.remains("quick", 0).await != 9 - round as u64 {
            tokio::task::yield_now().await;
        }
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        slow.add_permits(1);
        // Both servers admit the first request. The slow one refuses the second, so its charge at the quick one is
        // undone.
        assert_eq!(bench.remains("quick", round).await, left, "round {round}");
        while bench.remains("slow", 0).await != 0 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn refused_key_is_peeked_at_before_charging() {
    let bench = Bench::new(&[("wide", 10, Deny), ("narrow", 1, Deny)]);
    assert!(bench.check().await.allowed());
    assert!(!bench.check().await.allowed());
    assert_eq!(bench.remains("wide", 1).await, 9);
    bench.asked();
    for _ in 0..5 {
        assert!(!bench.check().await.allowed());
        let verbs: Vec<Verb> = bench.asked().into_iter().map(|(_, verb)| verb).collect();
        assert_eq!(verbs, [Verb::Peek, Verb::Peek]);
    }
    // Another user's key is charged without a peek, and alice is admitted again once `narrow` has units left.
    assert!(bench.decide(Verb::Check, &facts! { "user" => "bob" }).await.allowed());
    assert_eq!(bench.asked().len(), 2, "one call to each server");
    let narrow = &bench.store.remote().servers["narrow"].store;
    let toll = bench.policy.toll(Verb::Check, &facts! { "user" => "alice" }, 1).unwrap();
    assert!(narrow.forget(toll.get(1).key));
    assert!(bench.check().await.allowed());
    assert_eq!(bench.asked().len(), 4, "a peek and a charge at each server");
    assert_eq!(lock(&bench.store.remote().undone).len(), 1, "no other charge was undone");
}

#[tokio::test]
async fn limit_that_grants_nothing_refuses_without_charging() {
    let mut bench = Bench::new(&[("wide", 10, Deny), ("narrow", 1, Deny)]);
    let limits = vec![
        Limit::new("wide", Quota::per_day(10)).by("user"),
        Limit::new("narrow", tollkeeper_core::Allowance::Nothing).by("user"),
    ];
    bench.policy = Arc::new(Policy::new(limits).unwrap());
    assert!(!bench.check().await.allowed());
    assert!(bench.asked().iter().all(|(_, verb)| *verb == Verb::Peek));
}

#[tokio::test]
async fn dead_server_affects_only_its_own_limits() {
    for policy in [Allow, Local, Deny] {
        let bench = Bench::new(&[("well", 2, Deny), ("dead", 10, policy)]);
        bench.mood("dead", Mood::Dead);
        for number in 0..3 {
            let decision = bench.check().await;
            assert_eq!(decision.allowed(), policy != Deny && number < 2, "{policy:?} {number}");
            let by = |name| decision.limit(name).unwrap().degraded();
            assert_eq!((by("well"), by("dead")), (None, Some(policy)));
            assert_eq!(decision.charge(), None, "a degraded decision has no charge");
        }
        let refused = if policy == Deny { 3 } else { 0 };
        let left = if policy == Deny { 2 } else { 0 };
        assert_eq!(
            bench.remains("well", refused).await,
            left,
            "{policy:?}: charges of refused requests are undone"
        );
        let local = bench.store.0.local.clone();
        let toll = bench.policy.toll(Verb::Usage, &facts! { "user" => "alice" }, 1).unwrap().part(&[1]);
        let held = Decision::new(toll.clone(), local.decide(&toll)).limit("dead").unwrap().outcome();
        // The third request was refused by the server that is up, so the local store does not count it either.
        assert_eq!(10 - held.remaining, if policy == Local { 2 } else { 0 }, "{policy:?}");
    }
}

#[tokio::test]
async fn breaker_spares_only_the_dead_server() {
    let bench = Bench::new(&[("well", 100, Deny), ("dead", 100, Allow)]);
    bench.mood("dead", Mood::Dead);
    for _ in 0..20 {
        assert!(bench.check().await.allowed());
    }
    let asked = bench.asked();
    let count = |name: &str| asked.iter().filter(|(asked, _)| asked == name).count();
    assert_eq!((count("well"), count("dead")), (20, 5));
}

#[test]
fn number_of_remembered_refused_keys_is_bounded() {
    let bench = Bench::new(&[("one", 1, Deny), ("two", 1, Deny)]);
    let refused = &bench.store.0.refused;
    let of = |user: usize| {
        let user = user.to_string();
        bench.policy.toll(Verb::Check, &facts! { "user" => &user }, 1).unwrap()
    };
    let reply = {
        let mut reply = Reply::default();
        reply.push(LimitReply::Pending);
        reply
    };
    for user in 0..5 * REMEMBERED {
        let part =
            PartialToll { server: Server::default(), toll: of(user).part(&[0]), places: vec![0], id: 0 };
        refused.remember(&[(part, reply.clone())]);
        assert!(refused.any(&of(user)));
    }
    assert!(!refused.any(&of(0)), "the oldest keys are forgotten");
    assert!(refused.any(&of(5 * REMEMBERED - REMEMBERED)), "the newer keys are still remembered");
    assert!(lock(&refused.keys).iter().all(|keys| keys.len() <= REMEMBERED));
    refused.forget(&of(5 * REMEMBERED - 1));
    assert!(!refused.any(&of(5 * REMEMBERED - 1)));
}
