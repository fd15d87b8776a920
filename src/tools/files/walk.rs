//! Walks through the directories of a workdir by handle, on several threads where there is much. Links are told of and
//! never followed: a directory that becomes a link meanwhile is not entered. Knows no tool.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cap_std::fs::{Dir, FileType};

use crate::tools::files::ground::Ground;
use crate::tools::files::ignored::{self, Ignored};
use crate::workdirs::reserved::Refused;

/// Files of one directory that are visited as one piece of work.
const PIECE: usize = 64;
/// Pieces of work after which others may help: a small tree is done before a thread is up.
const ALONE: usize = 16;
/// Pieces that may wait while files of a directory are handed on to others.
const MOST_HANDED_ON: usize = 256;
/// Most pieces that wait; what comes beyond is left out, with a notice.
const MOST_WAITING: usize = 100_000;

/// Something that a walk has come to.
pub struct Found<'a> {
    /// The directory that it is in.
    pub dir: &'a Dir,
    /// Its name there.
    pub name: &'a OsStr,
    /// Its path below the workdir.
    pub path: &'a Path,
    /// What it is.
    pub kind: FileType,
}

/// Where a walk begins and what it passes over.
pub struct Walk<'a> {
    /// The workdir.
    pub ground: &'a Ground,
    /// Whether ignore files count and `.git` is passed over.
    pub respects_ignores: bool,
    /// Whether other threads may help.
    pub may_be_helped: bool,
}

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walked {
    /// Whether directories were left out: they could not be read, or there were too many.
    pub is_partial: bool,
}

impl Walk<'_> {
    /// Visits all below `start`, which is a path below the workdir. Each thread has a visitor of its own; one that says
    /// false ends the walk.
    pub fn run<V>(&self, start: &Path, visitor: impl Fn() -> V + Sync) -> Walked
    where
        V: FnMut(&Found<'_>) -> bool,
    {
        let queue = Queue::default();
        let rules = self.rules_above(start);
        queue.push(Work::Directory(start.to_owned(), rules));
        let hand = Hand {
            walk: self,
            queue: &queue,
        };
        std::thread::scope(|scope| {
            let mut helpers = 0;
            hand.work(&mut visitor(), |done| {
                if self.may_be_helped && done == ALONE && queue.waiting() > 0 {
                    helpers = self.ground.shared.take_helpers();
                    for _ in 0..helpers {
                        scope.spawn(|| hand.work(&mut visitor(), |_| {}));
                    }
                }
            });
            self.ground.shared.return_helpers(helpers);
        });
        Walked {
            is_partial: queue.is_partial.load(Ordering::Relaxed),
        }
    }

    /// The rules of the directories above the start.
    fn rules_above(&self, start: &Path) -> Option<Arc<Ignored>> {
        let mut rules = None;
        if !self.respects_ignores || start == Path::new(".") {
            return rules;
        }
        let ancestors: Vec<&Path> = start.ancestors().skip(1).collect();
        for path in ancestors.into_iter().rev() {
            let at = match path.as_os_str().is_empty() {
                true => Path::new("."),
                false => path,
            };
            if let Ok(dir) = self.ground.access.open_dir(at) {
                rules = ignored::within(self.ground, &dir, path, rules.as_ref());
            }
        }
        rules
    }
}

/// One thread's part of a walk.
struct Hand<'a> {
    walk: &'a Walk<'a>,
    queue: &'a Queue,
}

