//! `subscriptions/listen`: notifications about tasks, until all of them have ended, the client closes the stream, or the daemon
//! stops. The server keeps nothing of a subscription: a client that reconnects gets the current state of each task first.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use rmcp::model::{ErrorCode, RequestId};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::warn;

use crate::config::KeyScope;
use crate::domain::run::Run;
use crate::engine::runner::Runner;
use crate::web::auth::Principal;
use crate::web::clients::mcp::approvals::Forms;
use crate::web::clients::mcp::call_stream::push_message;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, RpcRequest};
use crate::web::clients::mcp::tasks;
use crate::web::error::Problem;
use crate::web::response::stream_driver::{COMMENT, HEARTBEAT_INTERVAL};
use crate::web::state::AppState;

/// Most tasks of one subscription.
const MAX_TASKS: usize = 100;
/// How long one look at a task waits, and the pause after one that found nothing new.
const WAIT: Duration = Duration::from_secs(3600);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";

#[derive(Deserialize)]
struct ListenParams {
    notifications: Filter,
}

/// What the client wants to hear of. Other kinds of notifications are not acknowledged.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filter {
    #[serde(default)]
    task_ids: Vec<String>,
}

pub struct TaskSubscription {
    state: AppState,
    request: RequestId,
    forms: Option<Forms>,
    frames: String,
    /// `None` if the run was deleted.
    changes: FuturesUnordered<BoxFuture<'static, Option<Arc<Run>>>>,
    has_ended: bool,
}

impl TaskSubscription {
    /// Reads the request. Tasks that the key may not see are not acknowledged.
    pub async fn new(
        state: &AppState,
        principal: &Principal,
        caller: &Caller,
        request: &RpcRequest,
    ) -> Result<Self, RpcError> {
        principal.require_scope(KeyScope::Read)?;
        let ListenParams { notifications } = request.params().await?;
        let ids = notifications.task_ids;
        if !ids.is_empty() {
            caller.require_tasks()?;
        }
        if ids.len() > MAX_TASKS {
            let message = format!("a subscription has at most {MAX_TASKS} tasks");
            return Err(RpcError::new(ErrorCode::INVALID_PARAMS, message));
        }
        let mut subscription = Self {
            state: state.clone(),
            request: request.id.clone(),
            forms: Forms::new(caller, principal),
            frames: String::new(),
            changes: FuturesUnordered::new(),
            has_ended: false,
        };
        let mut runs = Vec::new();
        for id in &ids {
            match tasks::find(state, principal, id).await {
                Ok(run) => runs.push(Arc::new(run)),
                Err(problem) if problem.status().is_client_error() => {}
                Err(problem) => return Err(problem.into()),
            }
        }
        let accepted: Vec<String> = runs.iter().map(|run| run.id.to_string()).collect();
        let filter = match accepted.is_empty() {
            true => json!({}),
            false => json!({ "taskIds": accepted }),
        };
        let params = json!({ "notifications": filter });
        subscription.notify("notifications/subscriptions/acknowledged", params);
        for run in runs {
            subscription.push_task(&run).await?;
            subscription.watch(run);
        }
        Ok(subscription)
    }

    /// The next frames; `None` at the end. Not cancel-safe.
    pub async fn next(&mut self) -> Option<String> {
        while self.frames.is_empty() && !self.has_ended {
            if self.changes.is_empty() {
                self.end();
                break;
            }
            tokio::select! {
                biased;
                () = self.state.closing.cancelled() => self.end(),
                Some(changed) = self.changes.next() => {
                    let Some(run) = changed else { continue };
                    if let Err(problem) = self.push_task(&run).await {
                        warn!(run.id = %run.id, "No notification about {}: {}", run.id, problem.detail());
                    }
                    self.watch(run);
                }
                () = tokio::time::sleep(HEARTBEAT_INTERVAL) => self.frames.push_str(COMMENT),
            }
        }
        let frames = std::mem::take(&mut self.frames);
        Some(frames).filter(|frames| !frames.is_empty())
    }

    fn watch(&self, run: Arc<Run>) {
        if !run.status.is_terminal() {
            let change = next_change(self.state.runner.clone(), run);
            self.changes.push(Box::pin(change));
        }
    }

    async fn push_task(&mut self, run: &Run) -> Result<(), Problem> {
        let task = tasks::state_of(&self.state, run, self.forms).await?;
        let params = serde_json::to_value(task);
        let params = params.map_err(|error| Problem::internal(error.to_string()))?;
        self.notify("notifications/tasks", params);
        Ok(())
    }

    fn notify(&mut self, method: &str, mut params: Value) {
        params["_meta"][SUBSCRIPTION_ID] = json!(self.request);
        let message = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        push_message(&mut self.frames, &message);
    }

    /// Says that nothing more follows.
    fn end(&mut self) {
        self.has_ended = true;
        let meta = json!({ SUBSCRIPTION_ID: self.request });
        let result = json!({ "resultType": "complete", "_meta": meta });
        let response = json!({ "jsonrpc": "2.0", "id": self.request, "result": result });
        push_message(&mut self.frames, &response);
    }
}

/// The run once it has ended, or waits for a person, or no longer does.
async fn next_change(runner: Runner, run: Arc<Run>) -> Option<Arc<Run>> {
    loop {
        let seen = run.waits_for_person().then_some(&*run);
        match runner.wait_for_end_or_person(run.id, seen, WAIT).await {
            Ok(Some(found)) if *found != *run => return Some(found),
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(error) => {
                warn!(run.id = %run.id, "Cannot wait for {}, trying again: {error}", run.id);
            }
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
