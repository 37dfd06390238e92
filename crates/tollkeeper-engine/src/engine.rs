//! Owns a limiter, its settings and its config file for one binding; calls and answers are text.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tollkeeper::config::{Config, Follow, Reload, StoreUrl};
use tollkeeper::process::PerProcess;
use tollkeeper::{Clock, Decision, Limiter, ManualClock, Restored, Span, Time};
use tollkeeper_tower::headers::{self, Jitter};
use tollkeeper_tower::{ActiveSettings, Settings, random};

use crate::api::active_limits::ActiveLimits;
use crate::api::call::{Api, ApiCall, ShowLimits};
use crate::api::decision_json;
use crate::api::error::{ApiError, Code};
use crate::api::redact::Redactor;
use crate::engine_call::{EngineCall, Pending, at_once};
use crate::event::{EventKind, Listeners};
use crate::json::Writer;
use crate::options::{ConfigSource, Options};
use crate::process;
use crate::ticket::{MAX_OPEN, Tickets};

/// The message of a call that panicked. The panic itself is on standard error.
pub(crate) const PANICKED: &str = "the call failed because of a bug in tollkeeper";

/// A limiter with the settings of a config, in this process.
#[derive(Debug)]
pub struct Engine {
    options: Options,
    listeners: Arc<Listeners>,
    clock: Option<ManualClock>,
    remote: bool,
    states: PerProcess<ProcessState>,
}

/// The answer to a call, as the server would send it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAnswer {
    /// The status of the response: 200, 429, or that of an error.
    pub status: u16,
    /// The body: JSON in one line, errors included.
    pub text: String,
    /// The rate-limit headers if they were asked for, as `name\nvalue\nname\nvalue`.
    pub headers: String,
}

/// The parts of an engine that belong to one process.
#[derive(Debug)]
pub(crate) struct ProcessState {
    process: u32,
    /// `None` only while it is dropped.
    parts: Option<Parts>,
}

#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) core: Arc<Core>,
    pub(crate) tickets: Arc<Tickets>,
    /// Watches the config file until it is dropped.
    _follow: Option<Follow>,
}

/// The limiter and its settings. A forked process continues with a copy of them if the store is in memory.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) limiter: Limiter,
    pub(crate) settings: ActiveSettings,
    pub(crate) redactor: Redactor,
    config: ArcSwap<Config>,
    active_limits: ArcSwap<ActiveLimits>,
    /// Random numbers that spread `Retry-After` among clients; always 0 on a manual clock.
    pub(crate) draw: fn() -> u64,
}

impl Engine {
    pub(crate) fn open(options: Options) -> Result<Arc<Engine>, String> {
        let config = options.config()?;
        let remote = config.store != StoreUrl::Memory;
        let clock =
            options.at.map(|at| span_of(at).map(|at| ManualClock::new(Time::default() + at))).transpose()?;
        if remote && clock.is_some() {
            return Err("a manual clock needs `memory://`: Redis has a clock of its own".to_owned());
        }
        let listeners = Arc::new(Listeners::default());
        if let Some(listener) = &options.listener {
            // Engines are numbered from 1. Until this one has its number, the listener is at 0.
            listeners.add(0, Arc::clone(listener));
        }
        let engine = Engine { options, listeners, clock, remote, states: PerProcess::new() };
        engine.states.get_or_try_init(|| engine.start(engine.core(config)?))?;
        engine.listeners.remove(0);
        Ok(Arc::new(engine))
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.options.name.as_deref()
    }

    pub(crate) fn listeners(&self) -> &Arc<Listeners> {
        &self.listeners
    }

    /// Whether the store is remote, so that answers have to be waited for.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// The limiter, for callers that need no JSON.
    pub fn limiter(&self) -> Result<Limiter, ApiError> {
        Ok(self.state()?.core.limiter.clone())
    }

    /// The JSON of a decision that [`Engine::limiter`] made, as `check` answers it.
    pub fn decision_text(&self, decision: &Decision) -> Result<String, ApiError> {
        Ok(self.state()?.core.text(decision))
    }

    /// The rate-limit headers of a decision that [`Engine::limiter`] made, as in [`EngineAnswer::headers`].
    pub fn decision_headers(&self, decision: &Decision) -> Result<String, ApiError> {
        Ok(self.state()?.core.headers(decision))
    }

