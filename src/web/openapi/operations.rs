//! Describes each route of `web::router` in the OpenAPI document, in the order of the table.

use serde_json::{Value, json};

use crate::domain::memory_entry::MemoryEntry;
use crate::engine::memory::memories::GcReport;
use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::openapi::tidy::reference;
use crate::web::response::conversation::Conversation;
use crate::web::response::json::ListResponse;
use crate::web::response::run::RunView;
use crate::web::response::tree::RunSummary;
use crate::web::routes::agents::{AgentBrief, AgentView, GcRequest};
use crate::web::routes::deliveries::DeliveryView;
use crate::web::routes::events::EventPage;
use crate::web::routes::health::{Alive, Ready, Version};
use crate::web::routes::runs::{CancelRequest, ChildrenPage, RunsPage};
use crate::web::routes::sessions::{SessionConversation, SessionView, SessionsPage};
use crate::web::routes::tickets::TicketView;

const MEMORY_KEY_DESCRIPTION: &str = "The key that owns the memory; by default the request's own. Another key needs the scope `admin`.";
const SESSION_KEY_DESCRIPTION: &str = "The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.";
const SESSION_AGENT_DESCRIPTION: &str = "Only the runs and the conversation of this agent.";
const FULL_DESCRIPTION: &str = "Whether to return long texts whole. By default texts above 1 KiB are cut, and a run with such a text has `truncated`.";
pub const CURSOR_DESCRIPTION: &str = "The `next_cursor` of the previous page.";
const AFTER_DESCRIPTION: &str =
    "The number of messages to skip: the `next_after` of the previous page.";
pub const EVENT_STREAM: &str = "text/event-stream";
pub const STREAM_DESCRIPTION: &str = "\
    Server-Sent Events. Each block has `event:` (the type), `data:` (a `RunEvent` as JSON on one line) and, if the event is \
    stored, `id:` (its `seq`). `text.…` and `reasoning.…` events are live only, without an id. A comment is sent at least \
    every 10 seconds. The stream ends after the run's last event.";

pub fn list_agents(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe("list_agents", "Lists the agents")
        .details("Sorted by name, including agents whose file is invalid.")
        .response::<ListResponse<AgentBrief<'static>>>(200, "The agents.")
        .example(200, json!({"data": [examples::agent_summary()]}));
    with_etag(operation)
}

pub fn agent(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe("get_agent", "Returns an agent with its definition")
        .details("An agent whose file was never valid has no definition, only its error.")
        .response::<AgentView<'static>>(200, "The agent.")
        .example(200, examples::agent_summary());
    with_etag(operation)
}

pub fn memory(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_agent_memory", "Returns the memory of an agent")
        .details("The oldest entry is first.")
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .response::<ListResponse<MemoryEntry>>(200, "The entries.")
        .example(200, json!({"data": [examples::memory_entry()]}))
        .problem(
            404,
            "`agent_not_found`, `memory_disabled`: not found, or not visible to this key.",
        )
}

pub fn gc(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("collect_agent_memory", "Trims the memory of an agent")
        .details(
            "The agent's model names the entries that can be removed. With `dry_run` nothing is removed.",
        )
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .request_body::<GcRequest>()
        .request_example("analyse", "Only analyse", json!({"dry_run": true}))
        .response::<GcReport>(200, "The result of the collection.")
        .example(200, examples::gc_report())
        .problem(
            404,
            "`agent_not_found`, `memory_disabled`: not found, or not visible to this key.",
        )
        .problem(502, "`provider_failed`: the request to the model failed.")
}

pub fn list_runs(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    operation
        .describe("list_runs", "Lists runs, newest first")
        .details(
            "Root runs only, unless `all` or `root` is given. Several filters must all match. Pass `next_cursor` as \
             `cursor` to get the next page.",
        )
        .query("agent", text(), "Only runs of this agent.")
        .query("status", reference("RunStatus"), "Only runs with this status.")
        .query(
            "root",
            text(),
            "Only the tree of this root run, which is included.",
        )
        .query(
            "all",
            json!({"type": "boolean", "default": false}),
            "Whether to include child runs.",
        )
        .query("session", text(), "Only runs of this session.")
        .query("since", time(), "Only runs accepted at this time or later.")
        .query("until", time(), "Only runs accepted before this time.")
        .query("limit", integer_schema(1, 200, 50), "Maximum runs of a page.")
        .query("full", full_schema(), FULL_DESCRIPTION)
        .query("cursor", text(), CURSOR_DESCRIPTION)
        // Each property of this object is a query parameter: OpenAPI's way to describe parameters by prefix.
        .query(
            "label.",
            json!({
                "type": "object",
                "propertyNames": {"pattern": "^label\\.."},
                "additionalProperties": {"type": "string"},
                "maxProperties": 64,
            }),
            "`label.<key>=<value>`: only runs with this label. Several labels must all match.",
        )
        .response::<RunsPage<'static>>(200, "The page.")
        .example(200, json!({"data": [examples::run()], "next_cursor": null}))
}

