//! Serializes changes of one login over all processes: a refresh of the daemon, and the commands of `axed auth`.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::tools::mcp::oauth::endpoint;
use crate::tools::mcp::oauth::logins::LoginError;

/// The most requests that a holder sends: three for metadata, and two that revoke tokens.
const MAX_REQUESTS: u32 = 5;
/// Longer than any holder's requests take.
const TIMEOUT: Duration = endpoint::TIMEOUT.saturating_mul(MAX_REQUESTS + 1);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A locked login, released when it is dropped.
#[derive(Debug)]
pub struct LoginLock {
    file: File,
}

impl LoginLock {
    /// Waits until no other process has the lock. The file is kept, because others may wait for it.
    pub async fn acquire(path: PathBuf) -> Result<Self, LoginError> {
        let failed = |error: std::io::Error| LoginError::Io {
            file: path.clone(),
            action: "locked",
            reason: error.to_string(),
        };
        let file = open(&path).map_err(failed)?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { file }),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(LoginError::Locked {
                        file: path,
                        seconds: TIMEOUT.as_secs(),
                    });
                }
                // Waiting within the system could not be ended at a shutdown.
                Err(TryLockError::WouldBlock) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    }
}

impl Drop for LoginLock {
    /// As for the data directory: a child process that was forked just now has the file open, too.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}
