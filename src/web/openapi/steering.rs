//! Describes the routes that steer a run: messages to it, its pause, and decisions on its tool calls.

use serde_json::json;

use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::openapi::operations::{CURSOR_DESCRIPTION, integer_schema};
use crate::web::response::run::RunView;
use crate::web::routes::approvals::{ApprovalsPage, DecisionRequest};
use crate::web::routes::messages::{AddedMessage, NewMessageRequest};
use crate::web::routes::pause::PauseRequest;

pub fn add_message(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("add_run_message", "Adds a message to an unfinished run")
        .details(
            "The run's next request to its model includes the message, after the results of tool calls. A run that would \
             end with a reply takes another turn if it has unread messages; out of turns, it ends with the warning \
             `message_unread`.",
        )
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours adds no second message.",
        )
        .request_body::<NewMessageRequest>()
        .body_required()
        .request_example("text", "A text", json!({"content": "only the first quarter"}))
        .or_text("The message.")
        .response::<AddedMessage>(202, "The message is stored.")
        .example(202, json!({"run_id": examples::ROOT, "number": 1}))
        .response_header(
            202,
            "Idempotency-Replayed",
            "`true` if an earlier request with the same `Idempotency-Key` added the message.",
        )
        .problem(
            409,
            "`run_ended`: the run has ended or is being cancelled. `too_many_messages`: the run has not read its last \
             messages yet. `idempotency_conflict`: a request with the same key is still being accepted.",
        )
        .problem(413, "`body_too_large`: above `server.max_body`. `attachments_too_large`: too many images and files, or too large.")
        .problem(
            422,
            "`unknown_field`, `invalid_field`: the body has an invalid field; `errors` points to it. \
             `idempotency_mismatch`: the key was used with another body.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}

pub fn pause(operation: Operation<'_>) -> Operation<'_> {
    with_change(operation)
        .describe("pause_run", "Pauses a run and its descendants")
        .details(
            "The run and all runs below it stop at their next step: requests to models and tool calls that have begun end \
             first. Then they are `waiting` for `resume`, their time limits stand still, and the run holds no slot. A \
             paused run can be cancelled and gets messages and decisions. A queued run stays queued until it has a slot.",
        )
        .response::<RunView<'static>>(200, "The run, if it was paused already.")
        .example(200, examples::accepted_run())
        .response::<RunView<'static>>(202, "The run; the pause is stored.")
        .example(202, examples::accepted_run())
}

pub fn resume(operation: Operation<'_>) -> Operation<'_> {
    with_change(operation)
        .describe("resume_run", "Resumes a paused run")
        .details(
            "The run waits for a slot before all runs of its key that have not started. A run below one that is paused \
             stays paused.",
        )
        .response::<RunView<'static>>(200, "The run, if it was not paused.")
        .example(200, examples::accepted_run())
        .response::<RunView<'static>>(202, "The run; the end of its pause is stored.")
        .example(202, examples::accepted_run())
}

fn with_change(operation: Operation<'_>) -> Operation<'_> {
    operation
        .request_body::<PauseRequest>()
        .request_example("empty", "Without fields", json!({}))
        .problem(409, "`run_ended`: the run has ended or is being cancelled.")
}

pub fn decide(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("decide_tool_call", "Approves or denies a tool call")
        .details("Only while the tool call waits for approval. The run then continues.")
        .tag("approvals")
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours returns the run, as the first did.",
        )
        .request_body::<DecisionRequest>()
        .body_required()
        .request_example("approve", "Approve", json!({"decision": "approve"}))
        .request_example(
            "arguments",
            "Approve with other arguments",
            json!({"decision": "approve", "arguments": {"path": "notes.md", "content": "shorter"}}),
        )
        .request_example(
            "deny",
            "Deny, with a reason for the model",
            json!({"decision": "deny", "reason": "use the copy in /tmp"}),
        )
        .response::<RunView<'static>>(202, "The run; the decision is stored.")
        .example(202, examples::accepted_run())
        .response_header(
            202,
            "Idempotency-Replayed",
            "`true` if an earlier request with the same `Idempotency-Key` made the decision.",
        )
        .problem(
            409,
            "`nothing_waits`: the tool call does not wait for approval, or no longer. `other_arguments`: the decision names the hash of other arguments.",
        )
        .problem(
            422,
            "`unknown_field`, `invalid_field`: the body has an invalid field; `errors` points to it. \
             `idempotency_mismatch`: the key was used with another body.",
        )
        .problem(
            503,
            "`draining`, `call_not_reached`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}

pub fn list_approvals(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    operation
        .describe("list_approvals", "Lists the tool calls that wait for approval")
        .details("Of all runs that the key may see, the oldest run first.")
        .query("root", text(), "Only calls of this root run's tree.")
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum calls of a page. All calls of a run are on one page, which may therefore be longer.",
        )
        .query("cursor", text(), CURSOR_DESCRIPTION)
        .response::<ApprovalsPage>(200, "The page.")
        .example(
            200,
            json!({"data": [examples::pending_approval()], "next_cursor": null}),
        )
}
