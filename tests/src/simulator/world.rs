//! Plays a scenario: takes the next event, sets the clocks, and polls the tasks that it woke.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tollkeeper::store::{Failure, FailureKind, Key, RemoteResult};
use tollkeeper::{Clock, Correction, Costs, DecidedToll, Decision, Facts, Limiter, Slot, Span, Time, facts};

use super::checker::{Answered, Bounded, Checker};
use super::client::{Answer, Call, Client, Op, Pending, Wire};
use super::executor::{Executor, Task, lock};
use super::heap::Heap;
use super::history::StoreTime;
use super::network::{Fate, Leg};
use super::node::{Environment, Node, Spawn, Stack};
use super::scenario::{Request, RequestKind, START, Scenario, Then, What};
use super::server::Server;
use super::shrink::Kept;
use super::tally::{Kind, Tally};

/// One simulation.
pub struct World<'s> {
    scenario: &'s Scenario,
    stack: Stack,
    server: &'s mut dyn Server,
    now: u64,
    /// How far the store's clock was set forward, and back.
    forward: u64,
    back: u64,
    steps_back: u64,
    heap: Heap<Event>,
    executor: Executor,
    nodes: Vec<Node>,
    wire: Arc<Wire>,
    spawned: Arc<Mutex<Vec<(usize, SendTask)>>>,
    spawns: u64,
    book: Rc<RefCell<Book>>,
    /// The number of the next message of each node, and the latest that has arrived.
    sent: Vec<(u64, u64)>,
    /// Calls that are not answered yet.
    flying: Vec<Flying>,
    /// When each key, and when all keys were changed otherwise than by tolls.
    changed: BTreeMap<Vec<u8>, u64>,
    changed_all: u64,
}

/// A call that is not answered yet.
#[derive(Debug)]
struct Flying {
    node: usize,
    pending: Arc<Pending>,
    keys: Vec<Vec<u8>>,
    sent: u64,
    /// When its answer was first seen. The node reads it at that instant, but perhaps after another request.
    answered: Option<u64>,
}

type SendTask = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// What the tasks of clients share with the world.
#[derive(Debug)]
struct Book {
    checker: Checker,
    /// The store's clock.
    store_time: StoreTime,
    /// The disturbances of each node.
    disturbances: Vec<u64>,
    /// The calls of each task.
    calls: BTreeMap<u64, Calls>,
}

/// The calls of one task.
#[derive(Debug, Default)]
struct Calls {
    /// How many it made, and how many tolls among them.
    made: u64,
    tolls: u64,
    /// The IDs under which the store charged it.
    charged: Vec<u64>,
    /// Whether the network delivered one of them twice.
    delivered_twice: bool,
}

#[derive(Debug)]
enum Event {
    /// The action of this index.
    Act(usize),
    /// A call arrives at the store.
    Arrive(Box<Call>, Leg, u64),
    /// A reply arrives at a node.
    Reply(usize, Arc<Pending>, RemoteResult<Answer>),
    /// The client of a node goes away, and with it this task.
    Leave(usize, u64),
    /// A node resumes.
    Resume(usize),
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Tasks that nodes spawn have numbers from here on; the others have the number of their action.
const SPAWNED: u64 = 1 << 32;

impl<'s> World<'s> {
    /// Plays the actions of a scenario that are kept, until nothing happens any more.
    pub fn run(
        scenario: &'s Scenario,
        kept: &Kept,
        stack: Stack,
        server: &'s mut dyn Server,
    ) -> Result<Tally, Violation> {
        let mut world = World {
            scenario,
            stack,
            server,
            now: 0,
            forward: 0,
            back: 0,
            steps_back: 0,
            heap: Heap::default(),
            executor: Executor::default(),
            nodes: Vec::new(),
            wire: Arc::default(),
            spawned: Arc::default(),
            spawns: 0,
            book: Rc::new(RefCell::new(Book {
                checker: Checker::new(scenario),
                store_time: StoreTime { shown: START, passed: START, steps_back: 0 },
                disturbances: vec![0; scenario.nodes],
                calls: BTreeMap::new(),
            })),
            sent: vec![(0, 0); scenario.nodes],
            flying: Vec::new(),
            changed: BTreeMap::new(),
            changed_all: 0,
        };
        for node in 0..scenario.nodes {
            let started = world.start(node, 0, START, 0);
            world.nodes.push(started);
            if scenario.drift[node] != 0 {
                world.count(Kind::Drift);
            }
        }
        for (index, action) in scenario.actions.iter().enumerate().filter(|(index, _)| kept.has(*index)) {
            world.heap.add(action.at, Event::Act(index));
        }
        world.play();
        let mut book = world.book.borrow_mut();
        let pending = world.executor.pending().count();
        if pending > 0 {
            book.checker.violate(|| format!("{pending} tasks never end"));
        }
        book.checker.finish();
        match book.checker.violation() {
            Some(violation) => Err(Violation(violation.to_owned())),
            None => Ok(book.checker.tally.clone()),
        }
    }

