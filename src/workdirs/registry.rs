//! Opens workdirs below the configured roots, without following links within them. Runs of the same directory share one
//! handle.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File};
use rustix::fs::{Mode, OFlags, openat};

use crate::workdirs::file_id::{FileId, KnownDir};
use crate::workdirs::handle::WorkdirHandle;
use crate::workdirs::path_resolver::{ResolveError, ResolvedDir, resolve_dir};
use crate::workdirs::reserved::{ReservedError, ReservedPaths};
use crate::workdirs::workdir::Workdir;

/// Closed workdirs are removed from the map once it has this many entries.
const SWEEP_THRESHOLD: usize = 64;

/// The open workdirs and the configured roots.
#[derive(Debug)]
pub struct Workdirs {
    /// The daemon's working directory.
    cwd: PathBuf,
    /// Requests may name directories below these.
    roots: Vec<PathBuf>,
    reserved: Arc<ReservedPaths>,
    bases: Mutex<Bases>,
    open_dirs: Mutex<OpenDirs>,
}

/// Directories in which no link is followed: the roots and the agents' workdirs.
#[derive(Debug, Default)]
struct Bases {
    /// The generation of the agent catalog that the paths come from.
    generation: Option<u64>,
    paths: Arc<HashSet<PathBuf>>,
}

#[derive(Debug, Default)]
struct OpenDirs {
    dirs: HashMap<FileId, Weak<Workdir>>,
    next_sweep_at: usize,
}

/// Why a directory is not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error(
        "lies in a directory that belongs to the daemon (configuration, agents, datasets, scripts or data); name another one"
    )]
    Reserved,
    #[error(
        "is not the directory that it was when the run was accepted; start a new run if that is intended"
    )]
    Changed,
    #[error("is outside the server's [tools] roots")]
    OutsideRoots,
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        match ReservedError::from_io_error(&error) {
            Some(ReservedError::Reserved | ReservedError::ContainsReserved) => Self::Reserved,
            Some(ReservedError::Procfs) | None => Self::Resolve(error.into()),
        }
    }
}

impl Workdirs {
    /// Requests may name directories below `roots`. Relative paths start at `cwd`.
    pub fn new(cwd: PathBuf, roots: &[PathBuf], reserved: ReservedPaths) -> Self {
        Self {
            roots: roots
                .iter()
                .map(|root| normalize(&cwd.join(root)))
                .collect(),
            cwd,
            reserved: Arc::new(reserved),
            bases: Mutex::default(),
            open_dirs: Mutex::default(),
        }
    }

    pub fn reserved(&self) -> &Arc<ReservedPaths> {
        &self.reserved
    }

