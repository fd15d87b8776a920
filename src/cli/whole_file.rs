//! Writes files whole: readers, a crash and a full disk leave the file as it was or as it is to be.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// The links that are followed to the name of a file that does not exist.
const MAX_LINKS: usize = 40;

/// Creates the file; `AlreadyExists` if something has its name.
pub fn create(path: &Path, text: &str) -> io::Result<()> {
    let new = write_beside(path, None, text)?;
    let created = new.persist_noclobber(path);
    created.map(drop).map_err(|failed| failed.error)
}

/// Creates the file, or replaces it, with its mode. Of a link, it creates or replaces the target.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let (path, existing) = match fs::metadata(path) {
        Ok(existing) if existing.is_file() => (fs::canonicalize(path)?, Some(existing)),
        // A pipe or a device remains what it is.
        Ok(_) => return fs::write(path, text),
        Err(error) if error.kind() == ErrorKind::NotFound => (link_target(path), None),
        Err(error) => return Err(error),
    };
    let permissions = existing.map(|it| it.permissions());
    let new = write_beside(&path, permissions, text)?;
    // Such as a file that is a mount of its own.
    let replaced = new.persist(&path);
    replaced
        .map(drop)
        .map_err(|failed| explain("it cannot be replaced", &failed.error))
}

/// The missing file that the link names; the path itself if it is no link.
fn link_target(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

/// Writes a new file in the same directory, which is removed unless it gets its name. `permissions` are those of the file that is
/// replaced: before they are set, only this user can read the new one.
fn write_beside(
    path: &Path,
    permissions: Option<Permissions>,
    text: &str,
) -> io::Result<NamedTempFile> {
    let dir = path.parent().filter(|dir| *dir != Path::new(""));
    let mode = if permissions.is_some() { 0o600 } else { 0o666 };
    // What cannot be removed is read neither as an agent nor as a test: its name does not end in .toml.
    let mut new = tempfile::Builder::new()
        .prefix(".axed.")
        .suffix(".new")
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(dir.unwrap_or(Path::new(".")))
        .map_err(|error| explain("no file can be created beside it", &error))?;
    if let Some(permissions) = permissions {
        new.as_file().set_permissions(permissions)?;
    }
    new.write_all(text.as_bytes())?;
    new.as_file().sync_all()?;
    Ok(new)
}

fn explain(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::ErrorKind;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::{create, replace, write_beside};

    fn read(path: &Path) -> String {
        fs::read_to_string(path).expect("a file")
    }

    fn mode(path: &Path) -> u32 {
        let mode = fs::metadata(path).expect("a file").permissions().mode();
        mode & 0o777
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
        fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("a mode");
        symlink("a.toml", &link).expect("a link");
        replace(&link, "second").expect("written");
        assert_eq!(read(&file), "second");
        assert_eq!(read(&link), "second");
        assert_eq!(mode(&file), 0o640);
        assert_eq!(names(dir.path()), ["a.toml", "b.toml"]);
    }

    #[test]
    fn a_link_to_a_missing_file_remains_and_its_target_is_created() {
        let dir = tempfile::tempdir().expect("a directory");
        let link = dir.path().join("b.toml");
        symlink("c.toml", &link).expect("a link");
        symlink("a.toml", dir.path().join("c.toml")).expect("a link");
        replace(&link, "first").expect("written");
        assert_eq!(read(&dir.path().join("a.toml")), "first");
        assert_eq!(names(dir.path()), ["a.toml", "b.toml", "c.toml"]);
        assert!(link.is_symlink());
    }

    #[test]
    fn a_write_that_fails_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a.toml");
        replace(&file, "first").expect("written");
        drop(write_beside(&file, None, "second").expect("a file beside it"));
        assert_eq!(read(&file), "first");
        assert_eq!(names(dir.path()), ["a.toml"]);
    }

    #[test]
    fn the_new_file_of_a_private_one_is_private() {
        let dir = tempfile::tempdir().expect("a directory");
        let private = Some(Permissions::from_mode(0o600));
        let new = write_beside(&dir.path().join("a.toml"), private, "text").expect("written");
        assert_eq!(mode(new.path()), 0o600);
        assert_eq!(read(new.path()), "text");
    }
}
