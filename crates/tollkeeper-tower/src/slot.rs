//! Holds and renews the concurrency slots of a request until its response has been streamed or its tunnel ends.

use std::sync::Arc;

use http::request::Parts;
use http::{Method, StatusCode, header};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tollkeeper::{Limiter, SlotGuard, Span};

/// The slots of concurrency limits that a request holds. All clones share them: they are renewed at half their
/// time to live, and released when the last clone is dropped.
///
/// The layer keeps a clone while the response streams. A response that upgrades the connection, such as 101 for
/// a WebSocket, has no body, and the tunnel outlives it. So a request that asks for a tunnel carries a clone in
/// its extensions, for the handler to keep until the tunnel ends:
///
/// ```
/// # #[cfg(feature = "axum")] mod example {
/// use axum::Extension;
/// use axum::extract::WebSocketUpgrade;
/// use axum::response::Response;
/// use tollkeeper_tower::HeldSlot;
///
/// async fn chat(upgrade: WebSocketUpgrade, slot: Option<Extension<HeldSlot>>) -> Response {
///     upgrade.on_upgrade(async |mut socket| {
///         while let Some(Ok(message)) = socket.recv().await {
///             let _ = socket.send(message).await;
///         }
///         drop(slot);
///     })
/// }
/// # }
/// ```
///
/// The response that opens a tunnel carries another clone, for an outer layer that forwards the tunnel itself.
/// If neither clone is kept, the slot is released when the head of the response has been sent.
#[derive(Clone, Debug)]
pub struct HeldSlot(#[expect(dead_code, reason = "held, not read")] Arc<Held>);

#[derive(Debug)]
struct Held {
    _guard: SlotGuard,
    /// Renews in a separate task, because the response body may not be polled for longer than the time to live.
    renewal: Option<AbortHandle>,
}

impl HeldSlot {
    /// Without a tokio runtime the slot is not renewed, and expires after its time to live.
    pub(crate) fn new(limiter: &Limiter, guard: SlotGuard) -> HeldSlot {
        let (limiter, slot) = (limiter.clone(), guard.slot().clone());
        let half = Span::from_micros(guard.ttl().as_micros() / 2);
        let renew = async move {
            loop {
                limiter.clock().sleep(half).await;
                if limiter.renew(&slot).await == Ok(false) {
                    return; // expired: another request may hold the slot by now
                }
            }
        };
        let renewal = Handle::try_current().ok().map(|runtime| runtime.spawn(renew).abort_handle());
        HeldSlot(Arc::new(Held { _guard: guard, renewal }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
    }
}

/// Whether a request asks for a tunnel: by an HTTP/1.1 upgrade, or by CONNECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    /// No tunnel.
    Nothing,
    /// `Upgrade`: status 101 opens the tunnel.
    Upgrade,
    /// CONNECT, which HTTP/2 also uses for WebSockets: every 2xx status opens the tunnel.
    Connect,
}

impl Asks {
    pub(crate) fn of(request: &Parts) -> Asks {
        if request.method == Method::CONNECT {
            Asks::Connect
        } else if request.headers.contains_key(header::UPGRADE) {
            Asks::Upgrade
        } else {
            Asks::Nothing
        }
    }

    /// Whether a response with this status opens the tunnel.
    pub(crate) fn opened_by(self, status: StatusCode) -> bool {
        match self {
            Asks::Connect => status.is_success(),
            Asks::Upgrade | Asks::Nothing => status == StatusCode::SWITCHING_PROTOCOLS,
        }
    }
}
