//! Draws how the proxy's adaptive limit follows an upstream whose work takes three times as long for a while, simulated and
//! as recorded by `bench/adaptive`.

#[path = "../../../tollkeeper-server/src/proxy/concurrency/simulator.rs"]
mod simulator;
#[path = "../../../tollkeeper-server/src/proxy/concurrency/slots.rs"]
#[expect(dead_code, unreachable_pub, reason = "the proxy uses the rest")]
mod slots;
#[path = "../../../tollkeeper-server/src/proxy/concurrency/step.rs"]
#[expect(unreachable_pub, reason = "the server exports it")]
mod step;

use tollkeeper::{Percent, Span, Time};

use crate::drawing::{Anchor, Axis, Drawing, colour};
use crate::{WIDTH, scale, time_scale};
use simulator::{Scenario, SimulatedUpstream};

const NORMAL: SimulatedUpstream = SimulatedUpstream { workers: 30, work: Span::from_millis(20) };
const SLOW: SimulatedUpstream = SimulatedUpstream { work: Span::from_millis(60), ..NORMAL };
/// Requests per second: 0.7 of what the upstream can answer, and twice what it can while it is slow.
const ARRIVALS: u64 = 1_050;
/// What `bench/adaptive` has measured.
const RECORDED: &str = include_str!("../../../../bench/adaptive.tsv");

/// A run to be drawn. The work of its upstream takes three times as long from 20 s to 40 s.
struct Run {
    title: &'static str,
    upstream: &'static str,
    /// The largest requests per second of its scale.
    most_requests: u32,
    seconds: Vec<Second>,
}

/// What happened in a second.
struct Second {
    /// At its end.
    limit: f64,
    /// At its end, if it was measured.
    in_flight: Option<f64>,
    /// At its end, in milliseconds.
    floor: f64,
    /// The median, in milliseconds.
    latency: f64,
    answered: f64,
    shed: f64,
}

/// A simulated upstream; the limit is computed by the code of the proxy.
pub(crate) fn simulated() -> String {
    let seconds = simulator::run(&Scenario {
        upstream: NORMAL,
        changes: vec![(at(20), SLOW), (at(40), NORMAL)],
        arrivals: ARRIVALS,
        priorities: vec![(Percent::ALL, Percent::ALL)],
        bounds: step::Bounds { min: 8, max: 512 },
        end: at(60),
        seed: 1,
    });
    let second = |second: &simulator::Second| Second {
        limit: f64::from(second.limit),
        in_flight: None,
        floor: second.floor as f64 / 1_000.0,
        latency: second.latency as f64 / 1_000.0,
        answered: second.answered as f64,
        shed: second.shed[0] as f64,
    };
    picture(&Run {
        title: "Adaptive concurrency: work takes three times as long from 20 s to 40 s",
        upstream: "30 simulated workers, 1,050 requests per second; limit by the code of the proxy",
        most_requests: 1_200,
        seconds: seconds.iter().map(second).collect(),
    })
}

/// A real upstream behind the real proxy.
pub(crate) fn recorded() -> String {
    let second = |line: &str| {
        let columns: Vec<f64> = line.split('\t').map(|number| number.parse().expect("a number")).collect();
        let [_, limit, in_flight, floor, latency, answered, shed] = columns[..] else {
            panic!("bench/adaptive.tsv has seven columns: {line}")
        };
        let (floor, latency) = (floor / 1_000.0, latency / 1_000.0);
        Second { limit, in_flight: Some(in_flight), floor, latency, answered, shed }
    };
    picture(&Run {
        title: "A recorded run: work takes three times as long from 20 s to 40 s",
        upstream: "30 workers behind tollkeeper proxy, 1,950 requests per second; limit from /metrics, latency at the client",
        most_requests: 2_000,
        seconds: RECORDED.lines().skip(1).map(second).collect(),
    })
}

/// The limit, the latency, and the requests that are answered and shed, each as a panel.
fn picture(run: &Run) -> String {
    const PANEL: f64 = 110.0;
    const GAP: f64 = 26.0;
    const FIRST: f64 = 76.0;
    let panel = |number: f64, most: f64| {
        let floor = FIRST + PANEL + number * (PANEL + GAP);
        Axis { from: (0.0, floor), to: (most, floor - PANEL) }
    };
    let most_requests = f64::from(run.most_requests);
    let (limit, latency, requests) = (panel(0.0, 80.0), panel(1.0, 150.0), panel(2.0, most_requests));
    let bottom = requests.from.1;
    let end = u32::try_from(run.seconds.len()).expect("a minute or so");
    let time = Axis { from: (0.0, 84.0), to: (f64::from(end), 800.0) };
    let mut drawing = Drawing::new(WIDTH, bottom + 78.0, run.title);
    drawing.text((24.0, 32.0), Anchor::Start, "title", run.title);
    drawing.text((936.0, bottom + 62.0), Anchor::End, "label", run.upstream);
    for (at, words) in [(20.0, "work: 20 ms → 60 ms"), (40.0, "60 ms → 20 ms")] {
        drawing.dashed((time.pixel(at), FIRST - 10.0), (time.pixel(at), bottom));
        drawing.text((time.pixel(at), FIRST - 16.0), Anchor::Middle, "label", words);
    }
    let steps =
        |step: u32| (0..=run.most_requests).step_by(step as usize).map(f64::from).collect::<Vec<f64>>();
    scale(&mut drawing, &limit, &[0.0, 40.0, 80.0], &time);
    scale(&mut drawing, &latency, &[0.0, 50.0, 100.0, 150.0], &time);
    scale(&mut drawing, &requests, &steps(500), &time);
    for (axis, words) in [(&limit, "limit"), (&latency, "latency in ms"), (&requests, "per second")] {
        drawing.vertical_text((22.0, (axis.from.1 + axis.to.1) / 2.0), words);
    }
    let mut line = |axis: &Axis, colour: &str, words: &str, value: fn(&Second) -> Option<f64>| {
        let points = (1..).zip(&run.seconds).filter_map(|(second, values)| {
            Some((time.pixel(f64::from(second)), axis.pixel(value(values)?.min(axis.to.0))))
        });
        let points: Vec<(f64, f64)> = points.collect();
        if let Some((x, y)) = points.last() {
            drawing.polyline(&points, colour);
            drawing.text((x + 10.0, y + 4.0), Anchor::Start, "label", words);
        }
    };
    let limit_label = if run.seconds[0].in_flight.is_some() { "limit (blue), in flight" } else { "limit" };
    line(&limit, colour::DEPARTED, "", |second| second.in_flight);
    line(&limit, colour::ADMITTED, limit_label, |second| Some(second.limit));
    line(&latency, colour::ADMITTED, "", |second| Some(second.latency));
    line(&latency, colour::DEPARTED, "median (blue), floor", |second| Some(second.floor));
    line(&requests, colour::ADMITTED, "answered", |second| Some(second.answered));
    line(&requests, colour::REFUSED, "shed", |second| Some(second.shed));
    time_scale(&mut drawing, &time, (0..=end).step_by(10), bottom);
    drawing.done()
}

fn at(second: u64) -> Time {
    Time::from_micros(second * 1_000_000)
}
