//! `edit_file`: exchanges a text in a file for another, where it is clear which one is meant.

use std::io::Read;
use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::ground::{Ground, Opened, is_binary, is_no_file, place, told};
use crate::tools::files::write::{Target, replace};

/// What models are told.
pub const ABOUT: &str = "Change a part of a text file of the working directory: replaces old_string, which must occur \
                         exactly once unless replace_all is true, by new_string. Give enough of the lines around the \
                         place, exactly as they are in the file, without the line numbers of read_file.";

/// Most bytes of a file that is edited, before and after.
const MOST_BYTES: u64 = 32 << 20;

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

/// Edits it.
pub fn edit(ground: &Ground, asked: EditFile) -> Result<String, String> {
    let path = place(&asked.path)?;
    let shown = path.display();
    // Looked for before anything is made: an edit makes no file and no directory.
    let meta = ground.access.metadata(&path);
    meta.map_err(|error| told(&path, &error))?;
    let target = Target::of(ground, &path)?;
    let _alone = ground.lock(&target.dir, &target.name);
    let name = Path::new(&target.name);
    let opened = ground.open_regular(&target.dir, name);
    let file = match opened.map_err(|error| told(&path, &error))? {
        Opened::File(file, _) => file,
        Opened::Other(meta) => return Err(is_no_file(&path, &meta)),
    };
    let mut bytes = Vec::new();
    let mut file = ground.stop.reading(file).take(MOST_BYTES + 1);
    let read = file.read_to_end(&mut bytes);
    read.map_err(|error| told(&path, &error))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!(
            "{shown} has more than {MOST_BYTES} bytes, which is too much to edit"
        ));
    }
    if is_binary(&bytes) {
        return Err(format!("{shown} is a binary file of {} bytes", bytes.len()));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("{shown} is not UTF-8 (at byte {at}); editing it would lose what is there")
    })?;
    let (new, count) = exchanged(&text, &asked).map_err(|why| why.told(&shown.to_string()))?;
    replace(ground, &target, new.as_bytes()).map_err(|error| told(&path, &error))?;
    Ok(format!("replaced {count} occurrence(s) in {shown}"))
}

/// Why nothing is exchanged.
#[derive(Debug, PartialEq, Eq)]
enum Why {
    Missing,
    Ambiguous(usize),
    Same,
    TooLong,
}

impl Why {
    fn told(&self, path: &str) -> String {
        match self {
            Self::Missing => format!(
                "old_string was not found in {path} (0 occurrences); read the file and give the text exactly as it \
                 stands there, with its spaces and line breaks"
            ),
            Self::Ambiguous(count) => format!(
                "old_string occurs {count} times in {path}; give more of the text around the one that is meant, or set \
                 replace_all"
            ),
            Self::Same => "old_string and new_string are the same".to_owned(),
            Self::TooLong => format!("{path} would be longer than {MOST_BYTES} bytes"),
        }
    }
}

/// The text with its exchange made, and how often.
fn exchanged(text: &str, asked: &EditFile) -> Result<(String, usize), Why> {
    let EditFile {
        old_string: old,
        new_string: new,
        replace_all,
        ..
    } = asked;
    let crlf = text.matches("\r\n").count();
    let is_crlf = crlf > 0 && crlf == text.matches('\n').count();
    let as_in_file = |part: &str| part.replace("\r\n", "\n").replace('\n', "\r\n");
    // Models write lines that end in a line feed; the file keeps its own ends.
    let (mut old, mut new) = match is_crlf {
        true => (as_in_file(old), as_in_file(new)),
        false => (old.clone(), new.clone()),
    };
    let mut count = text.matches(&old).count();
    if count == 0 && crlf > 0 {
        (old, new) = (as_in_file(&old), as_in_file(&new));
        count = text.matches(&old).count();
    }
    match count {
        _ if old == new => return Err(Why::Same),
        0 => return Err(Why::Missing),
        2.. if !replace_all => return Err(Why::Ambiguous(count)),
        _ => {}
    }
    let grown = count.saturating_mul(new.len().saturating_sub(old.len()));
    if text.len().saturating_add(grown) as u64 > MOST_BYTES {
        return Err(Why::TooLong);
    }
    Ok((text.replace(&old, &new), count))
}

#[cfg(test)]
mod tests {
    use super::{EditFile, Why, exchanged};

    fn asked(old: &str, new: &str, replace_all: bool) -> EditFile {
        EditFile {
            path: "f".into(),
            old_string: old.into(),
            new_string: new.into(),
            replace_all,
        }
    }

    #[test]
    fn one_is_exchanged_or_all_or_none() {
        let edited = |old, new, all| exchanged("a b a", &asked(old, new, all));
        assert_eq!(edited("b", "c", false), Ok(("a c a".into(), 1)));
        assert_eq!(edited("a", "", true), Ok((" b ".into(), 2)));
        assert_eq!(edited("a", "x", false), Err(Why::Ambiguous(2)));
        assert_eq!(edited("x", "y", true), Err(Why::Missing));
        assert_eq!(edited("a", "a", true), Err(Why::Same));
    }

    #[test]
    fn lines_keep_the_ends_they_have() {
        let crlf = "one\r\ntwo\r\nthree\r\n";
        let edited = exchanged(crlf, &asked("one\ntwo", "1\n2\n2b", false));
        assert_eq!(edited, Ok(("1\r\n2\r\n2b\r\nthree\r\n".into(), 1)));
        let edited = exchanged(crlf, &asked("two", "2\n2b", false));
        assert_eq!(edited, Ok(("one\r\n2\r\n2b\r\nthree\r\n".into(), 1)));
        let mixed = exchanged("one\r\ntwo\nthree", &asked("one\ntwo", "1\n2", false));
        assert_eq!(mixed, Ok(("1\r\n2\nthree".into(), 1)));
        let mixed = exchanged("one\r\ntwo\nthree", &asked("two\nthree", "2\n3", false));
        assert_eq!(mixed, Ok(("one\r\n2\n3".into(), 1)));
    }

    #[test]
    fn a_file_does_not_grow_without_end() {
        let text = "a".repeat(1 << 20);
        let edited = exchanged(&text, &asked("a", &"b".repeat(1 << 20), true));
        assert_eq!(edited, Err(Why::TooLong));
    }
}
