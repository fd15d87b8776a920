//! Garbage collection of an agent's memory: its model analyses the entries, then they are trimmed.

use std::sync::Arc;
use std::time::Instant;

use crate::domain::agent::Agent;
use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::memory_entry::MemoryEntry;
use crate::domain::message::{Message, shorten};
use crate::engine::context::Engine;
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::conversation::request_size::{self, SentAttachments};
use crate::engine::memories::{GcReport, MAX_PROMPT_BYTES, MemoryError};
use crate::engine::request::StartError;
use crate::engine::run_loop::{rate_limit, turn};
use crate::engine::state::failures;
use crate::providers::rate_limits::limiter::{Demand, RequestEnd};
use crate::providers::registry::ProviderHandle;
use crate::providers::{
    ChatRequest, Delta, ErrorCategory, ProviderError, Reply, model_params, retry,
};

const PROMPT: &str = "You look after the memory of an agent. You are given its entries, oldest first: each has a time, \
a task and a result. Answer in three short sections: Patterns (what kinds of task come again and again, and how they \
went), Repeated work (tasks that were done more than once and what could have been reused), Recommendations (what to \
change in the agent's instructions or files). Be concrete; quote times.";

/// The most characters of a task in the request for an analysis.
const MAX_TASK_CHARS: usize = 500;

/// The agent's entries of this key, oldest first.
pub async fn entries(
    engine: &Arc<Engine>,
    name: &str,
    key: Option<&str>,
) -> Result<Vec<MemoryEntry>, MemoryError> {
    let agent = agent_with_memory(engine, name)?;
    engine.memories.entries(&agent, key).await
}

/// Analyses the agent's memory and, unless `dry_run`, trims it to `last_n` entries, or to `max_entries` without it.
pub async fn collect(
    engine: &Arc<Engine>,
    name: &str,
    key: Option<&str>,
    dry_run: bool,
) -> Result<GcReport, MemoryError> {
    let agent = agent_with_memory(engine, name)?;
    let entries = engine.memories.entries(&agent, key).await?;
    let mut report = GcReport {
        agent: agent.name.clone(),
        analysis: String::new(),
        entries_before: entries.len(),
        entries_after: entries.len(),
        dry_run,
        input_tokens: 0,
        output_tokens: 0,
    };
    if entries.is_empty() {
        return Ok(report);
    }
    let reply = analyse(engine, &agent, &entries).await?;
    let tokens = reply.usage.unwrap_or_default();
    report.analysis = reply.message.content;
    (report.input_tokens, report.output_tokens) = (tokens.input, tokens.output);
    let keep = match (agent.memory.last_n, agent.memory.max_entries) {
        (0, 0) => None,
        (0, max_entries) => Some(max_entries as usize),
        (last_n, _) => Some(last_n as usize),
    };
    if let (false, Some(keep)) = (dry_run, keep) {
        report.entries_after = engine.memories.trim(&agent, key, keep).await?;
    }
    Ok(report)
}

async fn analyse(
    engine: &Engine,
    agent: &Agent,
    entries: &[MemoryEntry],
) -> Result<Reply, MemoryError> {
    let provider = engine
        .providers
        .get(&agent.model.provider)
        .map_err(StartError::from)?;
    let models = &engine.settings.models;
    let window = ContextWindow::for_agent(models, agent);
    let max_bytes = window.map_or(MAX_PROMPT_BYTES, |window| {
        window.max_summary_request_bytes()
    });
    let messages = [Message::user(entries_text(entries, max_bytes))];
    // These are for the agent's own replies, and the caller waits for the analysis.
    let params = Params {
        response_format: ResponseFormat::Text,
        stop: Vec::new(),
        service: None,
        ..agent.params.clone()
    };
    let facts = models.get(&agent.model.provider, &agent.model.model);
    let (params, _) =
        model_params::fit_to_model(&agent.model.to_string(), &params, facts.as_deref());
    let request = ChatRequest {
        tool_choice: None,
        model: &agent.model.model,
        system: PROMPT,
        messages: &messages,
        blobs: None,
        tools: &[],
        params: &params,
        stream: false,
        is_prompt_reused: false,
        facts: facts.as_deref(),
        cache_key: "",
        conversation_id: "",
        trace: None,
        api_key: None,
    };
    let timeout = agent.timeout.unwrap_or(engine.settings.default_timeout);
    let completion = request_with_retries(engine, agent, provider, request);
    let timeout_error = || {
        ProviderError::new(
            ErrorCategory::Timeout,
            format!("timeout after {}s", timeout.as_secs()),
        )
    };
    Ok(tokio::time::timeout(timeout, completion)
        .await
        .unwrap_or_else(|_| Err(timeout_error()))?)
}

