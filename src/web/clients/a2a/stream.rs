//! The events of a task until it ends, or requires input. The reply's text is an artifact, which grows while the model writes.

use std::sync::Arc;

use axum::response::Response;

use crate::domain::event::{EventKind, LiveEvent, StoredEvent};
use crate::domain::run::{Run, Status, now};
use crate::engine::state::broadcaster::Subscription;
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::response::with_run_id;
use crate::web::clients::a2a::task;
use crate::web::clients::a2a::types::{
    Part, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus,
    TaskStatusUpdateEvent,
};
use crate::web::clients::run_wait::wait_for_stop;
use crate::web::response::sse;
use crate::web::response::stream_driver::{Nothing, Projection, StreamDriver};
use crate::web::routes::approvals;
use crate::web::state::AppState;

pub struct TaskStream {
    run: Arc<Run>,
    frames: String,
    is_working: bool,
    text: StreamedText,
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

/// A run that has ended, or requires input.
pub struct Stopped {
    run: Arc<Run>,
    status: TaskStatus,
}

impl Stopped {
    async fn wait(state: AppState, run: Arc<Run>) -> Self {
        let run = wait_for_stop(state.runner.clone(), run, true).await;
        // Without the record the arguments stay cut, and the call is not offered.
        let shown = approvals::with_whole_arguments(&state, &run).await;
        let status = task::status(shown.as_deref().unwrap_or(&run));
        Self { run, status }
    }
}

impl TaskStream {
    /// `first` is the task as the client sees it first. If `run` requires input, the stream waits for what comes after.
    pub async fn new(state: &AppState, run: Arc<Run>, first: Task) -> Self {
        let text = StreamedText {
            is_whole: state.runner.has_json_format(run.id).await,
            ..StreamedText::default()
        };
        let mut stream = Self {
            run,
            frames: String::new(),
            is_working: first.status.state == TaskState::Working,
            text,
            has_ended: false,
        };
        stream.push(&StreamResponse::Task(Box::new(first)));
        stream
    }

    /// The turn that is in progress may have begun before the subscription.
    pub fn joining(mut self) -> Self {
        if self.run.status == Status::Running {
            self.text.skipped_turns = self.run.turns + 1;
        }
        self
    }

    /// With `has_ended`, the first event is the only one.
    pub fn into_response(
        mut self,
        state: &AppState,
        subscription: Option<Subscription>,
        has_ended: bool,
    ) -> Response {
        self.has_ended = has_ended;
        let id = self.run.id;
        // The client subscribes again after the daemon's restart.
        let closing = state.closing.clone();
        let stopped = Stopped::wait(state.clone(), Arc::clone(&self.run));
        let end = async move { closing.run_until_cancelled(stopped).await };
        let driver = StreamDriver::new(state, self, subscription, end);
        with_run_id(driver.into_response(), id)
    }

    fn push(&mut self, event: &StreamResponse) {
        sse::push_data(&mut self.frames, event);
    }

    fn push_status(&mut self, status: TaskStatus) {
        self.push(&StreamResponse::StatusUpdate(TaskStatusUpdateEvent {
            task_id: self.run.id.to_string(),
            context_id: context_id(&self.run),
            status,
        }));
    }

    fn push_artifact(&mut self, parts: Vec<Part>, appends: bool, is_last: bool) {
        self.push(&StreamResponse::ArtifactUpdate(TaskArtifactUpdateEvent {
            task_id: self.run.id.to_string(),
            context_id: context_id(&self.run),
            artifact: task::artifact_of(parts),
            append: appends,
            last_chunk: is_last,
        }));
    }
}

impl Projection for TaskStream {
    /// `None` if the daemon is stopping.
    type End = Option<Stopped>;
    type Read = Nothing;

    fn frames(&mut self) -> &mut String {
        &mut self.frames
    }

    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()> {
        if event.run_id != self.run.id {
            return Ok(());
        }
        match event.read()?.kind {
            EventKind::RunStarted { .. } | EventKind::RunResumed { .. } if !self.is_working => {
                self.is_working = true;
                self.push_status(task::working(&self.run, now(), None));
            }
            EventKind::TurnCompleted { tool_calls, .. } if !tool_calls.is_empty() => {
                let names: Vec<_> = tool_calls.into_iter().map(|call| call.name).collect();
                let text = format!("calls {}", names.join(", "));
                self.push_status(task::working(&self.run, now(), Some(text)));
            }
            _ => {}
        }
        Ok(())
    }

    fn on_live(&mut self, LiveEvent { event, .. }: &LiveEvent) {
        let text = &mut self.text;
        if event.run_id != self.run.id || text.is_whole {
            return;
        }
        match &event.kind {
            EventKind::TextDelta { turn, text: piece }
                if *turn > text.skipped_turns && !piece.is_empty() =>
            {
                let appends = text.turn == Some(*turn);
                if !appends {
                    text.shown.clear();
                    text.turn = Some(*turn);
                }
                text.shown.push_str(piece);
                self.push_artifact(vec![Part::text(piece.as_str())], appends, false);
            }
            EventKind::TextWithdrawn { turn, .. } if *turn > text.skipped_turns => text.turn = None,
            _ => {}
        }
    }

    /// The end has the whole text.
    fn on_lag(&mut self, _: &mut Subscription) {
        self.text.skipped_turns = self.text.turn.unwrap_or(self.text.skipped_turns);
    }

    fn on_end(&mut self, stopped: Self::End) {
        let Some(Stopped { run, status }) = stopped else {
            return;
        };
        if let Some(artifact) = task::artifact(&run) {
            let is_shown =
                self.text.turn.is_some() && run.content.as_ref() == Some(&self.text.shown);
            let parts = match is_shown {
                // A part is required, and the text is known.
                true => vec![Part::text("")]
                    .into_iter()
                    .chain(task::data_part(&run))
                    .collect(),
                false => artifact.parts,
            };
            self.push_artifact(parts, is_shown, true);
        }
        self.push_status(status);
    }

    fn is_over(&self) -> bool {
        self.has_ended
    }
}
