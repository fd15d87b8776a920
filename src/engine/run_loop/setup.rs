//! Prepares a run for its first turn: its working directory, its prompt, the files behind its links, its tools.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::attachment::Attachment;
use crate::domain::content::{AttachmentLink, Content, Part};
use crate::domain::event::EventKind;
use crate::domain::failure::Failure;
use crate::domain::message::Message;
use crate::domain::run::Run;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::backtest::offer;
use crate::engine::context::{Engine, RunContext};
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::history::run_log::RecordedRun;
use crate::engine::history::{self, SessionHistory};
use crate::engine::memories::PromptMemory;
use crate::engine::prepare;
use crate::engine::run_loop::ending::{Ending, error_ending};
use crate::engine::run_loop::limits;
use crate::engine::run_loop::start::{PendingWrite, RunStart, start_run};
use crate::engine::state::failures;
use crate::engine::state::prompt::{Prompt, RunInput};
use crate::engine::state::turn_error::TurnError;
use crate::engine::workdir;
use crate::record::entry::Entry;
use crate::ssrf;
use crate::store::{Change, StoreError};
use crate::tools::mcp::McpToolset;
use crate::tools::toolbox::Toolbox;

pub struct Setup {
    pub prompt: Prompt,
    pub toolbox: Arc<Toolbox>,
    /// The write that starts or resumes the run, unless it is already committed.
    pub pending_write: Option<Box<PendingWrite>>,
    /// What an earlier process recorded of the run.
    pub recorded_run: Option<Box<RecordedRun>>,
    /// The session that the run continues.
    pub session: Option<String>,
}

/// Prepares a run and adds its start to `record`. A run without a prompt is accepted, or resumed, and fails.
pub async fn set_up(
    context: &RunContext,
    record: &mut Arc<Run>,
    input: RunInput,
    mut start: RunStart,
) -> Result<Setup, Ending> {
    let mut recorded_run = match &mut start {
        RunStart::Forked(recorded) | RunStart::Resumed(recorded) => Some(std::mem::take(recorded)),
        RunStart::Queued | RunStart::New { .. } => None,
    };
    let is_prompt_recorded = recorded_run.as_ref().is_some_and(|it| it.prompt.is_some());
    let loaded = load_prompt(context, record, input, recorded_run.as_deref_mut()).await;
    if let Err(PromptFailure::Store(error)) = loaded {
        if let RunStart::New {
            acceptance: Some(acceptance),
            ..
        } = start
        {
            acceptance.answer(Err(error.clone()));
            return Err(Ending::refused(error));
        }
        return Err(error.into());
    }
    let mut start_write = Box::new(start_run(context, record, start));
    let mut prompt = match loaded {
        Ok(prompt) => prompt,
        Err(PromptFailure::Store(error)) => return Err(error.into()),
        Err(PromptFailure::Failed(failure)) => {
            Box::pin(start_write.write(context)).await?;
            return Err(Ending::failed(failure));
        }
    };
    if !is_prompt_recorded {
        start_write.entries.push(prompt_entry(&prompt));
        for warning in std::mem::take(&mut prompt.warnings) {
            context.run.warn(warning, None);
        }
        if let Some(warning) = prompt.memory_warning.take() {
            let message = warning.message.clone();
            context.run.warn(warning, None);
            let warning = EventKind::MemoryWarning { message };
            start_write.entries.push(warning.into());
        }
    }
    let mut pending_write = Some(start_write);
    if has_links(&prompt.input) {
        Box::pin(fetch_links(context, &mut pending_write, &mut prompt)).await?;
    }
    let is_new = recorded_run.is_none();
    let has_servers = !context.run.agent.mcp_servers.is_empty();
    let offer = match (has_servers, context.run.tree.played()) {
        (false, _) => McpToolset::default(),
        // A backtest starts none.
        (true, Some(evaluation)) => {
            let store = context.engine.journal.store().as_ref();
            let servers = &context.run.agent.mcp_servers;
            Box::pin(offer::mcp_toolset(store, evaluation, servers)).await?
        }
        (true, None) => match context.tool_playback() {
            Some(playback) => playback.mcp_toolset(&context.run.agent.mcp_servers),
            None => Box::pin(list_mcp_tools(context, &mut pending_write, is_new)).await?,
        },
    };
    let toolbox = prepare::build_toolbox(
        &context.engine,
        &context.run.agent,
        &context.run.scope,
        context.run.workdir.dir(),
        offer,
        &context.sub_agents(),
    );
    for warning in prepare::missing_tools(&context.engine, &context.run.agent, &toolbox) {
        context.run.warn(warning, None);
    }
    let recorded_compaction = recorded_run.as_ref().and_then(|run| run.compaction.clone());
    prompt.input.compaction = prompt.input.compaction.or(recorded_compaction);
    Ok(Setup {
        prompt,
        toolbox: Arc::new(toolbox),
        pending_write,
        recorded_run,
        session: record.session.clone(),
    })
}

