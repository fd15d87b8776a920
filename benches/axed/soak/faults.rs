//! What is done to the store, and to the process, while clients work; each fault is over when its future is.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rusqlite::Connection;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::soak::watch::HealthMonitor;

/// What the file system of the data directory may hold while it is not full.
pub const DATA_SIZE: &str = "4g";
/// No file grows above this while writes fail: the first frame of SQLite's log does not fit.
const FILE_SIZE_LIMIT: u64 = 4096;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another connection has the database to itself.
    Locked(Duration),
    /// The file system of the data directory is full.
    Full(Duration),
    /// Writes fail with an I/O error.
    WriteErrors(Duration),
    /// The process is stopped: SIGSTOP, then SIGCONT.
    Stopped(Duration),
}

/// All of them, in their order.
pub const FAULTS: [Fault; 5] = [
    Fault::Locked(Duration::from_secs(8)),
    Fault::Full(Duration::from_secs(7)),
    Fault::Stopped(Duration::from_secs(3)),
    Fault::Locked(Duration::from_secs(20)),
    Fault::WriteErrors(Duration::from_secs(7)),
];

/// Who has the faults.
pub struct FaultTarget {
    /// The daemon.
    pub pid: Pid,
    /// Its data directory.
    pub data: PathBuf,
    /// Whether that is a file system of its own, whose size can be changed.
    pub is_mounted: bool,
}

impl Fault {
    /// As the table shows it.
    pub fn name(self) -> String {
        let (name, time) = match self {
            Self::Locked(time) => ("locked", time),
            Self::Full(time) => ("full disk", time),
            Self::WriteErrors(time) => ("I/O errors", time),
            Self::Stopped(time) => ("stopped", time),
        };
        format!("{name}, {} s", time.as_secs())
    }

    /// How long it takes.
    pub fn time(self) -> Duration {
        let (Self::Locked(time) | Self::Full(time) | Self::WriteErrors(time) | Self::Stopped(time)) =
            self;
        time
    }

    /// Whether the daemon must say meanwhile that it is not ready.
    pub fn is_reported(self) -> bool {
        !matches!(self, Self::Stopped(_))
    }

    /// Whether it can be done here.
    pub fn is_possible(self, target: &FaultTarget) -> bool {
        target.is_mounted || !matches!(self, Self::Full(_))
    }

    /// Does it, and undoes it after its time.
    pub async fn inject(self, target: &FaultTarget, watch: &HealthMonitor) {
        match self {
            Self::Locked(time) => {
                let db = Connection::open(target.data.join("axed.db")).expect("the database");
                db.busy_timeout(Duration::from_secs(30)).expect("a timeout");
                db.execute_batch("BEGIN EXCLUSIVE").expect("the lock");
                tokio::time::sleep(time).await;
                db.execute_batch("ROLLBACK").expect("released");
            }
            Self::Full(time) => {
                // The daemon may have written more since its size was read: then it is no size for the file system.
                let is_full = (0..100).any(|_| target.resize(&target.used_bytes().to_string()));
                assert!(is_full, "the file system could not be made smaller");
                tokio::time::sleep(time).await;
                assert!(
                    target.resize(DATA_SIZE),
                    "the file system could not be made larger"
                );
            }
            Self::WriteErrors(time) => {
                target.limit_file_size(Some(FILE_SIZE_LIMIT));
                tokio::time::sleep(time).await;
                target.limit_file_size(None);
            }
            Self::Stopped(time) => {
                watch.pause();
                kill_process(target.pid, Signal::STOP).expect("stopped");
                tokio::time::sleep(time).await;
                kill_process(target.pid, Signal::CONT).expect("going");
                // Catching up is not part of the measurement.
                tokio::time::sleep(Duration::from_millis(500)).await;
                watch.resume();
            }
        }
    }
}

impl FaultTarget {
    /// Bytes of its file system.
    fn used_bytes(&self) -> u64 {
        let stat = rustix::fs::statvfs(&self.data).expect("its size");
        (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    }

    /// Whether its file system could be made as large as this.
    fn resize(&self, size: &str) -> bool {
        let resized = Command::new("mount")
            .args(["-o", &format!("remount,size={size}")])
            .arg(&self.data)
            .stderr(Stdio::null())
            .status();
        resized.is_ok_and(|status| status.success())
    }

    fn limit_file_size(&self, bytes: Option<u64>) {
        let limit = Rlimit {
            current: bytes,
            maximum: None,
        };
        prlimit(Some(self.pid), Resource::Fsize, limit).expect("a limit");
    }
}
