//! Compacts a conversation if its next request would fill too much of its model's context window.

use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::context::{Compaction, ContextStrategy};
use crate::domain::event::EventKind;
use crate::domain::failure::Failure;
use crate::domain::message::Message;
use crate::domain::usage::TokenUsage;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::conversation::Conversation;
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::conversation::request_size::{self, SentAttachments};
use crate::engine::run_loop::ending::{Ending, error_ending};
use crate::engine::run_loop::exchange::Exchange;
use crate::engine::run_loop::limits::check_limits;
use crate::engine::run_loop::request_bounds::RequestBounds;
use crate::engine::run_loop::summary_request::SummaryRequest;
use crate::engine::run_loop::turn;
use crate::engine::run_loop::turn_loop::TurnLoop;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::state::failures;
use crate::engine::state::turn_error::TurnError;
use crate::providers::ProviderError;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// A summary, with the model that wrote it and the tokens it used.
struct Summary {
    text: String,
    model: String,
    tokens: TokenUsage,
}

enum SummaryError {
    /// The provider failed or the reply was unusable; the run can continue without a summary.
    Failed(Failure),
    RunEnded(Ending),
}

/// Makes the next request smaller, by the strategy of the agent's settings. Commits the pending write first, since a
/// summary may take long.
pub async fn compact(turn_loop: &mut TurnLoop<'_>, bounds: &RequestBounds) -> Result<(), Ending> {
    let run = &turn_loop.context.run;
    if check_limits(run).is_err() {
        // The loop ends the run before the request.
        return Ok(());
    }
    turn_loop.write_pending().await?;
    let window = bounds.window;
    let settings = &run.agent.context;
    let failure = match settings.strategy {
        ContextStrategy::Fail => {
            let tokens = bounds.estimate_tokens(&turn_loop.conversation);
            let failure = window.compaction_disabled(tokens, settings.compact_at);
            return Err(Ending::failed(failure));
        }
        ContextStrategy::DropToolResults => {
            drop_results(turn_loop, bounds).await?;
            None
        }
        ContextStrategy::Compact => summarize(turn_loop, bounds).await?,
    };
    let tokens = bounds.estimate_tokens(&turn_loop.conversation);
    if tokens <= window.max_request_tokens {
        return Ok(());
    }
    let largest = describe_largest(turn_loop.conversation.messages(), bounds.sent);
    let too_long = || window.request_too_long(tokens, &largest);
    Err(Ending::failed(failure.unwrap_or_else(too_long)))
}

/// Makes a request smaller that a service refused as too long: its model's window is smaller than was known. Later requests
/// of the run are held below it.
///
/// # Errors
/// The ending by the refusal, if nothing can be taken out of the request.
pub async fn compact_refused(
    turn_loop: &mut TurnLoop<'_>,
    refusal: ProviderError,
) -> Result<(), Ending> {
    let context = turn_loop.context;
    let run = &context.run;
    check_limits(run).map_err(|error| error_ending(run, error))?;
    let settings = &run.agent.context;
    let (system, specs) = (
        &turn_loop.preamble.system,
        turn_loop.preamble.toolbox.offered_specs(),
    );
    let window = ContextWindow::smaller_than(u64::MAX, settings.compact_at);
    let mut bounds = RequestBounds::with_window(context, system, specs, window);
    let before = bounds.estimate_tokens(&turn_loop.conversation);
    bounds.window = ContextWindow::smaller_than(before, settings.compact_at);
    turn_loop.bounds = Some(bounds);
    match settings.strategy {
        ContextStrategy::Fail => {}
        ContextStrategy::DropToolResults => drop_results(turn_loop, &bounds).await?,
        ContextStrategy::Compact => {
            summarize(turn_loop, &bounds).await?;
        }
    }
    match bounds.estimate_tokens(&turn_loop.conversation) < before {
        true => Ok(()),
        false => Err(error_ending(run, TurnError::Provider(refusal))),
    }
}

