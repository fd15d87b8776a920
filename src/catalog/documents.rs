//! The OpenAPI documents that agent files name: files beside them, and URLs, of which a copy is kept on disk. Blocking I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tracing::warn;
use url::Url;

use crate::catalog::document_fetch;
use crate::config::Config;
use crate::config::environment::home_dir;
use crate::domain::openapi::document::{Document, MAX_DOCUMENT_BYTES};
use crate::settings::document::{self, Value};
use crate::settings::kinds::expand_home;
use crate::ssrf::{self, SsrfGuard};

/// The configuration key of the hosts that the guard lets through.
const ALLOW_LIST_KEY: &str = "[tools.url_fetch] allow_hosts";
/// How long a document of a URL is not fetched again, whatever changes.
const MIN_AGE: Duration = Duration::from_secs(2);
/// How long after a failure it is not fetched again.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Documents that are fetched at the same time.
const MAX_FETCHES: usize = 16;

/// Loads documents for all agents.
#[derive(Debug)]
pub struct Documents {
    guard: Arc<SsrfGuard>,
    /// Where copies are kept.
    cache_dir: Option<PathBuf>,
    state: Mutex<State>,
    /// Held while a copy is written.
    copy_lock: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    fetched: BTreeMap<String, Fetched>,
    /// The URLs that agent files named at the last reload.
    named: BTreeSet<Url>,
    /// Whether there was a reload since the last retry: only then documents of which a copy is used are fetched again.
    is_reloaded: bool,
    /// The digests of the agent files that named documents.
    agent_files: BTreeMap<PathBuf, [u8; 32]>,
    /// The documents that are files.
    files: BTreeSet<PathBuf>,
}

#[derive(Clone, Debug)]
struct Fetched {
    at: Instant,
    has_failed: bool,
    text: Result<Arc<str>, String>,
}

impl Fetched {
    fn is_retry_due(&self) -> bool {
        self.has_failed && self.at.elapsed() > RETRY_INTERVAL
    }
}

/// A document, and its address if it came from one.
pub struct Loaded {
    pub document: Document,
    pub url: Option<Url>,
}

impl Default for Documents {
    fn default() -> Self {
        Self {
            guard: Arc::new(SsrfGuard::new(Vec::new(), ALLOW_LIST_KEY)),
            cache_dir: None,
            state: Mutex::default(),
            copy_lock: Mutex::default(),
        }
    }
}

impl Documents {
    pub fn from_config(config: &Config) -> Self {
        let hosts = config.tools.url_fetch.allow_hosts.clone();
        Self {
            guard: Arc::new(SsrfGuard::new(hosts, ALLOW_LIST_KEY)),
            cache_dir: Some(config.data.dir.join("openapi")),
            state: Mutex::default(),
            copy_lock: Mutex::default(),
        }
    }

    /// The documents of one agent file. Those of URLs are fetched again if the file has changed.
    pub fn of_agent<'d>(&'d self, file: &'d Path, bytes: &[u8]) -> AgentDocuments<'d> {
        AgentDocuments {
            documents: self,
            file,
            digest: Sha256::digest(bytes).into(),
        }
    }

