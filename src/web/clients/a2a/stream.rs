//! The events of a task until it ends, or requires input. The reply's text is an artifact, which grows while the model writes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use crate::web::clients::a2a::types::{
    Part, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus,
    TaskStatusUpdateEvent,
};
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::unfold;
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, Status, now};
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::response::with_run_id;
use crate::web::clients::a2a::task;
use crate::web::clients::run_wait::wait_for_stop;
use crate::web::response::sse;
use crate::web::routes::approvals;
use crate::web::state::AppState;

const COMMENT: &str = ":\n\n";
/// A comment is sent after this time without an event, because proxies close idle connections.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

pub struct TaskStream {
    state: AppState,
    run: Arc<Run>,
    subscription: Option<Subscription>,
    stopped: BoxFuture<'static, Arc<Run>>,
    queue: VecDeque<StreamResponse>,
    is_working: bool,
    text: StreamedText,
    heartbeat_at: Instant,
    has_ended: bool,
}

/// The text of the artifact as the client has it.
#[derive(Default)]
struct StreamedText {
    shown: String,
    /// The turn of `shown`; `None` if the next piece replaces it.
    turn: Option<u32>,
    /// Pieces of turns up to this one are not shown: the client would not get their beginning.
    skipped_turns: u32,
    /// No pieces are shown.
    is_whole: bool,
}

#[derive(Deserialize)]
struct TextDelta {
    turn: u32,
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct TurnCompleted {
    tool_calls: Vec<NamedCall>,
}

#[derive(Deserialize)]
struct NamedCall {
    #[serde(alias = "tool")]
    name: String,
}

impl TaskStream {
    /// `first` is the task as the client sees it first. If `run` requires input, the stream waits for what comes after.
    pub async fn new(
        state: &AppState,
        run: Arc<Run>,
        first: Task,
        subscription: Option<Subscription>,
    ) -> Self {
        let stopped = wait_for_stop(state.runner.clone(), Arc::clone(&run), true);
        let text = StreamedText {
            is_whole: state.runner.has_json_format(run.id).await,
            ..StreamedText::default()
        };
        Self {
            state: state.clone(),
            run,
            subscription,
            stopped: Box::pin(stopped),
            is_working: first.status.state == TaskState::Working,
            queue: VecDeque::from([StreamResponse::Task(Box::new(first))]),
            text,
            heartbeat_at: Instant::now() + HEARTBEAT_INTERVAL,
            has_ended: false,
        }
    }

    /// The turn that is in progress may have begun before the subscription.
    pub fn joining(mut self) -> Self {
        if self.run.status == Status::Running {
            self.text.skipped_turns = self.run.turns + 1;
        }
        self
    }

    /// With `has_ended`, the first event is the only one.
    pub fn into_response(mut self, has_ended: bool) -> Response {
        self.has_ended = has_ended;
        let id = self.run.id;
        let response = sse::response(unfold(Box::new(self), |mut stream| async move {
            let chunk = stream.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(chunk)), stream))
        }));
        with_run_id(response, id)
    }

    /// The next bytes; `None` at the end. Not cancel-safe.
    async fn next(&mut self) -> Option<String> {
        loop {
            if !self.queue.is_empty() {
                self.heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
                return Some(self.queue.drain(..).map(|event| frame(&event)).collect());
            }
            if self.has_ended {
                return None;
            }
            tokio::select! {
                biased;
                // The client subscribes again after the daemon's restart.
                () = self.state.closing.cancelled() => self.has_ended = true,
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
            Ok(StreamEvent::Stored(event)) if event.run_id == self.run.id => self.on_stored(&event),
            Ok(StreamEvent::Ephemeral { run_id, name, data }) if run_id == self.run.id => {
                if let Ok(delta) = serde_json::from_str::<TextDelta>(&data) {
                    self.on_delta(name, &delta);
                }
            }
            Ok(_) => {}
            // The end has the whole text.
            Err(RecvError::Lagged(_)) => {
                self.text.skipped_turns = self.text.turn.unwrap_or(self.text.skipped_turns);
            }
            Err(RecvError::Closed) => self.subscription = None,
        }
    }

    fn on_stored(&mut self, event: &StoredEvent) {
        match event.name.as_str() {
            "run.started" | "run.resumed" if !self.is_working => {
                self.is_working = true;
                self.push_status(task::working(&self.run, now(), None));
            }
            "turn.completed" => {
                let turn = serde_json::from_str::<TurnCompleted>(&event.data);
                let calls = turn.map(|turn| turn.tool_calls).unwrap_or_default();
                let names: Vec<&str> = calls.iter().map(|call| call.name.as_str()).collect();
                if !names.is_empty() {
                    let text = format!("calls {}", names.join(", "));
                    self.push_status(task::working(&self.run, now(), Some(text)));
                }
            }
            _ => {}
        }
    }

    fn on_delta(&mut self, name: &str, delta: &TextDelta) {
        let text = &mut self.text;
        if text.is_whole || delta.turn <= text.skipped_turns {
            return;
        }
        match name {
            "text.delta" if !delta.text.is_empty() => {
                let appends = text.turn == Some(delta.turn);
                if !appends {
                    text.shown.clear();
                    text.turn = Some(delta.turn);
                }
                text.shown.push_str(&delta.text);
                let parts = vec![Part::text(delta.text.as_str())];
                self.push_artifact(parts, appends, false);
            }
            "text.withdrawn" => text.turn = None,
            _ => {}
        }
    }

    async fn finish(&mut self, run: &Run) {
        self.has_ended = true;
        // Events that were published before the run stopped.
        while let Some(event) = self.subscription.as_mut().and_then(|it| it.try_recv().ok()) {
            self.on_event(Ok(event));
        }
        if let Some(artifact) = task::artifact(run) {
            let is_shown =
                self.text.turn.is_some() && run.content.as_ref() == Some(&self.text.shown);
            let parts = match is_shown {
                // A part is required, and the text is known.
                true => vec![Part::text("")]
                    .into_iter()
                    .chain(task::data_part(run))
                    .collect(),
                false => artifact.parts,
            };
            self.push_artifact(parts, is_shown, true);
        }
        // Without the record the arguments stay cut, and the call is not offered.
        let shown = approvals::with_whole_arguments(&self.state, run).await;
        self.push_status(task::status(shown.as_deref().unwrap_or(run)));
    }

    fn push_status(&mut self, status: TaskStatus) {
        self.queue
            .push_back(StreamResponse::StatusUpdate(TaskStatusUpdateEvent {
                task_id: self.run.id.to_string(),
                context_id: context_id(&self.run),
                status,
            }));
    }

    fn push_artifact(&mut self, parts: Vec<Part>, appends: bool, is_last: bool) {
        self.queue
            .push_back(StreamResponse::ArtifactUpdate(TaskArtifactUpdateEvent {
                task_id: self.run.id.to_string(),
                context_id: context_id(&self.run),
                artifact: task::artifact_of(parts),
                append: appends,
                last_chunk: is_last,
            }));
    }
}

fn frame(event: &StreamResponse) -> String {
    let json = serde_json::to_string(event).unwrap_or_default();
    format!("data: {json}\n\n")
}

async fn next_event(events: &mut Option<Subscription>) -> Result<StreamEvent, RecvError> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