/// Why a run has no prompt.
enum PromptFailure {
    Failed(Failure),
    Store(StoreError),
}

/// Opens the working directory and returns the recorded prompt, or assembles a new one.
async fn load_prompt(
    context: &RunContext,
    record: &Run,
    mut input: RunInput,
    recorded_run: Option<&mut RecordedRun>,
) -> Result<Prompt, PromptFailure> {
    let config_failure = |message: String| PromptFailure::Failed(failures::config(&message));
    let agent = &context.run.agent;
    Box::pin(workdir::prepare_skills(&context.engine, agent)).await;
    if workdir::is_used(&context.engine, agent) {
        Box::pin(workdir::open(context))
            .await
            .map_err(|error| config_failure(error.to_string()))?;
    }
    if let Some(recorded_run) = recorded_run {
        context.run.pending_batch.set(recorded_run.pending_batch());
        // A recorded prompt is used unchanged, even if the files have changed since.
        if let Some(prompt) = recorded_run.prompt.take() {
            return Ok(prompt);
        }
    }
    // A fork has taken over the earlier messages of its source.
    if record.session.is_some() && record.fork.is_none() {
        let history = Box::pin(history::session_history(&context.engine, record)).await;
        let SessionHistory {
            messages,
            compaction,
        } = history.map_err(|error| match context.run.has_lost_history(&error) {
            true => PromptFailure::Failed(failures::internal(&error.to_string())),
            false => PromptFailure::Store(error),
        })?;
        (input.earlier, input.compaction) = (messages, compaction);
    }
    let mut memory = PromptMemory::default();
    if let Some(playback) = context.playback() {
        (input.earlier, input.compaction) = playback.history(context.run.scope.run);
        if agent.memory.enabled {
            memory.text = playback.memory(context.run.scope.run);
        }
    } else if context.run.tree.evaluation.is_none() {
        let owner = context.run.tree.owner.as_deref();
        let window = ContextWindow::for_agent(&context.engine.settings.models, agent);
        let read = context.engine.memories.for_prompt(agent, owner, window);
        memory = Box::pin(read).await.map_err(PromptFailure::Store)?;
    }
    let dir = context.run.workdir.dir();
    let assembled = prepare::assemble_prompt(&context.engine, agent, dir, memory, input);
    Box::pin(assembled)
        .await
        .map_err(|error| config_failure(error.to_string()))
}

fn prompt_entry(prompt: &Prompt) -> Entry {
    let RunInput {
        earlier,
        message,
        compaction,
    } = prompt.input.clone();
    Entry::Prompted {
        system: prompt.system.clone(),
        message,
        earlier,
        compaction,
    }
}

async fn write_pending(
    context: &RunContext,
    pending_write: &mut Option<Box<PendingWrite>>,
) -> Result<(), StoreError> {
    match pending_write.take() {
        Some(pending_write) => pending_write.write(context).await,
        None => Ok(()),
    }
}

/// Commits the start of the run, fetches the URLs of the prompt and records the prompt with their content, so that a
/// later process does not fetch them again.
async fn fetch_links(
    context: &RunContext,
    pending_write: &mut Option<Box<PendingWrite>>,
    prompt: &mut Prompt,
) -> Result<(), Ending> {
    write_pending(context, pending_write).await?;
    let owner = context.run.tree.owner.as_deref();
    let fetched = replace_links(&context.engine, owner, &mut prompt.input);
    limits::within_deadline(&context.run, fetched)
        .await
        .map_err(|error| error_ending(&context.run, error))?
        .map_err(|reason| Ending::failed(failures::config(&reason)))?;
    let entries = vec![prompt_entry(prompt)];
    let journal = &context.engine.journal;
    let recorded = journal.append(&context.run, Change::Unchanged, entries);
    recorded.await?;
    prompt.input.drop_data();
    Ok(())
}

