//! The loop of `docs/headers-and-addresses.md`.
#![allow(unreachable_pub, reason = "it stands on the page as others would write it")]

use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Response, StatusCode};

const ATTEMPTS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends the request, and retries it while it is refused and the wait is acceptable.
pub async fn with_retry<B, E>(
    mut send: impl AsyncFnMut() -> Result<Response<B>, E>,
) -> Result<Response<B>, E> {
    for _ in 1..ATTEMPTS {
        let response = send().await?;
        match retry_after(&response) {
            Some(wait) if wait <= PATIENCE => tokio::time::sleep(wait).await,
            _ => return Ok(response),
        }
    }
    send().await
}

fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}
