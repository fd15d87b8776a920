//! What `.gitignore` and `.ignore` files of the workdir leave out. They are read through the handle like every other file;
//! nothing above the workdir counts. Knows no walk.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::Dir;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

use crate::domain::glob;
use crate::tools::files::workdir_fs::{OpenedEntry, WorkdirFs};

/// The files that are read, a later one's rules before an earlier one's.
const IGNORE_FILES: [&str; 2] = [".gitignore", ".ignore"];
/// Most bytes of one that are read: hostile ones are no reason to compile for minutes.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Most bytes of all that are in force in one directory: those of a thousand directories within each other would be.
const MAX_TOTAL_BYTES: u64 = 256 << 10;

/// The rules in force in one directory.
#[derive(Debug)]
pub struct IgnoreRules {
    own_rules: Gitignore,
    /// Those of the directories above.
    parent: Option<Arc<IgnoreRules>>,
    /// Bytes of both.
    bytes: u64,
}

/// The rules in force in this directory, whose path is below the workdir.
pub fn load_rules(
    fs: &WorkdirFs,
    dir: &Dir,
    path: &Path,
    parent: Option<&Arc<IgnoreRules>>,
) -> Option<Arc<IgnoreRules>> {
    let mut builder = GitignoreBuilder::new(path);
    let mut bytes = parent.map_or(0, |above| above.bytes);
    let mut lines = 0;
    for name in IGNORE_FILES {
        let opened = fs.open_listed(dir, Path::new(name));
        let Ok(OpenedEntry::File(file, _)) = opened else {
            continue;
        };
        for line in BufReader::new(file.take(MAX_FILE_BYTES)).lines() {
            let Ok(line) = line else { break };
            bytes += line.len() as u64 + 1;
            if bytes > MAX_TOTAL_BYTES {
                break;
            }
            // A line that is no pattern counts for nothing, as with git; so do more braces than the stack has room for.
            if glob::check_braces(&line).is_err() {
                continue;
            }
            let _ = builder.add_line(None, &line);
            lines += 1;
        }
    }
    if lines == 0 {
        return parent.cloned();
    }
    match builder.build() {
        Ok(own_rules) => Some(Arc::new(IgnoreRules {
            own_rules,
            parent: parent.cloned(),
            bytes,
        })),
        Err(_) => parent.cloned(),
    }
}

impl IgnoreRules {
    /// Whether what is at this path below the workdir is left out.
    pub fn is_ignored(&self, path: &Path, is_dir: bool) -> bool {
        let mut current = Some(self);
        while let Some(level) = current {
            match level.own_rules.matched(path, is_dir) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => current = level.parent.as_deref(),
            }
        }
        false
    }
}
