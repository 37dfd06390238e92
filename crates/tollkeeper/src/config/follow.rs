//! Follows a config file, and decides when a change of it takes effect.
//!
//! A file may be read at any moment while it is being written. What is there by then may be a valid config that lacks
//! the rest: the tokens, some of the limits, the facts that limits are keyed by. So a change that only adds to the file
//! or changes numbers takes effect at once; a change that takes away anything else waits until two reads at least
//! [`SETTLED`] apart have found the same content and the same time of the last change.
//!
//! What is in force is compared with the file, not with an earlier read of it: a change that was missed, postponed or
//! could not be applied is tried again until the two are the same.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::origin::{Origin, digest};
use super::watch::{POLL, until_quiet, watcher};
use super::{Config, ReadError, Report, content};

/// How long a file must have been the same before a change that takes something away takes effect.
const SETTLED: Duration = Duration::from_millis(250);
/// After so long, a file that keeps changing is reported. It is waited for all the same.
const UNSETTLED: Duration = Duration::from_secs(5);
/// The longest pause between two attempts to put a config in force.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Follows a config file until it is dropped.
///
/// A changed file takes effect within a second, whether it was written, renamed over the old one, or swapped by a
/// symbolic link as Kubernetes does it. A file that is being written does not take anything away: a change that only
/// adds to the file or changes numbers takes effect at once, any other change when the file has been the same for
/// 250 ms. A broken file is reported once and changes nothing.
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
///             eprintln!("{error}"); // and nothing changes
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

/// A changed file, to be put in force.
#[derive(Debug)]
pub struct Reload {
    /// What the file says.
    pub config: Config,
    /// Its warnings.
    pub report: Report,
    /// 1, or more if this content could not be put in force before.
    pub attempt: u32,
}

#[derive(Debug, Default)]
struct Signals {
    stopped: AtomicBool,
    requested: AtomicBool,
}

impl Follow {
    /// Calls `apply` from a thread of its own whenever the file is no longer what is in force, at first `in_force`.
    /// `apply` returns whether the config is in force now. If not, it is called again later with the same config. An
    /// error given to `apply` is a file that cannot be used: what it returns then does not matter. An error of this
    /// function means that no thread can be started.
    pub fn new(
        path: &Path,
        in_force: &Config,
        mut apply: impl FnMut(Result<Reload, ReadError>) -> bool + Send + 'static,
    ) -> std::io::Result<Follow> {
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(path, wake.clone());
        let signals = Arc::new(Signals::default());
        let progress = Progress::new(path, Arc::clone(&in_force.origin));
        let follow = {
            let signals = Arc::clone(&signals);
            move || {
                // Events come as long as this lives.
                let _watcher = watcher;
                progress.follow(&woken, &signals, &mut apply);
            }
        };
        let thread = thread::Builder::new().name("tollkeeper-config".to_owned()).spawn(follow)?;
        Ok(Follow { signals, wake, thread: Some(thread) })
    }

    /// Reads the file now, also if it has not changed: a file that it names may have. What would take something away
    /// waits all the same.
    pub fn reload(&self) {
        self.signals.requested.store(true, Relaxed);
        // If there is no room, the thread has been woken already.
        let _ = self.wake.try_send(());
    }
}

impl Drop for Follow {
    /// Waits for a call of `apply` that has begun; none begins afterwards.
    fn drop(&mut self) {
        self.signals.stopped.store(true, Relaxed);
        let _ = self.wake.try_send(());
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic of `apply` has been printed by itself.
            let _ = thread.join();
        }
    }
}

/// What is known of the file and of what is in force.
#[derive(Debug)]
struct Progress {
    path: PathBuf,
    in_force: Arc<Origin>,
    /// Whether something was reported since the last config was put in force: to be taken back when the file is again
    /// what is in force.
    reported: bool,
    /// The content that cannot be used, and has been reported.
    rejected: Option<u64>,
    held: Option<Held>,
    retry: Option<Retry>,
}

/// A change that waits for the file to settle.
#[derive(Debug)]
struct Held {
    content: u64,
    modified: Option<SystemTime>,
    /// When this content was read first.
    since: Instant,
    /// When the first of several changes was read.
    began: Instant,
    reported: bool,
}

