//! What all file tools share: access to the workdir, the stop token, paths from models, opening of regular files
//! without blocking, and error texts.

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

/// The kernel's limit.
const MAX_PATH_BYTES: usize = 4096;
/// Bytes of a result that are kept free for a notice.
const NOTICE_BYTES: usize = 512;
/// The error of a call whose future was dropped.
const CANCELLED_MESSAGE: &str = "stopped";
/// Searches at once, unless there are more processors. More wait in a fair queue by key.
const MIN_CONCURRENT_SEARCHES: usize = 4;
/// Other reads at once, and as many writes, far fewer than the threads for blocking work, which the whole daemon shares.
const MAX_CONCURRENT_IO: usize = 32;
/// Edits at once: each holds its file in memory, before and after.
const MAX_CONCURRENT_EDITS: usize = 4;
/// A NUL within these first bytes marks a binary file.
const SNIFF_BYTES: usize = 8 << 10;

/// What one call works with.
pub struct WorkdirFs {
    pub access: WorkdirHandle,
    pub stop: StopToken,
    pub shared: Arc<SharedState>,
}

/// What the calls of all runs share.
pub struct SharedState {
    max_result: usize,
    /// Larger images are not shown.
    pub max_image_bytes: usize,
    /// A file's lock is chosen by its hash and held while the file is replaced, so two edits of one reply cannot lose
    /// one of them.
    locks: [Mutex<()>; 64],
    /// Search threads that may still be started beside the first one of a call.
    helpers: AtomicUsize,
    pub search_permits: FairSemaphore,
    pub read_permits: FairSemaphore,
    /// A small write does not wait for reads that take long.
    pub write_permits: FairSemaphore,
    pub edit_permits: FairSemaphore,
}

impl SharedState {
    /// Results have at most `max_result` bytes. `keys` share the permits.
    pub fn new(max_result: usize, limits: AttachmentLimits, keys: &[String]) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_result,
            max_image_bytes: limits.bytes,
            locks: std::array::from_fn(|_| Mutex::new(())),
            helpers: AtomicUsize::new(cores.saturating_sub(1).min(8)),
            search_permits: FairSemaphore::new(MIN_CONCURRENT_SEARCHES.max(cores), keys),
            read_permits: FairSemaphore::new(MAX_CONCURRENT_IO, keys),
            write_permits: FairSemaphore::new(MAX_CONCURRENT_IO, keys),
            edit_permits: FairSemaphore::new(MAX_CONCURRENT_EDITS, keys),
        }
    }

    /// Takes all free helpers. Give them back with [`SharedState::return_helpers`].
    pub fn take_helpers(&self) -> usize {
        self.helpers.swap(0, Ordering::Relaxed)
    }

    pub fn return_helpers(&self, count: usize) {
        self.helpers.fetch_add(count, Ordering::Relaxed);
    }
}

impl WorkdirFs {
    /// The bytes that a tool may fill itself, so that a notice still fits.
    pub fn max_output_bytes(&self) -> usize {
        self.shared.max_result.saturating_sub(NOTICE_BYTES)
    }

    /// Opens a regular file for reading. A link is followed within the workdir.
    ///
    /// # Errors
    /// The file cannot be opened. The text is for the model.
    pub fn open(&self, path: &Path) -> Result<(File, Metadata), String> {
        let opened = self.access.open_target_parent(path);
        let opened = opened.and_then(|(dir, name)| self.open_regular(&dir, Path::new(&name)));
        match opened.map_err(|error| describe_error(path, &error))? {
            OpenedEntry::File(file, meta) => Ok((file, meta)),
            OpenedEntry::Other(meta) => Err(describe_non_file(path, &meta)),
        }
    }

    /// The open parent directory of a path, and the path's last name.
    ///
    /// # Errors
    /// The parent cannot be opened. The text is for the model.
    pub fn parent(&self, path: &Path) -> Result<(Dir, OsString), String> {
        if path.file_name().is_none() {
            return Err("this is the workdir itself; name something in it".to_owned());
        }
        let parent = self.access.open_parent(path);
        parent.map_err(|error| describe_error(parent_or_dot(path), &error))
    }

    /// As [`WorkdirFs::parent`], for a new entry: creates the directories above it.
    ///
    /// # Errors
    /// The directories cannot be created. The text is for the model.
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

    /// Opens a regular file and nothing else, without following a link. A FIFO or device is never read or waited for,
    /// even if it replaces the file meanwhile.
    ///
    /// # Errors
    /// The system's error, or the file is the daemon's own.
    pub fn open_regular(&self, dir: &Dir, name: &Path) -> io::Result<OpenedEntry> {
        // Opening some devices has side effects, so the type is checked first. The opened handle is checked again.
        let meta = self.access.entry_metadata(dir, name.as_os_str())?;
        match meta.is_file() {
            true => self.open_listed(dir, name),
            false => Ok(OpenedEntry::Other(meta)),
        }
    }

