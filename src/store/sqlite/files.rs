//! The store's files in the data directory: detects missing and replaced ones, and reserves space for a full disk.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::store::StoreError;

/// How often the writer checks that its files exist. Between two checks it may write into deleted files.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How often the writer checks whether a full disk has space again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Space that is released when the disk is full, so that runs can be deleted.
const RESERVE_BYTES: u64 = 8 << 20;
/// What is left of the reserve for the next start, which needs space for SQLite's index of the log.
const START_RESERVE_BYTES: u64 = 1 << 20;
/// Free space that ends the state of a full disk if the disk never had space for the reserve.
const MIN_FREE_BYTES: u64 = 1 << 20;
/// The database's name in the data directory.
pub const DATABASE_FILE: &str = "axed.db";
/// The reserve's name in the data directory.
const RESERVE_FILE: &str = "reserve";

/// The path of the database's write-ahead log.
pub fn wal_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// The size in bytes; `None` if the file does not exist.
pub fn file_size(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|file| file.len())
}

/// Fails if there is a log without its database: SQLite would discard the log with its contents.
pub fn check_wal_has_database(file: &Path) -> Result<(), StoreError> {
    let log = wal_path(file);
    let has_content = |path: &Path| file_size(path).is_some_and(|bytes| bytes > 0);
    if has_content(file) || !has_content(&log) {
        return Ok(());
    }
    Err(StoreError::Backend(format!(
        "the database {} is missing, but its log {} exists: put the database back, or put a backup there and remove the log, \
         or choose another directory with --data",
        file.display(),
        log.display()
    )))
}

/// The files that were opened, by device and inode.
#[derive(Debug)]
pub struct OpenFiles {
    files: Vec<(PathBuf, (u64, u64))>,
    /// When they last existed; `None` if a check has failed since.
    verified_at: Option<Instant>,
}

impl OpenFiles {
    /// Remembers the directory, the database and its log.
    pub fn new(dir: &Path, file: &Path) -> Self {
        let mut files = Vec::new();
        for path in [dir.to_owned(), file.to_owned(), wal_path(file)] {
            // The log may not exist.
            if let Some(id) = device_and_inode(&path) {
                files.push((path, id));
            }
        }
        Self {
            files,
            verified_at: Some(Instant::now()),
        }
    }

    /// Fails if a file is gone or was replaced. Unless forced, a recent result is used.
    pub fn check(&mut self, is_forced: bool) -> Result<(), StoreError> {
        let is_stale = |seen: Instant| seen.elapsed() >= CHECK_INTERVAL;
        if !is_forced && !self.verified_at.is_none_or(is_stale) {
            return Ok(());
        }
        let changed = self
            .files
            .iter()
            .find(|(path, id)| device_and_inode(path) != Some(*id));
        self.verified_at = changed.is_none().then(Instant::now);
        match changed {
            None => Ok(()),
            Some((path, _)) => Err(StoreError::Backend(format!(
                "{} is gone or was replaced while the daemon ran: put it back, or restart the daemon",
                path.display()
            ))),
        }
    }
}

fn device_and_inode(path: &Path) -> Option<(u64, u64)> {
    let file = fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// A file that reserves space until the disk is full. From then on only deletions are written, until there is space for the
/// file again. A smaller file means that the space was released.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    is_disk_full: bool,
    attempted_at: Option<Instant>,
}

