//! `POST /agents/{name}/runs:batch` and `/batches`.

use std::io;
use std::pin::pin;

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::catalog::LoadError;
use crate::config::KeyScope::{Cancel, Read, Run};
use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine, MAX_LINES, MAX_RECORDING};
use crate::domain::counted::counted;
use crate::domain::run::now;
use crate::domain::timestamp_text;
use crate::engine::request::StartError;
use crate::engine::runner::Runner;
use crate::store::StoreError;
use crate::store::batches::{BatchChange, BatchKey, BatchQuery, LineQuery};
use crate::store::run_store::RunStore;
use crate::web::auth::Principal;
use crate::web::batches::line;
use crate::web::body::json_body::decode_utf8;
use crate::web::body::request_body;
use crate::web::error::{Problem, quote};
use crate::web::extract::body::JsonBody;
use crate::web::extract::idempotency::{self, RepeatKey};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{AgentPath, Params, unknown_agent};
use crate::web::extract::provider_keys::NoProviderKeys;
use crate::web::extract::query::{Cursor, NoQuery, Query};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    self, AgentInvalid, BatchNotFound, Draining, InvalidBody, QueueFull,
};
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{Input, Route, get, post};
use crate::web::routes::runs::{CancelRequest, PageSize};
use crate::web::state::AppState;
use crate::web::wait::{Prefer, Seconds};

const JSON_LINES: &str = "application/jsonl";
/// Lines that one transaction adds, unless they are long.
const MAX_WRITE_LINES: usize = 200;
const MAX_WRITE_BYTES: usize = 1 << 20;
/// Bytes of one part of the results.
const MAX_PART_BYTES: usize = 1 << 20;
/// Lines that one read of the results returns.
const READ_LINES: usize = 50;
/// A page of batches ends after this many lines, whose runs are looked at.
const MAX_COUNTED_LINES: u64 = 20_000;
/// Batches of one key that have not ended.
const MAX_UNFINISHED: usize = 100;
const RETRY_SECONDS: u64 = 10;
const KEY_RETENTION: SignedDuration = SignedDuration::from_hours(24);

pub fn routes() -> Vec<Route> {
    vec![
        post("/agents/{name}/runs:batch", [Run], create)
            .describe("create_batch", "Starts many runs of an agent")
            .details(
                "Each line is the JSON body of a request for a run (`RunRequest`); blank lines are left out. The \
                 response comes once all lines are in the record. Their runs start a few at a time, as the queue has \
                 space. A line that no run can start for rejects no other: its result holds the problem.",
            )
            .tag("batches")
            .lines_body(
                "One request for a run on each line, 1 to 10000 lines.",
                "{\"input\": \"Sum up ticket 1\"}\n{\"input\": \"Sum up ticket 2\", \"labels\": {\"team\": \"blue\"}}\n",
            )
            .response::<BatchView>(
                200,
                "The batch of an earlier request with this `Idempotency-Key`; it has ended.",
            )
            .example(example())
            .response::<BatchView>(202, "The batch is accepted.")
            .example(example())
            .response_header(&[200, 202], "Location", "The URL of the batch.")
            .problems(&[InvalidBody, AgentInvalid, QueueFull, Draining]),
        get("/batches", [Read], list)
            .describe("list_batches", "Lists batches")
            .details("The newest batch is first. A key sees its own, a key with the scope `admin` all.")
            .response::<BatchesPage>(200, "The page.")
            .example(json!({"data": [example()], "next_cursor": null})),
        get("/batches/{id}", [Read], get_batch)
            .describe("get_batch", "Returns a batch with the states of its lines")
            .response::<BatchView>(200, "The batch.")
            .example(example()),
        get("/batches/{id}/results", [Read], results)
            .describe("get_batch_results", "Returns the results of a batch")
            .details(
                "One JSON object on each line, in the order of the batch: `index` (from 0), `status` (that of the \
                 run, `pending`, `rejected`, `cancelled` or `deleted`), `run` (null without one) and `problem` (why \
                 no run could start; else null). A batch that has not ended shows its lines as they are.",
            )
            .text_response(200, JSON_LINES, "The results.")
            .example(example_results()),
        post("/batches/{id}/cancel", [Cancel], cancel)
            .describe("cancel_batch", "Cancels a batch")
            .details("No more runs start, and those that have started are cancelled.")
            .request_example("reason", "With a reason", json!({"reason": "no longer needed"}))
            .response::<BatchView>(200, "The batch has ended.")
            .example(example())
            .response::<BatchView>(202, "Runs of the batch have to end.")
            .example(example()),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Maximum batches of a page.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<BatchId>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct WaitedQuery {
    /// Seconds to wait for the end of the batch, at most `server.max_wait`.
    wait: Option<Seconds>,
}

/// The batch of a path. Responds 404 if there is none that the principal may see.
struct VisibleBatch(Batch);

impl Input for VisibleBatch {
    fn describe(route: Route) -> Route {
        route.path::<BatchId>("id", "The batch's id.", BatchNotFound)
    }
}

impl FromRequestParts<AppState> for VisibleBatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let principal = Principal::from_parts(parts, state)?;
        let Params(id) = Params::<String>::from_request_parts(parts, state).await?;
        let found = match id.parse() {
            Ok(id) => state.runner.store().batch(id).await?,
            Err(()) => None,
        };
        found
            .filter(|batch| can_see(&principal, batch))
            .map(Self)
            .ok_or_else(|| batch_not_found(&id))
    }
}