/// Asks the model to summarize the oldest turns. If that fails, drops the oldest tool results and returns the failure.
async fn summarize(
    turn_loop: &mut TurnLoop<'_>,
    bounds: &RequestBounds,
) -> Result<Option<Failure>, Ending> {
    let window = bounds.window;
    let conversation = &turn_loop.conversation;
    let before = bounds.estimate_tokens(conversation);
    let max_kept_bytes = window.max_kept_bytes(bounds.preamble);
    let request_messages = conversation.request_messages();
    let plan = request_messages.plan_summary(max_kept_bytes, bounds.sent);
    let Some((compaction, oldest)) = plan else {
        return Ok(None);
    };
    let is_small =
        request_size::messages_bytes(oldest, bounds.sent) <= window.max_summary_bytes() / 2;
    if is_small && before <= window.max_request_tokens {
        // A summary might be just as long. The request is larger than it should be, but the model can still answer it.
        return Ok(None);
    }
    let messages = oldest.len();
    let context = turn_loop.context;
    // Recorded before the request is paid for: a process that resumes the run then knows that there was one.
    let entries = vec![Entry::Compacting];
    let journal = &context.engine.journal;
    let commit = journal.append(&context.run, Change::Unchanged, entries);
    commit.await?;
    let summary = match generate_summary(turn_loop, &window, &compaction, oldest).await {
        Ok(summary) => summary,
        Err(SummaryError::RunEnded(ending)) => return Err(ending),
        Err(SummaryError::Failed(failure)) => {
            warn_of_failure(turn_loop, &failure).await?;
            drop_results(turn_loop, bounds).await?;
            return Ok(Some(failure));
        }
    };
    let compaction = Compaction {
        summary: summary.text,
        ..compaction
    };
    let from = conversation.request_messages().compaction().before;
    let (from_turn, to_turn) = turn_range(conversation, from, compaction.before);
    let conversation = &mut turn_loop.conversation;
    conversation.compact(compaction);
    let compacted = EventKind::ContextCompacted {
        turn: conversation.turn() + 1,
        strategy: ContextStrategy::Compact,
        from_turn,
        to_turn,
        messages,
        results: 0,
        tokens_before: before,
        tokens_after: bounds.estimate_tokens(conversation),
        model: Some(summary.model),
        input_tokens: summary.tokens.input,
        output_tokens: summary.tokens.output,
    };
    record_compaction(turn_loop, compacted).await?;
    Ok(None)
}

async fn warn_of_failure(
    turn_loop: &mut TurnLoop<'_>,
    failure: &Failure,
) -> Result<(), StoreError> {
    let turn = turn_loop.conversation.turn() + 1;
    let message = format!(
        "the conversation could not be summarized ({}); the oldest tool results are dropped instead",
        failure.message
    );
    let context = turn_loop.context;
    let warning = Warning::new(WarningCode::NotSummarized, &message);
    context.run.warn(warning, Some(turn));
    let progress = &mut turn_loop.state.progress;
    context.run.update_progress(progress);
    let change = Change::Progress(progress.clone());
    let warning = EventKind::ModelWarning { turn, message };
    let journal = &context.engine.journal;
    journal
        .enqueue(&context.run, change, vec![warning.into()])
        .await
}

/// Summarizes the oldest messages, in as many requests as their text needs.
async fn generate_summary(
    turn_loop: &TurnLoop<'_>,
    window: &ContextWindow,
    compaction: &Compaction,
    oldest: &[Message],
) -> Result<Summary, SummaryError> {
    let (context, conversation) = (turn_loop.context, &turn_loop.conversation);
    let current = conversation.request_messages().compaction();
    let has_separate_task = compaction.task.is_some() && compaction.task == current.task;
    let task = conversation.task();
    let request = SummaryRequest {
        task: if has_separate_task { &task } else { "" },
        max_bytes: window.max_summary_request_bytes(),
        max_summary_bytes: window.max_summary_bytes(),
    };
    // The response format and the stop sequences of the agent's own replies do not apply to a summary.
    let params = Params {
        response_format: ResponseFormat::Text,
        stop: Vec::new(),
        ..context.run.agent.params.clone()
    };
    let mut summary = Summary {
        text: current.summary.clone(),
        model: String::new(),
        tokens: TokenUsage::default(),
    };
    for piece in request.pieces(oldest) {
        let recorded = turn_loop.record_usage().await;
        recorded.map_err(|error| SummaryError::RunEnded(error.into()))?;
        let messages = [Message::user(request.message(&summary.text, &piece))];
        let turn_request = TurnRequest {
            turn: conversation.turn() + 1,
            system: "",
            messages: &messages,
            tools: &[],
            params: &params,
            is_turn: false,
            is_prompt_reused: false,
            conversation_id: "",
            progress: &turn_loop.state.progress,
        };
        let mut streamed = StreamedReply::default();
        let mut exchange = Exchange::default();
        let sent = turn::request(context, turn_request, &mut streamed, &mut exchange);
        let result = Box::pin(sent).await;
        let TurnReply {
            reply,
            requested_model,
        } = match result {
            Ok(turn_reply) => turn_reply,
            Err(TurnError::Provider(error)) => {
                return Err(SummaryError::Failed(failures::provider_error(&error)));
            }
            Err(error) => return Err(SummaryError::RunEnded(error_ending(&context.run, error))),
        };
        let tokens = reply.usage.unwrap_or_default();
        summary.tokens.input = summary.tokens.input.saturating_add(tokens.input);
        summary.tokens.output = summary.tokens.output.saturating_add(tokens.output);
        let text = request.truncate_summary(&reply.message.content);
        if let Some(failure) =
            failures::reply_failure(reply.outcome, &text, reply.refusal.as_deref())
        {
            return Err(SummaryError::Failed(failure));
        }
        if text.is_empty() {
            return Err(SummaryError::Failed(failures::empty_summary()));
        }
        summary.text = text;
        summary.model = reply.model.unwrap_or(requested_model.model);
    }
    Ok(summary)
}

