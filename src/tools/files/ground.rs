//! What every file tool stands on: access to the workdir, the sign to stop, paths as models write them, regular files
//! opened without waiting, and errors in words. Knows no tool.

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, File, FileTypeExt, Metadata, MetadataExt};

use crate::config::AttachmentLimits;
use crate::fair::turns::Turns;
use crate::workdirs::access::{Access, above};
use crate::workdirs::reserved::Refused;

/// Most bytes of a path that a model gives: the kernel's own bound.
const MOST_PATH: usize = 4096;
/// Bytes of a result that are kept free for a notice.
const NOTICE: usize = 512;
/// The error of a call that nobody waits for.
const CANCELLED: &str = "stopped";
/// Searches at work at once, or as many as there are processors. More wait for their turn, by key.
const SEARCHES_AT_ONCE: usize = 4;
/// A file whose first bytes have a NUL is no text.
const LOOKED_AT: usize = 8 << 10;

/// What one call works on.
pub struct Ground {
    /// The workdir.
    pub access: Access,
    /// Whether to go on.
    pub stop: Stop,
    /// What all calls share.
    pub shared: Arc<Shared>,
}

/// What the calls of all runs share.
pub struct Shared {
    max_result: usize,
    /// Most bytes of a picture that is shown.
    pub max_picture: usize,
    /// Who replaces a file holds the lock that it falls on, so that two edits of one reply do not lose one of them.
    locks: [Mutex<()>; 64],
    /// Threads that may still be started to search beside the first one of a call.
    helpers: AtomicUsize,
    /// Searches at work.
    pub searches: Turns,
}

impl Shared {
    /// For results of at most so many bytes, with pictures within these limits. These keys share the turns to search.
    pub fn new(max_result: usize, limits: AttachmentLimits, keys: &[String]) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_result,
            max_picture: limits.bytes,
            locks: std::array::from_fn(|_| Mutex::new(())),
            helpers: AtomicUsize::new(cores.saturating_sub(1).min(8)),
            searches: Turns::new(SEARCHES_AT_ONCE.max(cores), keys),
        }
    }

    /// Takes as many helpers as are free; they are given back with [`Shared::return_helpers`].
    pub fn take_helpers(&self) -> usize {
        self.helpers.swap(0, Ordering::Relaxed)
    }

    /// Gives them back.
    pub fn return_helpers(&self, count: usize) {
        self.helpers.fetch_add(count, Ordering::Relaxed);
    }
}

impl Ground {
    /// How many bytes a tool may fill itself; a notice still fits behind them.
    pub fn room(&self) -> usize {
        self.shared.max_result.saturating_sub(NOTICE)
    }

    /// Opens a regular file for reading; a link is followed within the workdir.
    ///
    /// # Errors
    /// Why not, for the model.
    pub fn open(&self, path: &Path) -> Result<(File, Metadata), String> {
        let opened = self.access.locate(path);
        let opened = opened.and_then(|(dir, name)| self.open_regular(&dir, Path::new(&name)));
        match opened.map_err(|error| told(path, &error))? {
            Opened::File(file, meta) => Ok((file, meta)),
            Opened::Other(meta) => Err(is_no_file(path, &meta)),
        }
    }

    /// The open directory that a path's last name stands in, and that name.
    ///
    /// # Errors
    /// Why not, for the model.
    pub fn parent(&self, path: &Path) -> Result<(Dir, OsString), String> {
        if path.file_name().is_none() {
            return Err("this is the workdir itself; name something in it".to_owned());
        }
        let found = self.access.parent(path);
        found.map_err(|error| told(above(path), &error))
    }

