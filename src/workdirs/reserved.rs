//! The daemon's own files and directories, which no tool reaches: configuration, agents, data and scripts. They are told
//! by device and inode, not by comparing paths; what does not exist yet is told by its name in the directory that will
//! hold it. Knows no workdir.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::{fmt, fs, io};

use crate::workdirs::FileId;

/// Links that are followed on the way to one path: the kernel's own bound.
const MAX_LINKS: usize = 40;

/// Where the daemon keeps what is its own.
#[derive(Clone, Debug, Default)]
pub struct OwnPaths {
    /// The configuration file, also where there is none yet.
    pub config_file: PathBuf,
    /// Its directory.
    pub config_dir: PathBuf,
    /// Agents, data, and files or directories of scripts.
    pub others: Vec<PathBuf>,
}

/// The daemon's own paths, absolute.
#[derive(Debug, Default)]
pub struct Reserved {
    paths: Vec<PathBuf>,
    /// The configuration's directory: reserved against entering it from above. Unset where the daemon itself works in it.
    config_dir: Option<PathBuf>,
}

impl Reserved {
    /// For a daemon that works in the directory `cwd`.
    pub fn new(own: &OwnPaths, cwd: &Path) -> Self {
        let config_dir = cwd.join(&own.config_dir);
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let is_shared = real(cwd).starts_with(real(&config_dir));
        let fixed = [cwd.join(&own.config_file), config_dir.join("skills")];
        let others = own.others.iter().map(|path| cwd.join(path));
        Self {
            paths: fixed.into_iter().chain(others).collect(),
            config_dir: (!is_shared).then_some(config_dir),
        }
    }

    /// Of these paths and nothing else.
    pub fn of(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            config_dir: None,
        }
    }

    /// All of them.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.paths.iter().chain(&self.config_dir).cloned().collect()
    }

    /// What the paths lead to now. Blocking I/O: a look at each directory on the way to each path.
    pub fn now(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for path in &self.paths {
            if let Some(id) = snapshot.trace(path) {
                snapshot.reserved.insert(id, path.clone());
            }
        }
        if let Some(path) = &self.config_dir
            && let Some(id) = snapshot.trace(path)
        {
            snapshot.config_dir = Some((id, path.clone()));
        }
        snapshot
    }
}

/// What the daemon's own paths lead to at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    reserved: HashMap<FileId, PathBuf>,
    config_dir: Option<(FileId, PathBuf)>,
    /// Directories and links on the way to them, each with one of the paths that it is on the way to.
    above: HashMap<FileId, PathBuf>,
    /// What does not exist yet: the directory that is there, and the name in it.
    absent: Vec<(FileId, OsString)>,
}

/// Why something is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is one of the daemon's own files or directories, or lies in one.
    Own,
    /// It contains one.
    Contains,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => {
                "out of reach for every tool: the file or directory belongs to the daemon (configuration, agents, \
                 scripts or data)"
            }
            Self::Contains => {
                "not to be moved, copied or deleted: it contains a directory that belongs to the daemon \
                 (configuration, agents, scripts or data)"
            }
        })
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        io::Error::new(io::ErrorKind::PermissionDenied, refused)
    }
}

