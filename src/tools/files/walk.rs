//! Walks through the directories of a workdir by handle, on several threads if there are many. Links are reported and
//! never followed; a directory that becomes a link meanwhile is not entered.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cap_std::fs::{Dir, FileType, ReadDir};

use crate::tools::files::gitignore::{self, IgnoreRules};
use crate::tools::files::workdir_fs::WorkdirFs;
use crate::workdirs::reserved::ReservedError;

/// Files of one directory that are visited as one work item.
const BATCH_SIZE: usize = 64;
/// Other threads help only after this many items: a small tree is done before a thread starts.
const PARALLEL_THRESHOLD: usize = 16;
/// Files are shared with other threads only while fewer items than this are queued.
const MAX_SHARED_BATCHES: usize = 256;
/// Most queued items. More are left out, with a notice.
const MAX_QUEUED: usize = 100_000;

pub struct WalkEntry<'a> {
    pub dir: &'a Dir,
    pub name: &'a OsStr,
    /// Relative to the workdir.
    pub path: &'a Path,
    pub kind: FileType,
}

pub struct Walk<'a> {
    pub fs: &'a WorkdirFs,
    /// Whether to apply ignore files and skip `.git`.
    pub respect_ignore_files: bool,
    /// Whether other threads may help.
    pub is_parallel: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalkOutcome {
    /// Whether directories were left out, because they could not be read or there were too many.
    pub is_partial: bool,
}

impl Walk<'_> {
    /// Visits everything below `start`, a path relative to the workdir. Each thread has its own visitor; one that
    /// returns `false` ends the walk.
    pub fn run<V>(&self, start: &Path, visitor: impl Fn() -> V + Sync) -> WalkOutcome
    where
        V: FnMut(&WalkEntry<'_>) -> bool,
    {
        let queue = WorkQueue::default();
        let rules = self.rules_above(start);
        queue.push(WorkItem::Directory(start.to_owned(), rules));
        let worker = Worker {
            walk: self,
            queue: &queue,
        };
        std::thread::scope(|scope| {
            let mut helpers = 0;
            worker.run(&mut visitor(), |completed| {
                if self.is_parallel && completed == PARALLEL_THRESHOLD && queue.pending_count() > 0
                {
                    helpers = self.fs.shared.take_helpers();
                    for _ in 0..helpers {
                        scope.spawn(|| worker.run(&mut visitor(), |_| {}));
                    }
                }
            });
            self.fs.shared.return_helpers(helpers);
        });
        WalkOutcome {
            is_partial: queue.is_partial.load(Ordering::Relaxed),
        }
    }

    /// The rules of the directories above `start`.
    fn rules_above(&self, start: &Path) -> Option<Arc<IgnoreRules>> {
        let mut rules = None;
        if !self.respect_ignore_files || start == Path::new(".") {
            return rules;
        }
        let ancestors: Vec<&Path> = start.ancestors().skip(1).collect();
        for path in ancestors.into_iter().rev() {
            let dir_path = match path.as_os_str().is_empty() {
                true => Path::new("."),
                false => path,
            };
            if let Ok(dir) = self.fs.access.open_dir(dir_path) {
                rules = gitignore::load_rules(self.fs, &dir, path, rules.as_ref());
            }
        }
        rules
    }
}

/// One thread's part of a walk.
struct Worker<'a> {
    walk: &'a Walk<'a>,
    queue: &'a WorkQueue,
}

