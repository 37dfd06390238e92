//! Compares the CPU time of the service per RESP check with other servers.
//!
//! `resp TOLLKEEPER THROTTLECRAB` starts ours, `throttlecrab-server` and `redis-server` on the first core and loads
//! them in turns with `redis-benchmark` from the second, with 1, 16 and 64 commands in a pipeline. As over HTTP, the CPU
//! time per command is compared. Redis `PING` is the lower bound.

use std::env;

use serde_json::{Map, Value, json};
use tollkeeper::store::redis::wire;
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::served::{Counted, RATE, Rounds, Server, in_turns, limits, on_second_core, stdout};
use tollkeeper_tests::redis::Client;

const PIPELINES: [usize; 3] = [1, 16, 64];
/// The pipeline length that goals and ratios refer to.
const JUDGED: usize = 16;
const CONNECTIONS: &str = "32";
/// Number of random keys.
const KEYS: &str = "10000";

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, throttlecrab] = &arguments[..] else { panic!("usage: resp TOLLKEEPER THROTTLECRAB") };
    // With a policy, so that metrics are counted.
    let ours = Server::tollkeeper(tollkeeper, "resp", "tollkeeper", &limits(&["user"]), &[]);
    let throttlecrab = Server::throttlecrab(throttlecrab, "redis");
    let redis = Server::redis();
    let (key, limit) = ("key:__rand_int__", format!("{RATE} {RATE} 1"));
    let number = wire::Value::Number;
    let bytes = |text: &str| wire::Value::Bytes(text.into());
    let mut sides = [
        // The first number is 0 for an admitted request.
        Side::new("tollkeeper-cl.throttle", &ours, format!("CL.THROTTLE {key} {limit}"), vec![number(0)]),
        Side::new("tollkeeper-throttle", &ours, format!("THROTTLE {key} {limit}"), vec![number(1)]),
        Side::new(
            "tollkeeper-tk.check",
            &ours,
            format!("TK.CHECK user {key}"),
            vec![bytes("allowed"), number(1)],
        ),
        Side::new("throttlecrab", &throttlecrab, format!("THROTTLE {key} {limit}"), vec![number(1)]),
        Side::new("redis-ping", &redis, "PING".to_owned(), vec![bytes("PONG")]),
    ];

    let mut results: Map<String, Value> =
        sides.iter().map(|side| (side.name.to_owned(), json!({}))).collect();
    let mut judged = Vec::new();
    for pipeline in PIPELINES {
        in_turns(&mut sides, |side| side.load(pipeline), |side| side.round(pipeline));
        for side in &mut sides {
            assert!(side.admitted(), "{} no longer admits requests", side.name);
            let measured = side.rounds.report(&format!("resp-{pipeline}"), side.name, side.server);
            results[side.name][pipeline.to_string()] = measured;
            if pipeline == JUDGED {
                judged.push(side.rounds.cpu());
            }
            side.rounds = Rounds::default();
        }
    }
    let [cell, _, check, throttlecrab, ping] = judged[..] else { unreachable!("a number for each side") };
    report::ratio("resp/throttlecrab", throttlecrab / cell);
    report::ratio("resp/redis-ping", ping / cell);
    report::goal("resp/cl.throttle", Want::AtMost(2.5), cell);
    report::goal("resp/tk.check", Want::AtMost(2.5), check);
    report::goal("resp/throttlecrab", Want::AtLeast(2.5), throttlecrab / cell);
    report::save("resp", results.into());
}

/// A command, its server, and the measurements with one pipeline length.
struct Side<'s> {
    name: &'static str,
    server: &'s Server,
    /// The command line, its words separated by spaces.
    command: String,
    /// How the reply of an admitted request begins.
    passes: Vec<wire::Value>,
    rounds: Rounds,
}

impl<'s> Side<'s> {
    fn new(name: &'static str, server: &'s Server, command: String, passes: Vec<wire::Value>) -> Side<'s> {
        let side = Side { name, server, command, passes, rounds: Rounds::default() };
        assert!(side.admitted(), "{name} does not admit requests");
        side
    }

    fn round(&mut self, pipeline: usize) {
        let (cpu, counted) = self.server.cpu_during(|| self.load(pipeline));
        self.rounds.add(cpu, counted);
    }

    /// Runs `redis-benchmark` for a second or two; longer for throttlecrab, which writes reply by reply and waits for the
    /// TCP acknowledgement in between.
    fn load(&self, pipeline: usize) -> Counted {
        let commands = if pipeline == 1 || self.name == "throttlecrab" { 100_000 } else { 1_000_000 };
        let stdout = stdout(
            on_second_core("timeout")
                .args(["120", "redis-benchmark", "-p", &self.server.port.to_string(), "--csv"])
                .args([
                    "-c",
                    CONNECTIONS,
                    "-r",
                    KEYS,
                    "-P",
                    &pipeline.to_string(),
                    "-n",
                    &commands.to_string(),
                ])
                .args(self.command.split(' ')),
        );
        let per_second = stdout.lines().last().and_then(|line| line.split(',').nth(1));
        let per_second = per_second.and_then(|speed| speed.trim_matches('"').parse::<f64>().ok());
        let requests = f64::from(commands);
        Counted { requests, seconds: requests / per_second.unwrap_or_else(|| panic!("{stdout}")) }
    }

    /// Sends the command once, because redis-benchmark ignores the content of replies.
    fn admitted(&self) -> bool {
        let mut client = Client::to(self.server.port).expect("the server listens");
        match client.text(&self.command) {
            wire::Value::List(values) => values.starts_with(&self.passes),
            value => self.passes == [value],
        }
    }
}
