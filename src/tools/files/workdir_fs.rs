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
use crate::fair::fair_semaphore::FairSemaphore;
use crate::workdirs::handle::{WorkdirHandle, parent_or_dot};
use crate::workdirs::reserved::ReservedError;

/// Most bytes of a path that a model gives: the kernel's own bound.
const MAX_PATH_BYTES: usize = 4096;
/// Bytes of a result that are kept free for a notice.
const NOTICE_BYTES: usize = 512;
/// The error of a call that nobody waits for.
const CANCELLED_MESSAGE: &str = "stopped";
/// Searches at work at once, or as many as there are processors. More wait for their turn, by key.
const MIN_CONCURRENT_SEARCHES: usize = 4;
/// A file whose first bytes have a NUL is no text.
const SNIFF_BYTES: usize = 8 << 10;

/// What one call works on.
pub struct WorkdirFs {
    /// The workdir.
    pub access: WorkdirHandle,
    /// Whether to go on.
    pub stop: StopToken,
    /// What all calls share.
    pub shared: Arc<SharedState>,
}

/// What the calls of all runs share.
pub struct SharedState {
    max_result: usize,
    /// Most bytes of a picture that is shown.
    pub max_image_bytes: usize,
    /// Who replaces a file holds the lock that it falls on, so that two edits of one reply do not lose one of them.
    locks: [Mutex<()>; 64],
    /// Threads that may still be started to search beside the first one of a call.
    helpers: AtomicUsize,
    /// Searches at work.
    pub search_permits: FairSemaphore,
}

impl SharedState {
    /// For results of at most so many bytes, with pictures within these limits. These keys share the turns to search.
    pub fn new(max_result: usize, limits: AttachmentLimits, keys: &[String]) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_result,
            max_image_bytes: limits.bytes,
            locks: std::array::from_fn(|_| Mutex::new(())),
            helpers: AtomicUsize::new(cores.saturating_sub(1).min(8)),
            search_permits: FairSemaphore::new(MIN_CONCURRENT_SEARCHES.max(cores), keys),
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

impl WorkdirFs {
    /// How many bytes a tool may fill itself; a notice still fits behind them.
    pub fn max_output_bytes(&self) -> usize {
        self.shared.max_result.saturating_sub(NOTICE_BYTES)
    }

    /// Opens a regular file for reading; a link is followed within the workdir.
    ///
    /// # Errors
    /// Why not, for the model.
    pub fn open(&self, path: &Path) -> Result<(File, Metadata), String> {
        let opened = self.access.open_target_parent(path);
        let opened = opened.and_then(|(dir, name)| self.open_regular(&dir, Path::new(&name)));
        match opened.map_err(|error| describe_error(path, &error))? {
            OpenedEntry::File(file, meta) => Ok((file, meta)),
            OpenedEntry::Other(meta) => Err(describe_non_file(path, &meta)),
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
        let parent = self.access.open_parent(path);
        parent.map_err(|error| describe_error(parent_or_dot(path), &error))
    }

    /// As [`Ground::parent`], for something new: makes the directories above it.
    ///
    /// # Errors
    /// Why nothing can be made there, for the model.
    pub fn new_entry(&self, path: &Path) -> Result<(Dir, OsString), String> {
        let Some(name) = path.file_name() else {
            return Err("this is the workdir itself; name something in it".to_owned());
        };
        let created = self.access.create_dir_all(parent_or_dot(path));
        let dir = created.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
                format!(
                    "{} exists and is not a directory",
                    parent_or_dot(path).display()
                )
            }
            _ => describe_error(parent_or_dot(path), &error),
        })?;
        let allowed = self.access.check_new_entry(&dir, name);
        allowed.map_err(|error| describe_error(path, &error))?;
        Ok((dir, name.to_owned()))
    }

    /// Opens a regular file and nothing else, not following a link: neither a FIFO nor a device is waited for or read, also
    /// where one is put in the file's place meanwhile.
    ///
    /// # Errors
    /// What the system says, or that it is the daemon's.
    pub fn open_regular(&self, dir: &Dir, name: &Path) -> io::Result<OpenedEntry> {
        // Some devices do something when they are opened, so they are looked at first. The handle has the last word.
        let meta = self.access.entry_metadata(dir, name.as_os_str())?;
        match meta.is_file() {
            true => self.open_listed(dir, name),
            false => Ok(OpenedEntry::Other(meta)),
        }
    }

    /// As [`Ground::open_regular`], for what a listing has just called a regular file.
    ///
    /// # Errors
    /// What the system says, or that it is the daemon's.
    pub fn open_listed(&self, dir: &Dir, name: &Path) -> io::Result<OpenedEntry> {
        let (file, meta) = self.access.open_in(dir, name)?;
        Ok(match meta.is_file() {
            true => OpenedEntry::File(file, meta),
            false => OpenedEntry::Other(meta),
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
        let index = usize::try_from(hasher.finish() % 64).unwrap_or_default();
        locks[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a call has to end: nobody waits for it any more, or its time is up.
#[derive(Clone, Debug, Default)]
pub struct StopToken {
    flags: Arc<StopFlags>,
    /// When its time is up, and how many seconds that is; none if nothing but the run bounds it.
    deadline: Option<(Instant, u64)>,
}

#[derive(Debug, Default)]
struct StopFlags {
    cancelled: AtomicBool,
    /// Set when somebody finds that the time is up: a call that ended just before has all its results.
    timed_out: AtomicBool,
}

impl StopToken {
    /// The same, with a time limit that begins now.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            flags: Arc::clone(&self.flags),
            deadline: Some((Instant::now() + timeout, timeout.as_secs())),
        }
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> io::Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        Err(io::Error::other(match self.exceeded_timeout_secs() {
            Some(seconds) => format!("stopped, as it takes longer than {seconds} seconds"),
            None => CANCELLED_MESSAGE.to_owned(),
        }))
    }

    /// Whether somebody still waits, however late it is.
    ///
    /// # Errors
    /// That nobody does.
    pub fn check_cancelled(&self) -> Result<(), String> {
        match self.flags.cancelled.load(Ordering::Relaxed) {
            true => Err(CANCELLED_MESSAGE.to_owned()),
            false => Ok(()),
        }
    }

    /// Whether the call has to end.
    pub fn is_stopped(&self) -> bool {
        let is_past_deadline = || self.deadline.is_some_and(|(end, _)| Instant::now() >= end);
        if self.flags.cancelled.load(Ordering::Relaxed) {
            return true;
        }
        if self.exceeded_timeout_secs().is_none() && is_past_deadline() {
            self.flags.timed_out.store(true, Ordering::Relaxed);
        }
        self.exceeded_timeout_secs().is_some()
    }

    /// How many seconds the call had, if it was found to need more.
    pub fn exceeded_timeout_secs(&self) -> Option<u64> {
        let (_, seconds) = self.deadline?;
        let is_timed_out = self.flags.timed_out.load(Ordering::Relaxed);
        is_timed_out.then_some(seconds)
    }

    /// What sets it when it is dropped.
    pub fn cancel_on_drop(&self) -> impl Drop + use<> {
        struct CancelOnDrop(Arc<StopFlags>);
        impl Drop for CancelOnDrop {
            fn drop(&mut self) {
                self.0.cancelled.store(true, Ordering::Relaxed);
            }
        }
        CancelOnDrop(Arc::clone(&self.flags))
    }

    /// A reader that fails once the call has to end.
    pub fn stoppable_reader<R: Read>(&self, reader: R) -> impl Read + use<R> {
        struct StoppableReader<R>(R, StopToken);
        impl<R: Read> Read for StoppableReader<R> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.1.check()?;
                self.0.read(buffer)
            }
        }
        StoppableReader(reader, self.clone())
    }
}

