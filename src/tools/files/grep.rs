//! `grep`: searches the files of the workdir for a regular expression, in time linear in their length.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use grep_regex::RegexMatcher;
use grep_searcher::{BinaryDetection, Searcher, SearcherBuilder, Sink, SinkFinish, SinkMatch};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::message::shorten;
use crate::tools::files::pattern::{BoundedRegex, IncludeFilter};
use crate::tools::files::walk::{Walk, WalkEntry};
use crate::tools::files::workdir_fs::{
    OpenedEntry, StopToken, WorkdirFs, describe_error, display_path, parse_path,
};

pub const DESCRIPTION: &str = "Search the text files of the working directory for a regular expression. Each line that matches \
                         comes as \"<file>:<line number>: <text>\". What .gitignore and .ignore files leave out is not \
                         searched, nor are .git and binary files. To find files by name, use find_path.";

const MAX_LINES: usize = 1000;
const MAX_LINE_CHARS: usize = 500;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GrepArguments {
    /// The regular expression, as Rust's regex crate reads it: no look-around and no back-references; "(?i)" in front
    /// ignores case. It is matched within single lines.
    pattern: String,
    /// The file or directory to search, relative to the working directory, such as "src". "." searches all.
    #[serde(default = "default_path")]
    path: String,
    /// A glob that a file's name must match, such as "*.rs" or "*.{ts,tsx}"; with a "/" it is matched against the path
    /// relative to the working directory, such as "src/**/*.rs". Empty searches all files.
    #[serde(default)]
    include: String,
}

fn default_path() -> String {
    ".".to_owned()
}

pub fn grep(fs: &WorkdirFs, arguments: GrepArguments) -> Result<String, String> {
    let path = parse_path(&arguments.path)?;
    let BoundedRegex { matcher, max_line } = BoundedRegex::new(&arguments.pattern)?;
    let include = IncludeFilter::new(&arguments.include)?;
    let meta = fs.access.metadata(&path);
    let meta = meta.map_err(|error| describe_error(&path, &error))?;
    let results = GrepResults::new(fs.max_output_bytes());
    if meta.is_dir() {
        let walk = Walk {
            fs,
            respect_ignore_files: true,
            is_parallel: true,
        };
        // A walk enters no link, so a link that the model names is resolved first.
        let start = fs.access.canonicalize(&path);
        let start = start.map_err(|error| describe_error(&path, &error))?;
        let start = parse_path(&start.to_string_lossy()).unwrap_or(path);
        let outcome = walk.run(&start, || {
            let mut searcher = build_searcher(max_line);
            let (matcher, results, include) = (matcher.clone(), &results, &include);
            move |entry: &WalkEntry<'_>| {
                if entry.kind.is_file() && include.is_match(entry.path) {
                    let opened = fs.open_listed(entry.dir, Path::new(entry.name));
                    search_file(fs, &mut searcher, &matcher, results, entry.path, opened);
                }
                !results.is_full()
            }
        });
        fs.stop.check_cancelled()?;
        let summary = SearchSummary {
            is_partial: outcome.is_partial,
            stop: &fs.stop,
            max_line,
        };
        return Ok(results.render(&arguments.pattern, &summary));
    }
    let (file, meta) = fs.open(&path)?;
    let opened = Ok(OpenedEntry::File(file, meta));
    let mut searcher = build_searcher(max_line);
    search_file(fs, &mut searcher, &matcher, &results, &path, opened);
    fs.stop.check_cancelled()?;
    let summary = SearchSummary {
        is_partial: false,
        stop: &fs.stop,
        max_line,
    };
    Ok(results.render(&arguments.pattern, &summary))
}

/// The searcher skips a file with a longer line than `max_line`.
fn build_searcher(max_line: usize) -> Searcher {
    SearcherBuilder::new()
        .binary_detection(BinaryDetection::quit(0))
        .line_number(true)
        .heap_limit(Some(max_line))
        .build()
}

