//! `list_directory`.

use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::walk::SortedLines;
use crate::tools::files::workdir_fs::{WorkdirFs, describe_error, display_path, parse_path};

pub const DESCRIPTION: &str = "List a directory of the working directory: one entry a line, sorted, directories end in \"/\". \
                         Hidden entries are listed too. To look for files further down, use find_path.";

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListDirectory {
    /// The directory, relative to the working directory, such as "src". "." is the working directory itself.
    #[serde(default = "default_path")]
    path: String,
}

fn default_path() -> String {
    ".".to_owned()
}

pub fn list_directory(fs: &WorkdirFs, arguments: ListDirectory) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let describe = |error: std::io::Error| describe_error(&path, &error);
    let dir = fs.access.open_dir(&path).map_err(describe)?;
    let mut lines = SortedLines::default();
    for entry in dir.entries().map_err(describe)? {
        fs.stop.check().map_err(describe)?;
        let Ok(entry) = entry else { continue };
        let name = entry.file_name();
        let name = Path::new(&name);
        let is_dir = match entry.file_type() {
            // A link to a directory counts as one, if it stays in the workdir.
            Ok(kind) if kind.is_symlink() => dir.metadata(name).is_ok_and(|meta| meta.is_dir()),
            Ok(kind) => kind.is_dir(),
            Err(_) => false,
        };
        let suffix = if is_dir { "/" } else { "" };
        lines.insert(format!("{}{suffix}", display_path(name)));
    }
    let text = lines.render(fs.max_output_bytes(), "entries; find_path takes a pattern");
    Ok(text.unwrap_or_else(|| "(the directory is empty)".to_owned()))
}
