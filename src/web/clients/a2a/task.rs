//! A run as a task.

use crate::record::entry;
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::types::{Artifact, Message, Part, Role, Task, TaskState, TaskStatus};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::domain::run::{Run, Status};
use crate::web::clients::a2a::{decisions, history};
use crate::web::clients::run_meta;
use crate::web::error::Problem;
use crate::web::routes::approvals;
use crate::web::state::AppState;

/// The id of the artifact with the run's result: a task has only this one.
pub const RESULT: &str = "result";

/// What of a task is shown.
#[derive(Clone, Copy)]
pub struct TaskParts {
    /// The most messages; `None` for as many as one answer may have.
    pub history: Option<usize>,
    pub has_artifacts: bool,
}

impl TaskParts {
    pub fn with_history(history: Option<usize>) -> Self {
        Self {
            history,
            has_artifacts: true,
        }
    }
}

pub async fn task(state: &AppState, run: &Run, parts: TaskParts) -> Result<Task, Problem> {
    let history = match parts.history {
        Some(0) => None,
        most => {
            let steps = entry::steps(state.runner.store().entries(run.id).await?);
            Some(history::messages(run, steps, most)).filter(|messages| !messages.is_empty())
        }
    };
    let artifacts = match artifact(run) {
        Some(artifact) if parts.has_artifacts => Some(vec![artifact]),
        _ => None,
    };
    let shown = approvals::with_whole_arguments(state, run).await?;
    Ok(Task {
        id: run.id.to_string(),
        context_id: context_id(run),
        status: status(&shown),
        artifacts,
        history,
        metadata: metadata(run),
    })
}

pub fn status(run: &Run) -> TaskStatus {
    TaskStatus {
        state: state_of(run),
        message: status_message(run),
        timestamp: updated_at(run),
    }
}

/// The status of a run at work, with a text about its progress.
pub fn working(run: &Run, time: Timestamp, text: Option<String>) -> TaskStatus {
    TaskStatus {
        state: TaskState::Working,
        message: text.map(|text| agent_message(run, "progress", vec![Part::text(text)])),
        timestamp: time,
    }
}

pub fn state_of(run: &Run) -> TaskState {
    match run.status {
        Status::Queued => TaskState::Submitted,
        Status::Waiting if !run.pending_inputs.is_empty() => TaskState::InputRequired,
        Status::Running | Status::Waiting | Status::Cancelling => TaskState::Working,
        Status::Completed => TaskState::Completed,
        Status::Failed => TaskState::Failed,
        Status::Cancelled => TaskState::Canceled,
    }
}

/// Whether a client that waits for the task gets it now.
pub fn is_stopped(run: &Run) -> bool {
    run.status.is_terminal() || state_of(run) == TaskState::InputRequired
}

/// When the status was last changed, as far as the record tells.
pub fn updated_at(run: &Run) -> Timestamp {
    let requested = run.pending_inputs.iter();
    let requested = requested.map(|approval| approval.request.requested_at);
    run.finished_at
        .or(requested.max())
        .or(run.started_at)
        .unwrap_or(run.created_at)
}

/// The result of a completed run: its text, and its JSON if it was to be JSON.
pub fn artifact(run: &Run) -> Option<Artifact> {
    let content = run
        .content
        .as_deref()
        .filter(|_| run.status == Status::Completed)?;
    let mut parts = vec![Part::text(content)];
    parts.extend(data_part(run));
    Some(artifact_of(parts))
}

pub fn data_part(run: &Run) -> Option<Part> {
    let content = run.content.as_deref().filter(|_| run.structured)?;
    serde_json::from_str(content).ok().map(Part::json)
}

pub fn artifact_of(parts: Vec<Part>) -> Artifact {
    Artifact {
        artifact_id: RESULT.to_owned(),
        name: RESULT.to_owned(),
        parts,
    }
}

fn status_message(run: &Run) -> Option<Message> {
    let text = match (&run.error, &run.cancel_reason) {
        (Some(failure), _) => failure.message.clone(),
        (None, Some(reason)) => reason.clone(),
        (None, None) => {
            let parts = decisions::request_parts(run);
            return (!parts.is_empty()).then(|| agent_message(run, "approval", parts));
        }
    };
    Some(agent_message(run, "end", vec![Part::text(text)]))
}

fn agent_message(run: &Run, about: &str, parts: Vec<Part>) -> Message {
    Message {
        message_id: format!("{}-{about}-{}", run.id, run.last_event),
        context_id: context_id(run),
        task_id: run.id.to_string(),
        role: Role::Agent,
        parts,
    }
}

fn metadata(run: &Run) -> Map<String, Value> {
    let mut metadata = run_meta::run_meta(run);
    if let Some(failure) = &run.error {
        metadata.insert(run_meta::ERROR.to_owned(), json!(failure));
    }
    with_camel_case(metadata)
}

/// The protocol requires all names in camel case, also those that it does not define.
fn with_camel_case(object: Map<String, Value>) -> Map<String, Value> {
    let members = object.into_iter().map(|(name, value)| {
        let value = match value {
            Value::Object(object) => Value::Object(with_camel_case(object)),
            other => other,
        };
        (camel_case(&name), value)
    });
    members.collect()
}

fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let mut camel = words.next().unwrap_or_default().to_owned();
    for word in words {
        let (first, rest) = word.split_at_checked(1).unwrap_or((word, ""));
        camel.push_str(&first.to_ascii_uppercase());
        camel.push_str(rest);
    }
    camel
}