    /// Moves the manual clock forward.
    pub fn advance(&self, seconds: f64) -> Result<(), String> {
        let clock = self.clock.as_ref();
        clock.ok_or("the limiter has no manual clock: open it with `at`")?.advance(span_of(seconds)?);
        Ok(())
    }

    /// Answers a call of the API. `headers` is whether the rate-limit headers are wanted, too.
    pub fn ask(
        self: &Arc<Engine>,
        call: ApiCall,
        mut body: Vec<u8>,
        headers: bool,
    ) -> EngineCall<EngineAnswer> {
        if !self.remote {
            return EngineCall::Ready(at_once(self.answer(call, &mut body, headers)));
        }
        let engine = Arc::clone(self);
        EngineCall::Pending(Pending::new(
            async move { engine.answer(call, &mut body, headers).await },
            || EngineAnswer::error(&ApiError::new(Code::StoreUnavailable, PANICKED)),
        ))
    }

    async fn answer(&self, call: ApiCall, body: &mut [u8], headers: bool) -> EngineAnswer {
        let state = match self.state() {
            Ok(state) => state,
            Err(error) => return EngineAnswer::error(&error),
        };
        let core = &*state.core;
        let api = Api { limiter: &core.limiter, redactor: &core.redactor, limits: core };
        match api.answer(call, body, |_, _| {}).await {
            Ok(answer) => EngineAnswer {
                status: answer.status.as_u16(),
                headers: answer.decision.filter(|_| headers).map_or(String::new(), |it| core.headers(&it)),
                text: answer.text.into_owned(),
            },
            Err(error) => EngineAnswer::error(&error),
        }
    }

    /// The state of this process. In a forked process it is made on first use.
    #[inline]
    pub(crate) fn state(&self) -> Result<&Parts, ApiError> {
        let process = if self.remote { std::process::id() } else { process::known_id() };
        match self.states.of(process) {
            Some(state) => Ok(state.parts()),
            None => self.reopen().map_err(|error| ApiError::new(Code::StoreUnavailable, error)),
        }
    }

    /// Makes the state of a forked process from that of its parent.
    #[cold]
    fn reopen(&self) -> Result<&Parts, String> {
        let parent = Arc::clone(&self.states.newest().expect("made when it was opened").parts().core);
        let state = self.states.get_or_try_init(|| {
            if self.remote {
                return self.start(self.core(Config::clone(&parent.config.load()))?);
            }
            self.listeners.emit(
                EventKind::Warning,
                "this process was forked, and counts separately from its parent: use redis:// to share counts, or open \
                 the limiter after the fork"
                    .to_owned(),
            );
            self.start(parent)
        })?;
        Ok(state.parts())
    }

    /// Opens the store.
    fn core(&self, config: Config) -> Result<Arc<Core>, String> {
        let limiter = if self.remote {
            let runtime = process::runtime().map_err(|error| format!("cannot start a thread: {error}"))?;
            // The store keeps its connections on this runtime.
            let _entered = runtime.enter();
            config.limiter().map_err(|error| error.to_string())?
        } else {
            let clock = self.clock.as_ref().map_or_else(Clock::system, Clock::manual);
            let (store, restored) = config.memory.open(clock).map_err(|error| error.to_string())?;
            if let Restored::Refused(error) = restored {
                self.listeners.emit(EventKind::Error, format!("starting with empty counts: {error}"));
            }
            Limiter::embedded(config.policy.clone(), store)
        };
        let settings = ActiveSettings::new(Settings::of(&config), &limiter);
        let active_limits = active_limits(&self.options.source, &config, &limiter);
        Ok(Arc::new(Core {
            limiter,
            settings,
            redactor: Redactor::default(),
            config: ArcSwap::from_pointee(config),
            active_limits: ArcSwap::from_pointee(active_limits),
            draw: if self.clock.is_some() { || 0 } else { random::draw },
        }))
    }

