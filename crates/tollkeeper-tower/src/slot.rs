//! A slot that a request holds: until its response has been streamed, or until its tunnel ends.

use std::sync::Arc;

use http::request::Parts;
use http::{Method, StatusCode, header};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tollkeeper::{Limiter, SlotGuard, Span};

/// The slots that a request holds at concurrency limits. Clones hold the same slots, which are given back
/// when the last of them is dropped; until then they are renewed at half their time to live.
///
/// The layer holds one for as long as a response streams. A response that upgrades the connection, such as
/// 101 for a WebSocket, has no body, and the tunnel outlives it. So a request that asks for a tunnel carries a
/// clone in its extensions, for the handler to keep until the tunnel ends:
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
/// The response that opens a tunnel carries another clone, for a layer around this one that forwards the
/// tunnel itself. If neither is kept, the slot is given back when the head of the response has been sent.
#[derive(Clone, Debug)]
pub struct HeldSlot(#[expect(dead_code, reason = "held, not read")] Arc<Held>);

#[derive(Debug)]
struct Held {
    _guard: SlotGuard,
    /// A task of its own, because nobody may be reading the response for that long.
    renewal: Option<AbortHandle>,
}

impl HeldSlot {
    /// Without a tokio runtime nothing is renewed, and the slot is lost at its time to live.
    pub(crate) fn new(limiter: &Limiter, guard: SlotGuard) -> HeldSlot {
        let (limiter, slot) = (limiter.clone(), guard.slot().clone());
        let half = Span::from_micros(guard.ttl().as_micros() / 2);
        let renew = async move {
            loop {
                limiter.clock().sleep(half).await;
                if limiter.renew(&slot).await == Ok(false) {
                    return; // lost: another request may hold it by now
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

/// Whether a request asks for a tunnel: an upgrade of HTTP/1.1, or CONNECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    /// It does not.
    Nothing,
    /// By `Upgrade`: 101 opens it.
    Upgrade,
    /// By CONNECT, as HTTP/2 does also for WebSockets: any success opens it.
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

    /// Whether a response of this status opens the tunnel.
    pub(crate) fn opened_by(self, status: StatusCode) -> bool {
        match self {
            Asks::Connect => status.is_success(),
            Asks::Upgrade | Asks::Nothing => status == StatusCode::SWITCHING_PROTOCOLS,
        }
    }
}
