//! What `.gitignore` and `.ignore` files of the workdir leave out. They are read through the handle like every other file;
//! nothing above the workdir counts. Knows no walk.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::Dir;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

use crate::domain::glob;
use crate::tools::files::ground::{Ground, Opened};

/// The files that are read, a later one's rules before an earlier one's.
const FILES: [&str; 2] = [".gitignore", ".ignore"];
/// Most bytes of one that are read: hostile ones are no reason to compile for minutes.
const MOST_BYTES: u64 = 64 << 10;
/// Most bytes of all that are in force in one directory: those of a thousand directories within each other would be.
const MOST_IN_FORCE: u64 = 256 << 10;

/// The rules in force in one directory.
#[derive(Debug)]
pub struct Ignored {
    here: Gitignore,
    /// Those of the directories above.
    above: Option<Arc<Ignored>>,
    /// Bytes of both.
    bytes: u64,
}

/// The rules in force in this directory, whose path is below the workdir.
pub fn within(
    ground: &Ground,
    dir: &Dir,
    path: &Path,
    above: Option<&Arc<Ignored>>,
) -> Option<Arc<Ignored>> {
    let mut rules = GitignoreBuilder::new(path);
    let mut bytes = above.map_or(0, |above| above.bytes);
    let mut lines = 0;
    for name in FILES {
        let opened = ground.open_listed(dir, Path::new(name));
        let Ok(Opened::File(file, _)) = opened else {
            continue;
        };
        for line in BufReader::new(file.take(MOST_BYTES)).lines() {
            let Ok(line) = line else { break };
            bytes += line.len() as u64 + 1;
            if bytes > MOST_IN_FORCE {
                break;
            }
            // A line that is no pattern counts for nothing, as with git; so do more braces than the stack has room for.
            if glob::check_braces(&line).is_err() {
                continue;
            }
            let _ = rules.add_line(None, &line);
            lines += 1;
        }
    }
    if lines == 0 {
        return above.cloned();
    }
    match rules.build() {
        Ok(here) => Some(Arc::new(Ignored {
            here,
            above: above.cloned(),
            bytes,
        })),
        Err(_) => above.cloned(),
    }
}

impl Ignored {
    /// Whether what is at this path below the workdir is left out.
    pub fn leaves_out(&self, path: &Path, is_dir: bool) -> bool {
        let mut rules = Some(self);
        while let Some(it) = rules {
            match it.here.matched(path, is_dir) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => rules = it.above.as_deref(),
            }
        }
        false
    }
}
