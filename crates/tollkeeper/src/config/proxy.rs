//! Reads the section `proxy` of the config file: the settings of `tollkeeper proxy`.

use std::cell::RefCell;
use std::time::Duration;

use super::fields::{Fields, Scope};
use super::key_table;
use super::raw::{defaulted, fact_name, number};
use super::report::Problems;
use super::units;
use crate::http::{HttpSettings, Source};
use crate::percent::Percent;

/// Settings of the reverse proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxySettings {
    /// The protocol of the upstream.
    pub upstream_protocol: UpstreamProtocol,
    /// The `Host` that the upstream receives.
    pub host_header: HostHeader,
    /// How long connecting to the upstream may take.
    pub connect_timeout: Duration,
    /// How long the upstream may take to send the head of its response.
    pub timeout: Duration,
    /// How long a request or response body may make no progress.
    pub body_idle_timeout: Duration,
    /// The same for `text/event-stream` responses and upgraded connections.
    pub stream_idle_timeout: Duration,
    /// How long a connection of a client or to the upstream may be without a request.
    pub idle_timeout: Duration,
    /// How long a client may take to send the head of a request, from its first byte.
    pub header_timeout: Duration,
    /// The largest head of a request or response, in bytes.
    pub max_headers: usize,
    /// The most connections of clients.
    pub max_connections: usize,
    /// How often a request is sent again if it certainly did not reach the upstream: 0 or 1.
    pub retries: u32,
    /// When an address of the upstream is not used for a while.
    pub health: HealthSettings,
    /// Whether clients connect through load balancers that use the PROXY protocol.
    pub accept_proxy_protocol: bool,
    /// Whether the `X-Request-Id` of any client is kept, not only that of trusted proxies.
    pub trust_request_id: bool,
    /// Whether a second process may listen on the same address.
    pub reuse_port: bool,
    /// What the access log contains.
    pub access_log: AccessLogSettings,
    /// How many requests the upstream receives at the same time.
    pub concurrency: ConcurrencySettings,
    /// Which identical requests share one response.
    pub single_flight: Vec<SingleFlightSettings>,
}

/// The protocol of the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1, or what TLS negotiates.
    Auto,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, without negotiation where there is no TLS.
    Http2,
}

/// The `Host` that the upstream receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostHeader {
    /// The one that the client sent.
    Preserve,
    /// The one of the upstream's URL.
    Upstream,
}

/// When an address of the upstream is ejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthSettings {
    /// Consecutive failures that eject it.
    pub failures: u32,
    /// How long it is not used.
    pub eject: Duration,
}

/// What the access log contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessLogSettings {
    /// Whether paths are logged with their query.
    pub query: bool,
}

/// How many requests the upstream receives at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencySettings {
    /// The most concurrent requests.
    pub max: u32,
    /// The fewest, if the number adapts to the response time of the upstream; `None` if it is fixed at `max`.
    pub adaptive_min: Option<u32>,
    /// When a request stops counting.
    pub count: CountedUntil,
    /// The fact whose value is the priority of a request.
    pub priority: Option<String>,
    /// The part of the limit that each listed priority may use, such as `("low", 70%)`. The others have their defaults.
    pub priorities: Vec<(String, Percent)>,
    /// The most requests that wait for their turn.
    pub queue: usize,
    /// How long a request may wait for its turn.
    pub queue_wait: Duration,
}

/// When a request stops counting as in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedUntil {
    /// When its response body or tunnel has ended.
    Response,
    /// When the head of its response has arrived.
    Head,
}

/// An entry of `single_flight`: identical requests share one response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SingleFlightSettings {
    /// The facts that a request must have, each with its patterns, as in the `when` of a limit.
    pub when: Vec<(String, Vec<String>)>,
    /// The facts that must be equal.
    pub by: Vec<String>,
}

/// The facts that tell different resources apart.
const RESOURCE: [&str; 3] = ["host", "path", "query"];

