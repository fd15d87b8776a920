//! Waits of calls for a time, or for an event of the world outside.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::value::RawValue;

use crate::domain::event::EventKind;
use crate::domain::input::InputKind;
use crate::domain::run::now;
use crate::domain::world_event::wake_key;
use crate::engine::approval::decision::{self, NeededInput};
use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedCalls;
use crate::engine::state::failures;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::store::world_events::EventWait;
use crate::tools::WaitRequest;

/// The data of the event, `None` at the end of the time; the inner error says why the wait has ended early.
pub async fn wait(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    turn: u32,
    request: WaitRequest,
) -> Result<Result<Option<Arc<RawValue>>, String>, StoreError> {
    let WaitRequest { call, event, limit } = request;
    let kind = match event {
        Some(_) => InputKind::Event,
        None => InputKind::Sleep,
    };
    let earlier = event.as_ref().map(|event| EventWait {
        run: context.run.scope.run,
        call: call.clone(),
        owner: context
            .run
            .tree
            .owner
            .as_deref()
            .unwrap_or_default()
            .to_owned(),
        wake: wake_key(&event.event, &event.key),
    });
    let input = NeededInput {
        id: &call,
        limit: Some(limit),
        timed_out: InputAnswer::to_wait(kind, None),
        kind,
        waiting_for: kind.waiting_for(),
        tool: None,
        withdrawn: None,
    };
    let started = |until| EventKind::WaitStarted {
        turn,
        tool_call_id: call.clone(),
        event,
        until,
    };
    let begun = async {
        match earlier {
            Some(wait) => receive_earlier(context, wait).await,
            None => Ok(()),
        }
    };
    Ok(
        match decision::await_answer(context, recorded_calls, input, started, begun).await? {
            Ok(answer) => Ok(answer.arguments),
            Err(error) => Err(failures::interruption_message(&context.run, &error)),
        },
    )
}

/// Ends a wait by an event that came shortly before it began.
async fn receive_earlier(context: &RunContext, wait: EventWait) -> Result<(), StoreError> {
    let engine = &context.engine;
    let lookback = SignedDuration::try_from(engine.settings.world_events.lookback);
    let since = now().saturating_sub(lookback.unwrap_or(SignedDuration::MAX));
    let since = since.unwrap_or_default();
    if engine.journal.store().receive_earlier(wait, since).await? {
        engine.waits_ended.notify_one();
    }
    Ok(())
}
