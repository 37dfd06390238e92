//! A folder of a test's own.

use std::fs;
use std::path::{Path, PathBuf};

use crate::redis;

/// A folder that is gone when the test is.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// An empty one.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Folder {
        Folder(redis::folder())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a folder of one's own");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
