//! Examples of requests and responses. A test checks each against its schema.

use serde_json::{Value, json};

pub const ROOT: &str = "run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d";
const CHILD: &str = "run_019a1f3c-9a10-7c21-8d66-4a2f7b8c9d0e";
const VERSION: &str = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
const DELIVERY: &str = "whd_019a1f3c-b000-7d32-9e77-5b308c9d0e1f";
const CREATED_AT: &str = "2026-03-01T09:30:00.000Z";

/// The beginning of an event stream.
pub const EVENT_STREAM: &str = "\
    id: 1\nevent: run.queued\nretry: 2000\ndata: {\"seq\":1,\"run_id\":\"run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d\",\
    \"root_id\":\"run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d\",\"depth\":0,\"agent\":\"planner\",\
    \"time\":\"2026-03-01T09:30:00.000Z\",\"type\":\"run.queued\"}\n\n";

/// A completed root run with one child.
pub fn run() -> Value {
    json!({
        "id": ROOT, "agent": "planner", "agent_version": VERSION, "variant": null, "status": "completed", "parent_id": null, "root_id": ROOT,
        "depth": 0, "tool_call_id": null, "input": "summarize the report", "content": "The first quarter was profitable.",
        "partial_content": null, "structured": null, "model": "claude-sonnet-5-5", "stop_reason": "end_turn", "turns": 2,
        "input_tokens": 1204, "output_tokens": 188, "tool_calls": 1, "duration_ms": 4000, "tree": {
            "runs": 2, "input_tokens": 1616, "output_tokens": 251, "cache_read_tokens": 0, "cache_write_tokens": 0,
            "model_calls": 3, "tool_calls": 1, "cost_usd": 0.0081, "complete": true,
        },
        "session": null, "forked_from": null, "waiting_for": null, "wait": null, "suspended": null, "pending_approvals": [], "pending_inputs": [], "warnings": [], "error": null,
        "cancel_reason": null, "label": null, "completion_status": null, "labels": {"team": "blue"}, "scores": {}, "attempt": 1,
        "created_at": CREATED_AT, "started_at": CREATED_AT, "finished_at": "2026-03-01T09:30:04.000Z", "last_event": 14,
        "links": links(ROOT),
    })
}

/// The same run while it is active.
pub fn accepted_run() -> Value {
    let tree = json!({
        "runs": 1, "input_tokens": 0, "output_tokens": 0, "cache_read_tokens": 0, "cache_write_tokens": 0,
        "model_calls": 0, "tool_calls": 0, "cost_usd": null, "complete": true,
    });
    let changes = json!({
        "status": "running", "content": null, "stop_reason": null, "turns": 0, "input_tokens": 0, "output_tokens": 0,
        "tool_calls": 0, "tree": tree, "finished_at": null, "last_event": 2,
    });
    changed(run(), changes)
}

/// The same run after its cancellation.
pub fn cancelled_run() -> Value {
    let changes = json!({
        "status": "cancelled", "content": null, "partial_content": "The report covers", "stop_reason": null,
        "cancel_reason": "no longer needed",
    });
    changed(run(), changes)
}

pub fn child_run() -> Value {
    let usage = json!({
        "input_tokens": 412, "output_tokens": 63, "cache_read_tokens": 0, "cache_write_tokens": 0, "model_calls": 1,
        "tool_calls": 0, "cost_usd": 0.0022, "complete": true,
    });
    let changes = json!({
        "id": CHILD, "agent": "reader", "parent_id": ROOT, "depth": 1, "tool_call_id": "call_1", "input": "read the report",
        "content": "The report covers the first quarter.", "turns": 1, "input_tokens": 412, "output_tokens": 63,
        "tool_calls": 0, "tree": changed(usage.clone(), json!({"runs": 1})), "last_event": 11, "links": links(CHILD),
        "task": "read the report", "usage": usage,
    });
    changed(run(), changes)
}

fn links(id: &str) -> Value {
    let path = format!("/runs/{id}");
    json!({
        "self": path, "events": format!("{path}/events"), "cancel": format!("{path}/cancel"), "tree": format!("{path}/tree"),
    })
}

fn changed(mut example: Value, changes: Value) -> Value {
    if let (Some(fields), Value::Object(changes)) = (example.as_object_mut(), changes) {
        fields.extend(changes);
    }
    example
}

/// The first events of the run.
pub fn events() -> Value {
    let event = |seq: u64, name: &str, fields: Value| {
        let common = json!({
            "seq": seq, "run_id": ROOT, "root_id": ROOT, "depth": 0, "agent": "planner", "time": CREATED_AT, "type": name,
        });
        changed(common, fields)
    };
    let model = json!({"model": "anthropic/claude-sonnet-5-5", "agent_version": VERSION});
    json!([
        event(1, "run.queued", json!({})),
        event(2, "run.started", model),
        event(
            3,
            "turn.started",
            json!({"turn": 1, "messages": 1, "results": 0})
        ),
    ])
}

pub fn tree() -> Value {
    let node = |id: &str, agent: &str, depth: u8, children: Value| {
        json!({
            "id": id, "agent": agent, "status": "completed", "depth": depth, "label": null,
            "tool_call_id": (depth > 0).then_some("call_1"),
            "task": (depth > 0).then_some("read the report"),
            "model": "claude-sonnet-5-5", "turns": 1,
            "usage": {
                "input_tokens": 412, "output_tokens": 63, "cache_read_tokens": 0, "cache_write_tokens": 0,
                "model_calls": 1, "tool_calls": 0, "cost_usd": 0.0022, "complete": true,
            },
            "duration_ms": 1800, "error": null, "children": children,
        })
    };
    node(
        ROOT,
        "planner",
        0,
        json!([node(CHILD, "reader", 1, json!([]))]),
    )
}