/// A config that could not be put in force.
#[derive(Debug)]
struct Retry {
    content: u64,
    attempt: u32,
    at: Instant,
}

/// The file at some moment.
struct Seen {
    bytes: Vec<u8>,
    modified: Option<SystemTime>,
    began: Instant,
    ended: Instant,
}

/// What to do about the file.
#[derive(Debug)]
enum Step {
    Nothing,
    Apply(Box<Reload>),
    Report(ReadError),
}

impl Progress {
    fn new(path: &Path, in_force: Arc<Origin>) -> Progress {
        let path = path.to_owned();
        Progress { path, in_force, reported: false, rejected: None, held: None, retry: None }
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
            let seen = content(&self.path).map(|(bytes, modified)| Seen {
                bytes,
                modified,
                began,
                ended: Instant::now(),
            });
            match self.step(seen, requested) {
                Step::Nothing => {}
                Step::Report(error) => drop(apply(Err(error))),
                Step::Apply(reload) => {
                    let (origin, attempt) = (Arc::clone(&reload.config.origin), reload.attempt);
                    let applied = apply(Ok(*reload));
                    self.ended(applied, origin, attempt, Instant::now());
                }
            }
        }
    }

    /// How long to wait for an event before the file is read without one.
    fn pause(&self, now: Instant) -> Duration {
        let settled = self.held.as_ref().map(|held| (held.since + SETTLED).saturating_duration_since(now));
        settled.map_or(POLL, |settled| settled.min(POLL))
    }

    /// What to do about the file as it was read. `requested` is whether somebody asked for a reload.
    fn step(&mut self, seen: Result<Seen, ReadError>, requested: bool) -> Step {
        let seen = match seen {
            Ok(seen) => seen,
            // A file that is missing is about to be replaced.
            Err(_) if !requested => return Step::Nothing,
            Err(error) => return self.report(error),
        };
        let content = digest(&seen.bytes);
        let in_force = content == self.in_force.digest;
        if in_force {
            self.held = None;
        }
        let too_early =
            self.retry.as_ref().is_some_and(|retry| retry.content == content && seen.began < retry.at);
        let known = (in_force && !self.reported) || self.rejected == Some(content);
        if !requested && (known || too_early) {
            return Step::Nothing;
        }
        let settled = self.is_settled(content, &seen);
        let lost = match Config::parse_file(&self.path, &seen.bytes) {
            Ok((config, report)) => {
                let lost = self.in_force.lost_in(&config.origin);
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
                self.held = None;
                return self.report(error);
            }
            Err(_) => String::new(),
        };
        self.hold(content, &seen);
        match &mut self.held {
            Some(held) if !held.reported && seen.ended.duration_since(held.began) >= UNSETTLED => {
                held.reported = true;
                self.report(ReadError::Unsettled { path: self.path.clone(), lost })
            }
            _ => Step::Nothing,
        }
    }

    /// Whether an earlier read, long enough ago, found the file as it is now.
    fn is_settled(&self, content: u64, seen: &Seen) -> bool {
        self.held.as_ref().is_some_and(|held| {
            (held.content, held.modified) == (content, seen.modified)
                && seen.began.saturating_duration_since(held.since) >= SETTLED
        })
    }

    fn hold(&mut self, content: u64, seen: &Seen) {
        let (began, reported) = match &self.held {
            Some(held) if (held.content, held.modified) == (content, seen.modified) => return,
            Some(held) => (held.began, held.reported),
            None => (seen.ended, false),
        };
        self.held = Some(Held { content, modified: seen.modified, since: seen.ended, began, reported });
    }

    fn report(&mut self, error: ReadError) -> Step {
        self.reported = true;
        Step::Report(error)
    }

    /// What became of a config that was to be put in force.
    fn ended(&mut self, applied: bool, origin: Arc<Origin>, attempt: u32, now: Instant) {
        self.held = None;
        if applied {
            (self.reported, self.rejected, self.retry) = (false, None, None);
            self.in_force = origin;
            return;
        }
        self.reported = true;
        let pause = POLL.saturating_mul(1 << attempt.min(10)).min(LONGEST_PAUSE);
        self.retry = Some(Retry { content: origin.digest, attempt, at: now + pause });
    }
}

#[cfg(test)]
mod tests;
