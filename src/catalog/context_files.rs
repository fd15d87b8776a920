//! Finds the context files of a prompt: text files that match globs below a workdir, within fixed limits. Blocking
//! I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::braces::{MAX_ALTERNATIVES, expand_braces};
use crate::catalog::omissions::{Omissions, describe_error};
use crate::domain::glob;
use crate::workdirs::handle::WorkdirHandle;
use crate::workdirs::workdir::Workdir;

/// Maximum number of directory entries that the globs of one agent may visit. `**` visits an entry twice.
const MAX_VISITED: usize = 200_000;
/// Maximum number of context files of one agent.
const MAX_FILES: usize = 10_000;
const MAX_GLOB_BYTES: usize = 4096;
/// A file is binary if these first bytes contain a NUL.
const SNIFF_BYTES: u64 = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextFile {
    /// Relative to the workdir, with `/`.
    pub path: String,
    /// The content without trailing newlines.
    pub text: String,
}

/// The context files of a prompt, sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextFiles {
    pub files: Vec<ContextFile>,
    /// Why other matches are not among the files, for a person; the first ten, then the number of the others.
    pub omissions: Vec<String>,
}

/// Returns the files that match the globs. Omits binary and unreadable files, files that resolve outside of the workdir,
/// and the daemon's own files.
///
/// # Errors
/// A glob is invalid, or the files exceed `max_bytes` in total.
pub fn collect(
    globs: &[String],
    workdir: &Arc<Workdir>,
    max_bytes: usize,
) -> Result<ContextFiles, String> {
    if globs.is_empty() {
        return Ok(ContextFiles::default());
    }
    let access = WorkdirHandle::new(Arc::clone(workdir));
    let mut search = GlobSearch::new(&access, MAX_VISITED);
    let mut omissions = Omissions::new(globs);
    for glob in globs {
        if is_outside_workdir(glob) {
            omissions.add(glob, "leads out of the workdir");
        }
        for steps in compile(glob)? {
            search.walk(Path::new(""), "", &steps)?;
        }
    }
    let files = read_all(&access, search.matches, max_bytes, &mut omissions)?;
    Ok(ContextFiles {
        files,
        omissions: omissions.into_messages(),
    })
}

/// Whether the glob matches any file. Visits at most `visits` directory entries, and subtracts those that it visited;
/// `None` if that is not enough to know.
pub fn matches_any(glob: &str, workdir: &Arc<Workdir>, visits: &mut usize) -> Option<bool> {
    let access = WorkdirHandle::new(Arc::clone(workdir));
    let mut search = GlobSearch {
        finds_one: true,
        ..GlobSearch::new(&access, *visits)
    };
    let mut alternatives = compile(glob).ok()?.into_iter();
    let searched = alternatives.try_for_each(|steps| search.walk(Path::new(""), "", &steps));
    *visits = visits.saturating_sub(search.visited);
    match search.matches.is_empty() {
        false => Some(true),
        true => searched.ok().map(|()| false),
    }
}

/// Checks the syntax of a glob; the contract fixes the error texts.
pub fn check_glob(glob: &str) -> Result<(), String> {
    compile(glob).map(drop)
}

/// Whether a glob cannot match because it is not below the workdir.
pub fn is_outside_workdir(glob: &str) -> bool {
    glob.starts_with('/') || glob.starts_with("~/") || glob.split('/').any(|step| step == "..")
}

fn read_all(
    access: &WorkdirHandle,
    matches: BTreeMap<String, PathBuf>,
    max_bytes: usize,
    omissions: &mut Omissions<'_>,
) -> Result<Vec<ContextFile>, String> {
    let mut files = Vec::new();
    let mut resolved = BTreeSet::new();
    let mut total: u64 = 0;
    for (path, path_in_workdir) in matches {
        let resolved_path = match access.canonicalize(&path_in_workdir) {
            Ok(resolved_path) => resolved_path,
            Err(error) => {
                // A glob with wildcards, such as `*/README.md`, also finds names that do not exist.
                let is_found = access.symlink_metadata(&path_in_workdir).is_ok();
                if is_found || omissions.is_named(&path) {
                    omissions.add(&path, describe_error(&error));
                }
                continue;
            }
        };
        if !resolved.insert(resolved_path.clone()) {
            continue;
        }
        let remaining = (max_bytes as u64).saturating_sub(total);
        let (size, text) = match read_text(access, &resolved_path, remaining) {
            Ok(Some(read)) => read,
            Ok(None) => continue,
            Err(reason) => {
                omissions.add(&path, reason);
                continue;
            }
        };
        // Beyond the limit, sizes are still added up for the error message.
        total = total.saturating_add(size);
        if total <= max_bytes as u64 {
            files.push(ContextFile { path, text });
        }
        if files.len() > MAX_FILES {
            return Err(format!(
                "more than {MAX_FILES} files match; narrow the globs in files"
            ));
        }
    }
    if total > max_bytes as u64 {
        return Err(format!(
            "the context files hold {total} bytes, and limits.context_files allows {max_bytes}; narrow the globs in \
             files, or raise limits.context_files in the server's configuration"
        ));
    }
    Ok(files)
}

