//! Describes the routes of a run's turns.

use serde_json::{Value, json};

use crate::web::openapi::operation::Operation;
use crate::web::response::turns::{TurnDetailView, TurnList};

pub fn list_turns(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_run_turns", "Lists the turns of a run")
        .details(
            "A turn is listed when its reply is recorded, or when the run has ended without one. Requests that are no \
             turns, such as those for a summary, are not listed.",
        )
        .response::<TurnList>(200, "The turns.")
        .example(200, json!({"data": [turn_example()]}))
}

pub fn turn(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_run_turn", "Returns a turn with its request and its reply")
        .details(
            "`request` is what the provider got: the request that was answered, else the last one. Keys are left out, \
             and what `[data] redact` of the server's configuration matches.",
        )
        .response::<TurnDetailView>(200, "The turn.")
        .example(200, detail_example())
}

fn turn_example() -> Value {
    json!({
        "turn": 1, "provider": "anthropic", "model": "claude-sonnet-5-5", "effort": null, "status": "completed",
        "copied": false, "redacted": false, "request_bytes": 126, "first_token_ms": 640, "duration_ms": 3_480,
        "attempts": [
            {
                "provider": "anthropic", "model": "claude-sonnet-5-5", "status": 529,
                "error": "overloaded: Overloaded", "started_at": "2026-03-01T09:30:00.000Z", "duration_ms": 210
            },
            {
                "provider": "anthropic", "model": "claude-sonnet-5-5", "status": 200, "error": null,
                "started_at": "2026-03-01T09:30:01.000Z", "duration_ms": 2_480
            }
        ],
        "usage": {
            "input_tokens": 1_200, "output_tokens": 85, "cache_read_tokens": 0, "cache_write_tokens": 0,
            "reasoning_tokens": 0
        },
        "cost_usd": 0.004_875, "stop_reason": "tool_use", "tool_calls": 1
    })
}

fn detail_example() -> Value {
    let mut detail = turn_example();
    detail["request"] = json!({
        "method": "POST", "url": "https://api.anthropic.com/v1/messages",
        "headers": {
            "anthropic-version": "2023-06-01", "content-type": "application/json", "user-agent": "axed/1.0.0",
            "x-api-key": "[redacted]"
        },
        "key_variable": "ANTHROPIC_API_KEY",
        "body": {
            "model": "claude-sonnet-5-5", "max_tokens": 8_192,
            "messages": [{"role": "user", "content": "Summarize the report."}]
        }
    });
    detail["reply"] = json!({
        "content": "I read the report first.", "reasoning": null,
        "tool_calls": [{"id": "call_1", "name": "read_file", "arguments": {"path": "report.md"}}], "raw": null
    });
    detail
}
