//! The rules of the workdir's `.gitignore` and `.ignore` files. They are read through the handle like every other file;
//! files above the workdir have no effect.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::Dir;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

use crate::domain::glob;
use crate::tools::files::workdir_fs::{OpenedEntry, WorkdirFs};

/// Rules of a later file override those of an earlier one.
const IGNORE_FILES: [&str; 2] = [".gitignore", ".ignore"];
/// Most bytes of one file. Bounds the time to compile the rules of a hostile one.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Most bytes of all rules that apply in one directory. Bounds the rules of deeply nested directories.
const MAX_TOTAL_BYTES: u64 = 256 << 10;

/// The rules that apply in one directory.
#[derive(Debug)]
pub struct IgnoreRules {
    own_rules: Gitignore,
    /// The rules of the directories above.
    parent: Option<Arc<IgnoreRules>>,
    /// Bytes of both.
    bytes: u64,
}

/// Loads the rules that apply in this directory. `path` is relative to the workdir.
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
            // Like git, skip a line that is no valid pattern. Also skip one with so many braces that parsing overflows
            // the stack.
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
    /// Whether this path, relative to the workdir, is ignored.
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
