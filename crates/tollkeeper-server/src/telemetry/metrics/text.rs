//! Writes metrics in the OpenMetrics text format, which Prometheus scrapes.

use std::fmt::Write as _;

use super::family::{Family, Labels, Series};

/// Writes all families.
pub fn write(families: &[Family]) -> String {
    let mut out = String::new();
    for family in families {
        let (name, help) = (family.name, family.help);
        let kind = match family.series {
            Series::Counter(_) => "counter",
            Series::Gauge(_) | Series::Seconds(_) => "gauge",
            Series::Histogram(_) => "histogram",
        };
        line(&mut out, format_args!("# HELP {name} {help}."));
        line(&mut out, format_args!("# TYPE {name} {kind}"));
        match &family.series {
            Series::Counter(series) => {
                for (labels, value) in series {
                    line(&mut out, format_args!("{name}_total{} {value}", LabelSet(None, labels)));
                }
            }
            Series::Gauge(series) => {
                for (labels, value) in series {
                    line(&mut out, format_args!("{name}{} {value}", LabelSet(None, labels)));
                }
            }
            Series::Seconds(series) => {
                for (labels, value) in series {
                    line(&mut out, format_args!("{name}{} {value}", LabelSet(None, labels)));
                }
            }
            Series::Histogram(series) => {
                for (labels, counts) in series {
                    let mut up_to = 0;
                    for (end, count) in &counts.buckets {
                        up_to += count;
                        line(&mut out, format_args!("{name}_bucket{} {up_to}", LabelSet(Some(*end), labels)));
                    }
                    line(&mut out, format_args!("{name}_sum{} {}", LabelSet(None, labels), counts.sum));
                    line(&mut out, format_args!("{name}_count{} {up_to}", LabelSet(None, labels)));
                }
            }
        }
    }
    line(&mut out, format_args!("# EOF"));
    out
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("writing to a string cannot fail");
}

/// Labels in braces, the `le` label of a bucket first.
struct LabelSet<'a>(Option<f64>, &'a Labels);

impl std::fmt::Display for LabelSet<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut before = "{";
        if let Some(end) = self.0 {
            let point = if end.fract() == 0.0 { ".0" } else { "" };
            let end = if end.is_infinite() { "+Inf".to_owned() } else { format!("{end}{point}") };
            write!(f, "{before}le=\"{end}\"")?;
            before = ",";
        }
        for (name, value) in self.1 {
            write!(f, "{before}{name}=\"")?;
            for character in value.chars() {
                match character {
                    '\\' => f.write_str("\\\\")?,
                    '"' => f.write_str("\\\"")?,
                    '\n' => f.write_str("\\n")?,
                    other => f.write_char(other)?,
                }
            }
            f.write_str("\"")?;
            before = ",";
        }
        f.write_str(if before == "{" { "" } else { "}" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::family::Counts;

    #[test]
    fn every_kind_of_metric_is_written() {
        let route = |value: &str| vec![("route", value.to_owned()), ("result", "allowed".to_owned())];
        let buckets = vec![(0.000025, 2), (1.0, 0), (f64::INFINITY, 1)];
        let families = [
            Family {
                name: "requests",
                help: "Requests",
                series: Series::Counter(vec![(route("/a\\b\"\n{id}"), 7), (route(""), 0)]),
            },
            Family { name: "keys", help: "Keys", series: Series::Gauge(vec![(Vec::new(), 3)]) },
            Family {
                name: "seconds",
                help: "Time",
                series: Series::Histogram(vec![(Vec::new(), Counts { buckets, sum: 2.5 })]),
            },
        ];
        assert_eq!(
            write(&families),
            r#"# HELP requests Requests.
# TYPE requests counter
requests_total{route="/a\\b\"\n{id}",result="allowed"} 7
requests_total{route="",result="allowed"} 0
# HELP keys Keys.
# TYPE keys gauge
keys 3
# HELP seconds Time.
# TYPE seconds histogram
seconds_bucket{le="0.000025"} 2
seconds_bucket{le="1.0"} 2
seconds_bucket{le="+Inf"} 3
seconds_sum 2.5
seconds_count 3
# EOF
"#
        );
    }
}
