//! `edit_file`: replaces a text in a file, if it is clear which occurrence is meant.

use std::io::Read;
use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::workdir_fs::{
    OpenedEntry, WorkdirFs, describe_error, describe_non_file, is_binary, parse_path,
};
use crate::tools::files::write::{WriteTarget, replace_file};

pub const DESCRIPTION: &str = "Change a part of a text file of the working directory: replaces old_string, which must occur \
                         exactly once unless replace_all is true, by new_string. Give enough of the lines around the \
                         place, exactly as they are in the file, without the line numbers of read_file.";

/// Most bytes of an edited file, before and after.
const MAX_BYTES: u64 = 32 << 20;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EditFile {
    /// The file, relative to the working directory, such as "src/main.rs".
    path: String,
    /// The text to replace, exactly as it stands in the file.
    #[schemars(length(min = 1))]
    old_string: String,
    /// What to put in its place; empty to delete it.
    new_string: String,
    /// Whether to replace every occurrence.
    #[serde(default)]
    replace_all: bool,
}

pub fn edit_file(fs: &WorkdirFs, arguments: EditFile) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let display_path = path.display();
    // Checked before anything is created: an edit creates no file and no directory.
    let meta = fs.access.metadata(&path);
    meta.map_err(|error| describe_error(&path, &error))?;
    let target = WriteTarget::resolve(fs, &path)?;
    let _lock = fs.lock(&target.dir, &target.name);
    let name = Path::new(&target.name);
    let opened = fs.open_regular(&target.dir, name);
    let file = match opened.map_err(|error| describe_error(&path, &error))? {
        OpenedEntry::File(file, _) => file,
        OpenedEntry::Other(meta) => return Err(describe_non_file(&path, &meta)),
    };
    let mut bytes = Vec::new();
    let mut file = fs.stop.stoppable_reader(file).take(MAX_BYTES + 1);
    let read = file.read_to_end(&mut bytes);
    read.map_err(|error| describe_error(&path, &error))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!(
            "{display_path} has more than {MAX_BYTES} bytes, which is too much to edit"
        ));
    }
    if is_binary(&bytes) {
        return Err(format!(
            "{display_path} is a binary file of {} bytes",
            bytes.len()
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        format!(
            "{display_path} is not UTF-8 (at byte {offset}); editing it would lose what is there"
        )
    })?;
    let (new, count) =
        replace_text(&text, &arguments).map_err(|why| why.describe(&display_path.to_string()))?;
    replace_file(fs, &target, new.as_bytes()).map_err(|error| describe_error(&path, &error))?;
    Ok(format!("replaced {count} occurrence(s) in {display_path}"))
}

#[derive(Debug, PartialEq, Eq)]
enum EditError {
    Missing,
    Ambiguous(usize),
    Unchanged,
    TooLong,
}

impl EditError {
    fn describe(&self, path: &str) -> String {
        match self {
            Self::Missing => format!(
                "old_string was not found in {path} (0 occurrences); read the file and give the text exactly as it \
                 is in the file, with its spaces and line breaks"
            ),
            Self::Ambiguous(count) => format!(
                "old_string occurs {count} times in {path}; give more of the text around the one that is meant, or set \
                 replace_all"
            ),
            Self::Unchanged => "old_string and new_string are the same".to_owned(),
            Self::TooLong => format!("{path} would be longer than {MAX_BYTES} bytes"),
        }
    }
}

/// Returns the new text, and how many occurrences were replaced.
fn replace_text(text: &str, arguments: &EditFile) -> Result<(String, usize), EditError> {
    let EditFile {
        old_string: old,
        new_string: new,
        replace_all,
        ..
    } = arguments;
    let crlf = text.matches("\r\n").count();
    let is_crlf = crlf > 0 && crlf == text.matches('\n').count();
    let to_crlf = |part: &str| part.replace("\r\n", "\n").replace('\n', "\r\n");
    // Models write line feeds; the file keeps its own line endings.
    let (mut old, mut new) = match is_crlf {
        true => (to_crlf(old), to_crlf(new)),
        false => (old.clone(), new.clone()),
    };
    let mut count = text.matches(&old).count();
    if count == 0 && crlf > 0 {
        (old, new) = (to_crlf(&old), to_crlf(&new));
        count = text.matches(&old).count();
    }
    match count {
        _ if old == new => return Err(EditError::Unchanged),
        0 => return Err(EditError::Missing),
        2.. if !replace_all => return Err(EditError::Ambiguous(count)),
        _ => {}
    }
    let added_bytes = count.saturating_mul(new.len().saturating_sub(old.len()));
    if text.len().saturating_add(added_bytes) as u64 > MAX_BYTES {
        return Err(EditError::TooLong);
    }
    Ok((text.replace(&old, &new), count))
}

#[cfg(test)]
mod tests {
    use super::{EditError, EditFile, replace_text};

    fn arguments(old: &str, new: &str, replace_all: bool) -> EditFile {
        EditFile {
            path: "f".into(),
            old_string: old.into(),
            new_string: new.into(),
            replace_all,
        }
    }

    #[test]
    fn one_occurrence_or_all_are_replaced() {
        let edit = |old, new, all| replace_text("a b a", &arguments(old, new, all));
        assert_eq!(edit("b", "c", false), Ok(("a c a".into(), 1)));
        assert_eq!(edit("a", "", true), Ok((" b ".into(), 2)));
        assert_eq!(edit("a", "x", false), Err(EditError::Ambiguous(2)));
        assert_eq!(edit("x", "y", true), Err(EditError::Missing));
        assert_eq!(edit("a", "a", true), Err(EditError::Unchanged));
    }

    #[test]
    fn line_endings_are_kept() {
        let crlf = "one\r\ntwo\r\nthree\r\n";
        let edited = replace_text(crlf, &arguments("one\ntwo", "1\n2\n2b", false));
        assert_eq!(edited, Ok(("1\r\n2\r\n2b\r\nthree\r\n".into(), 1)));
        let edited = replace_text(crlf, &arguments("two", "2\n2b", false));
        assert_eq!(edited, Ok(("one\r\n2\r\n2b\r\nthree\r\n".into(), 1)));
        let mixed = replace_text("one\r\ntwo\nthree", &arguments("one\ntwo", "1\n2", false));
        assert_eq!(mixed, Ok(("1\r\n2\nthree".into(), 1)));
        let mixed = replace_text("one\r\ntwo\nthree", &arguments("two\nthree", "2\n3", false));
        assert_eq!(mixed, Ok(("one\r\n2\n3".into(), 1)));
    }

    #[test]
    fn the_size_of_an_edited_file_is_bounded() {
        let text = "a".repeat(1 << 20);
        let edited = replace_text(&text, &arguments("a", &"b".repeat(1 << 20), true));
        assert_eq!(edited, Err(EditError::TooLong));
    }
}
