//! `find_path`: a glob over the workdir.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::ground::{Ground, place, shown};
use crate::tools::files::pattern::glob;
use crate::tools::files::sorted::Sorted;
use crate::tools::files::walk::Walk;

/// What models are told.
pub const ABOUT: &str = "Find files and directories of the working directory by a glob over their paths, such as \
                         \"**/*.rs\" or \"src/*/mod.rs\". \"*\" stands for anything within a name, \"**\" for any \
                         directories, {a,b} for one of both. One path a line, sorted, directories end in \"/\". Hidden \
                         and ignored files are found too. To look for text in files, use grep.";

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FindPath {
    /// The glob, matched against whole paths relative to the working directory: "*.md" finds only what is directly in it,
    /// "**/*.md" all.
    pattern: String,
}

/// Finds them.
pub fn find(ground: &Ground, asked: FindPath) -> Result<String, String> {
    let pattern = pattern(&asked.pattern)?;
    let glob = glob("pattern", &pattern)?;
    let lines = Mutex::new(Sorted::default());
    let walk = Walk {
        ground,
        respects_ignores: false,
        may_be_helped: false,
    };
    let start = start(&pattern);
    let is_dir = ground
        .access
        .symlink_metadata(&start)
        .is_ok_and(|meta| meta.is_dir());
    let walked = is_dir.then(|| {
        walk.run(&start, || {
            |found| {
                if glob.is_match(found.path) {
                    let end = if found.kind.is_dir() { "/" } else { "" };
                    let line = format!("{}{end}", shown(found.path));
                    lines
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .put(line);
                }
                true
            }
        })
    });
    ground.stop.check_cancelled()?;
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut text = lines
        .text(ground.room(), "paths; a narrower pattern finds fewer")
        .unwrap_or_else(|| format!("nothing matches {pattern}"));
    if let Some(seconds) = ground.stop.overdue() {
        text.push_str(&format!(
            "\n... (stopped after {seconds} seconds, and not everything was looked at; begin the pattern with a directory)"
        ));
    }
    if walked.is_some_and(|walked| walked.is_partial) {
        text.push_str("\n... (some directories could not be read)");
    }
    Ok(text)
}

/// The pattern as it is matched, without what means nothing in a path.
fn pattern(text: &str) -> Result<String, String> {
    let text = text
        .strip_prefix("./")
        .unwrap_or(text)
        .trim_end_matches('/');
    // The same words as for a path that is none.
    let is_up = text.split('/').any(|part| part == "..");
    if text.is_empty() || text.starts_with('/') || is_up {
        place(text)?;
        return Err("a pattern with \"..\" matches nothing; name the path without it".to_owned());
    }
    Ok(text.to_owned())
}

/// The directory that everything that can match is in.
fn start(pattern: &str) -> PathBuf {
    let is_plain = |part: &&str| !part.contains(['*', '?', '[', ']', '{', '}', '\\', '!']);
    let parts: Vec<&str> = pattern.split('/').collect();
    let above = &parts[..parts.len().saturating_sub(1)];
    // A brace may span parts: what comes before the first sign of one is plain in any case.
    let path: PathBuf = above.iter().copied().take_while(is_plain).collect();
    match path.as_os_str().is_empty() {
        true => Path::new(".").to_owned(),
        false => path,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{pattern, start};

    #[test]
    fn a_walk_starts_where_all_that_matches_is() {
        for (pattern, at) in [
            ("**/*.rs", "."),
            ("src/**/*.rs", "src"),
            ("src/tools/mod.rs", "src/tools"),
            ("a/{b/c,d}/e", "a"),
            ("x", "."),
        ] {
            assert_eq!(start(pattern), Path::new(at), "{pattern}");
        }
    }

    #[test]
    fn patterns_that_lead_out_are_refused() {
        for bad in ["/etc/*", "../*", "a/../*", ""] {
            assert!(pattern(bad).is_err(), "{bad}");
        }
        assert_eq!(pattern("./src/*/").as_deref(), Ok("src/*"));
    }
}
