//! Follows a config file and decides when a change of it takes effect.
//!
//! The file may be read while it is being written, and its first part may be a valid config that lacks the rest: the
//! tokens, some limits, the facts that limits are keyed by. So a change that only adds to the file or changes numbers
//! takes effect at once. A change that removes anything else waits until two reads at least [`SETTLED`] apart have
//! found the same content and the same modification time.
//!
//! The file is compared with the active config, not with the previous read. So a change that was missed, postponed or
//! could not be applied is tried again until the active config matches the file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::origin::{Origin, digest};
use super::watch::{POLL, until_quiet, watcher};
use super::{Config, ReadError, Report, content};

/// How long the file must stay the same before a change that removes something takes effect.
const SETTLED: Duration = Duration::from_millis(250);
/// After this long, a file that keeps changing is reported. The change still waits for the file to settle.
const UNSETTLED: Duration = Duration::from_secs(5);
/// The longest pause between two attempts to apply a config.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Follows a config file until it is dropped.
///
/// A changed file takes effect within a second, whether it was written in place, renamed over the old one, or swapped
/// by a symbolic link as in Kubernetes. A partly written file removes nothing: a change that only adds to the file or
/// changes numbers takes effect at once, any other change when the file has stayed the same for 250 ms. An invalid
/// file is reported once and changes nothing.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper::config::{Config, Follow};
///
/// # let folder = std::env::temp_dir().join(format!("tollkeeper-follow-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("tollkeeper.yaml");
/// # std::fs::write(&path, "limits: [{ name: per-ip, by: ip, rate: 1000/min }]")?;
/// let (config, _warnings) = Config::read(&path)?;
/// let limiter = config.limiter()?;
/// let follow = Follow::new(&path, &config, {
///     let limiter = limiter.clone();
///     move |reload| match reload {
///         Ok(reload) => {
///             limiter.replace_policy(reload.config.policy); // counts are kept
///             true
///         }
///         Err(error) => {
///             eprintln!("{error}"); // the limits stay as they are
///             false
///         }
///     }
/// })?;
/// # drop(follow);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Follow {
    signals: Arc<Signals>,
    wake: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

/// A changed config to apply.
#[derive(Debug)]
pub struct Reload {
    /// The new config.
    pub config: Config,
    /// The warnings about the file.
    pub report: Report,
    /// 1, or more if earlier attempts to apply this content failed.
    pub attempt: u32,
}

#[derive(Debug, Default)]
struct Signals {
    stopped: AtomicBool,
    requested: AtomicBool,
}

impl Follow {
    /// Calls `apply` from a thread of its own whenever the file differs from the active config, which is initially
    /// `active`. `apply` returns whether it has applied the config. If not, it is called again later with the same
    /// config. `apply` receives an error if the file cannot be used; its return value is then ignored. Fails if the
    /// thread cannot be started.
    pub fn new(
        path: &Path,
        active: &Config,
        mut apply: impl FnMut(Result<Reload, ReadError>) -> bool + Send + 'static,
    ) -> std::io::Result<Follow> {
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(path, wake.clone());
        let signals = Arc::new(Signals::default());
        let progress = Progress::new(path, Arc::clone(&active.origin));
        let follow = {
            let signals = Arc::clone(&signals);
            move || {
                // Dropping the watcher would end the events.
                let _watcher = watcher;
                progress.follow(&woken, &signals, &mut apply);
            }
        };
        let thread = thread::Builder::new().name("tollkeeper-config".to_owned()).spawn(follow)?;
        Ok(Follow { signals, wake, thread: Some(thread) })
    }

    /// Reads the file now and applies it even if it has not changed, because a file that it names may have. A change
    /// that removes something still waits for the file to settle.
    pub fn reload(&self) {
        self.signals.requested.store(true, Relaxed);
        // If the channel is full, the thread has already been woken.
        let _ = self.wake.try_send(());
    }
}

impl Drop for Follow {
    /// Waits for a running call of `apply`; no further call begins.
    fn drop(&mut self) {
        self.signals.stopped.store(true, Relaxed);
        let _ = self.wake.try_send(());
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic of `apply` has already been printed.
            let _ = thread.join();
        }
    }
}

/// The state of following: the active config, and the pending or failed change of the file.
#[derive(Debug)]
struct Progress {
    path: PathBuf,
    active: Arc<Origin>,
    /// Whether an error was reported since the last config was applied. If the file then matches the active config
    /// again, it is applied once more, to clear the error.
    reported: bool,
    /// The digest of invalid content that has been reported.
    rejected: Option<u64>,
    pending: Option<Pending>,
    retry: Option<Retry>,
}

/// A change that waits until the file has settled.
#[derive(Debug)]
struct Pending {
    content: u64,
    modified: Option<SystemTime>,
    /// When this content was first read.
    since: Instant,
    /// When the first change of a series was read.
    began: Instant,
    reported: bool,
}

/// A config that could not be applied.
#[derive(Debug)]
struct Retry {
    content: u64,
    attempt: u32,
    at: Instant,
}

/// The content of the file, with the time before and after the read.
struct FileRead {
    bytes: Vec<u8>,
    modified: Option<SystemTime>,
    began: Instant,
    ended: Instant,
}

