//! The OpenAPI documents that agent files name: files beside them, and URLs, of which a copy is kept on disk. Blocking I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tracing::warn;
use url::Url;

use crate::catalog::document_fetch;
use crate::config::Config;
use crate::config::document::{self, Value};
use crate::config::environment::{expand_home, home_dir};
use crate::domain::openapi::document::{Document, MAX_DOCUMENT_BYTES};
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
}

#[derive(Debug, Default)]
struct State {
    fetched: BTreeMap<String, Fetched>,
    /// The URLs that agent files named at the last reload.
    named: BTreeSet<String>,
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

    /// Fetches the documents that agent files name by URL, many at a time: those that do not respond delay all agents by
    /// one timeout, not by one each.
    pub fn prefetch(&self, files: impl Iterator<Item = (PathBuf, Vec<u8>)>) {
        let mut due: BTreeMap<Url, bool> = BTreeMap::new();
        for (file, bytes) in files {
            let urls = document_urls(&bytes);
            if urls.is_empty() {
                continue;
            }
            let digest = Sha256::digest(&bytes).into();
            let before = self.state().agent_files.insert(file, digest);
            for url in urls {
                *due.entry(url).or_default() |= before != Some(digest);
            }
        }
        self.state().named = due.keys().map(Url::to_string).collect();
        let due: Vec<(Url, bool)> = due.into_iter().collect();
        for due in due.chunks(MAX_FETCHES) {
            thread::scope(|scope| {
                for (url, is_changed) in due {
                    let thread = thread::Builder::new().name("axed-openapi".to_owned());
                    // Without a thread, it is fetched when its agent is read.
                    let _ = thread.spawn_scoped(scope, || self.fetch(url, *is_changed).map(drop));
                }
            });
        }
    }

    /// Whether a reload would fetch a document again that an agent lacks.
    pub fn has_due_retry(&self) -> bool {
        let state = self.state();
        let mut named = state.named.iter().filter_map(|url| state.fetched.get(url));
        named.any(|document| document.text.is_err() && document.at.elapsed() > RETRY_INTERVAL)
    }

    fn fetch(&self, url: &Url, is_changed: bool) -> Result<Arc<str>, String> {
        let known = self.state().fetched.get(url.as_str()).cloned();
        if let Some(known) = &known {
            let age = known.at.elapsed();
            let is_due =
                (is_changed && age > MIN_AGE) || (known.has_failed && age > RETRY_INTERVAL);
            if !is_due {
                return known.text.clone();
            }
        }
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
                let last = || known.and_then(|known| known.text.ok());
                self.kept(url, &why).or_else(last).ok_or(why)
            }
        };
        let at = Instant::now();
        let entry = Fetched {
            at,
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
    use std::time::Instant;

    use super::{Documents, Fetched, RETRY_INTERVAL};

    #[test]
    fn what_an_agent_lacks_is_tried_again() {
        let documents = Documents::default();
        let url = "http://127.0.0.1/openapi".to_owned();
        let before = Instant::now().checked_sub(RETRY_INTERVAL * 2);
        let mut failed = Fetched {
            at: before.expect("a time"),
            has_failed: true,
            text: Err("could not be fetched".to_owned()),
        };
        let insert = |fetched: &Fetched| {
            let mut state = documents.state();
            state.fetched.insert(url.clone(), fetched.clone());
        };
        insert(&failed);
        assert!(!documents.has_due_retry(), "no agent file names it");
        documents.state().named.insert(url.clone());
        assert!(documents.has_due_retry());
        failed.text = Ok("a copy".into());
        insert(&failed);
        assert!(!documents.has_due_retry(), "its copy is used");
        failed.text = Err("could not be fetched".to_owned());
        failed.at = Instant::now();
        insert(&failed);
        assert!(!documents.has_due_retry(), "it was just tried");
    }
}
