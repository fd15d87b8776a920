//! Removes and copies whole directories, step by step by handle, so that it can be stopped and no link is followed.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::path::Path;

use cap_fs_ext::DirExt;
use cap_std::fs::{Dir, File, Metadata, MetadataExt, Permissions, PermissionsExt};
use cap_tempfile::TempFile;

use crate::tools::files::ground::{Ground, Opened};

/// Most directories within each other: each is an open handle.
const MOST_DEEP: usize = 100;
/// Most files and directories of one copy.
const MOST_COPIED: usize = 100_000;
/// Most bytes of one copy: a sparse file's holes become real.
const MOST_BYTES: u64 = 1 << 30;

/// Removes a file, a link, or a directory with all in it.
///
/// # Errors
/// What the system says, or that nobody waits any more.
pub fn remove(ground: &Ground, dir: &Dir, name: &Path) -> io::Result<()> {
    let meta = dir.symlink_metadata(name)?;
    ground.access.check_whole(&meta)?;
    match meta.is_dir() {
        true => remove_directory(ground, dir, name, 0),
        false => dir.remove_file(name),
    }
}

fn remove_directory(ground: &Ground, above: &Dir, name: &Path, depth: usize) -> io::Result<()> {
    is_not_too_deep(depth)?;
    let dir = ground.access.enter_in(above, name)?;
    for entry in dir.entries()? {
        ground.stop.check()?;
        let entry = entry?;
        let name = entry.file_name();
        match entry.file_type()?.is_dir() {
            true => remove_directory(ground, &dir, Path::new(&name), depth + 1)?,
            false => dir.remove_file(&name)?,
        }
    }
    above.remove_dir(name)
}

/// What a copy has come to.
#[derive(Debug, Default)]
pub struct Copied {
    /// Files that were copied.
    pub files: usize,
    /// Links and special files that were not.
    pub left_out: usize,
    directories: usize,
    bytes: u64,
}

/// Copies a directory with all in it to a new one of that name.
///
/// # Errors
/// What the system says, that it is too much, or that nobody waits any more.
pub fn copy_directory(
    ground: &Ground,
    from: &Dir,
    above: &Dir,
    name: &Path,
    copied: &mut Copied,
) -> io::Result<()> {
    copy_at(ground, from, above, name, copied, 0)
}

fn copy_at(
    ground: &Ground,
    from: &Dir,
    above: &Dir,
    name: &Path,
    copied: &mut Copied,
    depth: usize,
) -> io::Result<()> {
    is_not_too_deep(depth)?;
    above.create_dir(name)?;
    let to = above.open_dir_nofollow(name)?;
    copied.directories += 1;
    for entry in from.entries()? {
        ground.stop.check()?;
        if copied.files + copied.directories > MOST_COPIED {
            let why = format!("a copy has at most {MOST_COPIED} files; copy its parts");
            return Err(io::Error::other(why));
        }
        let entry = entry?;
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        let path = Path::new(&name);
        if kind.is_dir() {
            let from = ground.access.enter_in(from, path)?;
            copy_at(ground, &from, &to, path, copied, depth + 1)?;
            continue;
        }
        let opened = match kind.is_file() {
            true => Some(ground.open_listed(from, path)?),
            false => None,
        };
        match opened {
            Some(Opened::File(file, meta)) => {
                copy_file(ground, file, &meta, &to, &name, copied)?;
            }
            _ => copied.left_out += 1,
        }
    }
    Ok(())
}

/// Copies an open file to a new one of that name, with its permissions.
///
/// # Errors
/// What the system says, that it is too much, or that nobody waits any more.
pub fn copy_file(
    ground: &Ground,
    from: File,
    meta: &Metadata,
    dir: &Dir,
    name: &OsStr,
    copied: &mut Copied,
) -> io::Result<()> {
    let left = MOST_BYTES - copied.bytes;
    let too_much = || io::Error::other(format!("a copy has at most {MOST_BYTES} bytes"));
    if meta.len() > left {
        return Err(too_much());
    }
    let mut to = TempFile::new(dir)?;
    let mut from = ground.stop.reading(from).take(left + 1);
    let mut piece = vec![0; 256 << 10];
    loop {
        let read = from.read(&mut piece)?;
        if read == 0 {
            break;
        }
        to.write_all(&piece[..read])?;
        copied.bytes += read as u64;
    }
    if copied.bytes > MOST_BYTES {
        return Err(too_much());
    }
    let mode = Permissions::from_mode(meta.mode() & 0o777);
    to.as_file().set_permissions(mode)?;
    ground.stop.check()?;
    copied.files += 1;
    to.replace(name)
}

fn is_not_too_deep(depth: usize) -> io::Result<()> {
    match depth < MOST_DEEP {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "directories are nested more than {MOST_DEEP} deep"
        ))),
    }
}
