//! What is done to the store, and to the process, while clients work; each fault is over when its future is.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rusqlite::Connection;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::soak::watch::Watch;

/// What the file system of the data directory may hold while it is not full.
pub const ROOM: &str = "4g";
/// No file grows above this while writes fail: the first frame of SQLite's log does not fit.
const SMALL: u64 = 4096;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another connection has the database to itself.
    Locked(Duration),
    /// The file system of the data directory is full.
    Full(Duration),
    /// Writes fail with an I/O error.
    WriteErrors(Duration),
    /// The process stands still: SIGSTOP, then SIGCONT.
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
pub struct Victim {
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
    pub fn is_seen(self) -> bool {
        !matches!(self, Self::Stopped(_))
    }

    /// Whether it can be done here.
    pub fn is_possible(self, victim: &Victim) -> bool {
        victim.is_mounted || !matches!(self, Self::Full(_))
    }

    /// Does it, and undoes it after its time.
    pub async fn inject(self, victim: &Victim, watch: &Watch) {
        match self {
            Self::Locked(time) => {
                let db = Connection::open(victim.data.join("axed.db")).expect("the database");
                db.busy_timeout(Duration::from_secs(30)).expect("a timeout");
                db.execute_batch("BEGIN EXCLUSIVE").expect("the lock");
                tokio::time::sleep(time).await;
                db.execute_batch("ROLLBACK").expect("released");
            }
            Self::Full(time) => {
                // The daemon may have written more since its size was read: then it is no size for the file system.
                let is_full = (0..100).any(|_| victim.resize(&victim.used().to_string()));
                assert!(is_full, "the file system could not be made smaller");
                tokio::time::sleep(time).await;
                assert!(
                    victim.resize(ROOM),
                    "the file system could not be made larger"
                );
            }
            Self::WriteErrors(time) => {
                victim.limit_files(Some(SMALL));
                tokio::time::sleep(time).await;
                victim.limit_files(None);
            }
            Self::Stopped(time) => {
                watch.pause();
                kill_process(victim.pid, Signal::STOP).expect("stopped");
                tokio::time::sleep(time).await;
                kill_process(victim.pid, Signal::CONT).expect("going");
                // What it has to make up for is no part of what is measured.
                tokio::time::sleep(Duration::from_millis(500)).await;
                watch.go_on();
            }
        }
    }
}

impl Victim {
    /// Bytes of its file system.
    fn used(&self) -> u64 {
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

    fn limit_files(&self, bytes: Option<u64>) {
        let limit = Rlimit {
            current: bytes,
            maximum: None,
        };
        prlimit(Some(self.pid), Resource::Fsize, limit).expect("a limit");
    }
}
