//! Writes files whole: readers, a crash and a full disk leave the file as it was or as it is to be.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::{fs, process};

/// Creates the file; `AlreadyExists` if something has its name.
pub fn create(path: &Path, text: &str) -> io::Result<()> {
    write_beside(path, text, |new| match fs::hard_link(new, path) {
        Ok(()) => {
            // The file is there, whether or not its other name goes.
            let _ = fs::remove_file(new);
            Ok(())
        }
        // Some file systems have no hard links.
        Err(_) if fs::symlink_metadata(path).is_err() => fs::rename(new, path),
        Err(error) => Err(error),
    })
}

/// Creates the file, or replaces it, with its mode. Of a link, it replaces the target.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let existing = match fs::metadata(path) {
        Ok(existing) if existing.is_file() => existing,
        // A pipe or a device remains what it is.
        Ok(_) => return fs::write(path, text),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return write_beside(path, text, |new| fs::rename(new, path));
        }
        Err(error) => return Err(error),
    };
    let path = fs::canonicalize(path)?;
    write_beside(&path, text, |new| {
        fs::set_permissions(new, existing.permissions())?;
        fs::rename(new, &path)
    })
}

/// Writes a new file in the same directory, and has it moved to its name.
fn write_beside(
    path: &Path,
    text: &str,
    publish: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // What cannot be removed is read neither as an agent nor as a test: its name does not end in .toml.
    let new = path.with_file_name(format!(".{name}.{}.new", process::id()));
    let written = fs::File::create(&new)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| publish(&new));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::{create, replace};

    fn read(path: &Path) -> String {
        fs::read_to_string(path).expect("a file")
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = names
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Makes every write beside this file fail, as on a full disk.
    fn fail_writes(path: &Path) {
        let name = path.file_name().expect("a name").to_string_lossy();
        let new = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
        fs::create_dir(new).expect("a directory");
    }

    #[test]
    fn an_existing_name_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.toml");
        create(&file, "first").expect("written");
        let error = create(&file, "second").expect_err("it exists");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(read(&file), "first");

        let link = dir.path().join("b.toml");
        symlink("missing", &link).expect("a link");
        let error = create(&link, "second").expect_err("it exists");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(names(dir.path()), ["a.toml", "b.toml"]);
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_its_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, link) = (dir.path().join("a.toml"), dir.path().join("b.toml"));
        replace(&file, "first").expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
        symlink("a.toml", &link).expect("a link");
        replace(&link, "second").expect("written");
        assert_eq!(read(&file), "second");
        assert_eq!(read(&link), "second");
        let mode = fs::metadata(&file).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(names(dir.path()), ["a.toml", "b.toml"]);
    }

    #[test]
    fn a_write_that_fails_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, absent) = (dir.path().join("a.toml"), dir.path().join("b.toml"));
        replace(&file, "first").expect("written");
        fail_writes(&file);
        fail_writes(&absent);
        replace(&file, "second").expect_err("it cannot be written");
        create(&absent, "second").expect_err("it cannot be written");
        assert_eq!(read(&file), "first");
        assert!(!absent.exists());
    }
}
