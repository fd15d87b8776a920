//! Describes each route of `web::router` in the OpenAPI document, in the order of the table.

use serde_json::{Value, json};

use crate::domain::run::Status;
use crate::engine::memory::memories::{GcReport, MemoryEntry};
use crate::engine::request::DryRun;
use crate::web::extract::run_request::CreateRunRequest;
use crate::web::openapi::operation::Operation;
use crate::web::response::conversation::Conversation;
use crate::web::response::json::ListResponse;
use crate::web::response::run::RunView;
use crate::web::response::tree::RunSummary;
use crate::web::routes::agents::{AgentBrief, AgentView, GcRequest};
use crate::web::routes::approvals::{ApprovalsPage, DecisionRequest};
use crate::web::routes::deliveries::DeliveryView;
use crate::web::routes::events::EventPage;
use crate::web::routes::health::{Alive, Ready, Version};
use crate::web::routes::runs::{CancelRequest, ChildrenPage, RunsPage};
use crate::web::routes::sessions::{SessionConversation, SessionView, SessionsPage};
use crate::web::routes::tickets::TicketView;

const MEMORY_KEY_DESCRIPTION: &str = "The key that owns the memory; by default the request's own. Another key needs the scope `admin`.";
const SESSION_KEY_DESCRIPTION: &str = "The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.";
const SESSION_AGENT_DESCRIPTION: &str = "Only the runs and the conversation of this agent.";
const FULL_DESCRIPTION: &str = "Return long texts whole. By default texts above 1 KiB are cut, and a run with such a text has `truncated`.";
const EVENT_STREAM: &str = "text/event-stream";

pub fn list_agents(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe(
            "list_agents",
            "The agents, sorted by name, including invalid ones",
        )
        .response::<ListResponse<AgentBrief<'static>>>(200, "The agents.");
    with_etag(operation)
}

pub fn agent(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe("get_agent", "Returns an agent with its definition")
        .response::<AgentView<'static>>(200, "The agent.");
    with_etag(operation)
}

pub fn create(operation: Operation<'_>) -> Operation<'_> {
    with_run_body(operation)
        .describe("create_run", "Starts a run")
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours returns the run of the first \
             one.",
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
            "The run, if it ended while the client waited; or its events, if `Accept` names an \
             event stream.",
        )
        .text_response(
            200,
            EVENT_STREAM,
            "All events of the run, each an `Event`, until it ends.",
        )
        .response::<RunView<'static>>(202, "The run is accepted and stored; it continues without the client.")
        .response_header(200, "Location", "The path of the run.")
        .response_header(202, "Location", "The path of the run.")
        .response_header(
            200,
            "Idempotency-Replayed",
            "`true` if an earlier request started the run.",
        )
        .response_header(
            202,
            "Idempotency-Replayed",
            "`true` if an earlier request started the run.",
        )
        .problem(
            429,
            "`queue_full`: `Retry-After` tells when to retry; `running` and `queued` tell the load.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`: `Retry-After` tells when to retry.",
        )
}

pub fn dry_run(operation: Operation<'_>) -> Operation<'_> {
    with_run_body(operation)
        .describe(
            "dry_run",
            "Checks a run and returns what it would do, without a request to a model",
        )
        .response::<DryRun>(200, "What the run would do.")
}

pub fn memory(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "get_memory",
            "Returns the memory of an agent, oldest entry first",
        )
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .response::<ListResponse<MemoryEntry>>(200, "The entries.")
}

pub fn gc(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "collect_memory",
            "Lets an agent's model analyse its memory, and trims it",
        )
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .request_body::<GcRequest>()
        .response::<GcReport>(200, "The result of the collection.")
        .problem(502, "`provider_failed`: the request to the model failed.")
}

pub fn list_runs(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    operation
        .describe("list_runs", "A page of runs, newest first")
        .query("agent", text(), "Filter by agent.")
        .query("status", json!({"enum": Status::ALL}), "Filter by status.")
        .query("root", text(), "Filter by root run: its whole tree.")
        .query(
            "all",
            json!({"type": "boolean", "default": false}),
            "Include child runs.",
        )
        .query("session", text(), "Filter by session.")
        .query("since", time(), "Only runs accepted at this time or later.")
        .query("until", time(), "Only runs accepted before this time.")
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum runs of a page.",
        )
        .query("full", full_schema(), FULL_DESCRIPTION)
        .query("cursor", text(), "The `next_cursor` of the previous page.")
        // Each property of this object is a query parameter: OpenAPI's way to describe parameters by prefix.
        .query(
            "label.",
            json!({
                "type": "object",
                "patternProperties": {"^label\\..": {"type": "string"}},
                "additionalProperties": false,
                "maxProperties": 64,
            }),
            "`label.<key>=<value>`: filter by label. Several labels must all match.",
        )
        .response::<RunsPage<'static>>(200, "The page.")
}

