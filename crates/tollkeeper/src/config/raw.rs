//! Step one of reading a config: typed values with their positions, defaults filled in.
//!
//! Step two, `resolve.rs`, combines them into limits.

use std::cell::RefCell;
use std::path::PathBuf;

use tollkeeper_core::{Algorithm, CheckedQuota, OnStoreFailure, Quota};

use super::StoreUrl;
use super::document::Node;
use super::excerpt::quoted;
use super::fields::{Fields, Located, Scope};
use super::http;
use super::key_table;
use super::limit::{self, RawLimit};
use super::listen::{Listen, Listener};
use super::origin::NamedFile;
use super::proxy::{self, ProxySettings};
use super::report::{Position, Problems};
use super::settings::{
    BreakerSettings, GrpcSettings, KeyFormat, LogSettings, MemorySettings, RedisSettings, TlsSettings,
    TokenDigest,
};
use super::units::{self, InvalidValue, Share};
use super::warning::Warning;
use crate::http::{EncodedSlashes, HeaderDialect, HttpFact, HttpSettings, Normalization, Source};
use crate::percent::Percent;

/// The most limits in a file.
const MAX_LIMITS: usize = 10_000;

/// The typed values of a config file, before its limits are resolved.
#[derive(Debug)]
pub(super) struct RawConfig {
    pub(super) store: Located<StoreUrl>,
    pub(super) memory: MemorySettings,
    pub(super) redis: RedisSettings,
    pub(super) on_store_failure: OnStoreFailure,
    pub(super) listen: Listen,
    pub(super) share: Share,
    pub(super) http: HttpSettings,
    /// The position of `from` in each of `http.facts`.
    pub(super) fact_positions: Vec<Position>,
    pub(super) grpc: GrpcSettings,
    pub(super) headers: Vec<HeaderDialect>,
    pub(super) retry_after_jitter: Percent,
    pub(super) log: LogSettings,
    pub(super) admin: Option<TokenDigest>,
    pub(super) auth: Vec<TokenDigest>,
    pub(super) tls: Option<TlsSettings>,
    pub(super) ignored: Vec<Warning>,
    /// The files that the config names and `tollkeeper serve` reads.
    pub(super) files: Vec<NamedFile>,
    pub(super) proxy: ProxySettings,
    pub(super) limits: Vec<RawLimit>,
    /// The position of the key `limits`, or of the file as a whole.
    pub(super) limits_position: Position,
}

/// Reads a document; `None` if it is not a table.
pub(super) fn read(document: &Node, problems: &RefCell<Problems>) -> Option<RawConfig> {
    let fields = Fields::open(document, &key_table::ROOT, Scope::default(), problems)?;
    if !fields.has("limits") {
        fields.error(
            Position::default(),
            "the file has no `limits`",
            "write `limits: []` for a config without limits",
        );
    }
    let (http, fact_positions) = read_http(&fields.table("http"), problems);
    let mut files = Vec::new();
    let listen = read_listen(&fields.table("listen"));
    let proxy = proxy::read(&fields.table("proxy"), &http, problems);
    let ignored = fields.table("validate").parse_list("ignore", Warning::parse);
    Some(RawConfig {
        store: defaulted(fields.parse("store", |text| {
            text.parse::<StoreUrl>().map_err(|error| without_help(error.to_string()))
        })),
        memory: read_memory(&fields.table("memory")),
        redis: read_redis(&fields.table("redis"), &mut files),
        on_store_failure: limit::on_store_failure(defaulted(fields.choice("on_store_failure")).value),
        listen,
        share: defaulted(fields.share("share")).value,
        http,
        fact_positions,
        grpc: GrpcSettings { headers: read_headers(&fields.table("grpc")) },
        headers: read_headers(&fields),
        retry_after_jitter: defaulted(fields.percent("retry_after_jitter")).value,
        log: read_log(&fields.table("log")),
        admin: read_admin(&fields),
        auth: read_auth(&fields),
        tls: read_tls(&fields, &mut files),
        proxy,
        ignored: ignored.into_iter().map(|located| located.value).collect(),
        files,
        limits: read_limits(&fields, problems),
        limits_position: fields.key_position("limits").unwrap_or_default(),
    })
}

