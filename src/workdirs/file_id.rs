//! The identity of a file or directory, independent of its path.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use cap_std::fs::{Metadata, MetadataExt};
use serde::{Deserialize, Serialize};

/// The identity of a file or directory: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

/// A directory that was opened before.
#[derive(Clone, Copy, Debug)]
pub struct KnownDir {
    pub id: FileId,
    /// Whether another machine may have opened it. Each numbers the devices of shared storage itself, so that only the inode counts.
    pub is_elsewhere: bool,
}

impl KnownDir {
    pub fn is(self, id: FileId) -> bool {
        self.id.inode == id.inode && (self.is_elsewhere || self.id.device == id.device)
    }
}

impl FileId {
    pub fn from_file(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::from_std(&meta))
    }

    pub fn from_std(meta: &std::fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }

    pub fn from_metadata(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }
}
