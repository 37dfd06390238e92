//! The files in `deploy/` are valid: checked by the tools they are made for, and against a running server.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use serde_json::Value;
use tollkeeper_tests::binary::tollkeeper;
use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::page::Page;
use tollkeeper_tests::redis::{self, PATIENCE};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Runs a command that must succeed, and returns its output.
fn run(command: &mut Command) -> String {
    let output = command.current_dir(root()).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error} (`make test` installs it)"));
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// A tool that `make test` installed from PyPI.
fn python(tool: &str) -> Command {
    Command::new(root().join("target/python/bin").join(tool))
}

#[expect(clippy::disallowed_methods, reason = "polls other processes, which have their own clocks")]
fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let began = Instant::now();
    while !test() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting until {what}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// A process that is killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A proxy with everything that has metrics of its own.
const PROXY: &str = "\
limits: [{ name: per-address, by: ip, rate: 100000/min }]
proxy:
  concurrency: { adaptive: true, min: 8, max: 64 }
  single_flight: [{ when: { path: \"/healthz\" }, by: [host, path, query] }]
";

/// A running service.
struct Service {
    _process: Process,
    address: String,
}

impl Service {
    fn start(config: &Path, more: &[&str]) -> Service {
        Service::launch(&["serve", "--grpc", "off", "--resp", "off"], config, more).0
    }

    /// A proxy in front of a URL, and the address at which it accepts requests.
    fn proxy(url: &str, config: &Path, more: &[&str]) -> (Service, String) {
        let (service, listening) = Service::launch(&["proxy", url, "--listen", "127.0.0.1:0"], config, more);
        (service, listening["proxy"].clone())
    }

    /// Starts the command, and returns its listeners by name, too.
    fn launch(command: &[&str], config: &Path, more: &[&str]) -> (Service, BTreeMap<String, String>) {
        let mut child = Command::new(tollkeeper())
            .args(command)
            .args(["--http", "127.0.0.1:0", "--config"])
            .arg(config)
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let listeners = if command[0] == "proxy" { 2 } else { 1 };
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(listeners);
        let listening: BTreeMap<String, String> = lines
            .map(|line| {
                let line = line.unwrap();
                let (name, address) = line.strip_prefix("listening ").unwrap().split_once('=').unwrap();
                (name.to_owned(), address.to_owned())
            })
            .collect();
        (Service { _process: Process(child), address: listening["http"].clone() }, listening)
    }

    fn check(&self, facts: &str) {
        let body = format!("{{\"facts\":{{{facts}}}}}");
        run(Command::new("curl").args(["-s", "-d", &body, &format!("http://{}/v1/check", self.address)]));
    }

    fn metrics(&self) -> String {
        run(Command::new("curl").args(["-s", &format!("http://{}/metrics", self.address)]))
    }

    fn metric(&self, series: &str) -> f64 {
        let page = self.metrics();
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {series} in {page}")).parse().unwrap()
    }
}

/// A real Prometheus with our alert rules that scrapes the services every second.
struct Prometheus {
    _process: Process,
    _folder: Folder,
    address: String,
}

impl Prometheus {
    fn start(targets: &[&Service]) -> Prometheus {
        let folder = Folder::new();
        let rules = root().join("deploy/prometheus/alerts.yaml");
        let targets: Vec<&str> = targets.iter().map(|service| service.address.as_str()).collect();
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [{}]\nscrape_configs:\n  \
             - job_name: tollkeeper\n    static_configs: [{{ targets: {targets:?} }}]\n",
            rules.display(),
        );
        let config = folder.write("prometheus.yml", &config);
        let address = format!("127.0.0.1:{}", redis::free_port());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Prometheus { _process: Process(child), _folder: folder, address }
    }

    /// The result of a query; empty while Prometheus does not answer yet.
    fn query(&self, query: &str) -> Vec<Value> {
        let output = Command::new("curl")
            .args(["-sf", "--get", "--data-urlencode", &format!("query={query}")])
            .arg(format!("http://{}/api/v1/query", self.address))
            .output()
            .unwrap();
        if !output.status.success() {
            return Vec::new();
        }
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }

    /// Waits until each of `targets` targets was scraped once more.
    fn scraped(&self, targets: usize) {
        let last = || -> Vec<f64> {
            let times = self.query("timestamp(tollkeeper_config_version)");
            times.iter().map(|one| one["value"][1].as_str().unwrap().parse().unwrap()).collect()
        };
        let before = last().into_iter().fold(0.0, f64::max);
        eventually("Prometheus has scraped", || {
            last().iter().filter(|time| **time > before).count() == targets
        });
    }
}

const POLICY: &str = "
http: { routes: [/login, '/users/{id}'] }
on_store_failure: local
limits:
  - { name: per-user, by: user, rate: 100/day, burst: 3 }
  - { name: tried, by: user, rate: 100/day, burst: 1, mode: shadow }
  - { name: plan, by: tenant, tier: plan, tiers: { free: 5/day }, default_tier: free }
  - { name: busy, rate: 100000/s, burst: 100000, consistency: leased }
";

/// Requests with every kind of result: allowed, refused, shadowed, unknown tier, invalid.
fn load(service: &Service) {
    for _ in 0..5 {
        service.check(r#""user":"alice","tenant":"acme","plan":"gold","route":"/login""#);
    }
    service.check(r#""route":"/users/{id}""#);
    service.check("nonsense");
}

/// All metric names in a text.
fn metric_names(text: &str) -> BTreeSet<String> {
    let crates = ["tollkeeper_core", "tollkeeper_tower", "tollkeeper_server", "tollkeeper_tests"];
    let starts = text.match_indices("tollkeeper_").map(|(at, _)| &text[at..]);
    let is_name = |byte: char| byte.is_ascii_lowercase() || byte == '_' || byte.is_ascii_digit();
    let names = starts.map(|text| text.split(|byte| !is_name(byte)).next().unwrap().to_owned());
    names.filter(|name| !crates.contains(&name.as_str())).collect()
}

/// The queries of the dashboard, as Grafana would send them.
fn queries() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/tollkeeper.json")).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$__rate_interval", "1m").replace("$instance", ".*");
            let query = query.replace("$limit", ".*");
            queries.push((panel["title"].as_str().unwrap().to_owned(), query));
        }
    }
    queries
}

