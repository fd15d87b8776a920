//! Asks a person for an agent or for one of its MCP servers, and waits for the answer.

use std::future::ready;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::event::{Decision, EventKind};
use crate::domain::input::{InputKind, Question};
use crate::domain::json_schema::Schema;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::approval::decision::{self, NeededInput};
use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedCalls;
use crate::engine::state::failures;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::tools::{AnswerToQuestion, AskRequest};
use crate::validation;

/// The answer; the inner error says why the run does not get one any more. `recorded_calls` holds what an earlier process
/// requested and received.
pub async fn ask(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    turn: u32,
    request: AskRequest,
) -> Result<Result<AnswerToQuestion, String>, StoreError> {
    let AskRequest {
        id,
        question,
        withdrawn,
    } = request;
    let agent = &context.run.agent;
    let input = NeededInput {
        id: &id,
        limit: agent.ask_timeout,
        timed_out: InputAnswer {
            arguments: default_answer(context, &question).await,
            kind: InputKind::Question,
            ..InputAnswer::timed_out()
        },
        kind: InputKind::Question,
        waiting_for: WaitingFor::Input,
        tool: None,
        withdrawn,
    };
    let event = |deadline| EventKind::InputRequested {
        turn,
        input_id: id.clone(),
        tool_call_id: question.call_id,
        question: question.text,
        schema: question.schema,
        options: question.options,
        server: question.server,
        begun: None,
        deadline,
    };
    let answer =
        match decision::await_answer(context, recorded_calls, input, event, ready(Ok(()))).await? {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(failures::interruption_message(&context.run, &error))),
        };
    Ok(Ok(match answer.decision {
        Decision::Approved => {
            let answer = answer
                .arguments
                .unwrap_or_else(|| RawValue::NULL.to_owned().into());
            AnswerToQuestion::Answered(answer)
        }
        Decision::Denied => AnswerToQuestion::Declined(answer.reason),
        Decision::TimedOut => AnswerToQuestion::TimedOut {
            after: agent.ask_timeout.unwrap_or_default(),
            default: answer.arguments,
        },
    }))
}

/// The agent's default answer, as JSON if only that fits the schema; `None` if nothing fits.
async fn default_answer(context: &RunContext, question: &Question) -> Option<Arc<RawValue>> {
    let agent = &context.run.agent;
    let text = agent
        .ask_default
        .as_ref()
        .filter(|_| agent.ask_timeout.is_some())?;
    let as_text = to_raw_value(text).ok().map(Arc::from);
    let Some(schema) = &question.schema else {
        return as_text;
    };
    let schema = Schema::parse(Arc::clone(schema)).ok()?;
    let as_json = serde_json::from_str::<Value>(text).ok();
    let as_json = as_json
        .and_then(|json| to_raw_value(&json).ok())
        .map(Arc::from);
    let owner = context.run.tree.owner.as_deref();
    for answer in [as_text, as_json].into_iter().flatten() {
        let checked = validation::check_raw_value(&schema, &answer, owner);
        if checked.await.is_ok() {
            return Some(answer);
        }
    }
    None
}