    /// Follows the config file, if there is one.
    fn start(&self, core: Arc<Core>) -> Result<ProcessState, String> {
        let follow = match &self.options.source {
            ConfigSource::File(path) => Some(self.follow(path, &core)?),
            ConfigSource::Text { .. } => None,
        };
        let tickets = Arc::new(Tickets::new(&core.limiter, Arc::clone(&self.listeners), MAX_OPEN));
        Ok(ProcessState {
            process: std::process::id(),
            parts: Some(Parts { core, tickets, _follow: follow }),
        })
    }

    fn follow(&self, path: &Path, core: &Arc<Core>) -> Result<Follow, String> {
        let (config, core, listeners) = (core.config.load(), Arc::clone(core), Arc::clone(&self.listeners));
        let (source, store) = (self.options.source.clone(), self.options.store_url()?);
        let follow = Follow::new(path, &config, move |reload| match reload {
            Ok(Reload { mut config, .. }) => {
                if let Some(store) = &store {
                    config.store = store.clone();
                }
                let policy = core
                    .settings
                    .replace(Settings::of(&config), || core.limiter.replace_policy(config.policy.clone()));
                core.active_limits.store(active_limits(&source, &config, &core.limiter).into());
                core.config.store(config.into());
                listeners.emit(EventKind::Reload, policy.version().to_string());
                true
            }
            Err(error) => {
                let error = error.to_string();
                let failed = ActiveLimits {
                    error: Some(error.clone()),
                    ..ActiveLimits::clone(&core.active_limits.load())
                };
                core.active_limits.store(failed.into());
                let message = format!("config not reloaded, the previous one stays active: {error}");
                listeners.emit(EventKind::Error, message);
                false
            }
        });
        follow.map_err(|error| format!("{}: cannot watch the file for changes: {error}", path.display()))
    }
}

impl Core {
    /// The JSON of a decision.
    pub(crate) fn text(&self, decision: &Decision) -> String {
        let mut out = Writer::with_capacity(1 << 10);
        decision_json::write_decision(&mut out, &self.limiter, &self.redactor, decision);
        out.finish()
    }

    /// The rate-limit headers of a decision: `name\nvalue\nname\nvalue`.
    fn headers(&self, decision: &Decision) -> String {
        let prepared = self.settings.read(&self.limiter);
        let jitter = Jitter { share: prepared.settings.retry_after_jitter, draw: self.draw };
        let mut lines = String::with_capacity(192);
        for (field, value) in headers::write(decision, &prepared.settings.headers, &jitter).iter() {
            if !lines.is_empty() {
                lines.push('\n');
            }
            push_header(&mut lines, field.name(), value);
        }
        lines
    }
}

impl ShowLimits for Core {
    fn active_limits(&self) -> Arc<ActiveLimits> {
        self.active_limits.load_full()
    }
}

fn active_limits(source: &ConfigSource, config: &Config, limiter: &Limiter) -> ActiveLimits {
    ActiveLimits {
        version: limiter.policy().version(),
        source: source.of_limits(),
        loaded_at: limiter.clock().now().as_micros() / 1_000_000,
        error: None,
        shadowed: false,
        persistent: None,
        limits: config.limits.clone(),
    }
}

/// Seconds as a span, rounded to microseconds.
fn span_of(seconds: f64) -> Result<Span, String> {
    let span = std::time::Duration::try_from_secs_f64(seconds);
    span.map(Span::from).map_err(|_| format!("{seconds} is not a number of seconds from 0 to 2^64"))
}

/// Appends the name and the value of a header, in lines.
pub(crate) fn push_header(lines: &mut String, name: &str, value: &[u8]) {
    lines.push_str(name);
    lines.push('\n');
    // Header values that this product writes are ASCII.
    lines.push_str(&String::from_utf8_lossy(value));
}

impl EngineAnswer {
    fn error(error: &ApiError) -> EngineAnswer {
        let mut out = Writer::default();
        error.write(&mut out);
        EngineAnswer { status: error.code.status().as_u16(), text: out.finish(), headers: String::new() }
    }
}

impl ProcessState {
    #[inline]
    fn parts(&self) -> &Parts {
        self.parts.as_ref().expect("until it is dropped")
    }
}

impl Drop for ProcessState {
    /// A forked process does not drop the state of its parent: that would wait for threads that do not exist in this
    /// process, and release slots that the parent holds.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.parts.take());
        }
    }
}