#[test]
fn documented_metrics_exist_and_panels_show_data() {
    let folder = Folder::new();
    // Snapshot metrics exist only where a snapshot is configured.
    let snapshot = format!("memory: {{ snapshot: {} }}\n", folder.path().join("state").display());
    let config = folder.write("tollkeeper.yaml", &(snapshot + POLICY));
    let mut redis = redis::Server::start();
    // So do those of the log of admissions.
    let log = folder.path().join("admissions.jsonl").display().to_string();
    let memory = Service::start(&config, &["--log-admissions", &log]);
    let shared = Service::start(&config, &["--store", &redis.url()]);
    let proxied = folder.write("proxy.yaml", PROXY);
    let log = folder.path().join("access.jsonl").display().to_string();
    let (proxy, entrance) =
        Service::proxy(&format!("http://{}", memory.address), &proxied, &["--access-log", &log]);
    eventually("the adaptive limit has measured its floor", || {
        run(Command::new("curl").args(["-sf", &format!("http://{entrance}/healthz?n=[1-50]")]));
        proxy.metrics().contains("\ntollkeeper_proxy_concurrency_floor_seconds ")
    });
    let prometheus = Prometheus::start(&[&memory, &shared, &proxy]);
    prometheus.scraped(3);
    for service in [&memory, &shared] {
        load(service);
    }
    folder.write("tollkeeper.yaml", "limits: nonsense");
    let failed = "tollkeeper_config_reloads_total{result=\"failed\"}";
    eventually("the broken file is rejected", || memory.metric(failed) > 0.0 && shared.metric(failed) > 0.0);
    prometheus.scraped(3);
    // The denial bound answers the later refusals.
    assert!(shared.metric("tollkeeper_store_duration_seconds_count{op=\"decide\"}") >= 2.0);
    assert_eq!(shared.metric("tollkeeper_breaker_state"), 0.0);

    redis.kill();
    eventually("the breaker opens", || {
        shared.check(r#""user":"alice""#);
        shared.metric("tollkeeper_breaker_state") > 0.0
    });
    assert!(shared.metric("tollkeeper_fallback_total{limit=\"per-user\",policy=\"local\"}") > 0.0);
    let errors: f64 = ["timeout", "connection", "full", "refused", "protocol"]
        .iter()
        .map(|kind| shared.metric(&format!("tollkeeper_store_errors_total{{kind=\"{kind}\"}}")))
        .sum();
    assert!(errors > 0.0);
    prometheus.scraped(3);

    // The names as Prometheus stored them: what it cannot parse would be missing.
    let pages = memory.metrics() + &shared.metrics() + &proxy.metrics();
    let stored: BTreeSet<String> = prometheus
        .query("group by (__name__) ({job=\"tollkeeper\"})")
        .iter()
        .map(|one| one["metric"]["__name__"].as_str().unwrap().to_owned())
        .collect();
    let shown =
        metric_names(&pages.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n"));
    assert!(stored.is_superset(&shown), "{:?}", shown.difference(&stored));
    assert!(!pages.contains("alice") && !pages.contains("acme"), "keys are never labels");

    let mut sources: Vec<String> = vec!["README.md".into(), "deploy/grafana/tollkeeper.json".into()];
    sources.push("deploy/prometheus/alerts.yaml".into());
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|page| page.unwrap().file_name());
    let pages = pages.map(|name| format!("docs/{}", name.to_str().unwrap()));
    sources.extend(pages.filter(|name| name.ends_with(".md")));
    let exists = |name: &str| {
        stored.contains(name)
            || ["_bucket", "_total"].iter().any(|end| stored.contains(&format!("{name}{end}")))
    };
    for source in &sources {
        for name in metric_names(&read(source)) {
            assert!(exists(&name), "{source} names {name}, which does not exist");
        }
    }
    for (panel, query) in queries() {
        assert!(!prometheus.query(&query).is_empty(), "{panel}: {query}");
    }
    eventually("the alert for a broken config fires", || {
        !prometheus.query("ALERTS{alertname=\"TollkeeperConfigNotLoaded\"}").is_empty()
    });
}

/// Next to all files of the alerts folder, as for a user who copied the folder.
#[test]
fn the_documented_prometheus_config_loads() {
    let page = Page::parse("docs/monitoring.md", &read("docs/monitoring.md")).expect("a page");
    let folder = Folder::new();
    for name in ["alerts.yaml", "alerts.test.yaml"] {
        folder.write(name, &read(&format!("deploy/prometheus/{name}")));
    }
    let config = folder.write("prometheus.yml", &page.file("prometheus.yml").text);
    let output =
        Command::new("promtool").args(["check", "config"]).arg(config).output().expect("promtool runs");
    let output_text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output_text}");
    assert!(output_text.contains("1 rule files found"), "the alerts, without their tests: {output_text}");
}

