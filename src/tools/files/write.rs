//! `write_file`, and the atomic replacement of a file.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use cap_std::fs::{Dir, MetadataExt, Permissions, PermissionsExt};
use cap_tempfile::TempFile;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::workdir_fs::{WorkdirFs, describe_error, describe_non_file, parse_path};

pub const DESCRIPTION: &str = "Write a text file of the working directory: creates it with the directories above it, or \
                         replaces all that is in it. To change a part of a file, use edit_file.";

/// Bytes that are written between two checks of the stop token.
const CHUNK_BYTES: usize = 1 << 20;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    /// The file, relative to the working directory, such as "notes/today.md".
    path: String,
    /// The whole new content.
    content: String,
}

pub fn write_file(fs: &WorkdirFs, arguments: WriteFile) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let target = WriteTarget::resolve(fs, &path)?;
    let _lock = fs.lock(&target.dir, &target.name);
    let content = arguments.content.as_bytes();
    let result = replace_file(fs, &target, content);
    result.map_err(|error| describe_error(&path, &error))?;
    Ok(format!(
        "wrote {} bytes to {}",
        content.len(),
        path.display()
    ))
}

/// A file to replace or create.
pub struct WriteTarget {
    pub dir: Dir,
    pub name: OsString,
    /// The file's permissions; `None` for a new one.
    mode: Option<u32>,
}

impl WriteTarget {
    /// Resolves a path. If it is a link, its target is replaced, not the link. Creates the directories above a new
    /// file.
    ///
    /// # Errors
    /// The path cannot be written. The text is for the model.
    pub fn resolve(fs: &WorkdirFs, path: &Path) -> Result<Self, String> {
        let is_link = |path: &Path| {
            let meta = fs.access.symlink_metadata(path);
            meta.is_ok_and(|meta| meta.is_symlink())
        };
        let resolved: PathBuf;
        let mut resolved_path = path;
        if is_link(path) {
            resolved = fs.access.canonicalize(path).map_err(|error| {
                let message = describe_error(path, &error);
                format!("{message} (it is a link; delete it first to write a file in its place)")
            })?;
            resolved_path = &resolved;
        }
        let mode = match fs.access.symlink_metadata(resolved_path) {
            Ok(meta) if !meta.is_file() => return Err(describe_non_file(path, &meta)),
            Ok(meta) if meta.mode() & 0o222 == 0 => {
                return Err(format!("{} is read-only", path.display()));
            }
            // The set-ID bits are dropped: an agent's content must not run as another user.
            Ok(meta) => Some(meta.mode() & 0o777),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (dir, name) = fs.new_entry(resolved_path)?;
                let mode = None;
                return Ok(Self { dir, name, mode });
            }
            Err(error) => return Err(describe_error(path, &error)),
        };
        let (dir, name) = fs.parent(resolved_path)?;
        Ok(Self { dir, name, mode })
    }
}

/// Replaces the file atomically: readers and a crash see the old content or the new one.
///
/// # Errors
/// The system's error, or the call was stopped.
pub fn replace_file(fs: &WorkdirFs, target: &WriteTarget, content: &[u8]) -> io::Result<()> {
    let mut file = TempFile::new(&target.dir)?;
    for chunk in content.chunks(CHUNK_BYTES) {
        fs.stop.check()?;
        file.write_all(chunk)?;
    }
    if let Some(mode) = target.mode {
        file.as_file()
            .set_permissions(Permissions::from_mode(mode))?;
    }
    fs.stop.check()?;
    file.replace(&target.name)
}
