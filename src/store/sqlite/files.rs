//! The store's files in the data directory: whether they are still those that were opened, whether one is missing, and
//! what is kept for a full disk. Knows no SQL.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::store::StoreError;

/// How often the writer looks whether its files are still there: between two looks it may write into files that are gone.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How often it tries to leave a full disk behind.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// What is given up when the disk is full, so that something can be deleted.
const RESERVE_BYTES: u64 = 8 << 20;
/// What has to be free after a full disk that never had space for the reserve.
const MIN_BYTES: u64 = 1 << 20;
/// The reserve's name in the data directory.
const RESERVE: &str = "reserve";

/// The log's name beside the database's.
pub fn log_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// How many bytes a file has; none where there is none.
pub fn size(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|file| file.len())
}

/// Refuses a log without its database: SQLite would throw it away, with everything that is in it.
pub fn check_whole(file: &Path) -> Result<(), StoreError> {
    let log = log_of(file);
    let has = |path: &Path| size(path).is_some_and(|bytes| bytes > 0);
    if has(file) || !has(&log) {
        return Ok(());
    }
    Err(StoreError::Engine(format!(
        "the database {} is missing, and its log {} is there: put the database back, or a backup and take the log away, \
         or choose another directory with --data",
        file.display(),
        log.display()
    )))
}

/// The files that were opened, by device and inode.
#[derive(Debug)]
pub struct Opened {
    files: Vec<(PathBuf, (u64, u64))>,
    /// When they were last seen to be there; none where they were not.
    seen_at: Option<Instant>,
}

impl Opened {
    /// The directory, the database and its log, as they are now.
    pub fn new(dir: &Path, file: &Path) -> Self {
        let mut files = Vec::new();
        for path in [dir.to_owned(), file.to_owned(), log_of(file)] {
            // An engine that keeps no log beside the file has none.
            if let Some(id) = identity(&path) {
                files.push((path, id));
            }
        }
        Self {
            files,
            seen_at: Some(Instant::now()),
        }
    }

