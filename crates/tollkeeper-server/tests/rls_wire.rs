//! Rate limit messages are encoded and decoded exactly like Envoy's, byte for byte.

mod envoy_oracle;

use envoy_types::pb::envoy::config::core::v3 as theirs_core;
use envoy_types::pb::google::protobuf::{Duration, UInt64Value};
use prost::Message as _;
use tollkeeper_server::transport::grpc::decoder::{
    DecodeError, Descriptor, MAX_DESCRIPTORS, MAX_ENTRIES, Question,
};
use tollkeeper_server::transport::grpc::proto::envoy::config::core::v3 as ours_core;
use tollkeeper_server::transport::grpc::proto::envoy::extensions::common::ratelimit::v3 as ours_common;
use tollkeeper_server::transport::grpc::proto::envoy::service::ratelimit::v3 as ours;

use crate::envoy_oracle as theirs;

/// A request with every known field, none of them at its default.
fn their_question() -> theirs::RateLimitRequest {
    let first = theirs::descriptor([("user", "alice"), ("path", "/ü")]);
    let refund = theirs::giving(u64::MAX, theirs::descriptor([("remote_address", "2001:db8::7")]));
    let peek = theirs::costing(0, theirs::descriptor([]));
    theirs::RateLimitRequest { hits_addend: u32::MAX, ..theirs::question([first, refund, peek]) }
}

#[test]
fn request_is_encoded_like_envoy() {
    let entry = |key: &str, value: &str| {
        let (key, value) = (key.to_owned(), value.to_owned());
        ours_common::rate_limit_descriptor::Entry { key, value }
    };
    let descriptor = |entries, hits_addend, is_negative_hits| ours_common::RateLimitDescriptor {
        entries,
        hits_addend,
        is_negative_hits,
    };
    let question = ours::RateLimitRequest {
        domain: "test".to_owned(),
        descriptors: vec![
            descriptor(vec![entry("user", "alice"), entry("path", "/ü")], None, false),
            descriptor(vec![entry("remote_address", "2001:db8::7")], Some(u64::MAX), true),
            descriptor(vec![], Some(0), false),
        ],
        hits_addend: u32::MAX,
    };
    let bytes = their_question().encode_to_vec();
    assert_eq!(question.encode_to_vec(), bytes);
    assert_eq!(ours::RateLimitRequest::decode(&bytes[..]), Ok(question.clone()));
    assert_eq!(theirs::RateLimitRequest::decode(&question.encode_to_vec()[..]), Ok(their_question()));
}