impl Hand<'_> {
    /// Works until nothing is left, telling after each piece how many it has done.
    fn work<V: FnMut(&Found<'_>) -> bool>(&self, visit: &mut V, mut done: impl FnMut(usize)) {
        let mut count = 0;
        while let Some(work) = self.queue.take() {
            let _finishes = Finishes(self.queue);
            let goes_on = match work {
                Work::Directory(path, rules) => self.directory(&path, rules.as_ref(), visit),
                Work::Files(dir, path, files) => self.files(&dir, &path, &files, visit),
            };
            if !goes_on || self.walk.ground.stop.is_set() {
                self.queue.end();
            }
            count += 1;
            done(count);
        }
    }

    fn directory<V: FnMut(&Found<'_>) -> bool>(
        &self,
        path: &Path,
        above: Option<&Arc<Ignored>>,
        visit: &mut V,
    ) -> bool {
        let access = &self.walk.ground.access;
        let opened = match path == Path::new(".") {
            true => access.open_dir(path),
            false => access.enter(path),
        };
        if opened
            .as_ref()
            .is_err_and(|error| Refused::of(error).is_some())
        {
            return true;
        }
        let Ok((dir, entries)) = opened
            .and_then(|dir| Ok((dir.entries()?, dir)))
            .map(|(e, d)| (Arc::new(d), e))
        else {
            self.queue.is_partial.store(true, Ordering::Relaxed);
            return true;
        };
        let path = if path == Path::new(".") {
            Path::new("")
        } else {
            path
        };
        let respects = self.walk.respects_ignores;
        let rules = match respects {
            true => ignored::within(self.walk.ground, &dir, path, above),
            false => None,
        };
        let mut files = Vec::new();
        for entry in entries {
            if self.queue.is_ended() || self.walk.ground.stop.is_set() {
                return false;
            }
            let Ok((name, kind)) = entry.and_then(|it| Ok((it.file_name(), it.file_type()?)))
            else {
                continue;
            };
            let full = path.join(&name);
            let is_left_out = respects
                && (name == ".git"
                    || rules
                        .as_ref()
                        .is_some_and(|rules| rules.leaves_out(&full, kind.is_dir())));
            if is_left_out {
                continue;
            }
            if kind.is_file() {
                files.push((name, kind));
                if files.len() == PIECE {
                    let piece = std::mem::take(&mut files);
                    if self.walk.may_be_helped && self.queue.waiting() < MOST_HANDED_ON {
                        let work = Work::Files(Arc::clone(&dir), path.to_owned(), piece);
                        self.queue.push(work);
                    } else if !self.files(&dir, path, &piece, visit) {
                        return false;
                    }
                }
                continue;
            }
            let found = Found {
                dir: &dir,
                name: &name,
                path: &full,
                kind,
            };
            if !visit(&found) {
                return false;
            }
            if kind.is_dir() {
                self.queue.push(Work::Directory(full, rules.clone()));
            }
        }
        self.files(&dir, path, &files, visit)
    }

    fn files<V: FnMut(&Found<'_>) -> bool>(
        &self,
        dir: &Dir,
        path: &Path,
        files: &[(OsString, FileType)],
        visit: &mut V,
    ) -> bool {
        files.iter().all(|(name, kind)| {
            let full = path.join(name);
            let found = Found {
                dir,
                name,
                path: &full,
                kind: *kind,
            };
            !self.queue.is_ended() && !self.walk.ground.stop.is_set() && visit(&found)
        })
    }
}

enum Work {
    Directory(PathBuf, Option<Arc<Ignored>>),
    /// Files of a directory. Taken last in first out, so that few directories are open at once.
    Files(Arc<Dir>, PathBuf, Vec<(OsString, FileType)>),
}

/// What is still to do.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    ended: AtomicBool,
    is_partial: AtomicBool,
}

#[derive(Default)]
struct State {
    waiting: Vec<Work>,
    /// Threads that may still bring more.
    busy: usize,
}

impl Queue {
    fn push(&self, work: Work) {
        let mut state = self.state();
        if state.waiting.len() >= MOST_WAITING {
            self.is_partial.store(true, Ordering::Relaxed);
            return;
        }
        state.waiting.push(work);
        drop(state);
        self.changed.notify_one();
    }

    /// The next piece, once there is one; none at the end.
    fn take(&self) -> Option<Work> {
        let mut state = self.state();
        loop {
            if self.is_ended() {
                return None;
            }
            if let Some(work) = state.waiting.pop() {
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

    fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of work is done, also where its visitor panics: nobody waits for it for ever.
struct Finishes<'a>(&'a Queue);

impl Drop for Finishes<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.busy -= 1;
        if state.busy == 0 || self.0.is_ended() {
            self.0.changed.notify_all();
        }
    }
}