    /// The documents that are files, which a reload has to look at.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state().files.iter().cloned().collect()
    }

    /// Fetches the documents that agent files name by URL, if they are new or their file has changed. What has failed is left to
    /// [`Documents::retry`].
    pub fn prefetch(&self, files: impl Iterator<Item = (PathBuf, Vec<u8>)>) {
        let mut named: BTreeMap<Url, bool> = BTreeMap::new();
        for (file, bytes) in files {
            let urls = document_urls(&bytes);
            if urls.is_empty() {
                continue;
            }
            let digest = Sha256::digest(&bytes).into();
            let before = self.state().agent_files.insert(file, digest);
            for url in urls {
                *named.entry(url).or_default() |= before != Some(digest);
            }
        }
        let mut state = self.state();
        state.named = named.keys().cloned().collect();
        state.is_reloaded = true;
        drop(state);
        let named: Vec<(Url, bool)> = named.into_iter().collect();
        concurrently(&named, |(url, is_changed)| {
            drop(self.fetch(url, *is_changed));
        });
    }

    /// Whether a document is to be fetched again that an agent lacks, or of which a copy is used since a reload.
    pub fn has_due_retry(&self) -> bool {
        let state = self.state();
        let fetched = |url: &Url| state.fetched.get(url.as_str());
        let mut due = state.named.iter().filter_map(fetched);
        due.any(|it| it.is_retry_due() && (it.text.is_err() || state.is_reloaded))
    }

    /// Fetches again what failed a while ago, and returns whether a reload would find anything else than before.
    pub fn retry(&self) -> bool {
        self.retry_if(Fetched::is_retry_due)
    }

    /// Fetches again what has failed, however short a time ago.
    pub fn retry_now(&self) {
        self.retry_if(|known| known.has_failed);
    }

    fn retry_if(&self, is_due: impl Fn(&Fetched) -> bool) -> bool {
        let mut state = self.state();
        state.is_reloaded = false;
        let known = |url: &Url| Some((url.clone(), state.fetched.get(url.as_str())?.clone()));
        let mut due: Vec<(Url, Fetched)> = state.named.iter().filter_map(known).collect();
        drop(state);
        due.retain(|(_, known)| is_due(known));
        let is_different = AtomicBool::new(false);
        concurrently(&due, |(url, known)| {
            if self.fetch_now(url) != known.text {
                is_different.store(true, Ordering::Relaxed);
            }
        });
        is_different.into_inner()
    }

    fn fetch(&self, url: &Url, is_changed: bool) -> Result<Arc<str>, String> {
        let known = self.state().fetched.get(url.as_str()).cloned();
        match known {
            Some(known) if !is_changed || known.at.elapsed() <= MIN_AGE => known.text,
            _ => self.fetch_now(url),
        }
    }

    fn fetch_now(&self, url: &Url) -> Result<Arc<str>, String> {
        let fetched = document_fetch::fetch(&self.guard, url);
        let fetched =
            fetched.and_then(|text| Document::parse(&text).map(|_| Arc::<str>::from(text)));
        let has_failed = fetched.is_err();
        let text = match fetched {
            Ok(text) => {
                self.keep(url, &text);
                Ok(text)
            }
            Err(why) => {
                let last = || self.state().fetched.get(url.as_str())?.text.clone().ok();
                self.kept(url, &why).or_else(last).ok_or(why)
            }
        };
        let entry = Fetched {
            at: Instant::now(),
            has_failed,
            text: text.clone(),
        };
        self.state().fetched.insert(url.to_string(), entry);
        text
    }

    /// The copy of an earlier fetch.
    fn kept(&self, url: &Url, why: &str) -> Option<Arc<str>> {
        let text = read_text(&self.copy_path(url)?).ok()?;
        let url = ssrf::redact_query(url.as_str());
        warn!("The OpenAPI document {url} {why}; its last copy is used");
        Some(text.into())
    }

    fn keep(&self, url: &Url, text: &str) {
        let Some(path) = self.copy_path(url) else {
            return;
        };
        let _guard = self
            .copy_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            let new = path.with_extension(format!("{}.new", std::process::id()));
            fs::write(&new, text)?;
            fs::rename(new, &path)
        };
        if let Err(error) = write() {
            let path = path.display();
            warn!("Could not keep a copy of an OpenAPI document in {path}: {error}");
        }
    }

    fn copy_path(&self, url: &Url) -> Option<PathBuf> {
        let digest = Sha256::digest(url.as_str());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.cache_dir.as_ref()?.join(name))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Documents::of_agent`].
#[derive(Clone, Copy)]
pub struct AgentDocuments<'d> {
    documents: &'d Documents,
    file: &'d Path,
    digest: [u8; 32],
}

impl AgentDocuments<'_> {
    /// Loads the document of a URL, or of a file relative to the agent's.
    ///
    /// # Errors
    /// The second half of a sentence that begins with the key.
    pub fn load(&self, source: &str) -> Result<Loaded, String> {
        if source.trim().is_empty() {
            return Err("must be the path or the URL of an OpenAPI document".to_owned());
        }
        if source.contains("://") {
            let url = ssrf::parse_url(source).map_err(|why| why.to_string())?;
            let before = self.documents.state();
            let is_changed = before.agent_files.get(self.file) != Some(&self.digest);
            drop(before);
            let text = self.documents.fetch(&url, is_changed)?;
            let files = &mut self.documents.state().agent_files;
            files.insert(self.file.to_owned(), self.digest);
            return Ok(Loaded {
                document: Document::parse(&text)?,
                url: Some(url),
            });
        }
        let dir = self.file.parent().unwrap_or(Path::new("."));
        let path = dir.join(expand_home(source, home_dir().as_deref()));
        self.documents.state().files.insert(path.clone());
        let display_path = path.display();
        let text = read_text(&path).map_err(|why| format!("names {display_path}, which {why}"))?;
        let document = Document::parse(&text);
        Ok(Loaded {
            document: document.map_err(|why| format!("names {display_path}, which {why}"))?,
            url: None,
        })
    }
}

/// Calls `fetch` for many at a time: those that do not respond delay all agents by one timeout, not by one each.
fn concurrently<T: Sync>(items: &[T], fetch: impl Fn(&T) + Sync) {
    let fetch = &fetch;
    for items in items.chunks(MAX_FETCHES) {
        thread::scope(|scope| {
            for item in items {
                let thread = thread::Builder::new().name("axed-openapi".to_owned());
                // Without a thread, it is fetched when its agent is read, or tried again.
                let _ = thread.spawn_scoped(scope, move || fetch(item));
            }
        });
    }
}

/// The URLs of the documents that an agent file names.
fn document_urls(bytes: &[u8]) -> Vec<Url> {
    // Most files name none and need not be parsed.
    if !bytes.windows(7).any(|word| word == b"openapi") {
        return Vec::new();
    }
    let table = document::parse(bytes).unwrap_or_default();
    let Some(Value::Array(tools)) = table.get("http_tools").map(|node| &node.value) else {
        return Vec::new();
    };
    let sources = tools.iter().filter_map(|tool| match &tool.value {
        Value::Table(tool) => match &tool.get("openapi")?.value {
            Value::String(source) if source.contains("://") => Some(source),
            _ => None,
        },
        _ => None,
    });
    sources
        .filter_map(|source| ssrf::parse_url(source).ok())
        .collect()
}

fn read_text(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        _ => format!("could not be read: {error}"),
    };
    // Checked before it is opened: opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err("is no file".to_owned());
    }
    let mut bytes = Vec::new();
    let limit = MAX_DOCUMENT_BYTES as u64 + 1;
    let read = File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
    read.map_err(unreadable)?;
    if bytes.len() > MAX_DOCUMENT_BYTES {
        return Err(format!("has over {MAX_DOCUMENT_BYTES} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "is no text in UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use tokio::net::TcpListener;
    use tokio::time::timeout;
    use url::Url;

    use super::{ALLOW_LIST_KEY, Documents, Fetched, RETRY_INTERVAL};
    use crate::catalog::Rules;
    use crate::catalog::reload::Catalog;
    use crate::ssrf::SsrfGuard;

    const URL: &str = "http://127.0.0.1/openapi";
    /// Only a broken build reaches it.
    const MAX_WAIT: Duration = Duration::from_secs(30);

    fn agent_file(url: &str) -> String {
        format!("[[http_tools]]\nopenapi = \"{url}\"\n")
    }

    /// A document that could not be fetched a while ago.
    fn failed() -> Fetched {
        let before = Instant::now().checked_sub(RETRY_INTERVAL * 2);
        Fetched {
            at: before.expect("a time"),
            has_failed: true,
            text: Err("could not be fetched".to_owned()),
        }
    }

    fn insert(documents: &Documents, url: &str, fetched: &Fetched) {
        let mut state = documents.state();
        state.fetched.insert(url.to_owned(), fetched.clone());
    }

    #[test]
    fn what_an_agent_lacks_is_tried_again() {
        let documents = Documents::default();
        let mut failed = failed();
        insert(&documents, URL, &failed);
        assert!(!documents.has_due_retry(), "no agent file names it");
        let url = Url::parse(URL).expect("a URL");
        documents.state().named.insert(url);
        assert!(documents.has_due_retry());
        failed.text = Ok("a copy".into());
        insert(&documents, URL, &failed);
        assert!(!documents.has_due_retry(), "its copy is used");
        documents.state().is_reloaded = true;
        assert!(documents.has_due_retry(), "there was a reload");
        failed.text = Err("could not be fetched".to_owned());
        failed.at = Instant::now();
        insert(&documents, URL, &failed);
        assert!(!documents.has_due_retry(), "it was just tried");
    }

    #[test]
    fn a_reload_leaves_what_has_failed_to_a_retry() {
        let documents = Documents::default();
        let file = (PathBuf::from("worker.toml"), agent_file(URL).into_bytes());
        documents.prefetch([file.clone()].into_iter());
        let failed = failed();
        insert(&documents, URL, &failed);
        let fetched_at = || documents.state().fetched[URL].at;
        documents.prefetch([file].into_iter());
        assert_eq!(fetched_at(), failed.at);
        assert!(documents.retry(), "the guard refuses the address");
        assert!(fetched_at() > failed.at);
        assert!(!documents.has_due_retry());
    }

    #[test]
    fn a_requested_reload_tries_again_what_has_failed() {
        let documents = Arc::new(Documents::default());
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("worker.toml"), agent_file(URL)).expect("a file");
        let rules = Rules {
            documents: Arc::clone(&documents),
            ..Rules::default()
        };
        let catalog = Catalog::open(vec![dir.path().to_owned()], rules);
        let fetched_at = || documents.state().fetched[URL].at;
        let failed_at = fetched_at();
        catalog.reload();
        assert_eq!(fetched_at(), failed_at);
        catalog.reload_all();
        assert!(fetched_at() > failed_at);
    }

    #[tokio::test]
    async fn a_document_that_does_not_respond_delays_no_agent() {
        let server = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = server.local_addr().expect("an address");
        let url = format!("http://{address}/openapi");
        let documents = Arc::new(Documents {
            guard: Arc::new(SsrfGuard::new(["127.0.0.1".to_owned()], ALLOW_LIST_KEY)),
            ..Documents::default()
        });
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            fs::write(dir.path().join(name), text).expect("a file");
        };
        write("worker.toml", &agent_file(&url));
        // Too new to be fetched when the directory is opened.
        let just_failed = Fetched {
            at: Instant::now(),
            ..failed()
        };
        insert(&documents, &url, &just_failed);
        let rules = Rules {
            documents: Arc::clone(&documents),
            ..Rules::default()
        };
        let catalog = Arc::new(Catalog::open(vec![dir.path().to_owned()], rules));
        let mut reloads = catalog.subscribe();
        let failed = failed();
        insert(&documents, &url, &failed);
        let _watch = catalog.watch().expect("a watch");
        let request = timeout(MAX_WAIT, server.accept()).await;
        let _request = request.expect("a retry").expect("a connection");
        write("other.toml", "");
        let reloaded = timeout(MAX_WAIT, reloads.changed()).await;
        reloaded.expect("a reload").expect("a catalogue");
        assert!(catalog.current().entries.contains_key("other"));
        let fetched_at = documents.state().fetched[&url].at;
        assert_eq!(fetched_at, failed.at, "the retry is not over");
    }
}
