//! `POST /agents/{name}/runs:batch` and `/batches`.

use std::io;
use std::pin::pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine, MAX_LINES, MAX_RECORDING};
use crate::domain::run::now;
use crate::domain::timestamp_text;
use crate::engine::request::StartError;
use crate::store::StoreError;
use crate::store::batches::{BatchChange, BatchKey, BatchQuery, LineQuery};
use crate::store::run_store::RunStore;
use crate::web::auth::Principal;
use crate::web::batches::line;
use crate::web::error::{Problem, quote};
use crate::web::extract::idempotency;
use crate::web::extract::json_body::decode_utf8;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{AgentPath, BatchPath};
use crate::web::extract::provider_keys;
use crate::web::extract::query::{Query, count_up_to};
use crate::web::extract::request_body;
use crate::web::problem_code::ProblemCode;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::routes::runs::{CancelRequest, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE};
use crate::web::state::AppState;
use crate::web::wait;

pub const JSON_LINES: &str = "application/jsonl";
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

/// `POST /agents/{name}/runs:batch`: 202 once the batch with all its lines is in the record.
pub async fn create(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    Query::read(&parts.uri, &[])?;
    provider_keys::refuse(&parts.headers)?;
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
    let key = idempotency::read_key(&parts.headers)?.map(|key| BatchKey {
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
    check_accepts(&state, &batch).await?;
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
    info!(agent = %batch.agent, "Accepted {} with {lines} lines", batch.id);
    respond(&state, &links, StatusCode::ACCEPTED, batch).await
}

/// Whether runs of the agent can be accepted now.
async fn check_accepts(state: &AppState, batch: &Batch) -> Result<(), Problem> {
    state.runner.catalog().current().get(&batch.agent)?;
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
            StatusCode::TOO_MANY_REQUESTS,
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
        let code = ProblemCode::InvalidBody;
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail));
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
        StatusCode::REQUEST_TIMEOUT,
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
        let code = ProblemCode::IdempotencyMismatch;
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail));
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

/// `GET /batches`
pub async fn list(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["limit", "cursor"])?;
    let parse = count_up_to(MAX_PAGE_SIZE);
    let limit = query.parse("limit", "a number from 1 to 200", parse)?;
    let limit = limit.unwrap_or(DEFAULT_PAGE_SIZE);
    let query = BatchQuery {
        owner: principal.owner_filter().map(str::to_owned),
        before: query.parse("cursor", "a cursor of this list", |text| text.parse().ok())?,
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

/// `GET /batches/{id}`
pub async fn get(
    State(state): State<AppState>,
    BatchPath(id): BatchPath,
    principal: Principal,
    links: LinkPrefix,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["wait"])?;
    let timeout = wait::requested_wait(&query, &headers, state.settings.max_wait)?;
    let deadline = Instant::now() + timeout;
    let batch = loop {
        // Before the batch is read, so that its end is not missed.
        let mut finished = pin!(state.feeder.finished());
        finished.as_mut().enable();
        let batch = visible_batch(&state, &principal, &id).await?;
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

/// `POST /batches/{id}/cancel`: 202 while runs have to end, 200 if the batch has ended.
pub async fn cancel(
    State(state): State<AppState>,
    BatchPath(id): BatchPath,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    Query::read(&parts.uri, &[])?;
    let batch = visible_batch(&state, &principal, &id).await?;
    let body = request_body::read(&parts, body, state.settings.body_limits()).await?;
    let reason = body.json::<CancelRequest>()?.into_reason()?;
    let reason = reason.unwrap_or_else(|| "requested by client".to_owned());
    let change = BatchChange::Cancel { reason };
    state.runner.store().change_batch(batch.id, change).await?;
    state.feeder.cancel(batch.id);
    let batch = visible_batch(&state, &principal, &id).await?;
    let status = match batch.finished_at {
        Some(_) => StatusCode::OK,
        None => StatusCode::ACCEPTED,
    };
    Ok(json_response(status, &view(&state, &links, batch).await?))
}

/// `GET /batches/{id}/results`: a line of JSON for each line of the batch, in its order.
pub async fn results(
    State(state): State<AppState>,
    BatchPath(id): BatchPath,
    principal: Principal,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    Query::read(&uri, &[])?;
    let batch = visible_batch(&state, &principal, &id).await?;
    let store = Arc::clone(state.runner.store());
    let is_cancelled = batch.cancel_reason.is_some();
    let links = (*links).to_owned();
    let parts = stream::try_unfold(0, move |from| {
        let (store, links) = (Arc::clone(&store), links.clone());
        async move {
            let query = LineQuery {
                batch: batch.id,
                from,
                limit: READ_LINES,
                only_open: false,
            };
            let part = read_part(store.as_ref(), query, &links, is_cancelled).await;
            part.map_err(io::Error::other)
        }
    });
    let content_type = [(CONTENT_TYPE, HeaderValue::from_static(JSON_LINES))];
    Ok((content_type, Body::from_stream(parts)).into_response())
}

/// A part of the results with the number of the next line; `None` after the last one.
async fn read_part(
    store: &dyn RunStore,
    query: LineQuery,
    links: &str,
    is_cancelled: bool,
) -> Result<Option<(Bytes, u32)>, StoreError> {
    let lines = store.batch_lines(query).await?;
    let mut part = Vec::new();
    let mut next = query.from;
    for line in lines {
        next = line.index + 1;
        write_result(store, &line, links, is_cancelled, &mut part).await?;
        if part.len() >= MAX_PART_BYTES {
            break;
        }
    }
    Ok((!part.is_empty()).then(|| (part.into(), next)))
}

async fn write_result(
    store: &dyn RunStore,
    line: &BatchLine,
    links: &str,
    is_cancelled: bool,
    part: &mut Vec<u8>,
) -> Result<(), StoreError> {
    let run = match line.run {
        Some(id) => store.run(id).await?,
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

async fn visible_batch(
    state: &AppState,
    principal: &Principal,
    id: &str,
) -> Result<Batch, Problem> {
    let found = match id.parse() {
        Ok(id) => state.runner.store().batch(id).await?,
        Err(()) => None,
    };
    found
        .filter(|batch| can_see(principal, batch))
        .ok_or_else(|| {
            let detail = format!("there is no batch {}", quote(id));
            Problem::new(StatusCode::NOT_FOUND, ProblemCode::BatchNotFound, detail)
        })
}

fn can_see(principal: &Principal, batch: &Batch) -> bool {
    let owner = principal.owner_filter();
    let is_own = owner.is_none_or(|owner| batch.owner.as_deref() == Some(owner));
    is_own && principal.can_use_agent(&batch.agent)
}
