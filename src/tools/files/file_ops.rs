//! `delete_path`, `move_path`, `copy_path`, `create_directory`.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use cap_fs_ext::MetadataExt;
use cap_std::fs::Dir;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::run::RunId;
use crate::tools::files::dir_ops;
use crate::tools::files::workdir_fs::{WorkdirFs, describe_error, parse_path};

pub const DELETE_DESCRIPTION: &str = "Delete a file of the working directory, a link (never what it stands for), or a \
                                directory with all that is in it. It cannot be brought back.";
pub const MOVE_DESCRIPTION: &str = "Move or rename a file or directory of the working directory. Directories above the new \
                              place are created; what exists already is never replaced.";
pub const COPY_DESCRIPTION: &str = "Copy a file of the working directory, or a directory with all that is in it. Directories \
                              above the new place are created; what exists already is never replaced. Links in a \
                              directory are left out.";
pub const CREATE_DESCRIPTION: &str = "Create a directory of the working directory, with the directories above it. One that \
                                exists already is left as it is. write_file needs no such call.";

/// The arguments of `delete_path`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeletePath {
    /// What to delete, relative to the working directory, such as "notes/old.md".
    path: String,
}

/// The arguments of `move_path`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MovePath {
    /// What to move, relative to the working directory.
    from: String,
    /// Its whole new path, relative to the working directory, with its name; nothing may exist there.
    to: String,
}

/// The arguments of `copy_path`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyPath {
    /// What to copy, relative to the working directory.
    from: String,
    /// The copy's whole path, relative to the working directory, with its name; nothing may exist there.
    to: String,
}

/// The arguments of `create_directory`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDirectory {
    /// The directory, relative to the working directory, such as "notes/2025".
    path: String,
}

pub fn delete_path(fs: &WorkdirFs, arguments: DeletePath) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let (dir, name) = fs.parent(&path)?;
    dir_ops::remove(fs, &dir, Path::new(&name)).map_err(|error| describe_error(&path, &error))?;
    Ok(format!("deleted {}", path.display()))
}

pub fn move_path(fs: &WorkdirFs, arguments: MovePath) -> Result<String, String> {
    let (from, to) = (parse_path(&arguments.from)?, parse_path(&arguments.to)?);
    let (from_dir, from_name) = fs.parent(&from)?;
    let meta = from_dir.symlink_metadata(&from_name);
    let checked = meta.and_then(|meta| fs.access.check_recursive(&meta));
    checked.map_err(|error| describe_error(&from, &error))?;
    let (to_dir, to_name) = prepare_destination(fs, &from, &to)?;
    let renamed = dir_ops::rename_new(fs, (&from_dir, &from_name), (&to_dir, &to_name));
    renamed.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => exists_already(&to),
        _ => describe_error(&from, &error),
    })?;
    Ok(format!("moved {} to {}", from.display(), to.display()))
}

pub fn copy_path(fs: &WorkdirFs, arguments: CopyPath) -> Result<String, String> {
    let (from, to) = (parse_path(&arguments.from)?, parse_path(&arguments.to)?);
    let meta = fs.access.metadata(&from);
    let checked = meta.and_then(|meta| fs.access.check_recursive(&meta).map(|()| meta));
    let meta = checked.map_err(|error| describe_error(&from, &error))?;
    if is_through_link(fs, &from, &to) {
        return Err(into_itself(&from, &to));
    }
    let (to_dir, to_name) = prepare_destination(fs, &from, &to)?;
    let mut progress = dir_ops::CopyProgress::default();
    let mut remaining = None;
    let result = match meta.is_dir() {
        // Under a name that no other call knows, so that nothing of others is removed with a copy that fails.
        true => fs.access.open_dir(&from).and_then(|dir| {
            let name = OsString::from(format!(".{}.tmp", RunId::new().0.as_simple()));
            let copied =
                dir_ops::copy_directory(fs, &dir, &to_dir, Path::new(&name), &mut progress);
            let placed = copied
                .and_then(|()| dir_ops::rename_new(fs, (&to_dir, &name), (&to_dir, &to_name)));
            if placed.is_err() && !dir_ops::remove_copy(fs, &to_dir, Path::new(&name), &progress) {
                remaining = Some(to.with_file_name(&name));
            }
            placed
        }),
        false => {
            let (file, meta) = fs.open(&from)?;
            dir_ops::copy_file(fs, file, &meta, &to_dir, &to_name, &mut progress)
        }
    };
    if let Err(error) = result {
        let why = match error.kind() {
            io::ErrorKind::AlreadyExists => exists_already(&to),
            // A limit of the whole copy, or the call was stopped.
            io::ErrorKind::Other => describe_error(&from, &error),
            _ => describe_error(&join(&from, &progress.path), &error),
        };
        return Err(match remaining {
            Some(part) => format!("{why}; a part of it was copied to {}", part.display()),
            None => why,
        });
    }
    let skipped_note = match progress.skipped {
        0 => String::new(),
        count => format!("; left out {count} link(s) and special file(s)"),
    };
    Ok(format!(
        "copied {} to {} ({} file(s)){skipped_note}",
        from.display(),
        to.display(),
        progress.files
    ))
}

pub fn create_directory(fs: &WorkdirFs, arguments: CreateDirectory) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let created = fs.access.create_dir_all(&path);
    created.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            format!("{} exists and is not a directory", path.display())
        }
        _ => describe_error(&path, &error),
    })?;
    Ok(format!("created directory {}", path.display()))
}

/// Checks that `to` does not exist and is not within `from`, and creates the directories above it. Returns its parent
/// directory and its name there.
fn prepare_destination(fs: &WorkdirFs, from: &Path, to: &Path) -> Result<(Dir, OsString), String> {
    if to.starts_with(from) || from == Path::new(".") {
        return Err(into_itself(from, to));
    }
    match fs.access.symlink_metadata(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(describe_error(to, &error)),
        Ok(_) => return Err(exists_already(to)),
    }
    fs.new_entry(to)
}

fn into_itself(from: &Path, to: &Path) -> String {
    format!("{} cannot go into itself, {}", from.display(), to.display())
}

/// The path of an entry of a copied directory, or of the directory itself.
fn join(directory: &Path, entry: &Path) -> PathBuf {
    match entry.as_os_str().is_empty() {
        true => directory.to_owned(),
        false => directory.join(entry),
    }
}

fn exists_already(path: &Path) -> String {
    let path = path.display();
    format!("{path} exists already; delete it first, or give another path")
}

/// Whether `from` is a link to a directory above `to`.
fn is_through_link(fs: &WorkdirFs, from: &Path, to: &Path) -> bool {
    let Ok(source) = fs.access.metadata(from) else {
        return false;
    };
    let above = to.ancestors().skip(1).map(|path| match path {
        path if path.as_os_str().is_empty() => Path::new("."),
        path => path,
    });
    let mut above = above.filter_map(|path| fs.access.metadata(path).ok());
    source.is_dir() && above.any(|meta| (meta.dev(), meta.ino()) == (source.dev(), source.ino()))
}
