//! `grep`: a regular expression over the files of the workdir, in time that is linear in their length.

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
use crate::tools::files::ground::{Ground, Opened, Stop, place, shown, told};
use crate::tools::files::pattern::{Include, Regex};
use crate::tools::files::walk::{Found, Walk};

/// What models are told.
pub const ABOUT: &str = "Search the text files of the working directory for a regular expression. Each line that matches \
                         comes as \"<file>:<line number>: <text>\". What .gitignore and .ignore files leave out is not \
                         searched, nor are .git and binary files. To find files by name, use find_path.";

/// Most lines that are shown.
const MOST_LINES: usize = 1000;
/// Most characters of a line that are shown.
const SHOWN_LINE: usize = 500;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Grep {
    /// The regular expression, as Rust's regex crate reads it: no look-around and no back-references; "(?i)" in front
    /// ignores case. It is matched within single lines.
    pattern: String,
    /// The file or directory to search, relative to the working directory, such as "src". "." searches all.
    #[serde(default = "everywhere")]
    path: String,
    /// A glob that a file's name must match, such as "*.rs" or "*.{ts,tsx}"; with a "/" it is matched against the path
    /// relative to the working directory, such as "src/**/*.rs". Empty searches all files.
    #[serde(default)]
    include: String,
}

fn everywhere() -> String {
    ".".to_owned()
}

/// Searches.
pub fn grep(ground: &Ground, asked: Grep) -> Result<String, String> {
    let path = place(&asked.path)?;
    let Regex { matcher, max_line } = Regex::new(&asked.pattern)?;
    let include = Include::new(&asked.include)?;
    let meta = ground.access.metadata(&path);
    let meta = meta.map_err(|error| told(&path, &error))?;
    let hits = Hits::new(ground.room());
    if meta.is_dir() {
        let walk = Walk {
            ground,
            respects_ignores: true,
            may_be_helped: true,
        };
        // A walk enters no link; one that the model names is resolved first.
        let start = ground.access.canonicalize(&path);
        let start = start.map_err(|error| told(&path, &error))?;
        let start = place(&start.to_string_lossy()).unwrap_or(path);
        let walked = walk.run(&start, || {
            let mut searcher = searcher(max_line);
            let (matcher, hits, include) = (matcher.clone(), &hits, &include);
            move |found: &Found<'_>| {
                if found.kind.is_file() && include.takes(found.path) {
                    let opened = ground.open_listed(found.dir, Path::new(found.name));
                    search(ground, &mut searcher, &matcher, hits, found.path, opened);
                }
                !hits.is_full()
            }
        });
        ground.stop.check_cancelled()?;
        let end = End {
            is_partial: walked.is_partial,
            stop: &ground.stop,
            max_line,
        };
        return Ok(hits.text(&asked.pattern, &end));
    }
    let (file, meta) = ground.open(&path)?;
    let opened = Ok(Opened::File(file, meta));
    let mut searcher = searcher(max_line);
    search(ground, &mut searcher, &matcher, &hits, &path, opened);
    ground.stop.check_cancelled()?;
    let end = End {
        is_partial: false,
        stop: &ground.stop,
        max_line,
    };
    Ok(hits.text(&asked.pattern, &end))
}

/// A file with a longer line than this is left out.
fn searcher(max_line: usize) -> Searcher {
    SearcherBuilder::new()
        .binary_detection(BinaryDetection::quit(0))
        .line_number(true)
        .heap_limit(Some(max_line))
        .build()
}

