//! A directory that runs work in, held open.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use cap_std::fs::Dir;
use rustix::fs::{Mode, openat};

use crate::workdirs::file_id::FileId;
use crate::workdirs::path_resolver::SEARCH;
use crate::workdirs::reserved::{ReservedError, ReservedPaths, ReservedSnapshot};

#[derive(Debug)]
pub struct Workdir {
    pub(super) dir: Dir,
    pub(super) id: FileId,
    pub(super) reserved: Arc<ReservedPaths>,
    /// The reserved path that a command in this directory would reach.
    exposed_path: Option<PathBuf>,
}

impl Workdir {
    /// Takes an open directory.
    ///
    /// # Errors
    /// [`ReservedError`] if it lies in a reserved directory or on procfs, or the system's error.
    pub fn new(dir: Dir, reserved: &Arc<ReservedPaths>) -> io::Result<Self> {
        reject_procfs(&dir)?;
        let id = FileId::from_metadata(&dir.dir_metadata()?);
        let snapshot = reserved.snapshot();
        reject_reserved(&dir, id, &snapshot)?;
        Ok(Self {
            exposed_path: snapshot.reserved_path_within(id).cloned(),
            dir,
            id,
            reserved: Arc::clone(reserved),
        })
    }

    pub fn id(&self) -> FileId {
        self.id
    }

    /// The reserved path that a command in this directory would reach; `None` if commands may run in it.
    pub fn exposed_path(&self) -> Option<&PathBuf> {
        self.exposed_path.as_ref()
    }

    /// A handle for the working directory of a sandboxed command.
    ///
    /// # Errors
    /// [`ReservedError`] if the directory now contains a reserved one or lies in one, or the system's error.
    pub fn command_dir(&self) -> io::Result<Dir> {
        let snapshot = self.reserved.snapshot();
        if snapshot.reserved_path_within(self.id).is_some() {
            return Err(ReservedError::ContainsReserved.into());
        }
        reject_reserved(&self.dir, self.id, &snapshot)?;
        self.unconfined_command_dir()
    }

    /// A handle for the working directory of a command without a sandbox.
    pub fn unconfined_command_dir(&self) -> io::Result<Dir> {
        self.dir.try_clone()
    }
}

/// Rejects a workdir in a reserved directory. It may lie below the configuration's directory, but not be that
/// directory.
fn reject_reserved(dir: &Dir, id: FileId, snapshot: &ReservedSnapshot) -> io::Result<()> {
    if snapshot.is_forbidden(id) {
        return Err(ReservedError::Reserved.into());
    }
    for ancestor in ancestors(dir) {
        if snapshot.is_reserved(ancestor?) {
            return Err(ReservedError::Reserved.into());
        }
    }
    Ok(())
}

/// Rejects what lies on procfs: links there lead to any process's files, and its files hold the daemon's keys.
#[cfg(target_os = "linux")]
pub fn reject_procfs(opened: &impl AsFd) -> io::Result<()> {
    match rustix::fs::fstatfs(opened) {
        Ok(file_system) if file_system.f_type == rustix::fs::PROC_SUPER_MAGIC => {
            Err(ReservedError::Procfs.into())
        }
        // Some network file systems fail; procfs never does.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Other systems have no procfs.
#[cfg(not(target_os = "linux"))]
pub fn reject_procfs(_: &impl AsFd) -> io::Result<()> {
    Ok(())
}

/// The ids of this directory and all above it, up to the file system's root. The walk uses handles, so renames cannot
/// misdirect it.
pub fn ancestors(dir: &impl AsFd) -> impl Iterator<Item = io::Result<FileId>> {
    let open = |at: &dyn AsFd, name: &str| -> io::Result<(File, FileId)> {
        let file = File::from(openat(at.as_fd(), name, SEARCH, Mode::empty())?);
        let id = FileId::from_file(&file)?;
        Ok((file, id))
    };
    let first = open(&dir.as_fd(), ".");
    std::iter::successors(Some(first), move |last| {
        let (file, id) = last.as_ref().ok()?;
        match open(file, "..") {
            Ok((_, parent)) if parent == *id => None,
            next => Some(next),
        }
    })
    .map(|step| step.map(|(_, id)| id))
}
