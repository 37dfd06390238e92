//! Encodes the protobuf messages of OTLP: `ExportMetricsServiceRequest` and `ExportTraceServiceRequest` of
//! opentelemetry-proto 1.x.

use crate::telemetry::metrics::family::{Counts, Family, Labels, Series};
use crate::telemetry::trace::{Attribute, Span};

/// When a counter started and when it was read, in nanoseconds since the epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) since: u64,
    pub(super) now: u64,
}

/// `AGGREGATION_TEMPORALITY_CUMULATIVE`: values count from [`Times::since`], not from the last export.
const CUMULATIVE: u64 = 2;
/// `SPAN_KIND_SERVER`.
const SERVER: u64 = 2;

pub(super) fn metrics(families: &[Family], times: Times) -> Vec<u8> {
    request(|scope| {
        for family in families {
            scope.message(2, |metric| {
                let total = if matches!(family.series, Series::Counter(_)) { "_total" } else { "" };
                metric.text(1, &format!("{}{total}", family.name));
                metric.text(2, family.help);
                metric.text(3, unit(family.name));
                match &family.series {
                    Series::Gauge(series) => metric.message(5, |gauge| numbers(gauge, series, times)),
                    Series::Seconds(series) => metric.message(5, |gauge| seconds(gauge, series, times)),
                    Series::Counter(series) => metric.message(7, |sum| {
                        numbers(sum, series, times);
                        sum.number(2, CUMULATIVE);
                        sum.number(3, 1); // is_monotonic
                    }),
                    Series::Histogram(series) => metric.message(9, |histogram| {
                        for (labels, counts) in series {
                            histogram.message(1, |point| distribution(point, labels, counts, times));
                        }
                        histogram.number(2, CUMULATIVE);
                    }),
                }
            });
        }
    })
}

pub(super) fn traces(spans: &[Span]) -> Vec<u8> {
    request(|scope| {
        for span in spans {
            scope.message(2, |out| {
                out.bytes(1, &span.trace);
                out.bytes(2, &span.id);
                span.parent.iter().for_each(|parent| out.bytes(4, parent));
                out.text(5, span.name);
                out.number(6, SERVER);
                out.fixed(7, span.began);
                out.fixed(8, span.ended);
                for (name, value) in &span.attributes {
                    out.message(9, |pair| {
                        pair.text(1, name);
                        pair.message(2, |any| attribute(any, value));
                    });
                }
            });
        }
    })
}

/// A request with one resource, this process, and one scope.
fn request(content: impl FnOnce(&mut Message)) -> Vec<u8> {
    let mut request = Message::default();
    request.message(1, |all| {
        all.message(1, |resource| {
            for (name, value) in [
                ("service.name", "tollkeeper"),
                ("service.version", env!("CARGO_PKG_VERSION")),
                ("service.instance.id", &instance()),
            ] {
                label(resource, 1, name, value);
            }
        });
        all.message(2, |scope| {
            scope.message(1, |name| name.text(1, "tollkeeper"));
            content(scope);
        });
    });
    request.0
}

/// Distinguishes this process from others that export the same series, as `host:pid`.
fn instance() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}:{}", host.trim(), std::process::id())
}

fn unit(name: &str) -> &'static str {
    match name.rsplit('_').next() {
        Some("seconds") => "s",
        Some("bytes") => "By",
        _ => "1",
    }
}

fn numbers(out: &mut Message, series: &[(Labels, u64)], times: Times) {
    for (labels, value) in series {
        out.message(1, |point| {
            point.fixed(2, times.since);
            point.fixed(3, times.now);
            point.fixed(6, *value);
            labels.iter().for_each(|(name, value)| label(point, 7, name, value));
        });
    }
}

fn seconds(out: &mut Message, series: &[(Labels, f64)], times: Times) {
    for (labels, value) in series {
        out.message(1, |point| {
            point.fixed(2, times.since);
            point.fixed(3, times.now);
            point.double(4, *value);
            labels.iter().for_each(|(name, value)| label(point, 7, name, value));
        });
    }
}

fn distribution(point: &mut Message, labels: &Labels, counts: &Counts, times: Times) {
    point.fixed(2, times.since);
    point.fixed(3, times.now);
    point.fixed(4, counts.count());
    point.fixed(5, counts.sum.to_bits());
    point.message(6, |packed| counts.buckets.iter().for_each(|(_, count)| packed.raw(*count)));
    let ends = counts.buckets.iter().map(|(end, _)| *end).filter(|end| end.is_finite());
    point.message(7, |packed| ends.for_each(|end| packed.raw(end.to_bits())));
    labels.iter().for_each(|(name, value)| label(point, 9, name, value));
}

fn label(out: &mut Message, field: u64, name: &str, value: &str) {
    out.message(field, |pair| {
        pair.text(1, name);
        pair.message(2, |any| any.text(1, value));
    });
}

fn attribute(any: &mut Message, value: &Attribute) {
    match value {
        Attribute::Text(text) => any.text(1, text),
        Attribute::Truth(truth) => any.number(2, u64::from(*truth)),
        Attribute::Seconds(seconds) => any.double(4, *seconds),
        Attribute::Names(names) => any.message(5, |list| {
            names.iter().for_each(|name| list.message(1, |any| any.text(1, name)));
        }),
    }
}

/// A protobuf message being encoded.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn fixed(&mut self, field: u64, value: u64) {
        self.varint(field << 3 | 1);
        self.raw(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.fixed(field, value.to_bits());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn text(&mut self, field: u64, value: &str) {
        self.bytes(field, value.as_bytes());
    }

    fn message(&mut self, field: u64, content: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        content(&mut inner);
        self.bytes(field, &inner.0);
    }

    fn raw(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Seven bits in each byte, lowest first.
    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push((value & 0x7f) as u8);
    }
}
