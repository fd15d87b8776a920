//! `list_directory`.

use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::ground::{Ground, place, shown, told};
use crate::tools::files::sorted::Sorted;

/// What models are told.
pub const ABOUT: &str = "List a directory of the working directory: one entry a line, sorted, directories end in \"/\". \
                         Hidden entries are listed too. To look for files further down, use find_path.";

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListDirectory {
    /// The directory, relative to the working directory, such as "src". "." is the working directory itself.
    #[serde(default = "here")]
    path: String,
}

fn here() -> String {
    ".".to_owned()
}

/// Lists it.
pub fn list(ground: &Ground, asked: ListDirectory) -> Result<String, String> {
    let path = place(&asked.path)?;
    let why = |error: std::io::Error| told(&path, &error);
    let dir = ground.access.open_dir(&path).map_err(why)?;
    let mut lines = Sorted::default();
    for entry in dir.entries().map_err(why)? {
        ground.stop.check().map_err(why)?;
        let Ok(entry) = entry else { continue };
        let name = entry.file_name();
        let name = Path::new(&name);
        let is_dir = match entry.file_type() {
            // What a link stands for, where it stays in the workdir.
            Ok(kind) if kind.is_symlink() => dir.metadata(name).is_ok_and(|meta| meta.is_dir()),
            Ok(kind) => kind.is_dir(),
            Err(_) => false,
        };
        let end = if is_dir { "/" } else { "" };
        lines.put(format!("{}{end}", shown(name)));
    }
    let text = lines.text(ground.room(), "entries; find_path takes a pattern");
    Ok(text.unwrap_or_else(|| "(the directory is empty)".to_owned()))
}
