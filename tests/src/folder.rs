//! Temporary folders.

use std::fs;
use std::path::{Path, PathBuf};

use crate::redis;

/// A temporary folder. Removed on drop.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates an empty folder.
    #[expect(clippy::new_without_default, reason = "it creates a folder")]
    pub fn new() -> Folder {
        Folder(redis::folder())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("the temporary folder is writable");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