/// A path as a model writes it, as one below the workdir; `.` for the workdir itself. The handle confines, not this: it
/// only makes one writing of each path and says early and in words what is not allowed.
///
/// # Errors
/// What is wrong with it, for the model.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    let display_text = crate::domain::message::shorten(text, 200);
    if text.is_empty() {
        return Err("the path is empty; \".\" is the workdir".to_owned());
    }
    if text.len() > MAX_PATH_BYTES || text.contains('\0') {
        return Err(format!(
            "{display_text:?} is no path: too long, or a NUL in it"
        ));
    }
    let mut path = PathBuf::new();
    for component in Path::new(text).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir if path.pop() => {}
            Component::ParentDir => return Err(format!("{display_text} leads out of the workdir")),
            Component::RootDir | Component::Prefix(_) => {
                return Err(format!(
                    "{display_text} is an absolute path; give it relative to the workdir, which is \".\""
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
pub enum OpenedEntry {
    /// A regular file, open for reading.
    File(File, Metadata),
    /// Something else, not open.
    Other(Metadata),
}

/// Whether these first bytes of a file are none of a text.
pub fn is_binary(head: &[u8]) -> bool {
    head.iter().take(SNIFF_BYTES).any(|byte| *byte == 0)
}

/// Says what stands there instead of a regular file.
pub fn describe_non_file(path: &Path, meta: &Metadata) -> String {
    let kind = meta.file_type();
    let description = if kind.is_dir() {
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
    format!("{} is {description}", path.display())
}

/// An error of the system's about a path, in words for the model.
pub fn describe_error(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if let Some(refused) = ReservedError::from_io_error(error) {
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
pub fn display_path(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.chars().any(char::is_control) {
        true => text.replace(char::is_control, "?"),
        false => text.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{display_path, parse_path};

    #[test]
    fn a_path_is_written_in_one_way() {
        for (text, path) in [
            (".", "."),
            ("./a//b/", "a/b"),
            ("a/../b", "b"),
            ("a/..", "."),
        ] {
            assert_eq!(parse_path(text).expect(text), Path::new(path));
        }
    }

    #[test]
    fn paths_out_of_the_workdir_are_refused() {
        for (text, why) in [
            ("..", "leads out"),
            ("a/../../b", "leads out"),
            ("/etc/passwd", "is an absolute path"),
            ("", "is empty"),
            ("a\0b", "NUL"),
        ] {
            let error = parse_path(text).expect_err(text);
            assert!(error.contains(why), "{error}");
        }
        assert!(parse_path(&"x/".repeat(3000)).is_err());
    }

    #[test]
    fn a_name_stays_on_its_line() {
        assert_eq!(display_path(Path::new("a\nb/c\u{1b}")), "a?b/c?");
    }
}
