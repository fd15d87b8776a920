//! Accesses files below a workdir by handle. No path and no link leads out of it, into the daemon's own files or onto
//! procfs, even if links and directories are swapped meanwhile.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use cap_fs_ext::{DirExt, FollowSymlinks, OpenOptionsFollowExt, OpenOptionsSyncExt};
use cap_std::fs::{Dir, File, Metadata, OpenOptions};

use crate::workdirs::file_id::FileId;
use crate::workdirs::reserved::{ReservedError, ReservedSnapshot};
use crate::workdirs::workdir::{Workdir, ancestors, reject_procfs};

/// Access to a workdir with one snapshot of the reserved paths. Paths are relative to the workdir, without `..`; `.` is
/// the workdir itself.
#[derive(Clone, Debug)]
pub struct WorkdirHandle {
    workdir: Arc<Workdir>,
    reserved: Arc<ReservedSnapshot>,
}

impl WorkdirHandle {
    /// All methods do blocking I/O, including this one.
    pub fn new(workdir: Arc<Workdir>) -> Self {
        let reserved = Arc::new(workdir.reserved.snapshot());
        Self { workdir, reserved }
    }

    /// Opens a directory. Links are followed within the workdir.
    pub fn open_dir(&self, path: &Path) -> io::Result<Dir> {
        let dir = self.workdir.dir.open_dir(path)?;
        self.check_ancestors(&dir)?;
        Ok(dir)
    }

    /// Opens a directory. Creates it, and those above it, if it does not exist.
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

    /// The parent directory of a path and the path's last name; the name is `.` for the workdir itself.
    pub fn open_parent(&self, path: &Path) -> io::Result<(Dir, OsString)> {
        match path.file_name() {
            Some(name) => Ok((self.open_dir(parent_or_dot(path))?, name.to_owned())),
            None => Ok((self.open_dir(Path::new("."))?, OsString::from("."))),
        }
    }

    /// As [`WorkdirHandle::open_parent`], but follows a link at the end of the path.
    pub fn open_target_parent(&self, path: &Path) -> io::Result<(Dir, OsString)> {
        let (dir, name) = self.open_parent(path)?;
        match dir.symlink_metadata(&name) {
            Ok(meta) if meta.is_symlink() => {
                self.open_parent(&self.workdir.dir.canonicalize(path)?)
            }
            _ => Ok((dir, name)),
        }
    }

    /// Metadata of a path; follows links.
    pub fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let (dir, name) = self.open_target_parent(path)?;
        self.entry_metadata(&dir, &name)
    }

    /// Metadata of a path; does not follow a link at its end.
    pub fn symlink_metadata(&self, path: &Path) -> io::Result<Metadata> {
        let (dir, name) = self.open_parent(path)?;
        self.entry_metadata(&dir, &name)
    }

    /// Metadata of an entry in a directory that was opened here. Fails if the entry is the daemon's own.
    pub fn entry_metadata(&self, dir: &Dir, name: &OsStr) -> io::Result<Metadata> {
        let meta = dir.symlink_metadata(name)?;
        self.check_id(FileId::from_metadata(&meta))?;
        Ok(meta)
    }

    /// The path without links, relative to the workdir.
    pub fn canonicalize(&self, path: &Path) -> io::Result<std::path::PathBuf> {
        self.workdir.dir.canonicalize(path)
    }

    /// Opens an entry of a directory that was opened here, without following a link or waiting for a FIFO. The metadata
    /// tell whether it is a regular file.
    pub fn open_in(&self, dir: &Dir, name: &Path) -> io::Result<(File, Metadata)> {
        let mut options = OpenOptions::new();
        options.read(true).nonblock(true).follow(FollowSymlinks::No);
        let file = dir.open_with(name, &options)?;
        let meta = file.metadata()?;
        self.check_opened(&file, FileId::from_metadata(&meta))?;
        Ok((file, meta))
    }

    /// Opens the regular file at a path, without following a link at its end; `None` if something else is there.
    pub fn open_regular(&self, path: &Path) -> io::Result<Option<File>> {
        let (dir, name) = self.open_parent(path)?;
        // Opening some devices has side effects, so the type is checked first.
        if !self.entry_metadata(&dir, &name)?.is_file() {
            return Ok(None);
        }
        let (file, meta) = self.open_in(&dir, Path::new(&name))?;
        Ok(meta.is_file().then_some(file))
    }

    /// Fails if this is the daemon's own, or a directory that contains something of the daemon's.
    pub fn check_recursive(&self, meta: &Metadata) -> io::Result<()> {
        let id = FileId::from_metadata(meta);
        self.check_id(id)?;
        match self.reserved.contains_reserved(id) {
            true => Err(ReservedError::ContainsReserved.into()),
            false => Ok(()),
        }
    }

    /// Fails if a new entry of this name would be the daemon's own.
    pub fn check_new_entry(&self, dir: &Dir, name: &OsStr) -> io::Result<()> {
        let id = FileId::from_metadata(&dir.dir_metadata()?);
        match self.reserved.is_future_reserved(id, name) {
            true => Err(ReservedError::Reserved.into()),
            false => Ok(()),
        }
    }

    /// Opens a directory that a walk has found; fails if it has become a link.
    pub fn enter(&self, path: &Path) -> io::Result<Dir> {
        let dir = self.workdir.dir.open_dir_nofollow(path)?;
        match self.reserved.contains_reserved(self.workdir.id) {
            true => self.check_ancestors(&dir)?,
            // Only a mount can put something of the daemon's here.
            false => self.check_opened(&dir, FileId::from_metadata(&dir.dir_metadata()?))?,
        }
        Ok(dir)
    }

    /// Opens a directory in one that was opened here; fails if it has become a link.
    pub fn enter_in(&self, dir: &Dir, name: &Path) -> io::Result<Dir> {
        let dir = dir.open_dir_nofollow(name)?;
        self.check_opened(&dir, FileId::from_metadata(&dir.dir_metadata()?))?;
        Ok(dir)
    }

    /// Fails if this open file or directory is the daemon's own, or lies on procfs.
    fn check_opened(&self, opened: &impl AsFd, id: FileId) -> io::Result<()> {
        self.check_id(id)?;
        // The workdir is not on procfs, and most files are on its device.
        match id.device == self.workdir.id.device {
            true => Ok(()),
            false => reject_procfs(opened),
        }
    }

    fn check_id(&self, id: FileId) -> io::Result<()> {
        match self.reserved.is_forbidden(id) {
            true => Err(ReservedError::Reserved.into()),
            false => Ok(()),
        }
    }

    /// Fails if a directory from this one up to the workdir is the daemon's own, or this one lies on procfs.
    fn check_ancestors(&self, dir: &Dir) -> io::Result<()> {
        for (level, id) in ancestors(dir).enumerate() {
            let id = id?;
            match level {
                0 => self.check_opened(dir, id)?,
                _ => self.check_id(id)?,
            }
            if id == self.workdir.id {
                return Ok(());
            }
        }
        Err(io::Error::other("it was moved out of the workdir"))
    }
}

/// The parent of a path; `.` at the top.
pub fn parent_or_dot(path: &Path) -> &Path {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}