#[test]
fn alerts_fire_exactly_when_expected() {
    let rules = root().join("deploy/prometheus");
    run(Command::new("promtool").arg("check").arg("rules").arg(rules.join("alerts.yaml")));
    run(Command::new("promtool").arg("test").arg("rules").arg(rules.join("alerts.test.yaml")));
    let (rules, tests) = (read("deploy/prometheus/alerts.yaml"), read("deploy/prometheus/alerts.test.yaml"));
    let page = read("docs/monitoring.md");
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let documented = page.lines().filter(|line| line.starts_with("| `Tollkeeper")).count();
    assert_eq!(alerts.len(), documented, "docs/monitoring.md explains each alert");
    for alert in alerts {
        let fires = format!("alertname: {alert}\n        exp_alerts:\n          - exp_labels");
        assert!(tests.contains(&fires), "no test fires {alert}");
        assert!(page.contains(&format!("| `{alert}` |")), "docs/monitoring.md does not explain {alert}");
    }
}

#[test]
fn systemd_unit_is_valid_and_hardened() {
    let folder = Folder::new();
    let unit = read("deploy/systemd/tollkeeper.service");
    let here = unit.replace("/usr/bin/tollkeeper", tollkeeper().to_str().unwrap());
    assert_ne!(unit, here);
    let unit = folder.write("tollkeeper.service", &here);
    // `verify` succeeds even with settings it does not understand, but prints them.
    let warnings = run(Command::new("systemd-analyze").arg("verify").arg(&unit));
    assert_eq!(warnings, "", "{warnings}");
    // The exposure is between 0 and 100; a unit without any hardening has 96.
    let mut judge = Command::new("systemd-analyze");
    judge.args(["security", "--no-pager", "--offline=true", "--threshold=15"]).arg(&unit);
    let judged = run(&mut judge);
    assert!(judged.contains("Overall exposure level"), "{judged}");
}

