//! Reads request bodies, with a limit on their size and on the time they take.

use std::fmt::Display;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::sleep;
use tollkeeper_engine::api::error::{ApiError, Code};

/// How long a body may take to arrive.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a body of at most `max` bytes.
pub async fn read(body: Incoming, max: usize) -> Result<Vec<u8>, ApiError> {
    // Refuse by Content-Length, before the client has sent the body.
    if body.size_hint().lower() > max as u64 {
        return Err(too_large(max));
    }
    tokio::select! {
        biased;
        collected = collect(body, max) => collected,
        // In a block, so that no timer is created for a body that arrived together with its head.
        () = async { sleep(TIMEOUT).await } => {
            Err(timed_out())
        }
    }
}

/// The error for a body that ended early.
pub fn incomplete(cause: impl Display) -> ApiError {
    ApiError::new(Code::InvalidJson, format!("the body did not arrive completely: {cause}"))
}

/// The error for a body that took longer than [`TIMEOUT`].
pub fn timed_out() -> ApiError {
    let message = format!("the body did not arrive within {} s", TIMEOUT.as_secs());
    ApiError::new(Code::InvalidJson, message)
}

async fn collect(mut body: Incoming, max: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(incomplete)?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() > max {
                return Err(too_large(max));
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes)
}

fn too_large(max: usize) -> ApiError {
    ApiError::new(Code::TooLarge, format!("the body has more than {} KiB", max >> 10))
}
