//! Describes `/schedules` in the OpenAPI document.

use serde_json::{Value, json};

use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::response::json::ListResponse;
use crate::web::response::run::RunView;
use crate::web::routes::schedules::ScheduleView;

fn example() -> Value {
    json!({
        "agent": "planner", "name": "morning", "cron": "30 7 * * mon-fri", "timezone": "Europe/Berlin",
        "input": "Sum up the tickets of yesterday.", "overlap": "skip", "missed": "once", "labels": {"team": "blue"},
        "key": null, "paused": false, "next": "2026-03-02T06:30:00.000Z",
        "last": {"at": "2026-02-27T06:30:00.000Z", "run": examples::ROOT}, "skipped": null,
    })
}

pub fn list(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_schedules", "Lists the schedules of agents")
        .details(
            "Sorted by agent, then in the order of the agent's file. A key sees the schedules whose runs are its own, a key \
             with the scope `admin` all.",
        )
        .query(
            "agent",
            json!({"type": "string"}),
            "Only schedules of this agent.",
        )
        .response::<ListResponse<ScheduleView>>(200, "The schedules.")
        .example(200, json!({"data": [example()]}))
}

pub fn trigger(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("trigger_schedule", "Starts a run of a schedule now")
        .details(
            "The run has the schedule's input, labels and owner. It starts even if the schedule is paused, or its last run \
             has not ended. The times of the schedule stay as they are.",
        )
        .query(
            "wait",
            json!({"type": "string", "examples": ["30", "30s"]}),
            "Wait at most this many seconds for the end of the run.",
        )
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours returns the run of the first.",
        )
        .response::<RunView<'static>>(200, "The run has ended.")
        .example(200, examples::run())
        .response::<RunView<'static>>(202, "The run is accepted.")
        .example(202, examples::accepted_run())
        .response_header(202, "Location", "The URL of the run.")
        .problem(
            422,
            "`agent_invalid`, `provider_unavailable`, `invalid_model`: the agent cannot run; `detail` tells why. \
             `provider_key_refused`: the request has the header `X-Provider-Key`.",
        )
        .problem(
            429,
            "`queue_full`, `budget_exhausted`: `Retry-After` tells when to retry.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}

pub fn pause(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("pause_schedule", "Pauses a schedule")
        .details(
            "It starts no run until it is resumed, also after a restart of the daemon. Runs that have started continue.",
        )
        .response::<ScheduleView>(200, "The schedule.")
        .example(200, example())
}

pub fn resume(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("resume_schedule", "Resumes a paused schedule")
        .details("Times during the pause are not missed: the next one starts a run.")
        .response::<ScheduleView>(200, "The schedule.")
        .example(200, example())
}
