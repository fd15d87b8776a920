//! The response: the events of a run until it ends, or needs its client.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use crate::domain::run::{Run, Status};
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::store::Step;
use crate::web::clients::ag_ui::transcript::Transcript;
use crate::web::clients::ag_ui::usage::Baseline;
use crate::web::clients::ag_ui::{events, interrupts};
use crate::web::clients::run_wait::{CancelOnDrop, wait_for_stop};
use crate::web::error::Problem;
use crate::web::extract::request_body::parse_large;
use crate::web::routes::approvals;
use crate::web::state::AppState;

const COMMENT: &str = ":\n\n";
/// A comment is sent after this time without an event, because proxies close idle connections.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// The request that the response is for.
pub struct AgUiRequest {
    pub thread: String,
    /// The client's id of the request.
    pub id: String,
    pub messages: Box<RawValue>,
    pub baseline: Baseline,
    /// Whether the client's key may approve calls with other arguments.
    pub may_change_arguments: bool,
}

pub struct AgUiStream {
    state: AppState,
    request: AgUiRequest,
    run: Arc<Run>,
    subscription: Option<Subscription>,
    stopped: BoxFuture<'static, Arc<Run>>,
    transcript: Transcript,
    queue: VecDeque<Value>,
    guard: CancelOnDrop,
    heartbeat_at: Instant,
    has_ended: bool,
}

impl AgUiStream {
    /// `recorded` has the steps that earlier responses have shown; none for a new run.
    pub fn new(
        state: &AppState,
        request: AgUiRequest,
        run: Arc<Run>,
        subscription: Option<Subscription>,
        recorded: &[Step],
    ) -> Self {
        let mut transcript = Transcript::new(run.id);
        transcript.skip_recorded(recorded);
        let started = events::run_started(&request.thread, &request.id, &run);
        let stopped = wait_for_stop(state.runner.clone(), Arc::clone(&run), true);
        Self {
            state: state.clone(),
            subscription,
            stopped: Box::pin(stopped),
            transcript,
            queue: VecDeque::from([started]),
            guard: CancelOnDrop::new(state, run.id),
            heartbeat_at: Instant::now() + HEARTBEAT_INTERVAL,
            has_ended: false,
            request,
            run,
        }
    }

    /// Ends the response with what this record of the run has come to.
    pub fn stop_at(&mut self, run: Arc<Run>) {
        self.stopped = Box::pin(std::future::ready(run));
    }

    /// The next bytes; `None` at the end. Not cancel-safe.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if !self.queue.is_empty() {
                self.heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
                let events = self.queue.drain(..);
                return Some(events.map(|event| format!("data: {event}\n\n")).collect());
            }
            if self.has_ended {
                return None;
            }
            tokio::select! {
                biased;
                () = self.state.closing.cancelled() => self.on_closing(),
                event = next_event(&mut self.subscription) => self.on_event(event),
                run = &mut self.stopped => self.finish(&run).await,
                () = tokio::time::sleep_until(self.heartbeat_at) => {
                    self.heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
                    return Some(COMMENT.to_owned());
                }
            }
        }
    }

    fn on_event(&mut self, event: Result<StreamEvent, RecvError>) {
        match event {
            Ok(StreamEvent::Stored(event)) if event.run_id == self.run.id => {
                self.transcript.on_event(&event, &mut self.queue);
            }
            Ok(StreamEvent::Ephemeral { run_id, name, data }) if run_id == self.run.id => {
                self.transcript.on_delta(name, &data, &mut self.queue);
            }
            // What is missing comes from the record at the end.
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => self.subscription = None,
        }
    }

    fn on_closing(&mut self) {
        self.guard.disarm();
        self.has_ended = true;
        self.transcript.close_text(&mut self.queue);
        let message = format!(
            "the daemon is stopping; {} continues after its restart",
            self.run.id
        );
        self.queue
            .push_back(events::run_error(&message, "draining"));
    }

    async fn finish(&mut self, run: &Run) {
        self.guard.disarm();
        self.has_ended = true;
        // Events that were published before the run stopped.
        while let Some(event) = self.subscription.as_mut().and_then(|it| it.try_recv().ok()) {
            self.on_event(Ok(event));
        }
        let steps = match self.state.runner.store().steps(run.id).await {
            Ok(steps) => steps,
            Err(error) => {
                let problem = Problem::from(error);
                self.transcript.close_text(&mut self.queue);
                let error = events::run_error(problem.detail(), problem.code());
                return self.queue.push_back(error);
            }
        };
        self.transcript.complete(&steps, &mut self.queue);
        let sent = std::mem::take(&mut self.request.messages);
        let sent = parse_large(sent.get().len(), move || {
            serde_json::from_str::<Vec<Value>>(sent.get())
        })
        .await;
        let messages = self.transcript.snapshot(sent.unwrap_or_default(), &steps);
        self.queue.push_back(events::messages_snapshot(messages));
        // Without the record the arguments stay cut, and the call is not offered.
        let shown = approvals::with_whole_arguments(&self.state, run).await;
        let run = shown.as_deref().unwrap_or(run);
        let end = match (&run.error, run.status) {
            (Some(failure), Status::Failed) => {
                events::run_error(&failure.message, &failure.code.to_string())
            }
            _ => match self.request.baseline.usage_since(&self.state, run).await {
                Ok(usage) => {
                    let (thread, id) = (&self.request.thread, &self.request.id);
                    events::run_finished(thread, id, self.outcome(run, &steps), &usage)
                }
                Err(error) => {
                    let problem = Problem::from(error);
                    events::run_error(problem.detail(), problem.code())
                }
            },
        };
        self.queue.push_back(end);
    }

    fn outcome(&self, run: &Run, steps: &[Step]) -> Value {
        if run.status == Status::Cancelled {
            return json!({ "type": "cancelled" });
        }
        if !run.status.is_terminal() && !run.pending_approvals.is_empty() {
            let interrupts = interrupts::interrupts(
                run,
                &self.transcript.calls,
                self.request.may_change_arguments,
            );
            return json!({ "type": "interrupt", "interrupts": interrupts });
        }
        let pending = match run.waits_for_client() {
            true => self.transcript.pending_calls(steps),
            false => Vec::new(),
        };
        json!({ "type": "success", "pendingToolCallIds": pending })
    }
}

async fn next_event(events: &mut Option<Subscription>) -> Result<StreamEvent, RecvError> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
