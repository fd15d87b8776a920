//! Describes `/usage` in the OpenAPI document.

use serde_json::json;

use crate::web::openapi::operation::Operation;
use crate::web::routes::usage::UsageView;

pub fn usage(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    let numbers = || {
        json!({
            "runs": 4, "roots": 2, "failed": 1, "cancelled": 0, "input_tokens": 5210, "output_tokens": 1880,
            "cache_read_tokens": 3072, "cache_write_tokens": 0, "reasoning_tokens": 640, "model_calls": 9,
            "tool_calls": 5, "cost_usd": 0.0213, "complete": true, "duration_p50_ms": 2336, "duration_p95_ms": 9088,
        })
    };
    let mut group = json!({"agent": "planner", "label.team": "blue"});
    if let (Some(group), Some(numbers)) = (group.as_object_mut(), numbers().as_object_mut()) {
        group.append(numbers);
    }
    operation
        .describe("get_usage", "Sums what ended runs have used")
        .details(
            "A key sees the usage of its own runs, a key with the scope `admin` that of all. A run is counted when it ends, \
             at the time at which its root was accepted, and stays counted after its deletion. Sums are exact. `key`, \
             `session`, `label.<name>` and `day` are those of the root run.",
        )
        .tag("usage")
        .query(
            "by",
            json!({"type": "string", "examples": ["agent,model", "label.team,day"]}),
            "What the sums are grouped by: one or more of `agent`, `model`, `label.<name>`, `session`, `key`, `day`, \
             separated by commas.",
        )
        .query(
            "since",
            json!({"type": "string", "examples": ["2026-01-01", "2026-01-01T09:00:00Z"]}),
            "Only runs whose root was accepted at this time or later: an RFC 3339 time, or a date, which begins at midnight \
             in `tz`. Rounded down to a quarter hour.",
        )
        .query(
            "until",
            text(),
            "Only runs whose root was accepted before this time. Rounded up to a quarter hour.",
        )
        .query("agent", text(), "Only runs of this agent.")
        .query(
            "tz",
            json!({"type": "string", "default": "UTC", "examples": ["Europe/Berlin"]}),
            "The time zone of days and dates, by its IANA name.",
        )
        // Each property of this object is a query parameter: OpenAPI's way to describe parameters by prefix.
        .query(
            "label.",
            json!({
                "type": "object",
                "propertyNames": {"pattern": "^label\\.."},
                "additionalProperties": {"type": "string"},
                "maxProperties": 64,
            }),
            "`label.<key>=<value>`: only runs whose root has this label. Several labels must all match.",
        )
        .response::<UsageView>(200, "The sums.")
        .example(
            200,
            json!({
                "data": [group], "totals": numbers(), "since": "2026-01-01T00:00:00.000Z", "until": "2026-02-01T00:00:00.000Z",
                "budgets": [{
                    "name": "team-blue", "per": "month", "limit_usd": 500.0, "limit_tokens": null, "used_usd": 312.4,
                    "used_tokens": 81_350_220, "used_thousandths": 624, "since": "2026-02-01T00:00:00.000Z",
                    "resets_at": "2026-03-01T00:00:00.000Z",
                }],
            }),
        )
        .problem(
            422,
            "`invalid_parameter`: there are more than 10000 groups.",
        )
}