    /// As [`WorkdirFs::open_regular`], for an entry that a listing has just reported as a regular file.
    ///
    /// # Errors
    /// The system's error, or the file is the daemon's own.
    pub fn open_listed(&self, dir: &Dir, name: &Path) -> io::Result<OpenedEntry> {
        let (file, meta) = self.access.open_in(dir, name)?;
        Ok(match meta.is_file() {
            true => OpenedEntry::File(file, meta),
            false => OpenedEntry::Other(meta),
        })
    }

    /// Keeps other calls from replacing this file at the same time.
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

/// Tells a call to end: its future was dropped, or its timeout is over.
#[derive(Clone, Debug, Default)]
pub struct StopToken {
    flags: Arc<StopFlags>,
    /// The end of the timeout, and its length in seconds; `None` if only the run limits the call.
    deadline: Option<(Instant, u64)>,
}

#[derive(Debug, Default)]
struct StopFlags {
    cancelled: AtomicBool,
    /// Set when a check finds that the timeout is over. A call that ended just before has complete results.
    timed_out: AtomicBool,
}

impl StopToken {
    /// A token with the same flags and a timeout that starts now.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            flags: Arc::clone(&self.flags),
            deadline: Some((Instant::now() + timeout, timeout.as_secs())),
        }
    }

    /// # Errors
    /// The call must end.
    pub fn check(&self) -> io::Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        Err(io::Error::other(match self.exceeded_timeout_secs() {
            Some(seconds) => format!("stopped, as it takes longer than {seconds} seconds"),
            None => CANCELLED_MESSAGE.to_owned(),
        }))
    }

    /// Ignores the timeout.
    ///
    /// # Errors
    /// The call's future was dropped.
    pub fn check_cancelled(&self) -> Result<(), String> {
        match self.flags.cancelled.load(Ordering::Relaxed) {
            true => Err(CANCELLED_MESSAGE.to_owned()),
            false => Ok(()),
        }
    }

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

    /// The timeout in seconds, if a check found that it is over.
    pub fn exceeded_timeout_secs(&self) -> Option<u64> {
        let (_, seconds) = self.deadline?;
        let is_timed_out = self.flags.timed_out.load(Ordering::Relaxed);
        is_timed_out.then_some(seconds)
    }

    /// Cancels the token when the returned guard is dropped.
    pub fn cancel_on_drop(&self) -> impl Drop + use<> {
        struct CancelOnDrop(Arc<StopFlags>);
        impl Drop for CancelOnDrop {
            fn drop(&mut self) {
                self.0.cancelled.store(true, Ordering::Relaxed);
            }
        }
        CancelOnDrop(Arc::clone(&self.flags))
    }

    /// A reader that fails once the call must end.
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

/// A model's path, normalized and relative to the workdir; `.` for the workdir itself. This is no access check, which
/// the handle does. It gives every path one spelling and early, clear errors.
///
/// # Errors
/// The path is invalid. The text is for the model.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    let display_text = crate::domain::message::shorten(text, 200);
    if text.is_empty() {
        return Err("the path is empty; \".\" is the workdir".to_owned());
    }
    if text.len() > MAX_PATH_BYTES || text.contains('\0') {
        return Err(format!(
            "{display_text:?} is not a valid path: it is too long or contains a NUL"
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

pub enum OpenedEntry {
    /// A regular file, open for reading.
    File(File, Metadata),
    /// Something else, which is not open.
    Other(Metadata),
}

/// Whether the first bytes of a file show that it is binary.
pub fn is_binary(head: &[u8]) -> bool {
    head.iter().take(SNIFF_BYTES).any(|byte| *byte == 0)
}

/// Describes what is at the path instead of a regular file.
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

/// A system error about a path, worded for the model.
pub fn describe_error(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if let Some(refused) = ReservedError::from_io_error(error) {
        return format!("{path} is {refused}");
    }
    match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{path} does not exist; find_path and list_directory show what does")
        }
        // An error of cap-std itself has no OS error code.
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
            format!("{path} leads out of the workdir through a link, which is not allowed")
        }
        io::ErrorKind::PermissionDenied => format!("{path}: permission denied"),
        io::ErrorKind::NotADirectory => format!("{path}: a part of it is not a directory"),
        _ => format!("{path}: {error}"),
    }
}

/// A name or path on one line, whatever characters it contains.
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
    fn paths_are_normalized() {
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
    fn paths_out_of_the_workdir_are_rejected() {
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
    fn a_displayed_path_is_one_line() {
        assert_eq!(display_path(Path::new("a\nb/c\u{1b}")), "a?b/c?");
    }
}