    /// As [`Ground::parent`], for something new: makes the directories above it.
    ///
    /// # Errors
    /// Why nothing can be made there, for the model.
    pub fn new_entry(&self, path: &Path) -> Result<(Dir, OsString), String> {
        let Some(name) = path.file_name() else {
            return Err("this is the workdir itself; name something in it".to_owned());
        };
        let made = self.access.make_dir(above(path));
        let dir = made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
                format!("{} exists and is not a directory", above(path).display())
            }
            _ => told(above(path), &error),
        })?;
        let may_be = self.access.check_new(&dir, name);
        may_be.map_err(|error| told(path, &error))?;
        Ok((dir, name.to_owned()))
    }

    /// Opens a regular file and nothing else, not following a link: neither a FIFO nor a device is waited for or read, also
    /// where one is put in the file's place meanwhile.
    ///
    /// # Errors
    /// What the system says, or that it is the daemon's.
    pub fn open_regular(&self, dir: &Dir, name: &Path) -> io::Result<Opened> {
        // Some devices do something when they are opened, so they are looked at first. The handle has the last word.
        let before = self.access.entry(dir, name.as_os_str())?;
        match before.is_file() {
            true => self.open_listed(dir, name),
            false => Ok(Opened::Other(before)),
        }
    }

    /// As [`Ground::open_regular`], for what a listing has just called a regular file.
    ///
    /// # Errors
    /// What the system says, or that it is the daemon's.
    pub fn open_listed(&self, dir: &Dir, name: &Path) -> io::Result<Opened> {
        let (file, meta) = self.access.open_in(dir, name)?;
        Ok(match meta.is_file() {
            true => Opened::File(file, meta),
            false => Opened::Other(meta),
        })
    }

    /// Keeps other calls from replacing this file meanwhile.
    pub fn lock(&self, dir: &Dir, name: &OsStr) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        if let Ok(meta) = dir.dir_metadata() {
            (meta.dev(), meta.ino()).hash(&mut hasher);
        }
        name.hash(&mut hasher);
        let locks = &self.shared.locks;
        let at = usize::try_from(hasher.finish() % 64).unwrap_or_default();
        locks[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a call has to end: nobody waits for it any more, or its time is up.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    signs: Arc<Signs>,
    /// When its time is up, and how many seconds that is; none if nothing but the run bounds it.
    limit: Option<(Instant, u64)>,
}

#[derive(Debug, Default)]
struct Signs {
    cancelled: AtomicBool,
    /// Set when somebody finds that the time is up: a call that ended just before has all its results.
    overdue: AtomicBool,
}

impl Stop {
    /// The same, with a time limit that begins now.
    pub fn within(&self, limit: Duration) -> Self {
        Self {
            signs: Arc::clone(&self.signs),
            limit: Some((Instant::now() + limit, limit.as_secs())),
        }
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> io::Result<()> {
        if !self.is_set() {
            return Ok(());
        }
        Err(io::Error::other(match self.overdue() {
            Some(seconds) => format!("stopped, as it takes longer than {seconds} seconds"),
            None => CANCELLED.to_owned(),
        }))
    }

    /// Whether somebody still waits, however late it is.
    ///
    /// # Errors
    /// That nobody does.
    pub fn check_cancelled(&self) -> Result<(), String> {
        match self.signs.cancelled.load(Ordering::Relaxed) {
            true => Err(CANCELLED.to_owned()),
            false => Ok(()),
        }
    }

    /// Whether the call has to end.
    pub fn is_set(&self) -> bool {
        let is_late = || self.limit.is_some_and(|(end, _)| Instant::now() >= end);
        if self.signs.cancelled.load(Ordering::Relaxed) {
            return true;
        }
        if self.overdue().is_none() && is_late() {
            self.signs.overdue.store(true, Ordering::Relaxed);
        }
        self.overdue().is_some()
    }

    /// How many seconds the call had, if it was found to need more.
    pub fn overdue(&self) -> Option<u64> {
        let (_, seconds) = self.limit?;
        let is_overdue = self.signs.overdue.load(Ordering::Relaxed);
        is_overdue.then_some(seconds)
    }

    /// What sets it when it is dropped.
    pub fn set_on_drop(&self) -> impl Drop + use<> {
        struct Set(Arc<Signs>);
        impl Drop for Set {
            fn drop(&mut self) {
                self.0.cancelled.store(true, Ordering::Relaxed);
            }
        }
        Set(Arc::clone(&self.signs))
    }

    /// A reader that fails once the call has to end.
    pub fn reading<R: Read>(&self, from: R) -> impl Read + use<R> {
        struct Until<R>(R, Stop);
        impl<R: Read> Read for Until<R> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.1.check()?;
                self.0.read(buffer)
            }
        }
        Until(from, self.clone())
    }
}