impl Worker<'_> {
    /// Works until nothing is left. Calls `on_completed` after each item with the number of items done.
    fn run<V: FnMut(&WalkEntry<'_>) -> bool>(
        &self,
        visit: &mut V,
        mut on_completed: impl FnMut(usize),
    ) {
        let mut completed = 0;
        while let Some(work) = self.queue.pop() {
            let _busy_guard = BusyGuard(self.queue);
            let should_continue = match work {
                WorkItem::Directory(path, rules) => {
                    self.visit_directory(&path, rules.as_ref(), visit)
                }
                WorkItem::Files(dir, path, files) => self.visit_files(&dir, &path, &files, visit),
            };
            if !should_continue || self.walk.fs.stop.is_stopped() {
                self.queue.stop();
            }
            completed += 1;
            on_completed(completed);
        }
    }

    /// `None` if the directory is the daemon's own or cannot be read; the latter makes the walk partial.
    fn open_directory(&self, path: &Path) -> Option<(Arc<Dir>, ReadDir)> {
        let access = &self.walk.fs.access;
        let opened = match path == Path::new(".") {
            true => access.open_dir(path),
            false => access.enter(path),
        };
        match opened.and_then(|dir| Ok((dir.entries()?, dir))) {
            Ok((entries, dir)) => Some((Arc::new(dir), entries)),
            Err(error) => {
                if ReservedError::from_io_error(&error).is_none() {
                    self.queue.is_partial.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    fn visit_directory<V: FnMut(&WalkEntry<'_>) -> bool>(
        &self,
        path: &Path,
        parent_rules: Option<&Arc<IgnoreRules>>,
        visit: &mut V,
    ) -> bool {
        let Some((dir, entries)) = self.open_directory(path) else {
            return true;
        };
        let path = if path == Path::new(".") {
            Path::new("")
        } else {
            path
        };
        let respect_ignore_files = self.walk.respect_ignore_files;
        let rules = match respect_ignore_files {
            true => gitignore::load_rules(self.walk.fs, &dir, path, parent_rules),
            false => None,
        };
        let mut files = Vec::new();
        for entry in entries {
            if self.queue.is_stopped() || self.walk.fs.stop.is_stopped() {
                return false;
            }
            let Ok((name, kind)) = entry.and_then(|it| Ok((it.file_name(), it.file_type()?)))
            else {
                continue;
            };
            let full_path = path.join(&name);
            let is_ignored = respect_ignore_files
                && (name == ".git"
                    || rules
                        .as_ref()
                        .is_some_and(|rules| rules.is_ignored(&full_path, kind.is_dir())));
            if is_ignored {
                continue;
            }
            if kind.is_file() {
                files.push((name, kind));
                if files.len() == BATCH_SIZE {
                    let batch = std::mem::take(&mut files);
                    if self.walk.is_parallel && self.queue.pending_count() < MAX_SHARED_BATCHES {
                        let work = WorkItem::Files(Arc::clone(&dir), path.to_owned(), batch);
                        self.queue.push(work);
                    } else if !self.visit_files(&dir, path, &batch, visit) {
                        return false;
                    }
                }
                continue;
            }
            let entry = WalkEntry {
                dir: &dir,
                name: &name,
                path: &full_path,
                kind,
            };
            if !visit(&entry) {
                return false;
            }
            if kind.is_dir() {
                self.queue
                    .push(WorkItem::Directory(full_path, rules.clone()));
            }
        }
        self.visit_files(&dir, path, &files, visit)
    }

    fn visit_files<V: FnMut(&WalkEntry<'_>) -> bool>(
        &self,
        dir: &Dir,
        path: &Path,
        files: &[(OsString, FileType)],
        visit: &mut V,
    ) -> bool {
        files.iter().all(|(name, kind)| {
            let full_path = path.join(name);
            let entry = WalkEntry {
                dir,
                name,
                path: &full_path,
                kind: *kind,
            };
            !self.queue.is_stopped() && !self.walk.fs.stop.is_stopped() && visit(&entry)
        })
    }
}

enum WorkItem {
    Directory(PathBuf, Option<Arc<IgnoreRules>>),
    /// Files of a directory. Items are taken last in, first out, so few directories are open at once.
    Files(Arc<Dir>, PathBuf, Vec<(OsString, FileType)>),
}

#[derive(Default)]
struct WorkQueue {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
    is_partial: AtomicBool,
}

#[derive(Default)]
struct State {
    pending: Vec<WorkItem>,
    /// Threads that may still add items.
    busy: usize,
}

impl WorkQueue {
    fn push(&self, work: WorkItem) {
        let mut state = self.state();
        if state.pending.len() >= MAX_QUEUED {
            self.is_partial.store(true, Ordering::Relaxed);
            return;
        }
        state.pending.push(work);
        drop(state);
        self.changed.notify_one();
    }

    /// The next item; waits for one. `None` at the end.
    fn pop(&self) -> Option<WorkItem> {
        let mut state = self.state();
        loop {
            if self.is_stopped() {
                return None;
            }
            if let Some(work) = state.pending.pop() {
                state.busy += 1;
                return Some(work);
            }
            if state.busy == 0 {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pending_count(&self) -> usize {
        self.state().pending.len()
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks an item as done, even if its visitor panics, so no thread waits for ever.
struct BusyGuard<'a>(&'a WorkQueue);

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.busy -= 1;
        if state.busy == 0 || self.0.is_stopped() {
            self.0.changed.notify_all();
        }
    }
}

const MAX_LINES: usize = 10_000;

#[derive(Debug, Default)]
pub struct SortedLines {
    lines: BTreeSet<String>,
    total: usize,
}

impl SortedLines {
    /// Inserts a line; drops the last one if there are too many.
    pub fn insert(&mut self, line: String) {
        self.total += 1;
        self.lines.insert(line);
        if self.lines.len() > MAX_LINES {
            self.lines.pop_last();
        }
    }

    /// The lines in at most `max_bytes`, with a notice if some are left out; `None` if there are none.
    pub fn render(self, max_bytes: usize, noun: &str) -> Option<String> {
        let mut text = String::new();
        let mut shown_count = 0;
        for line in &self.lines {
            if text.len() + line.len() >= max_bytes && shown_count > 0 {
                break;
            }
            text.push_str(line);
            text.push('\n');
            shown_count += 1;
        }
        if shown_count < self.total {
            text.push_str(&format!(
                "... (the first {shown_count} of {} {noun})\n",
                self.total
            ));
        }
        text.pop()?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_LINES, SortedLines};

    #[test]
    fn only_the_first_lines_are_kept() {
        let mut sorted = SortedLines::default();
        for number in (0..MAX_LINES + 5).rev() {
            sorted.insert(format!("{number:06}"));
        }
        let text = sorted.render(1 << 20, "entries").expect("lines");
        assert!(text.starts_with("000000\n000001\n"));
        assert!(text.ends_with("009999\n... (the first 10000 of 10005 entries)"));
    }

    #[test]
    fn text_stays_within_max_bytes() {
        let mut sorted = SortedLines::default();
        for letter in ["c", "a", "b"] {
            sorted.insert(letter.repeat(10));
        }
        let text = sorted.render(25, "entries").expect("lines");
        assert_eq!(
            text,
            "aaaaaaaaaa\nbbbbbbbbbb\n... (the first 2 of 3 entries)"
        );
        assert_eq!(SortedLines::default().render(25, "entries"), None);
    }
}
