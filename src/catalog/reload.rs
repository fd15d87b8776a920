//! Reloads the catalogue when its directories change.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::catalog::promotion::{self, Promotions};
use crate::catalog::read::{AgentFile, InvalidFile, candidate_name, own_name, read_with};
use crate::catalog::{Agents, Entry, LoadError, Rules};
use crate::domain::agent::{Agent, is_agent_name};
use crate::settings::document::{MAX_FILE_BYTES, Problem, ProblemKind};
use crate::standing_task;

/// Editors and copies write in bursts: a reload waits until nothing changed for this long.
const DEBOUNCE_INTERVAL: Duration = Duration::from_millis(100);
/// During an endless burst, a reload happens after this many waits.
const MAX_DEBOUNCE_INTERVALS: u32 = 4;
/// Interval for polling the directories: swapped links, new directories and network file systems cause no
/// notifications. Polling and a reload together take less than the promised second.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum time between two inspections that clients cause.
const INSPECTION_INTERVAL: Duration = Duration::from_millis(500);

/// The agents of a list of directories.
pub struct Catalog {
    dirs: Vec<PathBuf>,
    rules: Rules,
    inspector: Box<Inspector>,
    snapshot: ArcSwap<Agents>,
    /// Candidates that have become current, as far as this process knows.
    promotions: ArcSwap<Promotions>,
    /// The state at the last reload; locked during a reload, so that two cannot overtake each other.
    last_scan: Mutex<ScanState>,
    reloads: watch::Sender<u64>,
}

/// Returns what a server lacks for the current definitions, by agent. Blocking I/O.
pub type Inspector = dyn Fn(&Agents) -> BTreeMap<String, Vec<Problem>> + Send + Sync;

/// Stops the watch on drop.
pub struct Watch {
    messages: Sender<WatchMessage>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct ScanState {
    /// A hash of the state of the directories: names, sizes, times and locations of their files; follows links.
    fingerprint: u64,
    /// The logged warnings about the directories.
    warnings: BTreeSet<String>,
    /// When the definitions were last inspected.
    inspected_at: Option<Instant>,
}

/// Messages to the watching thread.
enum WatchMessage {
    Changed,
    Stop,
}

impl Catalog {
    /// Reads every directory once. Warns about a missing directory, which may be created later.
    pub fn open(dirs: Vec<PathBuf>, rules: Rules) -> Self {
        Self::open_with_inspector(dirs, rules, Box::new(|_| BTreeMap::new()))
    }

    /// Like [`Catalog::open`], with additional warnings from `inspector`.
    pub fn open_with_inspector(
        dirs: Vec<PathBuf>,
        rules: Rules,
        inspector: Box<Inspector>,
    ) -> Self {
        let catalog = Self {
            dirs,
            rules,
            inspector,
            snapshot: ArcSwap::default(),
            promotions: ArcSwap::default(),
            last_scan: Mutex::default(),
            reloads: watch::Sender::new(0),
        };
        catalog.reload();
        catalog
    }

    /// The current snapshot.
    pub fn current(&self) -> Arc<Agents> {
        self.snapshot.load_full()
    }

    /// Reads the text of an agent's file that is in no directory; its key `name` names the agent. Blocking I/O.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read_text(&self, text: &str) -> Result<Agent, LoadError> {
        let bytes = text.as_bytes();
        let name = own_name(bytes).filter(|name| is_agent_name(name));
        let name = name.unwrap_or_else(|| "definition".to_owned());
        let dir = self.dirs.first().map(PathBuf::as_path);
        let path = dir.unwrap_or(Path::new("")).join(format!("{name}.toml"));
        let read = read_with(&name, &path, bytes, &self.rules.documents);
        let file = read.and_then(|file| check_rules(&self.rules, &file).map(|()| file));
        file.map(|file| file.agent).map_err(|invalid| invalid.error)
    }

    /// Has these candidates instead of the files that they replace. Blocking I/O if anything differs.
    pub fn set_promotions(&self, promotions: Promotions) {
        if **self.promotions.load() != promotions {
            self.promotions.store(Arc::new(promotions));
            self.reload();
        }
    }

