//! Every key of the config file, in one table.
//!
//! The reader takes names, ranges, choices and defaults from here, the JSON schema and the reference
//! (`docs/config.md`) are printed from it: so a key is documented, checked and completed by an editor, or
//! it does not exist.

/// A table of the file and the keys it may have.
#[derive(Debug)]
pub(super) struct Section {
    /// What stands before its keys in messages and headings.
    pub(super) path: &'static str,
    pub(super) doc: &'static str,
    pub(super) keys: &'static [Key],
}

/// A key of a table.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) doc: &'static str,
    /// What it is when it is not there, as it would be written in YAML; empty if it is nothing.
    pub(super) default: &'static str,
    /// A value, as it would be written in YAML.
    pub(super) example: &'static str,
    pub(super) support: Support,
    /// Whether a table of this kind is nothing without it.
    pub(super) required: bool,
}

/// Whether there is something behind a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Support {
    Ready,
    /// The key is checked and then refused: its part of the product does not exist yet.
    NotYet,
}

/// What a value must be.
#[derive(Debug)]
pub(super) enum Kind {
    /// The URL of a store.
    Store,
    /// A path of a file.
    Path,
    /// An address with port, or `off`.
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
    Percent,
    Share,
    Rate,
    /// One of these words. Those that are refused with "not yet" are listed apart.
    Choice {
        words: &'static [&'static str],
        not_yet: &'static [&'static str],
    },
    /// The name of a limit.
    LimitName,
    /// The name of a fact.
    Fact,
    /// A text, or a number or truth value that is taken as its text.
    Value,
    /// Any text.
    Text,
    /// What Redis keys begin with.
    Prefix,
    /// An address or a network.
    Network,
    /// A path pattern of HTTP.
    Route,
    /// The name of a host, without a port.
    HostName,
    /// Where the address of a client is read from.
    ClientAddress,
    /// Where a fact is read from.
    Source,
    /// A status of HTTP, or a class of them.
    Status,
    /// 64 hex digits.
    Sha256,
    /// What is charged when there is no cost.
    CostMissing,
    /// The code of a warning.
    Warning,
    List(&'static Kind),
    /// One value, or a list of them.
    OneOrList(&'static Kind),
    Table(&'static Section),
    /// Names that the file chooses, each with such a value.
    Map {
        names: Names,
        value: &'static Kind,
    },
    /// What a tier or an override grants: a rate, or a table.
    Grant(&'static Section),
}

/// What the keys of a map are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    Fact,
    Tier,
    Value,
}

const fn key(name: &'static str, kind: Kind, doc: &'static str) -> Key {
    Key { name, kind, doc, default: "", example: "", support: Support::Ready, required: false }
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

    const fn not_yet(self) -> Key {
        Key { support: Support::NotYet, ..self }
    }
}

impl Section {
    /// The key of that name.
    pub(super) fn find(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }
}

/// Every section of the file, the file first.
#[cfg(test)]
pub(super) fn sections() -> Vec<&'static Section> {
    fn inside(kind: &'static Kind, found: &mut Vec<&'static Section>) {
        match kind {
            Kind::Table(section) | Kind::Grant(section)
                if found.iter().all(|known| !std::ptr::eq(*known, *section)) =>
            {
                found.push(section);
                section.keys.iter().for_each(|key| inside(&key.kind, found));
            }
            Kind::List(inner) | Kind::OneOrList(inner) | Kind::Map { value: inner, .. } => {
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

const fn choice(words: &'static [&'static str]) -> Kind {
    Kind::Choice { words, not_yet: &[] }
}

const HEADERS: Kind = Kind::List(&choice(&["ietf", "draft-03", "draft-06", "draft-07", "x-ratelimit"]));
const ON_STORE_FAILURE: Kind = choice(&["allow", "deny", "local"]);
const CONDITION: Kind = Kind::Map { names: Names::Fact, value: &Kind::OneOrList(&Kind::Value) };

/// The file.
pub(super) static ROOT: Section = Section {
    path: "",
    doc: "A config file is one table with these keys. YAML, TOML and JSON have the same shape; the ending of the \
          file's name says which it is.",
    keys: &[
        key(
            "store",
            Kind::Store,
            "Where counts are kept.",
        ).default("memory://").example("memory://"),
        key("memory", Kind::Table(&MEMORY), "The embedded store."),
        key("redis", Kind::Table(&REDIS), "How a Redis store is used."),
        key(
            "on_store_failure",
            ON_STORE_FAILURE,
            "Who answers when the store does not: `allow` lets pass, `deny` refuses, `local` decides in this \
             process. A limit may say otherwise.",
        )
        .default("local")
        .example("local"),
        key(
            "listen",
            Kind::Table(&LISTEN),
            "Where the service listens. Flags and the environment win over this.",
        ),
        key(
            "share",
            Kind::Share,
            "Every count, burst and number of slots times this, rounded down but at least 1: the part of a region.",
        )
        .default("1/1")
        .example("1/3"),
        key("http", Kind::Table(&HTTP), "How facts are read from an HTTP request."),
        key("grpc", Kind::Table(&GRPC), "How the rate limit service for Envoy answers."),
        key(
            "headers",
            HEADERS,
            "Rate-limit headers of HTTP answers: at most one of `ietf`, `draft-03`, `draft-06`, `draft-07`, with or \
             without `x-ratelimit`. With none, only `Retry-After` is sent.",
        )
        .default("[ietf, x-ratelimit]")
        .example("[draft-07]"),
        key(
            "retry_after_jitter",
            Kind::Percent,
            "Lengthens the `Retry-After` header by a random part of up to this much, never by more than 30 s (1 s \
             for a wait below 10 s), so that clients that were refused together do not retry together.",
        )
        .default("10%")
        .example("25%"),
        key(
            "limits",
            Kind::List(&Kind::Table(&LIMIT)),
            "The limits, in the order in which answers list them. A file that has none on purpose says `[]`: one without \
             this key may be a file that is being written, and is rejected.",
        )
        .required(),
        key("proxy", Kind::Table(&PROXY), "The reverse proxy.").not_yet(),
        key("log", Kind::Table(&LOG), "What the service logs beside what goes wrong."),
        key("admin", Kind::Table(&ADMIN), "Who may change limits and see keys."),
        key("auth", Kind::Table(&AUTH), "Who may ask for decisions."),
        key("tls", Kind::Table(&TLS), "TLS for all listeners."),
        key("validate", Kind::Table(&VALIDATE), "What is not warned of."),
    ],
};

pub(super) static MEMORY: Section = Section {
    path: "memory",
    doc: "The embedded store: all counts are in the memory of this process.",
    keys: &[
        key(
            "max_keys",
            Kind::Count { least: 1, most: 1_000_000_000 },
            "The most keys that have a count of their own.",
        )
        .default("1000000")
        .example("200000"),
        key(
            "max_log_bytes",
            Kind::Count { least: 1, most: 1 << 40 },
            "The most bytes in logs of `sliding-log` limits.",
        )
        .default("268435456")
        .example("67108864"),
        key("snapshot", Kind::Path, "The file that counts are saved to, and that a restart goes on from.")
            .example("/var/lib/tollkeeper/state"),
        key("snapshot_every", Kind::Duration { least: 100, most: DAY }, "The time between two snapshots.")
            .default("10s")
            .example("30s"),
    ],
};

pub(super) static REDIS: Section = Section {
    path: "redis",
    doc: "How a Redis or Valkey store is used.",
    keys: &[
        key(
            "prefix",
            Kind::Prefix,
            "What all keys begin with.",
        ).default("tk").example("tk-staging"),
        key(
            "deadline",
            Kind::Duration { least: 1, most: 60 * SECOND },
            "How long a decision may take before `on_store_failure` answers.",
        )
            .default("10ms")
            .example("25ms"),
        key("breaker", Kind::Table(&BREAKER), "When the store is left alone for a while."),
        key(
            "connections",
            Kind::Count { least: 1, most: 64 },
            "Connections to each server.",
        ).default("2").example("4"),
        key(
            "nodes",
            Kind::Count { least: 1, most: 100_000 },
            "How many processes share the store: each decides on this part of a limit while the store is away.",
        )
        .default("1")
        .example("4"),
        key(
            "key_format",
            choice(&["readable", "compact"]),
            "`readable` keys hold the values of facts, `compact` ones a hash of them.",
        )
        .default("readable")
        .example("compact"),
        key(
            "ca",
            Kind::Path,
            "The certificates that the server's must descend from.",
        ).example("ca.pem"),
        key("cert", Kind::Path, "The certificate to present to the server.").example("client.pem"),
        key("key", Kind::Path, "The private key of `cert`.").example("client.key"),
    ],
};

pub(super) static BREAKER: Section = Section {
    path: "redis.breaker",
    doc: "When the store is left alone for a while, because asking it only costs time.",
    keys: &[
        key("failures", Kind::Count { least: 1, most: 1_000 }, "So many failures in a row open it.")
            .default("5")
            .example("10"),
        key("late", Kind::Percent, "So many late answers of the last 100 (at least 20) open it.")
            .default("50%")
            .example("30%"),
        key(
            "cooldown",
            Kind::Duration { least: 1, most: 3_600 * SECOND },
            "How long it stays open before the store is tried again.",
        )
        .default("1s")
        .example("5s"),
    ],
};

pub(super) static LOG: Section = Section {
    path: "log",
    doc: "What the service logs beside what goes wrong. A change takes effect without a restart.",
    keys: &[
        key(
            "refusals",
            Kind::Rate,
            "Logs refused requests, at most as many as this rate: limit, key, cost, retry, transport and route. How \
             many more there were is logged once a second. Without it, refusals are not logged.",
        )
        .example("10/s"),
    ],
};

pub(super) static LISTEN: Section = Section {
    path: "listen",
    doc: "An IP address with a port, or `off`. Port 0 picks a free one.",
    keys: &[
        key("http", Kind::Listener, "The HTTP API.").example("127.0.0.1:8080"),
        key("grpc", Kind::Listener, "The rate limit service for Envoy.").example("off"),
        key("resp", Kind::Listener, "The Redis protocol.").example("127.0.0.1:6380"),
        key("proxy", Kind::Listener, "The reverse proxy.").example("127.0.0.1:8000"),
    ],
};

pub(super) static HTTP: Section = Section {
    path: "http",
    doc: "How facts are read from an HTTP request, in the middleware, the proxy and forward-auth.",
    keys: &[
        key(
            "trusted_proxies",
            Kind::List(&Kind::Network),
            "Forwarded addresses, and facts that are `trusted`, are believed only from these.",
        )
        .default("[]")
        .example("[10.0.0.0/8]"),
        key(
            "client_address",
            Kind::ClientAddress,
            "The one header that addresses are taken from, by the middleware and by forward-auth: \
             `x-forwarded-for`, `forwarded`, or `header.NAME` with a single address.",
        )
        .default("x-forwarded-for")
        .example("forwarded"),
        key(
            "encoded_slashes",
            choice(&["both", "decode", "keep", "refuse"]),
            "What `%2F`, `%5C` and a backslash mean in a path: they separate segments (`decode`), they do not \
             (`keep`), the request is refused (`refuse`), or limits of every route apply that a common server could \
             match (`both`). See [HTTP](http.md#one-path-many-spellings).",
        )
        .default("both")
        .example("decode"),
        key(
            "ipv6_prefix",
            Kind::Count { least: 1, most: 128 },
            "How many bits of an IPv6 address make a key.",
        )
            .default("64")
            .example("56"),
        key(
            "facts",
            Kind::Map { names: Names::Fact, value: &Kind::Table(&HTTP_FACT) },
            "Facts beyond those that every request has.",
        )
        .example("{ user: { from: header.x-user-id, trusted: true } }"),
        key(
            "routes",
            Kind::List(&Kind::Route),
            "Path patterns, of which the most specific one becomes the fact `route`. `{name}` stands for one \
             segment, `*` at the end for the rest.",
        )
        .default("[]")
        .example("[\"/login\", \"/users/{id}\", \"/api/*\"]"),
        key(
            "hosts",
            Kind::List(&Kind::HostName),
            "Names of this server, besides addresses and `localhost`, that `Host` may carry on a loopback listener \
             in calls that need no token: against web pages that give their own name this address.",
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
            Kind::Source,
            "`header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME` (a top-level field of a JSON or form body of at \
             most 64 KiB), `ip`, `method`, `host`, `path` or `route`.",
        )
        .example("header.authorization")
        .required(),
        key(
            "strip",
            Kind::Text,
            "What is taken off the beginning of the value.",
        ).example("\"Bearer \""),
        key(
            "normalize",
            Kind::List(&choice(&["lowercase", "trim", "nfkc"])),
            "How the value is normalised, in this order, wherever it enters: HTTP, JSON, RESP, gRPC, the library.",
        )
            .default("[]")
            .example("[lowercase, trim]"),
        key(
            "hash",
            Kind::Bool,
            "Whether only a hash of the value is kept: for secrets. The raw value is hashed wherever it enters.",
        ).default("false").example("true"),
        key(
            "trusted",
            Kind::Bool,
            "Whether it is taken only from `trusted_proxies`.",
        ).default("false").example("true"),
        key(
            "many",
            Kind::Bool,
            "Whether a header may come in several lines, which are joined by `, `. Otherwise a request in which \
             the header occurs twice is refused where a limit needs it.",
        ).default("false").example("true"),
    ],
};

pub(super) static GRPC: Section = Section {
    path: "grpc",
    doc: "How the rate limit service for Envoy answers.",
    keys: &[key("headers", HEADERS, "The headers that Envoy is told to add.")
        .default("[ietf]")
        .example("[]")],
};

pub(super) static LIMIT: Section = Section {
    path: "limits",
    doc: "A limit. All limits that apply to a request must allow it; if one refuses, none is charged.",
    keys: &[
        key(
            "name",
            Kind::LimitName,
            "1 to 64 of `a-z 0-9 . _ -`, unique.",
        ).example("per-user").required(),
        key(
            "by",
            Kind::OneOrList(&Kind::Fact),
            "The fact, or facts, of which each value has a count of its own. Without it there is one \
             for all.",
        )
            .default("[]")
            .example("[user, route]"),
        key(
            "when",
            CONDITION,
            "The limit applies only when each of these facts matches one of its patterns, in which \
             `*` stands for anything.",
        )
            .example("{ route: /login, method: [POST, PUT] }"),
        key(
            "unless",
            CONDITION,
            "The limit does not apply when all of these facts match.",
        ).example("{ user: \"bot-*\" }"),
        key(
            "rate",
            Kind::Rate,
            "Count per period: `10/s`, `5/15m`, `unlimited`, or `0/s` to refuse all. Periods are `ms \
             s m min h hour d day w week`.",
        )
            .example("100/min"),
        key(
            "burst",
            Kind::Count { least: 1, most: ANY },
            "How many a bucket takes at once. Without it, the count of the rate.",
        ).example("20"),
        key(
            "algorithm",
            choice(&["token-bucket", "gcra", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log", "concurrency"]),
            "How the rate is kept; `gcra` is another name of `token-bucket`. Without it: `token-bucket` if there is \
             a `burst`, here, in a tier or in an override, else `sliding-window`.",
        )
        .example("sliding-log"),
        key(
            "limit",
            Kind::Count { least: 1, most: ANY },
            "How many at the same time: for `algorithm: concurrency`.",
        ).example("5"),
        key(
            "ttl",
            Kind::Duration { least: 1, most: 366 * DAY },
            "How long a slot is held at most: for `algorithm: concurrency`.",
        )
            .default("60s")
            .example("5m"),
        key("tier", Kind::Fact, "The fact that picks the tier.").example("plan"),
        key(
            "tiers",
            Kind::Map { names: Names::Tier, value: &Kind::Grant(&GRANT) },
            "What each tier is granted, in the place of `rate`, `burst` and `limit`.",
        )
            .example("{ free: 60/min, pro: { rate: 600/min, burst: 100 }, enterprise: unlimited }"),
        key(
            "default_tier",
            Kind::Value,
            "The tier of requests that name none, or one that is not listed. Required with `tiers`.",
        ).example("free"),
        key(
            "overrides",
            Kind::Map { names: Names::Value, value: &Kind::Grant(&GRANT) },
            "What single values of the fact in `by` are granted, whatever their tier.",
        )
            .example("{ acme-corp: { rate: 50000/min, burst: 5000 } }"),
        key(
            "allow",
            Kind::List(&Kind::Value),
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
            Kind::Fact,
            "The fact whose number is charged, instead of the cost of the request.",
        ).example("tokens"),
        key(
            "cost_missing",
            Kind::CostMissing,
            "What happens when the fact in `cost` is absent: `error` rejects the request (400 `invalid_cost`), with `skip` \
             the limit does not apply, and a number is charged instead; 0 charges nothing. Without `cost` it is an error.",
        )
        .default("error")
        .example("500"),
        key(
            "mode",
            choice(&["enforce", "shadow", "off"]),
            "`shadow` counts what it would refuse and refuses nothing; `off` does not apply.",
        )
            .default("enforce")
            .example("shadow"),
        key(
            "stagger",
            Kind::Bool,
            "Shifts the windows of each key, so that not all begin at once: for `algorithm: \
             fixed-window`.",
        )
            .default("false")
            .example("true"),
        key(
            "on_store_failure",
            ON_STORE_FAILURE,
            "Who answers when the store does not. Without it, as the file says at the top.",
        )
            .example("deny"),
        key(
            "headers",
            Kind::Bool,
            "Whether rate-limit headers may show this limit.",
        ).default("true").example("false"),
        key(
            "deduct_when",
            Kind::Table(&RESPONSE),
            "The charge is given back unless the response matches (middleware and proxy).",
        )
            .example("{ status: [401, 403] }"),
        key(
            "refund_when",
            Kind::Table(&RESPONSE),
            "The charge is given back if the response matches (middleware and proxy).",
        )
            .example("{ status: [304, 5xx] }"),
        key(
            "partition",
            Kind::Fact,
            "The fact in `by` whose value decides where a cluster keeps the count: limits with the same value there are decided in one step.",
        ).example("user"),
        key(
            "consistency",
            Kind::Choice { words: &["exact", "leased"], not_yet: &["leased"] },
            "`exact` asks the store each time; `leased` asks it for many at once.",
        )
        .default("exact")
        .example("exact"),
        key(
            "wait_replicas",
            Kind::Count { least: 0, most: 16 },
            "How many replicas must have a charge before it counts. More than 0 is refused: not yet.",
        )
            .default("0")
            .example("0"),
    ],
};

/// What a tier or an override may say.
pub(super) static GRANT: Section = Section {
    path: "tiers",
    doc: "What a tier or an override grants: a rate (`60/min`, `unlimited`), or a table. It replaces `rate`, `burst` \
          and `limit` together.",
    keys: &[
        key("rate", Kind::Rate, "Count per period.").example("600/min"),
        key(
            "burst",
            Kind::Count { least: 1, most: ANY },
            "How many a bucket takes at once. Without it, the count of the rate.",
        )
        .example("100"),
        key(
            "limit",
            Kind::Count { least: 1, most: ANY },
            "How many at the same time: for `algorithm: concurrency`.",
        )
        .example("10"),
    ],
};

pub(super) static RESPONSE: Section = Section {
    path: "deduct_when",
    doc: "A condition on the response. `deduct_when` and `refund_when` are not for `leaky-bucket` and `concurrency`.",
    keys: &[key("status", Kind::OneOrList(&Kind::Status), "Statuses (`401`) and classes of them (`5xx`).")
        .example("[401, 5xx]")
        .required()],
};

pub(super) static PROXY: Section = Section {
    path: "proxy",
    doc: "The reverse proxy. Not yet: the section is checked and refused.",
    keys: &[
        key(
            "connect_timeout",
            Kind::Duration { least: 1, most: DAY },
            "How long connecting to the upstream may take.",
        )
        .default("2s")
        .example("1s"),
        key("timeout", Kind::Duration { least: 1, most: DAY }, "How long the upstream may take to answer.")
            .default("60s")
            .example("30s"),
        key(
            "max_connections",
            Kind::Count { least: 1, most: 1_000_000 },
            "The most connections to the upstream.",
        )
        .default("512")
        .example("64"),
        key(
            "accept_proxy_protocol",
            Kind::Bool,
            "Whether clients come through a load balancer that speaks the PROXY protocol.",
        )
        .default("false")
        .example("true"),
        key("concurrency", Kind::Table(&PROXY_CONCURRENCY), "How many requests the upstream gets at once."),
        key(
            "single_flight",
            Kind::List(&Kind::Table(&SINGLE_FLIGHT)),
            "Requests that are alike wait for one answer.",
        )
        .example("[{ when: { route: /api/search }, by: [host, path, query] }]"),
    ],
};

pub(super) static PROXY_CONCURRENCY: Section = Section {
    path: "proxy.concurrency",
    doc: "How many requests the upstream gets at once.",
    keys: &[
        key("max", Kind::Count { least: 1, most: 1_000_000 }, "The most.").default("512").example("256"),
        key("adaptive", Kind::Bool, "Whether it follows how fast the upstream answers.")
            .default("false")
            .example("true"),
        key("min", Kind::Count { least: 1, most: 1_000_000 }, "The least, when adaptive.").example("8"),
        key("priority", Kind::Fact, "The fact whose number says who goes first.").example("priority"),
    ],
};

pub(super) static SINGLE_FLIGHT: Section = Section {
    path: "proxy.single_flight",
    doc: "Requests that are alike wait for one answer.",
    keys: &[
        key("when", CONDITION, "Which requests.").example("{ route: /api/search }"),
        key("by", Kind::OneOrList(&Kind::Fact), "The facts in which they are alike.")
            .example("[host, path, query]"),
    ],
};

pub(super) static ADMIN: Section = Section {
    path: "admin",
    doc: "Who may change limits and see keys: whoever sends `Authorization: Bearer TOKEN`. Without it, nobody may \
          change anything. A token is best 32 random bytes: `openssl rand -hex 32`.",
    keys: &[key(
        "token_sha256",
        Kind::Sha256,
        "The SHA-256 of the admin token, as 64 hex digits: `printf %s TOKEN | sha256sum`.",
    )
    .example("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")
    .required()],
};

pub(super) static AUTH: Section = Section {
    path: "auth",
    doc: "Who may ask for decisions: whoever has one of these tokens, or the admin token. Without it, everybody \
          who can connect.",
    keys: &[key(
        "token_sha256",
        Kind::List(&Kind::Sha256),
        "The SHA-256 of each token, as 64 hex digits. Several, so that one can replace another without a pause.",
    )
    .example("[9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08]")
    .required()],
};

pub(super) static TLS: Section = Section {
    path: "tls",
    doc: "TLS for all listeners. Certificates are read again when the config is or when their files change; to turn \
          TLS on or off takes a restart.",
    keys: &[
        key("cert", Kind::Path, "The certificate chain, in PEM.").example("server.pem").required(),
        key("key", Kind::Path, "The private key of `cert`, in PEM.").example("server.key").required(),
        key(
            "client_ca",
            Kind::Path,
            "The certificates that a client's must descend from. Without it, clients need none.",
        )
        .example("clients.pem"),
    ],
};

pub(super) static VALIDATE: Section = Section {
    path: "validate",
    doc: "What is not warned of, by `validate` and in the log.",
    keys: &[key(
        "ignore",
        Kind::List(&Kind::Warning),
        "Codes of [warnings](#warnings) that are known and accepted.",
    )
    .default("[]")
    .example("[W001]")],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Format};

    #[test]
    fn every_key_is_documented_and_has_an_example_or_keys_of_its_own() {
        for section in sections() {
            assert!(!section.doc.is_empty(), "{}", section.path);
            for key in section.keys {
                let sentence =
                    key.doc.starts_with(|char: char| char.is_uppercase() || char == '`' || char == '1')
                        && key.doc.ends_with('.');
                assert!(sentence, "{}.{}: {}", section.path, key.name, key.doc);
                let nested = matches!(key.kind, Kind::Table(_) | Kind::List(Kind::Table(_)));
                assert!(nested || !key.example.is_empty(), "{}.{} has no example", section.path, key.name);
            }
        }
    }

    /// Of the sections that are plain tables of the file, as it would be written.
    #[test]
    fn every_example_and_every_default_can_be_written_in_a_file() {
        for section in [&ROOT, &MEMORY, &REDIS, &LISTEN, &HTTP, &GRPC, &ADMIN, &AUTH, &VALIDATE] {
            for key in section.keys.iter().filter(|key| key.support == Support::Ready) {
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
                    assert!(parsed.is_ok(), "{text}\n{}", parsed.expect_err("not right"));
                }
            }
        }
    }
}
