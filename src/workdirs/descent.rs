//! Goes down a path by handle: links are followed above every base, and none from a base on. Knows no run.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use cap_std::fs::Dir;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, readlinkat, statat};

use crate::workdirs::SEARCH;

/// Links that are followed on the way: the kernel's own bound.
const MAX_LINKS: usize = 40;
/// Most bytes of a path: the kernel's own bound. Each part is kept with all before it.
const MAX_PATH: usize = 4096;

/// Why a path does not lead to a directory.
#[derive(Debug, thiserror::Error)]
pub enum DescentError {
    /// There is nothing.
    #[error("does not exist")]
    NotFound,
    /// There is something else.
    #[error("is not a directory")]
    NotDirectory,
    /// A part of the path is a link, and lies in a workdir or a root.
    #[error(
        "has the link {} in it, which lies in a workdir or in one of [tools] roots; links are followed above these only, \
         so name the directory itself", .0.display()
    )]
    Link(PathBuf),
    /// The path leads upwards from within a workdir or a root.
    #[error("has \"..\" in it, below a workdir or one of [tools] roots; name the directory itself")]
    Upwards,
    /// What the system says.
    #[error("could not be opened: {0}")]
    System(#[from] io::Error),
}

impl From<rustix::io::Errno> for DescentError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno.into())
    }
}

/// A directory that a path leads to.
pub struct Reached {
    /// Open.
    pub dir: Dir,
    /// Its path without links.
    pub real: PathBuf,
}

/// One step of the way.
enum Step {
    Root,
    Up,
    Name(OsString),
    /// What was named so far, as it was named.
    Named(PathBuf),
}

/// Opens the directory that this absolute path leads to.
pub fn descend(path: &Path, bases: &HashSet<PathBuf>) -> Result<Reached, DescentError> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(rustix::io::Errno::NAMETOOLONG.into());
    }
    let mut at = File::from(openat(rustix::fs::CWD, "/", SEARCH, Mode::empty())?);
    let mut real = PathBuf::from("/");
    let mut steps: VecDeque<Step> = VecDeque::new();
    let mut named = PathBuf::new();
    for part in path.components() {
        named.push(part);
        steps.extend(step(part));
        steps.push_back(Step::Named(named.clone()));
    }
    let mut links = 0;
    let mut is_within = false;
    while let Some(step) = steps.pop_front() {
        let name = match step {
            Step::Root => {
                at = File::from(openat(rustix::fs::CWD, "/", SEARCH, Mode::empty())?);
                real = PathBuf::from("/");
                continue;
            }
            Step::Named(named) => {
                is_within |= bases.contains(&named) || bases.contains(&real);
                continue;
            }
            Step::Up if is_within => return Err(DescentError::Upwards),
            Step::Up => {
                at = File::from(openat(&at, "..", SEARCH, Mode::empty())?);
                real.pop();
                continue;
            }
            Step::Name(name) => name,
        };
        let next = real.join(&name);
        match openat(&at, &name, SEARCH | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(dir) => {
                at = File::from(dir);
                real = next;
                is_within |= bases.contains(&real);
            }
            Err(rustix::io::Errno::NOENT) => return Err(DescentError::NotFound),
            Err(error) => {
                let meta = statat(&at, &name, AtFlags::SYMLINK_NOFOLLOW);
                match meta.map(|meta| FileType::from_raw_mode(meta.st_mode)) {
                    Ok(FileType::Symlink) if is_within => return Err(DescentError::Link(next)),
                    Ok(FileType::Symlink) => {}
                    Ok(FileType::Directory) | Err(_) => return Err(error.into()),
                    Ok(_) => return Err(DescentError::NotDirectory),
                }
                links += 1;
                if links > MAX_LINKS {
                    return Err(rustix::io::Errno::LOOP.into());
                }
                for step in target(&at, &name)?.into_iter().rev() {
                    steps.push_front(step);
                }
            }
        }
    }
    let read = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    // One that may be entered and not be listed is a workdir, too.
    let dir = openat(&at, ".", read, Mode::empty()).map_or(at, File::from);
    Ok(Reached {
        dir: Dir::from_std_file(dir),
        real,
    })
}

/// The steps of the way that a link goes.
fn target(at: &impl AsFd, name: &OsString) -> Result<Vec<Step>, DescentError> {
    use std::os::unix::ffi::OsStringExt as _;

    let target = readlinkat(at, name, Vec::new())?;
    let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
    Ok(target.components().filter_map(step).collect())
}

fn step(part: Component<'_>) -> Option<Step> {
    match part {
        Component::RootDir => Some(Step::Root),
        Component::ParentDir => Some(Step::Up),
        Component::Normal(name) => Some(Step::Name(name.to_owned())),
        Component::CurDir | Component::Prefix(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};

    use super::{DescentError, Reached, descend};

    fn at(path: &Path, bases: &[&Path]) -> Result<Reached, DescentError> {
        let bases: HashSet<PathBuf> = bases.iter().map(|base| (*base).to_owned()).collect();
        descend(path, &bases)
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
                let reached = at(&path.join("in"), &bases).expect("a directory");
                assert_eq!(reached.real, home.join("real/base/in"));
                assert!(reached.dir.entries().expect("entries").next().is_none());
                let fails = |name: &str| at(&path.join(name), &bases).err().expect(name);
                // A base is known by the name it has in the configuration, and by its real one.
                if path == &real && bases[0] == link {
                    continue;
                }
                assert!(matches!(fails("away"), DescentError::Link(_)));
                assert!(matches!(fails("alias"), DescentError::Link(_)));
                assert!(matches!(fails("in/../in"), DescentError::Upwards));
                assert!(matches!(fails("none"), DescentError::NotFound));
                assert!(matches!(fails("file"), DescentError::NotDirectory));
            }
        }
        let reached = at(&real.join("away"), &[]).expect("a directory");
        assert_eq!(reached.real, home.join("out"));
        symlink("loop", home.join("loop")).expect("a link");
        assert!(matches!(
            at(&home.join("loop"), &[]).err(),
            Some(DescentError::System(_))
        ));
    }
}
