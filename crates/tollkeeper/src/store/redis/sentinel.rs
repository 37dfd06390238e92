//! Subscribes to the announcements of sentinels that another server has become primary.
//!
//! All sentinels are subscribed to, because any one of them may be cut off. A subscription that fails is retried
//! after a pause. Announcements can be missed, so callers should also ask the sentinels regularly.

use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, PushInfo, PushKind, Value};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::address::Address;
use crate::store::url::Host;

/// The pause between two attempts to subscribe to a sentinel, and the timeout of an attempt.
const PAUSE: Duration = Duration::from_secs(1);

/// The stream of new primaries. Dropping it ends the subscriptions.
#[derive(Debug)]
pub(crate) struct PrimaryChanges {
    primaries: mpsc::UnboundedReceiver<Host>,
    _listeners: JoinSet<()>,
}

impl PrimaryChanges {
    /// Subscribes to the sentinels; `None` if the address has none.
    pub(crate) fn of(address: &Address) -> Option<PrimaryChanges> {
        let (master, clients) = address.sentinels()?;
        let (announce, primaries) = mpsc::unbounded_channel();
        let mut listeners = JoinSet::new();
        for client in clients {
            listeners.spawn(listen(client, master.to_owned(), announce.clone()));
        }
        Some(PrimaryChanges { primaries, _listeners: listeners })
    }

    /// Waits for the next announcement, and returns the new primary.
    pub(crate) async fn next(&mut self) -> Option<Host> {
        self.primaries.recv().await
    }
}

/// Stays subscribed to one sentinel until the task is aborted.
async fn listen(client: Client, master: String, announce: mpsc::UnboundedSender<Host>) {
    loop {
        let (push, mut pushed) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(PAUSE)).set_push_sender(push);
        if let Ok(mut connection) = client.get_multiplexed_async_connection_with_config(&config).await
            && connection.subscribe("+switch-master").await.is_ok()
        {
            while let Some(info) = pushed.recv().await
                && info.kind != PushKind::Disconnection
            {
                if let Some(host) = new_primary(&info, &master) {
                    let _ = announce.send(host);
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The new primary in an announcement such as `mymaster 10.0.0.1 6379 10.0.0.2 6379`: the old address, then the new.
fn new_primary(info: &PushInfo, master: &str) -> Option<Host> {
    let (PushKind::Message, [_, Value::BulkString(text)]) = (&info.kind, &info.data[..]) else { return None };
    let words: Vec<&str> = std::str::from_utf8(text).ok()?.split(' ').collect();
    let [name, _, _, host, port] = words[..] else { return None };
    (name == master).then_some(Host { name: host.to_owned(), port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_switch_of_our_master_is_announced() {
        let push = |kind, text: &str| PushInfo {
            kind,
            data: vec![Value::BulkString(b"+switch-master".to_vec()), Value::BulkString(text.into())],
        };
        let host = Host { name: "10.0.0.2".to_owned(), port: 6380 };
        for (kind, text, expected) in [
            (PushKind::Message, "ours 10.0.0.1 6379 10.0.0.2 6380", Some(host)),
            (PushKind::Message, "theirs 10.0.0.1 6379 10.0.0.2 6380", None),
            (PushKind::Message, "ours 10.0.0.1 6379 10.0.0.2 65536", None),
            (PushKind::Message, "ours", None),
            (PushKind::Subscribe, "ours 10.0.0.1 6379 10.0.0.2 6380", None),
        ] {
            assert_eq!(new_primary(&push(kind, text), "ours"), expected, "{text}");
        }
    }
}
