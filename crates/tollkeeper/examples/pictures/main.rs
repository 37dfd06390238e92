//! Draws `docs/pictures/`: what each algorithm admits of the same traffic, decided by the library itself, and the
//! adaptive limit of the proxy.
//!
//! ```text
//! cargo run --example pictures -- docs/pictures
//! ```
//!
//! The clock is manual, so the same code always draws the same bytes; a test compares them with the
//! files in the repository.

mod adaptive;
#[path = "../../../tollkeeper-server/src/drawing.rs"]
#[expect(dead_code, unreachable_pub, reason = "reports of the server use the rest")]
mod drawing;
mod play;

use std::path::PathBuf;

use tollkeeper::{Algorithm, Span};

use drawing::{Anchor, Axis, Drawing, colour};
use play::{Played, play};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const WIDTH: f64 = 960.0;
/// The tallest stack of requests.
const MOST: f64 = 15.0;
/// How long the traffic of most pictures lasts, in milliseconds.
const END: u64 = 50_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: pictures FOLDER")?);
    let mut rows = Vec::new();
    for algorithm in Algorithm::ALL {
        let played = play(algorithm, &traffic(), END).await?;
        std::fs::write(folder.join(format!("{algorithm}.svg")), picture(algorithm, &played))?;
        rows.push((algorithm, played));
    }
    std::fs::write(folder.join("overview.svg"), overview(&rows))?;
    let mut rows = Vec::new();
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
        rows.push((algorithm, play(algorithm, &edge(), 11_000).await?));
    }
    std::fs::write(folder.join("boundary.svg"), boundary(&rows))?;
    std::fs::write(folder.join("adaptive.svg"), adaptive::simulated())?;
    std::fs::write(folder.join("adaptive-run.svg"), adaptive::recorded())?;
    println!("drew {} pictures in {}", Algorithm::ALL.len() + 4, folder.display());
    Ok(())
}

/// When requests arrive, in milliseconds: a burst, a steady stretch, two bursts around the edge of a
/// window, and after a long silence another burst.
fn traffic() -> Vec<u64> {
    let steady = (0..22).map(|number| 3_250 + 500 * number);
    let edge = [29_600; 10].into_iter().chain([30_400; 10]);
    [0; 15].into_iter().chain(steady).chain(edge).chain([46_000; 15]).collect()
}

/// The worst case of a fixed window: full bursts just before and just after its edge.
fn edge() -> Vec<u64> {
    [9_900; 10].into_iter().chain([10_100; 10]).collect()
}

/// One algorithm: the requests above, the remaining units below.
fn picture(algorithm: Algorithm, played: &Played) -> String {
    const TOP: f64 = 80.0;
    const FLOOR: f64 = 218.0;
    const LEVEL_TOP: f64 = 258.0;
    const LEVEL_FLOOR: f64 = 338.0;
    let time = Axis { from: (0.0, 64.0), to: (50.0, 936.0) };
    let stack = Axis { from: (0.0, FLOOR), to: (MOST, TOP) };
    let level = Axis { from: (0.0, LEVEL_FLOOR), to: (10.0, LEVEL_TOP) };
    let mut drawing = Drawing::new(WIDTH, 412.0, &format!("{algorithm}: {}", granted(algorithm)));

    drawing.text((24.0, 32.0), Anchor::Start, "title", &format!("{algorithm}: {}", granted(algorithm)));
    drawing.text((936.0, 32.0), Anchor::End, "label", &counted(algorithm, played));
    drawing.text((time.from.1 - 6.0, 58.0), Anchor::Start, "label", "15 at once");
    for (at, words) in [(8.5, "2 a second"), (30.0, "10 before and 10 after an edge"), (46.0, "15 at once")] {
        drawing.text((time.pixel(at), 58.0), Anchor::Middle, "label", words);
    }
    edges(&mut drawing, &time, (TOP - 8.0, LEVEL_FLOOR));
    scale(&mut drawing, &stack, &[5.0, 10.0, 15.0], &time);
    scale(&mut drawing, &level, &[0.0, 5.0, 10.0], &time);
    drawing.vertical_text((22.0, (TOP + FLOOR) / 2.0), "requests");
    drawing.vertical_text((22.0, (LEVEL_TOP + LEVEL_FLOOR) / 2.0), remaining(algorithm));

    drawing.steps(&played.levels(), &time, &level);
    requests(&mut drawing, played, &time, &stack, 3.4);
    departures(&mut drawing, played, &time, FLOOR + 14.0);
    time_scale(&mut drawing, &time, (0..=50).step_by(5), LEVEL_FLOOR);
    legend(&mut drawing, 398.0, algorithm == Algorithm::LeakyBucket);
    drawing.done()
}

