//! Reaches files below a workdir by handle: no path and no link leads out of it, and none into a file or directory of the
//! daemon's own, also where links and directories are exchanged meanwhile. Knows no tool.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::Arc;

use cap_fs_ext::{DirExt, FollowSymlinks, OpenOptionsFollowExt, OpenOptionsSyncExt};
use cap_std::fs::{Dir, File, Metadata, OpenOptions};

use crate::workdirs::file_id::FileId;
use crate::workdirs::reserved::{ReservedError, ReservedSnapshot};
use crate::workdirs::workdir::{Workdir, ancestors};

/// A workdir as one piece of work reaches it. Paths are relative to it, without `..`; `.` is the workdir itself.
#[derive(Clone, Debug)]
pub struct WorkdirHandle {
    workdir: Arc<Workdir>,
    reserved: Arc<ReservedSnapshot>,
}

impl WorkdirHandle {
    /// Access to this workdir. Blocking I/O, as is everything here.
    pub fn new(workdir: Arc<Workdir>) -> Self {
        let reserved = Arc::new(workdir.reserved.snapshot());
        Self { workdir, reserved }
    }

    /// Opens a directory; links are followed within the workdir.
    pub fn open_dir(&self, path: &Path) -> io::Result<Dir> {
        let dir = self.workdir.dir.open_dir(path)?;
        self.check_ancestors(&dir)?;
        Ok(dir)
    }

    /// Opens a directory, which is made with those above it where it does not exist.
    pub fn create_dir_all(&self, path: &Path) -> io::Result<Dir> {
        match self.workdir.dir.open_dir(path) {
            Ok(dir) => {
                self.check_ancestors(&dir)?;
                return Ok(dir);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let Some(name) = path.file_name() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let parent = self.create_dir_all(parent_or_dot(path))?;
        self.check_new_entry(&parent, name)?;
        match parent.create_dir(name) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let dir = parent.open_dir_nofollow(name)?;
        self.check_ancestors(&dir)?;
        Ok(dir)
    }

    /// The directory that the last name of a path is in, and that name; `.` for the workdir itself.
    pub fn open_parent(&self, path: &Path) -> io::Result<(Dir, OsString)> {
        match path.file_name() {
            Some(name) => Ok((self.open_dir(parent_or_dot(path))?, name.to_owned())),
            None => Ok((self.open_dir(Path::new("."))?, OsString::from("."))),
        }
    }

    /// As [`Access::parent`], of what a path stands for: where its last name is a link, what that leads to.
    pub fn open_target_parent(&self, path: &Path) -> io::Result<(Dir, OsString)> {
        let (dir, name) = self.open_parent(path)?;
        match dir.symlink_metadata(&name) {
            Ok(meta) if meta.is_symlink() => {
                self.open_parent(&self.workdir.dir.canonicalize(path)?)
            }
            _ => Ok((dir, name)),
        }
    }

    /// What a path stands for, links followed.
    pub fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let (dir, name) = self.open_target_parent(path)?;
        self.entry_metadata(&dir, &name)
    }

    /// What is at a path, a link for itself.
    pub fn symlink_metadata(&self, path: &Path) -> io::Result<Metadata> {
        let (dir, name) = self.open_parent(path)?;
        self.entry_metadata(&dir, &name)
    }

    /// What a directory that was reached here has under this name, unless it is the daemon's own.
    pub fn entry_metadata(&self, dir: &Dir, name: &OsStr) -> io::Result<Metadata> {
        let meta = dir.symlink_metadata(name)?;
        self.check_metadata(&meta)?;
        Ok(meta)
    }

    /// The path without links, relative to the workdir.
    pub fn canonicalize(&self, path: &Path) -> io::Result<std::path::PathBuf> {
        self.workdir.dir.canonicalize(path)
    }

    /// Opens a file under this name in a directory that was reached here. Neither a FIFO is waited for nor a link
    /// followed; whether it is a regular file the metadata say.
    pub fn open_in(&self, dir: &Dir, name: &Path) -> io::Result<(File, Metadata)> {
        let mut options = OpenOptions::new();
        options.read(true).nonblock(true).follow(FollowSymlinks::No);
        let file = dir.open_with(name, &options)?;
        let meta = file.metadata()?;
        self.check_metadata(&meta)?;
        Ok((file, meta))
    }

    /// Opens the regular file at a path, not following a link at its end; none where something else is there.
    pub fn open_regular(&self, path: &Path) -> io::Result<Option<File>> {
        let (dir, name) = self.open_parent(path)?;
        // Some devices do something when they are opened, so they are looked at first.
        if !self.entry_metadata(&dir, &name)?.is_file() {
            return Ok(None);
        }
        let (file, meta) = self.open_in(&dir, Path::new(&name))?;
        Ok(meta.is_file().then_some(file))
    }

    /// Whether what this describes is neither the daemon's own nor a directory with something of the daemon's in it.
    pub fn check_recursive(&self, meta: &Metadata) -> io::Result<()> {
        self.check_metadata(meta)?;
        match self.reserved.contains_reserved(FileId::from_metadata(meta)) {
            true => Err(ReservedError::ContainsReserved.into()),
            false => Ok(()),
        }
    }

    /// Whether a new entry of this name is not the daemon's own.
    pub fn check_new_entry(&self, dir: &Dir, name: &OsStr) -> io::Result<()> {
        let id = FileId::from_metadata(&dir.dir_metadata()?);
        match self.reserved.is_future_reserved(id, name) {
            true => Err(ReservedError::Reserved.into()),
            false => Ok(()),
        }
    }

    /// Opens a directory that a walk through the workdir came to; none that has become a link.
    pub fn enter(&self, path: &Path) -> io::Result<Dir> {
        let dir = self.workdir.dir.open_dir_nofollow(path)?;
        match self.reserved.contains_reserved(self.workdir.id) {
            true => self.check_ancestors(&dir)?,
            // Something of the daemon's can only be mounted here.
            false => self.check_metadata(&dir.dir_metadata()?)?,
        }
        Ok(dir)
    }

    /// Opens a directory in one that was reached here; none that has become a link.
    pub fn enter_in(&self, dir: &Dir, name: &Path) -> io::Result<Dir> {
        let dir = dir.open_dir_nofollow(name)?;
        self.check_metadata(&dir.dir_metadata()?)?;
        Ok(dir)
    }

    fn check_metadata(&self, meta: &Metadata) -> io::Result<()> {
        match self.reserved.is_forbidden(FileId::from_metadata(meta)) {
            true => Err(ReservedError::Reserved.into()),
            false => Ok(()),
        }
    }

    /// Whether no directory from this one up to the workdir is the daemon's own.
    fn check_ancestors(&self, dir: &Dir) -> io::Result<()> {
        for id in ancestors(dir) {
            let id = id?;
            if self.reserved.is_forbidden(id) {
                return Err(ReservedError::Reserved.into());
            }
            if id == self.workdir.id {
                return Ok(());
            }
        }
        Err(io::Error::other("it was moved out of the workdir"))
    }
}

/// The directory above, `.` at the top.
pub fn parent_or_dot(path: &Path) -> &Path {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}