fn batch_not_found(id: &str) -> Problem {
    let detail = format!("there is no batch {}", quote(id));
    Problem::new(ProblemCode::BatchNotFound, detail)
}

/// The batch as it is now.
async fn read_again(state: &AppState, id: BatchId) -> Result<Batch, Problem> {
    let batch = state.runner.store().batch(id).await?;
    batch.ok_or_else(|| batch_not_found(&id.to_string()))
}

/// A batch with the states of its lines.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Batch")]
pub struct BatchView {
    /// The id of the batch.
    id: BatchId,
    /// The agent of all its runs.
    agent: String,
    /// What the batch is doing.
    status: BatchStatus,
    /// The number of its lines.
    lines: u64,
    /// How many lines have which state.
    counts: BatchCounts,
    /// When it was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    created_at: Timestamp,
    /// When each line had its result; null until then.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    finished_at: Option<Timestamp>,
    /// Why it was cancelled.
    cancel_reason: Option<String>,
    /// Routes of the batch.
    links: BatchLinks,
}

/// What a batch is doing.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BatchStatus {
    /// Runs start or have not ended.
    Running,
    /// No more runs start, and those that have started are cancelled.
    Cancelling,
    /// Each line has its result.
    Completed,
    /// It was cancelled, and its runs have ended.
    Cancelled,
}

/// Routes of a batch.
#[derive(Serialize, JsonSchema)]
pub struct BatchLinks {
    /// The batch.
    #[serde(rename = "self")]
    itself: String,
    /// Its results, as lines of JSON.
    results: String,
    /// POST cancels it.
    cancel: String,
}

/// A page of batches, newest first.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "BatchPage")]
pub struct BatchesPage {
    /// The batches.
    data: Vec<BatchView>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<BatchId>,
}

/// The result of a line.
#[derive(Serialize)]
struct LineResult<'a> {
    index: u32,
    status: &'a str,
    run: Option<RunView<'a>>,
    problem: Option<&'a RawValue>,
}

impl BatchView {
    fn new(batch: Batch, mut counts: BatchCounts, links: &str) -> Self {
        let status = match (&batch.cancel_reason, batch.finished_at) {
            (None, None) => BatchStatus::Running,
            (None, Some(_)) => BatchStatus::Completed,
            (Some(_), None) => BatchStatus::Cancelling,
            (Some(_), Some(_)) => BatchStatus::Cancelled,
        };
        if batch.cancel_reason.is_some() {
            counts.cancelled += std::mem::take(&mut counts.pending);
        }
        let itself = format!("{links}/batches/{}", batch.id);
        Self {
            id: batch.id,
            agent: batch.agent,
            status,
            lines: batch.lines,
            counts,
            created_at: batch.created_at,
            finished_at: batch.finished_at,
            cancel_reason: batch.cancel_reason,
            links: BatchLinks {
                results: format!("{itself}/results"),
                cancel: format!("{itself}/cancel"),
                itself,
            },
        }
    }
}

