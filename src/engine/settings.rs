//! The part of the configuration that the engine reads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::models::Models;
use crate::config::{AttachmentLimits, Runs};
use crate::fair::Limits;
use crate::ssrf::SsrfGuard;

/// What the configuration says of runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where relative and bare skills are.
    pub config_dir: PathBuf,
    /// Who may be at work at once, and who may wait.
    pub runs: Runs,
    /// A root's deadline where nothing is said.
    pub default_timeout: Duration,
    /// No root's deadline is above this.
    pub max_timeout: Duration,
    /// See [`crate::config::Limits`].
    pub loop_warn: u32,
    /// See [`crate::config::Limits`].
    pub loop_stop: u32,
    /// Most bytes of context files.
    pub max_context_file_bytes: usize,
    /// Most bytes of one run's conversation.
    pub max_conversation_bytes: usize,
    /// How much of its conversation a session's next run goes on with.
    pub history_limits: HistoryLimits,
    /// Where webhooks may point.
    pub webhook_guard: SsrfGuard,
    /// See [`crate::config::Webhooks`].
    pub webhook_secret_env: Option<String>,
    /// The configured keys by their names, with [`crate::config::Key::webhook_secret_env`].
    pub keys: BTreeMap<String, Option<String>>,
    /// What is known of models.
    pub models: Models,
}

impl Settings {
    /// What bounds the line of root runs.
    pub fn queue_limits(&self) -> Limits {
        let Runs {
            max_running,
            max_queued,
            per_agent,
            per_key,
            max_live,
            ..
        } = self.runs.clone();
        Limits {
            max_running,
            max_live,
            max_queued,
            per_agent,
            per_key: per_key.named,
            default_per_key: per_key.others,
            keys: self.keys.keys().cloned().collect(),
            shares_permits: false,
        }
    }
}

/// How much of a session's conversation its next run goes on with.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimits {
    /// Messages.
    pub messages: usize,
    /// Bytes of their texts, arguments included.
    pub bytes: usize,
    /// Their pictures and files: as many, and half of the bytes, so that the next message has a place.
    pub attachments: AttachmentLimits,
}
