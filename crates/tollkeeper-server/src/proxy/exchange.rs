//! The state of one proxied request and its response, shared by the parts that handle it and the access log.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::client::ClientConnection;
use super::error::{ProxyError, UpstreamError};

/// A request and its response.
#[derive(Debug)]
pub struct Exchange {
    /// The connection of the client.
    pub client: Arc<ClientConnection>,
    /// When the head of the request had arrived.
    pub began: Instant,
    upload: UploadProgress,
    downloaded: AtomicU64,
    reached: OnceLock<Reached>,
    /// The number of the [`UpstreamError`], plus one.
    error: AtomicU8,
    /// Whether the concurrency gate shed it.
    shed: AtomicBool,
}

#[derive(Debug, Default)]
struct UploadProgress {
    bytes: AtomicU64,
    /// When a part of the body last arrived, in microseconds since `began`.
    last: AtomicU64,
    /// Whether the client has to send the next part.
    awaited: AtomicBool,
    ended: AtomicBool,
    /// The number of the [`UploadFailure`], plus one.
    failure: AtomicU8,
}

/// Why the body of a client could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadFailure {
    /// It is not valid, or the connection failed.
    Broken,
    /// It did not continue in time.
    Stalled,
}

/// The address of the upstream that answered, and when.
#[derive(Clone, Debug)]
pub struct Reached {
    /// The address.
    pub address: Arc<str>,
    /// The time from sending the request with its body to the head of the response.
    pub took: Duration,
}

impl Exchange {
    /// A request that has just arrived.
    pub fn new(client: Arc<ClientConnection>) -> Exchange {
        Exchange {
            client,
            began: Instant::now(),
            upload: UploadProgress::default(),
            downloaded: AtomicU64::new(0),
            reached: OnceLock::new(),
            error: AtomicU8::new(0),
            shed: AtomicBool::new(false),
        }
    }

    /// The address of the client's connection.
    pub fn peer(&self) -> IpAddr {
        self.client.peer.ip()
    }

    /// Notes that the client has to send the next part of the body.
    pub fn await_upload(&self) {
        self.upload.awaited.store(true, Relaxed);
    }

    /// Whether the client has to send the next part of the body.
    pub fn awaits_upload(&self) -> bool {
        self.upload.awaited.load(Relaxed)
    }

    /// Notes that bytes of the body were passed on.
    pub fn uploaded(&self, bytes: usize) {
        self.upload.awaited.store(false, Relaxed);
        self.upload.bytes.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Relaxed);
        let micros = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.upload.last.store(micros, Relaxed);
    }

    /// Notes that the body has been passed on completely.
    pub fn upload_ended(&self) {
        self.upload.awaited.store(false, Relaxed);
        self.upload.ended.store(true, Relaxed);
    }

    /// Notes that the body could not be read.
    pub fn upload_failed(&self, why: UploadFailure) {
        self.upload.failure.store(why as u8 + 1, Relaxed);
    }

    /// Whether the body has been passed on completely.
    pub fn has_upload_ended(&self) -> bool {
        self.upload.ended.load(Relaxed)
    }

    /// Bytes of the body that were passed on.
    pub fn uploaded_bytes(&self) -> u64 {
        self.upload.bytes.load(Relaxed)
    }

    /// Notes that bytes of the response were passed on.
    pub fn downloaded(&self, bytes: usize) {
        self.downloaded.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Relaxed);
    }

    /// Bytes of the response that were passed on.
    pub fn downloaded_bytes(&self) -> u64 {
        self.downloaded.load(Relaxed)
    }

    /// When a part of the body last arrived; if none has, when the request did.
    pub fn last_upload(&self) -> Instant {
        self.began + Duration::from_micros(self.upload.last.load(Relaxed))
    }

    /// Why the body could not be read.
    pub fn upload_failure(&self) -> Option<ProxyError> {
        const BROKEN: u8 = UploadFailure::Broken as u8 + 1;
        const STALLED: u8 = UploadFailure::Stalled as u8 + 1;
        match self.upload.failure.load(Relaxed) {
            BROKEN => Some(ProxyError::BrokenBody),
            STALLED => Some(ProxyError::StalledBody),
            _ => None,
        }
    }

    /// Notes which address has answered.
    pub fn reached(&self, address: Arc<str>, took: Duration) {
        // An exchange has one response.
        let _ = self.reached.set(Reached { address, took });
    }

    /// Notes how the upstream failed.
    pub fn failed(&self, error: UpstreamError) {
        self.error.store(error as u8 + 1, Relaxed);
    }

    /// Notes that the concurrency gate shed the request.
    pub fn shed(&self) {
        self.shed.store(true, Relaxed);
    }

    /// Whether the concurrency gate shed the request.
    pub fn was_shed(&self) -> bool {
        self.shed.load(Relaxed)
    }

    /// Which address has answered, if any.
    pub fn answered_by(&self) -> Option<&Reached> {
        self.reached.get()
    }

    /// Whether the upstream failed.
    pub fn has_failed(&self) -> bool {
        self.error.load(Relaxed) != 0
    }
}