/// 202 once the batch with all its lines is in the record.
async fn create(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    links: LinkPrefix,
    (_, _): (NoQuery, NoProviderKeys),
    RepeatKey(key): RepeatKey,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let owner = principal.key_name().map(str::to_owned);
    let limits = state.settings.batch_limits();
    let bytes = request_body::read_bytes(&parts, body, limits).await?;
    let batch = Batch {
        id: BatchId::new(),
        agent: agent.clone(),
        owner: owner.clone(),
        lines: 0,
        created_at: now(),
        finished_at: None,
        cancel_reason: None,
        body_hash: idempotency::fingerprint(b"", &bytes),
    };
    let key = key.map(|key| BatchKey {
        owner,
        agent,
        key,
        expires_at: now().checked_add(KEY_RETENTION).unwrap_or(Timestamp::MAX),
    });
    if let Some(key) = &key
        && let Some(earlier) = state.runner.store().batch_with_key(key.clone()).await?
    {
        return replay(&state, &links, &batch, earlier).await;
    }
    check_accepts(&principal, &state, &batch).await?;
    let store = state.runner.store();
    let lines = timeout(MAX_RECORDING, add_lines(&state, &batch, &bytes)).await;
    let lines = match lines.unwrap_or_else(|_| Err(recording_timeout())) {
        Ok(lines) => lines,
        Err(problem) => {
            remove_lines(store.as_ref(), batch.id).await;
            return Err(problem);
        }
    };
    let batch = Batch { lines, ..batch };
    // After an error its lines stay for a while: the batch may have been accepted nevertheless.
    if !store.accept_batch(batch.clone(), key.clone()).await? {
        // Another request with the same key was quicker.
        remove_lines(store.as_ref(), batch.id).await;
        let earlier = match key {
            Some(key) => store.batch_with_key(key).await?,
            None => None,
        };
        let earlier = earlier.ok_or_else(|| Problem::internal("a key without a batch"))?;
        return replay(&state, &links, &batch, earlier).await;
    }
    state.feeder.wake();
    info!(agent = %batch.agent, "Accepted {} with {}", batch.id, counted(lines, "line"));
    respond(&state, &links, StatusCode::ACCEPTED, batch).await
}

/// Whether runs of the agent can be accepted now.
async fn check_accepts(
    principal: &Principal,
    state: &AppState,
    batch: &Batch,
) -> Result<(), Problem> {
    if let Err(error) = state.runner.catalog().current().get(&batch.agent) {
        return Err(match error {
            LoadError::NotFound(agent) => unknown_agent(principal, state, &agent),
            error => error.into(),
        });
    }
    if state.runner.is_draining() {
        return Err(StartError::Draining.into());
    }
    if let Some(error) = state.runner.store_error() {
        return Err(error.into());
    }
    let unfinished = state.runner.store().unfinished_batches().await?;
    let own = unfinished.iter().filter(|it| it.owner == batch.owner);
    match own.count() >= MAX_UNFINISHED {
        true => Err(Problem::new(
            ProblemCode::QueueFull,
            format!("{MAX_UNFINISHED} batches have not ended; try again later"),
        )
        .with_retry_after(RETRY_SECONDS)),
        false => Ok(()),
    }
}

/// Adds the lines of a body to the record; returns their number. Blank lines are left out.
async fn add_lines(state: &AppState, batch: &Batch, bytes: &Bytes) -> Result<u64, Problem> {
    let text = decode_utf8(bytes)?;
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|it| !it.is_empty())
        .collect();
    if lines.is_empty() || lines.len() > MAX_LINES {
        let detail = format!(
            "a batch has 1 to {MAX_LINES} lines, each the JSON body of a request for a run, but this one has {}",
            lines.len()
        );
        return Err(Problem::new(ProblemCode::InvalidBody, detail));
    }
    let store = state.runner.store();
    let (mut part, mut part_bytes) = (Vec::new(), 0);
    for (index, text) in (0..).zip(&lines) {
        tokio::task::consume_budget().await;
        let owner = batch.owner.as_deref();
        let checked = Box::pin(line::run_request(
            text,
            &batch.agent,
            owner,
            &state.settings,
        ))
        .await;
        let problem = checked.err().map(|problem| line::problem_json(&problem));
        part_bytes += text.len();
        part.push(BatchLine {
            index,
            body: problem.is_none().then(|| (*text).to_owned()),
            run: None,
            problem,
        });
        if part.len() >= MAX_WRITE_LINES || part_bytes >= MAX_WRITE_BYTES {
            store
                .add_batch_lines(batch.id, std::mem::take(&mut part))
                .await?;
            part_bytes = 0;
        }
    }
    store.add_batch_lines(batch.id, part).await?;
    Ok(lines.len() as u64)
}