    fn play(&mut self) {
        loop {
            self.book.borrow_mut().store_time = self.store_time();
            self.poll_tasks();
            if self.book.borrow().checker.violation().is_some() {
                return;
            }
            let wake = self.nodes.iter_mut().filter_map(Node::next_wake).min();
            match (self.heap.next_time(), wake) {
                (None, None) => return,
                (Some(event), wake) if wake.is_none_or(|wake| event <= wake) => {
                    let (at, event) = self.heap.pop().expect("there is one");
                    self.stop_clock(&event);
                    self.now = at.max(self.now);
                    self.happen(event);
                }
                (_, Some(wake)) => self.now = wake.max(self.now),
                (Some(_), None) => unreachable!("without a wake the event is next"),
            }
            // The clocks of other nodes are set when a task reads them.
            for node in &mut self.nodes {
                if node.next_wake().is_some_and(|wake| wake <= self.now) {
                    node.tick(self.now);
                }
            }
        }
    }

    /// A task that is dropped, or a node that pauses, has seen the time of the last event, not of this one.
    fn stop_clock(&mut self, event: &Event) {
        let node = match event {
            Event::Leave(node, _) => *node,
            Event::Act(index) if let What::Pause(node, _) = self.scenario.actions[*index].what => node,
            _ => return,
        };
        if !self.nodes[node].is_paused(self.now) {
            self.nodes[node].tick(self.now);
        }
    }

    fn poll_tasks(&mut self) {
        while let Some((task, node)) = self.executor.next_woken() {
            if self.nodes[node].is_paused(self.now) {
                self.nodes[node].set_aside.push(task);
                continue;
            }
            self.nodes[node].tick(self.now);
            self.wire.enter(task);
            self.executor.poll(task);
            for call in self.wire.take() {
                self.send(call);
            }
            self.judge_bounds();
            let spawned = std::mem::take(&mut *lock(&self.spawned));
            for (node, future) in spawned {
                self.spawns += 1;
                self.executor.spawn(SPAWNED + self.spawns, node, future);
            }
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Act(index) => self.act(index),
            Event::Arrive(call, leg, number) => self.arrive(*call, leg, number),
            Event::Reply(node, pending, answer) => {
                if self.now >= self.nodes[node].cut_off_until
                    && let (Ok(Answer::Granted(_)), Some(key)) = (&answer, self.key_of(&pending))
                {
                    self.book.borrow_mut().checker.node_granted(node, &key);
                }
                if self.now < self.nodes[node].cut_off_until {
                    return self.count(Kind::LostReply);
                }
                pending.answer(answer);
            }
            Event::Leave(_, task) => {
                if self.executor.abort(task) {
                    self.count(Kind::Abandoned);
                }
            }
            Event::Resume(node) => {
                self.nodes[node].tick(self.now);
                let woken = std::mem::take(&mut self.nodes[node].set_aside);
                self.executor.wake(woken);
            }
        }
    }

