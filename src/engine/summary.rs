//! The summary of an unnamed agent: one more turn when its task is done. Knows no loop.

use std::sync::Arc;

use crate::domain::event::EventKind;
use crate::engine::answers::{check, failed_turn};
use crate::engine::close::{Ending, How, State};
use crate::engine::compaction::{self, RequestBounds};
use crate::engine::conversation::Conversation;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::turn::{self, Answer, Question, Streamed};
use crate::engine::turn_error::TurnError;
use crate::providers::End;
use crate::store::{Change, Step};

/// What an unnamed agent is asked when its task is done.
pub fn prompt(live: &LiveRun) -> Option<&str> {
    live.agent.ad_hoc.as_ref()?.summary_prompt.as_deref()
}

/// Asks an unnamed agent to sum up: a turn without tools, which is not counted. Where it fails, the task's own text is
/// the result.
pub async fn ask(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    system: &str,
    talk: &mut Conversation,
    task: String,
) -> Ending {
    // Without tools the request begins otherwise than those before it.
    talk.drop_thinking(0);
    let user = talk.task().into_owned();
    let done = |content| How::Completed {
        content,
        structured: false,
        task: user,
        remembers: None,
    };
    let bounds = RequestBounds::of(engine, live, system, &[]);
    if let Some(bounds) = bounds.filter(|bounds| bounds.are_passed(talk)) {
        let mut draft = None;
        let shortened = compaction::shorten(engine, live, state, &bounds, talk, &mut draft);
        match Box::pin(shortened).await {
            Ok(()) => {}
            Err(ending) if matches!(ending.how, Ok(How::Failed(_))) => {
                return Ending::of(done(task));
            }
            Err(ending) => return ending,
        }
    }
    let turn = talk.turn() + 1;
    let begun = EventKind::TurnStarted {
        turn,
        messages: talk.messages().len(),
        results: 0,
    };
    let question = Question {
        turn,
        system,
        messages: talk.messages(),
        tools: &[],
        params: &live.agent.params,
        is_turn: true,
    };
    // The task's own text is what there is without a summary, not the beginning of one.
    let mut streamed = Streamed::default();
    let answered = async {
        check(live)?;
        let journal = &engine.journal;
        let told = journal.record(live, Change::Nothing, Vec::new(), vec![begun]);
        told.await?;
        turn::take(engine, live, question, &mut streamed).await
    };
    let Answer { reply, asked } = match answered.await {
        Ok(answer) => answer,
        Err(error @ (TurnError::Stopped | TurnError::Store(_))) => return failed_turn(live, error),
        Err(_) => return Ending::of(done(task)),
    };
    let tokens = reply.usage.unwrap_or_default();
    state.progress.model = reply.model.unwrap_or(asked.model);
    state.progress.stop_reason = reply.stop_reason;
    state.progress.usage = live.usage().0;
    let completed = EventKind::TurnCompleted {
        turn,
        model: state.progress.model.clone(),
        stop_reason: state.progress.stop_reason.clone(),
        input_tokens: tokens.input,
        output_tokens: tokens.output,
        cache_read_tokens: tokens.cache_read,
        cache_write_tokens: tokens.cache_write,
        reasoning_tokens: (tokens.reasoning > 0).then_some(tokens.reasoning),
        tool_calls: Vec::new(),
    };
    let mut message = reply.message;
    message.tool_calls.clear();
    let is_summary = reply.end == End::Answer && !message.content.trim().is_empty();
    let content = match is_summary {
        true => message.content.clone(),
        false => task,
    };
    Ending::of(done(content)).with(vec![Step::Reply { turn, message }], vec![completed])
}