/// Removes the lines of a batch that is not accepted.
async fn remove_lines(store: &dyn RunStore, batch: BatchId) {
    if let Err(error) = store.remove_unaccepted_lines(batch).await {
        warn!(error = %error, "The lines of {batch}, which was not accepted, are removed later: {error}");
    }
}

fn recording_timeout() -> Problem {
    Problem::new(
        ProblemCode::RequestTimeout,
        format!(
            "the lines were not recorded within {} s; try again later",
            MAX_RECORDING.as_secs()
        ),
    )
}

/// The batch that an earlier request with the same key has made.
async fn replay(
    state: &AppState,
    links: &str,
    batch: &Batch,
    earlier: Batch,
) -> Result<Response, Problem> {
    if earlier.body_hash != batch.body_hash {
        let detail = format!(
            "this Idempotency-Key has made {} of another body; send a new key for a new batch",
            earlier.id
        );
        return Err(Problem::new(ProblemCode::IdempotencyMismatch, detail));
    }
    let status = match earlier.finished_at {
        Some(_) => StatusCode::OK,
        None => StatusCode::ACCEPTED,
    };
    let response = respond(state, links, status, earlier).await?;
    Ok(idempotency::mark_replayed(response))
}

async fn respond(
    state: &AppState,
    links: &str,
    status: StatusCode,
    batch: Batch,
) -> Result<Response, Problem> {
    let view = view(state, links, batch).await?;
    let location = HeaderValue::try_from(&view.links.itself)
        .map_err(|error| Problem::internal(format!("no Location: {error}")))?;
    let mut response = json_response(status, &view);
    response.headers_mut().insert(LOCATION, location);
    Ok(response)
}

async fn view(state: &AppState, links: &str, batch: Batch) -> Result<BatchView, Problem> {
    let counts = state.runner.store().batch_counts(batch.id).await?;
    Ok(BatchView::new(batch, counts, links))
}

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let limit = query.limit.0;
    let query = BatchQuery {
        owner: principal.owner_filter().map(str::to_owned),
        before: query.cursor.map(|Cursor(id)| id),
        limit: limit + 1,
    };
    let batches = state.runner.store().batches(query).await?;
    let (mut data, mut counted_lines, mut last, mut has_more) = (Vec::new(), 0, None, false);
    for (position, batch) in batches.into_iter().enumerate() {
        has_more = position == limit || counted_lines >= MAX_COUNTED_LINES;
        if has_more {
            break;
        }
        last = Some(batch.id);
        if can_see(&principal, &batch) {
            counted_lines += batch.lines;
            data.push(view(&state, &links, batch).await?);
        }
    }
    let next_cursor = last.filter(|_| has_more);
    Ok(json_response(
        StatusCode::OK,
        &BatchesPage { data, next_cursor },
    ))
}

async fn get_batch(
    State(state): State<AppState>,
    links: LinkPrefix,
    Query(WaitedQuery { wait }): Query<WaitedQuery>,
    prefer: Prefer,
    VisibleBatch(batch): VisibleBatch,
) -> Result<Response, Problem> {
    let deadline = Instant::now() + prefer.timeout(wait, state.settings.max_wait)?;
    let batch = loop {
        // Before the batch is read, so that its end is not missed.
        let mut finished = pin!(state.feeder.finished());
        finished.as_mut().enable();
        let batch = read_again(&state, batch.id).await?;
        if batch.finished_at.is_some() || state.closing.is_cancelled() {
            break batch;
        }
        tokio::select! {
            () = finished => {}
            () = state.runner.leadership().poll() => {}
            () = state.closing.cancelled() => {}
            () = tokio::time::sleep_until(deadline) => break batch,
        }
    };
    Ok(json_response(
        StatusCode::OK,
        &view(&state, &links, batch).await?,
    ))
}

/// 202 while runs have to end, 200 if the batch has ended.
async fn cancel(
    State(state): State<AppState>,
    links: LinkPrefix,
    _: NoQuery,
    VisibleBatch(batch): VisibleBatch,
    JsonBody(request): JsonBody<CancelRequest>,
) -> Result<Response, Problem> {
    let reason = request.into_reason()?;
    let reason = reason.unwrap_or_else(|| "requested by client".to_owned());
    let change = BatchChange::Cancel { reason };
    state.runner.store().change_batch(batch.id, change).await?;
    state.feeder.cancel(batch.id);
    let batch = read_again(&state, batch.id).await?;
    let status = match batch.finished_at {
        Some(_) => StatusCode::OK,
        None => StatusCode::ACCEPTED,
    };
    Ok(json_response(status, &view(&state, &links, batch).await?))
}

