//! What the OpenAPI document says of each route of `web::router`, in the table's order.

use serde_json::{Value, json};

use crate::domain::run::Status;
use crate::engine::memory::memory::{GcReport, MemoryEntry};
use crate::engine::request::DryRun;
use crate::web::agents::{AgentBrief, AgentView, GcRequest};
use crate::web::create_run::CreateRunRequest;
use crate::web::openapi::operation::Operation;
use crate::web::response::conversation::Conversation;
use crate::web::response::json::ListResponse;
use crate::web::response::run::RunView;
use crate::web::response::tree::RunSummary;
use crate::web::routes::approvals::DecisionRequest;
use crate::web::routes::deliveries::DeliveryView;
use crate::web::routes::events::EventPage;
use crate::web::routes::health::{Alive, Ready, Version};
use crate::web::routes::runs::{CancelRequest, ChildrenPage, RunsPage};
use crate::web::routes::sessions::SessionView;

const MEMORY_KEY_DESCRIPTION: &str =
    "The key whose memory is meant, instead of the caller's own; another's needs the scope admin.";
const EVENT_STREAM: &str = "text/event-stream";

/// `GET /agents`
pub fn list_agents(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_agents", "The agents, sorted by name, broken ones too")
        .response::<ListResponse<AgentBrief<'static>>>(200, "The agents.")
}

/// `GET /agents/{name}`
pub fn agent(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_agent", "One agent with its definition")
        .response::<AgentView<'static>>(200, "The agent.")
}

/// `POST /agents/{name}/runs`
pub fn create(operation: Operation<'_>) -> Operation<'_> {
    with_run_body(operation)
        .describe("create_run", "Starts a run")
        .header(
            "Idempotency-Key",
            json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
            "A POST that is repeated with the same key within 24 hours is answered with the \
             run of the first.",
        )
        .header(
            "traceparent",
            json!({"type": "string"}),
            "The trace that the run goes into (W3C Trace Context).",
        )
        .header(
            "X-Provider-Key",
            json!({"type": "string", "pattern": "^[^=]+=[!-~]+$"}),
            "`<provider>=<key>`: a key of the caller's own for the requests of this run's tree to a provider, one header \
             for each provider. Only for agents with `allow_provider_keys`; never stored or logged.",
        )
        .response::<RunView<'static>>(
            200,
            "The run, which ended while the caller waited; or its events, where `Accept` \
             names an event stream.",
        )
        .text_response(
            200,
            EVENT_STREAM,
            "The run's events from the first, each an `Event`, to its end.",
        )
        .response::<RunView<'static>>(202, "The run is on disk and goes on by itself.")
        .response_header(200, "Location", "Where the run is read.")
        .response_header(202, "Location", "Where the run is read.")
        .response_header(
            200,
            "Idempotency-Replayed",
            "`true` where an earlier request started the run.",
        )
        .response_header(
            202,
            "Idempotency-Replayed",
            "`true` where an earlier request started the run.",
        )
        .problem(
            429,
            "`queue_full`: `Retry-After` says when to come back, `running` and `queued` how \
             full it is.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`: `Retry-After` says when to come back.",
        )
}

/// `POST /agents/{name}/dry-run`
pub fn dry_run(operation: Operation<'_>) -> Operation<'_> {
    with_run_body(operation)
        .describe("dry_run", "What a run would be; no model is called")
        .response::<DryRun>(200, "What would be run.")
}

/// `GET /agents/{name}/memory`
pub fn memory(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_memory", "What an agent remembers, oldest first")
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .response::<ListResponse<MemoryEntry>>(200, "The entries.")
}

/// `POST /agents/{name}/gc`
pub fn gc(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "collect_memory",
            "Has an agent's model analyse its memory, and trims it",
        )
        .query("key", json!({"type": "string"}), MEMORY_KEY_DESCRIPTION)
        .request_body::<GcRequest>()
        .response::<GcReport>(200, "What was done.")
        .problem(502, "`provider_failed`: the model did not answer.")
}

/// `GET /runs`
pub fn list_runs(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    operation
        .describe("list_runs", "A page of runs, newest first")
        .query("agent", text(), "Only this agent's.")
        .query(
            "status",
            json!({"enum": Status::ALL}),
            "Only those that stand so.",
        )
        .query("root", text(), "Only this root's tree.")
        .query(
            "all",
            json!({"type": "boolean", "default": false}),
            "Children too.",
        )
        .query("session", text(), "Only this session's.")
        .query("since", time(), "Accepted at this time or later.")
        .query("until", time(), "Accepted before this time.")
        .query("limit", integer_schema(1, 200, 50), "Most runs of a page.")
        .query("cursor", text(), "The `next_cursor` of the page before.")
        // An object's properties are parameters of their own: OpenAPI's way to say that names begin so.
        .query(
            "label.",
            json!({
                "type": "object",
                "patternProperties": {"^label\\..": {"type": "string"}},
                "additionalProperties": false,
                "maxProperties": 64,
            }),
            "`label.<key>=<value>`: only those with this label; several: with all of them.",
        )
        .response::<RunsPage<'static>>(200, "The page.")
}

/// `GET /runs/{id}`
pub fn run(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .describe("get_run", "A run")
        .response::<RunView<'static>>(200, "The run; where the caller waits: it has ended.")
        .response::<RunView<'static>>(202, "The run, which has not ended while the caller waited.")
}

/// `DELETE /runs/{id}`
pub fn delete(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("delete_run", "Forgets a root run with its tree")
        .empty_response(204, "It is gone.")
        .problem(409, "`run_not_terminal`, `not_a_root`.")
}

