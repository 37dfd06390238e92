//! Hears from sentinels that another server has become primary.
//!
//! Each of them is listened to, because each may be the one that is cut off. One that cannot be listened to is
//! tried again after a while; whoever wants to be sure asks now and then as well.

use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, PushInfo, PushKind, Value};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::address::Address;
use crate::store::url::Host;

/// Between two attempts to listen to a sentinel.
const PAUSE: Duration = Duration::from_secs(1);

/// Who is primary from now on, whenever that changes. The listeners go with it.
#[derive(Debug)]
pub(crate) struct Switches {
    told: mpsc::UnboundedReceiver<Host>,
    _listeners: JoinSet<()>,
}

impl Switches {
    /// Begins to listen, if there are sentinels.
    pub(crate) fn of(address: &Address) -> Option<Switches> {
        let (master, clients) = address.sentinels()?;
        let (tell, told) = mpsc::unbounded_channel();
        let mut listeners = JoinSet::new();
        for client in clients {
            listeners.spawn(listen(client, master.to_owned(), tell.clone()));
        }
        Some(Switches { told, _listeners: listeners })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Option<Host> {
        self.told.recv().await
    }
}

/// Listens to one sentinel for as long as somebody wants to know.
async fn listen(client: Client, master: String, tell: mpsc::UnboundedSender<Host>) {
    loop {
        let (push, mut pushed) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(PAUSE)).set_push_sender(push);
        if let Ok(mut connection) = client.get_multiplexed_async_connection_with_config(&config).await
            && connection.subscribe("+switch-master").await.is_ok()
        {
            while let Some(info) = pushed.recv().await
                && info.kind != PushKind::Disconnection
            {
                if let Some(host) = switched(&info, &master) {
                    let _ = tell.send(host);
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Who is primary now, if this says so: `mymaster 10.0.0.1 6379 10.0.0.2 6379`, the old one and the new.
fn switched(info: &PushInfo, master: &str) -> Option<Host> {
    let (PushKind::Message, [_, Value::BulkString(text)]) = (&info.kind, &info.data[..]) else { return None };
    let words: Vec<&str> = std::str::from_utf8(text).ok()?.split(' ').collect();
    let [name, _, _, host, port] = words[..] else { return None };
    (name == master).then_some(Host { name: host.to_owned(), port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_of_our_own_master_is_told_and_nothing_else() {
        let said = |kind, text: &str| PushInfo {
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
            assert_eq!(switched(&said(kind, text), "ours"), expected, "{text}");
        }
    }
}