pub fn run(operation: Operation<'_>) -> Operation<'_> {
    let operation = with_wait(operation)
        .describe("get_run", "Returns a run")
        .query(
            "fields",
            json!({"type": "string", "examples": ["id,status,content"]}),
            "Only these fields of the run, separated by commas.",
        )
        .response::<RunView<'static>>(200, "The run. If the client waits, the run has ended.")
        .response::<RunView<'static>>(202, "The run, if it has not ended while the client waited.");
    with_etag(operation)
}

pub fn delete(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("delete_run", "Deletes a root run with its tree")
        .empty_response(204, "Deleted.")
        .problem(409, "`run_not_terminal`, `not_a_root`.")
}

pub fn events(operation: Operation<'_>) -> Operation<'_> {
    let seq = || json!({"type": "integer", "minimum": 0});
    operation
        .describe(
            "list_events",
            "The event log of a run and its descendants, as a page or as a stream",
        )
        .query("after", seq(), "Only events with a larger number.")
        .query(
            "scope",
            json!({"enum": ["tree", "self"], "default": "tree"}),
            "`self` excludes the descendants.",
        )
        .query(
            "limit",
            integer_schema(1, 1000, 200),
            "Approximate maximum of events of a page.",
        )
        .query(
            "ticket",
            json!({"type": "string"}),
            "A ticket for this run, in place of a key; for a browser's `EventSource`.",
        )
        .header(
            "Last-Event-ID",
            seq(),
            "The number of the last event that the client has; wins over `after`.",
        )
        .response::<EventPage>(
            200,
            "The page; or the stream, if `Accept` names an event stream.",
        )
        .text_response(
            200,
            EVENT_STREAM,
            "Stored events, then live ones, each an `Event`, until the run ends.",
        )
        .empty_response(
            204,
            "The client already has the final event and should not reconnect.",
        )
}

pub fn ticket(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "create_event_ticket",
            "Issues a ticket, which opens the events of this run for 60 s without a key",
        )
        .response::<TicketView>(201, "The ticket, for the parameter `ticket` of the events.")
        .problem(
            429,
            "`too_many_tickets`: this key has too many valid tickets.",
        )
}

pub fn tree(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "get_tree",
            "Returns the summary of a run with those of its descendants",
        )
        .response::<RunSummary<'static>>(200, "The tree.")
}

pub fn children(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_children",
            "The direct children of a run, in the order of the calls",
        )
        .query(
            "limit",
            integer_schema(1, 1000, 1000),
            "Maximum children of a page.",
        )
        .query(
            "cursor",
            json!({"type": "string"}),
            "The `next_cursor` of the previous page.",
        )
        .response::<ChildrenPage<'static>>(200, "The children.")
}

pub fn messages(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_messages", "The conversation of a run as recorded")
        .query(
            "after",
            json!({"type": "integer", "minimum": 0, "default": 0}),
            "The number of messages to skip: the `next_after` of the previous page.",
        )
        .response::<Conversation<'static>>(200, "The conversation.")
}

pub fn cancel(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .describe("cancel_run", "Cancels a run and its descendants")
        .request_body::<CancelRequest>()
        .response::<RunView<'static>>(200, "The run, if it has ended.")
        .response::<RunView<'static>>(202, "The run, if it is still being cancelled.")
}

pub fn list_sessions(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_sessions", "The sessions of a key, sorted by name")
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum sessions of a page.",
        )
        .query(
            "cursor",
            json!({"type": "string"}),
            "The `next_cursor` of the previous page.",
        )
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionsPage>(200, "The page.")
}

pub fn session(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_session", "The runs of a session, newest first")
        .query(
            "agent",
            json!({"type": "string"}),
            SESSION_AGENT_DESCRIPTION,
        )
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum runs of a page.",
        )
        .query(
            "cursor",
            json!({"type": "string"}),
            "The `next_cursor` of the previous page.",
        )
        .query("full", full_schema(), FULL_DESCRIPTION)
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionView<'static>>(200, "The session.")
}

