//! Runs as tasks (the extension `io.modelcontextprotocol/tasks`): the id of a task is that of its run.

use std::time::Duration;

use rmcp::model::{
    CancelTaskParams, DetailedTask, GetTaskParams, GetTaskResult, JsonObject, Task, TaskAckResult,
    TaskPayload, TaskStatus, UpdateTaskParams,
};
use serde_json::Value;

use crate::config::KeyScope;
use crate::domain::counted::counted;
use crate::domain::run::{Run, Status};
use crate::domain::timestamp_text;
use crate::domain::waiting_for::WaitingFor;
use crate::web::auth::Principal;
use crate::web::clients::mcp::approvals::Forms;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, RpcRequest};
use crate::web::clients::mcp::{approvals, call_result};
use crate::web::error::Problem;
use crate::web::extract::path::{check_may_change, visible_run_id};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

/// How often a client should look at a task.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The reason of a cancellation by `tasks/cancel`.
const CANCELLED: &str = "cancelled by its MCP client";

/// `tasks/get`
pub async fn get(
    state: &AppState,
    principal: &Principal,
    caller: &Caller,
    request: &RpcRequest,
) -> Result<GetTaskResult, RpcError> {
    caller.require_tasks()?;
    principal.require_scope(KeyScope::Read)?;
    let params: GetTaskParams = request.params().await?;
    let run = find(state, principal, &params.task_id).await?;
    Ok(state_of(state, &run, Forms::new(caller, principal)).await?)
}

/// The task with its result, or with what it needs.
pub async fn state_of(
    state: &AppState,
    run: &Run,
    forms: Option<Forms>,
) -> Result<GetTaskResult, Problem> {
    let payload = payload(state, run, forms).await?;
    let mut result = GetTaskResult::new(DetailedTask::new(task(state, run), payload));
    result.meta = Some(call_result::run_meta(run));
    Ok(result)
}

/// `tasks/update`: the client's decisions on pending approvals.
pub async fn update(
    state: &AppState,
    principal: &Principal,
    caller: &Caller,
    request: &RpcRequest,
) -> Result<TaskAckResult, RpcError> {
    caller.require_tasks()?;
    principal.require_any_scope(&[KeyScope::Run, KeyScope::Approve])?;
    let params: UpdateTaskParams = request.params().await?;
    let run = find(state, principal, &params.task_id).await?;
    approvals::apply(state, principal, &run, &params.input_responses).await?;
    Ok(TaskAckResult::new())
}

/// `tasks/cancel`: the run's tree is cancelled.
pub async fn cancel(
    state: &AppState,
    principal: &Principal,
    caller: &Caller,
    request: &RpcRequest,
) -> Result<TaskAckResult, RpcError> {
    caller.require_tasks()?;
    principal.require_scope(KeyScope::Cancel)?;
    let params: CancelTaskParams = request.params().await?;
    let run = find(state, principal, &params.task_id).await?;
    check_may_change(principal, state, run.id).await?;
    let reason = Some(CANCELLED.to_owned());
    let cancelled = state.runner.cancel(run.id, reason).await;
    cancelled.map_err(Problem::from)?;
    Ok(TaskAckResult::new())
}

/// The run of a task that the key may see.
pub async fn find(state: &AppState, principal: &Principal, id: &str) -> Result<Run, Problem> {
    let id = visible_run_id(principal, state, id).await?;
    require_run(state, id).await
}

/// What every answer about the task has.
pub fn task(state: &AppState, run: &Run) -> Task {
    let updated_at = run.finished_at.or(run.started_at).unwrap_or(run.created_at);
    let mut task = Task::new(
        run.id.to_string(),
        TaskStatus::Working,
        timestamp_text::text(run.created_at),
        timestamp_text::text(updated_at),
    );
    task.status_message = status_message(run);
    task.ttl_ms = ttl_ms(state, run);
    task.poll_interval_ms = u64::try_from(POLL_INTERVAL.as_millis()).ok();
    task
}

async fn payload(
    state: &AppState,
    run: &Run,
    forms: Option<Forms>,
) -> Result<TaskPayload, Problem> {
    let object = |value: Result<Value, serde_json::Error>| match value {
        Ok(Value::Object(object)) => Ok::<JsonObject, _>(object),
        _ => Err(Problem::internal("a task's result cannot be serialized")),
    };
    let forms = forms.filter(|_| !run.pending_inputs.is_empty());
    Ok(match run.status {
        Status::Completed | Status::Failed => TaskPayload::Completed {
            result: object(serde_json::to_value(call_result::from_run(run, true)))?,
        },
        Status::Cancelled => TaskPayload::Cancelled,
        Status::Queued | Status::Running | Status::Waiting | Status::Cancelling => match forms {
            Some(forms) if run.status == Status::Waiting => TaskPayload::InputRequired {
                input_requests: approvals::input_requests(state, run, forms).await?,
            },
            _ => TaskPayload::Working,
        },
    })
}

fn status_message(run: &Run) -> Option<String> {
    Some(match run.status {
        Status::Completed => return None,
        Status::Failed => run.error.as_ref()?.message.clone(),
        Status::Cancelled => run.cancel_reason.clone()?,
        Status::Waiting if !run.pending_inputs.is_empty() => {
            if let Some((_, question)) = run.pending_questions().next() {
                return Some(format!("waits for an answer: {}", question.text));
            }
            let tools = run.pending_approvals();
            let tools: Vec<&str> = tools.map(|it| it.request.tool.as_str()).collect();
            format!("waits for approval of {}", tools.join(", "))
        }
        Status::Waiting if run.waiting_for == Some(WaitingFor::Resume) => "paused".to_owned(),
        Status::Running => format!("running, {} so far", counted(run.turns, "turn")),
        status => status.as_str().to_owned(),
    })
}

/// Milliseconds from the run's creation to its deletion; `None` if it is kept for ever or has not ended.
fn ttl_ms(state: &AppState, run: &Run) -> Option<u64> {
    let retention = state.settings.retention;
    let limit = match run.status {
        Status::Completed => retention.completed,
        Status::Failed => retention.failed,
        Status::Cancelled => retention.cancelled,
        Status::Queued | Status::Running | Status::Waiting | Status::Cancelling => return None,
    };
    let life = run.finished_at?.as_millisecond() - run.created_at.as_millisecond();
    let kept = u64::try_from(limit.age?.as_millis()).ok()?;
    u64::try_from(life).ok()?.checked_add(kept)
}
