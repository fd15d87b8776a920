//! The directory of a skill, which is read only, and by handle: no path and no link leads out of it.

use std::io::{self, ErrorKind, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::workdirs::handle::WorkdirHandle;
use crate::workdirs::registry::Workdirs;
use crate::workdirs::reserved::ReservedPaths;
use crate::workdirs::workdir::{self, Workdir};

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// The most files that a listing names, and the most entries that it looks at.
const MAX_LISTED: usize = 200;
const MAX_VISITED: usize = 2000;
const MAX_LISTED_DEPTH: usize = 4;

pub struct SkillDir {
    handle: WorkdirHandle,
}

impl SkillDir {
    /// Opens the directory at a path of the operator's, without following links within workdirs, where a command may have
    /// made them. It may lie in the configuration's directory, but have none of the daemon's secrets. Blocking I/O.
    ///
    /// # Errors
    /// The system's error, or a sentence in it.
    pub fn open(path: &Path, workdirs: &Workdirs) -> io::Result<Self> {
        let dir = workdirs.open_skill_dir(path)?;
        let workdir = Workdir::new(dir, &Arc::new(ReservedPaths::default()))?;
        let snapshot = workdirs.reserved().snapshot();
        if snapshot.contains_reserved(workdir.id()) {
            let message =
                "contains files of the daemon (configuration, agents, datasets, scripts or data)";
            return Err(io::Error::other(message));
        }
        for ancestor in workdir::ancestors(&workdir.dir) {
            let ancestor = ancestor?;
            if snapshot.is_skills_dir(ancestor) {
                break;
            }
            if snapshot.is_reserved(ancestor) {
                let message =
                    "lies in a directory of the daemon (agents, datasets, scripts or data)";
                return Err(io::Error::other(message));
            }
        }
        Ok(Self {
            handle: WorkdirHandle::new(Arc::new(workdir)),
        })
    }

    /// The text of a file. Blocking I/O.
    ///
    /// # Errors
    /// The second half of a sentence that begins with the file's path.
    pub fn read(&self, path: &Path) -> Result<String, String> {
        let is_inside = |component: Component<'_>| {
            matches!(component, Component::Normal(_) | Component::CurDir)
        };
        if !path.components().all(is_inside) {
            return Err("leads out of the skill's directory".to_owned());
        }
        let unreadable = |error: io::Error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => "does not exist".to_owned(),
            // An error of cap-std itself has no OS error code.
            ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
                "leads out of the skill's directory through a link".to_owned()
            }
            _ => format!("could not be read: {error}"),
        };
        let target = self.handle.canonicalize(path).map_err(unreadable)?;
        let opened = self.handle.open_regular(&target).map_err(unreadable)?;
        let file = opened.ok_or("is no regular file")?;
        let mut bytes = Vec::new();
        let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(unreadable)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("has over {MAX_FILE_BYTES} bytes"));
        }
        match String::from_utf8(bytes) {
            Ok(text) if !text.contains('\0') => Ok(text),
            _ => Err("is no text in UTF-8".to_owned()),
        }
    }

    /// The paths of its files, sorted, without hidden ones and links; the first ones if there are many. Blocking I/O.
    pub fn files(&self) -> Vec<String> {
        let mut files = Vec::new();
        let mut pending = vec![PathBuf::new()];
        let mut visited = 0;
        while let Some(parent) = pending.pop() {
            let path = match parent.as_os_str().is_empty() {
                true => Path::new("."),
                false => &parent,
            };
            let Ok(entries) = self.handle.enter(path).and_then(|dir| dir.entries()) else {
                continue;
            };
            for entry in entries.flatten() {
                visited += 1;
                let name = entry.file_name();
                let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else {
                    continue;
                };
                let path = parent.join(name);
                match entry.file_type() {
                    Ok(kind) if kind.is_file() => files.push(path.display().to_string()),
                    Ok(kind) if kind.is_dir() && path.components().count() <= MAX_LISTED_DEPTH => {
                        pending.push(path);
                    }
                    _ => {}
                }
                if visited >= MAX_VISITED {
                    pending.clear();
                    break;
                }
            }
        }
        files.sort_unstable();
        files.truncate(MAX_LISTED);
        files
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use crate::workdirs::registry::Workdirs;
    use crate::workdirs::reserved::{DaemonPaths, ReservedPaths};

    use super::SkillDir;

    #[test]
    fn one_directory_may_have_the_configuration_data_and_skills() {
        let home = tempfile::tempdir().expect("a directory");
        let at = |path: &str| home.path().join(path);
        for dir in ["volume/skills/pdf", "volume/other", "mounted/tables"] {
            fs::create_dir_all(at(dir)).expect("a directory");
        }
        symlink("../../mounted/tables", at("volume/skills/tables")).expect("a link");
        let daemon_paths = DaemonPaths {
            config_file: at("volume/axed.toml"),
            config_dir: at("volume"),
            others: vec![at("volume")],
        };
        let reserved = ReservedPaths::new(&daemon_paths, home.path());
        let workdirs = Workdirs::new(home.path().to_owned(), &[], reserved);
        workdirs.update_agent_workdirs(1, || vec![None]);
        let open = |path: &str| SkillDir::open(&at(path), &workdirs).map(drop);
        assert!(open("volume/skills/pdf").is_ok());
        assert!(
            open("volume/skills/tables").is_ok(),
            "the operator's link, though the daemon's directory is a workdir"
        );
        assert!(open("volume/other").is_err(), "it lies among the data");
        assert!(open("mounted/tables").is_ok());
        symlink("tables", at("mounted/link")).expect("a link");
        assert!(open("mounted/link").is_err(), "a command may have made it");
        assert!(open("volume/skills/../../mounted/link").is_err());
    }
}
