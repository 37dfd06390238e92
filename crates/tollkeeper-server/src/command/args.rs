//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tollkeeper::Algorithm;
use tollkeeper::config::{HostHeader, InvalidStoreUrl, Listener, StoreUrl};

use crate::proxy::target::UpstreamUrl as Upstream;
use crate::simulate::filter::{Only, Sample};
use crate::simulate::format::FormatName;
use crate::simulate::suggest::ShareTarget;
use crate::simulate::time::{self, Offset, TimeFormat};
use crate::telemetry::line_log::LineLog;
use crate::telemetry::otlp::Collector;

/// A rate limiter: decides for every request whether it is allowed.
#[derive(Debug, Parser)]
#[command(name = "tollkeeper", version, max_term_width = 110)]
pub struct Arguments {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service
    ///
    /// Without --config it runs on the embedded store with one limit to try: 5 requests in 10 seconds for
    /// each `user`.
    Serve(Box<Serve>),
    /// Run a reverse proxy in front of an HTTP service, with the limits of the config
    ///
    /// Without --config it runs on the embedded store with one limit to try: 100 requests in a minute for each
    /// address.
    Proxy(Box<Proxy>),
    /// Decide one request: exit 0 if it is allowed, 1 if refused, 2 on an error
    Check(Check),
    /// Show which limits apply to a request, why, and with which key; decides nothing
    Explain(Explain),
    /// Show what each limit of a running server says now about a request
    Usage(Usage),
    /// Forget what a key has used: exit 0 if it was unblocked, 1 if there was nothing to forget
    Unblock(Unblock),
    /// Show or replace the limits of a running server
    Limits(Limits),
    /// List, set and delete the quotas of single keys on a running server
    Override(Overrides),
    /// Show a live table of limits and refused keys of a running server
    Top(Top),
    /// Play the same burst through every algorithm, request by request
    Demo(Demo),
    /// Report errors and warnings of a config file as file:line:column
    Validate(Validate),
    /// Judge histories of admissions by the contracts: exit 0 if kept, 1 if broken, 2 if unreadable
    ///
    /// A history has one JSON object per line, as `serve --log-admissions` writes it. Files are merged, and need not
    /// be sorted.
    Verify(Verify),
    /// Print the JSON schema of the config file
    Schema,
    /// Print a policy template; without NAME, list them
    Init {
        /// public-api, b2b, login, llm or internal
        name: Option<String>,
        /// Print the tests of the policy, for `tollkeeper test`
        #[arg(long, requires = "name")]
        tests: bool,
    },
    /// Replay access logs against a policy: what would these limits have done to that traffic?
    ///
    /// Exit 0; 1 if a condition of --fail-if holds; 2 on an error.
    Simulate(Box<Simulate>),
    /// Run tests of policies: requests at exact times, and what is expected of each
    ///
    /// Exit 0 if all tests pass, 1 if one fails, 2 if a file cannot be used.
    Test(Test),
    /// Print a shell completion script
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// `tollkeeper serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// Options that `proxy` has, too.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The HTTP listen address; `off` disables it, port 0 picks a free port [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_HTTP")]
    pub http: Option<Listener>,
    /// The gRPC listen address, for Envoy; as --http [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_GRPC")]
    pub grpc: Option<Listener>,
    /// The RESP listen address, for Redis clients; as --http [default: 127.0.0.1:6380]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_RESP")]
    pub resp: Option<Listener>,
}

/// `tollkeeper proxy`.
#[derive(Debug, Args)]
pub struct Proxy {
    /// The upstream: http://HOST:PORT/BASE, https://HOST or unix:/PATH
    pub url: UpstreamArgument,
    /// Options that `serve` has, too.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The listen address of the proxy; port 0 picks a free port [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_LISTEN")]
    pub listen: Option<Listener>,
    /// The listen address of API, metrics and dashboard; `off` disables it [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_HTTP")]
    pub http: Option<Listener>,
    /// The gRPC listen address, for Envoy [default: off]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_GRPC")]
    pub grpc: Option<Listener>,
    /// The RESP listen address, for Redis clients [default: off]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_RESP")]
    pub resp: Option<Listener>,
    /// The `Host` that the upstream receives [default: preserve]
    #[arg(long, value_name = "WHICH", env = "TOLLKEEPER_HOST_HEADER")]
    pub host_header: Option<HostHeaderArgument>,
    /// The CA certificates (PEM) to trust for an https upstream [default: those of the system]
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_UPSTREAM_CA")]
    pub upstream_ca: Option<PathBuf>,
    /// The client certificate (PEM) for the upstream
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_UPSTREAM_CERT", requires = "upstream_key")]
    pub upstream_cert: Option<PathBuf>,
    /// The private key of --upstream-cert
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_UPSTREAM_KEY", requires = "upstream_cert")]
    pub upstream_key: Option<PathBuf>,
    /// A protocol that connections may be upgraded to, instead of `websocket`; may be given several times
    #[arg(long, value_name = "NAME", default_value = "websocket")]
    pub upgrade: Vec<String>,
    /// Write one JSON line for each request to this file; `-` is standard error
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_ACCESS_LOG")]
    pub access_log: Option<AccessLog>,
    /// Add headers to responses that explain them, such as X-Tollkeeper-Shared
    #[arg(long)]
    pub debug_headers: bool,
}

