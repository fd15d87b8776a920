//! The codes of problems. A code is stable: clients decide by it.

use schemars::JsonSchema;
use serde::Serialize;

macro_rules! problem_codes {
    ($($(#[$description:meta])* $variant:ident = $name:literal,)*) => {
        /// Identifies the kind of a problem. Codes do not change between versions; later versions may add codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
        pub enum ProblemCode {
            $($(#[$description])* #[serde(rename = $name)] $variant,)*
        }

        impl ProblemCode {
            /// The code in JSON and in the log.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

problem_codes! {
    /// The agent's file is invalid; `detail` has its error.
    AgentInvalid = "agent_invalid",
    /// The agent does not exist, or the key may not use it.
    AgentNotFound = "agent_not_found",
    /// The images and files of the body are too many or too large.
    AttachmentsTooLarge = "attachments_too_large",
    /// The batch does not exist, or belongs to another key.
    BatchNotFound = "batch_not_found",
    /// The body is larger than the server accepts.
    BodyTooLarge = "body_too_large",
    /// After a restart the run has not come to this tool call yet; retry after `Retry-After`.
    CallNotReached = "call_not_reached",
    /// A budget over time is used up; retry after `Retry-After`.
    BudgetExhausted = "budget_exhausted",
    /// A page of another origin sent the request.
    CrossSite = "cross_site",
    /// The run has no such webhook delivery.
    DeliveryNotFound = "delivery_not_found",
    /// The daemon is shutting down; retry after `Retry-After`.
    Draining = "draining",
    /// A daemon on a loopback address received a request for another host.
    ForeignHost = "foreign_host",
    /// The head of the request is too large.
    HeadTooLarge = "head_too_large",
    /// A request with the same `Idempotency-Key` is still being accepted.
    IdempotencyConflict = "idempotency_conflict",
    /// The `Idempotency-Key` was used with another body.
    IdempotencyMismatch = "idempotency_mismatch",
    /// The key does not have the scope that the operation requires.
    InsufficientScope = "insufficient_scope",
    /// The daemon failed; its log has the cause under the `request_id`.
    Internal = "internal",
    /// A value of the body is not allowed for this agent.
    InvalidBody = "invalid_body",
    /// A field of the body has an invalid value.
    InvalidField = "invalid_field",
    /// The request names no host, or several.
    InvalidHost = "invalid_host",
    /// The body is not valid JSON.
    InvalidJson = "invalid_json",
    /// The order or the content of `messages` is invalid.
    InvalidMessages = "invalid_messages",
    /// The model's name is invalid, or its provider does not exist.
    InvalidModel = "invalid_model",
    /// The agent or the server does not allow this override.
    InvalidOverride = "invalid_override",
    /// A query parameter or a header has an invalid value.
    InvalidParameter = "invalid_parameter",
    /// The signature of a trigger's event is missing or wrong, or its time is too far away.
    InvalidSignature = "invalid_signature",
    /// The ticket is unknown, expired or for another run.
    InvalidTicket = "invalid_ticket",
    /// The body cannot be read.
    MalformedBody = "malformed_body",
    /// The path is not valid percent-encoded UTF-8.
    MalformedPath = "malformed_path",
    /// The query cannot be read.
    MalformedQuery = "malformed_query",
    /// The request is not valid HTTP.
    MalformedRequest = "malformed_request",
    /// The agent has no memory.
    MemoryDisabled = "memory_disabled",
    /// The agent's memory file cannot be read or written.
    MemoryUnreadable = "memory_unreadable",
    /// The route does not support the method; the header `Allow` lists those that it supports.
    MethodNotAllowed = "method_not_allowed",
    /// The agent requires labels that this node has not, and no other node can take the run.
    NoNode = "no_node",
    /// The run is a child run; the operation requires its root run.
    NotARoot = "not_a_root",
    /// The record lacks what the operation needs.
    NotRecorded = "not_recorded",
    /// A call of the run had begun, has not ended and is not safe to repeat; or its record lacks what a fork needs.
    NotForkable = "not_forkable",
    /// Too many bytes of request bodies are being read; retry after `Retry-After`.
    BodiesBusy = "bodies_busy",
    /// The body or the path is not UTF-8.
    NotUtf8 = "not_utf8",
    /// The tool call does not wait for an approval.
    NothingWaits = "nothing_waits",
    /// The decision is about other arguments than the tool call has; nothing was decided.
    OtherArguments = "other_arguments",
    /// The prompt cannot be assembled.
    PromptInvalid = "prompt_invalid",
    /// A request to the model's provider failed.
    ProviderFailed = "provider_failed",
    /// The header `X-Provider-Key` is not allowed here.
    ProviderKeyRefused = "provider_key_refused",
    /// The model's provider has no API key.
    ProviderUnavailable = "provider_unavailable",
    /// The queue of runs is full; retry after `Retry-After`.
    QueueFull = "queue_full",
    /// The request did not arrive in time.
    RequestTimeout = "request_timeout",
    /// There is no route with this path.
    RouteNotFound = "route_not_found",
    /// The run does not exist, or belongs to another key.
    RunNotFound = "run_not_found",
    /// The run has ended, or is being cancelled: it does not change any more.
    RunEnded = "run_ended",
    /// The run has not ended.
    RunNotTerminal = "run_not_terminal",
    /// The run has ended.
    RunTerminal = "run_terminal",
    /// The agent has no such schedule, or the key may not see it.
    ScheduleNotFound = "schedule_not_found",
    /// Another run of the session is active or queued.
    SessionBusy = "session_busy",
    /// The session does not exist, or belongs to another key.
    SessionNotFound = "session_not_found",
    /// The stored record is damaged, or its disk fails.
    StoreDamaged = "store_damaged",
    /// The disk is full; runs can only be read and deleted.
    StoreFull = "store_full",
    /// The store cannot be read or written now; retry after `Retry-After`.
    StoreUnavailable = "store_unavailable",
    /// The key is missing or unknown.
    Unauthorized = "unauthorized",
    /// The run has as many unread messages as it may have.
    TooManyMessages = "too_many_messages",
    /// There is no such trigger, or it can start no runs.
    TriggerNotFound = "trigger_not_found",
    /// The run has no such turn.
    TurnNotFound = "turn_not_found",
    /// The body has a field that does not exist.
    UnknownField = "unknown_field",
    /// The query has a parameter that does not exist.
    UnknownParameter = "unknown_parameter",
    /// A budget in money holds for the run, and the model has no price.
    UnpricedModel = "unpriced_model",
    /// The body's charset is not UTF-8.
    UnsupportedCharset = "unsupported_charset",
    /// The body is compressed, and not with gzip.
    UnsupportedEncoding = "unsupported_encoding",
    /// The body's content type is not supported.
    UnsupportedMediaType = "unsupported_media_type",
    /// The protocol's version is not supported.
    UnsupportedVersion = "unsupported_version",
}
