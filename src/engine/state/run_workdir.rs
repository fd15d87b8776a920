//! The directory of one run's files, and the id that it is recognised by.

use std::sync::{Arc, OnceLock};

use crate::workdirs::file_id::FileId;
use crate::workdirs::workdir::Workdir;

#[derive(Debug, Default)]
pub struct RunWorkdir {
    /// Set once the directory was opened, in this process or an earlier one.
    id: OnceLock<FileId>,
    dir: OnceLock<Arc<Workdir>>,
}

impl RunWorkdir {
    pub fn with_id(id: Option<FileId>) -> Self {
        let workdir = Self::default();
        if let Some(id) = id {
            let _ = workdir.id.set(id);
        }
        workdir
    }

    pub fn id(&self) -> Option<FileId> {
        self.id.get().copied()
    }

    pub fn dir(&self) -> Option<&Arc<Workdir>> {
        self.dir.get()
    }

    /// Records which directory it is, without holding it open.
    pub fn set_id(&self, id: FileId) {
        let _ = self.id.set(id);
    }

    pub fn set(&self, dir: Arc<Workdir>) {
        // A known directory is opened only if it is the same.
        let _ = self.id.set(dir.id());
        let _ = self.dir.set(dir);
    }
}
