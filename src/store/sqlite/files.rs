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
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How often it tries to leave a full disk behind.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// What is given up when the disk is full, so that something can be deleted.
const RESERVE_BYTES: u64 = 8 << 20;
/// What has to be free after a full disk that never had space for the reserve.
const MIN_FREE_BYTES: u64 = 1 << 20;
/// The reserve's name in the data directory.
const RESERVE_FILE: &str = "reserve";

/// The log's name beside the database's.
pub fn wal_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// How many bytes a file has; none where there is none.
pub fn file_size(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|file| file.len())
}

/// Refuses a log without its database: SQLite would throw it away, with everything that is in it.
pub fn check_wal_has_database(file: &Path) -> Result<(), StoreError> {
    let log = wal_path(file);
    let has_content = |path: &Path| file_size(path).is_some_and(|bytes| bytes > 0);
    if has_content(file) || !has_content(&log) {
        return Ok(());
    }
    Err(StoreError::Backend(format!(
        "the database {} is missing, and its log {} is there: put the database back, or a backup and take the log away, \
         or choose another directory with --data",
        file.display(),
        log.display()
    )))
}

/// The files that were opened, by device and inode.
#[derive(Debug)]
pub struct OpenFiles {
    files: Vec<(PathBuf, (u64, u64))>,
    /// When they were last seen to be there; none where they were not.
    verified_at: Option<Instant>,
}

impl OpenFiles {
    /// The directory, the database and its log, as they are now.
    pub fn new(dir: &Path, file: &Path) -> Self {
        let mut files = Vec::new();
        for path in [dir.to_owned(), file.to_owned(), wal_path(file)] {
            // An engine that keeps no log beside the file has none.
            if let Some(id) = device_and_inode(&path) {
                files.push((path, id));
            }
        }
        Self {
            files,
            verified_at: Some(Instant::now()),
        }
    }

    /// Whether they are still there, where that was not looked at just now or somebody wants to know it.
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

/// A file that takes up space until the disk is full. From then on only deletions are written, until there is space for
/// it again. An empty one says that it has been given up.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    is_disk_full: bool,
    attempted_at: Option<Instant>,
}

impl Reserve {
    /// In this directory, as an earlier process left it.
    pub fn new(dir: &Path) -> Self {
        let path = dir.join(RESERVE_FILE);
        Self {
            is_disk_full: file_size(&path).is_some_and(|bytes| bytes < RESERVE_BYTES),
            path,
            attempted_at: None,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the disk is full, as far as is known.
    pub fn is_disk_full(&self) -> bool {
        self.is_disk_full
    }

    /// Gives the space up, as the disk is full; whether there was any.
    pub fn release(&mut self) -> bool {
        self.is_disk_full = true;
        self.attempted_at = Some(Instant::now());
        file_size(&self.path).is_some_and(|bytes| bytes > 0) && truncate(&self.path).is_ok()
    }

    /// Takes the space again after a full disk, where there is as much again beside it. That is tried now and then, or
    /// where somebody wants to know.
    pub fn reclaim(&mut self, is_forced: bool) {
        let is_too_soon = |tried: Instant| tried.elapsed() < RETRY_INTERVAL;
        if !self.is_disk_full || (!is_forced && self.attempted_at.is_some_and(is_too_soon)) {
            return;
        }
        self.attempted_at = Some(Instant::now());
        // A disk that never had space for the reserve has none now.
        let existed = file_size(&self.path).is_some();
        let wanted_bytes = if existed {
            2 * RESERVE_BYTES
        } else {
            MIN_FREE_BYTES
        };
        let filled = fill(&self.path, wanted_bytes);
        let cleared = match (existed, &filled) {
            (true, Ok(())) => Ok(()),
            (true, Err(_)) => truncate(&self.path),
            (false, _) => fs::remove_file(&self.path),
        };
        if let Err(error) = cleared {
            warn!(error = %error, "{} could not be emptied: {error}", self.path.display());
        }
        if filled.is_ok() {
            self.is_disk_full = false;
            info!("There is space for {} again", self.path.display());
        }
    }
}

/// Takes the space of a reserve where none was ever made.
pub fn create_reserve(path: &Path) {
    if file_size(path).is_some() {
        return;
    }
    if let Err(error) = fill(path, RESERVE_BYTES) {
        warn!(error = %error, "{} could not be written, trying again: {error}", path.display());
        let _ = fs::remove_file(path);
    }
}

fn truncate(path: &Path) -> std::io::Result<()> {
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
            assert!(
                opened.check(false).is_err(),
                "nothing is written from then on"
            );
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
            "an empty one is none"
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
        assert!(bytes() == 0 && !reserve.release());
        assert!(
            Reserve::new(dir.path()).is_disk_full(),
            "the next start knows"
        );
        create_reserve(&path);
        assert_eq!(bytes(), 0, "not before there is space");
        reserve.reclaim(true);
        assert!(bytes() == 8 << 20 && !reserve.is_disk_full());
    }
}
