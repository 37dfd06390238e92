//! The steps of a middleware: visits, tickets, slots and refunds by status.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::sync::{Arc, mpsc};
use std::time::Instant;

use tollkeeper_engine::{
    ApiCall, ConfigSource, Engine, EngineEvent, EventKind, Format, Options, VisitBody, VisitRequest, close,
    get, open,
};
use tollkeeper_tests::redis::{PATIENCE, Server};

const GET: &[u8] = b"GET\n/search?q=a\n192.0.2.7\nHost\nexample.com\nX-User\nalice";
const LOGIN: &[u8] = b"POST\n/login\n192.0.2.7\nContent-Type\napplication/json";

/// An engine with a manual clock, closed at the end.
struct Opened {
    number: u32,
    engine: Arc<Engine>,
    events: mpsc::Receiver<EngineEvent>,
}

impl Opened {
    fn new(limits: &str) -> Opened {
        Opened::with(limits, |options| options.at = Some(0.0))
    }

    fn with(limits: &str, change: impl FnOnce(&mut Options)) -> Opened {
        let (send, events) = mpsc::channel();
        // A busy machine must not make Redis late.
        let settings = "redis: { deadline: 1m }\nhttp: { routes: [/search, /login] }";
        let text = format!("{settings}\nlimits: [{limits}]");
        let mut options = Options::new(ConfigSource::Text { format: Format::Yaml, text });
        options.listener =
            Some(Arc::new(move |event: &EngineEvent| send.send(event.clone()).unwrap_or_default()));
        change(&mut options);
        let number = open(options).unwrap();
        Opened { number, engine: get(number).unwrap(), events }
    }

    /// The lines of the answer.
    fn visit(&self, visit: VisitRequest) -> Vec<String> {
        self.engine.visit(visit).wait().split('\n').map(str::to_owned).collect()
    }

    fn get(&self, head: &[u8]) -> Vec<String> {
        self.visit(VisitRequest::new(head.to_vec()))
    }

    fn remaining(&self, facts: &str) -> u64 {
        let usage = self.engine.ask(ApiCall::Usage, format!("{{\"facts\":{facts}}}").into(), false).wait();
        let usage: serde_json::Value = serde_json::from_str(&usage.text).unwrap();
        usage["limits"][0]["remaining"].as_u64().unwrap()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        close(self.number);
    }
}

fn ticket(lines: &[String]) -> u64 {
    lines[1].parse().unwrap()
}

#[test]
fn admitted_and_refused_requests_get_headers() {
    let opened = Opened::new("{ name: per-ip, by: ip, rate: 60/hour, burst: 1 }");
    let passed = opened.get(GET);
    assert_eq!(passed[..5], ["pass", "0", "0", "", ""]);
    assert_eq!(passed[5..9], ["ratelimit-policy", "\"per-ip\";q=1;w=60", "ratelimit", "\"per-ip\";r=0;t=60"]);
    let refused = opened.visit(VisitRequest { decision: true, ..VisitRequest::new(GET.to_vec()) });
    assert_eq!(refused[..3], ["429", "0", "0"]);
    let problem: serde_json::Value = serde_json::from_str(&refused[3]).unwrap();
    assert_eq!((&problem["status"], &problem["violated-policies"][0]), (&429.into(), &"per-ip".into()));
    let decision: serde_json::Value = serde_json::from_str(&refused[4]).unwrap();
    assert_eq!((&decision["allowed"], &decision["retry_after"]), (&false.into(), &60.0.into()));
    let headers: Vec<&str> = refused[5..].iter().step_by(2).map(String::as_str).collect();
    assert!(headers.contains(&"retry-after") && headers.contains(&"content-type"), "{headers:?}");
}

