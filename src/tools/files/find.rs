//! `find_path`: matches a glob against the paths of the workdir.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use schemars::JsonSchema;
use serde::Deserialize;

use crate::tools::files::pattern::compile_glob;
use crate::tools::files::walk::SortedLines;
use crate::tools::files::walk::Walk;
use crate::tools::files::workdir_fs::{WorkdirFs, display_path, parse_path};

pub const DESCRIPTION: &str = "Find files and directories of the working directory by a glob over their paths, such as \
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

pub fn find_path(fs: &WorkdirFs, arguments: FindPath) -> Result<String, String> {
    let pattern = normalize_pattern(&arguments.pattern)?;
    let glob = compile_glob("pattern", &pattern)?;
    let lines = Mutex::new(SortedLines::default());
    let walk = Walk {
        fs,
        respect_ignore_files: false,
        is_parallel: false,
    };
    let start_dir = start_dir(&pattern);
    let is_dir = fs
        .access
        .symlink_metadata(&start_dir)
        .is_ok_and(|meta| meta.is_dir());
    let outcome = is_dir.then(|| {
        walk.run(&start_dir, || {
            |entry| {
                if glob.is_match(entry.path) {
                    let suffix = if entry.kind.is_dir() { "/" } else { "" };
                    let line = format!("{}{suffix}", display_path(entry.path));
                    lines
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .insert(line);
                }
                true
            }
        })
    });
    fs.stop.check_cancelled()?;
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut text = lines
        .render(
            fs.max_output_bytes(),
            "paths; a narrower pattern finds fewer",
        )
        .unwrap_or_else(|| format!("nothing matches {pattern}"));
    if let Some(seconds) = fs.stop.exceeded_timeout_secs() {
        text.push_str(&format!(
            "\n... (stopped after {seconds} seconds, and not everything was searched; begin the pattern with a directory)"
        ));
    }
    if outcome.is_some_and(|walked| walked.is_partial) {
        text.push_str("\n... (some directories could not be read)");
    }
    Ok(text)
}

/// The pattern without redundant parts such as `./`.
fn normalize_pattern(text: &str) -> Result<String, String> {
    let text = text
        .strip_prefix("./")
        .unwrap_or(text)
        .trim_end_matches('/');
    // The same error texts as for an invalid path.
    let has_parent_dir = text.split('/').any(|part| part == "..");
    if text.is_empty() || text.starts_with('/') || has_parent_dir {
        parse_path(text)?;
        return Err("a pattern with \"..\" matches nothing; name the path without it".to_owned());
    }
    Ok(text.to_owned())
}

/// The deepest directory that contains every possible match.
fn start_dir(pattern: &str) -> PathBuf {
    let is_plain = |part: &&str| !part.contains(['*', '?', '[', ']', '{', '}', '\\', '!']);
    let parts: Vec<&str> = pattern.split('/').collect();
    let parents = &parts[..parts.len().saturating_sub(1)];
    // A brace may contain a slash. The parts before the first special character are plain in any case.
    let path: PathBuf = parents.iter().copied().take_while(is_plain).collect();
    match path.as_os_str().is_empty() {
        true => Path::new(".").to_owned(),
        false => path,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{normalize_pattern, start_dir};

    #[test]
    fn a_walk_starts_in_the_deepest_common_directory() {
        for (pattern, expected) in [
            ("**/*.rs", "."),
            ("src/**/*.rs", "src"),
            ("src/tools/mod.rs", "src/tools"),
            ("a/{b/c,d}/e", "a"),
            ("x", "."),
        ] {
            assert_eq!(start_dir(pattern), Path::new(expected), "{pattern}");
        }
    }

    #[test]
    fn patterns_out_of_the_workdir_are_rejected() {
        for bad in ["/etc/*", "../*", "a/../*", ""] {
            assert!(normalize_pattern(bad).is_err(), "{bad}");
        }
        assert_eq!(normalize_pattern("./src/*/").as_deref(), Ok("src/*"));
    }
}
