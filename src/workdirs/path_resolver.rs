//! Resolves a path by handle. Links are followed above every base, and none from a base on.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use cap_std::fs::Dir;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, readlinkat, statat};

/// Opens a directory only to pass through it.
#[cfg(target_os = "linux")]
pub const SEARCH: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::PATH);
#[cfg(not(target_os = "linux"))]
pub const SEARCH: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// The kernel's limit.
const MAX_LINKS: usize = 40;
/// The kernel's limit. Every prefix of the path is stored, so this bounds memory.
const MAX_PATH: usize = 4096;

/// Why a path does not lead to a directory.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error("does not exist")]
    NotFound,
    #[error("is not a directory")]
    NotDirectory,
    /// A part of the path within a workdir or a root is a link.
    #[error(
        "contains the link {}, which lies in a workdir or in one of [tools] roots; links are followed above these only, \
         so name the directory itself", .0.display()
    )]
    Link(PathBuf),
    /// The path leads upwards from within a workdir or a root.
    #[error("contains \"..\" below a workdir or one of [tools] roots; name the directory itself")]
    ParentDir,
    #[error("could not be opened: {0}")]
    System(#[from] io::Error),
}

impl From<rustix::io::Errno> for ResolveError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno.into())
    }
}

impl From<ResolveError> for io::Error {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::NotFound => io::ErrorKind::NotFound.into(),
            ResolveError::NotDirectory => io::ErrorKind::NotADirectory.into(),
            ResolveError::System(error) => error,
            ResolveError::Link(_) | ResolveError::ParentDir => {
                io::Error::new(io::ErrorKind::PermissionDenied, error)
            }
        }
    }
}

pub struct ResolvedDir {
    pub dir: Dir,
    /// The path without links.
    pub canonical_path: PathBuf,
    pub is_within_base: bool,
}

enum PathStep {
    Root,
    Up,
    Name(OsString),
    /// The prefix of the original path that the steps before it resolve.
    NamedPrefix(PathBuf),
}

/// Opens the directory that this absolute path leads to.
pub fn resolve_dir(path: &Path, bases: &HashSet<PathBuf>) -> Result<ResolvedDir, ResolveError> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(rustix::io::Errno::NAMETOOLONG.into());
    }
    let mut current = File::from(openat(rustix::fs::CWD, "/", SEARCH, Mode::empty())?);
    let mut canonical_path = PathBuf::from("/");
    let mut steps: VecDeque<PathStep> = VecDeque::new();
    let mut prefix = PathBuf::new();
    for part in path.components() {
        prefix.push(part);
        steps.extend(path_step(part));
        steps.push_back(PathStep::NamedPrefix(prefix.clone()));
    }
    let mut links = 0;
    let mut is_within_base = false;
    while let Some(step) = steps.pop_front() {
        let name = match step {
            PathStep::Root => {
                current = File::from(openat(rustix::fs::CWD, "/", SEARCH, Mode::empty())?);
                canonical_path = PathBuf::from("/");
                continue;
            }
            PathStep::NamedPrefix(prefix) => {
                is_within_base |= bases.contains(&prefix) || bases.contains(&canonical_path);
                continue;
            }
            PathStep::Up if is_within_base => return Err(ResolveError::ParentDir),
            PathStep::Up => {
                current = File::from(openat(&current, "..", SEARCH, Mode::empty())?);
                canonical_path.pop();
                continue;
            }
            PathStep::Name(name) => name,
        };
        let next = canonical_path.join(&name);
        match openat(&current, &name, SEARCH | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(dir) => {
                current = File::from(dir);
                canonical_path = next;
                is_within_base |= bases.contains(&canonical_path);
            }
            Err(rustix::io::Errno::NOENT) => return Err(ResolveError::NotFound),
            Err(error) => {
                let meta = statat(&current, &name, AtFlags::SYMLINK_NOFOLLOW);
                match meta.map(|meta| FileType::from_raw_mode(meta.st_mode)) {
                    Ok(FileType::Symlink) if is_within_base => {
                        return Err(ResolveError::Link(next));
                    }
                    Ok(FileType::Symlink) => {}
                    Ok(FileType::Directory) | Err(_) => return Err(error.into()),
                    Ok(_) => return Err(ResolveError::NotDirectory),
                }
                links += 1;
                if links > MAX_LINKS {
                    return Err(rustix::io::Errno::LOOP.into());
                }
                for step in link_target(&current, &name)?.into_iter().rev() {
                    steps.push_front(step);
                }
            }
        }
    }
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    // A directory that may be entered but not listed can be a workdir, too.
    let dir = openat(&current, ".", flags, Mode::empty()).map_or(current, File::from);
    Ok(ResolvedDir {
        dir: Dir::from_std_file(dir),
        canonical_path,
        is_within_base,
    })
}

/// The steps that a link's target consists of.
fn link_target(dir: &impl AsFd, name: &OsString) -> Result<Vec<PathStep>, ResolveError> {
    use std::os::unix::ffi::OsStringExt as _;

    let target = readlinkat(dir, name, Vec::new())?;
    let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
    Ok(target.components().filter_map(path_step).collect())
}

fn path_step(component: Component<'_>) -> Option<PathStep> {
    match component {
        Component::RootDir => Some(PathStep::Root),
        Component::ParentDir => Some(PathStep::Up),
        Component::Normal(name) => Some(PathStep::Name(name.to_owned())),
        Component::CurDir | Component::Prefix(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};

    use super::{ResolveError, ResolvedDir, resolve_dir};

    fn resolve(path: &Path, bases: &[&Path]) -> Result<ResolvedDir, ResolveError> {
        let bases: HashSet<PathBuf> = bases.iter().map(|base| (*base).to_owned()).collect();
        resolve_dir(path, &bases)
    }

    #[test]
    fn links_are_followed_above_a_base_and_not_below() {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path().canonicalize().expect("a path");
        fs::create_dir_all(home.join("real/base/in")).expect("a directory");
        fs::create_dir(home.join("out")).expect("a directory");
        symlink("./real/../real", home.join("link")).expect("a link");
        symlink("../../out", home.join("real/base/away")).expect("a link");
        symlink("in", home.join("real/base/alias")).expect("a link");
        fs::write(home.join("real/base/file"), "").expect("a file");
        let (link, real) = (home.join("link/base"), home.join("real/base"));
        for bases in [[link.as_path()], [real.as_path()]] {
            for path in [&link, &real] {
                let resolved = resolve(&path.join("in"), &bases).expect("a directory");
                assert_eq!(resolved.canonical_path, home.join("real/base/in"));
                assert!(resolved.dir.entries().expect("entries").next().is_none());
                let error_at = |name: &str| resolve(&path.join(name), &bases).err().expect(name);
                // A base matches by its configured name and by its real path.
                if path == &real && bases[0] == link {
                    continue;
                }
                assert!(matches!(error_at("away"), ResolveError::Link(_)));
                assert!(matches!(error_at("alias"), ResolveError::Link(_)));
                assert!(matches!(error_at("in/../in"), ResolveError::ParentDir));
                assert!(matches!(error_at("none"), ResolveError::NotFound));
                assert!(matches!(error_at("file"), ResolveError::NotDirectory));
            }
        }
        let resolved = resolve(&real.join("away"), &[]).expect("a directory");
        assert_eq!(resolved.canonical_path, home.join("out"));
        symlink("loop", home.join("loop")).expect("a link");
        assert!(matches!(
            resolve(&home.join("loop"), &[]).err(),
            Some(ResolveError::System(_))
        ));
    }
}