impl Reserve {
    /// Reads the state that an earlier process left.
    pub fn new(dir: &Path) -> Self {
        let path = dir.join(RESERVE_FILE);
        Self {
            is_disk_full: file_size(&path).is_some_and(|bytes| bytes < RESERVE_BYTES),
            path,
            attempted_at: None,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_disk_full(&self) -> bool {
        self.is_disk_full
    }

    /// Releases space because the disk is full: first all that the next start does not need, then the rest. Returns false if
    /// there was none.
    pub fn release(&mut self) -> bool {
        self.is_disk_full = true;
        self.attempted_at = Some(Instant::now());
        match file_size(&self.path).unwrap_or(0) {
            0 => false,
            bytes if bytes > START_RESERVE_BYTES => {
                set_size(&self.path, START_RESERVE_BYTES).is_ok()
            }
            _ => set_size(&self.path, 0).is_ok(),
        }
    }

    /// Reserves the space again after a full disk, if twice as much is free. Unless forced, this is tried at intervals.
    pub fn reclaim(&mut self, is_forced: bool) {
        let is_too_soon = |tried: Instant| tried.elapsed() < RETRY_INTERVAL;
        if !self.is_disk_full || (!is_forced && self.attempted_at.is_some_and(is_too_soon)) {
            return;
        }
        self.attempted_at = Some(Instant::now());
        // If the disk never had space for the reserve, less free space is enough.
        let existed = file_size(&self.path).is_some();
        let wanted_bytes = if existed {
            2 * RESERVE_BYTES
        } else {
            MIN_FREE_BYTES
        };
        let filled = fill(&self.path, wanted_bytes);
        let cleared = match (existed, &filled) {
            (true, Ok(())) => Ok(()),
            (true, Err(_)) => self.shrink_for_start(),
            (false, _) => fs::remove_file(&self.path),
        };
        if let Err(error) = cleared {
            warn!(error = %error, "{} could not be truncated: {error}", self.path.display());
        }
        if filled.is_ok() {
            self.is_disk_full = false;
            info!("There is space for {} again", self.path.display());
        }
    }

    /// Keeps what the next start needs, if at least as much is left for deletions.
    fn shrink_for_start(&self) -> std::io::Result<()> {
        let filled = file_size(&self.path).unwrap_or(0);
        let kept = match filled >= 2 * START_RESERVE_BYTES {
            true => START_RESERVE_BYTES,
            false => 0,
        };
        set_size(&self.path, kept)
    }
}

/// Reserves the space, unless the file exists.
pub fn create_reserve(path: &Path) {
    if file_size(path).is_some() {
        return;
    }
    if let Err(error) = fill(path, RESERVE_BYTES) {
        warn!(error = %error, "{} could not be written, trying again: {error}", path.display());
        let _ = fs::remove_file(path);
    }
}

fn set_size(path: &Path, bytes: u64) -> std::io::Result<()> {
    OpenOptions::new().write(true).open(path)?.set_len(bytes)
}

/// Fills the file with this many bytes, then truncates it to the reserve's size. The contents do not repeat, so that no file
/// system compresses them.
fn fill(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    let mut block = vec![0; 64 << 10];
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..bytes / block.len() as u64 {
        random.fill(&mut block);
        file.write_all(&block)?;
    }
    file.set_len(bytes.min(RESERVE_BYTES))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{OpenFiles, Reserve, check_wal_has_database, create_reserve, wal_path};

    #[test]
    fn replaced_and_restored_files_are_noticed() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("data");
        let file = dir.join("axed.db");
        fs::create_dir(&dir).expect("made");
        for path in [&file, &wal_path(&file)] {
            fs::write(path, "x").expect("written");
        }
        let mut opened = OpenFiles::new(&dir, &file);
        assert!(opened.check(true).is_ok());
        for path in [&dir, &file, &wal_path(&file)] {
            let backup = parent.path().join("aside");
            fs::rename(path, &backup).expect("moved");
            let error = opened.check(true).expect_err("gone").to_string();
            assert!(opened.check(false).is_err(), "writes fail from then on");
            assert!(error.contains("is gone or was replaced"), "{error}");
            if *path != dir {
                fs::copy(&backup, path).expect("copied");
                assert!(opened.check(true).is_err(), "another file");
            }
            fs::rename(&backup, path).expect("put back");
            assert!(opened.check(true).is_ok());
        }
        assert!(opened.check(false).is_ok());
    }

    #[test]
    fn a_log_without_its_database_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        assert!(check_wal_has_database(&file).is_ok());
        fs::write(wal_path(&file), "log").expect("written");
        assert!(check_wal_has_database(&file).is_err());
        fs::write(&file, "").expect("written");
        assert!(
            check_wal_has_database(&file).is_err(),
            "an empty database is as bad as none"
        );
        fs::write(&file, "x").expect("written");
        assert!(check_wal_has_database(&file).is_ok());
    }

    #[test]
    fn the_reserve_is_released_and_reclaimed() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut reserve = Reserve::new(dir.path());
        let path = reserve.path().to_owned();
        let bytes = || fs::metadata(&path).expect("there").len();
        assert!(!reserve.is_disk_full());
        create_reserve(&path);
        assert_eq!(bytes(), 8 << 20);
        assert!(!Reserve::new(dir.path()).is_disk_full());
        assert!(reserve.release() && reserve.is_disk_full());
        assert_eq!(bytes(), 1 << 20, "the next start needs it");
        assert!(reserve.release() && bytes() == 0 && !reserve.release());
        assert!(
            Reserve::new(dir.path()).is_disk_full(),
            "the next start sees it"
        );
        create_reserve(&path);
        assert_eq!(bytes(), 0, "the space is released");
        reserve.reclaim(true);
        assert!(bytes() == 8 << 20 && !reserve.is_disk_full());
    }
}