pub fn session_messages(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_session_messages",
            "The conversation of a session, which its next run continues",
        )
        .query(
            "agent",
            json!({"type": "string"}),
            SESSION_AGENT_DESCRIPTION,
        )
        .query(
            "after",
            json!({"type": "integer", "minimum": 0, "default": 0}),
            "The number of messages to skip: the `next_after` of the previous page.",
        )
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionConversation<'static>>(200, "The conversation.")
}

pub fn delete_session(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "delete_session",
            "Deletes a session with its conversation; its runs stay",
        )
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .empty_response(204, "Deleted.")
        .problem(409, "`session_busy`: a run of the session has not ended.")
}

pub fn decide(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "decide",
            "Approves or denies a tool call that waits for approval",
        )
        .request_body::<DecisionRequest>()
        .body_required()
        .response::<RunView<'static>>(202, "The run; the decision is stored.")
        .problem(
            409,
            "`nothing_waits`: no such tool call waits for approval (any more).",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`: `Retry-After` tells when to retry.",
        )
}

pub fn list_approvals(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    operation
        .describe(
            "list_approvals",
            "The tool calls that wait for approval, oldest runs first",
        )
        .query("root", text(), "Only calls of this root run's tree.")
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum calls of a page. All calls of a run are on one page, which may therefore be longer.",
        )
        .query("cursor", text(), "The `next_cursor` of the previous page.")
        .response::<ApprovalsPage>(200, "The page.")
}

pub fn deliveries(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_deliveries",
            "The webhook deliveries of a run, oldest first",
        )
        .response::<ListResponse<DeliveryView>>(200, "The newest 1,000 deliveries.")
}

pub fn resend(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("resend_delivery", "Sends a webhook delivery again")
        .response::<DeliveryView>(202, "The delivery; it is due now.")
}

pub fn livez(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("livez", "Whether the process responds")
        .response::<Alive>(200, "It responds.")
}

pub fn readyz(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("readyz", "Whether the daemon accepts new runs")
        .response::<Ready>(200, "It does.")
        .response::<Ready>(503, "It does not; a failed check has a `detail`.")
}

pub fn version(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("version", "Name and version of the daemon")
        .response::<Version>(200, "Name and version.")
}

pub fn openapi(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe("openapi", "This document")
        .response::<serde_json::Map<String, Value>>(200, "An OpenAPI 3.1 document.");
    with_etag(operation)
}

pub fn metrics(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("metrics", "The daemon's metrics, for Prometheus")
        .text_response(200, "text/plain", "The Prometheus text format.")
}

/// The parts of a route with a response 200 that a client may keep and revalidate.
fn with_etag(operation: Operation<'_>) -> Operation<'_> {
    operation
        .header(
            "If-None-Match",
            json!({"type": "string"}),
            "The `ETag` of the response that the client has.",
        )
        .response_header(200, "ETag", "Of a run only once it has ended.")
        .empty_response(304, "The client has this response already.")
}

/// The parts of the two routes with the body of a run.
fn with_run_body(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .request_body::<CreateRunRequest>()
        .or_text("The run's input.")
        .or_form(
            "`input` fields are texts and files (images, PDF, text), in order. The other fields of the JSON body are text; \
             objects and lists are JSON.",
        )
}

/// The parameters of the routes that can wait for a run.
fn with_wait(operation: Operation<'_>) -> Operation<'_> {
    let seconds =
        json!({"type": "string", "pattern": "^[0-9]*\\.?[0-9]*s?$", "examples": ["30", "30s"]});
    operation
        .query(
            "wait",
            seconds,
            "Seconds to wait for the run's end, at most `server.max_wait`. A run that comes to wait for approval is \
             returned at once.",
        )
        .header(
            "Prefer",
            json!({"type": "string", "examples": ["wait=30"]}),
            "The same as `wait` (RFC 7240); `wait` in the query wins.",
        )
}

fn full_schema() -> Value {
    json!({"type": "boolean", "default": false})
}

fn integer_schema(minimum: u32, maximum: u32, default_value: u32) -> Value {
    json!({"type": "integer", "minimum": minimum, "maximum": maximum, "default": default_value})
}
