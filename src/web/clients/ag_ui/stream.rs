//! The response: the events of a run until it ends, or needs its client.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::domain::event::{LiveEvent, StoredEvent};
use crate::domain::run::{Run, Status};
use crate::domain::usage::TokenUsage;
use crate::record::entry::{self, Entry};
use crate::web::body::request_body::parse_large;
use crate::web::clients::ag_ui::events::{self, Frames};
use crate::web::clients::ag_ui::interrupts;
use crate::web::clients::ag_ui::transcript::Transcript;
use crate::web::clients::ag_ui::usage::Baseline;
use crate::web::error::Problem;
use crate::web::response::stream_driver::{Nothing, Projection};
use crate::web::routes::approvals;
use crate::web::state::AppState;

/// The request that the response is for.
pub struct AgUiRequest {
    pub thread: String,
    /// The client's id of the request.
    pub id: String,
    /// Whether the client's key may approve calls with other arguments.
    pub may_change_arguments: bool,
}

pub struct AgUiStream {
    request: AgUiRequest,
    run: Arc<Run>,
    transcript: Transcript,
    frames: Frames,
}

/// A run that has ended or needs its client, as the record has it.
pub struct Stopped {
    run: Run,
    steps: Vec<Entry>,
    /// The messages of the client.
    sent: Vec<Value>,
    usage: Result<Vec<(String, TokenUsage)>, Problem>,
}

impl Stopped {
    /// `messages` are those of the client.
    pub async fn read(
        state: &AppState,
        run: &Run,
        messages: Box<RawValue>,
        baseline: Baseline,
    ) -> Result<Self, Problem> {
        let steps = entry::steps(state.runner.store().entries(run.id).await?);
        let sent = parse_large(messages.get().len(), move || {
            serde_json::from_str::<Vec<Value>>(messages.get())
        });
        let sent = sent.await.unwrap_or_default();
        // Without the record the arguments stay cut, and the call is not offered.
        let shown = approvals::with_whole_arguments(state, run).await;
        let run = shown.map_or_else(|_| run.clone(), Cow::into_owned);
        let usage = match run.status {
            Status::Failed => Ok(Vec::new()),
            _ => baseline
                .usage_since(state, &run)
                .await
                .map_err(Problem::from),
        };
        Ok(Self {
            run,
            steps,
            sent,
            usage,
        })
    }
}

impl AgUiStream {
    /// `recorded` has the steps that earlier responses have shown; none for a new run.
    pub fn new(request: AgUiRequest, run: Arc<Run>, recorded: &[Entry]) -> Self {
        let mut transcript = Transcript::new(run.id);
        transcript.skip_recorded(recorded);
        let mut frames = Frames::default();
        frames.push(&events::run_started(&request.thread, &request.id, &run));
        Self {
            transcript,
            frames,
            request,
            run,
        }
    }

    fn push_error(&mut self, message: &str, code: &str) {
        self.transcript.close_text(&mut self.frames);
        self.frames.push(&events::run_error(message, code));
    }

    fn push_end(&mut self, stopped: Stopped) {
        let Stopped {
            run,
            steps,
            sent,
            usage,
        } = stopped;
        self.transcript.complete(&steps, &mut self.frames);
        let messages = self.transcript.snapshot(sent, &steps);
        self.frames.push(&events::messages_snapshot(messages));
        let end = match (&run.error, run.status, usage) {
            (Some(failure), Status::Failed, _) => {
                events::run_error(&failure.message, &failure.code.to_string())
            }
            (_, _, Err(problem)) => events::run_error(problem.detail(), problem.code()),
            (_, _, Ok(usage)) => {
                let AgUiRequest { thread, id, .. } = &self.request;
                events::run_finished(thread, id, self.outcome(&run, &steps), &usage)
            }
        };
        self.frames.push(&end);
    }

    fn outcome(&self, run: &Run, steps: &[Entry]) -> Value {
        if run.status == Status::Cancelled {
            return json!({ "type": "cancelled" });
        }
        if !run.status.is_terminal() && !run.pending_inputs.is_empty() {
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

impl Projection for AgUiStream {
    /// `None` if the daemon is stopping.
    type End = Option<Result<Stopped, Problem>>;
    type Read = Nothing;

    fn frames(&mut self) -> &mut String {
        &mut self.frames.0
    }

    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()> {
        if event.run_id == self.run.id {
            self.transcript
                .on_event(&event.read()?.kind, &mut self.frames);
        }
        // What is missing comes from the record at the end.
        Ok(())
    }

    fn on_live(&mut self, LiveEvent { event, .. }: &LiveEvent) {
        if event.run_id == self.run.id {
            self.transcript.on_live(&event.kind, &mut self.frames);
        }
    }

    fn on_end(&mut self, end: Self::End) {
        match end {
            Some(Ok(stopped)) => self.push_end(stopped),
            Some(Err(problem)) => self.push_error(problem.detail(), problem.code()),
            None => {
                let run = self.run.id;
                let message = format!("the daemon is stopping; {run} continues after its restart");
                self.push_error(&message, "draining");
            }
        }
    }
}