impl Refused {
    /// The one that this error is made of.
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl Snapshot {
    /// Whether this is one of the daemon's own, wherever it is come upon from: all but the configuration's directory.
    pub fn is_reserved(&self, id: FileId) -> bool {
        self.reserved.contains_key(&id)
    }

    /// Whether nobody may enter this directory, or use this file.
    pub fn is_barred(&self, id: FileId) -> bool {
        self.is_reserved(id) || self.config_dir.as_ref().is_some_and(|(of, _)| *of == id)
    }

    /// The daemon's own path that this is, or that is somewhere in this directory.
    pub fn contained(&self, id: FileId) -> Option<&PathBuf> {
        let config = self.config_dir.as_ref().filter(|(of, _)| *of == id);
        self.reserved
            .get(&id)
            .or(config.map(|(_, path)| path))
            .or_else(|| self.above.get(&id))
    }

    /// Whether this name in this directory would become one of the daemon's own.
    pub fn is_to_be(&self, dir: FileId, name: &OsStr) -> bool {
        let mut absent = self.absent.iter();
        // Some file systems know no capitals.
        absent.any(|(of, it)| *of == dir && it.eq_ignore_ascii_case(name))
    }

    /// Whether something of the daemon's own may be come upon somewhere below this directory.
    pub fn is_above(&self, id: FileId) -> bool {
        self.above.contains_key(&id)
    }

    /// Goes the way of this absolute path as the kernel does, and remembers every directory and link on it. Returns what
    /// it leads to, where that exists.
    fn trace(&mut self, path: &Path) -> Option<FileId> {
        let mut current = PathBuf::from("/");
        let mut last = FileId::of_std(&fs::symlink_metadata(&current).ok()?);
        let mut rest: VecDeque<OsString> = parts(path).collect();
        let mut links = 0;
        while let Some(part) = rest.pop_front() {
            self.above.entry(last).or_insert_with(|| path.to_owned());
            if part == "/" {
                current = PathBuf::from("/");
            } else if part == ".." {
                current.pop();
            } else {
                let next = current.join(&part);
                let Ok(meta) = fs::symlink_metadata(&next) else {
                    self.absent.push((last, part));
                    return None;
                };
                if meta.is_symlink() {
                    links += 1;
                    let target = fs::read_link(&next).ok().filter(|_| links <= MAX_LINKS)?;
                    let link = FileId::of_std(&meta);
                    self.above.entry(link).or_insert_with(|| path.to_owned());
                    for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
                        rest.push_front(part);
                    }
                    continue;
                }
                current = next;
                last = FileId::of_std(&meta);
                continue;
            }
            last = FileId::of_std(&fs::symlink_metadata(&current).ok()?);
        }
        Some(last)
    }
}

/// The parts of a path, a root as `/`.
fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::CurDir | Component::Prefix(_) => None,
        other => Some(other.as_os_str().to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::{OwnPaths, Reserved};
    use crate::workdirs::FileId;

    fn id(path: &Path) -> FileId {
        FileId::of_std(&fs::symlink_metadata(path).expect("it"))
    }

    #[test]
    fn what_is_the_daemons_own_is_told_by_inode() {
        let home = tempfile::tempdir().expect("a directory");
        let at = |path: &str| home.path().join(path);
        fs::create_dir_all(at("real/agents")).expect("a directory");
        fs::create_dir(at("config")).expect("a directory");
        symlink("real", at("link")).expect("a link");
        let own = OwnPaths {
            config_file: "config/axed.toml".into(),
            config_dir: "config".into(),
            others: vec!["link/agents".into(), "data/deep".into()],
        };
        let now = Reserved::new(&own, home.path()).now();
        assert!(now.is_reserved(id(&at("real/agents"))));
        // Entered from above it is not, but a workdir may lie below it.
        assert!(now.is_barred(id(&at("config"))) && !now.is_reserved(id(&at("config"))));
        for above in ["link", "real", "config", ""] {
            assert!(now.contained(id(&at(above))).is_some(), "{above}");
        }
        assert!(now.is_to_be(id(home.path()), "data".as_ref()));
        assert!(now.is_to_be(id(&at("config")), "axed.toml".as_ref()));
        assert!(now.is_to_be(id(&at("config")), "skills".as_ref()));
        assert!(!now.is_to_be(id(home.path()), "deep".as_ref()));
        fs::create_dir_all(at("other")).expect("a directory");
        assert!(now.contained(id(&at("other"))).is_none());
    }

    #[test]
    fn a_daemon_that_works_in_its_configurations_directory_shares_it() {
        let home = tempfile::tempdir().expect("a directory");
        fs::write(home.path().join("axed.toml"), "").expect("a file");
        let own = OwnPaths {
            config_file: "axed.toml".into(),
            config_dir: ".".into(),
            others: Vec::new(),
        };
        let now = Reserved::new(&own, home.path()).now();
        assert!(!now.is_barred(id(home.path())));
        assert!(now.is_barred(id(&home.path().join("axed.toml"))));
    }
}