/// Searches one file. Skips it if it cannot be read or is no longer a regular file.
fn search_file(
    fs: &WorkdirFs,
    searcher: &mut Searcher,
    matcher: &RegexMatcher,
    results: &GrepResults,
    path: &Path,
    opened: io::Result<OpenedEntry>,
) {
    let Ok(OpenedEntry::File(file, _)) = opened else {
        results.skipped_files.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let mut matches = FileMatches {
        results,
        path,
        display_path: None,
        text: String::new(),
        count: 0,
    };
    let result = searcher.search_reader(matcher, fs.stop.stoppable_reader(file), &mut matches);
    // Matches found before the timeout count.
    if result.is_err() && !fs.stop.is_stopped() {
        results.skipped_files.fetch_add(1, Ordering::Relaxed);
    }
    let FileMatches { text, count, .. } = matches;
    results.add_file(path, text, count);
}

/// The matches of all threads, by file.
struct GrepResults {
    by_file: Mutex<BTreeMap<PathBuf, String>>,
    bytes: AtomicUsize,
    lines: AtomicUsize,
    skipped_files: AtomicUsize,
    max_bytes: usize,
}

impl GrepResults {
    fn new(max_bytes: usize) -> Self {
        Self {
            by_file: Mutex::default(),
            bytes: AtomicUsize::new(0),
            lines: AtomicUsize::new(0),
            skipped_files: AtomicUsize::new(0),
            max_bytes,
        }
    }

    fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.max_bytes
            || self.lines.load(Ordering::Relaxed) >= MAX_LINES
    }

    fn add_file(&self, path: &Path, text: String, count: usize) {
        if count > 0 {
            self.bytes.fetch_add(text.len(), Ordering::Relaxed);
            self.lines.fetch_add(count, Ordering::Relaxed);
            let mut by_file = self.by_file.lock().unwrap_or_else(PoisonError::into_inner);
            by_file.insert(path.to_owned(), text);
        }
    }

    fn render(self, pattern: &str, summary: &SearchSummary<'_>) -> String {
        let is_full = self.is_full();
        let by_file = self
            .by_file
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        let mut shown_lines = 0;
        for line in by_file.values().flat_map(|lines| lines.lines()) {
            if shown_lines == MAX_LINES
                || (shown_lines > 0 && text.len() + line.len() >= self.max_bytes)
            {
                break;
            }
            text.push_str(line);
            text.push('\n');
            shown_lines += 1;
        }
        if shown_lines == 0 {
            text = format!("no line matches {}\n", shorten(pattern, 200));
        }
        if is_full {
            text.push_str(&format!(
                "... (stopped at {shown_lines} lines; narrow the pattern, the path or include)\n"
            ));
        }
        if let Some(seconds) = summary.stop.exceeded_timeout_secs() {
            text.push_str(&format!(
                "... (stopped after {seconds} seconds, and not everything was searched; use a simpler pattern, or narrow \
                 the path or include)\n"
            ));
        }
        match self.skipped_files.into_inner() {
            0 if !summary.is_partial => {}
            0 => text.push_str("... (some directories could not be read)\n"),
            files => text.push_str(&format!(
                "... ({files} file(s) could not be searched: they cannot be read, or have a line of more than {} bytes, \
                 the most for this pattern)\n",
                summary.max_line
            )),
        }
        text.pop();
        text
    }
}

struct SearchSummary<'a> {
    /// Whether directories were left out.
    is_partial: bool,
    stop: &'a StopToken,
    max_line: usize,
}

/// The matching lines of one file.
struct FileMatches<'a> {
    results: &'a GrepResults,
    path: &'a Path,
    /// The path as it is shown; set with the first match.
    display_path: Option<String>,
    text: String,
    count: usize,
}

impl Sink for &mut FileMatches<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, line_match: &SinkMatch<'_>) -> io::Result<bool> {
        let display_path = self
            .display_path
            .get_or_insert_with(|| display_path(self.path));
        let line = line_match.bytes();
        // A character has at most 4 bytes, so the rest of a long line is never shown.
        let line = &line[..line.len().min(MAX_LINE_CHARS * 4 + 4)];
        let line = String::from_utf8_lossy(line);
        let line = shorten(line.trim_end_matches(['\n', '\r']), MAX_LINE_CHARS);
        // These characters would break the result's line in two.
        let line = line.replace(
            [
                '\r', '\n', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}',
            ],
            " ",
        );
        let number = line_match.line_number().unwrap_or_default();
        self.text
            .push_str(&format!("{display_path}:{number}: {line}\n"));
        self.count += 1;
        Ok(self.count < MAX_LINES && self.text.len() < self.results.max_bytes)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        if finish.binary_byte_offset().is_some() {
            self.text.clear();
            self.count = 0;
        }
        Ok(())
    }
}