#[test]
fn response_is_encoded_like_envoy() {
    use ours::rate_limit_response as inner;
    let answer = ours::RateLimitResponse {
        overall_code: inner::Code::OverLimit.into(),
        statuses: vec![
            inner::DescriptorStatus {
                code: inner::Code::OverLimit.into(),
                current_limit: Some(inner::RateLimit {
                    requests_per_unit: u32::MAX,
                    unit: inner::rate_limit::Unit::Week.into(),
                    name: "per-user".to_owned(),
                }),
                limit_remaining: 7,
                duration_until_reset: Some(prost_types::Duration { seconds: 3_600, nanos: 0 }),
            },
            inner::DescriptorStatus { code: inner::Code::Ok.into(), ..Default::default() },
        ],
        response_headers_to_add: vec![ours_core::HeaderValue {
            key: "ratelimit".to_owned(),
            value: "\"per-user\";r=0;t=1".to_owned(),
        }],
    };
    let theirs = theirs::RateLimitResponse {
        overall_code: theirs::Code::OverLimit.into(),
        statuses: vec![
            theirs::DescriptorStatus {
                code: theirs::Code::OverLimit.into(),
                current_limit: Some(theirs::RateLimit {
                    requests_per_unit: u32::MAX,
                    unit: theirs::Unit::Week.into(),
                    name: "per-user".to_owned(),
                }),
                limit_remaining: 7,
                duration_until_reset: Some(Duration { seconds: 3_600, nanos: 0 }),
                ..Default::default()
            },
            theirs::DescriptorStatus { code: theirs::Code::Ok.into(), ..Default::default() },
        ],
        response_headers_to_add: vec![theirs_core::HeaderValue {
            key: "ratelimit".to_owned(),
            value: "\"per-user\";r=0;t=1".to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    };
    assert_eq!(answer.encode_to_vec(), theirs.encode_to_vec());
    assert_eq!(ours::RateLimitResponse::decode(&theirs.encode_to_vec()[..]), Ok(answer.clone()));
    assert_eq!(theirs::RateLimitResponse::decode(&answer.encode_to_vec()[..]), Ok(theirs));
    for unit in [
        theirs::Unit::Unknown,
        theirs::Unit::Second,
        theirs::Unit::Minute,
        theirs::Unit::Hour,
        theirs::Unit::Day,
        theirs::Unit::Month,
        theirs::Unit::Year,
        theirs::Unit::Week,
    ] {
        let ours = inner::rate_limit::Unit::try_from(i32::from(unit)).unwrap();
        assert_eq!(ours.as_str_name(), unit.as_str_name());
    }
}

#[test]
fn request_is_decoded_without_copying() {
    let bytes = their_question().encode_to_vec();
    let question = Question::read(&bytes).unwrap();
    let entries = |entries: &[(&'static str, &'static str)]| {
        entries.iter().map(|(key, value)| ((*key).into(), value.as_bytes())).collect()
    };
    let expected = Question {
        domain: "test",
        descriptors: vec![
            Descriptor {
                entries: entries(&[("user", "alice"), ("path", "/ü")]),
                hits_addend: None,
                is_negative_hits: false,
            },
            Descriptor {
                entries: entries(&[("remote_address", "2001:db8::7")]),
                hits_addend: Some(u64::MAX),
                is_negative_hits: true,
            },
            Descriptor { entries: vec![], hits_addend: Some(0), is_negative_hits: false },
        ],
        hits_addend: u32::MAX,
    };
    assert_eq!(question, expected);
}

#[test]
fn unknown_fields_are_skipped() {
    let mut bytes = their_question().encode_to_vec();
    let known = bytes.clone();
    // Field 100 in each wire type: varint, 64-bit, length-delimited, 32-bit.
    bytes.extend([0xa0, 0x06, 0x2a]);
    bytes.extend([0xa1, 0x06, 1, 2, 3, 4, 5, 6, 7, 8]);
    bytes.extend([0xa2, 0x06, 3, b'a', b'b', b'c']);
    bytes.extend([0xa5, 0x06, 1, 2, 3, 4]);
    assert_eq!(Question::read(&bytes), Question::read(&known));
    // The limit override of a descriptor is an unknown field, too.
    let mut limited = their_question();
    limited.descriptors[0].limit = Some(
        envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride {
            requests_per_unit: 1,
            unit: 1,
        },
    );
    assert_eq!(Question::read(&limited.encode_to_vec()), Question::read(&known));
}

#[test]
fn truncated_or_oversized_message_is_refused() {
    let bytes = their_question().encode_to_vec();
    let complete = Question::read(&bytes).unwrap();
    for end in 0..bytes.len() {
        // A message that is cut between two fields is valid, but has fewer fields.
        let cut = Question::read(&bytes[..end]);
        assert_ne!(cut.as_ref(), Ok(&complete), "{end}");
        assert_eq!(cut.is_ok(), ours::RateLimitRequest::decode(&bytes[..end]).is_ok(), "{end}");
    }
    let many = |count| vec![theirs::descriptor([("user", "alice")]); count];
    let read = |question: theirs::RateLimitRequest| Question::read(&question.encode_to_vec()).map(drop);
    assert_eq!(read(theirs::question(many(MAX_DESCRIPTORS))), Ok(()));
    assert_eq!(read(theirs::question(many(MAX_DESCRIPTORS + 1))), Err(DecodeError::Descriptors));
    let entries = |count| {
        let entry = theirs::Entry { key: "user".to_owned(), value: "alice".to_owned() };
        theirs::RateLimitDescriptor { entries: vec![entry; count], ..Default::default() }
    };
    assert_eq!(read(theirs::question([entries(MAX_ENTRIES)])), Ok(()));
    assert_eq!(read(theirs::question([entries(MAX_ENTRIES + 1)])), Err(DecodeError::Entries));
    // A domain that is not UTF-8, a varint of more than 64 bits, field number 0, a group.
    for broken in
        [&b"\x0a\x01\xff"[..], b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", b"\x00\x01", b"\x0b\x0c"]
    {
        assert!(Question::read(broken).is_err(), "{broken:?}");
    }
}

#[test]
fn last_value_of_a_repeated_field_wins() {
    // The last value of a repeated field wins; embedded messages are merged.
    let mut bytes = theirs::RateLimitRequest { hits_addend: 5, ..their_question() }.encode_to_vec();
    bytes.extend([0x18, 0x06]);
    assert_eq!(Question::read(&bytes).unwrap().hits_addend, 6);
    let wrapper = UInt64Value { value: 9 }.encode_to_vec();
    let twice = [&[0x1a, 2][..], &wrapper, &[0x1a, 0]].concat();
    let message = [&[0x0a, 1, b'd', 0x12, u8::try_from(twice.len()).unwrap()][..], &twice].concat();
    let read = Question::read(&message).unwrap().descriptors[0].hits_addend;
    let prost = ours::RateLimitRequest::decode(&message[..]).unwrap().descriptors[0].hits_addend;
    assert_eq!((read, prost), (Some(9), Some(9)));
}
