//! Removes and copies whole directories, entry by entry and by handle, so the work can be stopped and no link is
//! followed.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cap_fs_ext::DirExt;
use cap_std::fs::{Dir, File, Metadata, MetadataExt, Permissions, PermissionsExt};
use cap_tempfile::TempFile;
use rustix::fs::RenameFlags;
use rustix::io::Errno;

use crate::tools::files::workdir_fs::{OpenedEntry, StopToken, WorkdirFs};

/// Most nested directories: each level holds one handle open.
const MAX_DEPTH: usize = 100;
/// Most files and directories of one copy.
const MAX_COPIED_ENTRIES: usize = 100_000;
/// Most bytes of one copy. Holes of a sparse file are written out.
const MAX_COPIED_BYTES: u64 = 1 << 30;
/// How long removing a part of a copy may take.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a file, a link, or a directory with its contents.
///
/// # Errors
/// The system's error, or the call was stopped.
pub fn remove(fs: &WorkdirFs, dir: &Dir, name: &Path) -> io::Result<()> {
    let meta = dir.symlink_metadata(name)?;
    fs.access.check_recursive(&meta)?;
    match meta.is_dir() {
        true => remove_directory(fs, &fs.stop, dir, name, 0),
        false => dir.remove_file(name),
    }
}

fn remove_directory(
    fs: &WorkdirFs,
    stop: &StopToken,
    parent: &Dir,
    name: &Path,
    depth: usize,
) -> io::Result<()> {
    check_depth(depth)?;
    let dir = fs.access.enter_in(parent, name)?;
    for entry in dir.entries()? {
        stop.check()?;
        let entry = entry?;
        let name = entry.file_name();
        match entry.file_type()?.is_dir() {
            true => remove_directory(fs, stop, &dir, Path::new(&name), depth + 1)?,
            false => dir.remove_file(&name)?,
        }
    }
    parent.remove_dir(name)
}

/// Counts what a copy has done.
#[derive(Debug, Default)]
pub struct CopyProgress {
    pub files: usize,
    /// Links and special files that were not copied.
    pub skipped: usize,
    /// The entry that is being copied, relative to the copied directory.
    pub path: PathBuf,
    directories: usize,
    bytes: u64,
    /// Device and inode of the new directory.
    target: Option<(u64, u64)>,
}

/// Copies a directory with its contents to a new one called `name`.
///
/// # Errors
/// The system's error, the copy is too large, or the call was stopped.
pub fn copy_directory(
    fs: &WorkdirFs,
    from: &Dir,
    parent: &Dir,
    name: &Path,
    progress: &mut CopyProgress,
) -> io::Result<()> {
    copy_recursive(fs, from, parent, name, progress, 0)
}

fn copy_recursive(
    fs: &WorkdirFs,
    from: &Dir,
    parent: &Dir,
    name: &Path,
    progress: &mut CopyProgress,
    depth: usize,
) -> io::Result<()> {
    check_depth(depth)?;
    parent.create_dir(name)?;
    let to = parent.open_dir_nofollow(name)?;
    progress.directories += 1;
    let meta = to.dir_metadata()?;
    let target = *progress.target.get_or_insert((meta.dev(), meta.ino()));
    for entry in from.entries()? {
        fs.stop.check()?;
        if progress.files + progress.directories > MAX_COPIED_ENTRIES {
            let why = format!("a copy has at most {MAX_COPIED_ENTRIES} files; copy its parts");
            return Err(io::Error::other(why));
        }
        let entry = entry?;
        let name = entry.file_name();
        let path = Path::new(&name);
        progress.path.push(path);
        let kind = entry.file_type()?;
        if kind.is_dir() {
            let from = fs.access.enter_in(from, path)?;
            let meta = from.dir_metadata()?;
            if (meta.dev(), meta.ino()) == target {
                return Err(io::Error::other("a directory cannot be copied into itself"));
            }
            copy_recursive(fs, &from, &to, path, progress, depth + 1)?;
            progress.path.pop();
            continue;
        }
        let opened = match kind.is_file() {
            true => Some(fs.open_listed(from, path)?),
            false => None,
        };
        match opened {
            Some(OpenedEntry::File(file, meta)) => {
                copy_file(fs, file, &meta, &to, &name, progress)?;
            }
            _ => progress.skipped += 1,
        }
        progress.path.pop();
    }
    Ok(())
}

/// Removes what a failed copy has made of the directory `name`, also if the call was stopped. Returns false if a
/// part of it still exists.
pub fn remove_copy(fs: &WorkdirFs, parent: &Dir, name: &Path, progress: &CopyProgress) -> bool {
    let Some(target) = progress.target else {
        return true;
    };
    let stop = StopToken::default().with_timeout(CLEANUP_TIMEOUT);
    match parent.symlink_metadata(name) {
        Ok(meta) if (meta.dev(), meta.ino()) == target => {
            remove_directory(fs, &stop, parent, name, 0).is_ok()
        }
        // Another call has moved or removed it.
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Copies an open file to a new one called `name`, with its permissions.
///
/// # Errors
/// The system's error, the copy is too large, or the call was stopped.
pub fn copy_file(
    fs: &WorkdirFs,
    from: File,
    meta: &Metadata,
    dir: &Dir,
    name: &OsStr,
    progress: &mut CopyProgress,
) -> io::Result<()> {
    let remaining = MAX_COPIED_BYTES - progress.bytes;
    let too_large = || io::Error::other(format!("a copy has at most {MAX_COPIED_BYTES} bytes"));
    if meta.len() > remaining {
        return Err(too_large());
    }
    let mut to = TempFile::new(dir)?;
    let mut from = fs.stop.stoppable_reader(from).take(remaining + 1);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        to.write_all(&buffer[..read])?;
        progress.bytes += read as u64;
    }
    if progress.bytes > MAX_COPIED_BYTES {
        return Err(too_large());
    }
    let mode = Permissions::from_mode(meta.mode() & 0o777);
    to.as_file().set_permissions(mode)?;
    fs.stop.check()?;
    // The temporary file replaces what has its name, so it gets a name that nothing has, and then its own.
    let unique = OsString::from(format!(".{:032x}.tmp", fastrand::u128(..)));
    to.replace(&unique)?;
    let renamed = rename_new(fs, (dir, &unique), (dir, name));
    if renamed.is_err() {
        dir.remove_file(&unique)?;
    }
    progress.files += 1;
    renamed
}

/// Renames an entry of a directory to a name that nothing has.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], or another error of the system.
pub fn rename_new(fs: &WorkdirFs, from: (&Dir, &OsStr), to: (&Dir, &OsStr)) -> io::Result<()> {
    match rustix::fs::renameat_with(from.0, from.1, to.0, to.1, RenameFlags::NOREPLACE) {
        // The file system cannot.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return Ok(renamed?),
    }
    let _lock = fs.lock(to.0, to.1);
    match to.0.symlink_metadata(to.1) {
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => from.0.rename(from.1, to.0, to.1),
        Err(error) => Err(error),
    }
}

fn check_depth(depth: usize) -> io::Result<()> {
    match depth < MAX_DEPTH {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "directories are nested more than {MAX_DEPTH} deep"
        ))),
    }
}
