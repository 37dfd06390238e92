//! The body of a request: as large as it may be, and not for ever.

use std::fmt::Display;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::time::sleep;

use crate::transport::http::error::{ApiError, Code};

/// How long a body may take to arrive.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Reads a body of at most `most` bytes.
pub async fn read(body: Incoming, most: usize) -> Result<Vec<u8>, ApiError> {
    // Who says so beforehand need not send it.
    if body.size_hint().lower() > most as u64 {
        return Err(too_large(most));
    }
    tokio::select! {
        biased;
        arrived = arrive(body, most) => arrived,
        // A block, so that there is no timer for a body that came along with its head.
        () = async { sleep(PATIENCE).await } => {
            Err(late())
        }
    }
}

/// The body ended too early.
pub fn cut_off(why: impl Display) -> ApiError {
    ApiError::new(Code::InvalidJson, format!("the body did not arrive in full: {why}"))
}

/// The body took too long.
pub fn late() -> ApiError {
    let message = format!("the body did not arrive within {} s", PATIENCE.as_secs());
    ApiError::new(Code::InvalidJson, message)
}

async fn arrive(mut body: Incoming, most: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(cut_off)?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() > most {
                return Err(too_large(most));
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes)
}

fn too_large(most: usize) -> ApiError {
    ApiError::new(Code::TooLarge, format!("the body has more than {} KiB", most >> 10))
}