#[test]
fn dockerfile_and_manifests_are_valid() {
    run(python("hadolint").arg("deploy/docker/Dockerfile"));
    let mut validate = python("kubernetes-validate");
    // Kubernetes does not define ServiceMonitor, and kustomize reads its own file.
    let files = ["tollkeeper.yaml", "network-policy.yaml", "redis.yaml"];
    let files = files.map(|name| format!("deploy/kubernetes/{name}"));
    let passed = run(validate.arg("--strict").args(&files));
    assert_eq!(passed.matches(" passed for resource ").count(), 8, "{passed}");
    let base = read("deploy/kubernetes/kustomization.yaml");
    for name in ["tollkeeper.yaml", "network-policy.yaml"] {
        assert!(base.contains(&format!("  - {name}\n")), "{base}");
    }

    // The policy in the ConfigMap is valid.
    let manifests = read("deploy/kubernetes/tollkeeper.yaml");
    let policy = manifests.split("tollkeeper.yaml: |\n").nth(1).unwrap();
    let policy: Vec<&str> =
        policy.lines().take_while(|line| line.starts_with("    ")).map(|line| &line[4..]).collect();
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", &policy.join("\n"));
    let digest = "0".repeat(64);
    let mut validate = Command::new(tollkeeper());
    validate.env("ADMIN_TOKEN_SHA256", &digest).env("TOKEN_SHA256", &digest);
    run(validate.arg("validate").arg(&file));
    // Every key of the Secret that the manifests and the monitor read is created as documented.
    let page = read("docs/kubernetes.md");
    let monitor = read("deploy/kubernetes/service-monitor.yaml");
    for text in [&manifests, &monitor, &read("deploy/kubernetes/redis.yaml")] {
        for key in text.split("name: tollkeeper, key: ").skip(1).map(|rest| rest.split(' ').next().unwrap()) {
            assert!(
                page.contains(&format!("--from-literal={key}=")),
                "docs/kubernetes.md does not create {key}"
            );
        }
    }
    let Some(arguments) = manifests.split("args:\n").nth(1) else { panic!("no arguments") };
    let flags: Vec<&str> = arguments
        .lines()
        .take_while(|line| !line.contains("env:"))
        .filter_map(|line| line.trim().strip_prefix("- --"))
        .map(|flag| flag.split('=').next().unwrap())
        .collect();
    assert_eq!(flags, ["config", "http", "grpc", "resp", "drain-delay", "log"]);
    let help = run(Command::new(tollkeeper()).args(["serve", "--help"]));
    for flag in flags {
        assert!(help.contains(&format!("--{flag} ")), "--{flag}");
    }
}