/// The value of a key that has a default.
pub(super) fn defaulted<T>(located: Option<Located<T>>) -> Located<T> {
    located.expect("the key table has a valid default")
}

/// An error whose message already contains the suggestion.
fn without_help(message: String) -> InvalidValue {
    InvalidValue::new(message, "")
}

/// A number within the bounds of the key table.
pub(super) fn number<T: TryFrom<u64>>(fields: &Fields<'_>, key: &str, most: T) -> T {
    T::try_from(defaulted(fields.count(key)).value).unwrap_or(most)
}

/// The path of a file that `tollkeeper serve` reads.
fn named_file(
    fields: &Fields<'_>,
    key: &str,
    name: &'static str,
    files: &mut Vec<NamedFile>,
) -> Option<PathBuf> {
    let path = path(fields, key)?;
    files.push(NamedFile { key: name, path: path.clone(), position: fields.value_position(key) });
    Some(path)
}

fn path(fields: &Fields<'_>, key: &str) -> Option<PathBuf> {
    let parse = |text: &str| match text {
        "" => Err(InvalidValue::new("the path is empty", "leave the key out instead")),
        _ if text.contains('\0') => Err(InvalidValue::new("a path has no NUL", "")),
        _ => Ok(PathBuf::from(text)),
    };
    fields.parse(key, parse).map(|located| located.value)
}

fn read_log(fields: &Fields<'_>) -> LogSettings {
    let parse = |text: &str| match units::rate(text)? {
        units::Rate::Every { count: 0, .. } => {
            Err(InvalidValue::new("a rate of 0 logs no refusals", "leave the key out"))
        }
        units::Rate::Unlimited => {
            Err(InvalidValue::new("the refusal log needs a bounded rate", "such as `10/s`"))
        }
        units::Rate::Every { count, period } => {
            let rate = Quota::every(count, period).burst(count);
            CheckedQuota::new(Algorithm::TokenBucket, rate).map_err(|error| without_help(error.to_string()))
        }
    };
    LogSettings { refusals: fields.parse("refusals", parse).map(|located| located.value) }
}

fn read_memory(fields: &Fields<'_>) -> MemorySettings {
    MemorySettings {
        max_keys: number(fields, "max_keys", usize::MAX),
        max_log_bytes: number(fields, "max_log_bytes", usize::MAX),
        snapshot: path(fields, "snapshot"),
        snapshot_every: defaulted(fields.duration("snapshot_every")).value,
    }
}

fn read_redis(fields: &Fields<'_>, files: &mut Vec<NamedFile>) -> RedisSettings {
    let prefix = |text: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':');
        if (1..=64).contains(&text.len()) && text.bytes().all(allowed) {
            return Ok(text.to_owned());
        }
        Err(InvalidValue::new(
            format!("{} is not a prefix", quoted(text)),
            "1 to 64 of `A-Z a-z 0-9 . _ : -`",
        ))
    };
    let breaker = fields.table("breaker");
    let ca = named_file(fields, "ca", "redis.ca", files);
    let cert = named_file(fields, "cert", "redis.cert", files);
    let key = named_file(fields, "key", "redis.key", files);
    for (one, other) in [("cert", "key"), ("key", "cert")] {
        if fields.has(one) && !fields.has(other) {
            let message = format!("`redis.{one}` without `redis.{other}`");
            fields.error(
                fields.value_position(one),
                message,
                "a certificate needs its private key: give both, or neither",
            );
        }
    }
    RedisSettings {
        prefix: defaulted(fields.parse("prefix", prefix)).value,
        deadline: defaulted(fields.duration("deadline")).value,
        breaker: BreakerSettings {
            failures: number(&breaker, "failures", u32::MAX),
            late: defaulted(breaker.percent("late")).value,
            cooldown: defaulted(breaker.duration("cooldown")).value,
        },
        connections: number(fields, "connections", usize::MAX),
        nodes: number(fields, "nodes", usize::MAX),
        denial_bound: defaulted(fields.bool("denial_bound")).value,
        key_format: match defaulted(fields.choice("key_format")).value {
            "compact" => KeyFormat::Compact,
            _ => KeyFormat::Readable,
        },
        ca,
        cert,
        key,
    }
}

