//! The codes of problems, with the status and the meaning of each. A code is stable: clients decide by it.

use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

macro_rules! problem_codes {
    ($(#[doc = $meaning:literal] $variant:ident = $name:literal $status:ident,)*) => {
        /// Identifies the kind of a problem. Codes do not change between versions; later versions may add codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
        pub enum ProblemCode {
            $(#[doc = $meaning] #[serde(rename = $name)] $variant,)*
        }

        impl ProblemCode {
            /// The code in JSON and in the log.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The HTTP status of a problem with this code, unless it names another one.
            pub fn status(self) -> StatusCode {
                match self {
                    $(Self::$variant => StatusCode::$status,)*
                }
            }

            /// What the code says, as a sentence.
            pub fn meaning(self) -> &'static str {
                let meaning = match self {
                    $(Self::$variant => $meaning,)*
                };
                meaning.trim_start()
            }
        }
    };
}

problem_codes! {
    /// The agent's file is invalid; `detail` has its error.
    AgentInvalid = "agent_invalid" UNPROCESSABLE_ENTITY,
    /// The agent does not exist, or the key may not use it.
    AgentNotFound = "agent_not_found" NOT_FOUND,
    /// The part of an id in the path or the query is one of several runs; `detail` names them.
    AmbiguousRun = "ambiguous_run" BAD_REQUEST,
    /// The images and files of the body are too many or too large.
    AttachmentsTooLarge = "attachments_too_large" PAYLOAD_TOO_LARGE,
    /// The batch does not exist, or belongs to another key.
    BatchNotFound = "batch_not_found" NOT_FOUND,
    /// The body is larger than the server accepts.
    BodyTooLarge = "body_too_large" PAYLOAD_TOO_LARGE,
    /// The run has begun no such call.
    CallNotFound = "call_not_found" NOT_FOUND,
    /// After a restart the run has not come to this tool call yet; retry after `Retry-After`.
    CallNotReached = "call_not_reached" SERVICE_UNAVAILABLE,
    /// A budget over time is used up; retry after `Retry-After`.
    BudgetExhausted = "budget_exhausted" TOO_MANY_REQUESTS,
    /// A page of another origin sent the request.
    CrossSite = "cross_site" FORBIDDEN,
    /// The run has no such webhook delivery.
    DeliveryNotFound = "delivery_not_found" NOT_FOUND,
    /// The evaluation does not exist, or belongs to another key.
    EvalNotFound = "eval_not_found" NOT_FOUND,
    /// The feedback link is unknown, or its time is over.
    FeedbackLinkNotFound = "feedback_link_not_found" NOT_FOUND,
    /// The run has no such score of this author.
    ScoreNotFound = "score_not_found" NOT_FOUND,
    /// The daemon is shutting down; retry after `Retry-After`.
    Draining = "draining" SERVICE_UNAVAILABLE,
    /// A daemon on a loopback address received a request for another host.
    ForeignHost = "foreign_host" FORBIDDEN,
    /// The head of the request is too large.
    HeadTooLarge = "head_too_large" REQUEST_HEADER_FIELDS_TOO_LARGE,
    /// A request with the same `Idempotency-Key` is still being accepted.
    IdempotencyConflict = "idempotency_conflict" CONFLICT,
    /// The `Idempotency-Key` was used with another body.
    IdempotencyMismatch = "idempotency_mismatch" UNPROCESSABLE_ENTITY,
    /// The key does not have the scope that the operation requires.
    InsufficientScope = "insufficient_scope" FORBIDDEN,
    /// The daemon failed; its log has the cause under the `request_id`.
    Internal = "internal" INTERNAL_SERVER_ERROR,
    /// A value of the body is not allowed for this agent.
    InvalidBody = "invalid_body" UNPROCESSABLE_ENTITY,
    /// A field of the body has an invalid value.
    InvalidField = "invalid_field" UNPROCESSABLE_ENTITY,
    /// The request names no host, or several.
    InvalidHost = "invalid_host" BAD_REQUEST,
    /// The body is not valid JSON.
    InvalidJson = "invalid_json" BAD_REQUEST,
    /// The order or the content of `messages` is invalid.
    InvalidMessages = "invalid_messages" UNPROCESSABLE_ENTITY,
    /// The model's name is invalid, or its provider does not exist.
    InvalidModel = "invalid_model" UNPROCESSABLE_ENTITY,
    /// The agent or the server does not allow this override.
    InvalidOverride = "invalid_override" UNPROCESSABLE_ENTITY,
    /// A query parameter or a header has an invalid value.
    InvalidParameter = "invalid_parameter" BAD_REQUEST,
    /// The signature of a trigger's event is missing or wrong, or its time is too far away.
    InvalidSignature = "invalid_signature" UNAUTHORIZED,
    /// The ticket is unknown, expired or for another run.
    InvalidTicket = "invalid_ticket" UNAUTHORIZED,
    /// The body cannot be read.
    MalformedBody = "malformed_body" BAD_REQUEST,
    /// The path is not valid percent-encoded UTF-8.
    MalformedPath = "malformed_path" BAD_REQUEST,
    /// The query cannot be read.
    MalformedQuery = "malformed_query" BAD_REQUEST,
    /// The request is not valid HTTP.
    MalformedRequest = "malformed_request" BAD_REQUEST,
    /// The agent has no memory.
    MemoryDisabled = "memory_disabled" NOT_FOUND,
    /// The agent's memory file cannot be read or written.
    MemoryUnreadable = "memory_unreadable" INTERNAL_SERVER_ERROR,
    /// The route does not support the method; the header `Allow` lists those that it supports.
    MethodNotAllowed = "method_not_allowed" METHOD_NOT_ALLOWED,
    /// The agent requires labels that this node has not, and no other node can take the run.
    NoNode = "no_node" UNPROCESSABLE_ENTITY,
    /// The run is a child run; the operation requires its root run.
    NotARoot = "not_a_root" CONFLICT,
    /// The record lacks what the operation needs.
    NotRecorded = "not_recorded" CONFLICT,
    /// A call of the run had begun, has not ended and is not safe to repeat; or its record lacks what a fork needs.
    NotForkable = "not_forkable" CONFLICT,
    /// Too many bytes of request bodies are being read; retry after `Retry-After`.
    BodiesBusy = "bodies_busy" TOO_MANY_REQUESTS,
    /// The body or the path is not UTF-8.
    NotUtf8 = "not_utf8" BAD_REQUEST,
    /// The tool call does not wait for an approval.
    NothingWaits = "nothing_waits" CONFLICT,
    /// The decision is about other arguments than the tool call has; nothing was decided.
    OtherArguments = "other_arguments" CONFLICT,
    /// The prompt cannot be assembled.
    PromptInvalid = "prompt_invalid" UNPROCESSABLE_ENTITY,
    /// A request to the model's provider failed.
    ProviderFailed = "provider_failed" BAD_GATEWAY,
    /// The header `X-Provider-Key` is not allowed here.
    ProviderKeyRefused = "provider_key_refused" UNPROCESSABLE_ENTITY,
    /// The model's provider has no API key.
    ProviderUnavailable = "provider_unavailable" UNPROCESSABLE_ENTITY,
    /// The queue of runs is full; retry after `Retry-After`.
    QueueFull = "queue_full" TOO_MANY_REQUESTS,
    /// The request did not arrive in time.
    RequestTimeout = "request_timeout" REQUEST_TIMEOUT,
    /// There is no route with this path.
    RouteNotFound = "route_not_found" NOT_FOUND,
    /// The run does not exist, or belongs to another key.
    RunNotFound = "run_not_found" NOT_FOUND,
    /// The run has ended, or is being cancelled: it does not change any more.
    RunEnded = "run_ended" CONFLICT,
    /// The run has not ended.
    RunNotTerminal = "run_not_terminal" CONFLICT,
    /// The run has ended.
    RunTerminal = "run_terminal" CONFLICT,
    /// The agent has no such schedule, or the key may not see it.
    ScheduleNotFound = "schedule_not_found" NOT_FOUND,
    /// Another run of the session is active or queued.
    SessionBusy = "session_busy" CONFLICT,
    /// The session does not exist, or belongs to another key.
    SessionNotFound = "session_not_found" NOT_FOUND,
    /// The stored record is damaged, or its disk fails.
    StoreDamaged = "store_damaged" INTERNAL_SERVER_ERROR,
    /// The disk is full; runs can only be read and deleted.
    StoreFull = "store_full" SERVICE_UNAVAILABLE,
    /// The store cannot be read or written now; retry after `Retry-After`.
    StoreUnavailable = "store_unavailable" SERVICE_UNAVAILABLE,
    /// The key is missing or unknown.
    Unauthorized = "unauthorized" UNAUTHORIZED,
    /// The candidate of the agent's rollout cannot become its current version; `detail` says why.
    CandidateUnusable = "candidate_unusable" CONFLICT,
    /// A condition of the agent's gate does not hold; `detail` names the evaluation.
    GateFailed = "gate_failed" CONFLICT,
    /// The agent has no rollout, or its candidate has become its current version.
    NoRollout = "no_rollout" CONFLICT,
    /// The run has as many unread messages as it may have.
    TooManyMessages = "too_many_messages" CONFLICT,
    /// The run has as many scores as it may have.
    TooManyScores = "too_many_scores" CONFLICT,
    /// There is no such trigger, or it can start no runs.
    TriggerNotFound = "trigger_not_found" NOT_FOUND,
    /// The run has no such turn.
    TurnNotFound = "turn_not_found" NOT_FOUND,
    /// The body has a field that does not exist.
    UnknownField = "unknown_field" UNPROCESSABLE_ENTITY,
    /// The query has a parameter that does not exist.
    UnknownParameter = "unknown_parameter" BAD_REQUEST,
    /// A budget in money holds for the run, and the model has no price.
    UnpricedModel = "unpriced_model" UNPROCESSABLE_ENTITY,
    /// The body's charset is not UTF-8.
    UnsupportedCharset = "unsupported_charset" UNSUPPORTED_MEDIA_TYPE,
    /// The body is compressed, and not with gzip.
    UnsupportedEncoding = "unsupported_encoding" UNSUPPORTED_MEDIA_TYPE,
    /// The body's content type is not supported.
    UnsupportedMediaType = "unsupported_media_type" UNSUPPORTED_MEDIA_TYPE,
    /// The protocol's version is not supported.
    UnsupportedVersion = "unsupported_version" BAD_REQUEST,
}
