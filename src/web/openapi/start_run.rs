//! Describes the routes that start runs in the OpenAPI document.

use serde_json::json;

use crate::engine::replay::run_diff::RunDiff;
use crate::engine::request::DryRun;
use crate::web::extract::fork_request::ForkInput;
use crate::web::extract::run_request::CreateRunRequest;
use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::openapi::operations::{EVENT_STREAM, STREAM_DESCRIPTION, with_wait};
use crate::web::response::run::RunView;

pub fn create(operation: Operation<'_>) -> Operation<'_> {
    let operation = with_run_body(operation)
        .describe("create_run", "Starts a run")
        .details(
            "Responds at once with 202, unless the client waits (`wait` or `Prefer`) and the run ends in time, or wants \
             the events (`Accept: text/event-stream`). The run continues if the client disconnects. A failed run is not an \
             HTTP error: its `status` is `failed`, and its `error` has the reason.",
        )
        .tag("runs");
    with_start(operation)
        .problem(
            409,
            "`session_busy`: another run of the session is active, and `on_busy` is `reject`. `idempotency_conflict`: a \
             request with the same key is still being accepted.",
        )
}

pub fn dry_run(operation: Operation<'_>) -> Operation<'_> {
    with_run_body(operation)
        .describe("dry_run", "Shows what a run would do, without starting it")
        .details(
            "Checks the request as `create_run` does, and returns the assembled prompt, the tools and the limits. Sends no \
             request to a model.",
        )
        .tag("runs")
        .response::<DryRun>(200, "What the run would do.")
        .example(200, examples::dry_run())
}

pub fn fork(operation: Operation<'_>) -> Operation<'_> {
    let operation = with_wait(operation)
        .describe("fork_run", "Starts a run from a part of another run's record")
        .details(
            "The new root run takes over the recorded prompt, replies and results before the point, and continues from \
             there, with copies of the runs below it that had not returned. What it takes over costs nothing, and has no \
             events. Results of child runs that had ended are taken over too. The other run may be active, and may be \
             deleted later. Responds as `create_run` does.",
        )
        .tag("runs")
        .request_body::<ForkInput>()
        .request_example("end", "Continue after the last recorded step", json!({}))
        .request_example(
            "turn",
            "Request the third turn anew, of another model",
            json!({"at": {"turn": 3}, "edit": {"model": "openai/gpt-6-sol"}}),
        )
        .problem(
            422,
            "`unknown_field`, `invalid_field`, `invalid_body`, `invalid_model`, `invalid_override`, `unpriced_model`: the \
             body has a field that is invalid, or does not fit the record; `errors` points to it. `agent_invalid`, \
             `provider_unavailable`, `provider_key_refused`, `idempotency_mismatch`: the fork cannot start.",
        );
    with_start(operation).problem(
        409,
        "`not_forkable`: a call had begun, has not ended and is not safe to repeat, or the record lacks what a fork \
         needs. `session_busy`, `idempotency_conflict`: as for `create_run`.",
    )
}

pub fn diff(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("diff_runs", "Compares two runs and the runs below them")
        .details(
            "Runs are compared if the same calls led to them. A fork has the runs whose results it took over. Long texts \
             are cut.",
        )
        .tag("runs")
        .response::<RunDiff>(200, "The differences.")
        .example(
            200,
            json!({
                "nodes": [{
                    "path": "planner",
                    "a": "run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d",
                    "b": "run_019a1f3c-9a10-7c21-8d66-4a2f7b8c9d0e",
                    "changes": [],
                    "turns": [{"turn": 2, "changes": [{"field": "text", "a": "yes", "b": "no"}]}],
                }],
                "totals": {
                    "a": {
                        "runs": 1, "model_calls": 2, "tool_calls": 1, "input_tokens": 1204, "output_tokens": 188,
                        "cost_usd": null, "duration_ms": 4000,
                    },
                    "b": {
                        "runs": 1, "model_calls": 1, "tool_calls": 0, "input_tokens": 803, "output_tokens": 92,
                        "cost_usd": null, "duration_ms": 2000,
                    },
                },
            }),
        )
}

/// The headers and responses of the routes that start a run.
fn with_start(operation: Operation<'_>) -> Operation<'_> {
    let location = "The path of the run.";
    let replayed = "`true` if an earlier request with the same `Idempotency-Key` started the run.";
    operation
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours returns the run of the first one.",
        )
        .header(
            "traceparent",
            json!({"type": "string"}),
            "The trace that the run becomes a part of (W3C Trace Context).",
        )
        .header(
            "X-Provider-Key",
            json!({"type": "string", "pattern": "^[^=]+=[!-~]+$"}),
            "`<provider>=<key>`: the client's own key for a provider, used for all requests of this run's tree; one header \
             per provider. Only for agents with `allow_provider_keys`. It is never stored or logged.",
        )
        .response::<RunView<'static>>(
            200,
            "The run, if it ended while the client waited; or its events, if `Accept` names an event stream.",
        )
        .example(200, examples::run())
        .text_response(200, EVENT_STREAM, STREAM_DESCRIPTION)
        .text_example(200, EVENT_STREAM, examples::EVENT_STREAM)
        .response::<RunView<'static>>(
            202,
            "The run is accepted and stored; it continues without the client.",
        )
        .example(202, examples::accepted_run())
        .response_header(200, "Location", location)
        .response_header(202, "Location", location)
        .response_header(200, "Idempotency-Replayed", replayed)
        .response_header(202, "Idempotency-Replayed", replayed)
        .problem(
            429,
            "`queue_full`, `budget_exhausted`: `Retry-After` tells when to retry; if the queue is full, `running` and \
             `queued` tell the load.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}

/// The parts of the two routes with the body of a run.
fn with_run_body(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .request_body::<CreateRunRequest>()
        .request_example("text", "A text", json!({"input": "summarize the report"}))
        .request_example(
            "limits",
            "With limits, labels and a session",
            json!({
                "input": "summarize the report", "timeout": 120, "budget": {"max_tokens": 50000},
                "labels": {"team": "blue"}, "session": "ada",
            }),
        )
        .request_example(
            "parts",
            "A text and an image by URL",
            json!({"input": [
                {"type": "text", "text": "describe the image"},
                {"type": "image", "url": "https://example.com/chart.png"},
            ]}),
        )
        .problem(
            413,
            "`body_too_large`: above `server.max_body`. `attachments_too_large`: too many images and files, or too large.",
        )
        .problem(
            422,
            "`unknown_field`, `invalid_field`, `invalid_body`, `invalid_messages`, `invalid_model`, `invalid_override`, \
             `unpriced_model`: the body has an invalid field; `errors` points to it. `agent_invalid`, `prompt_invalid`, \
             `provider_unavailable`, `provider_key_refused`, `idempotency_mismatch`: the run cannot start.",
        )
        .or_text("The run's input.")
        .or_form(
            "`input` fields are texts and files (images, PDF, text), in order. The other fields of the JSON body are text; \
             objects and lists are JSON.",
        )
}