/// Options that `serve` and `proxy` share.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// The config file: YAML, TOML or JSON, by its extension
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where state is kept [default: memory://]
    #[arg(long, value_name = "URL", env = "TOLLKEEPER_STORE", hide_env_values = true)]
    pub store: Option<StoreArgument>,
    /// How long to keep serving while reporting not ready, before listeners close
    #[arg(long, value_name = "TIME", env = "TOLLKEEPER_DRAIN_DELAY", default_value = "0s", value_parser = delay)]
    pub drain_delay: Duration,
    /// Append every admission to this file, for `tollkeeper verify`
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_LOG_ADMISSIONS")]
    pub log_admissions: Option<PathBuf>,
    /// Where to send metrics and traces over OTLP, such as http://127.0.0.1:4318
    #[arg(long, value_name = "URL", env = "TOLLKEEPER_OTLP")]
    pub otlp: Option<Collector>,
    /// The log format
    #[arg(long, value_name = "FORM", env = "TOLLKEEPER_LOG", default_value = "text")]
    pub log: Log,
}

/// The `Host` that the upstream receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostHeaderArgument {
    /// The one of the client.
    Preserve,
    /// The one of the upstream's URL.
    Upstream,
}

impl From<HostHeaderArgument> for HostHeader {
    fn from(argument: HostHeaderArgument) -> HostHeader {
        match argument {
            HostHeaderArgument::Preserve => HostHeader::Preserve,
            HostHeaderArgument::Upstream => HostHeader::Upstream,
        }
    }
}

/// Where the access log is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// Standard error: standard output has only the `listening` lines.
    StandardError,
    /// A file.
    File(PathBuf),
}

impl From<&str> for AccessLog {
    fn from(text: &str) -> AccessLog {
        if text == "-" { AccessLog::StandardError } else { AccessLog::File(text.into()) }
    }
}

impl AccessLog {
    /// Opens the log.
    pub fn open(&self) -> anyhow::Result<LineLog> {
        const WHAT: &str = "requests";
        match self {
            AccessLog::StandardError => LineLog::standard_error(WHAT),
            AccessLog::File(file) => LineLog::open(file, WHAT),
        }
    }
}

/// The URL of a store, or why it is invalid. Parsing never fails, because clap prints a value that it cannot parse, and
/// this one may hold a password.
#[derive(Clone, Debug)]
pub struct StoreArgument(pub Result<StoreUrl, InvalidStoreUrl>);

impl From<&str> for StoreArgument {
    fn from(text: &str) -> StoreArgument {
        StoreArgument(text.parse())
    }
}

/// The URL of an upstream, or why it is invalid; like [`StoreArgument`], because it may contain a password.
#[derive(Clone, Debug)]
pub struct UpstreamArgument(pub Result<Upstream, String>);

impl From<&str> for UpstreamArgument {
    fn from(text: &str) -> UpstreamArgument {
        UpstreamArgument(text.parse())
    }
}

/// The log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// Readable lines.
    Text,
    /// One JSON object a line.
    Json,
}

