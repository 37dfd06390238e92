//! Defines every key of the config file in one table: kind, default, example and documentation.
//!
//! The reader takes names, ranges, choices and defaults from this table, and the JSON schema and the reference
//! (`docs/config.md`) are generated from it. So every key that exists is documented, checked, and known to editors.

/// A table of the file and the keys it may have.
#[derive(Debug)]
pub(super) struct Section {
    /// The prefix of its keys in messages and headings, such as `redis.breaker`.
    pub(super) path: &'static str,
    pub(super) doc: &'static str,
    pub(super) keys: &'static [Key],
}

/// A key of a table.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: KeyKind,
    pub(super) doc: &'static str,
    /// The value when the key is absent, as YAML; empty if there is no default.
    pub(super) default: &'static str,
    /// An example value, as YAML.
    pub(super) example: &'static str,
    /// Whether the table is invalid without this key.
    pub(super) required: bool,
}

/// The kind of a value.
#[derive(Debug)]
pub(super) enum KeyKind {
    /// The URL of a store.
    Store,
    /// The path of a file.
    Path,
    /// An address with a port, or `off`.
    Listener,
    /// A whole number within bounds.
    Count {
        least: u64,
        most: u64,
    },
    Bool,
    /// A duration within bounds, which are in milliseconds.
    Duration {
        least: u64,
        most: u64,
    },
    /// A number of bytes within bounds, such as `64KiB`.
    Size {
        least: u64,
        most: u64,
    },
    Percent,
    Share,
    Rate,
    /// One of `words`. Those in `not_yet` are rejected as not supported yet.
    Choice {
        words: &'static [&'static str],
        not_yet: &'static [&'static str],
    },
    /// The name of a limit.
    LimitName,
    /// The name of a fact.
    Fact,
    /// A string, or a number or boolean that is read as its text.
    Value,
    /// Any string.
    Text,
    /// The prefix of Redis keys.
    Prefix,
    /// An address or a network.
    Network,
    /// A path pattern, such as `/users/{id}`.
    Route,
    /// The name of a host, without a port.
    HostName,
    /// The header that holds the address of the client.
    ClientAddress,
    /// The part of a request that a fact is read from.
    Source,
    /// An HTTP status, or a class of them.
    Status,
    /// 64 hex digits.
    Sha256,
    /// `error`, `skip` or the number to charge when the cost is missing.
    CostMissing,
    /// The code of a warning.
    Warning,
    List(&'static KeyKind),
    /// One value, or a list of them.
    OneOrList(&'static KeyKind),
    Table(&'static Section),
    /// A table with names that the file chooses, each with a value of this kind.
    Map {
        names: Names,
        value: &'static KeyKind,
    },
    /// The grant of a tier or an override: a rate, or a table.
    Grant(&'static Section),
}

/// The kind of the names in a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    Fact,
    Tier,
    Value,
}

const fn key(name: &'static str, kind: KeyKind, doc: &'static str) -> Key {
    Key { name, kind, doc, default: "", example: "", required: false }
}

impl Key {
    const fn default(self, default: &'static str) -> Key {
        Key { default, ..self }
    }

    const fn example(self, example: &'static str) -> Key {
        Key { example, ..self }
    }

    const fn required(self) -> Key {
        Key { required: true, ..self }
    }
}

impl Section {
    /// The key with this name.
    pub(super) fn find(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }
}

/// Every section of the file, beginning with the file itself.
#[cfg(test)]
pub(super) fn sections() -> Vec<&'static Section> {
    fn inside(kind: &'static KeyKind, found: &mut Vec<&'static Section>) {
        match kind {
            KeyKind::Table(section) | KeyKind::Grant(section)
                if found.iter().all(|known| !std::ptr::eq(*known, *section)) =>
            {
                found.push(section);
                section.keys.iter().for_each(|key| inside(&key.kind, found));
            }
            KeyKind::List(inner) | KeyKind::OneOrList(inner) | KeyKind::Map { value: inner, .. } => {
                inside(inner, found)
            }
            _ => {}
        }
    }
    let mut found = vec![&ROOT];
    ROOT.keys.iter().for_each(|key| inside(&key.kind, &mut found));
    found
}

const SECOND: u64 = 1_000;
const DAY: u64 = 86_400 * SECOND;
const ANY: u64 = u64::MAX;

const fn choice(words: &'static [&'static str]) -> KeyKind {
    KeyKind::Choice { words, not_yet: &[] }
}

