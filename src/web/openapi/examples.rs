//! Examples of requests and responses. A test checks each against its schema.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::domain::event::{Event, EventKind};
use crate::domain::run::{Depth, Run, RunId, Scope, Status};
use crate::domain::usage::{Cost, TokenUsage, TreeUsage, Usage};
use crate::web::response::run::{ChildView, RunView};

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
    view(&completed_run())
}

/// The same run while it is active.
pub fn accepted_run() -> Value {
    view(&Run {
        status: Status::Running,
        content: None,
        stop_reason: None,
        turns: 0,
        usage: Usage::default(),
        tree: TreeUsage {
            runs: 1,
            usage: Usage::default(),
        },
        finished_at: None,
        last_event: 2,
        ..completed_run()
    })
}

/// The same run after its cancellation.
pub fn cancelled_run() -> Value {
    view(&Run {
        status: Status::Cancelled,
        content: None,
        partial_content: Some("The report covers".to_owned()),
        cancel_reason: Some("no longer needed".to_owned()),
        ..completed_run()
    })
}

pub fn child_run() -> Value {
    let parent = completed_run();
    let child = Run {
        id: id(CHILD),
        parent_id: Some(parent.id),
        depth: Depth(1),
        tool_call_id: Some("call_1".to_owned()),
        agent: "reader".to_owned(),
        input: "read the report".into(),
        task: Some("read the report".to_owned()),
        content: Some("The report covers the first quarter.".to_owned()),
        turns: 1,
        usage: usage(412, 63, 1, 0),
        tree: TreeUsage {
            runs: 1,
            usage: usage(412, 63, 1, 0),
        },
        last_event: 11,
        ..parent
    };
    json(&ChildView::new(&child, "", at(0)))
}

fn completed_run() -> Run {
    let scope = Scope::root(id(ROOT), None);
    Run {
        agent_version: VERSION.to_owned(),
        status: Status::Completed,
        input: "summarize the report".into(),
        labels: BTreeMap::from([("team".to_owned(), "blue".to_owned())]),
        content: Some("The first quarter was profitable.".to_owned()),
        model: "claude-sonnet-5-5".to_owned(),
        stop_reason: Some("end_turn".to_owned()),
        turns: 2,
        usage: usage(1204, 188, 2, 1),
        tree: TreeUsage {
            runs: 2,
            usage: usage(1616, 251, 3, 1),
        },
        created_at: at(0),
        started_at: Some(at(0)),
        finished_at: Some(at(4)),
        last_event: 14,
        ..Run::queued(&scope, "planner".to_owned())
    }
}

fn usage(input: u64, output: u64, model_calls: u64, tool_calls: u64) -> Usage {
    Usage {
        tokens: TokenUsage {
            input,
            output,
            ..TokenUsage::default()
        },
        model_calls,
        tool_calls,
        cost: Some(Cost::from_usd(0.0081)),
        unreported: 0,
    }
}

/// The events of the run, without those in its middle.
pub fn events() -> Value {
    let event = |seq: u64, second: i64, kind: EventKind| {
        let event = Event {
            run_id: id(ROOT),
            root_id: id(ROOT),
            depth: 0,
            agent: Arc::from("planner"),
            time: at(second),
            kind,
        };
        let mut event: Value = serde_json::from_str(&event.to_json()).unwrap_or_default();
        event["seq"] = seq.into();
        event
    };
    json!([
        event(
            1,
            0,
            EventKind::RunQueued {
                parent_id: None,
                tool_call_id: None,
                request: None,
            }
        ),
        event(
            2,
            0,
            EventKind::RunStarted {
                model: "anthropic/claude-sonnet-5-5".to_owned(),
                agent_version: VERSION.to_owned(),
            }
        ),
        event(
            3,
            0,
            EventKind::TurnStarted {
                turn: 1,
                messages: 1,
                results: 0
            }
        ),
    ])
}

fn view(run: &Run) -> Value {
    json(&RunView::new(run, "", at(4)))
}

fn json(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

fn id(text: &str) -> RunId {
    text.parse().unwrap_or_default()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_772_357_400 + second).unwrap_or_default()
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
    let mut conversation = conversation();
    conversation["name"] = "ada".into();
    conversation["agent"] = "planner".into();
    conversation["run"] = ROOT.into();
    conversation
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
    let errors = json!([{"pointer": "/inptu", "detail": detail}]);
    problem(
        422,
        "Unprocessable Entity",
        "unknown_field",
        &format!("/inptu: {detail}"),
        errors,
    )
}

pub fn unauthorized() -> Value {
    problem(
        401,
        "Unauthorized",
        "unauthorized",
        "the key is unknown",
        Value::Null,
    )
}

pub fn queue_full() -> Value {
    let mut full = problem(
        429,
        "Too Many Requests",
        "queue_full",
        "8 runs are active and 64 are queued",
        Value::Null,
    );
    full["running"] = 8.into();
    full["queued"] = 64.into();
    full
}

fn problem(status: u16, title: &str, code: &str, detail: &str, errors: Value) -> Value {
    let mut problem = json!({
        "type": "about:blank", "title": title, "status": status, "detail": detail,
        "instance": "/agents/planner/runs", "code": code, "request_id": "req_019a1f3c8d2e7b40",
    });
    if !errors.is_null() {
        problem["errors"] = errors;
    }
    problem
}
