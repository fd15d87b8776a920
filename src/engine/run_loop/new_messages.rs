//! Reads the messages that clients add to a run: before each request, and before the run ends.

use tokio::sync::MutexGuard;

use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedMessages;
use crate::engine::run_loop::turn_loop::TurnLoop;
use crate::engine::state::inbox::Messages;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// Adds the messages that have come to the conversation, after it is recorded that the next turn reads them: a recovered
/// turn sends the same request.
pub async fn read_new(turn_loop: &mut TurnLoop<'_>) -> Result<(), StoreError> {
    let context = turn_loop.context;
    if std::mem::take(&mut turn_loop.repeats_turn) {
        return Ok(());
    }
    for text in played_messages(turn_loop) {
        turn_loop.conversation.push_message(text.into());
    }
    let unread = lock(context).await?.take_unread();
    let Some((contents, last)) = unread else {
        return Ok(());
    };
    Box::pin(turn_loop.write_pending()).await?;
    let read = Entry::MessagesRead {
        turn: turn_loop.conversation.turn() + 1,
        last,
    };
    let journal = &context.engine.journal;
    let recorded = journal.append(&context.run, Change::Unchanged, vec![read]);
    Box::pin(recorded).await?;
    for content in contents {
        turn_loop.conversation.push_message(content);
    }
    Ok(())
}

/// Whether the run has to take another turn, which reads messages that are unread.
pub async fn needs_turn(turn_loop: &TurnLoop<'_>) -> Result<bool, StoreError> {
    if !turn_loop.conversation.has_turn_left() {
        return Ok(false);
    }
    Ok(!played_messages(turn_loop).is_empty() || lock(turn_loop.context).await?.has_unread())
}

/// The messages of the run, with those that are only in the record.
async fn lock(context: &RunContext) -> Result<MutexGuard<'_, Messages>, StoreError> {
    let mut messages = context.run.inbox.lock().await;
    if messages.count().is_none() {
        let recorded = RecordedMessages::read(&context.engine, context.run.scope.run);
        let recorded = Box::pin(recorded).await?;
        messages.restore(&recorded.contents, recorded.read);
    }
    Ok(messages)
}

/// In a test: the recorded messages for the next turn.
fn played_messages(turn_loop: &TurnLoop<'_>) -> Vec<String> {
    let context = turn_loop.context;
    let next_turn = turn_loop.conversation.turn() + 1;
    context.model_playback().map_or(Vec::new(), |playback| {
        playback.added(context.run.scope.run, next_turn)
    })
}

/// Accepts no more messages, unless the run has to take another turn to read them; false in that case.
pub async fn close(turn_loop: &TurnLoop<'_>) -> Result<bool, StoreError> {
    let mut messages = lock(turn_loop.context).await?;
    if turn_loop.conversation.has_turn_left() && messages.has_unread() {
        return Ok(false);
    }
    messages.close();
    Ok(true)
}