    fn act(&mut self, index: usize) {
        match self.scenario.actions[index].what {
            What::Request(request) => self.request(index as u64, request),
            What::Partition(node, span) => {
                self.nodes[node].cut_off_until = self.now + span;
                self.count(Kind::Partition);
            }
            What::Pause(node, span) => {
                self.nodes[node].paused_until = self.now + span;
                self.disturb(node);
                self.heap.add(self.now + span, Event::Resume(node));
                self.count(Kind::Pause);
            }
            What::Crash(node, off) => {
                self.executor.abort_all_of(node);
                let (shows, incarnation) = (self.nodes[node].shows(self.now), self.nodes[node].incarnation);
                self.nodes[node] = self.start(node, self.now, shows + off, incarnation + 1);
                self.book.borrow_mut().checker.node_started(node);
                self.flying.retain(|flying| flying.node != node);
                self.count(Kind::Crash);
            }
            What::Jump(node, by) => {
                let now = self.now;
                self.nodes[node].jump(now, by);
                self.disturb(node);
                self.count(Kind::ClockJump);
            }
            What::Step(by) => {
                let far = by.unsigned_abs();
                self.changed_all = self.now;
                if by >= 0 {
                    self.forward += far;
                    self.book.borrow_mut().checker.store_stepped_forward();
                    self.count(Kind::StoreForward);
                } else {
                    self.back += far;
                    self.steps_back += 1;
                    self.book.borrow_mut().checker.store_stepped_back();
                    self.count(Kind::StoreBack);
                }
            }
            What::Flush => {
                self.server.flush();
                self.changed_all = self.now;
                self.book.borrow_mut().checker.store_flushed();
                self.count(Kind::Flush);
            }
            What::Copy => {
                self.server.copy();
                self.book.borrow_mut().checker.store_copied();
            }
            What::Failover => {
                self.server.failover();
                self.changed_all = self.now;
                self.book.borrow_mut().checker.store_failed_over();
                self.count(Kind::Failover);
            }
            What::Limits(node, version) => {
                let limiter = &self.nodes[node].limiter;
                let sum = |limiter: &Limiter| {
                    let policy = limiter.policy();
                    let rules = policy.rules().iter().filter_map(|rule| rule.plain_quota());
                    rules.map(|(quota, _)| quota.count() + quota.burst()).sum::<u64>()
                };
                let before = sum(limiter);
                limiter.replace(self.scenario.versions[version].clone()).expect("valid limits");
                let after = sum(limiter);
                if after > before {
                    self.count(Kind::Raised);
                } else if after < before {
                    self.count(Kind::Lowered);
                }
            }
        }
    }

    fn start(&self, node: usize, now: u64, shows: u64, incarnation: u64) -> Node {
        let client = Client::new(node, incarnation, Arc::clone(&self.wire));
        let spawned = Arc::clone(&self.spawned);
        let spawn: Spawn = Arc::new(move |task| lock(&spawned).push((node, task)));
        let limits = self.scenario.versions[0].clone();
        let (settings, drift) = (self.scenario.settings, self.scenario.drift[node]);
        let stack = |clock: Clock| (self.stack)(Environment { client, clock, settings, spawn });
        let mut node = Node::start(limits, now, shows, drift, stack);
        node.incarnation = incarnation;
        node
    }

    fn request(&mut self, task: u64, request: Request) {
        let node = &self.nodes[request.node];
        let visit = Visit {
            task,
            request,
            limiter: node.limiter.clone(),
            clock: Clock::manual(&node.clock),
            incarnation: node.incarnation,
            deadline: Span::from(self.scenario.settings.deadline),
            book: Rc::clone(&self.book),
        };
        self.count(Kind::Checks);
        self.executor.spawn(task, request.node, Box::pin(visit.play()) as Task);
        if let Some(after) = request.gone {
            self.heap.add(self.now + after, Event::Leave(request.node, task));
        }
    }

