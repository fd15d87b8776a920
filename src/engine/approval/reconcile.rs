//! Asks a person whether a call was performed that had begun and whose end is not known.

use std::future::ready;
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::event::{Decision, EventKind};
use crate::domain::input::InputKind;
use crate::domain::message::truncate_to_bytes;
use crate::domain::waiting_for::{BegunCall, WaitingFor};
use crate::engine::approval::decision::{self, NeededInput};
use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedCalls;
use crate::engine::state::failures;
use crate::engine::state::input_answer::InputAnswer;
use crate::settings::choice::choice;
use crate::store::StoreError;

/// The most bytes of the reason in a question.
const MAX_REASON_BYTES: usize = 500;

choice! {
    /// Whether a call was performed.
    pub enum CallOutcome {
        /// It was.
        Done = "done",
        /// It was not: it is performed, with the same key and without another approval.
        NotDone = "not_done",
        /// Nobody can find out; the model gets an error result.
        Unknown = "unknown",
    }
}

/// What a person says of a call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reconciled {
    pub outcome: CallOutcome,
    /// What the call returned, if it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
}

/// Each answer that fits this schema is a [`Reconciled`]. A flat object, so that every client can show it as a form.
static SCHEMA: LazyLock<Arc<RawValue>> = LazyLock::new(|| {
    let schema = json!({
        "type": "object",
        "properties": {
            "outcome": {"type": "string", "enum": ["done", "not_done", "unknown"]},
            "result": {"type": "string", "description": "What the call returned, if it was done"},
        },
        "required": ["outcome"],
        "additionalProperties": false,
    });
    to_raw_value(&schema).unwrap_or_default().into()
});

/// The call that the question is about.
pub struct UncertainCall<'a> {
    pub turn: u32,
    pub id: &'a str,
    pub begun: BegunCall,
    /// How often it was started.
    pub starts: u32,
    /// Why its end is not known.
    pub why: &'a str,
}

/// The id of the question about the last start of a call.
pub fn question_id(call: &str, starts: u32) -> String {
    format!("{call}.begun.{starts}")
}

/// What a person answers, `None` if nobody does in time. The inner error says why the run waits no more. `recorded_calls` holds
/// what an earlier process requested and received.
pub async fn ask(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    call: UncertainCall<'_>,
) -> Result<Result<Option<Reconciled>, String>, StoreError> {
    let id = question_id(call.id, call.starts);
    let input = NeededInput {
        id: &id,
        limit: context.engine.settings.runs.reconcile_timeout,
        timed_out: InputAnswer {
            kind: InputKind::Question,
            ..InputAnswer::timed_out()
        },
        kind: InputKind::Question,
        waiting_for: WaitingFor::Reconcile,
        tool: None,
        withdrawn: None,
    };
    let question = format!(
        "Was this call of {} done? It had begun, and its end is not known: {}",
        call.begun.tool,
        truncate_to_bytes(call.why, MAX_REASON_BYTES)
    );
    let event = |deadline| EventKind::InputRequested {
        turn: call.turn,
        input_id: id.clone(),
        tool_call_id: call.id.to_owned(),
        question,
        schema: Some(Arc::clone(&SCHEMA)),
        options: Vec::new(),
        server: None,
        begun: Some(call.begun),
        deadline,
    };
    let answer =
        match decision::await_answer(context, recorded_calls, input, event, ready(Ok(()))).await? {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(failures::interruption_message(&context.run, &error))),
        };
    if answer.decision == Decision::TimedOut {
        return Ok(Ok(None));
    }
    let arguments = answer.arguments.as_deref();
    let reconciled = arguments.and_then(|it| serde_json::from_str(it.get()).ok());
    // A person who declines to answer does not know.
    Ok(Ok(Some(reconciled.unwrap_or(Reconciled {
        outcome: CallOutcome::Unknown,
        result: None,
    }))))
}