const HEADERS: KeyKind = KeyKind::List(&choice(&["ietf", "draft-03", "draft-06", "draft-07", "x-ratelimit"]));
const ON_STORE_FAILURE: KeyKind = choice(&["allow", "deny", "local"]);
const CONDITION: KeyKind = KeyKind::Map { names: Names::Fact, value: &KeyKind::OneOrList(&KeyKind::Value) };

/// A file of policy tests.
pub(super) static TEST_FILE: Section = Section {
    path: "",
    doc: "A file of policy tests.",
    keys: &[
        key("policy", KeyKind::Path, "The config file that is tested, relative to this file."),
        key(
            "limits",
            KeyKind::List(&KeyKind::Table(&LIMIT)),
            "The limits that are tested, instead of a file.",
        ),
        key("start", KeyKind::Text, "The time of the clock when each test starts."),
        key("tests", KeyKind::List(&KeyKind::Table(&TEST)), "The tests.").required(),
    ],
};

/// A policy test.
pub(super) static TEST: Section = Section {
    path: "tests",
    doc: "A test. It has a store of its own.",
    keys: &[
        key("name", KeyKind::Text, "What the test shows.").required(),
        key("facts", FACT_VALUES, "The facts of every row, unless the row has others."),
        key("rows", KeyKind::List(&KeyKind::Table(&ROW)), "The requests of the test, in order.").required(),
    ],
};

/// A row of a policy test.
pub(super) static ROW: Section = Section {
    path: "tests.rows",
    doc: "A request and what is expected of it.",
    keys: &[
        key("at", KeyKind::Text, "The time since the start.").default("0s"),
        key("facts", FACT_VALUES, "The facts of the request."),
        key("request", KeyKind::Text, "An HTTP request instead of facts: `POST /login`."),
        key(
            "headers",
            FACT_VALUES,
            "Headers of the request, and expected rate-limit headers of the response.",
        ),
        key("body", KeyKind::Text, "The body of the request."),
        key("peer", KeyKind::Text, "The address that the request comes from.").default("127.0.0.1"),
        key("cost", KeyKind::Count { least: 0, most: ANY }, "The cost of the request."),
        key("times", KeyKind::Count { least: 1, most: 1_000_000 }, "How often the request is repeated.")
            .default("1"),
        key("every", KeyKind::Text, "The time between repetitions.").default("0s"),
        key(
            "status",
            KeyKind::Count { least: 100, most: 999 },
            "The status of the response, for `deduct_when`.",
        ),
        key(
            "verb",
            choice(&["check", "peek", "acquire", "release", "reserve", "settle", "refund"]),
            "What is asked.",
        )
        .default("check"),
        key("ttl", KeyKind::Text, "How long a reservation can be settled.").default("60s"),
        key("as", KeyKind::Text, "A name for the slot or the charge."),
        key("of", KeyKind::Text, "The slot or charge that a release, settle or refund is about."),
        key("expect", KeyKind::Value, "allowed, refused, never, a status, or the code of an error.")
            .required(),
        key("by", KeyKind::LimitName, "The limit that binds."),
        key("retry_after", KeyKind::Text, "The time until a retry can pass."),
        key("delay", KeyKind::Text, "How long an admitted request is held."),
        key(
            "remaining",
            KeyKind::Map { names: Names::Value, value: &KeyKind::Count { least: 0, most: ANY } },
            "What is left of limits.",
        ),
        key("limits", KeyKind::List(&KeyKind::LimitName), "Exactly the limits that apply."),
        key(
            "would_refuse",
            KeyKind::List(&KeyKind::LimitName),
            "Exactly the shadow limits that would refuse.",
        ),
    ],
};

const FACT_VALUES: KeyKind = KeyKind::Map { names: Names::Fact, value: &KeyKind::Value };

