//! A question that waits for a person's answer.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::input::Question;
use crate::domain::run::{PendingInput, RunId};
use crate::domain::timestamp_text;
use crate::domain::waiting_for::BegunCall;

/// A question that waits for a person's answer.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "PendingQuestion")]
pub struct InputView<'a> {
    /// The id of the question in its run.
    id: &'a str,
    /// The run that asks: answer there.
    run_id: RunId,
    /// The root of the run's tree.
    root_id: RunId,
    /// The name of the run's agent.
    agent: &'a str,
    /// The tool call that asks it.
    call_id: &'a str,
    /// The question.
    question: &'a str,
    /// The JSON Schema of the answer; null if every answer fits.
    schema: Option<&'a RawValue>,
    /// Suggested answers.
    options: &'a [String],
    /// The MCP server that asks; absent if the model does.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<&'a str>,
    /// The call, if the question is whether it was done: `POST /runs/{id}/calls/{call_id}` answers that, too.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    begun: Option<&'a BegunCall>,
    /// Since when it waits.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    since: Timestamp,
    /// When the wait ends if nobody answers; null if it has no limit.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    until: Option<Timestamp>,
}

impl<'a> From<(&'a PendingInput, &'a Question)> for InputView<'a> {
    fn from((input, question): (&'a PendingInput, &'a Question)) -> Self {
        Self {
            id: &input.request.tool_call_id,
            run_id: input.run_id,
            root_id: input.root_id,
            agent: &input.agent,
            call_id: &question.call_id,
            question: &question.text,
            schema: question.schema.as_deref(),
            options: &question.options,
            server: question.server.as_deref(),
            begun: question.begun.as_ref(),
            since: input.request.requested_at,
            until: input.request.deadline,
        }
    }
}
