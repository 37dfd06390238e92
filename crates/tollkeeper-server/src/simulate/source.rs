//! Opens logs and reads them in blocks, in a thread of its own. Compressed logs are recognised by their first bytes.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use anyhow::{Context as _, bail};

/// The bytes of a block.
const BLOCK: usize = 128 << 10;
/// How many blocks may wait to be split.
const AHEAD: usize = 4;

/// Where lines come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Standard input.
    Stdin,
    /// A file.
    File(PathBuf),
}

impl Input {
    /// The inputs of the command line; without any, standard input.
    pub fn all(paths: &[PathBuf]) -> anyhow::Result<Vec<Input>> {
        if paths.is_empty() {
            return Ok(vec![Input::Stdin]);
        }
        let inputs: Vec<Input> = paths.iter().map(|path| Input::of(path)).collect();
        if inputs.iter().filter(|input| **input == Input::Stdin).count() > 1 {
            bail!("standard input is given twice");
        }
        Ok(inputs)
    }

    fn of(path: &Path) -> Input {
        if path == Path::new("-") { Input::Stdin } else { Input::File(path.to_owned()) }
    }

    /// The name in messages.
    pub fn name(&self) -> String {
        match self {
            Input::Stdin => "standard input".to_owned(),
            Input::File(path) => path.display().to_string(),
        }
    }

    fn open(&self) -> anyhow::Result<(Box<dyn Read + Send>, Option<u64>)> {
        let path = match self {
            Input::Stdin => return Ok((Box::new(io::stdin()), None)),
            Input::File(path) => path,
        };
        let file = File::open(path).with_context(|| self.name())?;
        let metadata = file.metadata().with_context(|| self.name())?;
        if metadata.is_dir() {
            bail!("{} is a directory (name its files: {0}/*)", self.name());
        }
        Ok((Box::new(file), Some(metadata.len()).filter(|_| metadata.is_file())))
    }
}

/// A piece of a log.
#[derive(Debug)]
pub struct Block {
    /// The index of the input.
    pub input: usize,
    /// Its bytes; empty at the end of an input.
    pub bytes: Vec<u8>,
}

/// Logs that are being read.
#[derive(Debug)]
pub struct Source {
    /// The blocks of all inputs, in order.
    pub blocks: Receiver<anyhow::Result<Block>>,
    /// How many bytes have been read, compressed ones as they are.
    pub bytes_read: Arc<AtomicU64>,
    /// How many bytes the inputs have, if all are files.
    pub bytes: Option<u64>,
}

impl Source {
    /// Opens all inputs, and starts to read them.
    pub fn open(inputs: &[Input]) -> anyhow::Result<Source> {
        let opened = inputs.iter().map(Input::open).collect::<anyhow::Result<Vec<_>>>()?;
        let bytes = opened.iter().map(|(_, bytes)| *bytes).sum();
        let (sender, blocks) = sync_channel(AHEAD);
        let bytes_read = Arc::new(AtomicU64::new(0));
        let names: Vec<String> = inputs.iter().map(Input::name).collect();
        let counter = Arc::clone(&bytes_read);
        thread::Builder::new().name("log reader".to_owned()).spawn(move || {
            for (input, ((file, _), name)) in opened.into_iter().zip(names).enumerate() {
                let counted = Counted { inner: file, count: Arc::clone(&counter) };
                if let Err(error) = read(counted, input, &sender) {
                    let _ = sender.send(Err(error).context(name));
                    return;
                }
            }
        })?;
        Ok(Source { blocks, bytes_read, bytes })
    }
}

/// Sends the blocks of one input, decompressed.
fn read(mut file: Counted, input: usize, sender: &SyncSender<anyhow::Result<Block>>) -> anyhow::Result<()> {
    let mut magic = Vec::new();
    file.by_ref().take(4).read_to_end(&mut magic)?;
    let is_gzip = magic.starts_with(&[0x1f, 0x8b]);
    let is_zstd = magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    let whole = Cursor::new(magic).chain(file);
    let mut bytes: Box<dyn Read> = match (is_gzip, is_zstd) {
        (true, _) => Box::new(flate2::read::MultiGzDecoder::new(io::BufReader::with_capacity(BLOCK, whole))),
        (_, true) => Box::new(zstd::stream::read::Decoder::new(whole)?),
        _ => Box::new(whole),
    };
    loop {
        let mut block = vec![0; BLOCK];
        let length = match bytes.read(&mut block) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            length => length?,
        };
        block.truncate(length);
        if sender.send(Ok(Block { input, bytes: block })).is_err() || length == 0 {
            // Either the receiver has left, or this was the end.
            return Ok(());
        }
    }
}

/// Counts the bytes that are read.
struct Counted {
    inner: Box<dyn Read + Send>,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.count.fetch_add(u64::try_from(read).unwrap_or(0), Ordering::Relaxed);
        Ok(read)
    }
}
