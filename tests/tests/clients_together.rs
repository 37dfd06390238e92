//! Node, Python and the server count together on one Redis.

use std::process::{Child, Command, Stdio};

use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::served::Served;
use tollkeeper_tests::{packages, redis};

/// Checks of each of the six processes, and the limit: more than the four without the server ask for.
const CHECKS: usize = 200;
const LIMIT: usize = 1_000;

const NODE: &str = "
import { Limiter } from 'tollkeeper';
const [options, checks] = [JSON.parse(process.argv[1]), Number(process.argv[2])];
const limiter = new Limiter(options);
const decisions = await Promise.all(Array.from({ length: checks }, () => limiter.check({ user: 'alice' })));
console.log(decisions.filter((decision) => decision.allowed && decision.degraded === null).length);
await limiter.close();
";

const PYTHON: &str = "
import sys
from tollkeeper import Limiter
with Limiter(sys.argv[1]) as limiter:
    decisions = [limiter.check({'user': 'alice'}) for _ in range(int(sys.argv[2]))]
print(sum(decision.allowed and decision.degraded is None for decision in decisions))
";

/// Two processes of each language decide in Redis themselves, and two more ask a server that does.
#[test]
fn all_languages_admit_exactly_the_limit() {
    let redis = redis::Server::start();
    let folder = Folder::new();
    let config = folder.write(
        "tollkeeper.yaml",
        &format!(
            "store: {}\nredis: {{ prefix: together, deadline: 1m }}\nlimits:\n  - {{ name: per-user, by: user, rate: 1/day, \
             burst: {LIMIT} }}\n",
            redis.url()
        ),
    );
    let config = config.to_str().expect("a path in UTF-8");
    let server = Served::with(&["--config", config]);
    let in_process = format!("{{\"config\":{config:?}}}");
    let by_server = format!("{{\"server\":\"http://{}\",\"timeout\":60000}}", server.http);
    let (npm, venv) = (packages::node(), packages::python());
    let node = |options: &str| {
        let mut command = Command::new("node");
        command.args(["--input-type=module", "-e", NODE, options]).current_dir(&npm);
        start(command)
    };
    let python = || {
        let mut command = Command::new(venv.join("bin/python"));
        command.args(["-c", PYTHON, config]);
        start(command)
    };
    let started =
        [node(&in_process), node(&in_process), python(), python(), node(&by_server), node(&by_server)];
    let admitted: Vec<usize> = started.into_iter().map(admitted).collect();
    println!("admitted: {admitted:?}");
    assert_eq!(admitted.iter().sum::<usize>(), LIMIT, "{admitted:?}");
}

fn start(mut command: Command) -> Child {
    command.arg(CHECKS.to_string()).stdout(Stdio::piped()).spawn().expect("it starts")
}

fn admitted(process: Child) -> usize {
    let output = process.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
}
