//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tollkeeper::Algorithm;
use tollkeeper::config::{InvalidStoreUrl, Listener, StoreUrl};

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
    /// Print the JSON schema of the config file
    Schema,
    /// Print a policy template; without NAME, list them
    Init {
        /// public-api, b2b, login, llm or internal
        name: Option<String>,
    },
    /// Print a shell completion script
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// `tollkeeper serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// The config file: YAML, TOML or JSON, by its extension
    #[arg(long, value_name = "FILE", env = "TOLLKEEPER_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where state is kept [default: memory://]
    #[arg(long, value_name = "URL", env = "TOLLKEEPER_STORE", hide_env_values = true)]
    pub store: Option<StoreArgument>,
    /// The HTTP listen address; `off` disables it, port 0 picks a free port [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_HTTP")]
    pub http: Option<Listener>,
    /// The gRPC listen address, for Envoy; as --http [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_GRPC")]
    pub grpc: Option<Listener>,
    /// The RESP listen address, for Redis clients; as --http [default: 127.0.0.1:6380]
    #[arg(long, value_name = "ADDR", env = "TOLLKEEPER_RESP")]
    pub resp: Option<Listener>,
    /// How long to keep serving while reporting not ready, before listeners close
    #[arg(long, value_name = "TIME", env = "TOLLKEEPER_DRAIN_DELAY", default_value = "0s", value_parser = delay)]
    pub drain_delay: Duration,
    /// Where to send metrics and traces over OTLP, such as http://127.0.0.1:4318
    #[arg(long, value_name = "URL", env = "TOLLKEEPER_OTLP")]
    pub otlp: Option<Collector>,
    /// The log format
    #[arg(long, value_name = "FORM", env = "TOLLKEEPER_LOG", default_value = "text")]
    pub log: Log,
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
    /// The config file [default: TOLLKEEPER_CONFIG; without it and without --server, the built-in policy]
    #[arg(long, value_name = "FILE", conflicts_with = "server")]
    pub config: Option<PathBuf>,
    /// The server whose active limits to explain; used only with --server.
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

/// A duration as in the config, or 0.
fn delay(text: &str) -> Result<Duration, String> {
    if matches!(text, "0" | "0s") { Ok(Duration::ZERO) } else { tollkeeper::config::duration(text) }
}