#[test]
fn image_and_manifests_expose_all_listener_ports() {
    // The default ports of the server.
    let help = run(Command::new(tollkeeper()).args(["serve", "--help"]));
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let ports = ["http", "grpc", "resp"].map(|name| {
        let flag_help = help.split(&format!("--{name} <ADDR>")).nth(1).unwrap();
        (name, flag_help.split("[default: 127.0.0.1:").nth(1).unwrap().split(']').next().unwrap())
    });
    let (image, manifests) = (read("deploy/docker/Dockerfile"), read("deploy/kubernetes/tollkeeper.yaml"));
    let exposed = image.lines().find_map(|line| line.strip_prefix("EXPOSE ")).unwrap();
    assert_eq!(exposed.split(' ').collect::<Vec<_>>(), ports.map(|(_, port)| port));
    for (name, port) in ports {
        let variable = format!("TOLLKEEPER_{}=0.0.0.0:{port}", name.to_uppercase());
        assert!(image.contains(&variable), "{variable}");
        for line in [
            format!("- --{name}=0.0.0.0:{port}\n"),
            format!("- {{ name: {name}, containerPort: {port} }}\n"),
            format!("- {{ name: {name}, port: {port}, targetPort: {name} }}\n"),
        ] {
            assert!(manifests.contains(&line), "{line}");
        }
    }

    // The server accepts the arguments of the manifest and opens all three listeners.
    let folder = Folder::new();
    let config = folder.write("tollkeeper.yaml", POLICY);
    let arguments =
        manifests.split("args:\n").nth(1).unwrap().lines().take_while(|line| !line.contains("env:"));
    let arguments = arguments.filter_map(|line| line.trim().strip_prefix("- ")).map(|argument| {
        let flag = argument.split('=').next().unwrap();
        match flag {
            "--config" => format!("--config={}", config.display()),
            "--http" | "--grpc" | "--resp" => format!("{flag}=127.0.0.1:0"),
            _ => argument.to_owned(),
        }
    });
    let mut command = Command::new(tollkeeper());
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut process = Process(command.spawn().unwrap());
    let output = BufReader::new(process.0.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    for (name, _) in ports {
        let line = lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no listener for {name}"));
        assert!(line.starts_with(&format!("listening {name}=")), "{line}");
    }
}

#[test]
fn package_holds_binary_unit_and_valid_policy() {
    run(Command::new("tools/dist").arg("--binary").arg(tollkeeper()));
    let version = env!("CARGO_PKG_VERSION");
    let dist = root().join("target/dist");
    let package = |start: &str, end: &str| {
        let mut found = fs::read_dir(&dist).unwrap().map(|file| file.unwrap().path()).filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(&format!("{start}{version}")) && name.ends_with(end)
        });
        found.next().unwrap_or_else(|| panic!("no {start}{version}…{end}"))
    };
    let folder = Folder::new();
    run(Command::new("dpkg-deb").arg("--extract").arg(package("tollkeeper_", ".deb")).arg(folder.path()));
    let command = folder.path().join("usr/bin/tollkeeper");
    assert_eq!(run(Command::new(&command).arg("--version")), format!("tollkeeper {version}\n"));
    run(Command::new(&command).arg("validate").arg(folder.path().join("etc/tollkeeper/tollkeeper.yaml")));
    let unit = fs::read_to_string(folder.path().join("lib/systemd/system/tollkeeper.service")).unwrap();
    assert_eq!(unit, read("deploy/systemd/tollkeeper.service"));
    let info = run(Command::new("dpkg-deb").arg("--info").arg(package("tollkeeper_", ".deb")));
    for file in ["conffiles", "postinst", "prerm", "postrm"] {
        assert!(info.contains(file), "{info}");
    }
    let listed = run(Command::new("tar").arg("-tzf").arg(package("tollkeeper-", ".tar.gz")));
    for file in ["/tollkeeper", "/LICENSE-MIT", "/deploy/grafana/tollkeeper.json", "/docs/config.md"] {
        assert!(listed.lines().any(|line| line.ends_with(file)), "{file} in {listed}");
    }
    for script in ["postinst", "prerm", "postrm"] {
        run(Command::new("sh").arg("-n").arg(format!("deploy/debian/{script}")));
    }
}