/// The size and text of a text file; if the file exceeds the limit, only the size. `None` for a directory.
fn read_text(
    access: &WorkdirHandle,
    path: &Path,
    max_bytes: u64,
) -> Result<Option<(u64, String)>, &'static str> {
    let unreadable = |error: io::Error| describe_error(&error);
    let Some(mut file) = access.open_regular(path).map_err(unreadable)? else {
        let is_dir = access.metadata(path).is_ok_and(|meta| meta.is_dir());
        return match is_dir {
            true => Ok(None),
            false => Err("is not a regular file"),
        };
    };
    let mut bytes = Vec::new();
    let mut beginning = file.by_ref().take(SNIFF_BYTES);
    beginning.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.contains(&0) {
        return Err("is a binary file");
    }
    let length = file.metadata().map_err(unreadable)?.len();
    let size = length.max(bytes.len() as u64);
    if size > max_bytes {
        return Ok(Some((size, String::new())));
    }
    // The file may have grown since.
    let remaining = (max_bytes + 1).saturating_sub(bytes.len() as u64);
    let mut rest = file.take(remaining);
    rest.read_to_end(&mut bytes).map_err(unreadable)?;
    let size = bytes.len() as u64;
    let mut text = String::from_utf8(bytes).map_err(|_| "is not UTF-8 text")?;
    text.truncate(text.trim_end_matches(['\n', '\r']).len());
    Ok(Some((size, text)))
}

/// A path component of a glob.
#[derive(Clone, Debug)]
enum GlobSegment {
    /// `**`: this directory and all directories below it, except links.
    AnyDepth,
    /// A name without wildcards.
    Name(String),
    /// A name with wildcards.
    Wildcard(glob::Matcher),
}

struct GlobSearch<'a> {
    access: &'a WorkdirHandle,
    matches: BTreeMap<String, PathBuf>,
    visited: usize,
    max_visited: usize,
    /// Whether the first file that matches ends the search.
    finds_one: bool,
}

impl<'a> GlobSearch<'a> {
    fn new(access: &'a WorkdirHandle, max_visited: usize) -> Self {
        Self {
            access,
            matches: BTreeMap::new(),
            visited: 0,
            max_visited,
            finds_one: false,
        }
    }

    /// Finds the files that match the steps below `dir`. `prefix` is its path as text: empty or with a trailing
    /// slash.
    fn walk(&mut self, dir: &Path, prefix: &str, steps: &[GlobSegment]) -> Result<(), String> {
        let Some((step, rest)) = steps.split_first() else {
            return Ok(());
        };
        if self.finds_one && !self.matches.is_empty() {
            return Ok(());
        }
        match step {
            GlobSegment::Name(name) => {
                self.count_visit()?;
                self.visit(dir.join(name), format!("{prefix}{name}"), rest)?;
            }
            GlobSegment::Wildcard(matcher) => {
                for (name, path, _) in self.entries(dir)? {
                    if matcher.is_match(Path::new(&name)) {
                        self.visit(path, format!("{prefix}{name}"), rest)?;
                    }
                }
            }
            GlobSegment::AnyDepth => {
                self.walk(dir, prefix, rest)?;
                for (name, path, is_real_dir) in self.entries(dir)? {
                    let relative = format!("{prefix}{name}");
                    if is_real_dir {
                        self.walk(&path, &format!("{relative}/"), steps)?;
                    } else if rest.is_empty() {
                        self.record(relative, path);
                    }
                }
            }
        }
        Ok(())
    }

    /// Records the entry if no step is left; otherwise enters it. A link is only entered if its target is inside the
    /// workdir.
    fn visit(
        &mut self,
        path: PathBuf,
        relative: String,
        rest: &[GlobSegment],
    ) -> Result<(), String> {
        if rest.is_empty() {
            self.record(relative, path);
            return Ok(());
        }
        let meta = self.access.metadata(&path);
        if meta.is_ok_and(|meta| meta.is_dir()) {
            self.walk(&path, &format!("{relative}/"), rest)?;
        }
        Ok(())
    }

    fn record(&mut self, relative: String, path: PathBuf) {
        let is_file = || self.access.metadata(&path).is_ok_and(|meta| meta.is_file());
        if !self.finds_one || is_file() {
            self.matches.insert(relative, path);
        }
    }