fn read_listen(fields: &Fields<'_>) -> Listen {
    let listener = |key| {
        let parse = |text: &str| text.parse::<Listener>().map_err(|error| without_help(error.to_string()));
        fields.parse(key, parse).map(|located| located.value)
    };
    Listen {
        http: listener("http"),
        grpc: listener("grpc"),
        resp: listener("resp"),
        proxy: listener("proxy"),
    }
}

fn read_headers(fields: &Fields<'_>) -> Vec<HeaderDialect> {
    let mut dialects: Vec<HeaderDialect> = Vec::new();
    for located in fields.choices("headers") {
        let dialect = HeaderDialect::ALL.into_iter().find(|dialect| dialect.name() == located.value);
        let dialect = dialect.expect("the key table lists the dialects");
        let is_draft = |dialect: HeaderDialect| dialect != HeaderDialect::XRateLimit;
        if dialects.contains(&dialect) {
            fields.error(located.position, format!("`headers` lists `{}` twice", dialect.name()), "keep one");
        } else if let Some(other) = dialects.iter().find(|other| is_draft(**other) && is_draft(dialect)) {
            let message = format!(
                "`headers` has both `{}` and `{}`, which are the same headers",
                other.name(),
                dialect.name()
            );
            fields.error(
                located.position,
                message,
                "keep one of them; only `x-ratelimit` can be combined with another",
            );
        } else {
            dialects.push(dialect);
        }
    }
    dialects
}

fn read_http(fields: &Fields<'_>, problems: &RefCell<Problems>) -> (HttpSettings, Vec<Position>) {
    let mut routes: Vec<Located<String>> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for route in fields.parse_list("routes", http::route) {
        if seen.insert(http::canonical_route(&route.value)) {
            routes.push(route);
        } else {
            let message = format!(
                "`http.routes` has two patterns that match the same paths as {}",
                quoted(&route.value)
            );
            fields.error(
                route.position,
                message,
                "keep one: case and the names in braces make no difference",
            );
        }
    }
    let network =
        |text: &str| text.parse().map_err(|error| without_help(format!("{} is {error}", quoted(text))));
    let (facts, positions) = fields
        .map("facts")
        .into_iter()
        .filter_map(|entry| read_fact(&entry.key, entry.position, &entry.node, problems))
        .unzip();
    let encoded_slashes = match defaulted(fields.choice("encoded_slashes")).value {
        "decode" => EncodedSlashes::Decode,
        "keep" => EncodedSlashes::Keep,
        "refuse" => EncodedSlashes::Refuse,
        _ => EncodedSlashes::Both,
    };
    let settings = HttpSettings {
        trusted_proxies: fields
            .parse_list("trusted_proxies", network)
            .into_iter()
            .map(|located| located.value)
            .collect(),
        client_address: defaulted(fields.parse("client_address", http::client_address)).value,
        ipv6_prefix: number(fields, "ipv6_prefix", 128),
        facts,
        routes: routes.into_iter().map(|located| located.value).collect(),
        hosts: fields.parse_list("hosts", http::host_name).into_iter().map(|located| located.value).collect(),
        encoded_slashes,
    };
    (settings, positions)
}

fn read_fact(
    name: &str,
    position: Position,
    node: &Node,
    problems: &RefCell<Problems>,
) -> Option<(HttpFact, Position)> {
    let subject = format!("fact {}: ", quoted(name));
    let fields = Fields::open(node, &key_table::HTTP_FACT, Scope::of(&subject), problems)?;
    if !tollkeeper_core::facts::is_name(name) {
        fields.error(position, format!("{subject}a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`"), "");
    } else if !http::is_free(name) {
        let help = if name == "ip" {
            "set `http.client_address` to choose where it is read"
        } else {
            "use another name"
        };
        fields.subject_error(position, "every request has a fact of this name already", help);
    }
    if !fields.has("from") {
        fields.error(
            node.position,
            format!("{subject}`from` is missing"),
            "such as `from: header.x-user-id`",
        );
    }
    let strip = fields.text("strip").map(|located| located.value).filter(|text| !text.is_empty());
    let normalize = fields.choices("normalize").into_iter().map(|located| match located.value {
        "lowercase" => Normalization::Lowercase,
        "trim" => Normalization::Trim,
        _ => Normalization::Nfkc,
    });
    let from = fields.parse("from", http::source);
    let (normalize, hash, trusted) =
        (normalize.collect(), defaulted(fields.bool("hash")).value, defaulted(fields.bool("trusted")).value);
    let many = defaulted(fields.bool("many"));
    let from = from?;
    if many.value && !matches!(from.value, Source::Header(_)) {
        fields.subject_error(
            many.position,
            "`many` joins the lines of a header",
            "read it from `header.NAME`",
        );
    }
    let (position, many) = (from.position, many.value);
    Some((
        HttpFact { name: name.to_owned(), from: from.value, strip, normalize, hash, trusted, many },
        position,
    ))
}