/// The file.
pub(super) static ROOT: Section = Section {
    path: "",
    doc: "A config file is one table with these keys. YAML, TOML and JSON files have the same keys; the file \
          extension selects the format.",
    keys: &[
        key(
            "store",
            KeyKind::Store,
            "The store that holds the counts: `memory://`, or the URL of a Redis server.",
        ).default("memory://").example("memory://"),
        key("memory", KeyKind::Table(&MEMORY), "Settings of the embedded store."),
        key("redis", KeyKind::Table(&REDIS), "Settings of a Redis store."),
        key(
            "on_store_failure",
            ON_STORE_FAILURE,
            "What happens when the store does not answer: `allow` admits requests, `deny` refuses them, `local` \
             decides in this process. A limit can override it.",
        )
        .default("local")
        .example("local"),
        key(
            "listen",
            KeyKind::Table(&LISTEN),
            "The addresses that the server listens on. Flags and environment variables override them.",
        ),
        key(
            "share",
            KeyKind::Share,
            "Multiplies every count, burst and number of slots, rounded down but at least 1: the share of one region.",
        )
        .default("1/1")
        .example("1/3"),
        key("http", KeyKind::Table(&HTTP), "How facts are read from an HTTP request."),
        key("grpc", KeyKind::Table(&GRPC), "Settings of the rate limit service for Envoy."),
        key(
            "headers",
            HEADERS,
            "Rate-limit headers of HTTP responses: at most one of `ietf`, `draft-03`, `draft-06`, `draft-07`, with or \
             without `x-ratelimit`. With `[]`, only `Retry-After` is sent.",
        )
        .default("[ietf, x-ratelimit]")
        .example("[draft-07]"),
        key(
            "retry_after_jitter",
            KeyKind::Percent,
            "Lengthens the `Retry-After` header by a random amount of up to this percentage, at most 30 s (1 s for \
             a wait below 10 s), so that clients that were refused together do not retry together.",
        )
        .default("10%")
        .example("25%"),
        key(
            "limits",
            KeyKind::List(&KeyKind::Table(&LIMIT)),
            "The limits, in the order in which responses list them. Write `[]` for a config without limits: a file \
             without this key may be only partly written, and is rejected.",
        )
        .required(),
        key("proxy", KeyKind::Table(&PROXY), "The reverse proxy."),
        key("log", KeyKind::Table(&LOG), "What the server logs besides warnings and errors."),
        key("admin", KeyKind::Table(&ADMIN), "The token that is needed to change limits and to see keys."),
        key("auth", KeyKind::Table(&AUTH), "The tokens that clients need to ask for decisions."),
        key("tls", KeyKind::Table(&TLS), "TLS for all listeners."),
        key("validate", KeyKind::Table(&VALIDATE), "Which warnings are silenced."),
    ],
};

pub(super) static MEMORY: Section = Section {
    path: "memory",
    doc: "The embedded store keeps all counts in the memory of this process.",
    keys: &[
        key(
            "max_keys",
            KeyKind::Count { least: 1, most: 1_000_000_000 },
            "The most keys that are counted separately.",
        )
        .default("1000000")
        .example("200000"),
        key(
            "max_log_bytes",
            KeyKind::Count { least: 1, most: 1 << 40 },
            "The most bytes in the logs of `sliding-log` limits.",
        )
        .default("268435456")
        .example("67108864"),
        key(
            "snapshot",
            KeyKind::Path,
            "The file that counts are saved to and restored from after a restart.",
        )
        .example("/var/lib/tollkeeper/state"),
        key("snapshot_every", KeyKind::Duration { least: 100, most: DAY }, "The time between two snapshots.")
            .default("10s")
            .example("30s"),
    ],
};

pub(super) static REDIS: Section = Section {
    path: "redis",
    doc: "Settings of a Redis or Valkey store.",
    keys: &[
        key(
            "prefix",
            KeyKind::Prefix,
            "The prefix of all keys.",
        ).default("tk").example("tk-staging"),
        key(
            "deadline",
            KeyKind::Duration { least: 1, most: 60 * SECOND },
            "How long a decision may take before `on_store_failure` applies.",
        )
            .default("10ms")
            .example("25ms"),
        key("breaker", KeyKind::Table(&BREAKER), "When calls to the store are suspended."),
        key(
            "connections",
            KeyKind::Count { least: 1, most: 64 },
            "Connections to each server.",
        ).default("2").example("4"),
        key(
            "nodes",
            KeyKind::Count { least: 1, most: 100_000 },
            "How many processes share the store: while it does not answer, each process grants 1/`nodes` of a limit.",
        )
        .default("1")
        .example("4"),
        key(
            "denial_bound",
            KeyKind::Bool,
            "Whether a request that the last state of a key certainly refuses is refused without asking the store. The \
             store is asked again after 100 ms.",
        )
        .default("true")
        .example("false"),
        key(
            "key_format",
            choice(&["readable", "compact"]),
            "`readable` keys contain the values of facts, `compact` keys a hash of them.",
        )
        .default("readable")
        .example("compact"),
        key(
            "ca",
            KeyKind::Path,
            "The CA certificates that the server's certificate is verified against.",
        ).example("ca.pem"),
        key("cert", KeyKind::Path, "The client certificate to present to the server.").example("client.pem"),
        key("key", KeyKind::Path, "The private key of `cert`.").example("client.key"),
    ],
};

