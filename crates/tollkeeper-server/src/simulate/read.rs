//! Reads a log from its first line to its last: lines, their fields, their order, batches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::bail;

use super::batch::Batch;
use super::format::Format;
use super::lines::{Line, Lines, UnreadableLines};
use super::logged::{Context, Logged, Unreadable};
use super::order::{Batches, Order, OrderSettings};
use super::progress::Progress;
use super::source::{Block, Input, Source};

/// How many lines are examined before the log is read.
const HEAD_LINES: usize = 20;
/// How often an interrupt is looked for while nothing arrives.
const PATIENCE: Duration = Duration::from_millis(50);

/// How a log is read.
#[derive(Clone, Debug)]
pub struct ReadSettings {
    /// How its fields are read.
    pub context: Context,
    /// How time is reconstructed.
    pub order: OrderSettings,
    /// Lines with these statuses are left out.
    pub drop_status: Vec<u16>,
    /// Whether an unreadable line is an error.
    pub strict: bool,
    /// The requests in a batch.
    pub batch: usize,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct ReadCounts {
    /// Lines, without blank ones and headers.
    pub lines: u64,
    /// Lines that came too late to be put in order.
    pub late: u64,
    /// Lines that could not be read.
    pub unreadable: UnreadableLines,
    /// Whether reading was interrupted.
    pub interrupted: bool,
}

/// The beginning of a log.
#[derive(Debug, Default)]
pub struct Head {
    blocks: Vec<Block>,
    /// Its first lines, without blank ones.
    pub lines: Vec<Vec<u8>>,
}

impl Head {
    /// Reads the first lines of a log.
    pub fn read(source: &Source, interrupted: &AtomicBool) -> anyhow::Result<Head> {
        let (mut head, mut lines) = (Head::default(), Lines::default());
        while head.lines.len() < HEAD_LINES {
            let Some(block) = next(source, interrupted)? else { break };
            let kept = &mut head.lines;
            let mut each = |line: Line<'_>| {
                if let Line::Whole(line) = line
                    && !is_blank(line)
                    && kept.len() < HEAD_LINES
                {
                    kept.push(line.to_vec());
                }
            };
            match block.bytes.is_empty() {
                true => lines.finish(&mut each),
                false => lines.split(&block.bytes, &mut each),
            }
            head.blocks.push(block);
        }
        Ok(head)
    }

    /// Whether all its stamps are of whole seconds.
    pub fn is_whole_seconds(&self, format: &Format, context: &Context) -> bool {
        let (mut format, mut logged) = (format.clone(), Logged::default());
        let stamps = self.lines.iter().filter_map(|line| {
            logged.clear();
            format.read(line, &mut logged, context).ok().filter(|is_line| *is_line)?;
            logged.stamp
        });
        let stamps: Vec<bool> = stamps.map(|stamp| stamp.is_whole).collect();
        !stamps.is_empty() && stamps.iter().all(|is_whole| *is_whole)
    }
}

/// The next block; `None` at the end, or if reading is interrupted.
fn next(source: &Source, interrupted: &AtomicBool) -> anyhow::Result<Option<Block>> {
    while !interrupted.load(Ordering::Relaxed) {
        match source.blocks.recv_timeout(PATIENCE) {
            Ok(block) => return block.map(Some),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
    Ok(None)
}

/// A log that is being read.
struct Reading<'a> {
    settings: &'a ReadSettings,
    format: Format,
    logged: Logged,
    order: Order,
    batches: Batches,
    counts: ReadCounts,
    inputs: &'a [Input],
    input: usize,
    /// The number of the current line in its input.
    line: u64,
    send: &'a mut dyn FnMut(Batch),
    error: Option<anyhow::Error>,
}

/// Reads a log, and passes its requests to `send` in batches.
pub fn read(
    (source, inputs): (&Source, &[Input]),
    head: Head,
    format: &Format,
    settings: &ReadSettings,
    interrupted: &AtomicBool,
    progress: &Progress,
    send: &mut dyn FnMut(Batch),
) -> anyhow::Result<ReadCounts> {
    let mut reading = Reading {
        settings,
        format: format.clone(),
        logged: Logged::default(),
        order: Order::new(settings.order),
        batches: Batches::new(settings.batch),
        counts: ReadCounts::default(),
        inputs,
        input: 0,
        line: 0,
        send,
        error: None,
    };
    let mut lines = Lines::default();
    let mut blocks = head.blocks.into_iter();
    while let Some(block) =
        blocks.next().map_or_else(|| next(source, interrupted), |block| Ok(Some(block)))?
    {
        reading.input = block.input;
        if block.bytes.is_empty() {
            lines.finish(|line| reading.line(line));
            reading.line = 0;
        } else {
            lines.split(&block.bytes, |line| reading.line(line));
        }
        if let Some(error) = reading.error {
            return Err(error);
        }
        progress.update(source, reading.counts.lines);
    }
    reading.counts.interrupted = interrupted.load(Ordering::Relaxed);
    Ok(reading.finish())
}

impl Reading<'_> {
    fn line(&mut self, line: Line<'_>) {
        self.line += 1;
        let result = match line {
            Line::Whole(line) if is_blank(line) => return,
            Line::Whole(line) => self.read(line).map_err(|reason| (reason, line)),
            Line::Cut(line) => Err((Unreadable::TooLong, line)),
        };
        match result {
            Ok(false) => return,
            Ok(true) => {}
            Err((reason, line)) => self.unreadable(reason, line),
        }
        self.counts.lines += 1;
    }

    /// Reads a line; false if it is a header.
    fn read(&mut self, line: &[u8]) -> Result<bool, Unreadable> {
        self.logged.clear();
        if !self.format.read(line, &mut self.logged, &self.settings.context)? {
            return Ok(false);
        }
        let stamp = self.logged.finish(&self.settings.context)?;
        if self.logged.status.is_some_and(|status| self.settings.drop_status.contains(&status)) {
            return Ok(true);
        }
        let (batches, send) = (&mut self.batches, &mut *self.send);
        self.order.add(stamp, &self.logged, &mut |entry, parts| {
            if let Some(batch) = batches.push(entry, parts) {
                send(batch);
            }
        });
        Ok(true)
    }

    #[cold]
    fn unreadable(&mut self, reason: Unreadable, line: &[u8]) {
        let place = || format!("{}:{}", self.inputs[self.input].name(), self.line);
        if self.settings.strict && self.error.is_none() {
            let text = super::lines::shown(line);
            self.error = Some(anyhow::anyhow!("{}: {}\n  {text}", place(), reason.reason()));
        }
        self.counts.unreadable.add(reason, line, place);
    }

    fn finish(mut self) -> ReadCounts {
        let (batches, send) = (&mut self.batches, &mut *self.send);
        self.order.finish(&mut |entry, parts| {
            if let Some(batch) = batches.push(entry, parts) {
                send(batch);
            }
        });
        let last = self.batches.finish();
        if !last.is_empty() {
            (self.send)(last);
        }
        ReadCounts { late: self.order.late, ..self.counts }
    }
}

fn is_blank(line: &[u8]) -> bool {
    line.trim_ascii().is_empty()
}

/// Fails if no line could be read.
pub fn check_readable(counts: &ReadCounts) -> anyhow::Result<()> {
    if counts.interrupted || counts.lines > counts.unreadable.count() {
        return Ok(());
    }
    let first = counts.unreadable.reasons().next().and_then(|(reason, _, examples)| {
        examples
            .first()
            .map(|example| format!("\n  {}: {}: {}", example.place, reason.reason(), example.text))
    });
    bail!("no readable line{}", first.unwrap_or_default())
}