/// Searches one file; one that is none any more, or cannot be read, is left out.
fn search(
    ground: &Ground,
    searcher: &mut Searcher,
    matcher: &RegexMatcher,
    hits: &Hits,
    path: &Path,
    opened: io::Result<Opened>,
) {
    let Ok(Opened::File(file, _)) = opened else {
        hits.left_out.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let mut lines = Lines {
        hits,
        path,
        name: None,
        text: String::new(),
        count: 0,
    };
    let searched = searcher.search_reader(matcher, ground.stop.reading(file), &mut lines);
    // What has been found before the time was up counts.
    if searched.is_err() && !ground.stop.is_set() {
        hits.left_out.fetch_add(1, Ordering::Relaxed);
    }
    let Lines { text, count, .. } = lines;
    hits.put(path, text, count);
}

/// What all threads have found, by file.
struct Hits {
    found: Mutex<BTreeMap<PathBuf, String>>,
    bytes: AtomicUsize,
    lines: AtomicUsize,
    left_out: AtomicUsize,
    room: usize,
}

impl Hits {
    fn new(room: usize) -> Self {
        Self {
            found: Mutex::default(),
            bytes: AtomicUsize::new(0),
            lines: AtomicUsize::new(0),
            left_out: AtomicUsize::new(0),
            room,
        }
    }

    fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.room
            || self.lines.load(Ordering::Relaxed) >= MOST_LINES
    }

    fn put(&self, path: &Path, text: String, count: usize) {
        if count > 0 {
            self.bytes.fetch_add(text.len(), Ordering::Relaxed);
            self.lines.fetch_add(count, Ordering::Relaxed);
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.insert(path.to_owned(), text);
        }
    }

    fn text(self, pattern: &str, end: &End<'_>) -> String {
        let is_full = self.is_full();
        let found = self
            .found
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        let mut lines = 0;
        for line in found.values().flat_map(|lines| lines.lines()) {
            if lines == MOST_LINES || (lines > 0 && text.len() + line.len() >= self.room) {
                break;
            }
            text.push_str(line);
            text.push('\n');
            lines += 1;
        }
        if lines == 0 {
            text = format!("no line matches {}\n", shorten(pattern, 200));
        }
        if is_full {
            text.push_str(&format!(
                "... (stopped at {lines} lines; narrow the pattern, the path or include)\n"
            ));
        }
        if let Some(seconds) = end.stop.overdue() {
            text.push_str(&format!(
                "... (stopped after {seconds} seconds, and not everything was searched; use a simpler pattern, or narrow \
                 the path or include)\n"
            ));
        }
        match self.left_out.into_inner() {
            0 if !end.is_partial => {}
            0 => text.push_str("... (some directories could not be read)\n"),
            files => text.push_str(&format!(
                "... ({files} file(s) could not be searched: they cannot be read, or have a line of more than {} bytes, \
                 the most for this pattern)\n",
                end.max_line
            )),
        }
        text.pop();
        text
    }
}

/// How a search ended.
struct End<'a> {
    /// Whether directories were left out.
    is_partial: bool,
    stop: &'a Stop,
    max_line: usize,
}

/// The lines of one file that match.
struct Lines<'a> {
    hits: &'a Hits,
    path: &'a Path,
    /// The path as it is shown, once there is a line.
    name: Option<String>,
    text: String,
    count: usize,
}

impl Sink for &mut Lines<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        let name = self.name.get_or_insert_with(|| shown(self.path));
        let line = found.bytes();
        // Only so many bytes can become so many characters; the rest of a long line is not looked at.
        let line = &line[..line.len().min(SHOWN_LINE * 4 + 4)];
        let line = String::from_utf8_lossy(line);
        let line = shorten(line.trim_end_matches(['\n', '\r']), SHOWN_LINE);
        // A carriage return or the like within a line would make two of it.
        let line = line.replace(
            [
                '\r', '\n', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}',
            ],
            " ",
        );
        let number = found.line_number().unwrap_or_default();
        self.text.push_str(&format!("{name}:{number}: {line}\n"));
        self.count += 1;
        Ok(self.count < MOST_LINES && self.text.len() < self.hits.room)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        if finish.binary_byte_offset().is_some() {
            self.text.clear();
            self.count = 0;
        }
        Ok(())
    }
}