pub(super) static BREAKER: Section = Section {
    path: "redis.breaker",
    doc: "The breaker suspends calls to a store that fails or is slow, because waiting for it only costs time.",
    keys: &[
        key(
            "failures",
            KeyKind::Count { least: 1, most: 1_000 },
            "The number of consecutive failures that opens the breaker.",
        )
        .default("5")
        .example("10"),
        key(
            "late",
            KeyKind::Percent,
            "The percentage of late replies among the last 100 (at least 20) that opens the breaker.",
        )
        .default("50%")
        .example("30%"),
        key(
            "cooldown",
            KeyKind::Duration { least: 1, most: 3_600 * SECOND },
            "How long the breaker stays open before the store is tried again.",
        )
        .default("1s")
        .example("5s"),
    ],
};

pub(super) static LOG: Section = Section {
    path: "log",
    doc: "What the server logs besides warnings and errors. A change takes effect without a restart.",
    keys: &[key(
        "refusals",
        KeyKind::Rate,
        "Logs refused requests, at most at this rate, with limit, key, cost, retry, transport and route. The \
             number of further refusals is logged once a second. Without it, refusals are not logged.",
    )
    .example("10/s")],
};

pub(super) static LISTEN: Section = Section {
    path: "listen",
    doc: "An IP address with a port, or `off`. Port 0 picks a free port.",
    keys: &[
        key("http", KeyKind::Listener, "The HTTP API.").example("127.0.0.1:8080"),
        key("grpc", KeyKind::Listener, "The rate limit service for Envoy.").example("off"),
        key("resp", KeyKind::Listener, "The Redis protocol.").example("127.0.0.1:6380"),
        key("proxy", KeyKind::Listener, "The reverse proxy.").example("127.0.0.1:8000"),
    ],
};

pub(super) static HTTP: Section = Section {
    path: "http",
    doc: "How facts are read from an HTTP request, in the middleware, the proxy and forward-auth.",
    keys: &[
        key(
            "trusted_proxies",
            KeyKind::List(&KeyKind::Network),
            "Forwarded addresses and `trusted` facts are accepted only from these networks.",
        )
        .default("[]")
        .example("[10.0.0.0/8]"),
        key(
            "client_address",
            KeyKind::ClientAddress,
            "The header that the middleware and forward-auth read the client address from: `x-forwarded-for`, \
             `forwarded`, or `header.NAME` with a single address.",
        )
        .default("x-forwarded-for")
        .example("forwarded"),
        key(
            "encoded_slashes",
            choice(&["both", "decode", "keep", "refuse"]),
            "What `%2F`, `%5C` and a backslash mean in a path: they separate segments (`decode`), they do not \
             (`keep`), the request is refused (`refuse`), or the limits of every route apply that a common server \
             could match (`both`). See [headers and addresses](headers-and-addresses.md#one-path-many-spellings).",
        )
        .default("both")
        .example("decode"),
        key(
            "ipv6_prefix",
            KeyKind::Count { least: 1, most: 128 },
            "How many leading bits of an IPv6 address form the key.",
        )
            .default("64")
            .example("56"),
        key(
            "facts",
            KeyKind::Map { names: Names::Fact, value: &KeyKind::Table(&HTTP_FACT) },
            "Facts in addition to those that every request has.",
        )
        .example("{ user: { from: header.x-user-id, trusted: true } }"),
        key(
            "routes",
            KeyKind::List(&KeyKind::Route),
            "Path patterns. The most specific one that matches becomes the fact `route`. `{name}` matches one \
             segment, `*` at the end matches the rest.",
        )
        .default("[]")
        .example("[\"/login\", \"/users/{id}\", \"/api/*\"]"),
        key(
            "hosts",
            KeyKind::List(&KeyKind::HostName),
            "Host names of this server that `Host` may contain on a loopback listener in calls that need no token, \
             besides addresses and `localhost`. This protects against DNS rebinding by web pages.",
        )
        .default("[]")
        .example("[api.example.test]"),
    ],
};