    /// The agent as the candidate of its rollout makes it, with the text of its file. Blocking I/O.
    ///
    /// # Errors
    /// A file has changed since the last reload, or does not fit.
    pub fn merged_candidate(&self, entry: &Entry) -> Result<(Agent, String), String> {
        let agent = entry.agent.as_ref();
        let rollout = agent.and_then(|agent| agent.rollout.as_ref());
        let (Some(rollout), Some(candidate)) = (rollout, &entry.candidate) else {
            return Err("it has no candidate".to_owned());
        };
        let text = |path: &Path| -> Result<String, String> {
            let bytes = read_file(path, MAX_FILE_BYTES);
            let bytes = bytes.unwrap_or_else(|| Err("there is no such file".to_owned()));
            let text =
                bytes.and_then(|bytes| String::from_utf8(bytes).map_err(|it| it.to_string()));
            text.map_err(|why| format!("{}: {why}", path.display()))
        };
        let path = entry.path.with_file_name(&rollout.candidate);
        let (file, next) = (text(&entry.path)?, text(&path)?);
        let documents = &self.rules.documents;
        let read = read_with(&entry.name, &path, next.as_bytes(), documents);
        let read = read.map_err(|invalid| invalid.error.to_string())?;
        if read.agent.version != candidate.version {
            return Err(format!("{} has just changed; try again", path.display()));
        }
        promotion::merge((&entry.name, &entry.path), documents, &file, &next)
    }

