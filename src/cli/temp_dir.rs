//! A private temporary directory.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::domain::run::RunId;

/// Only this user can read it. Removed on drop.
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    pub fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("axed-{}", RunId::new()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("could not create the directory {}", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // What cannot be removed is left to the system's cleanup of temporary files.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
