use std::pin::pin;

use futures_util::poll;
use tollkeeper::Percent;

use super::*;

fn fixed(limit: u32) -> GateSettings {
    GateSettings { limit: LimitSettings::Fixed(limit), ..GateSettings::default() }
}

#[tokio::test(start_paused = true)]
async fn request_above_the_limit_is_shed() {
    let gate = Gate::new(fixed(2));
    let first = gate.enter(None).await.expect("free");
    let _second = gate.enter(None).await.expect("free");
    assert_eq!(&*gate.enter(None).await.unwrap_err().priority, "normal");
    drop(first);
    assert!(gate.enter(None).await.is_ok());
    let view = gate.view();
    assert_eq!((view.limit, view.in_flight, view.shed["normal"]), (2, 1, 1));
}

/// Of 10 slots, low may fill 7, normal 9 and high all. A priority that is not listed is normal.
#[tokio::test(start_paused = true)]
async fn priorities_fill_their_share_of_the_limit() {
    let gate = Gate::new(GateSettings { priorities: Priorities::with([]), ..fixed(10) });
    let mut permit = Vec::new();
    for (priority, slots) in [(Some("low"), 7), (Some("unknown"), 2), (None, 0), (Some("high"), 1)] {
        for _ in 0..slots {
            permit.push(gate.enter(priority).await.expect("within its share"));
        }
        assert!(gate.enter(priority).await.is_err(), "{priority:?}");
    }
    let shed = gate.view().shed;
    assert_eq!((shed["low"], shed["normal"], shed["high"]), (1, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn every_priority_may_have_one_request() {
    let priorities = Priorities::with([("batch".to_owned(), Percent::new(1))]);
    let gate = Gate::new(GateSettings { priorities, ..fixed(3) });
    let batch = gate.enter(Some("batch")).await;
    assert!(batch.is_ok());
    assert!(gate.enter(Some("batch")).await.is_err());
    assert!(gate.enter(Some("high")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn queue_is_fifo_and_bounded() {
    let gate = Gate::new(GateSettings { queue: 2, ..fixed(1) });
    let running = gate.enter(None).await.expect("free");
    let (mut first, mut second) = (pin!(gate.enter(None)), pin!(gate.enter(None)));
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    assert!(gate.enter(None).await.is_err(), "the queue is full");
    drop(running);
    assert!(poll!(&mut second).is_pending());
    let first = first.await.expect("its turn");
    assert!(poll!(&mut second).is_pending());
    drop(first);
    assert!(second.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn waiting_request_is_shed_after_queue_wait() {
    let gate = Gate::new(GateSettings { queue: 1, ..fixed(1) });
    let _running = gate.enter(None).await.expect("free");
    let start = Instant::now();
    assert!(gate.enter(None).await.is_err());
    assert_eq!(start.elapsed().as_millis() / 10, 10, "100 ms, rounded to what the timer resolves");
    assert_eq!((gate.view().waiting, gate.view().shed["normal"]), (0, 1));
}

/// A client that leaves the queue neither blocks the others nor loses a slot.
#[tokio::test(start_paused = true)]
async fn waiting_request_that_leaves_frees_its_place() {
    let gate = Gate::new(GateSettings { queue: 1, ..fixed(1) });
    let running = gate.enter(None).await.expect("free");
    {
        let mut leaving = pin!(gate.enter(None));
        assert!(poll!(&mut leaving).is_pending());
    }
    let mut waiting = pin!(gate.enter(None));
    assert!(poll!(&mut waiting).is_pending(), "the place in the queue is free");
    drop(running);
    assert!(waiting.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn slot_given_to_a_request_that_left_is_freed() {
    let gate = Gate::new(GateSettings { queue: 1, ..fixed(1) });
    let running = gate.enter(None).await.expect("free");
    let mut leaving = Box::pin(gate.enter(None));
    assert!(poll!(&mut leaving).is_pending());
    drop(running);
    assert_eq!(gate.view().in_flight, 1);
    drop(leaving);
    assert_eq!(gate.view().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn slot_is_freed_by_head_or_end_of_the_response() {
    for (count, after_head) in [(CountedUntil::Response, 1), (CountedUntil::Head, 0)] {
        let gate = Gate::new(GateSettings { count, ..fixed(1) });
        let mut permit = gate.enter(None).await.expect("free");
        permit.head(Ending::Answered);
        assert_eq!(gate.view().in_flight, after_head);
        // The setting may change while the response is streamed.
        gate.replace(GateSettings { count: CountedUntil::Response, ..fixed(1) });
        permit.head(Ending::Answered);
        drop(permit);
        assert_eq!(gate.view().in_flight, 0);
    }
}

/// As many requests at a time as the limit admits, all of which end after `latency`.
async fn answer(gate: &Gate, rounds: usize, latency: Duration, ending: Ending) {
    for _ in 0..rounds {
        let mut permit = Vec::new();
        while let Ok(request) = gate.enter(None).await {
            permit.push(request);
        }
        tokio::time::advance(latency).await;
        for request in &mut permit {
            request.head(ending);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn adaptive_limit_moves_with_latency_and_failures() {
    let adaptive = GateSettings {
        limit: LimitSettings::Adaptive(Bounds { min: 8, max: 100 }),
        ..GateSettings::default()
    };
    let gate = Gate::new(adaptive.clone());
    let (fast, slow) = (Duration::from_millis(20), Duration::from_millis(60));
    answer(&gate, 60, fast, Ending::Answered).await;
    let grown = gate.view();
    assert!(grown.limit > 25, "{grown:?}");
    assert_eq!(grown.floor, Some(Span::from(fast)));
    answer(&gate, 20, slow, Ending::Answered).await;
    let shrunk = gate.view();
    assert!(shrunk.limit < grown.limit, "{shrunk:?}");
    // Failures are fast: without them being counted, the limit would grow.
    answer(&gate, 30, fast, Ending::of(StatusCode::SERVICE_UNAVAILABLE)).await;
    let failed = gate.view();
    assert!(failed.limit < shrunk.limit, "{failed:?}");
    // A reload keeps what was measured.
    gate.replace(adaptive);
    assert_eq!(gate.view(), failed);
}

/// Clients that give up after 60 ms: no response ever shows that the upstream has become slow.
#[tokio::test(start_paused = true)]
async fn clients_that_leave_count_as_slow_responses() {
    let limit = LimitSettings::Adaptive(Bounds { min: 8, max: 100 });
    let gate = Gate::new(GateSettings { limit, ..GateSettings::default() });
    answer(&gate, 30, Duration::from_millis(20), Ending::Answered).await;
    let before = gate.view().limit;
    answer(&gate, 20, Duration::from_millis(60), Ending::Left).await;
    assert!(gate.view().limit < before);
}

/// Clients that take a second to send their body do not make the upstream slow, even if they leave before its end.
#[tokio::test(start_paused = true)]
async fn slow_uploads_do_not_move_an_adaptive_limit() {
    let limit = LimitSettings::Adaptive(Bounds { min: 1, max: 100 });
    let gate = Gate::new(GateSettings { limit, ..GateSettings::default() });
    let start = gate.view().limit;
    let pass = |millis| tokio::time::advance(Duration::from_millis(millis));
    for _ in 0..200 {
        let mut request = gate.enter(None).await.expect("free");
        request.uploading();
        let mut leaves = gate.enter(None).await.expect("free");
        leaves.uploading();
        pass(1_000).await;
        drop(leaves);
        request.sent(Instant::now());
        pass(20).await;
        request.head(Ending::Answered);
    }
    let view = gate.view();
    assert_eq!(view.floor, Some(Span::from_millis(20)));
    assert!(view.limit >= start, "{view:?}");
}