fn read_limits(fields: &Fields<'_>, problems: &RefCell<Problems>) -> Vec<RawLimit> {
    let nodes = fields.nodes("limits");
    if nodes.len() > MAX_LIMITS {
        let message = format!("there are {} limits", nodes.len());
        fields.error(
            nodes[MAX_LIMITS].position,
            message,
            format!("at most {MAX_LIMITS}: one limit with `tiers` or `overrides` can replace many"),
        );
    }
    let limits = nodes.iter().take(MAX_LIMITS).enumerate();
    limits.filter_map(|(index, node)| RawLimit::read(node, index + 1, problems)).collect()
}

fn read_admin(fields: &Fields<'_>) -> Option<TokenDigest> {
    let admin = fields.table("admin");
    if fields.is_table("admin") && !admin.has("token_sha256") {
        let message = "`admin` has no `token_sha256`";
        fields.error(fields.value_position("admin"), message, "64 hex digits: `printf %s TOKEN | sha256sum`");
    }
    admin.parse("token_sha256", sha256).map(|located| located.value)
}

/// An `auth` section without tokens is an error: it must not admit every client.
fn read_auth(fields: &Fields<'_>) -> Vec<TokenDigest> {
    let auth = fields.table("auth");
    let tokens = auth.parse_list("token_sha256", sha256);
    if fields.is_table("auth") && auth.is_empty_list("token_sha256") {
        let help =
            "list the SHA-256 of each token, or leave `auth` out to let every client ask for decisions";
        fields.error(auth.value_position("token_sha256"), "`auth` lists no token", help);
    }
    tokens.into_iter().map(|located| located.value).collect()
}

fn read_tls(fields: &Fields<'_>, files: &mut Vec<NamedFile>) -> Option<TlsSettings> {
    let tls = fields.table("tls");
    for key in ["cert", "key"] {
        if fields.is_table("tls") && !tls.has(key) {
            let message = format!("`tls` has no `{key}`");
            fields.error(
                fields.value_position("tls"),
                message,
                "TLS needs a certificate and its private key",
            );
        }
    }
    Some(TlsSettings {
        client_ca: named_file(&tls, "client_ca", "tls.client_ca", files),
        cert: named_file(&tls, "cert", "tls.cert", files)?,
        key: named_file(&tls, "key", "tls.key", files)?,
    })
}

/// The name of a fact.
pub(super) fn fact_name(text: &str) -> Result<String, InvalidValue> {
    match tollkeeper_core::facts::is_name(text) {
        true => Ok(text.to_owned()),
        false => Err(InvalidValue::new(
            format!("{} is not the name of a fact", quoted(text)),
            "1 to 64 of `A-Z a-z 0-9 . _ : / -`",
        )),
    }
}

fn sha256(text: &str) -> Result<TokenDigest, InvalidValue> {
    // The value may be the token itself, so messages do not show it.
    let invalid = |what| Err(InvalidValue::new(what, "64 hex digits: `printf %s TOKEN | sha256sum`"));
    let digits: Option<Vec<u8>> =
        text.chars().map(|char| char.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let Some(digits) = digits.filter(|digits| digits.len() == 64) else {
        return invalid("this is not a SHA-256");
    };
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    match digest == OF_EMPTY_TEXT {
        true => invalid("this is the SHA-256 of the empty string: the token was empty when it was hashed"),
        false => Ok(TokenDigest(digest)),
    }
}

/// The SHA-256 of the empty string.
const OF_EMPTY_TEXT: [u8; 32] = [
    0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24, 0x27,
    0xae, 0x41, 0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
];