/// All algorithms, one row each.
fn overview(rows: &[(Algorithm, Played)]) -> String {
    const ROW: f64 = 92.0;
    const FIRST: f64 = 80.0;
    let floor = FIRST + ROW * rows.len() as f64;
    let time = Axis { from: (0.0, 160.0), to: (50.0, 770.0) };
    let title = "The same 72 requests under 10 per 10 s: one mark is one request";
    let mut drawing = Drawing::new(WIDTH, floor + 84.0, title);
    drawing.text((24.0, 32.0), Anchor::Start, "title", title);
    edges(&mut drawing, &time, (FIRST - 18.0, floor));
    for (number, (algorithm, played)) in rows.iter().enumerate() {
        let floor = FIRST + ROW * (number + 1) as f64 - 22.0;
        let stack = Axis { from: (0.0, floor), to: (MOST, floor - ROW + 22.0) };
        drawing.line((time.from.1, floor + 2.0), (time.to.1, floor + 2.0), colour::AXIS);
        drawing.text((24.0, floor - 28.0), Anchor::Start, "name", algorithm.name());
        requests(&mut drawing, played, &time, &stack, 2.2);
        departures(&mut drawing, played, &time, floor + 10.0);
        let (admitted, most) = (played.admitted(), played.most_within(PERIOD));
        drawing.text((790.0, floor - 36.0), Anchor::Start, "label", &format!("{admitted} of 72 admitted"));
        let most = match algorithm {
            Algorithm::Concurrency => "never over 10 at a time".to_owned(),
            _ => format!("up to {most} within 10 s"),
        };
        drawing.text((790.0, floor - 18.0), Anchor::Start, "label", &most);
    }
    time_scale(&mut drawing, &time, (0..=50).step_by(5), floor);
    legend(&mut drawing, floor + 70.0, true);
    drawing.done()
}

/// The edge of a window, magnified.
fn boundary(rows: &[(Algorithm, Played)]) -> String {
    const ROW: f64 = 124.0;
    const FIRST: f64 = 72.0;
    let floor = FIRST + ROW * rows.len() as f64;
    let time = Axis { from: (9.0, 160.0), to: (11.0, 680.0) };
    let title = "10 requests just before the edge of a window, 10 just after, under 10 per 10 s";
    let mut drawing = Drawing::new(WIDTH, floor + 84.0, title);
    drawing.text((24.0, 32.0), Anchor::Start, "title", title);
    let edge = time.pixel(10.0);
    drawing.dashed((edge, FIRST - 16.0), (edge, floor));
    drawing.text((148.0, FIRST - 8.0), Anchor::End, "label", "requests");
    drawing.text((edge - 12.0, FIRST - 8.0), Anchor::End, "label", "10 at 9.9 s");
    drawing.text((edge + 12.0, FIRST - 8.0), Anchor::Start, "label", "10 at 10.1 s");
    for (number, (algorithm, played)) in rows.iter().enumerate() {
        let floor = FIRST + ROW * (number + 1) as f64 - 14.0;
        let stack = Axis { from: (0.0, floor), to: (10.0, floor - ROW + 26.0) };
        scale(&mut drawing, &stack, &[5.0, 10.0], &time);
        drawing.text((24.0, floor - 44.0), Anchor::Start, "name", algorithm.name());
        requests(&mut drawing, played, &time, &stack, 4.0);
        let admitted = format!("{} admitted within 0.2 s", played.admitted());
        drawing.text((706.0, floor - 44.0), Anchor::Start, "name", &admitted);
    }
    time_scale(&mut drawing, &time, 9..=11, floor);
    legend(&mut drawing, floor + 70.0, false);
    drawing.done()
}

const PERIOD: u64 = 10_000;