/// Drops the oldest tool results until the request is a quarter below the compaction threshold. The prompt then stays
/// the same for some turns, so that services can cache it.
async fn drop_results(
    turn_loop: &mut TurnLoop<'_>,
    bounds: &RequestBounds,
) -> Result<(), StoreError> {
    let conversation = &mut turn_loop.conversation;
    let before = bounds.estimate_tokens(conversation);
    let excess = before.saturating_sub(bounds.window.compact_threshold / 4 * 3);
    let excess = request_size::bytes_from_tokens(excess);
    let request_messages = conversation.request_messages();
    let plan = request_messages.plan_result_drop(excess, bounds.sent);
    let Some((compaction, results)) = plan else {
        return Ok(());
    };
    let current = conversation.request_messages().compaction();
    let from = current.results_before.max(current.before);
    let (from_turn, to_turn) = turn_range(conversation, from, compaction.results_before);
    conversation.compact(compaction);
    let compacted = EventKind::ContextCompacted {
        turn: conversation.turn() + 1,
        strategy: ContextStrategy::DropToolResults,
        from_turn,
        to_turn,
        messages: 0,
        results,
        tokens_before: before,
        tokens_after: bounds.estimate_tokens(conversation),
        model: None,
        input_tokens: 0,
        output_tokens: 0,
    };
    record_compaction(turn_loop, compacted).await
}

/// Commits the conversation's new compaction.
async fn record_compaction(
    turn_loop: &mut TurnLoop<'_>,
    event: EventKind,
) -> Result<(), StoreError> {
    let run = &turn_loop.context.run;
    run.update_progress(&mut turn_loop.state.progress);
    let compaction = turn_loop.conversation.request_messages().compaction();
    let compacted = Entry::Compacted {
        compaction: compaction.clone(),
        event,
    };
    turn_loop.record(vec![compacted]).await
}

/// The first and the last turn of this run whose replies are among these recorded messages; `(0, 0)` if there is none.
fn turn_range(conversation: &Conversation, from: usize, before: usize) -> (u32, u32) {
    let turns_before = |recorded| {
        let replies = conversation.request_messages().replies_since(recorded);
        conversation
            .turn()
            .saturating_sub(u32::try_from(replies).unwrap_or(u32::MAX))
    };
    match turns_before(before) {
        0 => (0, 0),
        last => (turns_before(from) + 1, last),
    }
}

/// Describes the largest message, for the text of an error.
fn describe_largest(messages: &[Message], sent: SentAttachments) -> String {
    let largest = messages
        .iter()
        .max_by_key(|it| request_size::message_bytes(it, sent));
    let Some(message) = largest else {
        return String::new();
    };
    let bytes = request_size::message_bytes(message, sent);
    let kind = match message {
        Message::User { .. } => "a user message",
        Message::Assistant(_) => "a reply",
        Message::Tool { .. } => "the tool results of one turn",
    };
    format!(" ({kind} with {bytes} bytes is the largest part)")
}
