//! Responses to refused gRPC calls: a status in the headers of a response without a body, which gRPC calls
//! trailers-only.
//!
//! A refusal is RESOURCE_EXHAUSTED with a `google.rpc.RetryInfo`, from which client libraries take the delay
//! before a retry. The message is a few bytes of protobuf, so it is encoded here without a protobuf library.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use tollkeeper::{DecidedToll, Span};

use crate::problem::Problem;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const RETRY_INFO: &[u8] = b"type.googleapis.com/google.rpc.RetryInfo";

/// Whether a request is a gRPC call: its content type is `application/grpc`, with `+proto` or parameters or without.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
    content_type.and_then(|value| value.strip_prefix(b"application/grpc")).is_some_and(|rest| {
        // Not `application/grpc-web`, which expects its status in the body.
        matches!(rest.first(), None | Some(b'+' | b';'))
    })
}

/// The response to a call that a limit refused.
pub fn refusal(decision: &DecidedToll) -> Response<Bytes> {
    let is_shown = decision.binding().is_some_and(|limit| limit.rule().shown());
    let reason = decision.reason().filter(|_| is_shown).map(|reason| reason.to_string());
    let message = reason.unwrap_or_else(|| "too many requests".to_owned());
    let mut response = status(RESOURCE_EXHAUSTED, &message);
    if let Some(retry) = decision.retry_after() {
        let details = base64(&with_retry_info(RESOURCE_EXHAUSTED, &message, retry));
        let details = HeaderValue::from_str(&details).expect("letters and digits");
        response.headers_mut().insert("grpc-status-details-bin", details);
    }
    response
}

/// The response to a call that is invalid or cannot be read.
pub fn problem(problem: &Problem) -> Response<Bytes> {
    let code = if problem.status.is_server_error() { INTERNAL } else { INVALID_ARGUMENT };
    status(code, &problem.detail)
}

fn status(code: u8, message: &str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, GRPC);
    headers.insert("grpc-status", HeaderValue::from(u16::from(code)));
    let message = HeaderValue::from_str(&percent_encoded(message)).expect("printable ASCII");
    headers.insert("grpc-message", message);
    response
}

/// `google.rpc.Status` with a `RetryInfo` among its details.
fn with_retry_info(code: u8, message: &str, retry: Span) -> Vec<u8> {
    let micros = retry.as_micros();
    let duration = [number(1, micros / 1_000_000), number(2, micros % 1_000_000 * 1_000)].concat();
    let retry_info = bytes(1, &duration);
    let any = [bytes(1, RETRY_INFO), bytes(2, &retry_info)].concat();
    [number(1, code.into()), bytes(2, message.as_bytes()), bytes(3, &any)].concat()
}

/// Encodes a protobuf varint field; a field whose value is 0 is omitted.
fn number(field: u8, number: u64) -> Vec<u8> {
    let mut out = Vec::new();
    if number > 0 {
        out.push(field << 3);
        push_varint(&mut out, number);
    }
    out
}

/// Encodes a length-delimited protobuf field.
fn bytes(field: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![field << 3 | 2];
    push_varint(&mut out, u64::try_from(content.len()).expect("short"));
    out.extend_from_slice(content);
    out
}

fn push_varint(out: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

/// Percent-encodes `%` and everything but printable ASCII.
fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' => out.push_str("%25"),
            b' '..=b'~' => out.push(char::from(byte)),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Standard base64 without padding, the encoding of gRPC's binary headers.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word =
            (0..3).fold(0, |word, index| word << 8 | u32::from(three.get(index).copied().unwrap_or(0)));
        for digit in 0..=three.len() {
            out.push(char::from(DIGITS[(word >> (18 - 6 * digit) & 0x3f) as usize]));
        }
    }
    out
}