/// The action after a read of the file.
#[derive(Debug)]
enum Step {
    Nothing,
    Apply(Box<Reload>),
    Report(ReadError),
}

impl Progress {
    fn new(path: &Path, active: Arc<Origin>) -> Progress {
        let path = path.to_owned();
        Progress { path, active, reported: false, rejected: None, pending: None, retry: None }
    }

    fn follow(
        mut self,
        woken: &Receiver<()>,
        signals: &Signals,
        apply: &mut dyn FnMut(Result<Reload, ReadError>) -> bool,
    ) {
        loop {
            match woken.recv_timeout(self.pause(Instant::now())) {
                Ok(()) => {
                    until_quiet(woken, || signals.stopped.load(Relaxed) || signals.requested.load(Relaxed));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if signals.stopped.load(Relaxed) {
                return;
            }
            let requested = signals.requested.swap(false, Relaxed);
            let began = Instant::now();
            let file_read = content(&self.path).map(|(bytes, modified)| FileRead {
                bytes,
                modified,
                began,
                ended: Instant::now(),
            });
            match self.step(file_read, requested) {
                Step::Nothing => {}
                Step::Report(error) => drop(apply(Err(error))),
                Step::Apply(reload) => {
                    let (origin, attempt) = (Arc::clone(&reload.config.origin), reload.attempt);
                    let applied = apply(Ok(*reload));
                    self.record_attempt(applied, origin, attempt, Instant::now());
                }
            }
        }
    }

    /// How long to wait for an event before the file is read anyway.
    fn pause(&self, now: Instant) -> Duration {
        let settled =
            self.pending.as_ref().map(|pending| (pending.since + SETTLED).saturating_duration_since(now));
        settled.map_or(POLL, |settled| settled.min(POLL))
    }

    /// The action for the result of a read. `requested` is true after a call of [`Follow::reload`].
    fn step(&mut self, file_read: Result<FileRead, ReadError>, requested: bool) -> Step {
        let file_read = match file_read {
            Ok(file_read) => file_read,
            // A missing file is about to be replaced.
            Err(_) if !requested => return Step::Nothing,
            Err(error) => return self.report(error),
        };
        let content = digest(&file_read.bytes);
        let is_active = content == self.active.digest;
        if is_active {
            self.pending = None;
        }
        let too_early =
            self.retry.as_ref().is_some_and(|retry| retry.content == content && file_read.began < retry.at);
        let known = (is_active && !self.reported) || self.rejected == Some(content);
        if !requested && (known || too_early) {
            return Step::Nothing;
        }
        let settled = self.is_settled(content, &file_read);
        let lost = match Config::parse_file(&self.path, &file_read.bytes) {
            Ok((config, report)) => {
                let lost = self.active.lost_in(&config.origin);
                if settled || lost.is_empty() {
                    let attempt = match &self.retry {
                        Some(retry) if retry.content == content && !requested => retry.attempt + 1,
                        _ => 1,
                    };
                    return Step::Apply(Box::new(Reload { config, report, attempt }));
                }
                lost.to_string()
            }
            Err(error) if settled || requested => {
                self.rejected = Some(content);
                self.pending = None;
                return self.report(error);
            }
            Err(_) => String::new(),
        };
        self.postpone(content, &file_read);
        match &mut self.pending {
            Some(pending)
                if !pending.reported && file_read.ended.duration_since(pending.began) >= UNSETTLED =>
            {
                pending.reported = true;
                self.report(ReadError::Unsettled { path: self.path.clone(), lost })
            }
            _ => Step::Nothing,
        }
    }

    /// Whether a read at least [`SETTLED`] ago found the same content and modification time.
    fn is_settled(&self, content: u64, file_read: &FileRead) -> bool {
        self.pending.as_ref().is_some_and(|pending| {
            (pending.content, pending.modified) == (content, file_read.modified)
                && file_read.began.saturating_duration_since(pending.since) >= SETTLED
        })
    }

    fn postpone(&mut self, content: u64, file_read: &FileRead) {
        let (began, reported) = match &self.pending {
            Some(pending) if (pending.content, pending.modified) == (content, file_read.modified) => return,
            Some(pending) => (pending.began, pending.reported),
            None => (file_read.ended, false),
        };
        self.pending =
            Some(Pending { content, modified: file_read.modified, since: file_read.ended, began, reported });
    }

    fn report(&mut self, error: ReadError) -> Step {
        self.reported = true;
        Step::Report(error)
    }

    /// Records whether a config was applied, and schedules a retry if not.
    fn record_attempt(&mut self, applied: bool, origin: Arc<Origin>, attempt: u32, now: Instant) {
        self.pending = None;
        if applied {
            (self.reported, self.rejected, self.retry) = (false, None, None);
            self.active = origin;
            return;
        }
        self.reported = true;
        let pause = POLL.saturating_mul(1 << attempt.min(10)).min(LONGEST_PAUSE);
        self.retry = Some(Retry { content: origin.digest, attempt, at: now + pause });
    }
}

#[cfg(test)]
mod tests;
