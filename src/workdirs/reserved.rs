//! The daemon's own files and directories, which no tool may reach: configuration, agents, datasets, data and scripts. They are
//! identified by device and inode, not by comparing paths. A path that does not exist yet is identified by its name in
//! the directory that will hold it.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::{fmt, fs, io};

use crate::workdirs::file_id::FileId;

/// The kernel's limit.
const MAX_LINKS: usize = 40;

/// Where the daemon keeps its own files.
#[derive(Clone, Debug, Default)]
pub struct DaemonPaths {
    /// It may not exist yet.
    pub config_file: PathBuf,
    pub config_dir: PathBuf,
    /// Agents, datasets, data, and files or directories of scripts.
    pub others: Vec<PathBuf>,
}

/// The daemon's own paths, absolute.
#[derive(Debug, Default)]
pub struct ReservedPaths {
    paths: Vec<PathBuf>,
    /// That of them which holds skills.
    skills: Option<PathBuf>,
    /// The configuration's directory. A tool may not enter it from above, but a workdir may lie below it. `None` if the
    /// daemon itself works in it.
    config_dir: Option<PathBuf>,
}

impl ReservedPaths {
    /// `cwd` is the daemon's working directory.
    pub fn new(daemon_paths: &DaemonPaths, cwd: &Path) -> Self {
        let config_dir = cwd.join(&daemon_paths.config_dir);
        let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let is_shared = canonical(cwd).starts_with(canonical(&config_dir));
        let skills = config_dir.join("skills");
        let fixed = [cwd.join(&daemon_paths.config_file), skills.clone()];
        let others = daemon_paths.others.iter().map(|path| cwd.join(path));
        Self {
            paths: fixed.into_iter().chain(others).collect(),
            skills: Some(skills),
            config_dir: (!is_shared).then_some(config_dir),
        }
    }

    /// Reserves exactly these paths.
    pub fn from_paths(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            skills: None,
            config_dir: None,
        }
    }

    /// The directory that no tool changes, if no workdir lies in it: that of the configuration, or at least that of skills.
    pub fn operator_dir(&self) -> Option<&PathBuf> {
        self.config_dir.as_ref().or(self.skills.as_ref())
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.paths.iter().chain(&self.config_dir).cloned().collect()
    }

    /// Resolves the paths as they are now. Blocking I/O for each directory on the way to each path.
    pub fn snapshot(&self) -> ReservedSnapshot {
        let mut snapshot = ReservedSnapshot::default();
        for path in &self.paths {
            if let Some(id) = snapshot.resolve(path) {
                snapshot.reserved.insert(id, path.clone());
                if self.skills.as_ref() == Some(path) {
                    snapshot.skills = Some(id);
                }
            }
        }
        if let Some(path) = &self.config_dir
            && let Some(id) = snapshot.resolve(path)
        {
            snapshot.config_dir = Some((id, path.clone()));
        }
        snapshot
    }
}

/// What the reserved paths resolve to at one moment.
#[derive(Debug, Default)]
pub struct ReservedSnapshot {
    reserved: HashMap<FileId, PathBuf>,
    skills: Option<FileId>,
    config_dir: Option<(FileId, PathBuf)>,
    /// Directories and links on the way to reserved paths, each with one of these paths.
    ancestors: HashMap<FileId, PathBuf>,
    /// Paths that do not exist yet: the deepest existing directory, and the next name in it.
    missing: Vec<(FileId, OsString)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservedError {
    /// It is one of the daemon's own files or directories, or lies in one.
    Reserved,
    /// It contains one of them.
    ContainsReserved,
    /// It lies on procfs, where the daemon's environment, memory and open files can be read.
    Procfs,
}

impl fmt::Display for ReservedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reserved => {
                "out of reach for every tool: the file or directory belongs to the daemon (configuration, agents, \
                 scripts, data or secrets)"
            }
            Self::ContainsReserved => {
                "not to be moved, copied or deleted: it contains a directory that belongs to the daemon \
                 (configuration, agents, datasets, scripts or data)"
            }
            Self::Procfs => {
                "out of reach for every tool: it lies in /proc, which shows the environment and the memory of processes"
            }
        })
    }
}

impl From<ReservedError> for io::Error {
    fn from(error: ReservedError) -> Self {
        io::Error::new(io::ErrorKind::PermissionDenied, error)
    }
}