fn granted(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::TokenBucket => "10 per 10 s, bursts of 10",
        Algorithm::LeakyBucket => "10 per 10 s, a queue of 10",
        Algorithm::Concurrency => "10 at the same time, each held for 3 s",
        _ => "10 per 10 s",
    }
}

fn remaining(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::LeakyBucket => "room in queue",
        Algorithm::Concurrency => "free slots",
        _ => "remaining",
    }
}

fn counted(algorithm: Algorithm, played: &Played) -> String {
    let admitted = format!("{} of {} admitted", played.admitted(), played.requests.len());
    match algorithm {
        Algorithm::Concurrency => format!("{admitted}, never over 10 at a time"),
        Algorithm::LeakyBucket => {
            format!("{admitted}, at most {} departures in any 10 s", played.departures_within(PERIOD))
        }
        _ => format!("{admitted}, at most {} in any 10 s", played.most_within(PERIOD)),
    }
}

/// Draws a mark for each request; requests that arrive at the same time are stacked.
fn requests(drawing: &mut Drawing, played: &Played, time: &Axis, stack: &Axis, radius: f64) {
    let mut below = (u64::MAX, 0.0);
    for request in &played.requests {
        below = if below.0 == request.at { (request.at, below.1 + 1.0) } else { (request.at, 0.0) };
        let centre = (time.pixel(seconds(request.at)), stack.pixel(below.1 + 0.5));
        if request.delay.is_some() { drawing.disc(centre, radius) } else { drawing.cross(centre, radius) }
    }
}

/// Marks the departure times of the requests that a leaky bucket has queued.
fn departures(drawing: &mut Drawing, played: &Played, time: &Axis, y: f64) {
    if played.requests.iter().all(|request| request.delay.is_none_or(|delay| delay == Span::ZERO)) {
        return;
    }
    for departure in played.departures().into_iter().filter(|at| seconds(*at) <= time.to.0) {
        drawing.triangle((time.pixel(seconds(departure)), y), 4.0);
    }
}

fn edges(drawing: &mut Drawing, time: &Axis, (top, bottom): (f64, f64)) {
    for edge in [10.0, 20.0, 30.0, 40.0] {
        drawing.dashed((time.pixel(edge), top), (time.pixel(edge), bottom));
    }
}

/// Numbers at the left of a vertical axis, with a grid line for each.
fn scale(drawing: &mut Drawing, axis: &Axis, numbers: &[f64], time: &Axis) {
    for number in numbers {
        let y = axis.pixel(*number);
        drawing.line((time.from.1, y), (time.to.1, y), colour::GRID);
        drawing.text((time.from.1 - 12.0, y + 4.0), Anchor::End, "label", &number.to_string());
    }
    let floor = axis.from.1;
    drawing.line((time.from.1, floor), (time.to.1, floor), colour::AXIS);
}

fn time_scale(drawing: &mut Drawing, time: &Axis, seconds: impl Iterator<Item = u32>, floor: f64) {
    drawing.line((time.from.1, floor), (time.to.1, floor), colour::AXIS);
    for second in seconds {
        let x = time.pixel(f64::from(second));
        drawing.line((x, floor), (x, floor + 5.0), colour::AXIS);
        drawing.text((x, floor + 19.0), Anchor::Middle, "label", &second.to_string());
    }
    let middle = (time.from.1 + time.to.1) / 2.0;
    drawing.text((middle, floor + 38.0), Anchor::Middle, "label", "time in seconds");
}

fn legend(drawing: &mut Drawing, y: f64, departures: bool) {
    drawing.disc((30.0, y - 4.0), 3.4);
    drawing.text((40.0, y), Anchor::Start, "label", "admitted");
    drawing.cross((126.0, y - 4.0), 3.4);
    drawing.text((136.0, y), Anchor::Start, "label", "refused");
    drawing.dashed((214.0, y - 10.0), (214.0, y + 3.0));
    drawing.text(
        (224.0, y),
        Anchor::Start,
        "label",
        "edge of a window of the fixed-window and the sliding-window",
    );
    if departures {
        drawing.triangle((640.0, y - 4.0), 4.0);
        drawing.text((650.0, y), Anchor::Start, "label", "an admitted request departs (leaky-bucket)");
    }
}

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1_000.0
}
