//! Opens the directories that runs work in: beneath what the operator names, following no link within, each one once for
//! all runs that work in it. Knows no run.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cap_std::fs::File;

use crate::workdirs::access::Access;
use crate::workdirs::descent::{DescentError, descend};
use crate::workdirs::reserved::{Refused, Reserved};
use crate::workdirs::{FileId, Workdir};

/// From this many directories on those that nobody works in any more are forgotten.
const SWEPT_FROM: usize = 64;

/// The open directories, and what the operator names.
#[derive(Debug)]
pub struct Workdirs {
    /// Where the daemon works.
    cwd: PathBuf,
    /// Where requests may point.
    roots: Vec<PathBuf>,
    reserved: Arc<Reserved>,
    bases: Mutex<Bases>,
    open: Mutex<Open>,
}

/// Directories in which no link is followed: the roots and the workdirs that agents name.
#[derive(Debug, Default)]
struct Bases {
    /// Of which snapshot of the agents.
    of: Option<u64>,
    paths: Arc<HashSet<PathBuf>>,
}

#[derive(Debug, Default)]
struct Open {
    dirs: HashMap<FileId, Weak<Workdir>>,
    swept_at: usize,
}

/// Why a directory is not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its path does not lead there.
    #[error(transparent)]
    Descent(#[from] DescentError),
    /// It belongs to the daemon.
    #[error(
        "lies in a directory that belongs to the daemon (configuration, agents, scripts or data); name another one"
    )]
    Reserved,
    /// It is not the one that it was.
    #[error(
        "is another directory than when the run was accepted; start the run again if that is meant to be"
    )]
    Changed,
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        match Refused::of(&error) {
            Some(_) => Self::Reserved,
            None => Self::Descent(error.into()),
        }
    }
}

impl Workdirs {
    /// For a daemon that works in `cwd`; requests may point below `roots`.
    pub fn new(cwd: PathBuf, roots: &[PathBuf], reserved: Reserved) -> Self {
        Self {
            roots: roots.iter().map(|root| plain(&cwd.join(root))).collect(),
            cwd,
            reserved: Arc::new(reserved),
            bases: Mutex::default(),
            open: Mutex::default(),
        }
    }

    /// The daemon's own files.
    pub fn reserved(&self) -> &Arc<Reserved> {
        &self.reserved
    }

    /// Takes the workdirs that agents name, none standing for the daemon's own directory, unless those of this snapshot
    /// or a later one are known.
    pub fn follow<'a>(&self, snapshot: u64, named: impl FnOnce() -> Vec<Option<&'a Path>>) {
        let mut bases = lock(&self.bases);
        if bases.of.is_some_and(|of| of >= snapshot) {
            return;
        }
        let named = named().into_iter().map(|path| self.absolute(path));
        let named: HashSet<PathBuf> = named.chain(self.roots.iter().cloned()).collect();
        let mut paths = named.clone();
        let mut from_the_top: Vec<PathBuf> = named.into_iter().collect();
        from_the_top.sort_by_key(|path| path.components().count());
        for path in from_the_top {
            if let Ok(reached) = descend(&path, &paths) {
                paths.insert(reached.real);
            }
        }
        *bases = Bases {
            of: Some(snapshot),
            paths: Arc::new(paths),
        };
    }

    /// Opens a workdir as it is named, none for the daemon's own directory; one that was opened before under `known` only
    /// if it is still the same. Blocking I/O.
    pub fn open(
        &self,
        named: Option<&Path>,
        known: Option<FileId>,
    ) -> Result<Arc<Workdir>, OpenError> {
        let path = self.absolute(named);
        let reached = descend(&path, &self.bases())?;
        let opened = Workdir::new(reached.dir, &self.reserved)?;
        if known.is_some_and(|known| known != opened.id) {
            return Err(OpenError::Changed);
        }
        let mut open = lock(&self.open);
        if let Some(shared) = open.dirs.get(&opened.id).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        if open.dirs.len() >= open.swept_at.max(SWEPT_FROM) {
            open.dirs.retain(|_, dir| dir.strong_count() > 0);
            open.swept_at = open.dirs.len() * 2;
        }
        let opened = Arc::new(opened);
        open.dirs.insert(opened.id, Arc::downgrade(&opened));
        Ok(opened)
    }

    /// The path that a request names, where it lies below a root; none elsewhere.
    pub fn below_roots(&self, path: &Path) -> Option<PathBuf> {
        let path = plain(&self.cwd.join(path));
        let bases = self.bases();
        let is_below = |root: &&PathBuf| {
            path.starts_with(root)
                || descend(root, &bases).is_ok_and(|root| path.starts_with(root.real))
        };
        self.roots.iter().find(is_below)?;
        Some(path)
    }

    /// Whether a request may point anywhere.
    pub fn has_roots(&self) -> bool {
        !self.roots.is_empty()
    }

    /// Opens the regular file that a request names by a path of [`Workdirs::below_roots`], following no link below the
    /// root. Blocking I/O.
    pub fn open_file(&self, path: &Path) -> Result<File, OpenError> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(DescentError::NotFound.into());
        };
        let dir = self.open(Some(above), None)?;
        let opened = Access::new(dir).open_plain(Path::new(name));
        match opened {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(io::Error::other("it is not a regular file").into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(DescentError::NotFound.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn bases(&self) -> Arc<HashSet<PathBuf>> {
        Arc::clone(&lock(&self.bases).paths)
    }

    fn absolute(&self, named: Option<&Path>) -> PathBuf {
        let path = named.map_or_else(|| self.cwd.clone(), |path| self.cwd.join(path));
        path.components().collect()
    }
}

/// A path without `.` and `..`, as it is written.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