    /// Name, path, and whether the entry is a directory and not a link. Empty for a directory that is unreadable or
    /// reserved for the daemon.
    fn entries(&mut self, dir: &Path) -> Result<Vec<(String, PathBuf, bool)>, String> {
        let path = match dir.as_os_str().is_empty() {
            true => Path::new("."),
            false => dir,
        };
        let listing = self.access.open_dir(path);
        let Ok(listing) = listing.and_then(|dir| dir.entries()) else {
            return Ok(Vec::new());
        };
        let mut entries = Vec::new();
        for entry in listing.flatten() {
            self.count_visit()?;
            let is_real_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = entry.file_name();
            let display_name = name.to_string_lossy().into_owned();
            entries.push((display_name, dir.join(name), is_real_dir));
        }
        Ok(entries)
    }

    fn count_visit(&mut self) -> Result<(), String> {
        self.visited += 1;
        match self.visited > self.max_visited {
            true => Err(format!(
                "the globs visit more than {} directory entries; narrow them",
                self.max_visited
            )),
            false => Ok(()),
        }
    }
}

/// The step lists of a glob, one for each alternative; empty if the glob leads out of the workdir.
fn compile(glob: &str) -> Result<Vec<Vec<GlobSegment>>, String> {
    let invalid = |why: &str| format!("invalid glob pattern \"{glob}\": {why}");
    if glob.trim().is_empty() {
        return Err(invalid("it is empty"));
    }
    if glob.len() > MAX_GLOB_BYTES || glob.contains('\0') {
        return Err("invalid glob pattern: it is too long or contains a NUL".to_owned());
    }
    let matcher = |text: &str| glob::Matcher::for_paths(text).map_err(|why| invalid(&why));
    matcher(glob)?;
    let mut expansions = Vec::new();
    for alternative in expand_braces(glob).ok_or_else(|| {
        invalid(&format!(
            "its braces make more than {MAX_ALTERNATIVES} alternatives"
        ))
    })? {
        if is_outside_workdir(&alternative) {
            continue;
        }
        let mut steps: Vec<GlobSegment> = Vec::new();
        for part in alternative.split('/').filter(|it| !matches!(*it, "" | ".")) {
            let step = match part {
                // Two in a row match the same files as one, but slower.
                "**" if matches!(steps.last(), Some(GlobSegment::AnyDepth)) => continue,
                "**" => GlobSegment::AnyDepth,
                name if !name.contains(['*', '?', '[', '\\']) => GlobSegment::Name(name.to_owned()),
                wild => GlobSegment::Wildcard(matcher(wild)?),
            };
            steps.push(step);
        }
        expansions.push(steps);
    }
    Ok(expansions)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::Arc;

    use super::{check_glob, collect, matches_any};
    use crate::workdirs::registry::Workdirs;
    use crate::workdirs::reserved::ReservedPaths;
    use crate::workdirs::workdir::Workdir;

    fn write(root: &Path, files: &[(&str, &[u8])]) {
        for (path, bytes) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, bytes).expect("a file");
        }
    }

    fn workdir(path: &Path) -> Arc<Workdir> {
        let workdirs = Workdirs::new(path.to_owned(), &[], ReservedPaths::default());
        workdirs.open(None, None).expect("a workdir")
    }

    fn names(root: &Path, globs: &[&str]) -> Vec<String> {
        let globs: Vec<String> = globs.iter().map(|glob| (*glob).to_owned()).collect();
        let files = collect(&globs, &workdir(root), 1 << 20).expect("files");
        files.files.into_iter().map(|file| file.path).collect()
    }

    #[test]
    fn globs_find_each_text_file_once_sorted_by_path() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path();
        let far = [b"a".repeat(512), vec![0]].concat();
        write(
            root,
            &[
                ("b.md", b"b"),
                ("a.md", b"a"),
                ("docs/deep/c.md", b"c"),
                ("docs/d.rs", b"d"),
                ("docs/api/e.rs", b"e"),
                ("bin.md", b"x\0y"),
                ("late.txt", &far),
                ("latin.md", b"\xe4"),
                ("docs/[x].md", b"x"),
            ],
        );
        assert_eq!(
            names(root, &["**/*.md", "a.md", "./b.md"]),
            ["a.md", "b.md", "docs/[x].md", "docs/deep/c.md"]
        );
        assert_eq!(names(root, &["*.md"]), ["a.md", "b.md"]);
        assert_eq!(
            names(root, &["docs/**"]),
            [
                "docs/[x].md",
                "docs/api/e.rs",
                "docs/d.rs",
                "docs/deep/c.md"
            ]
        );
        assert_eq!(
            names(root, &["{docs/api,docs}/*.{rs,toml}"]),
            ["docs/api/e.rs", "docs/d.rs"]
        );
        assert_eq!(names(root, &["docs/[[]x].md"]), ["docs/[x].md"]);
        assert_eq!(names(root, &["late.txt"]), ["late.txt"]);
        assert_eq!(names(root, &["docs", "nothing/*"]), Vec::<String>::new());

        let matches = |glob, mut visits| matches_any(glob, &workdir(root), &mut visits);
        assert_eq!(matches("**/*.md", 100), Some(true));
        assert_eq!(matches("docs", 100), Some(false));
        assert_eq!(matches("{nothing,docs}/*", 100), Some(true));
        assert_eq!(matches("**/*.py", 3), None);
    }

    #[test]
    fn files_outside_are_not_found_and_links_inside_are_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("work");
        write(
            dir.path(),
            &[("work/in/a.md", b"a"), ("out/secret.md", b"s")],
        );
        symlink("../out", root.join("escape")).expect("a link");
        symlink("../out/secret.md", root.join("link.md")).expect("a link");
        symlink("in", root.join("alias")).expect("a link");
        symlink("in/a.md", root.join("z.md")).expect("a link");
        symlink("loop", root.join("loop")).expect("a link");
        for outward in [
            "../out/*",
            "/etc/host*",
            "in/../../out/*",
            "escape/*",
            "escape/**",
            "link.md",
        ] {
            assert_eq!(names(&root, &[outward]), Vec::<String>::new(), "{outward}");
        }
        // `**` does not enter linked directories, but a named step does. Each file is listed once.
        assert_eq!(names(&root, &["**/*.md"]), ["in/a.md"]);
        assert_eq!(names(&root, &["alias/*.md"]), ["alias/a.md"]);
        assert_eq!(names(&root, &["z.md", "loop", "loop/*"]), ["z.md"]);
    }

    #[test]
    fn omitted_files_are_named_with_the_reason() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("work");
        write(
            dir.path(),
            &[
                ("work/a.md", b"a"),
                ("work/bin.md", b"x\0y"),
                ("work/latin.md", b"\xe4"),
                ("work/docs/b.md", b"b"),
                ("out/secret.md", b"s"),
            ],
        );
        symlink("../out/secret.md", root.join("link.md")).expect("a link");
        symlink("nothing", root.join("lost.md")).expect("a link");
        let globs = ["*.md", "missing.md", "*/missing.md", "docs", "../out/*"];
        let globs = globs.map(str::to_owned);
        let found = collect(&globs, &workdir(&root), 1 << 20).expect("files");
        assert_eq!(found.files.len(), 1);
        assert_eq!(
            found.omissions,
            [
                "context file ../out/* is left out: it leads out of the workdir",
                "context file bin.md is left out: it is a binary file",
                "context file latin.md is left out: it is not UTF-8 text",
                "context file link.md is left out: it leads out of the workdir",
                "context file lost.md is left out: it does not exist",
                "context file missing.md is left out: it does not exist",
            ]
        );
        for index in 0..9 {
            write(&root, &[(&format!("z{index}.md"), b"\0")]);
        }
        let found = collect(&globs[..1], &workdir(&root), 1 << 20).expect("files");
        assert_eq!(found.omissions.len(), 11);
        assert_eq!(found.omissions[10], "3 more context files are left out");
    }

    #[test]
    fn pipes_are_not_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let status = std::process::Command::new("mkfifo")
            .arg(dir.path().join("pipe.md"))
            .status();
        assert!(status.expect("mkfifo").success());
        assert_eq!(names(dir.path(), &["*"]), Vec::<String>::new());
    }

    #[test]
    fn too_many_files_are_an_error_with_the_amount() {
        let dir = tempfile::tempdir().expect("a directory");
        write(
            dir.path(),
            &[("a", &[b'a'; 60]), ("b", &[b'b'; 60]), ("c", &[0; 60])],
        );
        let globs = ["*".to_owned()];
        assert_eq!(
            collect(&globs, &workdir(dir.path()), 120).map(|files| files.files.len()),
            Ok(2)
        );
        let why = collect(&globs, &workdir(dir.path()), 119).expect_err("too much");
        assert!(
            why.starts_with(
                "the context files hold 120 bytes, and limits.context_files allows 119;"
            ),
            "{why}"
        );
    }

    #[test]
    fn invalid_globs_are_errors() {
        assert_eq!(
            check_glob("{a"),
            Err("invalid glob pattern \"{a\": unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)".to_owned())
        );
        assert_eq!(
            check_glob(" "),
            Err("invalid glob pattern \" \": it is empty".to_owned())
        );
        let many = "{a,b}".repeat(9);
        assert!(
            check_glob(&many)
                .expect_err("too many")
                .contains("alternatives")
        );
        assert_eq!(check_glob("docs/**/*.{md,txt}"), Ok(()));
    }
}