    /// Judges the refusals that nodes derived from what they knew.
    fn judge_bounds(&mut self) {
        let bounded = std::mem::take(&mut self.book.borrow_mut().checker.bounded);
        let deadline = Span::from(self.scenario.settings.deadline).as_micros() + 1_000;
        let (now, nodes) = (self.now, &self.nodes);
        self.flying.retain_mut(|flying| {
            if flying.pending.is_answered() && !nodes[flying.node].is_paused(now) {
                flying.answered.get_or_insert(now);
            }
            flying.answered.is_none_or(|at| at == now) && now < flying.sent + deadline
        });
        for Bounded { node, toll } in bounded {
            let key = toll.get(0).key.to_bytes();
            self.count(Kind::Bounded);
            let flies = self.flying.iter().any(|flying| flying.node == node && flying.keys.contains(&key));
            let changed = self.changed.get(&key).copied().unwrap_or(0).max(self.changed_all);
            // With several rates, another node may have drained the state faster than this one knows.
            let has_rates = self.scenario.several_rates.contains(toll.get(0).rule.name());
            // Refunds on other nodes, resets and the like can make a bound wrong for 150 ms, by the node's clock.
            if flies || has_rates || self.now < changed + 151_000 {
                continue;
            }
            self.count(Kind::BoundJudged);
            let now = Time::from_micros(self.store_time().shown);
            let reply = self.server.decide(&toll.clone().into_peek(), now, 0);
            if reply.limits()[0].allowed() {
                let due = format!("{:?}", toll.get(0));
                self.book.borrow_mut().checker.violate(|| {
                    format!("node {node} refused at {} what the store would admit: {due}", now.as_micros())
                });
            }
        }
    }

    /// The key of a lease on its way.
    fn key_of(&self, pending: &Arc<Pending>) -> Option<Vec<u8>> {
        let flying = self.flying.iter().find(|flying| Arc::ptr_eq(&flying.pending, pending))?;
        flying.keys.first().cloned()
    }

    /// Remembers a call until it is answered, and checks what it asks for.
    fn take_off(&mut self, call: &Call, number: u64) {
        let keys = match &call.op {
            Op::Decide(toll, _) => toll.dues().map(|due| due.key.to_bytes()).collect(),
            Op::Lease(request) => {
                let key = request.toll.get(0).key.to_bytes();
                let mut book = self.book.borrow_mut();
                let recent = self.nodes[call.node].clock.now().as_micros();
                let demand = book.checker.demand(call.node, &key, recent.saturating_sub(1_000_000));
                if request.want > demand {
                    let want = request.want;
                    book.checker.violate(|| format!("a lease asks for {want} units, {demand} were used"));
                }
                if number > 1 {
                    book.checker.violate(|| "a lease was asked for again".to_owned());
                }
                vec![key]
            }
            _ => return,
        };
        let (node, pending, sent) = (call.node, Arc::clone(&call.pending), self.now);
        self.flying.push(Flying { node, pending, keys, sent, answered: None });
    }

    /// Gives a call to the network.
    fn send(&mut self, call: Call) {
        let number = {
            let mut book = self.book.borrow_mut();
            let calls = book.calls.entry(call.task).or_default();
            calls.made += 1;
            calls.tolls += u64::from(matches!(call.op, Op::Decide(..)));
            calls.made
        };
        self.take_off(&call, number);
        if self.now < self.nodes[call.node].cut_off_until {
            return self.count(Kind::LostRequest);
        }
        let fate = self.scenario.weather.fate(self.scenario.seed, call.task, number);
        let legs = match fate {
            Fate::Rejected => {
                self.count(Kind::Rejected);
                call.pending.answer(Err(Failure::new(FailureKind::Connection, "connection refused")));
                return;
            }
            Fate::Sent(legs) => legs,
        };
        if legs.is_empty() {
            self.count(Kind::LostRequest);
        }
        if legs.len() > 1 {
            self.count(Kind::Duplicate);
            self.book.borrow_mut().calls.entry(call.task).or_default().delivered_twice = true;
        }
        let (next, _) = &mut self.sent[call.node];
        *next += 1;
        let order = *next;
        let mut call = Some(Box::new(call));
        for (index, leg) in legs.iter().enumerate() {
            let is_last = index + 1 == legs.len();
            let delivered = if is_last { call.take() } else { call.clone() };
            let delivered = delivered.expect("only the last delivery takes it");
            self.heap.add(self.now + leg.there, Event::Arrive(delivered, *leg, order));
        }
    }

