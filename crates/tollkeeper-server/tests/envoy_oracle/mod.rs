//! Envoy's requests and responses, built with a crate generated from all of Envoy's protos instead of our own types.

#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

pub(crate) use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
pub(crate) use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
pub(crate) use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit, rate_limit::Unit,
};
pub(crate) use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
pub(crate) use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;

/// A request for these descriptors in the domain `test`.
pub(crate) fn question(descriptors: impl IntoIterator<Item = RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest {
        domain: "test".to_owned(),
        descriptors: descriptors.into_iter().collect(),
        hits_addend: 0,
    }
}

/// A descriptor of these entries.
pub(crate) fn descriptor<const N: usize>(entries: [(&str, &str); N]) -> RateLimitDescriptor {
    let entry = |(key, value): (&str, &str)| Entry { key: key.to_owned(), value: value.to_owned() };
    RateLimitDescriptor { entries: entries.map(entry).into(), ..RateLimitDescriptor::default() }
}

/// The same at this cost.
pub(crate) fn costing(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(UInt64Value { value: hits }), ..descriptor }
}

/// The same, refunding this much.
pub(crate) fn giving(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..costing(hits, descriptor) }
}

/// Whether the request may pass, as may each of its descriptors.
pub(crate) fn codes(answer: &RateLimitResponse) -> (Code, Vec<Code>) {
    (answer.overall_code(), answer.statuses.iter().map(DescriptorStatus::code).collect())
}

/// What remains, descriptor by descriptor.
pub(crate) fn remaining(answer: &RateLimitResponse) -> Vec<u32> {
    answer.statuses.iter().map(|status| status.limit_remaining).collect()
}