    /// Changes with every new snapshot.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.reloads.subscribe()
    }

    /// Reads every directory again, replaces the snapshot and logs the changes. Blocking I/O.
    pub fn reload(&self) {
        // A reload that panicked replaced nothing, so the last state is still valid.
        let mut last_scan = self
            .last_scan
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Taken before reading, so that the next poll detects changes made meanwhile.
        last_scan.fingerprint = fingerprint(&self.dirs, &self.rules);
        prefetch_documents(&self.dirs, &self.rules);
        let before = self.current();
        let mut warnings = BTreeSet::new();
        if let Err(why) = self.rules.models.reload() {
            warnings.insert(format!(
                "The file of models is broken, its last good facts stay: {why}"
            ));
        }
        let promotions = self.promotions.load_full();
        let from = Source {
            rules: &self.rules,
            promotions: &promotions,
        };
        let mut after = read_dirs(&self.dirs, &from, &before, &mut warnings);
        for warning in warnings.difference(&last_scan.warnings) {
            warn!("{warning}");
        }
        last_scan.warnings = warnings;
        self.inspect(&mut after);
        last_scan.inspected_at = Some(Instant::now());
        self.replace(&before, after);
    }

    /// Like [`Catalog::reload`], after fetching again the documents that could not be fetched.
    pub fn reload_all(&self) {
        self.rules.documents.retry_now();
        self.reload();
    }

    /// Inspects the current definitions again, because files that they name can come and go without a reload. Does
    /// nothing if that happened just now, or happens at the moment. Blocking I/O.
    pub fn refresh_warnings(&self) {
        let Ok(mut last_scan) = self.last_scan.try_lock() else {
            return;
        };
        let is_fresh = |at: Instant| at.elapsed() < INSPECTION_INTERVAL;
        if last_scan.inspected_at.is_some_and(is_fresh) {
            return;
        }
        let before = self.current();
        let mut after = Agents::clone(&before);
        self.inspect(&mut after);
        last_scan.inspected_at = Some(Instant::now());
        self.replace(&before, after);
    }

    fn inspect(&self, agents: &mut Agents) {
        let mut found = (self.inspector)(agents);
        for (name, entry) in &mut agents.entries {
            entry.warnings.clone_from(&entry.file_warnings);
            entry
                .warnings
                .extend(found.remove(name).unwrap_or_default());
        }
    }

    /// Replaces the snapshot if anything differs, and logs the differences.
    fn replace(&self, before: &Agents, mut after: Agents) {
        if log_changes(before, &after) {
            after.generation = before.generation + 1;
            self.snapshot.store(Arc::new(after));
            self.reloads.send_modify(|count| *count += 1);
        }
    }

    /// Reloads within a second after a change in the directories, including swapped links.
    pub fn watch(self: &Arc<Self>) -> Result<Watch, notify::Error> {
        let (messages, receiver) = channel();
        let watcher_messages = messages.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // A failed watch counts as a change: the directories are read and watched again.
            if event.map_or(true, |event| is_change(&event.kind)) {
                // Fails only if the thread has ended.
                let _ = watcher_messages.send(WatchMessage::Changed);
            }
        })?;
        let catalog = Arc::clone(self);
        let retry_messages = messages.clone();
        let thread = std::thread::Builder::new()
            .name("axed-agents".to_owned())
            .spawn(move || {
                let mut watcher = watcher;
                standing_task::run_thread("Watching the agents", || {
                    catalog.run_watcher(&mut watcher, &receiver, &retry_messages);
                });
            })
            .map_err(notify::Error::io)?;
        Ok(Watch {
            messages,
            thread: Some(thread),
        })
    }

    /// Handles changes until the stop message.
    fn run_watcher(
        &self,
        watcher: &mut RecommendedWatcher,
        receiver: &Receiver<WatchMessage>,
        messages: &Sender<WatchMessage>,
    ) {
        let mut watched = Vec::new();
        let mut retry: Option<JoinHandle<()>> = None;
        loop {
            watch_dirs(watcher, &self.dirs, &mut watched);
            match receiver.recv_timeout(POLL_INTERVAL) {
                Ok(WatchMessage::Changed) => {
                    if !debounce(receiver) {
                        return;
                    }
                    self.reload();
                }
                Err(RecvTimeoutError::Timeout) => {
                    let last_scan = self
                        .last_scan
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    let has_changed = last_scan.fingerprint != fingerprint(&self.dirs, &self.rules);
                    drop(last_scan);
                    if has_changed {
                        self.reload();
                    }
                    let is_idle = retry.as_ref().is_none_or(JoinHandle::is_finished);
                    if is_idle && self.rules.documents.has_due_retry() {
                        retry = self.spawn_retry(messages);
                    }
                }
                Ok(WatchMessage::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Fetches documents again in a thread of its own, because they may not respond; what it finds is a change. Nobody waits for the
    /// thread when the daemon stops.
    fn spawn_retry(&self, messages: &Sender<WatchMessage>) -> Option<JoinHandle<()>> {
        let documents = Arc::clone(&self.rules.documents);
        let messages = messages.clone();
        let retry = move || {
            if documents.retry() {
                // Fails only if the watching thread has ended.
                let _ = messages.send(WatchMessage::Changed);
            }
        };
        let thread = std::thread::Builder::new().name("axed-openapi".to_owned());
        // Without a thread, the next poll tries again.
        thread.spawn(retry).ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Both fail only if the thread has already ended.
        let _ = self.messages.send(WatchMessage::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until no change arrives for a while; `false` after the stop message.
fn debounce(receiver: &Receiver<WatchMessage>) -> bool {
    let deadline = std::time::Instant::now() + DEBOUNCE_INTERVAL * MAX_DEBOUNCE_INTERVALS;
    while std::time::Instant::now() < deadline {
        match receiver.recv_timeout(DEBOUNCE_INTERVAL) {
            Ok(WatchMessage::Changed) => {}
            Err(RecvTimeoutError::Timeout) => return true,
            Ok(WatchMessage::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
    true
}

/// Reading also causes notifications, which must not cause another reload.
fn is_change(kind: &EventKind) -> bool {
    match kind {
        EventKind::Access(access) => *access == AccessKind::Close(AccessMode::Write),
        _ => true,
    }
}

/// Watches the existing directories, again if another directory took a name.
fn watch_dirs(
    watcher: &mut RecommendedWatcher,
    dirs: &[PathBuf],
    watched: &mut Vec<(PathBuf, u64)>,
) {
    for dir in dirs {
        let Ok(inode) = fs::metadata(dir).map(|meta| meta.ino()) else {
            watched.retain(|(path, _)| path != dir);
            continue;
        };
        if watched.contains(&(dir.clone(), inode)) {
            continue;
        }
        watched.retain(|(path, _)| path != dir);
        // Fails if it was not watched or its directory is gone; neither matters.
        let _ = watcher.unwatch(dir);
        if let Err(error) = watcher.watch(dir, RecursiveMode::NonRecursive) {
            let interval_ms = POLL_INTERVAL.as_millis();
            warn!(
                "Could not watch {}, looking at it every {interval_ms} ms instead: {error}",
                dir.display()
            );
        }
        watched.push((dir.clone(), inode));
    }
}

/// A hash of the state of the directories, of the documents that agent files name and of the file of models: names, sizes, times and locations
/// of files; follows links.
fn fingerprint(dirs: &[PathBuf], rules: &Rules) -> u64 {
    let mut hasher = DefaultHasher::new();
    for dir in dirs {
        dir.hash(&mut hasher);
        let listing = fs::read_dir(dir);
        listing.is_ok().hash(&mut hasher);
        let Ok(listing) = listing else {
            continue;
        };
        let mut files: Vec<PathBuf> = listing.flatten().map(|entry| entry.path()).collect();
        files.retain(|path| is_toml(path));
        files.sort();
        for path in files {
            hash_file(&path, &mut hasher);
        }
    }
    for path in rules.documents.files() {
        hash_file(&path, &mut hasher);
    }
    if let Some(path) = rules.models.file() {
        hash_file(path, &mut hasher);
    }
    hasher.finish()
}

fn hash_file(path: &Path, hasher: &mut DefaultHasher) {
    path.hash(hasher);
    let state = fs::metadata(path);
    let state = state.map(|it| (it.ino(), it.len(), it.mtime(), it.mtime_nsec(), it.ctime()));
    state.ok().hash(hasher);
}

fn prefetch_documents(dirs: &[PathBuf], rules: &Rules) {
    let paths = dirs.iter().flat_map(|dir| list_agent_files(dir).ok());
    let files = paths.flatten().filter_map(|path| {
        let bytes = read_file(&path, MAX_FILE_BYTES)?.ok()?;
        Some((path, bytes))
    });
    rules.documents.prefetch(files);
}

/// What a definition comes from, besides its file.
struct Source<'s> {
    rules: &'s Rules,
    promotions: &'s Promotions,
}

/// The candidates of the files of a directory, which are no agents of their own. Nor do they have candidates.
fn list_candidates(paths: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut candidates = BTreeSet::new();
    for path in paths {
        let bytes = read_file(path, MAX_FILE_BYTES).and_then(Result::ok);
        let Some(bytes) = bytes.filter(|_| !candidates.contains(path)) else {
            continue;
        };
        // Most files have none, and are not read twice.
        if !bytes.windows(7).any(|word| word == b"rollout") {
            continue;
        }
        let name = candidate_name(&bytes);
        let candidate = name.map(|name| path.with_file_name(name));
        candidates.extend(candidate.filter(|candidate| candidate != path));
    }
    candidates
}

fn read_dirs(
    dirs: &[PathBuf],
    source: &Source<'_>,
    before: &Agents,
    warnings: &mut BTreeSet<String>,
) -> Agents {
    let mut after = Agents::default();
    for dir in dirs {
        let paths = match list_agent_files(dir) {
            Ok(paths) => paths,
            Err(error) => {
                let previous = before.entries.values();
                let previous = previous.filter(|entry| entry.path.parent() == Some(dir));
                let mut previous = previous.peekable();
                let dir = dir.display();
                warnings.insert(match error.kind() {
                    ErrorKind::NotFound if previous.peek().is_none() => {
                        format!("There is no agents directory {dir}")
                    }
                    // A missing one may come back.
                    _ => format!(
                        "Could not read agents directory {dir}, keeping what it held: {error}"
                    ),
                });
                for entry in previous {
                    let name = entry.name.clone();
                    after.entries.entry(name).or_insert_with(|| entry.clone());
                }
                continue;
            }
        };
        let candidates = list_candidates(&paths);
        for path in paths.into_iter().filter(|it| !candidates.contains(it)) {
            let display_path = path.display().to_string();
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let Some(name) = stem.filter(|name| is_agent_name(name)) else {
                let problem = Problem::of_file(ProblemKind::RuleViolation, INVALID_FILE_NAME);
                warnings.insert(problem.format_in(&display_path));
                after.ignored_files.insert(path, problem);
                continue;
            };
            if let Some(existing) = after.entries.get_mut(name) {
                let kind = ProblemKind::Warning;
                let hides = Problem::of_file(kind, format!("hides {display_path}"));
                existing.file_warnings.push(hides);
                let hidden = format!(
                    "is not used, because {} in an earlier directory has the same name",
                    existing.path.display()
                );
                after
                    .ignored_files
                    .insert(path, Problem::of_file(kind, hidden));
                continue;
            }
            let Some(bytes) = read_file(&path, MAX_FILE_BYTES) else {
                continue;
            };
            let entry = build_entry(name, &path, bytes, source, before.entries.get(name));
            after.entries.insert(name.to_owned(), entry);
        }
    }
    after
}

const INVALID_FILE_NAME: &str = "the file's name is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or \
     a digit";

/// The entry of a file; keeps the current definition if the file is unchanged or invalid.
fn build_entry(
    name: &str,
    path: &Path,
    bytes: Result<Vec<u8>, String>,
    source: &Source<'_>,
    before: Option<&Entry>,
) -> Entry {
    let active = before.and_then(|entry| entry.agent.clone());
    let known_candidate = before.and_then(|entry| entry.candidate.clone());
    let rules = source.rules;
    let unchanged = |known: &Option<Arc<Agent>>, agent: Agent| {
        let known = known.clone().filter(|it| it.version == agent.version);
        known.unwrap_or_else(|| Arc::new(agent))
    };
    let read = match bytes {
        Ok(bytes) => read_with(name, path, &bytes, &rules.documents).and_then(|mut file| {
            check_rules(rules, &file)?;
            let candidate = read_candidate(rules, path, &file)?;
            let version = file.agent.version.clone();
            if let Some(promoted) = read_promoted(source, name, path, &version) {
                file.agent = promoted;
            }
            Ok((version, file, candidate))
        }),
        Err(why) => Err(unreadable(name, path, &why)),
    };
    let mut entry = Entry {
        name: name.to_owned(),
        path: path.to_owned(),
        agent: None,
        candidate: None,
        file_version: None,
        error: None,
        problems: Vec::new(),
        draft: None,
        file_warnings: Vec::new(),
        warnings: Vec::new(),
        positions: Arc::default(),
    };
    match read {
        Ok((version, file, candidate)) => {
            entry.agent = Some(unchanged(&active, file.agent));
            entry.candidate = candidate.map(|it| unchanged(&known_candidate, it));
            entry.file_version = Some(version);
            entry.file_warnings = file.warnings;
            entry.positions = Arc::new(file.positions);
        }
        Err(invalid) => {
            entry.agent = active;
            entry.candidate = known_candidate;
            entry.error = Some(invalid.error);
            entry.problems = invalid.problems;
            entry.draft = invalid.draft;
        }
    }
    entry
}

/// The candidate of a rollout.
///
/// # Errors
/// Everything that is wrong with it, as an error of the file that names it.
fn read_candidate(
    rules: &Rules,
    path: &Path,
    file: &AgentFile,
) -> Result<Option<Agent>, InvalidFile> {
    let Some(rollout) = &file.agent.rollout else {
        return Ok(None);
    };
    let name = &file.agent.name;
    let invalid = |why: String| {
        let key = "rollout.candidate";
        let text = format!("{key}: {why}");
        let kind = ProblemKind::RuleViolation;
        InvalidFile {
            error: LoadError::Invalid(format!("agent config \"{name}\": {text}")),
            problems: vec![file.positions.problem(key, text, kind)],
            draft: None,
        }
    };
    let candidate_path = path.with_file_name(&rollout.candidate);
    let shown = candidate_path.display();
    if candidate_path == path {
        return Err(invalid(format!("{shown} is this file")));
    }
    let bytes = match read_file(&candidate_path, MAX_FILE_BYTES) {
        None => return Err(invalid(format!("there is no file {shown}"))),
        Some(Err(why)) => return Err(invalid(format!("{shown}: {why}"))),
        Some(Ok(bytes)) => bytes,
    };
    if own_name(&bytes).is_some_and(|own| own != *name) {
        return Err(invalid(format!("the name in {shown} is not {name}")));
    }
    let read = read_with(name, &candidate_path, &bytes, &rules.documents);
    let read = read.and_then(|file| check_rules(rules, &file).map(|()| file));
    match read {
        Ok(file) => Ok(Some(file.agent)),
        Err(broken) => Err(invalid(broken.error.to_string())),
    }
}

/// The definition that is in force instead of a file of this version.
fn read_promoted(source: &Source<'_>, name: &str, path: &Path, version: &str) -> Option<Agent> {
    let promotions = source.promotions.get(name)?;
    let changed_at = fs::metadata(path).ok().and_then(|meta| {
        let nanosecond = i32::try_from(meta.ctime_nsec()).ok()?;
        Timestamp::new(meta.ctime(), nanosecond).ok()
    });
    let promoted = promotion::in_force(promotions, version, changed_at)?;
    let read = read_with(
        name,
        path,
        promoted.text.as_bytes(),
        &source.rules.documents,
    );
    match read {
        Ok(file) => Some(file.agent),
        Err(invalid) => {
            warn!(
                agent.name = %name,
                "The promoted candidate of agent {name} is not in force: {}", invalid.error
            );
            None
        }
    }
}

fn unreadable(name: &str, path: &Path, why: &str) -> InvalidFile {
    let path = path.display();
    InvalidFile {
        error: LoadError::Invalid(format!(
            "failed to parse agent config \"{name}\": {path}: {why}"
        )),
        problems: vec![Problem::of_file(ProblemKind::Malformed, why)],
        draft: None,
    }
}

/// Returns an error if this server cannot run the definition.
fn check_rules(rules: &Rules, file: &AgentFile) -> Result<(), InvalidFile> {
    let AgentFile {
        agent, positions, ..
    } = file;
    let memory = &agent.memory;
    let Some(path) = memory.path.as_deref().filter(|_| memory.enabled) else {
        return Ok(());
    };
    let misplaced = match (rules.has_database, rules.has_keys && !memory.shared) {
        (true, _) => Some(
            "memory.path names a file, but this server keeps memories in its database (data.url); leave path out of [memory]",
        ),
        (false, true) => Some(
            "memory.path needs memory.shared = true, because this server has keys and each key has a memory of its \
             own; say shared = true in [memory], or leave path out",
        ),
        (false, false) => None,
    };
    let refusal = misplaced.map(str::to_owned);
    let Some(text) = refusal.or_else(|| rules.memory_paths.refusal(path)) else {
        return Ok(());
    };
    let problem = positions.problem("memory.path", text.clone(), ProblemKind::RuleViolation);
    Err(InvalidFile {
        error: LoadError::Invalid(format!("agent config \"{}\": {text}", agent.name)),
        problems: vec![problem],
        draft: None,
    })
}

/// The `.toml` files of a directory, sorted. Skips hidden ones, which editors and Kubernetes create.
pub fn list_agent_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if is_toml(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Whether the file's name is that of an agent file: `.toml` at its end, and no dot at its start.
pub fn is_toml(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.ends_with(b".toml") && !name.starts_with(b".")
}

/// Reads a file, up to a byte above `max_bytes`, and follows links; `None` if it is not a file or no longer exists.
pub fn read_file(path: &Path, max_bytes: usize) -> Option<Result<Vec<u8>, String>> {
    // Checked before it is opened: opening a pipe would wait for its writer.
    match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => return None,
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // Or it was removed meanwhile.
            let target = fs::read_link(path).ok()?;
            let why = format!("is a link to {}, which does not exist", target.display());
            return Some(Err(why));
        }
        Err(error) => return Some(Err(error.to_string())),
    }
    let mut bytes = Vec::new();
    let read =
        File::open(path).and_then(|file| file.take(max_bytes as u64 + 1).read_to_end(&mut bytes));
    match read {
        Ok(_) => Some(Ok(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(Err(error.to_string())),
    }
}

/// Logs the differences between two snapshots: one line for each changed agent, and one for each new warning. `false` if
/// there are none.
fn log_changes(before: &Agents, after: &Agents) -> bool {
    let mut differ = before.ignored_files != after.ignored_files;
    for (name, entry) in &after.entries {
        let old = before.entries.get(name);
        let version = |entry: &Entry| {
            let agents = [&entry.agent, &entry.candidate].map(Option::as_ref);
            let versions = agents.map(|agent| agent.map(|it| it.version.clone()));
            (versions, entry.file_version.clone())
        };
        let is_same = old.is_some_and(|old| {
            old.path == entry.path && old.error == entry.error && version(old) == version(entry)
        });
        let path = entry.path.display();
        match (&entry.error, old) {
            _ if is_same => {}
            (Some(error), _) if entry.agent.is_some() => {
                warn!(agent.name = %name, "Agent {name} is broken, its last good definition stays: {error}");
            }
            (Some(error), _) => {
                warn!(agent.name = %name, "Agent {name} is broken: {error}");
            }
            (None, None) => info!(agent.name = %name, "Agent {name} added from {path}"),
            (None, Some(_)) => info!(agent.name = %name, "Agent {name} changed from {path}"),
        }
        let old_warnings = old.map_or(&[][..], |old| &old.warnings);
        let is_new = |warning: &&Problem| {
            let mut old = old_warnings.iter();
            !old.any(|old| old.message() == warning.message())
        };
        for warning in entry.warnings.iter().filter(is_new) {
            let message = warning.format_in(&path.to_string());
            warn!(agent.name = %name, "Agent {name}: {message}");
        }
        differ |= !is_same || old_warnings != entry.warnings;
    }
    for name in before.entries.keys() {
        if !after.entries.contains_key(name) {
            differ = true;
            info!(agent.name = %name, "Agent {name} removed");
        }
    }
    differ
}