    /// The store runs a call.
    fn arrive(&mut self, call: Call, leg: Leg, order: u64) {
        let (_, latest) = &mut self.sent[call.node];
        if order < *latest {
            self.count(Kind::Reordered);
        } else {
            *latest = order;
        }
        let at = self.store_time();
        let now = Time::from_micros(at.shown);
        let expired = self.server.expire(now);
        let mut book = self.book.borrow_mut();
        (0..expired).for_each(|_| book.checker.tally.count(Kind::Expired));
        let renew = matches!(call.op, Op::Renew(_));
        let answer = match call.op {
            Op::Decide(toll, id) => {
                let reply = Box::new(self.server.decide(&toll, now, id));
                let decided = DecidedToll::new(*toll, (*reply).clone());
                if book.checker.store_decided(&decided, id, at) {
                    book.calls.entry(call.task).or_default().charged.push(id);
                }
                Answer::Decided(reply)
            }
            Op::Lease(request) => {
                let grant = self.server.lease(&request, now);
                if grant.units > 0 {
                    book.checker.store_granted(&request);
                }
                Answer::Granted(grant)
            }
            Op::Correct(charge, corrections) => {
                let result = self.server.correct(&charge, &corrections, now);
                for item in charge.items() {
                    self.changed.insert(item.key().to_bytes(), self.now);
                }
                book.checker.store_corrected(&charge, &corrections, result, at);
                Answer::Corrected(result)
            }
            Op::Release(slot) | Op::Renew(slot) => {
                let held = self.server.handle(&slot, renew, now);
                if held {
                    book.checker.store_handled(&slot, renew, at);
                    book.checker.tally.count(Kind::Slots);
                }
                Answer::Held(held)
            }
            Op::Forget(key) => {
                let known = self.server.forget(&key);
                book.checker.store_forgot(&key);
                self.changed.insert(key, self.now);
                Answer::Held(known)
            }
        };
        drop(book);
        match leg.back {
            None => self.count(Kind::LostReply),
            Some(back) => {
                let deadline = Span::from(self.scenario.settings.deadline).as_micros();
                if leg.there + back > deadline {
                    self.count(Kind::Late);
                }
                self.heap.add(self.now + back, Event::Reply(call.node, call.pending, Ok(answer)));
            }
        }
    }

    fn store_time(&self) -> StoreTime {
        let passed = START + self.now + self.forward;
        StoreTime { shown: passed - self.back, passed, steps_back: self.steps_back }
    }

    fn disturb(&mut self, node: usize) {
        self.nodes[node].disturbances += 1;
        self.book.borrow_mut().disturbances[node] += 1;
    }

    fn count(&mut self, kind: Kind) {
        self.book.borrow_mut().checker.tally.count(kind);
    }
}

impl fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("now", &self.now).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// One request, and what its client does afterwards.
struct Visit {
    task: u64,
    request: Request,
    limiter: Limiter,
    clock: Clock,
    incarnation: u64,
    deadline: Span,
    book: Rc<RefCell<Book>>,
}

/// How often a client repeats a call that the store did not answer.
const ATTEMPTS: usize = 3;

impl Visit {
    async fn play(self) {
        let Request { user, tenant, then, .. } = self.request;
        let (user, tenant) = (format!("user-{user}"), format!("tenant-{tenant}"));
        let plan = ["free", "pro"][usize::from(self.request.pro)];
        let facts = facts! { "user" => &user[..], "tenant" => &tenant[..], "plan" => plan };
        let (began, disturbances) = (self.clock.now(), self.disturbances());
        let asked = self.book.borrow().store_time;
        let decision = self.decide(&facts).await;
        let took = self.clock.now().since(began);
        self.record(&decision, asked, took, self.disturbances() != disturbances);
        let Some((pause, then)) = then else { return };
        self.clock.sleep(Span::from_micros(pause)).await;
        self.follow_up(&decision, then, &facts).await;
    }