/// The newest entries that have at most so many bytes together, at least one, oldest first.
fn entries_text(entries: &[MemoryEntry], max_bytes: usize) -> String {
    let text = |entry: &MemoryEntry| {
        let task = shorten(&entry.task, MAX_TASK_CHARS);
        format!(
            "## {}\nTask: {task}\nResult: {}\n\n",
            entry.time, entry.result
        )
    };
    let texts: Vec<String> = entries.iter().map(text).collect();
    let count = count_newest(texts.iter().map(String::len), max_bytes).max(1);
    texts[texts.len().saturating_sub(count)..].concat()
}

/// How many of the newest entries have at most so many bytes together. Their lengths come oldest first.
fn count_newest(lengths: impl DoubleEndedIterator<Item = usize>, max_bytes: usize) -> usize {
    let mut bytes = 0;
    let fits = |length: &usize| {
        bytes += length;
        bytes <= max_bytes
    };
    lengths.rev().take_while(fits).count()
}

/// Sends the request until it succeeds, as often as the agent's settings allow, and counts its usage.
async fn request_with_retries(
    engine: &Engine,
    agent: &Agent,
    provider: &ProviderHandle,
    request: ChatRequest<'_>,
) -> Result<Reply, ProviderError> {
    let mut attempt = 0;
    let limiter = provider.rate_limits.limiter(None, request.model);
    let bytes =
        request.system.len() + request_size::messages_bytes(request.messages, SentAttachments::ALL);
    let demand = Demand {
        input: request_size::tokens_from_bytes(bytes),
        max_output: request.params.max_tokens,
    };
    loop {
        let mut slot = match limiter.is_limited() {
            true => {
                let mut waiting = limiter.enter(demand, None, agent.priority);
                waiting.slot(None).await.ok()
            }
            false => Some(limiter.begin()),
        };
        let permit = match &provider.permits {
            Some(permits) => Some(permits.acquire(None).await),
            None => None,
        };
        let mut reported_usage = None;
        let mut on_delta = |delta: Delta<'_>| {
            if let Some(slot) = &mut slot {
                slot.observe(&delta);
            }
            if let Delta::Usage(usage) = delta {
                reported_usage = Some(usage);
            }
        };
        let start = Instant::now();
        let result = provider.complete(request, &mut on_delta).await;
        drop(permit);
        if let Some(slot) = slot {
            slot.settle(&match &result {
                Ok(reply) => RequestEnd::Used(reply.usage),
                Err(error) => rate_limit::failed_end(error, reported_usage),
            });
        }
        let category = result.as_ref().err().map(|error| error.category.as_str());
        let metrics = &engine.metrics;
        metrics.provider_responded(&provider.name, start.elapsed(), category);
        let tokens = match &result {
            Ok(reply) => reply.usage,
            Err(_) => reported_usage,
        };
        if let Some(tokens) = tokens {
            let model = agent.model.to_string();
            let cost = engine.settings.models.price(&agent.model);
            let cost = cost.map(|price| price.cost(&tokens));
            engine.metrics.record_usage(&model, &tokens, cost);
        }
        let error = match result {
            Ok(reply) => {
                let (text, refusal) = (&reply.message.content, reply.refusal.as_deref());
                match failures::reply_failure(reply.outcome, text, refusal) {
                    None => return Ok(reply),
                    Some(failure) => ProviderError::new(ErrorCategory::BadRequest, failure.message),
                }
            }
            Err(error) => error.redact_matches(&engine.settings.requests.redactor),
        };
        attempt += 1;
        let is_final = !error.category.is_retryable() || error.is_quota_spent;
        if is_final || attempt > agent.retry.max_retries {
            return Err(error);
        }
        let wait = retry::retry_delay(
            &agent.retry,
            attempt,
            error.retry_after,
            turn::random_fraction(),
        );
        engine.metrics.request_retried(&provider.name);
        tokio::time::sleep(wait).await;
    }
}

fn agent_with_memory(engine: &Engine, name: &str) -> Result<Arc<Agent>, MemoryError> {
    let agents = engine.catalog.current();
    let agent = agents.get(name).map_err(StartError::from)?;
    if !agent.memory.enabled {
        return Err(MemoryError::Disabled(name.to_owned()));
    }
    Ok(Arc::clone(agent))
}
