//! A run's working directory as a handle: what is opened through it cannot lie outside it, whatever a path says and
//! whoever swaps links meanwhile. Knows no tool.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use cap_std::ambient_authority;
use cap_std::fs::Dir;

/// The directory of one run's files; opened when a tool first needs it.
#[derive(Debug, Default)]
pub struct Workdir {
    /// As the definition has it; none means the daemon's own.
    path: Option<PathBuf>,
    dir: OnceLock<Arc<Dir>>,
}

impl Workdir {
    /// For a definition's `workdir`.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            dir: OnceLock::new(),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new("."))
    }

    /// The open directory: the same one for every call, also where its path comes to mean another one.
    ///
    /// # Errors
    /// Why it cannot be opened, for the model.
    pub fn dir(&self) -> Result<Arc<Dir>, String> {
        if let Some(dir) = self.dir.get() {
            return Ok(Arc::clone(dir));
        }
        let opened = Dir::open_ambient_dir(self.path(), ambient_authority())
            .map_err(|error| format!("the workdir cannot be opened: {error}"))?;
        Ok(Arc::clone(self.dir.get_or_init(|| Arc::new(opened))))
    }
}