/// `GET /runs/{id}/events`
pub fn events(operation: Operation<'_>) -> Operation<'_> {
    let seq = || json!({"type": "integer", "minimum": 0});
    operation
        .describe(
            "list_events",
            "The log of a run and its descendants, as a page or as a stream",
        )
        .query("after", seq(), "Only events with a larger number.")
        .query(
            "scope",
            json!({"enum": ["tree", "self"], "default": "tree"}),
            "`self`: without the descendants.",
        )
        .query(
            "limit",
            integer_schema(1, 1000, 200),
            "Roughly the most events of a page.",
        )
        .header(
            "Last-Event-ID",
            seq(),
            "The last event that a stream's reader has; wins over `after`.",
        )
        .response::<EventPage>(200, "The page; or the stream, where `Accept` names one.")
        .text_response(
            200,
            EVENT_STREAM,
            "Stored events, then live ones, each an `Event`, to the run's end.",
        )
        .empty_response(
            204,
            "The reader of a stream has it all: it need not come back.",
        )
}

/// `GET /runs/{id}/tree`
pub fn tree(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "get_tree",
            "A run's summary with those of its descendants in it",
        )
        .response::<RunSummary<'static>>(200, "The tree.")
}

/// `GET /runs/{id}/children`
pub fn children(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_children",
            "A run's direct children, in the order of the calls",
        )
        .query(
            "limit",
            integer_schema(1, 1000, 1000),
            "Most children of a page.",
        )
        .query(
            "cursor",
            json!({"type": "string"}),
            "The `next_cursor` of the page before.",
        )
        .response::<ChildrenPage<'static>>(200, "The children.")
}

/// `GET /runs/{id}/messages`
pub fn messages(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("list_messages", "A run's conversation as recorded")
        .query(
            "after",
            json!({"type": "integer", "minimum": 0, "default": 0}),
            "How many messages to leave out: the `next_after` of the page before.",
        )
        .response::<Conversation<'static>>(200, "The conversation.")
}

/// `POST /runs/{id}/cancel`
pub fn cancel(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .describe("cancel_run", "Stops a run and its descendants")
        .request_body::<CancelRequest>()
        .response::<RunView<'static>>(200, "The run, which has ended.")
        .response::<RunView<'static>>(202, "The run, which is being cancelled.")
}

/// `GET /sessions/{name}`
pub fn session(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("get_session", "A session's runs, newest first")
        .query(
            "agent",
            json!({"type": "string"}),
            "Only this agent's runs and conversation.",
        )
        .query("limit", integer_schema(1, 200, 50), "Most runs of a page.")
        .query(
            "cursor",
            json!({"type": "string"}),
            "The `next_cursor` of the page before.",
        )
        .response::<SessionView<'static>>(200, "The session.")
}

/// `POST /runs/{id}/approvals/{call}`
pub fn decide(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("decide", "A person's word on a tool call that waits for it")
        .request_body::<DecisionRequest>()
        .body_required()
        .response::<RunView<'static>>(202, "The run; the decision is on disk.")
        .problem(409, "`nothing_waits`: no such call waits (any more).")
        .problem(
            503,
            "`draining`, `store_unavailable`: `Retry-After` says when to come back.",
        )
}

/// `GET /runs/{id}/deliveries`
pub fn deliveries(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe(
            "list_deliveries",
            "A run's webhook deliveries, oldest first",
        )
        .response::<ListResponse<DeliveryView>>(200, "The newest 1,000.")
}

/// `POST /runs/{id}/deliveries/{delivery}/resend`
pub fn resend(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("resend_delivery", "Sends a webhook delivery again")
        .response::<DeliveryView>(202, "The delivery, which is due now.")
}

/// `GET /livez`
pub fn livez(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("livez", "Whether the process answers")
        .response::<Alive>(200, "It does.")
}

/// `GET /readyz`
pub fn readyz(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("readyz", "Whether new runs are taken")
        .response::<Ready>(200, "They are.")
        .response::<Ready>(503, "They are not; a failed check has a `detail`.")
}

/// `GET /version`
pub fn version(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("version", "What is serving")
        .response::<Version>(200, "Name and version.")
}

/// `GET /openapi.json`
pub fn openapi(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("openapi", "This document")
        .response::<serde_json::Map<String, Value>>(200, "An OpenAPI 3.1 document.")
}

/// `GET /metrics`
pub fn metrics(operation: Operation<'_>) -> Operation<'_> {
    operation
        .describe("metrics", "What the daemon counts, for Prometheus")
        .text_response(200, "text/plain", "Prometheus' text format.")
}

/// What the two routes have that take a run's body.
fn with_run_body(operation: Operation<'_>) -> Operation<'_> {
    with_wait(operation)
        .request_body::<CreateRunRequest>()
        .or_text("The run's input.")
        .or_form(
            "`input` texts and files (pictures, PDF, text) in their order; the body's other fields as text, objects and \
             lists as JSON.",
        )
}

/// What the routes have that wait for a run's end where their caller wants it.
fn with_wait(operation: Operation<'_>) -> Operation<'_> {
    let seconds =
        json!({"type": "string", "pattern": "^[0-9]*\\.?[0-9]*s?$", "examples": ["30", "30s"]});
    operation
        .query(
            "wait",
            seconds,
            "Waits so many seconds for the run's end, at most `server.max_wait`.",
        )
        .header(
            "Prefer",
            json!({"type": "string", "examples": ["wait=30"]}),
            "The same (RFC 7240); `wait` in the query wins.",
        )
}

fn integer_schema(minimum: u32, maximum: u32, default_value: u32) -> Value {
    json!({"type": "integer", "minimum": minimum, "maximum": maximum, "default": default_value})
}
