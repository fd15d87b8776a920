//! `delete_path`, `move_path`, `copy_path`, `create_directory`.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use cap_std::fs::Dir;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::ground::{Ground, place, told};
use crate::tools::files::trees;

/// What models are told of `delete_path`.
pub const ABOUT_DELETE: &str = "Delete a file of the working directory, a link (never what it stands for), or a \
                                directory with all that is in it. It cannot be brought back.";
/// What models are told of `move_path`.
pub const ABOUT_MOVE: &str = "Move or rename a file or directory of the working directory. Directories above the new \
                              place are created; what exists already is never replaced.";
/// What models are told of `copy_path`.
pub const ABOUT_COPY: &str = "Copy a file of the working directory, or a directory with all that is in it. Directories \
                              above the new place are created; what exists already is never replaced. Links in a \
                              directory are left out.";
/// What models are told of `create_directory`.
pub const ABOUT_CREATE: &str = "Create a directory of the working directory, with the directories above it. One that \
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

/// Deletes it.
pub fn delete(ground: &Ground, asked: DeletePath) -> Result<String, String> {
    let path = place(&asked.path)?;
    let (dir, name) = ground.parent(&path)?;
    trees::remove(ground, &dir, Path::new(&name)).map_err(|error| told(&path, &error))?;
    Ok(format!("deleted {}", path.display()))
}

/// Moves it.
pub fn move_(ground: &Ground, asked: MovePath) -> Result<String, String> {
    let (from, to) = (place(&asked.from)?, place(&asked.to)?);
    let (from_dir, from_name) = ground.parent(&from)?;
    let there = from_dir.symlink_metadata(&from_name);
    let whole = there.and_then(|meta| ground.access.check_whole(&meta));
    whole.map_err(|error| told(&from, &error))?;
    let (to_dir, to_name) = make_room(ground, &from, &to)?;
    let moved = from_dir.rename(&from_name, &to_dir, &to_name);
    moved.map_err(|error| told(&from, &error))?;
    Ok(format!("moved {} to {}", from.display(), to.display()))
}

/// Copies it.
pub fn copy(ground: &Ground, asked: CopyPath) -> Result<String, String> {
    let (from, to) = (place(&asked.from)?, place(&asked.to)?);
    let meta = ground.access.metadata(&from);
    let whole = meta.and_then(|meta| ground.access.check_whole(&meta).map(|()| meta));
    let meta = whole.map_err(|error| told(&from, &error))?;
    let (to_dir, to_name) = make_room(ground, &from, &to)?;
    let mut copied = trees::Copied::default();
    let done = match meta.is_dir() {
        true => ground.access.open_dir(&from).and_then(|dir| {
            trees::copy_directory(ground, &dir, &to_dir, Path::new(&to_name), &mut copied)
        }),
        false => {
            let (file, meta) = ground.open(&from)?;
            trees::copy_file(ground, file, &meta, &to_dir, &to_name, &mut copied)
        }
    };
    done.map_err(|error| told(&from, &error))?;
    let left_out = match copied.left_out {
        0 => String::new(),
        count => format!("; left out {count} link(s) and special file(s)"),
    };
    Ok(format!(
        "copied {} to {} ({} file(s)){left_out}",
        from.display(),
        to.display(),
        copied.files
    ))
}

/// Creates it.
pub fn create(ground: &Ground, asked: CreateDirectory) -> Result<String, String> {
    let path = place(&asked.path)?;
    let made = ground.access.make_dir(&path);
    made.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            format!("{} exists and is not a directory", path.display())
        }
        _ => told(&path, &error),
    })?;
    Ok(format!("created directory {}", path.display()))
}

/// Makes the directories above `to`, where nothing is there yet and it is not within `from`. Returns the one that it
/// goes into, with its name there.
fn make_room(ground: &Ground, from: &Path, to: &Path) -> Result<(Dir, OsString), String> {
    if to.starts_with(from) || from == Path::new(".") {
        return Err(format!(
            "{} cannot go into itself, {}",
            from.display(),
            to.display()
        ));
    }
    match ground.access.symlink_metadata(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(told(to, &error)),
        Ok(_) => {
            return Err(format!(
                "{} exists already; delete it first, or give another path",
                to.display()
            ));
        }
    }
    ground.new_entry(to)
}
