//! The progress bar on a terminal: bytes read, lines a second, time left.

use std::io::{self, IsTerminal as _};
use std::sync::atomic::Ordering;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::source::Source;

/// How often the bar is drawn, in a second.
const DRAWN: u8 = 5;

/// A progress bar, or none.
#[derive(Debug)]
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// A bar on standard error, if that is a terminal and a bar is `wanted`.
    pub fn new(source: &Source, wanted: bool) -> Progress {
        if !wanted || !io::stderr().is_terminal() {
            return Progress(None);
        }
        Progress(Some(Self::bar(source, ProgressDrawTarget::stderr_with_hz(DRAWN))))
    }

    fn bar(source: &Source, target: ProgressDrawTarget) -> ProgressBar {
        // A stream has no length, so there is no time left to show.
        let (bar, style) = match source.bytes {
            Some(bytes) => (ProgressBar::with_draw_target(Some(bytes), target), KNOWN_LENGTH),
            None => (ProgressBar::with_draw_target(None, target), UNKNOWN_LENGTH),
        };
        bar.with_style(ProgressStyle::with_template(style).expect("the template is valid"))
    }

    /// Shows how far the source is.
    pub fn update(&self, source: &Source, lines: u64) {
        let Some(bar) = &self.0 else { return };
        bar.set_position(source.bytes_read.load(Ordering::Relaxed));
        let seconds = bar.elapsed().as_secs_f64().max(0.001);
        bar.set_message(format!("{:.0} lines/s", lines as f64 / seconds));
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

const KNOWN_LENGTH: &str = "{wide_bar} {bytes}/{total_bytes}  {msg}  {eta} left";
const UNKNOWN_LENGTH: &str = "{spinner} {bytes}  {msg}";

#[cfg(test)]
mod tests {
    use indicatif::InMemoryTerm;

    use super::*;
    use crate::simulate::source::Input;

    #[test]
    fn bar_shows_bytes_lines_and_time_left() {
        let path = std::env::temp_dir().join(format!("tollkeeper-progress-{}", std::process::id()));
        std::fs::write(&path, "line\n".repeat(1_000)).expect("a file");
        let source = Source::open(&[Input::File(path.clone())]).expect("it exists");
        while source.blocks.recv().is_ok() {}
        let terminal = InMemoryTerm::new(4, 100);
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(terminal.clone()), DRAWN);
        let progress = Progress(Some(Progress::bar(&source, target)));
        progress.update(&source, 1_000);
        if let Some(bar) = &progress.0 {
            bar.tick();
        }
        let shown = terminal.contents();
        assert!(
            shown.contains("4.88 KiB/4.88 KiB") && shown.contains("lines/s") && shown.contains("left"),
            "{shown}"
        );
        progress.finish();
        assert_eq!(terminal.contents(), "");
        std::fs::remove_file(path).expect("it exists");
    }

    #[test]
    fn no_bar_without_a_terminal() {
        let source = Source::open(&[]).expect("nothing to open");
        assert!(Progress::new(&source, true).0.is_none() && Progress::new(&source, false).0.is_none());
    }
}