async fn results(
    State(state): State<AppState>,
    links: LinkPrefix,
    _: NoQuery,
    VisibleBatch(batch): VisibleBatch,
) -> Result<Response, Problem> {
    let is_cancelled = batch.cancel_reason.is_some();
    let links = (*links).to_owned();
    let parts = stream::try_unfold(0, move |from| {
        let (runner, links) = (state.runner.clone(), links.clone());
        async move {
            let query = LineQuery {
                batch: batch.id,
                from,
                limit: READ_LINES,
                only_open: false,
            };
            let part = read_part(&runner, query, &links, is_cancelled).await;
            part.map_err(io::Error::other)
        }
    });
    let content_type = [(CONTENT_TYPE, HeaderValue::from_static(JSON_LINES))];
    Ok((content_type, Body::from_stream(parts)).into_response())
}

/// A part of the results with the number of the next line; `None` after the last one.
async fn read_part(
    runner: &Runner,
    query: LineQuery,
    links: &str,
    is_cancelled: bool,
) -> Result<Option<(Bytes, u32)>, StoreError> {
    let lines = runner.store().batch_lines(query).await?;
    let mut part = Vec::new();
    let mut next = query.from;
    for line in lines {
        next = line.index + 1;
        write_result(runner, &line, links, is_cancelled, &mut part).await?;
        if part.len() >= MAX_PART_BYTES {
            break;
        }
    }
    Ok((!part.is_empty()).then(|| (part.into(), next)))
}

async fn write_result(
    runner: &Runner,
    line: &BatchLine,
    links: &str,
    is_cancelled: bool,
    part: &mut Vec<u8>,
) -> Result<(), StoreError> {
    let run = match line.run {
        Some(id) => runner.run(id).await?,
        None => None,
    };
    let problem: Option<Box<RawValue>> = line
        .problem
        .as_deref()
        .and_then(|problem| serde_json::from_str(problem).ok());
    let status = match (&run, line.run, &problem) {
        (Some(run), _, _) => run.status.as_str(),
        (None, Some(_), _) => "deleted",
        (None, None, Some(_)) => "rejected",
        (None, None, None) if is_cancelled => "cancelled",
        (None, None, None) => "pending",
    };
    let result = LineResult {
        index: line.index,
        status,
        run: run.as_ref().map(|run| RunView::new(run, links, now())),
        problem: problem.as_deref(),
    };
    serde_json::to_writer(&mut *part, &result)
        .map_err(|error| StoreError::Backend(format!("a result cannot be serialized: {error}")))?;
    part.push(b'\n');
    Ok(())
}

fn can_see(principal: &Principal, batch: &Batch) -> bool {
    let owner = principal.owner_filter();
    let is_own = owner.is_none_or(|owner| batch.owner.as_deref() == Some(owner));
    is_own && principal.can_use_agent(&batch.agent)
}

const EXAMPLE_ID: &str = "batch_019a1f3c-c000-7e43-8f88-6c419d0e1f2a";

fn example() -> Value {
    json!({
        "id": EXAMPLE_ID, "agent": "planner", "status": "running", "lines": 3,
        "counts": {
            "pending": 1, "queued": 0, "running": 1, "waiting": 0, "cancelling": 0, "completed": 0, "failed": 0,
            "cancelled": 0, "rejected": 1, "deleted": 0,
        },
        "created_at": "2026-03-01T09:30:00.000Z", "finished_at": null, "cancel_reason": null,
        "links": {
            "self": format!("/batches/{EXAMPLE_ID}"), "results": format!("/batches/{EXAMPLE_ID}/results"),
            "cancel": format!("/batches/{EXAMPLE_ID}/cancel"),
        },
    })
}

fn example_results() -> String {
    let lines = [
        json!({"index": 0, "status": "completed", "run": examples::run(), "problem": null}),
        json!({"index": 1, "status": "pending", "run": null, "problem": null}),
    ];
    lines.map(|line| format!("{line}\n")).concat()
}
