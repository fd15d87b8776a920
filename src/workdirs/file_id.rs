//! The identity of a file or directory, independent of its path.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use cap_std::fs::{Metadata, MetadataExt};
use serde::{Deserialize, Serialize};

/// What a file or directory is known by, whatever its path: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId {
    /// The device.
    pub device: u64,
    /// The inode on it.
    pub inode: u64,
}

impl FileId {
    /// Of an open file.
    pub fn from_file(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::from_std(&meta))
    }

    /// Of what this describes.
    pub fn from_std(meta: &std::fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }

    /// Of what this describes.
    pub fn from_metadata(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }
}
