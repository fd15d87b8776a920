//! The agents' memories: entries are read into prompts, appended after a run succeeds, and trimmed by garbage
//! collection.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use crate::catalog::reload::Catalog;
use crate::config::Config;
use crate::domain::agent::Agent;
use crate::domain::memory_entry::{MEMORY_DIR, MemoryEntry};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::request::StartError;
use crate::providers::ProviderError;
use crate::store::StoreError;
use crate::store::memories::{
    EntryLimit, MAX_FILE_BYTES, MemoryId, MemoryRecordError, NewMemoryEntry, NewestEntries,
};
use crate::store::run_store::RunStore;

/// How many bytes of a memory's entries a prompt may have if the model's context window is not known.
pub const MAX_PROMPT_BYTES: usize = 1 << 20;
/// Which part of a memory is read to see whether it has entries.
const ONE_ENTRY: EntryLimit = EntryLimit {
    entries: Some(1),
    bytes: 64 << 10,
};

/// The result of a collection of memory.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "CollectMemoryReport")]
pub struct GcReport {
    /// The name of the agent.
    pub agent: String,
    /// The model's analysis; empty if there was nothing to analyze.
    pub analysis: String,
    /// The number of entries before.
    pub entries_before: usize,
    /// The number of entries after.
    pub entries_after: usize,
    /// Whether the memory was left unchanged.
    pub dry_run: bool,
    /// Input tokens of the analysis.
    pub input_tokens: u64,
    /// Output tokens of the analysis.
    pub output_tokens: u64,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("agent \"{0}\" has no memory; set [memory] enabled = true in its file")]
    Disabled(String),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error("memory of agent \"{agent}\": {reason}")]
    File { agent: String, reason: String },
    #[error("memory of agent \"{agent}\": {error}")]
    Store { agent: String, error: StoreError },
}

/// What a prompt has of a memory.
#[derive(Default)]
pub struct PromptMemory {
    /// The newest entries, oldest first.
    pub text: String,
    /// Why they, or some of them, are missing.
    pub warning: Option<Warning>,
    /// Whether the memory could not be read.
    pub is_unreadable: bool,
}

impl PromptMemory {
    fn of(newest: &NewestEntries, window: Option<ContextWindow>) -> Self {
        let entries = newest.entries.iter();
        let mut text: String = entries.map(|entry| entry.text.as_str()).collect();
        text.truncate(text.trim_end().len());
        let warning = newest.is_cut.then(|| {
            let max_bytes = max_prompt_bytes(window);
            let bound = match window {
                Some(_) => "half of what context.compact_at allows for a request",
                None => "what a model whose context window is not known is sent of a memory",
            };
            let message = format!(
                "only the newest {} of the memory's last entries are in the prompt: more do not fit {bound} ({max_bytes} bytes); lower memory.last_n",
                newest.entries.len()
            );
            Warning::new(WarningCode::MemoryNotRead, &message)
        });
        Self {
            text,
            warning,
            is_unreadable: false,
        }
    }
}

/// How many bytes of a memory's entries a prompt may have.
fn max_prompt_bytes(window: Option<ContextWindow>) -> usize {
    window.map_or(MAX_PROMPT_BYTES, |window| window.max_memory_bytes())
}

/// The memories in the store.
pub struct Memories {
    store: Arc<dyn RunStore>,
    /// The time of the last entry, in microseconds.
    last_entry_time: AtomicI64,
}

impl Memories {
    pub fn new(store: Arc<dyn RunStore>) -> Self {
        Self {
            store,
            last_entry_time: AtomicI64::default(),
        }
    }