    async fn decide(&self, facts: &Facts<'_>) -> Decision {
        let (limiter, cost) = (&self.limiter, self.request.cost);
        let decided = match self.request.verb {
            RequestKind::Check => limiter.check(facts).cost(cost).await,
            RequestKind::Peek => limiter.peek(facts).cost(cost).await,
            RequestKind::Usage => limiter.usage(facts).await,
            RequestKind::Reserve => limiter.reserve(facts, Span::from_secs(1)).cost(cost).await,
            // Without the guard: the scenario says when the slot is released.
            RequestKind::Acquire => {
                let acquired = limiter.acquire(facts).cost(cost).decide_with(|decided| decided.to_decision());
                match acquired {
                    Ok(decision) => Ok(decision.await),
                    Err(error) => Err(error),
                }
            }
        };
        decided.expect("a valid request")
    }

    fn record(&self, decision: &Decision, asked: StoreTime, took: Span, disturbed: bool) {
        let mut book = self.book.borrow_mut();
        let book = &mut *book;
        let calls = book.calls.get(&self.task);
        let answered = Answered {
            node: self.request.node,
            incarnation: self.incarnation,
            asked,
            local: self.clock.now().as_micros(),
            took: took.as_micros(),
            // A clock that drifts reaches the deadline up to a microsecond late.
            deadline: self.deadline.as_micros() + 1,
            disturbed,
            calls: calls.map_or(0, |calls| calls.tolls),
            charged: calls.map_or(&[], |calls| &calls.charged),
            delivered_twice: calls.is_some_and(|calls| calls.delivered_twice),
        };
        book.checker.node_decided(&answered, decision);
    }

    async fn follow_up(&self, decision: &Decision, then: Then, facts: &Facts<'_>) {
        match then {
            Then::Release | Then::Renew => {
                let Some(slot) = decision.slot() else { return };
                self.handle(&slot, then == Then::Renew, decision.degraded().is_some()).await;
            }
            Then::Forget => {
                let keys = self.limiter.policy().keys("limit-0", facts).expect("a valid request");
                for key in keys {
                    let key = Key::from_bytes(&key).expect("a key").to_bytes();
                    let mut book = self.book.borrow_mut();
                    book.checker.node_forgot(self.request.node, self.incarnation, &key);
                }
                // Without an answer the store may have forgotten it or not; its own report says which.
                let _ = self.limiter.forget("limit-0", facts).await;
            }
            Then::Refund | Then::RefundPart(_) | Then::Settle(_) => {
                let Some(charge) = decision.charge() else { return };
                for _ in 0..ATTEMPTS {
                    self.book.borrow_mut().checker.node_corrects(&charge, &self.limiter.policy());
                    let corrected = match then {
                        Then::Refund => Ok(self.limiter.refund(&charge).await),
                        Then::RefundPart(part) => {
                            self.limiter.refund_part(&charge, Costs::Request(part)).await
                        }
                        Then::Settle(cost) => self.limiter.settle(&charge, Costs::Request(cost)).await,
                        _ => unreachable!("handled above"),
                    };
                    // A part that is larger than the charge is an error of the client.
                    if corrected != Ok(Correction::Failed) {
                        return;
                    }
                    self.clock.sleep(Span::from_millis(20)).await;
                }
            }
        }
    }

    async fn handle(&self, slot: &Slot, renew: bool, is_local: bool) {
        for _ in 0..ATTEMPTS {
            let handled = match renew {
                true => self.limiter.renew(slot).await,
                false => self.limiter.release(slot).await,
            };
            match handled {
                Ok(held) => {
                    if held && is_local {
                        let (node, local) = (self.request.node, self.clock.now().as_micros());
                        let mut book = self.book.borrow_mut();
                        book.checker.node_handled((node, self.incarnation), slot, renew, local);
                    }
                    return;
                }
                Err(_) => self.clock.sleep(Span::from_millis(20)).await,
            }
        }
    }

    fn disturbances(&self) -> u64 {
        self.book.borrow().disturbances[self.request.node]
    }
}