/// Reads the section; with all defaults if it is absent.
pub(super) fn read(fields: &Fields<'_>, http: &HttpSettings, problems: &RefCell<Problems>) -> ProxySettings {
    let accept_proxy_protocol = defaulted(fields.bool("accept_proxy_protocol")).value;
    if accept_proxy_protocol && http.trusted_proxies.is_empty() {
        let message =
            "`proxy.accept_proxy_protocol`: without `http.trusted_proxies` every connection would be closed";
        fields.error(
            fields.value_position("accept_proxy_protocol"),
            message.to_owned(),
            "list the addresses of the load balancers in `http.trusted_proxies`",
        );
    }
    let duration = |key| defaulted(fields.duration(key)).value;
    let (health, access_log) = (fields.table("health"), fields.table("access_log"));
    ProxySettings {
        upstream_protocol: match defaulted(fields.choice("upstream_protocol")).value {
            "http1" => UpstreamProtocol::Http1,
            "http2" => UpstreamProtocol::Http2,
            _ => UpstreamProtocol::Auto,
        },
        host_header: match defaulted(fields.choice("host_header")).value {
            "upstream" => HostHeader::Upstream,
            _ => HostHeader::Preserve,
        },
        connect_timeout: duration("connect_timeout"),
        timeout: duration("timeout"),
        body_idle_timeout: duration("body_idle_timeout"),
        stream_idle_timeout: duration("stream_idle_timeout"),
        idle_timeout: duration("idle_timeout"),
        header_timeout: duration("header_timeout"),
        max_headers: usize::try_from(defaulted(fields.size("max_headers")).value).unwrap_or(usize::MAX),
        max_connections: number(fields, "max_connections", usize::MAX),
        retries: number(fields, "retries", u32::MAX),
        health: HealthSettings {
            failures: number(&health, "failures", u32::MAX),
            eject: defaulted(health.duration("eject")).value,
        },
        accept_proxy_protocol,
        trust_request_id: defaulted(fields.bool("trust_request_id")).value,
        reuse_port: defaulted(fields.bool("reuse_port")).value,
        access_log: AccessLogSettings { query: defaulted(access_log.bool("query")).value },
        concurrency: read_concurrency(&fields.table("concurrency"), http),
        single_flight: read_single_flight(fields, problems),
    }
}

fn read_concurrency(fields: &Fields<'_>, http: &HttpSettings) -> ConcurrencySettings {
    let max = number(fields, "max", u32::MAX);
    let min = number(fields, "min", u32::MAX);
    let adaptive = defaulted(fields.bool("adaptive")).value;
    if adaptive && min > max {
        let message = format!("`proxy.concurrency`: `min` {min} is above `max` {max}");
        fields.error(fields.value_position("min"), message, "lower `min`, or raise `max`");
    }
    let mut priorities = Vec::new();
    for entry in fields.value_map("priorities") {
        let (name, share) = entry.value;
        match units::percent(&share) {
            Ok(share) => priorities.push((name, share)),
            Err(invalid) => {
                let message = format!("`proxy.concurrency.priorities`: {}", invalid.message);
                fields.error(entry.position, message, invalid.help);
            }
        }
    }
    let priority = fields.parse("priority", fact_name);
    if let Some(fact) = &priority {
        let declared = http.facts.iter().find(|declared| declared.name == fact.value);
        let source = declared.map(|declared| declared.from.clone()).or_else(|| Source::of(&fact.value));
        if let Some(Source::Body(_)) = source {
            let message = format!(
                "`proxy.concurrency.priority`: `{}` is in the body, and the priority is needed before the body is read",
                fact.value
            );
            fields.error(fact.position, message, "use a header, a cookie or the query");
        }
    }
    ConcurrencySettings {
        max,
        adaptive_min: adaptive.then_some(min),
        count: match defaulted(fields.choice("count")).value {
            "head" => CountedUntil::Head,
            _ => CountedUntil::Response,
        },
        priority: priority.map(|located| located.value),
        priorities,
        queue: number(fields, "queue", usize::MAX),
        queue_wait: defaulted(fields.duration("queue_wait")).value,
    }
}

fn read_single_flight(fields: &Fields<'_>, problems: &RefCell<Problems>) -> Vec<SingleFlightSettings> {
    let mut flights = Vec::new();
    for node in fields.nodes("single_flight") {
        let scope = Scope::of("`proxy.single_flight`: ");
        let Some(flight) = Fields::open(node, &key_table::SINGLE_FLIGHT, scope, problems) else { continue };
        flight.require();
        let when = flight.condition("when").into_iter().map(|located| located.value).collect();
        let by: Vec<String> =
            flight.parse_list("by", fact_name).into_iter().map(|located| located.value).collect();
        let missing = RESOURCE.iter().find(|fact| !by.iter().any(|by| by == *fact));
        if let Some(missing) = missing.filter(|_| flight.has("by"))
            && !defaulted(flight.bool("unsafe")).value
        {
            let message = format!(
                "`proxy.single_flight`: without `{missing}` in `by`, requests for different resources would share a \
                 response"
            );
            let help = "write `by: [host, path, query, …]`, or `unsafe: true` if responses cannot differ";
            flight.error(flight.value_position("by"), message, help);
        }
        flights.push(SingleFlightSettings { when, by });
    }
    flights
}