/// The server that a command calls.
#[derive(Debug, Args)]
pub struct Target {
    /// The URL of the server, http or https [default: TOLLKEEPER_SERVER, or http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// The file that holds the token for the server [default: the token in TOLLKEEPER_TOKEN, if any]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// The CA certificates (PEM) to trust [default: those of the system]
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

/// `tollkeeper check`.
#[derive(Debug, Args)]
pub struct Check {
    /// Decide by this file instead of calling a server
    #[arg(long, value_name = "FILE", conflicts_with_all = ["server", "token_file", "ca"])]
    pub config: Option<PathBuf>,
    /// The server to call.
    #[command(flatten)]
    pub target: Target,
    /// What the request costs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cost: u64,
    /// Show the decision without charging
    #[arg(long)]
    pub peek: bool,
    /// Print the response as JSON
    #[arg(long)]
    pub json: bool,
    /// The facts of the request, such as user=alice
    #[arg(value_name = "FACT=VALUE", value_parser = fact)]
    pub facts: Vec<(String, String)>,
}

/// `tollkeeper explain`.
#[derive(Debug, Args)]
pub struct Explain {
    /// The config file [default: the limits of the server that --server or TOLLKEEPER_SERVER names, else
    /// TOLLKEEPER_CONFIG, else the built-in policy]
    #[arg(long, value_name = "FILE", conflicts_with = "server")]
    pub config: Option<PathBuf>,
    /// The server whose active limits to explain; only if one is named.
    #[command(flatten)]
    pub target: Target,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// The facts of the request, such as user=alice
    #[arg(value_name = "FACT=VALUE", value_parser = fact)]
    pub facts: Vec<(String, String)>,
}

/// `tollkeeper usage`.
#[derive(Debug, Args)]
pub struct Usage {
    /// The server to call.
    #[command(flatten)]
    pub target: Target,
    /// Print the response as JSON
    #[arg(long)]
    pub json: bool,
    /// The facts of the request, such as user=alice
    #[arg(value_name = "FACT=VALUE", value_parser = fact)]
    pub facts: Vec<(String, String)>,
}

/// `tollkeeper unblock`.
#[derive(Debug, Args)]
pub struct Unblock {
    /// The server to call.
    #[command(flatten)]
    pub target: Target,
    /// The limit; without it, every limit that applies to the facts
    #[arg(long, value_name = "NAME")]
    pub limit: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// The facts of the key, such as user=alice
    #[arg(value_name = "FACT=VALUE", value_parser = fact, required = true)]
    pub facts: Vec<(String, String)>,
}

/// `tollkeeper limits`.
#[derive(Debug, Args)]
pub struct Limits {
    /// What to do.
    #[command(subcommand)]
    pub action: LimitsAction,
}

/// What to do with the limits of a server.
#[derive(Debug, Subcommand)]
pub enum LimitsAction {
    /// Show the active limits
    Get {
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
    /// Replace the limits with those in a config file, or in the output of `limits get --json`
    Put {
        /// The file
        file: PathBuf,
        /// Only report warnings and what would change
        #[arg(long)]
        dry_run: bool,
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
    /// Return to the limits in the file of the server
    Delete {
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
}

/// `tollkeeper override`.
#[derive(Debug, Args)]
pub struct Overrides {
    /// What to do.
    #[command(subcommand)]
    pub action: OverrideAction,
}

/// What to do with the overrides of a server.
#[derive(Debug, Subcommand)]
pub enum OverrideAction {
    /// Show all overrides
    List {
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
    /// Give one key a quota of its own
    Set {
        /// The limit, which is keyed by one fact
        limit: String,
        /// The value of that fact
        value: String,
        /// rate=500/min burst=50, or limit=5, or blocked, or unlimited; until=7d or a time in RFC 3339; note=TEXT
        #[arg(value_name = "WORD", required = true)]
        words: Vec<String>,
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
    /// Remove the override of one key: exit 0 if it was removed, 1 if there was none
    Delete {
        /// The limit
        limit: String,
        /// The value
        value: String,
        /// The server to call.
        #[command(flatten)]
        call: Call,
    },
}

/// A call to a server and the form of its output.
#[derive(Debug, Args)]
pub struct Call {
    /// The server to call.
    #[command(flatten)]
    pub target: Target,
    /// Print the response as JSON
    #[arg(long)]
    pub json: bool,
}

/// `tollkeeper top`.
#[derive(Debug, Args)]
pub struct Top {
    /// The server to call.
    #[command(flatten)]
    pub target: Target,
    /// Print one frame and exit; also without a terminal
    #[arg(long)]
    pub once: bool,
    /// Print one JSON object a second
    #[arg(long)]
    pub json: bool,
}

/// `tollkeeper demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Play only this algorithm
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub algorithm: Option<Algorithm>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// `tollkeeper validate`.
#[derive(Debug, Args)]
pub struct Validate {
    /// The config file
    pub file: PathBuf,
    /// The format of the file
    #[arg(long, value_name = "FORMAT", default_value = "native")]
    pub format: FileFormat,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// `tollkeeper verify`.
#[derive(Debug, Args)]
pub struct Verify {
    /// The config file with the limits that were in force
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_CONFIG")]
    pub config: PathBuf,
    /// Print as JSON, with every key
    #[arg(long)]
    pub json: bool,
    /// The files to judge together; without any, standard input
    #[arg(value_name = "HISTORY")]
    pub histories: Vec<PathBuf>,
}

/// `tollkeeper simulate`.
#[derive(Debug, Args)]
pub struct Simulate {
    /// The policy: YAML, TOML or JSON, by its extension
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Access logs, oldest first, plain or as .gz or .zst; without any, or as `-`, standard input
    #[arg(value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// auto, combined, common, caddy, traefik, envoy, json, csv, tollkeeper, or the log_format of nginx
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub format: FormatName,
    /// Where a fact is in a line: a JSON path, a CSV column, a variable of the log_format. Also for method,
    /// path, host, status and duration
    #[arg(long = "fact", value_name = "NAME=FIELD", value_parser = mapped_fact)]
    pub facts: Vec<(String, String)>,
    /// Where the time is in a line
    #[arg(long, value_name = "FIELD")]
    pub time: Option<String>,
    /// rfc3339, clf, unix, unix-ms or a strftime format
    #[arg(long, value_name = "FORMAT")]
    pub time_format: Option<TimeFormat>,
    /// The offset of times without one, such as +02:00
    #[arg(long, value_name = "OFFSET", allow_hyphen_values = true)]
    pub tz: Option<Offset>,
    /// Only requests that arrived at this time or later (RFC 3339)
    #[arg(long, value_name = "TIME", value_parser = time::instant)]
    pub from: Option<u64>,
    /// Only requests that arrived before this time (RFC 3339)
    #[arg(long, value_name = "TIME", value_parser = time::instant)]
    pub until: Option<u64>,
    /// Only requests with this fact, as in `when`: 'route=/api/*'
    #[arg(long, value_name = "FACT=PATTERN")]
    pub only: Vec<Only>,
    /// Only a part of the keys of the first limit, such as 1/10
    #[arg(long, value_name = "PART")]
    pub sample: Option<Sample>,
    /// Another policy for the same traffic, side by side; at most 4
    #[arg(long, value_name = "FILE")]
    pub against: Vec<PathBuf>,
    /// Run each rate limit under the five algorithms
    #[arg(long)]
    pub algorithms: bool,
    /// Find the smallest limits that refuse at most this share, such as 0.1%
    #[arg(long, value_name = "SHARE")]
    pub suggest: Option<ShareTarget>,
    /// Exit 1 if this holds: 'refused>1%', 'refused(LIMIT)>10', 'refused_keys(LIMIT)>=5%', 'late>0.1%'
    #[arg(long, value_name = "EXPR")]
    pub fail_if: Vec<String>,
    /// Whether times are those of the start or the end of a request [default: as the format has it]
    #[arg(long, value_name = "WHEN")]
    pub time_is: Option<TimeIs>,
    /// Do not spread the requests of a second over it
    #[arg(long)]
    pub no_spread: bool,
    /// Leave out requests with these statuses, such as 429,503
    #[arg(long, value_name = "STATUS", value_delimiter = ',')]
    pub drop_status: Vec<u16>,
    /// How many keys of each limit to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Also write the report to this file, as one HTML page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// The most keys that have a state of their own, for each policy
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    pub max_keys: usize,
    /// Show no progress bar
    #[arg(long)]
    pub no_progress: bool,
    /// Print only errors to standard error
    #[arg(long)]
    pub quiet: bool,
    /// Exit 2 at the first line that cannot be read
    #[arg(long)]
    pub strict: bool,
    /// The threads that decide: results do not depend on it.
    #[arg(long, value_name = "N", hide = true)]
    pub threads: Option<usize>,
    /// The requests that are passed to threads at once: results do not depend on it.
    #[arg(long, value_name = "N", hide = true, default_value_t = 4_096)]
    pub batch: usize,
}

/// `tollkeeper test`.
#[derive(Debug, Args)]
pub struct Test {
    /// Files of tests: YAML, TOML or JSON, by their extension
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Also list limits, tiers, overrides and `allow` entries that no row matches
    #[arg(long)]
    pub coverage: bool,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// What the time of a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TimeIs {
    /// The arrival of the request.
    Start,
    /// The end of the response.
    End,
}

/// The format of a config file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FileFormat {
    /// Tollkeeper's own.
    Native,
    /// Of envoyproxy/ratelimit (not yet).
    Envoy,
    /// Of Limitador (not yet).
    Limitador,
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == text).ok_or_else(|| {
        let names: Vec<&str> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
        format!("the algorithms are {}", names.join(", "))
    })
}

fn fact(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("a fact is a name and a value, such as user=alice".to_owned()),
    }
}

fn mapped_fact(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, field)) if tollkeeper::facts::is_name(name) && !field.is_empty() => {
            Ok((name.to_owned(), field.to_owned()))
        }
        _ => Err("a fact and a field of the log, such as user=$http_x_user".to_owned()),
    }
}

/// A duration as in the config, or 0.
fn delay(text: &str) -> Result<Duration, String> {
    if matches!(text, "0" | "0s") { Ok(Duration::ZERO) } else { tollkeeper::config::duration(text) }
}