pub(super) static HTTP_FACT: Section = Section {
    path: "http.facts",
    doc: "A fact that is read from the request.",
    keys: &[
        key(
            "from",
            KeyKind::Source,
            "`header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME` (a top-level field of a JSON or form body of at \
             most 64 KiB), `ip`, `method`, `host`, `path` or `route`.",
        )
        .example("header.authorization")
        .required(),
        key(
            "strip",
            KeyKind::Text,
            "A prefix that is removed from the value.",
        ).example("\"Bearer \""),
        key(
            "normalize",
            KeyKind::List(&choice(&["lowercase", "trim", "nfkc"])),
            "How the value is normalised, in this order, from every source: HTTP, JSON, RESP, gRPC and the library.",
        )
            .default("[]")
            .example("[lowercase, trim]"),
        key(
            "hash",
            KeyKind::Bool,
            "Whether only a hash of the value is kept, for secrets. Raw values from every source are hashed.",
        ).default("false").example("true"),
        key(
            "trusted",
            KeyKind::Bool,
            "Whether the fact is accepted only from `trusted_proxies`.",
        ).default("false").example("true"),
        key(
            "many",
            KeyKind::Bool,
            "Whether a header may have several lines, which are joined by `, `. Otherwise a request with two lines \
             of the header is refused if a limit needs it.",
        ).default("false").example("true"),
    ],
};

pub(super) static GRPC: Section = Section {
    path: "grpc",
    doc: "Settings of the rate limit service for Envoy.",
    keys: &[key("headers", HEADERS, "The rate-limit headers that responses ask Envoy to add.")
        .default("[ietf]")
        .example("[]")],
};