#[test]
fn facts_of_the_application_replace_those_of_the_request() {
    let opened = Opened::new("{ name: per-user, by: user, rate: 60/hour, burst: 5 }");
    let own = |own: &str| opened.visit(VisitRequest { own: own.into(), ..VisitRequest::new(GET.to_vec()) });
    assert_eq!(own(r#"{"facts":{"user":"bob","unused":1},"cost":4}"#)[0], "pass");
    assert_eq!(own(r#"{"facts":{"user":"bob"},"cost":4}"#)[0], "429");
    assert_eq!(own(r#"{"facts":{"user":"carol"}}"#)[0], "pass");
    assert_eq!(own("")[0], "pass", "a limit by an absent fact does not apply");
    let invalid = own(r#"{"facts":{"user":null}}"#);
    assert_eq!(invalid[0], "500");
    assert!(invalid[3].contains("null is not a value"), "{}", invalid[3]);
    assert_eq!(own(r#"{"cost":0}"#)[0], "400");
}

#[test]
fn invalid_head_is_refused() {
    let opened = Opened::new("{ name: per-ip, by: ip, rate: 60/hour, burst: 5 }");
    assert_eq!(opened.get(b"GET\n/a b\n192.0.2.7")[0], "400");
    let unknown = opened.get(b"GET\n/\n");
    assert_eq!(unknown[0], "500");
    assert!(unknown[3].contains("the peer address is unknown"), "{}", unknown[3]);
    assert_eq!(opened.remaining(r#"{"ip":"192.0.2.7"}"#), 5, "nothing was charged");
}

/// Test clients and Unix sockets have no address: only limits by `ip` need one.
#[test]
fn peer_without_an_address_is_unknown() {
    let head = b"GET\n/\ntestclient\nX-User\nalice";
    let by_ip = Opened::new("{ name: per-ip, by: ip, rate: 60/hour, burst: 5 }").get(head);
    assert_eq!(by_ip[0], "500");
    assert!(by_ip[3].contains("the peer address is unknown"), "{}", by_ip[3]);
    let by_method = Opened::new("{ name: per-method, by: method, rate: 60/hour, burst: 1 }");
    assert_eq!((&*by_method.get(head)[0], &*by_method.get(head)[0]), ("pass", "429"));
}

#[test]
fn body_is_asked_for_only_if_a_limit_needs_it() {
    let opened = Opened::new("{ name: login, by: body.email, when: { route: /login }, rate: 1/hour }");
    assert_eq!(opened.get(GET)[0], "pass");
    assert_eq!(opened.get(LOGIN)[..4], ["body", "0", "0", "limit `login` needs `body.email`"]);
    let login = |body| opened.visit(VisitRequest { body, ..VisitRequest::new(LOGIN.to_vec()) })[0].clone();
    assert_eq!(login(VisitBody::Raw(br#"{"email":"a@example.com"}"#.to_vec())), "pass");
    assert_eq!(login(VisitBody::Json(br#"{"email":"a@example.com"}"#.to_vec())), "429");
    let form = b"POST\n/login\n192.0.2.7\ncontent-type\napplication/x-www-form-urlencoded".to_vec();
    let form = |body| opened.visit(VisitRequest { body, ..VisitRequest::new(form.clone()) })[0].clone();
    assert_eq!(form(VisitBody::Raw(b"email=b%40example.com".to_vec())), "pass");
    assert_eq!(form(VisitBody::Json(br#"{"email":"b@example.com"}"#.to_vec())), "429");
    assert_eq!(login(VisitBody::TooLarge), "413");
    assert_eq!(login(VisitBody::Raw(vec![b' '; 65_537])), "413");
    assert_eq!(login(VisitBody::Broken), "400");
}

#[test]
fn failed_logins_count_and_others_are_refunded() {
    let limit =
        "{ name: login, by: ip, rate: 2/hour, algorithm: fixed-window, deduct_when: { status: [401] } }";
    let opened = Opened::new(limit);
    for _ in 0..5 {
        let passed = opened.get(LOGIN);
        assert_eq!(passed[0], "pass");
        assert!(opened.engine.answered(ticket(&passed), 200));
        assert!(
            !opened.engine.answered(ticket(&passed), 401),
            "a ticket without a slot ends with its answer"
        );
    }
    for _ in 0..2 {
        assert!(opened.engine.answered(ticket(&opened.get(LOGIN)), 401));
    }
    assert_eq!(opened.get(LOGIN)[0], "429");
}

#[test]
fn slots_are_held_until_the_response_ends() {
    let opened = Opened::new("{ name: exports, by: ip, algorithm: concurrency, limit: 1, ttl: 60s }");
    let first = opened.get(GET);
    assert_eq!(opened.get(GET)[0], "429");
    assert!(opened.engine.answered(ticket(&first), 200));
    assert_eq!(opened.get(GET)[0], "429", "the body is still being sent");
    assert!(opened.engine.gone(ticket(&first)) && !opened.engine.gone(ticket(&first)));
    assert_eq!(opened.get(GET)[0], "pass");
}

/// A request that never reports its end is dropped after ten minutes, with an event.
#[test]
fn forgotten_ticket_is_dropped_with_an_event() {
    let limit =
        "{ name: login, by: ip, rate: 9/hour, algorithm: fixed-window, deduct_when: { status: [401] } }";
    let opened = Opened::new(limit);
    let forgotten = ticket(&opened.get(LOGIN));
    opened.engine.advance(599.0).unwrap();
    let kept = ticket(&opened.get(LOGIN));
    opened.engine.advance(1.0).unwrap();
    opened.get(LOGIN);
    let event = opened.events.recv_timeout(PATIENCE).unwrap();
    assert_eq!(event.kind, EventKind::Error);
    assert!(event.message.starts_with("forgot 1 admitted requests"), "{}", event.message);
    assert!(!opened.engine.answered(forgotten, 200) && opened.engine.answered(kept, 200));
}

/// A request that holds a slot and never reports its end loses the slot after ten minutes, without another request.
#[test]
fn forgotten_slot_is_released_after_ten_minutes() {
    let opened = Opened::new("{ name: exports, by: ip, algorithm: concurrency, limit: 1, ttl: 1h }");
    let forgotten = ticket(&opened.get(GET));
    opened.engine.advance(599.0).unwrap();
    assert_eq!(opened.get(GET)[0], "429");
    opened.engine.advance(1.0).unwrap();
    let event = opened.events.recv_timeout(PATIENCE).unwrap();
    assert!(event.message.starts_with("forgot 1 admitted requests"), "{}", event.message);
    assert!(!opened.engine.gone(forgotten));
    assert_eq!(opened.get(GET)[0], "pass");
}

/// On Redis a slot is renewed while its request runs.
#[test]
fn slot_on_redis_is_renewed() {
    let server = Server::start();
    let mut client = server.connect();
    let slots = "{ name: exports, by: ip, algorithm: concurrency, limit: 1, ttl: 4s }";
    let opened = Opened::with(slots, |options| options.store = Some(server.url()));
    assert_eq!(opened.get(GET)[0], "pass");
    // The stored state has the time at which the slot ends: only a renewal changes it.
    let mut states = || -> Vec<_> {
        let is_state = |name: &Vec<u8>| name.windows(7).any(|part| part == b"exports");
        let names: Vec<Vec<u8>> = client.keys().into_iter().map(|(name, _)| name).filter(is_state).collect();
        names.iter().map(|name| client.call(&[b"DUMP", name]).unwrap()).collect()
    };
    let (began, first) = (Instant::now(), states());
    let changed = loop {
        let states = states();
        if states != first {
            break states;
        }
        assert!(began.elapsed() < PATIENCE, "the slot was not renewed");
    };
    assert_eq!((first.len(), changed.len()), (1, 1), "{first:?}, then {changed:?}");
}

#[test]
fn closed_engine_releases_its_slots_on_redis() {
    let server = Server::start();
    server.connect();
    let slots = "{ name: exports, by: ip, algorithm: concurrency, limit: 1, ttl: 1h }";
    let opened = || Opened::with(slots, |options| options.store = Some(server.url()));
    let (one, two) = (opened(), opened());
    assert_eq!((&*one.get(GET)[0], &*two.get(GET)[0]), ("pass", "429"));
    drop(one);
    let began = Instant::now();
    while two.get(GET)[0] != "pass" {
        assert!(began.elapsed() < PATIENCE, "the slot was not released");
    }
}