    /// The current time. No two calls return the same, so that the time identifies an entry.
    pub fn next_time(&self) -> Timestamp {
        let now = Timestamp::now();
        let wanted = now.as_microsecond();
        let next = |last: i64| wanted.max(last + 1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let last = self
            .last_entry_time
            .fetch_update(set, fetch, |last| Some(next(last)))
            .unwrap_or_default();
        Timestamp::from_microsecond(next(last)).unwrap_or(now)
    }

    /// The entries, oldest first; none if nothing was remembered yet. Of a large memory the newest, as much as a file may have.
    pub async fn entries(
        &self,
        agent: &Agent,
        key: Option<&str>,
    ) -> Result<Vec<MemoryEntry>, MemoryError> {
        let limit = EntryLimit {
            entries: None,
            bytes: MAX_FILE_BYTES,
        };
        let newest = self.store.memory(memory_id(agent, key), limit).await;
        newest
            .map(|newest| newest.entries)
            .map_err(|error| memory_error(agent, error))
    }

    /// Whether nothing is remembered for all keys together. What cannot be read counts as empty.
    pub async fn is_empty(&self, agent: &Agent) -> bool {
        let newest = self.store.memory(memory_id(agent, None), ONE_ENTRY).await;
        !newest.is_ok_and(|newest| newest.is_cut || !newest.entries.is_empty())
    }

    /// The last `last_n` entries as the prompt shows them, if the agent has a memory; fewer if they do not fit the prompt.
    ///
    /// # Errors
    /// Those of the store. A memory whose file cannot be read is left out with a warning.
    pub async fn for_prompt(
        &self,
        agent: &Agent,
        key: Option<&str>,
        window: Option<ContextWindow>,
    ) -> Result<PromptMemory, StoreError> {
        if !agent.memory.enabled {
            return Ok(PromptMemory::default());
        }
        let limit = EntryLimit {
            entries: Some(agent.memory.last_n as usize).filter(|last_n| *last_n > 0),
            bytes: max_prompt_bytes(window),
        };
        match self.store.memory(memory_id(agent, key), limit).await {
            Ok(newest) => Ok(PromptMemory::of(&newest, window)),
            Err(MemoryRecordError::Store(error)) => Err(error),
            Err(error @ MemoryRecordError::File(_)) => {
                let message = memory_error(agent, error).to_string();
                Ok(PromptMemory {
                    text: String::new(),
                    warning: Some(Warning::new(WarningCode::MemoryNotRead, &message)),
                    is_unreadable: true,
                })
            }
        }
    }

    /// Appends an entry, and returns the number of entries.
    pub async fn append(
        &self,
        agent: &Agent,
        key: Option<&str>,
        entry: NewMemoryEntry,
    ) -> Result<usize, MemoryError> {
        let added = self.store.add_to_memory(memory_id(agent, key), entry).await;
        added.map_err(|error| memory_error(agent, error))
    }

    /// Keeps the newest `keep` entries, and returns the number of entries.
    pub async fn trim(
        &self,
        agent: &Agent,
        key: Option<&str>,
        keep: usize,
    ) -> Result<usize, MemoryError> {
        let trimmed = self.store.trim_memory(memory_id(agent, key), keep).await;
        trimmed.map_err(|error| memory_error(agent, error))
    }
}

/// A memory belongs to the key of its runs, unless the agent's memory is shared.
pub fn memory_id(agent: &Agent, key: Option<&str>) -> MemoryId {
    MemoryId {
        agent: agent.name.clone(),
        owner: key.filter(|_| !agent.memory.shared).map(str::to_owned),
        path: agent.memory.path.clone(),
    }
}

fn memory_error(agent: &Agent, error: MemoryRecordError) -> MemoryError {
    let agent = agent.name.clone();
    match error {
        MemoryRecordError::File(reason) => MemoryError::File { agent, reason },
        MemoryRecordError::Store(error) => MemoryError::Store { agent, error },
    }
}

/// Names each of them in the log, and what makes it useful again.
pub async fn warn_of_unused(config: &Config, catalog: &Catalog, memories: &Memories) {
    if config.auth.keys.is_empty() {
        return;
    }
    let agents = catalog.current();
    for agent in agents.entries.values().filter_map(|it| it.agent.as_ref()) {
        if !agent.memory.enabled || agent.memory.shared || memories.is_empty(agent).await {
            continue;
        }
        let (of_all, of_key) = match &config.data.url {
            Some(_) => (
                "in the database".to_owned(),
                "set the column owner of its rows in the table memory to the key's name".to_owned(),
            ),
            None => {
                let dir = config.data.dir.join(MEMORY_DIR);
                let of_all = memory_id(agent, None).file(&dir);
                let of_key = dir.join(&agent.name).join("<key>.md");
                (
                    of_all.display().to_string(),
                    format!("move it to {}", of_key.display()),
                )
            }
        };
        tracing::warn!(
            agent = %agent.name,
            "The memory {of_all} of agent {} is not used: with keys configured, each key has its own memory. \
             To use it for all keys, set [memory] shared = true in the agent's file; for one key, {of_key}",
            agent.name
        );
    }
}
