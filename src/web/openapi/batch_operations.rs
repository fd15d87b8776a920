//! Describes `/batches` in the OpenAPI document.

use serde_json::{Value, json};

use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::openapi::operations::{CURSOR_DESCRIPTION, with_wait_for};
use crate::web::routes::batches::{BatchView, BatchesPage, JSON_LINES};
use crate::web::routes::runs::CancelRequest;

const BATCH: &str = "batch_019a1f3c-c000-7e43-8f88-6c419d0e1f2a";

fn example() -> Value {
    json!({
        "id": BATCH, "agent": "planner", "status": "running", "lines": 3,
        "counts": {
            "pending": 1, "queued": 0, "running": 1, "waiting": 0, "cancelling": 0, "completed": 0, "failed": 0,
            "cancelled": 0, "rejected": 1, "deleted": 0,
        },
        "created_at": "2026-03-01T09:30:00.000Z", "finished_at": null, "cancel_reason": null,
        "links": {
            "self": format!("/batches/{BATCH}"), "results": format!("/batches/{BATCH}/results"),
            "cancel": format!("/batches/{BATCH}/cancel"),
        },
    })
}

pub fn create(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("create_batch", "Starts many runs of an agent")
        .details(
            "Each line is the JSON body of a request for a run (`RunRequest`); blank lines are left out. The response comes once \
             all lines are in the record. Their runs start a few at a time, as the queue has space. A line that no run can \
             start for rejects no other: its result holds the problem.",
        )
        .tag("batches")
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key and body within 24 hours returns the batch of the first.",
        )
        .lines_body(
            "One request for a run on each line, 1 to 10000 lines.",
            "{\"input\": \"Sum up ticket 1\"}\n{\"input\": \"Sum up ticket 2\", \"labels\": {\"team\": \"blue\"}}\n",
        )
        .response::<BatchView>(200, "The batch of an earlier request with this `Idempotency-Key`; it has ended.")
        .example(200, example())
        .response::<BatchView>(202, "The batch is accepted.")
        .example(202, example())
        .response_header(202, "Location", "The URL of the batch.")
        .response_header(
            202,
            "Idempotency-Replayed",
            "`true` if an earlier request with the same `Idempotency-Key` made the batch.",
        )
        .problem(
            422,
            "`invalid_body`: no lines, or too many. `agent_invalid`: the agent's file is invalid. `idempotency_mismatch`: the key \
             was used with another body. `provider_key_refused`: the request has the header `X-Provider-Key`.",
        )
        .problem(
            429,
            "`queue_full`: too many batches of this key have not ended; `Retry-After` tells when to retry.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}

pub fn list(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_batches", "Lists batches")
        .details("The newest batch is first. A key sees its own, a key with the scope `admin` all.")
        .query(
            "limit",
            json!({"type": "integer", "minimum": 1, "maximum": 200, "default": 50}),
            "Maximum batches of a page.",
        )
        .query("cursor", json!({"type": "string"}), CURSOR_DESCRIPTION)
        .response::<BatchesPage>(200, "The page.")
        .example(200, json!({"data": [example()], "next_cursor": null}))
}

pub fn get(operation: Operation<'_>) -> Operation<'_> {
    let description = "Seconds to wait for the end of the batch, at most `server.max_wait`.";
    with_wait_for(operation, description)
        .describe("get_batch", "Returns a batch with the states of its lines")
        .response::<BatchView>(200, "The batch.")
        .example(200, example())
}

pub fn results(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_batch_results", "Returns the results of a batch")
        .details(
            "One JSON object on each line, in the order of the batch: `index` (from 0), `status` (that of the run, `pending`, \
             `rejected`, `cancelled` or `deleted`), `run` (null without one) and `problem` (why no run could start; else null). \
             A batch that has not ended shows its lines as they are.",
        )
        .text_response(200, JSON_LINES, "The results.")
        .text_example(
            200,
            JSON_LINES,
            &format!(
                "{}\n{}\n",
                json!({"index": 0, "status": "completed", "run": examples::run(), "problem": null}),
                json!({"index": 1, "status": "pending", "run": null, "problem": null}),
            ),
        )
}

pub fn cancel(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("cancel_batch", "Cancels a batch")
        .details("No more runs start, and those that have started are cancelled.")
        .request_body::<CancelRequest>()
        .request_example(
            "reason",
            "With a reason",
            json!({"reason": "no longer needed"}),
        )
        .response::<BatchView>(200, "The batch has ended.")
        .example(200, example())
        .response::<BatchView>(202, "Runs of the batch have to end.")
        .example(202, example())
}