/// When a server is looked for again that a resumed run requires.
const SERVER_RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// The tools of the agent's MCP servers. This list holds for the whole run. Ends a new run whose required server is unavailable; a
/// run that continues waits for it.
async fn list_mcp_tools(
    context: &RunContext,
    pending_write: &mut Option<Box<PendingWrite>>,
    is_new: bool,
) -> Result<McpToolset, Ending> {
    if is_new {
        // A server may take long to reply; the caller learns before that that the run was accepted.
        write_pending(context, pending_write).await?;
    }
    let run = &context.run;
    let listed = async {
        loop {
            let servers = &run.agent.mcp_servers;
            let offer = context.engine.mcp.list_tools(servers).await;
            if is_new || offer.required_failure.is_none() {
                return offer;
            }
            // It has been available: the run waits until it is again.
            tokio::time::sleep(SERVER_RETRY_INTERVAL).await;
        }
    };
    // On a cancel or a passed deadline the run ends before its next turn.
    let mut offer = match limits::within_deadline(run, listed).await {
        Ok(offer) => offer,
        Err(TurnError::DeadlineExceeded) => unlisted_servers(context),
        Err(_) => McpToolset::default(),
    };
    for warning in std::mem::take(&mut offer.skipped) {
        run.warn(warning, None);
    }
    for warning in std::mem::take(&mut offer.warnings) {
        let message = warning.message.clone();
        if run.warn(warning, None) {
            let entries = &mut pending_write.get_or_insert_default().entries;
            entries.push(EventKind::ToolsWarning { message }.into());
        }
    }
    if let Some(reason) = offer.required_failure.take() {
        write_pending(context, pending_write).await?;
        return Err(Ending::failed(failures::config(&reason)));
    }
    Ok(offer)
}

/// No tools, and a warning that names the servers that the run waited for until its deadline.
fn unlisted_servers(context: &RunContext) -> McpToolset {
    let servers = &context.run.agent.mcp_servers;
    let starting = context.engine.mcp.starting_servers(servers);
    let warning = |name: &str| {
        let message = format!("MCP server \"{name}\" had not started when the run's time was over");
        Warning::new(WarningCode::McpServerUnavailable, &message)
    };
    McpToolset {
        warnings: starting.into_iter().map(warning).collect(),
        ..McpToolset::default()
    }
}

/// Whether a request names images or files by URL. They are fetched once, before the first turn, and recorded.
fn has_links(input: &RunInput) -> bool {
    let earlier = input.earlier.iter().any(|message| match message {
        Message::User { content } => content.links().next().is_some(),
        Message::Assistant(_) | Message::Tool { .. } => false,
    });
    earlier || input.message.links().next().is_some()
}

/// Replaces the URLs by the bytes, in their order. An error names the URL that failed and why, without its query, which may contain
/// a secret.
async fn replace_links(
    engine: &Arc<Engine>,
    key: Option<&str>,
    input: &mut RunInput,
) -> Result<(), String> {
    let earlier = input
        .earlier
        .iter_mut()
        .filter_map(|message| match message {
            Message::User { content } => Some(content),
            Message::Assistant(_) | Message::Tool { .. } => None,
        });
    for content in earlier.chain([&mut input.message]) {
        let Content::Parts(parts) = content else {
            continue;
        };
        for part in parts {
            if let Part::Link(link) = part {
                let fetched = fetch_link(engine, key, link).await;
                let redacted_url = ssrf::redact_query(&link.url);
                *part = fetched.map_err(|why| format!("could not fetch {redacted_url}: {why}"))?;
            }
        }
    }
    Ok(())
}

async fn fetch_link(
    engine: &Engine,
    key: Option<&str>,
    link: &AttachmentLink,
) -> Result<Part, String> {
    let data = engine
        .tool_registry
        .downloader()?
        .download(&link.url, key)
        .await?;
    // Its type is that of its bytes, whatever the request declares.
    let attachment = Attachment::from_bytes(data, link.name.clone());
    let attachment = attachment.ok_or_else(|| "it is of no kind that is taken".to_owned())?;
    Ok(Part::from(attachment))
}
