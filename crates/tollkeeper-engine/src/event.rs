//! Events of an engine, which no call returns: reloads, errors and warnings.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// Called with every event, on any thread. It must not block, and must not call the engine.
pub type Listener = Arc<dyn Fn(&EngineEvent) + Send + Sync>;

/// Something that happened outside of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineEvent {
    /// Its kind.
    pub kind: EventKind,
    /// What happened; for a reload, the version of the new limits.
    pub message: String,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A changed config file is active.
    Reload,
    /// Something failed and the engine continues, such as a reload of an invalid config file.
    Error,
    /// The engine works, but probably not as intended.
    Warning,
}

impl EventKind {
    /// `reload`, `error` or `warning`.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Reload => "reload",
            EventKind::Error => "error",
            EventKind::Warning => "warning",
        }
    }
}

/// The listeners of an engine: one for each number that it is open as.
#[derive(Default)]
pub(crate) struct Listeners(ArcSwap<Vec<(u32, Listener)>>);

impl Listeners {
    pub(crate) fn add(&self, number: u32, listener: Listener) {
        self.0.rcu(|listeners| {
            let mut listeners = Vec::clone(listeners);
            listeners.push((number, Arc::clone(&listener)));
            listeners
        });
    }

    pub(crate) fn remove(&self, number: u32) {
        self.0.rcu(|listeners| {
            listeners.iter().filter(|(other, _)| *other != number).cloned().collect::<Vec<_>>()
        });
    }

    /// Calls all listeners. Without any, errors and warnings are written to standard error.
    pub(crate) fn emit(&self, kind: EventKind, message: String) {
        let listeners = self.0.load();
        let event = EngineEvent { kind, message };
        if listeners.is_empty() && kind != EventKind::Reload {
            eprintln!("tollkeeper: {}", event.message);
        }
        for (_, listener) in listeners.iter() {
            listener(&event);
        }
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.load().iter().map(|(number, _)| number)).finish()
    }
}
