//! Reads the messages that clients add to a run, and the ends of its children in the background: before each request, and before the run
//! ends.

use tokio::sync::MutexGuard;

use crate::engine::context::RunContext;
use crate::engine::control::add_message::{self, MessageRequest};
use crate::engine::history::run_log::RecordedMessages;
use crate::engine::run_loop::delegation::background;
use crate::engine::run_loop::ending::{Ending, error_ending};
use crate::engine::run_loop::turn_loop::TurnLoop;
use crate::engine::state::background::EndedChild;
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
    if let Some((ended, text)) = background::take_ends(context) {
        Box::pin(deliver(turn_loop, ended, text)).await?;
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

/// Commits a message with the ends of children in the background, and adds it to those that are unread.
async fn deliver(
    turn_loop: &mut TurnLoop<'_>,
    ended: Vec<EndedChild>,
    text: String,
) -> Result<(), StoreError> {
    let context = turn_loop.context;
    turn_loop.write_pending().await?;
    let mut messages = lock(context).await?;
    let request = MessageRequest {
        content: text.into(),
        by: None,
        claim: None,
    };
    let run = &context.run;
    let with = |number| background::returned_in_message(run, &ended, number);
    let engine = &context.engine;
    let added = add_message::commit_next(engine, run, &mut messages, &request, |_| true, with);
    match added.await {
        Ok(_) => Ok(()),
        // It is cancelled, and ends before its next request.
        Err(StoreError::AlreadyTerminal(_)) => {
            run.background().restore_ended(ended);
            Ok(())
        }
        Err(error) => {
            run.suspend(&error);
            Err(error)
        }
    }
}

/// Whether the run has to take another turn, which reads messages that are unread.
pub async fn needs_turn(turn_loop: &TurnLoop<'_>) -> Result<bool, StoreError> {
    if !turn_loop.conversation.has_turn_left() {
        return Ok(false);
    }
    if !played_messages(turn_loop).is_empty() || background::has_undelivered(turn_loop.context) {
        return Ok(true);
    }
    Ok(lock(turn_loop.context).await?.has_unread())
}

/// Waits until there is something for another turn to read, after a final text.
pub async fn await_next(turn_loop: &TurnLoop<'_>) -> Result<(), Ending> {
    let run = &turn_loop.context.run;
    if run.background.get().is_none() {
        return Ok(());
    }
    let waited = Box::pin(background::wait_for_all(turn_loop.context)).await;
    waited.map_err(|error| error_ending(run, error))
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