pub fn conversation() -> Value {
    json!({
        "system": "You plan.",
        "data": [
            {"role": "user", "content": "summarize the report"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "name": "call_agent", "arguments": {"agent": "reader", "task": "read the report"}},
            ]},
            {"role": "tool", "tool_results": [
                {"call_id": "call_1", "content": "The report covers the first quarter.", "is_error": false},
            ]},
            {"role": "assistant", "content": "The first quarter was profitable.", "tool_calls": []},
        ],
        "next_after": null,
    })
}

pub fn session_summary() -> Value {
    json!({
        "name": "ada", "runs": 2, "messages": 4, "last_run": ROOT, "agent": "planner", "created_at": CREATED_AT,
        "updated_at": CREATED_AT,
    })
}

pub fn session_conversation() -> Value {
    let session = json!({"name": "ada", "agent": "planner", "run": ROOT});
    changed(conversation(), session)
}

pub fn agent_summary() -> Value {
    json!({
        "name": "planner", "version": VERSION, "valid": true, "error": null, "warnings": [],
        "description": "Plans, and lets others read", "model": "anthropic/claude-sonnet-5-5",
        "sub_agents": ["reader"], "tools": ["read_file"],
    })
}

pub fn dry_run() -> Value {
    json!({
        "agent": "planner", "agent_version": VERSION, "model": "anthropic/claude-sonnet-5-5", "fallback_models": [],
        "system_prompt": "You plan.", "message": "summarize the report", "workdir": "/srv/agents",
        "params": {"temperature": 0.2, "max_tokens": null, "top_p": null, "stop": [],
                   "response_format": {"type": "text"}, "effort": null, "cache": "5m", "service": null},
        "tools": [{
            "name": "call_agent", "description": "Calls another agent.",
            "parameters": {"type": "object", "properties": {"agent": {"type": "string"}, "task": {"type": "string"}}},
        }],
        "deferred_tools": [],
        "sub_agents": {"names": ["reader"], "max_depth": 3, "parallel": true, "timeout": 120},
        "limits": {"max_turns": 50, "timeout": 600, "max_tokens": null, "max_cost_usd": 0.5,
                   "max_tool_calls": null, "max_runs": null},
        "context": {"compact_at": 0.8, "strategy": "compact", "recall": false},
        "warnings": [],
    })
}

pub fn pending_approval() -> Value {
    json!({
        "run_id": ROOT, "root_id": ROOT, "agent": "planner", "tool_call_id": "call_2", "tool": "write_file",
        "arguments": {"path": "summary.md", "content": "The first quarter was profitable."},
        "arguments_hash": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "requested_at": CREATED_AT, "deadline": null,
    })
}

pub fn pending_question() -> Value {
    json!({
        "id": "call_3", "run_id": ROOT, "root_id": ROOT, "agent": "planner", "call_id": "call_3",
        "question": "In which city is the meeting?", "schema": null, "options": ["Berlin", "Munich"],
        "since": CREATED_AT, "until": null,
    })
}

pub fn delivery() -> Value {
    json!({
        "id": DELIVERY, "run_id": ROOT, "event": "run.completed", "url": "https://example.com/hook", "status": "delivered",
        "created_at": CREATED_AT, "attempts": [{"time": CREATED_AT, "status": 204, "error": null}], "next_attempt_at": null,
    })
}

pub fn memory_entry() -> Value {
    json!({"time": CREATED_AT, "task": "summarize the report", "result": "The first quarter was profitable."})
}

pub fn gc_report() -> Value {
    json!({
        "agent": "planner", "analysis": "Two entries say the same.", "entries_before": 12, "entries_after": 11,
        "dry_run": false, "input_tokens": 900, "output_tokens": 40,
    })
}

pub fn ready() -> Value {
    json!({"status": "ready", "checks": {
        "store": {"ok": true}, "catalog": {"ok": true, "agents": 3, "invalid": 0}, "accepting": {"ok": true},
    }})
}

pub fn not_ready() -> Value {
    json!({"status": "not ready", "checks": {
        "store": {"ok": true}, "catalog": {"ok": true, "agents": 3, "invalid": 0},
        "accepting": {"ok": false, "detail": "the daemon is stopping"},
    }})
}

pub fn invalid_field() -> Value {
    let detail = "unknown field \"inptu\"; did you mean \"input\"?";
    problem(json!({
        "title": "Unprocessable Entity", "status": 422, "code": "unknown_field", "detail": format!("/inptu: {detail}"),
        "errors": [{"pointer": "/inptu", "detail": detail}],
    }))
}

pub fn unauthorized() -> Value {
    problem(json!({
        "title": "Unauthorized", "status": 401, "code": "unauthorized", "detail": "the key is unknown",
    }))
}

pub fn queue_full() -> Value {
    problem(json!({
        "title": "Too Many Requests", "status": 429, "code": "queue_full", "detail": "8 runs are active and 64 are queued",
        "running": 8, "queued": 64,
    }))
}

fn problem(fields: Value) -> Value {
    let common = json!({
        "type": "about:blank", "instance": "/agents/planner/runs", "request_id": "req_019a1f3c8d2e7b40",
    });
    changed(common, fields)
}
