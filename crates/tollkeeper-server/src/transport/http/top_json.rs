//! Writes the busiest keys as JSON: the body of `GET /v1/top`.

use tollkeeper::Policy;
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_engine::json::Writer;

use crate::key_ref::KeyRefs;
use crate::telemetry::top_keys::{Count, Top};

/// Writes the busiest keys and the most refused ones.
pub fn write_top(out: &mut Writer, top: &Top, policy: &Policy, redactor: &Redactor, refs: &KeyRefs) {
    let counts = |out: &mut Writer, counts: &[Count]| {
        out.list(counts, |out, count| {
            // A limit that was removed has no names for its facts, so no value is shown: one may be a secret. The
            // namespaces of ad-hoc limits are upper case, and their keys are not facts of the policy.
            let by = policy.find(&count.limit).map_or(&[][..], |(_, rule)| rule.by());
            let is_ad_hoc = count.limit.bytes().any(|byte| byte.is_ascii_uppercase());
            let unnamed = is_ad_hoc.then_some("key");
            let facts = by.iter().map(|fact| Some(&**fact)).chain(std::iter::repeat(unnamed));
            out.raw("{\"limit\":");
            out.text(&count.limit);
            out.raw(",\"key\":");
            out.list(count.key.iter().zip(facts), |out, (value, fact)| {
                let shown = value
                    .as_deref()
                    .zip(fact)
                    .map(|(value, fact)| redactor.redact(policy.declared(), fact, value));
                out.or_null(shown, |out, value| out.text(&value));
            });
            out.raw(",\"count\":");
            out.number(count.count);
            out.raw(",\"error\":");
            out.number(count.error);
            out.raw(",\"ref\":");
            // Only keys of the policy can be looked up, and only by their whole values.
            let named = count.whole && !by.is_empty() && by.len() == count.key.len();
            let sealed = named.then(|| refs.seal(&count.limit, count.key.iter().map(Option::as_deref)));
            out.or_null(sealed, |out, sealed| out.text(&sealed));
            out.raw("}");
        });
    };
    out.raw("{\"since\":");
    out.number(top.since);
    out.raw(",\"busiest\":");
    counts(out, &top.busiest);
    out.raw(",\"refused\":");
    counts(out, &top.refused);
    out.raw(",\"would_refuse\":");
    counts(out, &top.would_refuse);
    out.raw("}");
}