    /// Sets the agents' workdirs, unless those of this generation or a later one are set. `None` is the daemon's
    /// working directory.
    pub fn update_agent_workdirs<'a>(
        &self,
        generation: u64,
        agent_workdirs: impl FnOnce() -> Vec<Option<&'a Path>>,
    ) {
        let mut bases = lock(&self.bases);
        if bases.generation.is_some_and(|of| of >= generation) {
            return;
        }
        *bases = Bases {
            generation: Some(generation),
            paths: Arc::new(self.base_paths(&bases.paths, agent_workdirs().into_iter())),
        };
    }

    /// A copy for one check, in which the agents have these workdirs. It shares no open directories.
    pub fn with_agent_workdirs<'a>(
        &self,
        agent_workdirs: impl Iterator<Item = Option<&'a Path>>,
    ) -> Self {
        let paths = self.base_paths(&self.bases(), agent_workdirs);
        let bases = Bases {
            generation: None,
            paths: Arc::new(paths),
        };
        Self {
            cwd: self.cwd.clone(),
            roots: self.roots.clone(),
            reserved: Arc::clone(&self.reserved),
            bases: Mutex::new(bases),
            open_dirs: Mutex::default(),
        }
    }

    /// The roots and the agents' workdirs, also by their paths without links. Runs may still have `earlier` ones of agents
    /// that are gone.
    fn base_paths<'a>(
        &self,
        earlier: &HashSet<PathBuf>,
        agent_workdirs: impl Iterator<Item = Option<&'a Path>>,
    ) -> HashSet<PathBuf> {
        let base_paths = agent_workdirs.map(|path| self.absolute(path));
        let base_paths = base_paths.chain(earlier.iter().cloned());
        let base_paths: HashSet<PathBuf> = base_paths.chain(self.roots.iter().cloned()).collect();
        let mut paths = base_paths.clone();
        let mut by_depth: Vec<PathBuf> = base_paths.into_iter().collect();
        by_depth.sort_by_key(|path| path.components().count());
        for path in by_depth {
            if let Ok(resolved) = resolve_dir(&path, &paths) {
                paths.insert(resolved.canonical_path);
            }
        }
        paths
    }

    /// Opens a configured workdir; `None` is the daemon's working directory. If `expected` is given, the directory must
    /// be that one. Blocking I/O.
    pub fn open(
        &self,
        configured: Option<&Path>,
        expected: Option<KnownDir>,
    ) -> Result<Arc<Workdir>, OpenError> {
        let dir = self.resolve(&self.absolute(configured))?.dir;
        self.open_resolved(dir, expected)
    }

    /// Opens a directory at a path from [`Workdirs::resolve_below_roots`], without following links below the root.
    /// Blocking I/O.
    pub fn open_requested(&self, path: &Path) -> Result<Arc<Workdir>, OpenError> {
        let resolved = self.resolve(&self.absolute(Some(path)))?;
        // Links were followed on the whole path if no root or workdir is on it any more.
        if !resolved.is_within_base {
            return Err(OpenError::OutsideRoots);
        }
        self.open_resolved(resolved.dir, None)
    }

    fn resolve(&self, path: &Path) -> Result<ResolvedDir, ResolveError> {
        let resolved = resolve_dir(path, &self.bases())?;
        self.add_canonical_base(path, &resolved.canonical_path);
        Ok(resolved)
    }

    fn open_resolved(
        &self,
        dir: Dir,
        expected: Option<KnownDir>,
    ) -> Result<Arc<Workdir>, OpenError> {
        let opened = Workdir::new(dir, &self.reserved)?;
        if expected.is_some_and(|known| !known.is(opened.id)) {
            return Err(OpenError::Changed);
        }
        let mut open_dirs = lock(&self.open_dirs);
        if let Some(shared) = open_dirs.dirs.get(&opened.id).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        if open_dirs.dirs.len() >= open_dirs.next_sweep_at.max(SWEEP_THRESHOLD) {
            open_dirs.dirs.retain(|_, dir| dir.strong_count() > 0);
            open_dirs.next_sweep_at = open_dirs.dirs.len() * 2;
        }
        let opened = Arc::new(opened);
        open_dirs.dirs.insert(opened.id, Arc::downgrade(&opened));
        Ok(opened)
    }

    /// A workdir or a root that did not exist when the agents were loaded, or whose links have changed since, is a base
    /// by its path without links, too.
    fn add_canonical_base(&self, path: &Path, canonical_path: &Path) {
        let mut bases = lock(&self.bases);
        if bases.paths.contains(path) && !bases.paths.contains(canonical_path) {
            Arc::make_mut(&mut bases.paths).insert(canonical_path.to_owned());
        }
    }

    /// Opens the directory of a skill that the operator names. Links in the configuration's directory are followed, where no tool
    /// makes them. Blocking I/O.
    pub fn open_skill_dir(&self, path: &Path) -> Result<Dir, ResolveError> {
        let path = self.absolute(Some(path));
        match self.is_in_operator_dir(&path) {
            true => Ok(Dir::open_ambient_dir(path, ambient_authority())?),
            false => Ok(self.resolve_skill_dir(&path)?.dir),
        }
    }

    /// Opens the file of a skill that the operator names, as [`Workdirs::open_skill_dir`] does. Blocking I/O.
    ///
    /// # Errors
    /// The system's error, or a sentence in it.
    pub fn open_skill_file(&self, path: &Path) -> io::Result<std::fs::File> {
        let path = self.absolute(Some(path));
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = match self.is_in_operator_dir(&path) {
            true => openat(rustix::fs::CWD, &path, flags, Mode::empty()),
            false => {
                let parent = self.resolve_skill_dir(parent)?;
                let no_link = match parent.is_within_base {
                    true => OFlags::NOFOLLOW,
                    false => OFlags::empty(),
                };
                openat(&parent.dir, name, flags | no_link, Mode::empty())
            }
        };
        let file = std::fs::File::from(opened.map_err(|error| match error {
            rustix::io::Errno::LOOP => ResolveError::Link(path.clone()).into(),
            error => io::Error::from(error),
        })?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is not a file")),
        }
    }

    /// Within a base no link is followed, so `..` there means what it says.
    fn resolve_skill_dir(&self, path: &Path) -> Result<ResolvedDir, ResolveError> {
        let bases = self.bases();
        match resolve_dir(path, &bases) {
            Err(ResolveError::ParentDir) => resolve_dir(&normalize(path), &bases),
            resolved => resolved,
        }
    }

    fn is_in_operator_dir(&self, path: &Path) -> bool {
        let path = normalize(path);
        let Some(dir) = self
            .reserved
            .operator_dir()
            .filter(|dir| path.starts_with(dir))
        else {
            return false;
        };
        let bases = self.bases();
        let mut workdirs = bases.iter().filter(|base| base.starts_with(dir));
        !workdirs.any(|base| path.starts_with(base))
    }

    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// Returns the path that a request names and the root that it is below, if there is one.
    pub fn resolve_below_roots(&self, path: &Path) -> Option<(PathBuf, &Path)> {
        let path = normalize(&self.cwd.join(path));
        let is_below = |root: &&PathBuf| {
            path.starts_with(root)
                || self
                    .resolve(root)
                    .is_ok_and(|resolved| path.starts_with(resolved.canonical_path))
        };
        let root = self.roots.iter().find(is_below)?;
        Some((path, root))
    }

    pub fn has_roots(&self) -> bool {
        !self.roots.is_empty()
    }

    /// Opens the regular file at a path from [`Workdirs::resolve_below_roots`], without following links below the root.
    /// Blocking I/O.
    pub fn open_file(&self, path: &Path) -> Result<File, OpenError> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(ResolveError::NotFound.into());
        };
        let dir = self.open_requested(parent)?;
        let result = WorkdirHandle::new(dir).open_regular(Path::new(name));
        match result {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(io::Error::other("it is not a regular file").into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ResolveError::NotFound.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn bases(&self) -> Arc<HashSet<PathBuf>> {
        Arc::clone(&lock(&self.bases).paths)
    }

    fn absolute(&self, configured: Option<&Path>) -> PathBuf {
        let path = configured.map_or_else(|| self.cwd.clone(), |path| self.cwd.join(path));
        path.components().collect()
    }
}

/// Removes `.` and `..` without looking at the file system.
fn normalize(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(normalized.pop()),
            Component::CurDir => {}
            other => normalized.push(other),
        }
    }
    normalized
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::{OpenError, Workdirs};
    use crate::workdirs::path_resolver::ResolveError;
    use crate::workdirs::reserved::ReservedPaths;

    #[test]
    fn no_link_below_a_root_is_followed_after_the_roots_own_link_has_changed() {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path().canonicalize().expect("a path");
        for name in ["rel1/work", "rel2/work", "out"] {
            fs::create_dir_all(home.join(name)).expect("a directory");
        }
        fs::write(home.join("out/a.md"), "a").expect("a file");
        symlink("../../out", home.join("rel2/work/evil")).expect("a link");
        let current = home.join("current");
        symlink("rel1", &current).expect("a link");
        let roots = [current.clone()];
        let workdirs = Workdirs::new(home.clone(), &roots, ReservedPaths::default());
        workdirs.update_agent_workdirs(1, Vec::new);
        fs::remove_file(&current).expect("the old link is removed");
        symlink("rel2", &current).expect("a link");

        for root in ["rel2", "current"] {
            let work = home.join(root).join("work");
            let (path, _) = workdirs.resolve_below_roots(&work).expect("a root");
            assert!(workdirs.open_requested(&path).is_ok(), "{root}");
            let evil = work.join("evil");
            let (path, _) = workdirs.resolve_below_roots(&evil).expect("a root");
            for error in [
                workdirs.open_requested(&path).map(drop).expect_err(root),
                workdirs
                    .open_file(&path.join("a.md"))
                    .map(drop)
                    .expect_err(root),
            ] {
                let is_link = matches!(error, OpenError::Resolve(ResolveError::Link(_)));
                assert!(is_link, "{root}: {error}");
            }
        }
        assert!(workdirs.resolve_below_roots(&home.join("out")).is_none());
        let error = workdirs.open_requested(&home.join("out")).map(drop);
        assert!(matches!(error, Err(OpenError::OutsideRoots)));
    }
}
