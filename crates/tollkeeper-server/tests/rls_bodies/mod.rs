//! Properties that must hold for any bytes as a rate limit request: here for a corpus, in `fuzz/` for millions.

use std::cell::LazyCell;
use std::pin::pin;
use std::str;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use prost::Message as _;
use tollkeeper::MemoryStore;
use tollkeeper::config::{Config, Format};
use tollkeeper_engine::api::active_limits::LimitSource;
use tollkeeper_server::service::Service;
use tollkeeper_server::store::Store;
use tollkeeper_server::transport::grpc::decoder::{MAX_DESCRIPTORS, MAX_ENTRIES, Question};
use tollkeeper_server::transport::grpc::proto::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse,
};
use tollkeeper_server::transport::grpc::rls::Rls;

const LIMITS: &str = "limits:
  - { name: all, rate: 1000/s }
  - { name: none, by: none, rate: 0/s }
  - { name: a, by: user, rate: 5/s, burst: 5 }
  - { name: b, by: [user, user.2], rate: 5/day, algorithm: fixed-window, missing: share }
  - { name: c, by: ip, rate: 5/30s, algorithm: sliding-window }
  - { name: d, by: path, rate: 5/min, algorithm: sliding-log }
  - { name: e, by: path, rate: 5/min, algorithm: leaky-bucket, mode: shadow }
  - { name: f, by: domain, rate: 100000/min, cost: tokens, when: { tokens: '*' } }
  - { name: g, by: user, algorithm: concurrency, limit: 5, ttl: 60s }
";

/// Reads these bytes as a question and answers it.
pub(crate) fn check(body: &[u8]) {
    let read = Question::read(body);
    if let Ok(question) = &read {
        same(question, body);
    }
    thread_local!(static RLS: LazyCell<Rls> = const { LazyCell::new(rls) });
    let answered = RLS.with(|rls| now(rls.answer(body, None)));
    match answered {
        Ok(answer) => {
            let question = read.expect("what was not read is not answered");
            assert_eq!(answer.statuses.len(), question.descriptors.len(), "one status for each descriptor");
            let over = |code: i32| code == 2;
            let any = answer.statuses.iter().any(|status| over(status.code));
            assert_eq!(over(answer.overall_code), any, "refused is what one of them refuses");
            assert_eq!(RateLimitResponse::decode(&answer.encode_to_vec()[..]), Ok(answer));
        }
        Err(status) => {
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
            assert!((1..4_096).contains(&status.message().len()), "{status}");
        }
    }
}

/// What is read is what prost reads, who insists on UTF-8 in values.
fn same(question: &Question<'_>, body: &[u8]) {
    assert!(question.descriptors.len() <= MAX_DESCRIPTORS);
    let mut values = question.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    if values.any(|(_, value)| str::from_utf8(value).is_err()) {
        return;
    }
    // It wants UTF-8 of an earlier value too, one that a later one in the same entry has replaced.
    let Ok(theirs) = RateLimitRequest::decode(body) else { return };
    assert_eq!(question.domain, theirs.domain);
    assert_eq!(question.hits_addend, theirs.hits_addend);
    assert_eq!(question.descriptors.len(), theirs.descriptors.len());
    for (ours, theirs) in question.descriptors.iter().zip(&theirs.descriptors) {
        assert!(ours.entries.len() <= MAX_ENTRIES);
        assert_eq!(ours.hits_addend, theirs.hits_addend);
        assert_eq!(ours.is_negative_hits, theirs.is_negative_hits);
        assert_eq!(ours.entries.len(), theirs.entries.len());
        for (index, ((key, value), entry)) in ours.entries.iter().zip(&theirs.entries).enumerate() {
            let earlier = theirs.entries[..index].iter().filter(|other| other.key == entry.key).count();
            match earlier {
                0 => assert_eq!(*key, entry.key),
                _ => assert_eq!(*key, format!("{}.{}", entry.key, earlier + 1)),
            }
            assert_eq!(*value, entry.value.as_bytes());
        }
    }
}

fn rls() -> Rls {
    let (config, _) =
        Config::parse("limits.yaml", Format::Yaml, LIMITS.as_bytes(), &|_| None).expect("valid limits");
    let service = Service::new(config, LimitSource::File, Store::Memory(MemoryStore::default()));
    Rls::new(Arc::new(service.expect("nothing to be read")))
}

/// Polls a future that is ready at once, because the store is in memory.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("it waits for something"),
    }
}