pub(super) static LIMIT: Section = Section {
    path: "limits",
    doc: "A limit. All limits that apply to a request must allow it. If one refuses, no limit is charged.",
    keys: &[
        key(
            "name",
            KeyKind::LimitName,
            "1 to 64 of `a-z 0-9 . _ -`, unique.",
        ).example("per-user").required(),
        key(
            "by",
            KeyKind::OneOrList(&KeyKind::Fact),
            "The fact or facts that form the key: each value has its own count. Without it, all requests share one \
             count.",
        )
            .default("[]")
            .example("[user, route]"),
        key(
            "when",
            CONDITION,
            "The limit applies only if each of these facts matches one of its patterns; `*` matches any text.",
        )
            .example("{ route: /login, method: [POST, PUT] }"),
        key(
            "unless",
            CONDITION,
            "The limit does not apply if all of these facts match.",
        ).example("{ user: \"bot-*\" }"),
        key(
            "rate",
            KeyKind::Rate,
            "Count per period: `10/s`, `5/15m`, `unlimited`, or `0/s` to refuse all requests. The units of periods \
             are `ms s m min h hour d day w week`.",
        )
            .example("100/min"),
        key(
            "burst",
            KeyKind::Count { least: 1, most: ANY },
            "How many units a full bucket holds. Without it, the count of the rate.",
        ).example("20"),
        key(
            "algorithm",
            choice(&["token-bucket", "gcra", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log", "concurrency"]),
            "How requests are counted; `gcra` is another name of `token-bucket`. Without it: `token-bucket` if the \
             limit, a tier or an override has a `burst`, else `sliding-window`.",
        )
        .example("sliding-log"),
        key(
            "limit",
            KeyKind::Count { least: 1, most: ANY },
            "The number of slots, for `algorithm: concurrency`.",
        ).example("5"),
        key(
            "ttl",
            KeyKind::Duration { least: 1, most: 366 * DAY },
            "The longest time that a slot is held, for `algorithm: concurrency`.",
        )
            .default("60s")
            .example("5m"),
        key("tier", KeyKind::Fact, "The fact that picks the tier.").example("plan"),
        key(
            "tiers",
            KeyKind::Map { names: Names::Tier, value: &KeyKind::Grant(&GRANT) },
            "The grant of each tier, instead of `rate`, `burst` and `limit`.",
        )
            .example("{ free: 60/min, pro: { rate: 600/min, burst: 100 }, enterprise: unlimited }"),
        key(
            "default_tier",
            KeyKind::Value,
            "The tier of requests without a tier or with an unknown one. Required with `tiers`.",
        ).example("free"),
        key(
            "overrides",
            KeyKind::Map { names: Names::Value, value: &KeyKind::Grant(&GRANT) },
            "The grants of single values of the fact in `by`, whatever their tier.",
        )
            .example("{ acme-corp: { rate: 50000/min, burst: 5000 } }"),
        key(
            "allow",
            KeyKind::List(&KeyKind::Value),
            "Values of the fact in `by` that the limit never applies to; for `ip`, addresses and \
             networks.",
        )
            .default("[]")
            .example("[10.0.0.0/8, 192.0.2.7]"),
        key(
            "missing",
            choice(&["skip", "share", "deny"]),
            "What happens when a fact in `by` is absent: the limit does not apply, all such requests \
             share one count, or they are refused.",
        )
            .default("skip")
            .example("share"),
        key(
            "cost",
            KeyKind::Fact,
            "The fact whose number is charged instead of the cost of the request.",
        ).example("tokens"),
        key(
            "cost_missing",
            KeyKind::CostMissing,
            "What happens when the fact in `cost` is absent: `error` rejects the request (400 `invalid_cost`), with \
             `skip` the limit does not apply, and a number is charged instead; 0 charges nothing. Requires `cost`.",
        )
        .default("error")
        .example("500"),
        key(
            "mode",
            choice(&["enforce", "shadow", "off"]),
            "`shadow` counts the requests that it would refuse, but admits them; `off` disables the limit.",
        )
            .default("enforce")
            .example("shadow"),
        key(
            "stagger",
            KeyKind::Bool,
            "Shifts the windows of each key, so that they do not all begin at the same time, for `algorithm: \
             fixed-window`.",
        )
            .default("false")
            .example("true"),
        key(
            "on_store_failure",
            ON_STORE_FAILURE,
            "What happens when the store does not answer. Without it, the top-level `on_store_failure` applies.",
        )
            .example("deny"),
        key(
            "headers",
            KeyKind::Bool,
            "Whether rate-limit headers may show this limit.",
        ).default("true").example("false"),
        key(
            "deduct_when",
            KeyKind::Table(&RESPONSE),
            "The charge is refunded unless the response matches (middleware and proxy).",
        )
            .example("{ status: [401, 403] }"),
        key(
            "refund_when",
            KeyKind::Table(&RESPONSE),
            "The charge is refunded if the response matches (middleware and proxy).",
        )
            .example("{ status: [304, 5xx] }"),
        key(
            "partition",
            KeyKind::Fact,
            "The fact in `by` whose value decides which node of a cluster keeps the count: limits with the same \
             value are decided in one step.",
        ).example("user"),
        key(
            "consistency",
            choice(&["exact", "leased"]),
            "`exact` asks the store for every request that it might admit; `leased` lets busy nodes take many units at \
             once, and admit requests without asking. The limit holds either way. Only for `token-bucket`, `fixed-window` \
             and `sliding-window`, and only on Redis.",
        )
        .default("exact")
        .example("leased"),
        key(
            "wait_replicas",
            KeyKind::Count { least: 0, most: 16 },
            "How many replicas must confirm a charge. More than 0 is not supported yet.",
        )
            .default("0")
            .example("0"),
    ],
};

/// The grant of a tier or an override.
pub(super) static GRANT: Section = Section {
    path: "tiers",
    doc: "The grant of a tier or an override: a rate (`60/min`, `unlimited`), or a table. It replaces `rate`, `burst` \
          and `limit` together.",
    keys: &[
        key("rate", KeyKind::Rate, "Count per period.").example("600/min"),
        key(
            "burst",
            KeyKind::Count { least: 1, most: ANY },
            "How many units a full bucket holds. Without it, the count of the rate.",
        )
        .example("100"),
        key(
            "limit",
            KeyKind::Count { least: 1, most: ANY },
            "The number of slots, for `algorithm: concurrency`.",
        )
        .example("10"),
    ],
};

pub(super) static RESPONSE: Section = Section {
    path: "deduct_when",
    doc: "A condition on the response. `leaky-bucket` and `concurrency` limits do not support `deduct_when` and \
          `refund_when`.",
    keys: &[key(
        "status",
        KeyKind::OneOrList(&KeyKind::Status),
        "Statuses (`401`) and classes of them (`5xx`).",
    )
    .example("[401, 5xx]")
    .required()],
};

pub(super) static PROXY: Section = Section {
    path: "proxy",
    doc: "The reverse proxy, `tollkeeper proxy URL`. Other commands ignore this section.",
    keys: &[
        key(
            "upstream_protocol",
            choice(&["auto", "http1", "http2"]),
            "The protocol of the upstream. `auto` is HTTP/1.1, or what TLS negotiates for an `https://` URL.",
        )
        .default("auto")
        .example("http2"),
        key(
            "host_header",
            choice(&["preserve", "upstream"]),
            "The `Host` that the upstream receives: the one of the client, or the one of the URL.",
        )
        .default("preserve")
        .example("upstream"),
        key(
            "connect_timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "How long connecting to the upstream may take.",
        )
        .default("2s")
        .example("1s"),
        key(
            "timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "How long the upstream may take to send the head of its response, and how long a leaky bucket may delay a \
             request.",
        )
        .default("60s")
        .example("30s"),
        key(
            "body_idle_timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "How long a request or response body may make no progress.",
        )
        .default("60s")
        .example("10s"),
        key(
            "stream_idle_timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "The same for `text/event-stream` responses and upgraded connections.",
        )
        .default("10m")
        .example("1h"),
        key(
            "idle_timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "How long a connection of a client or to the upstream may be without a request.",
        )
        .default("60s")
        .example("75s"),
        key(
            "header_timeout",
            KeyKind::Duration { least: 1, most: DAY },
            "How long a client may take to send the head of a request, from its first byte.",
        )
        .default("10s")
        .example("5s"),
        key(
            "max_headers",
            KeyKind::Size { least: 8 << 10, most: 1 << 20 },
            "The largest head of a request or response.",
        )
        .default("64KiB")
        .example("16KiB"),
        key(
            "max_connections",
            KeyKind::Count { least: 1, most: 1_000_000 },
            "The most connections of clients. Further ones are closed at once.",
        )
        .default("512")
        .example("10000"),
        key(
            "retries",
            KeyKind::Count { least: 0, most: 1 },
            "How often a request is sent again if it certainly did not reach the upstream.",
        )
        .default("1")
        .example("0"),
        key("health", KeyKind::Table(&PROXY_HEALTH), "When an address of the upstream is not used for a while."),
        key(
            "accept_proxy_protocol",
            KeyKind::Bool,
            "Whether clients connect through load balancers in `http.trusted_proxies` that use the PROXY protocol, \
             version 1 or 2. All other connections are then closed.",
        )
        .default("false")
        .example("true"),
        key(
            "trust_request_id",
            KeyKind::Bool,
            "Whether the `X-Request-Id` of any client is kept, not only that of trusted proxies.",
        )
        .default("false")
        .example("true"),
        key(
            "reuse_port",
            KeyKind::Bool,
            "Whether a second process may listen on the same address (`SO_REUSEPORT`), for restarts without loss.",
        )
        .default("false")
        .example("true"),
        key("access_log", KeyKind::Table(&PROXY_ACCESS_LOG), "What the access log of `--access-log` contains."),
        key(
            "concurrency",
            KeyKind::Table(&PROXY_CONCURRENCY),
            "How many requests the upstream receives at the same time.",
        ),
        key(
            "single_flight",
            KeyKind::List(&KeyKind::Table(&SINGLE_FLIGHT)),
            "Identical requests at the same time share one response.",
        )
        .example("[{ when: { route: /api/search }, by: [host, path, query] }]"),
    ],
};

pub(super) static PROXY_HEALTH: Section = Section {
    path: "proxy.health",
    doc: "An address that fails repeatedly is not used for a while, unless it is the only one. At most half of the \
          addresses are left out at the same time.",
    keys: &[
        key(
            "failures",
            KeyKind::Count { least: 1, most: 1_000_000 },
            "Consecutive failures: connections that fail, and responses 502 and 504 of the proxy itself.",
        )
        .default("5")
        .example("3"),
        key(
            "eject",
            KeyKind::Duration { least: 1, most: DAY },
            "How long the address is not used, give or take 15 %.",
        )
        .default("10s")
        .example("30s"),
    ],
};

pub(super) static PROXY_ACCESS_LOG: Section = Section {
    path: "proxy.access_log",
    doc: "What the access log of `--access-log` contains.",
    keys: &[key("query", KeyKind::Bool, "Whether paths are logged with their query.")
        .default("false")
        .example("true")],
};

pub(super) static PROXY_CONCURRENCY: Section = Section {
    path: "proxy.concurrency",
    doc: "How many requests the upstream receives at the same time. Further requests wait or get a 503, and are not \
          charged.",
    keys: &[
        key("max", KeyKind::Count { least: 1, most: 1_000_000 }, "The most concurrent requests.")
            .default("512")
            .example("256"),
        key("adaptive", KeyKind::Bool, "Whether the number adapts to the response time of the upstream.")
            .default("false")
            .example("true"),
        key(
            "min",
            KeyKind::Count { least: 1, most: 1_000_000 },
            "The fewest concurrent requests when `adaptive`.",
        )
        .default("8")
        .example("4"),
        key(
            "count",
            choice(&["response", "head"]),
            "Whether a request counts until its response has ended, or until the head of the response has arrived.",
        )
        .default("response")
        .example("head"),
        key("priority", KeyKind::Fact, "The fact whose value is the priority of a request.").example("priority"),
        key(
            "priorities",
            KeyKind::Map { names: Names::Value, value: &KeyKind::Percent },
            "The part of the limit that requests of each priority may use. Other values of the fact are `normal`.",
        )
        .default("{ high: 100%, normal: 90%, low: 70% }")
        .example("{ paid: 100%, normal: 80% }"),
        key(
            "queue",
            KeyKind::Count { least: 0, most: 1_000_000 },
            "The most requests that wait for their turn.",
        )
        .default("0")
        .example("100"),
        key(
            "queue_wait",
            KeyKind::Duration { least: 1, most: DAY },
            "How long a request may wait for its turn.",
        )
        .default("100ms")
        .example("1s"),
    ],
};

pub(super) static SINGLE_FLIGHT: Section = Section {
    path: "proxy.single_flight",
    doc: "Identical `GET` and `HEAD` requests at the same time share one response.",
    keys: &[
        key("when", CONDITION, "The requests that are combined.").example("{ route: /api/search }"),
        key("by", KeyKind::OneOrList(&KeyKind::Fact), "The facts that must be equal.")
            .example("[host, path, query]")
            .required(),
        key("unsafe", KeyKind::Bool, "Whether `by` may lack `host`, `path` or `query`.")
            .default("false")
            .example("true"),
    ],
};

pub(super) static ADMIN: Section = Section {
    path: "admin",
    doc: "Changing limits and seeing keys requires `Authorization: Bearer TOKEN`. Without this section, all changes are \
          refused. Use 32 random bytes as a token: `openssl rand -hex 32`.",
    keys: &[key(
        "token_sha256",
        KeyKind::Sha256,
        "The SHA-256 of the admin token, as 64 hex digits: `printf %s TOKEN | sha256sum`.",
    )
    .example("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")
    .required()],
};

pub(super) static AUTH: Section = Section {
    path: "auth",
    doc: "Asking for decisions requires one of these tokens, or the admin token. Without this section, every client \
          that can connect may ask.",
    keys: &[key(
        "token_sha256",
        KeyKind::List(&KeyKind::Sha256),
        "The SHA-256 of each token, as 64 hex digits. List the old and the new token while clients change over.",
    )
    .example("[9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08]")
    .required()],
};

pub(super) static TLS: Section = Section {
    path: "tls",
    doc: "TLS for all listeners. Certificates are reloaded when the config is reloaded or when their files change. \
          Turning TLS on or off requires a restart.",
    keys: &[
        key("cert", KeyKind::Path, "The certificate chain, in PEM.").example("server.pem").required(),
        key("key", KeyKind::Path, "The private key of `cert`, in PEM.").example("server.key").required(),
        key(
            "client_ca",
            KeyKind::Path,
            "The CA certificates that client certificates are verified against. Without it, clients need none.",
        )
        .example("clients.pem"),
    ],
};

pub(super) static VALIDATE: Section = Section {
    path: "validate",
    doc: "Warnings that `validate` and the log of the server do not show.",
    keys: &[key(
        "ignore",
        KeyKind::List(&KeyKind::Warning),
        "The codes of the [warnings](#warnings) to silence.",
    )
    .default("[]")
    .example("[W001]")],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Format};

    #[test]
    fn every_key_has_documentation_and_an_example() {
        for section in sections() {
            assert!(!section.doc.is_empty(), "{}", section.path);
            for key in section.keys {
                let sentence =
                    key.doc.starts_with(|char: char| char.is_uppercase() || char == '`' || char == '1')
                        && key.doc.ends_with('.');
                assert!(sentence, "{}.{}: {}", section.path, key.name, key.doc);
                let nested = matches!(key.kind, KeyKind::Table(_) | KeyKind::List(KeyKind::Table(_)));
                assert!(nested || !key.example.is_empty(), "{}.{} has no example", section.path, key.name);
            }
        }
    }

    /// Checks the sections that are plain tables of the file.
    #[test]
    fn every_example_and_default_is_valid() {
        for section in [&ROOT, &MEMORY, &REDIS, &LISTEN, &HTTP, &GRPC, &ADMIN, &AUTH, &VALIDATE] {
            for key in section.keys {
                for value in [key.example, key.default].into_iter().filter(|value| !value.is_empty()) {
                    let inner = format!("{{ {}: {value} }}", key.name);
                    let mut text = section
                        .path
                        .split('.')
                        .rev()
                        .filter(|name| !name.is_empty())
                        .fold(inner, |inner, name| format!("{{ {name}: {inner} }}"));
                    if key.name == "cert" || key.name == "key" {
                        text = "{ redis: { cert: a, key: b } }".to_owned();
                    }
                    let text = text.replacen('{', "{ limits: [],", 1);
                    let parsed = Config::parse("example", Format::Yaml, text.as_bytes(), &|_| None);
                    assert!(parsed.is_ok(), "{text}\n{}", parsed.expect_err("invalid"));
                }
            }
        }
    }
}