pub fn run(operation: Operation<'_>) -> Operation<'_> {
    let operation = with_wait(operation)
        .describe("get_run", "Returns a run")
        .details("Responds at once, unless the client waits for the run's end.")
        .query(
            "fields",
            json!({"type": "string", "examples": ["id,status,content"]}),
            "Only these fields of the run, separated by commas. The others are absent, required or not.",
        )
        .response::<RunView<'static>>(200, "The run. If the client waited, the run has ended.")
        .example(200, examples::run())
        .response::<RunView<'static>>(202, "The run, if it did not end while the client waited.")
        .example(202, examples::accepted_run());
    with_etag(operation)
}

pub fn delete(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("delete_run", "Deletes a root run with its tree")
        .details("Deletes its descendants, events, conversation and deliveries, too.")
        .empty_response(204, "The tree is deleted.")
        .problem(
            409,
            "`run_not_terminal`: the run has not ended; cancel it first. `not_a_root`: the run is a child run.",
        )
}

pub fn events(operation: Operation<'_>) -> Operation<'_> {
    let seq = || json!({"type": "integer", "format": "int64", "minimum": 0});
    operation
        .describe("list_run_events", "Returns the events of a run and its descendants")
        .details(
            "A page as JSON; or a stream that follows the run, if `Accept` names `text/event-stream`. A stream that was \
             interrupted continues without a gap after `Last-Event-ID`.",
        )
        .query("after", seq(), "Only events with a larger number.")
        .query(
            "scope",
            json!({"type": "string", "enum": ["tree", "self"], "default": "tree"}),
            "`self` excludes the events of descendants.",
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
        .example(200, json!({"data": examples::events(), "next_after": 3}))
        .text_response(200, EVENT_STREAM, STREAM_DESCRIPTION)
        .text_example(200, EVENT_STREAM, examples::EVENT_STREAM)
        .empty_response(
            204,
            "The run has ended and has no event after `Last-Event-ID` or `after`: the client should not reconnect.",
        )
}

pub fn ticket(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("create_event_ticket", "Issues a ticket for the events of a run")
        .details("The ticket opens the events of this run for 60 seconds without a key. It is never logged.")
        .response::<TicketView>(201, "The ticket, for the parameter `ticket` of the events.")
        .example(
            201,
            json!({"ticket": "axed_ticket_AAABn…", "expires_at": "2026-03-01T09:31:00.000Z"}),
        )
}

pub fn tree(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_run_tree", "Returns the tree of a run")
        .details("The summary of the run, with those of its descendants in the order of the calls.")
        .response::<RunSummary<'static>>(200, "The tree.")
        .example(200, examples::tree())
}

pub fn children(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_child_runs", "Lists the direct children of a run")
        .details("In the order of the calls.")
        .query(
            "limit",
            integer_schema(1, 1000, 1000),
            "Maximum children of a page.",
        )
        .query("cursor", json!({"type": "string"}), CURSOR_DESCRIPTION)
        .response::<ChildrenPage<'static>>(200, "The page.")
        .example(
            200,
            json!({"data": [examples::child_run()], "next_cursor": null}),
        )
}

pub fn messages(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_run_messages", "Returns the conversation of a run")
        .details("As recorded, also while the run is active.")
        .query("after", message_number_schema(), AFTER_DESCRIPTION)
        .response::<Conversation<'static>>(200, "The page of the conversation.")
        .example(200, examples::conversation())
}

pub fn cancel(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .describe("cancel_run", "Cancels a run and its descendants")
        .details("Changes nothing if the run has ended.")
        .request_body::<CancelRequest>()
        .request_example(
            "reason",
            "With a reason",
            json!({"reason": "no longer needed"}),
        )
        .response::<RunView<'static>>(200, "The run, if it has ended.")
        .example(200, examples::cancelled_run())
        .response::<RunView<'static>>(202, "The run, if it is still being cancelled.")
        .example(202, examples::accepted_run())
}

pub fn list_sessions(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_sessions", "Lists the sessions of a key")
        .details("Sorted by name.")
        .query(
            "limit",
            integer_schema(1, 200, 50),
            "Maximum sessions of a page.",
        )
        .query("cursor", json!({"type": "string"}), CURSOR_DESCRIPTION)
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionsPage>(200, "The page.")
        .example(
            200,
            json!({"data": [examples::session_summary()], "next_cursor": null}),
        )
}

pub fn session(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_session", "Returns a session with its runs")
        .details("The newest run is first.")
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
        .query("cursor", json!({"type": "string"}), CURSOR_DESCRIPTION)
        .query("full", full_schema(), FULL_DESCRIPTION)
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionView<'static>>(200, "The session.")
        .example(
            200,
            json!({
                "name": "ada", "agent": "planner", "run": examples::run()["id"], "messages": 4,
                "data": [examples::run()], "next_cursor": null,
            }),
        )
}

pub fn session_messages(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_session_messages",
            "Returns the conversation of a session",
        )
        .details("The next run of the session continues this conversation.")
        .query(
            "agent",
            json!({"type": "string"}),
            SESSION_AGENT_DESCRIPTION,
        )
        .query("after", message_number_schema(), AFTER_DESCRIPTION)
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .response::<SessionConversation<'static>>(200, "The page of the conversation.")
        .example(200, examples::session_conversation())
}

pub fn delete_session(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("delete_session", "Deletes a session with its conversation")
        .details("The runs of the session stay.")
        .query("key", json!({"type": "string"}), SESSION_KEY_DESCRIPTION)
        .empty_response(204, "The session is deleted.")
        .problem(409, "`session_busy`: a run of the session has not ended.")
}

pub fn deliveries(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_deliveries", "Lists the webhook deliveries of a run")
        .details("The newest 1,000 deliveries; the oldest of them is first.")
        .tag("webhooks")
        .response::<ListResponse<DeliveryView>>(200, "The deliveries.")
        .example(200, json!({"data": [examples::delivery()]}))
}

pub fn resend(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("resend_delivery", "Sends a webhook delivery again")
        .details("The delivery keeps its id, so that the receiver can detect the repetition.")
        .tag("webhooks")
        .response::<DeliveryView>(202, "The delivery; it is due now.")
        .example(202, examples::delivery())
}

pub fn livez(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_liveness", "Whether the process responds")
        .response::<Alive>(200, "The process responds.")
        .example(200, json!({"status": "ok"}))
}

pub fn readyz(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_readiness", "Whether the daemon accepts new runs")
        .response::<Ready>(200, "The daemon accepts runs.")
        .example(200, examples::ready())
        .response::<Ready>(
            503,
            "The daemon does not accept runs; a failed check has a `detail`.",
        )
        .example(503, examples::not_ready())
}

pub fn version(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "get_version",
            "Returns the name and the version of the daemon",
        )
        .response::<Version>(200, "Name and version.")
        .example(
            200,
            json!({"name": "axed", "version": env!("CARGO_PKG_VERSION")}),
        )
}

pub fn openapi(operation: Operation<'_>) -> Operation<'_> {
    let operation = operation
        .describe("get_openapi_document", "Returns this document")
        .response::<serde_json::Map<String, Value>>(200, "An OpenAPI 3.1 document.")
        .example(200, json!({"openapi": "3.1.0"}));
    with_etag(operation)
}

pub fn metrics(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "get_metrics",
            "Returns the daemon's metrics, for Prometheus",
        )
        .details("`docs/OPERATIONS.md` describes each metric.")
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
        .response_header(
            200,
            "ETag",
            "Identifies the content; of a run only once it has ended.",
        )
        .empty_response(304, "The client has this response already.")
        .response_header(304, "ETag", "Identifies the content that the client has.")
}

/// The parameters of the routes that can wait for a run.
pub fn with_wait(operation: Operation<'_>) -> Operation<'_> {
    with_wait_for(
        operation,
        "Seconds to wait for the run's end, at most `server.max_wait`. A run that comes to wait for approval is \
         returned at once.",
    )
}

/// The parameters of a route that can wait, with the description of `wait`.
pub fn with_wait_for<'a>(operation: Operation<'a>, description: &str) -> Operation<'a> {
    let seconds =
        json!({"type": "string", "pattern": "^[0-9]*\\.?[0-9]*s?$", "examples": ["30", "30s"]});
    operation.query("wait", seconds, description).header(
        "Prefer",
        json!({"type": "string", "examples": ["wait=30"]}),
        "The same as `wait` (RFC 7240); `wait` in the query wins.",
    )
}

fn full_schema() -> Value {
    json!({"type": "boolean", "default": false})
}

fn message_number_schema() -> Value {
    json!({"type": "integer", "format": "int64", "minimum": 0, "default": 0})
}

pub fn integer_schema(minimum: u32, maximum: u32, default_value: u32) -> Value {
    json!({"type": "integer", "minimum": minimum, "maximum": maximum, "default": default_value})
}