    /// Whether they are still there, where that was not looked at just now or somebody wants to know it.
    pub fn check(&mut self, is_wanted: bool) -> Result<(), StoreError> {
        let is_late = |seen: Instant| seen.elapsed() >= LOOK_INTERVAL;
        if !is_wanted && !self.seen_at.is_none_or(is_late) {
            return Ok(());
        }
        let other = self
            .files
            .iter()
            .find(|(path, id)| identity(path) != Some(*id));
        self.seen_at = other.is_none().then(Instant::now);
        match other {
            None => Ok(()),
            Some((path, _)) => Err(StoreError::Engine(format!(
                "{} is gone or was replaced while the daemon ran: put it back, or restart the daemon",
                path.display()
            ))),
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// A file that takes up space until the disk is full. From then on only deletions are written, until there is space for
/// it again. An empty one says that it has been given up.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    is_full: bool,
    tried_at: Option<Instant>,
}

impl Reserve {
    /// In this directory, as an earlier process left it.
    pub fn new(dir: &Path) -> Self {
        let path = dir.join(RESERVE);
        Self {
            is_full: size(&path).is_some_and(|bytes| bytes < RESERVE_BYTES),
            path,
            tried_at: None,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the disk is full, as far as is known.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Gives the space up, as the disk is full; whether there was any.
    pub fn give_up(&mut self) -> bool {
        self.is_full = true;
        self.tried_at = Some(Instant::now());
        size(&self.path).is_some_and(|bytes| bytes > 0) && empty(&self.path).is_ok()
    }

    /// Takes the space again after a full disk, where there is as much again beside it. That is tried now and then, or
    /// where somebody wants to know.
    pub fn take_again(&mut self, is_wanted: bool) {
        let is_early = |tried: Instant| tried.elapsed() < RETRY_INTERVAL;
        if !self.is_full || (!is_wanted && self.tried_at.is_some_and(is_early)) {
            return;
        }
        self.tried_at = Some(Instant::now());
        // A disk that never had space for the reserve has none now.
        let had_one = size(&self.path).is_some();
        let wanted = if had_one {
            2 * RESERVE_BYTES
        } else {
            MIN_BYTES
        };
        let filled = fill(&self.path, wanted);
        let cleared = match (had_one, &filled) {
            (true, Ok(())) => Ok(()),
            (true, Err(_)) => empty(&self.path),
            (false, _) => fs::remove_file(&self.path),
        };
        if let Err(error) = cleared {
            warn!(error = %error, "{} could not be emptied: {error}", self.path.display());
        }
        if filled.is_ok() {
            self.is_full = false;
            info!("There is space for {} again", self.path.display());
        }
    }
}

/// Takes the space of a reserve where none was ever made.
pub fn make_reserve(path: &Path) {
    if size(path).is_some() {
        return;
    }
    if let Err(error) = fill(path, RESERVE_BYTES) {
        warn!(error = %error, "{} could not be written, trying again: {error}", path.display());
        let _ = fs::remove_file(path);
    }
}

fn empty(path: &Path) -> std::io::Result<()> {
    OpenOptions::new().write(true).open(path)?.set_len(0)
}

/// Takes so much space, and gives back what is more than the reserve. No file system leaves out what does not repeat.
fn fill(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    let mut block = vec![0; 64 << 10];
    let mut number = 1_u32;
    for _ in 0..bytes / block.len() as u64 {
        for byte in &mut block {
            number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = number.to_be_bytes()[0];
        }
        file.write_all(&block)?;
    }
    file.set_len(bytes.min(RESERVE_BYTES))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Opened, Reserve, check_whole, log_of, make_reserve};

    #[test]
    fn a_replaced_file_is_noticed_and_one_that_is_put_back_too() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("data");
        let file = dir.join("axed.db");
        fs::create_dir(&dir).expect("made");
        for path in [&file, &log_of(&file)] {
            fs::write(path, "x").expect("written");
        }
        let mut opened = Opened::new(&dir, &file);
        assert!(opened.check(true).is_ok());
        for path in [&dir, &file, &log_of(&file)] {
            let aside = home.path().join("aside");
            fs::rename(path, &aside).expect("moved");
            let error = opened.check(true).expect_err("gone").to_string();
            assert!(
                opened.check(false).is_err(),
                "nothing is written from then on"
            );
            assert!(error.contains("is gone or was replaced"), "{error}");
            if *path != dir {
                fs::copy(&aside, path).expect("copied");
                assert!(opened.check(true).is_err(), "another file");
            }
            fs::rename(&aside, path).expect("put back");
            assert!(opened.check(true).is_ok());
        }
        assert!(opened.check(false).is_ok());
    }

    #[test]
    fn a_log_without_its_database_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        assert!(check_whole(&file).is_ok());
        fs::write(log_of(&file), "log").expect("written");
        assert!(check_whole(&file).is_err());
        fs::write(&file, "").expect("written");
        assert!(check_whole(&file).is_err(), "an empty one is none");
        fs::write(&file, "x").expect("written");
        assert!(check_whole(&file).is_ok());
    }

    #[test]
    fn the_reserve_is_given_up_and_taken_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut reserve = Reserve::new(dir.path());
        let path = reserve.path().to_owned();
        let bytes = || fs::metadata(&path).expect("there").len();
        assert!(!reserve.is_full());
        make_reserve(&path);
        assert_eq!(bytes(), 8 << 20);
        assert!(!Reserve::new(dir.path()).is_full());
        assert!(reserve.give_up() && reserve.is_full());
        assert!(bytes() == 0 && !reserve.give_up());
        assert!(Reserve::new(dir.path()).is_full(), "the next start knows");
        make_reserve(&path);
        assert_eq!(bytes(), 0, "not before there is space");
        reserve.take_again(true);
        assert!(bytes() == 8 << 20 && !reserve.is_full());
    }
}
