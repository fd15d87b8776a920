//! A directory of our own that goes away with its owner.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::domain::run::RunId;

/// A directory that only this user can read, removed when this is dropped.
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    /// A new, empty one among the system's temporary files.
    pub fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("axed-{}", RunId::new()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("could not make the directory {}", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // What cannot be removed is left to the system's own cleaning of temporary files.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