/// A path as a model writes it, as one below the workdir; `.` for the workdir itself. The handle confines, not this: it
/// only makes one writing of each path and says early and in words what is not allowed.
///
/// # Errors
/// What is wrong with it, for the model.
pub fn place(text: &str) -> Result<PathBuf, String> {
    let shown = crate::domain::message::shorten(text, 200);
    if text.is_empty() {
        return Err("the path is empty; \".\" is the workdir".to_owned());
    }
    if text.len() > MOST_PATH || text.contains('\0') {
        return Err(format!("{shown:?} is no path: too long, or a NUL in it"));
    }
    let mut path = PathBuf::new();
    for component in Path::new(text).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir if path.pop() => {}
            Component::ParentDir => return Err(format!("{shown} leads out of the workdir")),
            Component::RootDir | Component::Prefix(_) => {
                return Err(format!(
                    "{shown} is an absolute path; give it relative to the workdir, which is \".\""
                ));
            }
        }
    }
    match path.as_os_str().is_empty() {
        true => Ok(PathBuf::from(".")),
        false => Ok(path),
    }
}

/// What stands at a path.
pub enum Opened {
    /// A regular file, open for reading.
    File(File, Metadata),
    /// Something else, not open.
    Other(Metadata),
}

/// Whether these first bytes of a file are none of a text.
pub fn is_binary(start: &[u8]) -> bool {
    start.iter().take(LOOKED_AT).any(|byte| *byte == 0)
}

/// Says what stands there instead of a regular file.
pub fn is_no_file(path: &Path, meta: &Metadata) -> String {
    let kind = meta.file_type();
    let what = if kind.is_dir() {
        "a directory; list_directory shows what is in it"
    } else if kind.is_fifo() {
        "a named pipe, not a regular file"
    } else if kind.is_socket() {
        "a socket, not a regular file"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device, not a regular file"
    } else {
        "not a regular file"
    };
    format!("{} is {what}", path.display())
}

/// An error of the system's about a path, in words for the model.
pub fn told(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if let Some(refused) = Refused::of(error) {
        return format!("{path} is {refused}");
    }
    match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{path} does not exist; find_path and list_directory show what does")
        }
        // cap-std's own error, which has no number of the system's.
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
            format!("{path} leads out of the workdir through a link, which is not allowed")
        }
        io::ErrorKind::PermissionDenied => format!("{path}: permission denied"),
        io::ErrorKind::NotADirectory => format!("{path}: a part of it is not a directory"),
        _ => format!("{path}: {error}"),
    }
}

/// A name or path as a line of a result shows it: on one line whatever is in it.
pub fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.chars().any(char::is_control) {
        true => text.replace(char::is_control, "?"),
        false => text.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{place, shown};

    #[test]
    fn a_path_is_written_in_one_way() {
        for (text, path) in [
            (".", "."),
            ("./a//b/", "a/b"),
            ("a/../b", "b"),
            ("a/..", "."),
        ] {
            assert_eq!(place(text).expect(text), Path::new(path));
        }
    }

    #[test]
    fn what_leads_out_is_refused_in_words() {
        for (text, why) in [
            ("..", "leads out"),
            ("a/../../b", "leads out"),
            ("/etc/passwd", "is an absolute path"),
            ("", "is empty"),
            ("a\0b", "NUL"),
        ] {
            let error = place(text).expect_err(text);
            assert!(error.contains(why), "{error}");
        }
        assert!(place(&"x/".repeat(3000)).is_err());
    }

    #[test]
    fn a_name_stays_on_its_line() {
        assert_eq!(shown(Path::new("a\nb/c\u{1b}")), "a?b/c?");
    }
}
