//! The directories that runs work in: opened by handle below what the operator names, shared by the runs of one
//! directory, with the daemon's own files out of reach. Knows no tool and no run.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use cap_std::fs::{Dir, Metadata, MetadataExt};
use rustix::fs::{Mode, OFlags, openat};
use serde::{Deserialize, Serialize};

use crate::workdirs::reserved::{ReservedPaths, ReservedSnapshot};

pub mod handle;
mod path_resolver;
pub mod registry;
pub mod reserved;

/// How a directory is opened that is only passed through.
#[cfg(target_os = "linux")]
const SEARCH: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::PATH);
#[cfg(not(target_os = "linux"))]
const SEARCH: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// What a file or directory is known by, whatever its path: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId {
    /// The device.
    pub device: u64,
    /// The inode on it.
    pub inode: u64,
}

impl FileId {
    /// Of an open file.
    fn from_file(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::from_std(&meta))
    }

    /// Of what this describes.
    pub fn from_std(meta: &std::fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }

    /// Of what this describes.
    pub fn from_metadata(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }
}

/// An open directory that runs work in.
#[derive(Debug)]
pub struct Workdir {
    dir: Dir,
    id: FileId,
    reserved: Arc<ReservedPaths>,
    /// The daemon's own directory that a command in it would reach.
    exposed_path: Option<PathBuf>,
}

impl Workdir {
    /// Takes an open directory, unless it lies in one of the daemon's own.
    ///
    /// # Errors
    /// [`reserved::Refused`], or what the system says.
    pub fn new(dir: Dir, reserved: &Arc<ReservedPaths>) -> io::Result<Self> {
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

    /// What it is known by.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// The daemon's own directory that a command in it would reach; none where commands may run in it.
    pub fn exposed_path(&self) -> Option<&PathBuf> {
        self.exposed_path.as_ref()
    }

    /// A handle for a command's working directory.
    ///
    /// # Errors
    /// [`reserved::Refused`] where it has come to contain a directory of the daemon's own, or to lie in one; or what the
    /// system says.
    pub fn command_dir(&self) -> io::Result<Dir> {
        let snapshot = self.reserved.snapshot();
        if snapshot.reserved_path_within(self.id).is_some() {
            return Err(reserved::ReservedError::ContainsReserved.into());
        }
        reject_reserved(&self.dir, self.id, &snapshot)?;
        self.unconfined_command_dir()
    }

    /// The same for a command that may do all that the daemon may.
    ///
    /// # Errors
    /// What the system says.
    pub fn unconfined_command_dir(&self) -> io::Result<Dir> {
        self.dir.try_clone()
    }
}

/// Refuses a workdir that lies in one of the daemon's own directories. Below the configuration's directory it may lie,
/// but not at it.
fn reject_reserved(dir: &Dir, id: FileId, snapshot: &ReservedSnapshot) -> io::Result<()> {
    if snapshot.is_forbidden(id) {
        return Err(reserved::ReservedError::Reserved.into());
    }
    for ancestor in ancestors(dir) {
        if snapshot.is_reserved(ancestor?) {
            return Err(reserved::ReservedError::Reserved.into());
        }
    }
    Ok(())
}

/// This directory and all above it, up to the file system's root, by what they are known by. The way leads through
/// handles, so that renaming cannot change it half-way.
fn ancestors(dir: &impl AsFd) -> impl Iterator<Item = io::Result<FileId>> {
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
