//! The directory of one run's files, and the id that it is recognised by.

use std::sync::{Arc, OnceLock};

use crate::workdirs::file_id::FileId;
use crate::workdirs::workdir::Workdir;

/// The directory of a run, so far as it is known.
#[derive(Debug, Default)]
pub struct RunWorkdir {
    /// What it is known by: of one that was opened before, in this process or an earlier one.
    id: OnceLock<FileId>,
    dir: OnceLock<Arc<Workdir>>,
}

impl RunWorkdir {
    /// One that was opened before, where it was.
    pub fn with_id(id: Option<FileId>) -> Self {
        let workdir = Self::default();
        if let Some(id) = id {
            let _ = workdir.id.set(id);
        }
        workdir
    }

    /// What it is known by; none before it was opened.
    pub fn id(&self) -> Option<FileId> {
        self.id.get().copied()
    }

    /// The directory, where it is open.
    pub fn dir(&self) -> Option<&Arc<Workdir>> {
        self.dir.get()
    }

    /// Records which directory it is, without holding it open.
    pub fn set_id(&self, id: FileId) {
        let _ = self.id.set(id);
    }

    pub fn set(&self, dir: Arc<Workdir>) {
        // A directory that was known is only opened where it is the same.
        let _ = self.id.set(dir.id());
        let _ = self.dir.set(dir);
    }
}