impl ReservedError {
    /// The reserved error that an I/O error wraps, if it does.
    pub fn from_io_error(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl ReservedSnapshot {
    /// Whether this is reserved however it is reached: everything but the configuration's directory.
    pub fn is_reserved(&self, id: FileId) -> bool {
        self.reserved.contains_key(&id)
    }

    /// Whether this is the daemon's directory of skills.
    pub fn is_skills_dir(&self, id: FileId) -> bool {
        self.skills == Some(id)
    }

    /// Whether this file or directory may not be used from within a workdir.
    pub fn is_forbidden(&self, id: FileId) -> bool {
        self.is_reserved(id)
            || self
                .config_dir
                .as_ref()
                .is_some_and(|(dir_id, _)| *dir_id == id)
    }

    /// The reserved path that this is, or that lies somewhere below this directory.
    pub fn reserved_path_within(&self, id: FileId) -> Option<&PathBuf> {
        let config = self.config_dir.as_ref().filter(|(dir_id, _)| *dir_id == id);
        self.reserved
            .get(&id)
            .or(config.map(|(_, path)| path))
            .or_else(|| self.ancestors.get(&id))
    }

    /// Whether an entry of this name in this directory would become reserved.
    pub fn is_future_reserved(&self, dir: FileId, name: &OsStr) -> bool {
        let mut missing = self.missing.iter();
        // Some file systems ignore case.
        missing
            .any(|(dir_id, missing_name)| *dir_id == dir && missing_name.eq_ignore_ascii_case(name))
    }

    /// Whether something reserved lies somewhere below this directory.
    pub fn contains_reserved(&self, id: FileId) -> bool {
        self.ancestors.contains_key(&id)
    }

    /// Resolves this absolute path as the kernel does, and records every directory and link on the way. `None` if it
    /// does not exist.
    fn resolve(&mut self, path: &Path) -> Option<FileId> {
        let mut current = PathBuf::from("/");
        let mut last = FileId::from_std(&fs::symlink_metadata(&current).ok()?);
        let mut remaining: VecDeque<OsString> = components(path).collect();
        let mut links = 0;
        while let Some(component) = remaining.pop_front() {
            self.ancestors
                .entry(last)
                .or_insert_with(|| path.to_owned());
            if component == "/" {
                current = PathBuf::from("/");
            } else if component == ".." {
                current.pop();
            } else {
                let next = current.join(&component);
                let Ok(meta) = fs::symlink_metadata(&next) else {
                    self.missing.push((last, component));
                    return None;
                };
                if meta.is_symlink() {
                    links += 1;
                    let target = fs::read_link(&next).ok().filter(|_| links <= MAX_LINKS)?;
                    let link = FileId::from_std(&meta);
                    self.ancestors
                        .entry(link)
                        .or_insert_with(|| path.to_owned());
                    for component in components(&target).collect::<Vec<_>>().into_iter().rev() {
                        remaining.push_front(component);
                    }
                    continue;
                }
                current = next;
                last = FileId::from_std(&meta);
                continue;
            }
            last = FileId::from_std(&fs::symlink_metadata(&current).ok()?);
        }
        Some(last)
    }
}

/// The components of a path; a root is `/`.
fn components(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::CurDir | Component::Prefix(_) => None,
        other => Some(other.as_os_str().to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::{DaemonPaths, ReservedPaths};
    use crate::workdirs::file_id::FileId;

    fn id(path: &Path) -> FileId {
        FileId::from_std(&fs::symlink_metadata(path).expect("it"))
    }

    #[test]
    fn reserved_files_are_identified_by_inode() {
        let home = tempfile::tempdir().expect("a directory");
        let at = |path: &str| home.path().join(path);
        fs::create_dir_all(at("real/agents")).expect("a directory");
        fs::create_dir(at("config")).expect("a directory");
        symlink("real", at("link")).expect("a link");
        let daemon_paths = DaemonPaths {
            config_file: "config/axed.toml".into(),
            config_dir: "config".into(),
            others: vec!["link/agents".into(), "data/deep".into()],
        };
        let snapshot = ReservedPaths::new(&daemon_paths, home.path()).snapshot();
        assert!(snapshot.is_reserved(id(&at("real/agents"))));
        // It may not be entered from above, but a workdir may lie below it.
        assert!(
            snapshot.is_forbidden(id(&at("config"))) && !snapshot.is_reserved(id(&at("config")))
        );
        for ancestor in ["link", "real", "config", ""] {
            assert!(
                snapshot.reserved_path_within(id(&at(ancestor))).is_some(),
                "{ancestor}"
            );
        }
        assert!(snapshot.is_future_reserved(id(home.path()), "data".as_ref()));
        assert!(snapshot.is_future_reserved(id(&at("config")), "axed.toml".as_ref()));
        assert!(snapshot.is_future_reserved(id(&at("config")), "skills".as_ref()));
        assert!(!snapshot.is_future_reserved(id(home.path()), "deep".as_ref()));
        fs::create_dir_all(at("other")).expect("a directory");
        assert!(snapshot.reserved_path_within(id(&at("other"))).is_none());
    }

    #[test]
    fn the_configuration_directory_is_shared_if_the_daemon_works_in_it() {
        let home = tempfile::tempdir().expect("a directory");
        fs::write(home.path().join("axed.toml"), "").expect("a file");
        let daemon_paths = DaemonPaths {
            config_file: "axed.toml".into(),
            config_dir: ".".into(),
            others: Vec::new(),
        };
        let snapshot = ReservedPaths::new(&daemon_paths, home.path()).snapshot();
        assert!(!snapshot.is_forbidden(id(home.path())));
        assert!(snapshot.is_forbidden(id(&home.path().join("axed.toml"))));
    }
}
