//! The engines of this process, by number. A binding keeps a number, because an object of its language that wraps an
//! engine costs more than a decision.
//!
//! It is read and changed without locks: a lock that another thread held during a fork is never released in the child.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arc_swap::ArcSwapOption;

use crate::engine::Engine;
use crate::options::Options;

/// The answer to a call of an engine that is not open.
pub const CLOSED: &str = r#"{"error":{"code":"closed","message":"the limiter is closed","where":null}}"#;

/// The open engines, by ascending number.
static ENGINES: ArcSwapOption<Vec<Opened>> = ArcSwapOption::const_empty();
static NEXT: AtomicU32 = AtomicU32::new(1);

/// An engine under one of its numbers.
#[derive(Clone)]
struct Opened {
    number: u32,
    engine: Arc<Engine>,
}

/// Opens an engine and returns its number, which no other engine ever has. The error is for people.
pub fn open(options: Options) -> Result<u32, String> {
    let (name, listener) = (options.name.clone(), options.listener.clone());
    let engine = match name.as_deref().and_then(named) {
        Some(engine) => engine,
        None => Engine::open(options.clone())?,
    };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut opened = Opened { number, engine };
    ENGINES.rcu(|engines| {
        let mut engines = engines.as_deref().cloned().unwrap_or_default();
        // Another thread may have opened the name in the meantime.
        if let Some(other) =
            engines.iter().find(|other| name.is_some() && other.engine.name() == name.as_deref())
        {
            opened.engine = Arc::clone(&other.engine);
        }
        let at = engines.partition_point(|other| other.number < number);
        engines.insert(at, opened.clone());
        Some(Arc::new(engines))
    });
    if !opened.engine.options().agree_with(&options) {
        close(number);
        let name = name.unwrap_or_default();
        return Err(format!(
            "the limiter `{name}` is already open with other limits, another store or another clock: choose \
             another `name`"
        ));
    }
    if let Some(listener) = listener {
        opened.engine.listeners().add(number, listener);
    }
    Ok(number)
}

/// The engine of this number; `None` if it is closed.
#[inline]
pub fn get(number: u32) -> Option<Arc<Engine>> {
    let engines = ENGINES.load();
    let engines = engines.as_deref()?;
    let at = engines.binary_search_by_key(&number, |opened| opened.number).ok()?;
    Some(Arc::clone(&engines[at].engine))
}

/// Closes an engine: false if it is not open. An engine that is open under several numbers ends with the last.
pub fn close(number: u32) -> bool {
    let Some(engine) = get(number) else { return false };
    engine.listeners().remove(number);
    let before = ENGINES.rcu(|engines| {
        let others = engines.iter().flat_map(|engines| engines.iter()).filter(|other| other.number != number);
        Some(Arc::new(others.cloned().collect::<Vec<Opened>>()))
    });
    before.iter().flat_map(|engines| engines.iter()).any(|opened| opened.number == number)
}

fn named(name: &str) -> Option<Arc<Engine>> {
    let engines = ENGINES.load();
    let opened = engines.as_deref()?.iter().find(|opened| opened.engine.name() == Some(name))?;
    Some(Arc::clone(&opened.engine))
}
