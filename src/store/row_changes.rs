//! How a write changes the row of its run: the columns and their values, once for both engines, which execute them within statements
//! of their own. In these `r` is the row, `:run` its id, and `:now` the time of this process.

use crate::domain::content::Content;
use crate::domain::run::{Outcome, Run, now};
use crate::domain::usage::Usage;
use crate::domain::variant::Variant;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::integers::signed;
use crate::store::encoding::run_values;
use crate::store::sql::clock::by_database_clock;
use crate::store::sql::value::{NamedValue, free_text, free_text_or_null, values};
use crate::store::{Change, FinishedRun, NewRun, Progress};

/// The columns of a new run.
pub const NEW_COLUMNS: &str = "id, root, parent, child, depth, status, agent, created_at, started_at, \
     last_event, attempt, turns, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, \
     model_calls, tool_calls, cost, unreported, model, stop_reason, agent_version, tool_call_id, label, \
     completion_status, labels, cancel_reason, input, {|input_is_parts, }task, owner, definition, deadline_at, \
     deadline_seconds, timeout, stream, webhook, session, workdir_device, workdir_inode, messages, fork, variant";

/// Their values.
pub const NEW_VALUES: &str = concat!(
    ":run, :root, :parent, :child, :depth, :status, :agent, :created_at, :started_at, ",
    last_event!(),
    ", :attempt, :turns_made, :input_tokens, :output_tokens, :cache_read_tokens, :cache_write_tokens, \
     :model_calls, :tool_calls, :cost, :unreported, :model, :stop_reason, :agent_version, :tool_call_id, :label, \
     :completion_status, :labels, :cancel_reason, :input, {|:input_is_parts, }:task, :owner, :definition, ",
    by_database_clock!(":deadline_at"),
    ", :deadline_seconds, :timeout, :stream, :webhook, :session, :workdir_device, :workdir_inode, :messages, :fork, :variant"
);

/// What every change of a row begins with. Without events the last one stays.
pub const SET_LAST_EVENT: &str = concat!(
    "last_event = {max|greatest}(r.last_event, ",
    last_event!(),
    ")"
);

/// What is counted of a run that has ended, and the columns of its root that are counted with it.
pub const ENDED_COLUMNS: &str = "r.child, r.agent, r.model, r.model_usage, r.started_at";
pub const ENDED_ROOT_COLUMNS: &str = "root.created_at, root.owner, root.session, root.labels";

/// The number of the write's last event; 0 if it has none.
macro_rules! last_event {
    () => {
        "{:last_event|CASE WHEN :count > 0 THEN fence.last_event ELSE 0 END}"
    };
}
use last_event;

macro_rules! set_progress {
    () => {
        ", turns = :turns_made, model = coalesce(nullif(:model::bytea, ''::bytea), r.model), stop_reason = :stop_reason, \
         input_tokens = :input_tokens, output_tokens = :output_tokens, cache_read_tokens = :cache_read_tokens, \
         cache_write_tokens = :cache_write_tokens, model_calls = :model_calls, tool_calls = :tool_calls, \
         cost = :cost, unreported = :unreported, model_usage = coalesce(:model_usage, r.model_usage)"
    };
}

/// Declares each change of a row with what it sets and what it needs besides a run that has not ended.
macro_rules! row_changes {
    ($($(#[$doc:meta])* $name:ident: $set:expr, $condition:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum RowChange { $($(#[$doc])* $name,)* }

        impl RowChange {
            /// What each sets, and its condition, in the order of the enum.
            pub const ALL: &[(&str, &str)] = &[$(($set, $condition),)*];
        }
    };
}

row_changes! {
    LastEvent: "", "";
    Start: concat!(", started_at = coalesce(r.started_at, :started_at), deadline_at = ", by_database_clock!(":deadline_at"),
        ", deadline_seconds = :deadline_seconds, status = CASE r.status WHEN 'queued' THEN 'running' ELSE r.status END"), "";
    Pause: concat!(", waiting_since = coalesce(r.waiting_since, ", by_database_clock!(":waiting_since"), "), \
        waiting_for = :waiting_for, status = CASE r.status WHEN 'running' THEN 'waiting' ELSE r.status END"), "";
    /// The deadline moves by the time that the run was paused.
    Unpause: concat!(", waiting_since = NULL, waiting_for = NULL, waited = coalesce(r.waited, 0) + {max|greatest}(0, ",
        by_database_clock!(":deadline_at"), " - coalesce(r.deadline_at, ", by_database_clock!(":deadline_at"), ")), \
        deadline_at = ", by_database_clock!(":deadline_at"), ", deadline_seconds = :deadline_seconds, \
        status = CASE r.status WHEN 'waiting' THEN 'running' ELSE r.status END"), "";
    Resume: ", attempt = r.attempt + 1", "";
    Progress: set_progress!(), "";
    CountToolCalls: ", tool_calls = r.tool_calls + :calls", "";
    RequestCancel: ", status = 'cancelling', cancel_reason = :reason", " AND r.status <> 'cancelling'";
    Hold: ", held = true", " AND r.status <> 'cancelling' AND r.held IS NULL";
    Release: ", held = NULL", " AND r.status <> 'cancelling' AND r.held IS NOT NULL";
    AddMessage: ", messages = :number", " AND r.status <> 'cancelling' AND r.messages + 1 = :number";
    Finish: concat!(set_progress!(), ", status = :status, finished_at = :finished_at, content = :content, \
        partial_content = :partial_content, error = :error, cancel_reason = :cancel_reason, tree_runs = :tree_runs, \
        tree_input_tokens = :tree_input_tokens, tree_output_tokens = :tree_output_tokens, \
        tree_cache_read_tokens = :tree_cache_read_tokens, tree_cache_write_tokens = :tree_cache_write_tokens, \
        tree_model_calls = :tree_model_calls, tree_tool_calls = :tree_tool_calls, tree_cost = :tree_cost, \
        tree_unreported = :tree_unreported, structured = :structured, \
        completion_status = coalesce(:completion_status, r.completion_status)"),
        " AND r.messages = coalesce(:messages, r.messages)";
}

/// The change of a row that exists, with its values. A new run only gets its last event here.
pub fn row_change(change: &Change) -> (RowChange, Vec<NamedValue<'_>>) {
    let now = now().as_millisecond();
    match change {
        Change::Start { at, deadline } => (
            RowChange::Start,
            values! {
                ":now": now,
                ":started_at": at.as_millisecond(),
                ":deadline_at": deadline.0.as_millisecond(),
                ":deadline_seconds": signed(deadline.1),
            }
            .into(),
        ),
        Change::Pause { since, waiting_for } => (
            RowChange::Pause,
            values! {
                ":now": now,
                ":waiting_since": since.as_millisecond(),
                ":waiting_for": serde_json::to_string(waiting_for).ok(),
            }
            .into(),
        ),
        Change::Unpause { deadline } => (
            RowChange::Unpause,
            values! {
                ":now": now,
                ":deadline_at": deadline.0.as_millisecond(),
                ":deadline_seconds": signed(deadline.1),
            }
            .into(),
        ),
        Change::Resume => (RowChange::Resume, Vec::new()),
        Change::Unchanged | Change::Claim(_) | Change::Create(_) => {
            (RowChange::LastEvent, Vec::new())
        }
        Change::Progress(progress) => (RowChange::Progress, progress_values(progress)),
        Change::CountToolCall => (RowChange::CountToolCalls, values! {":calls": 1_i64}.into()),
        Change::RequestCancel { reason } => (
            RowChange::RequestCancel,
            values! {":reason": free_text(reason)}.into(),
        ),
        Change::Hold => (RowChange::Hold, Vec::new()),
        Change::Release => (RowChange::Release, Vec::new()),
        Change::AddMessage(message) => (
            RowChange::AddMessage,
            values! {":number": message.number}.into(),
        ),
        Change::Finish(finished) => (RowChange::Finish, finish_values(finished)),
    }
}

fn progress_values(progress: &Progress) -> Vec<NamedValue<'_>> {
    let mut values: Vec<NamedValue<'_>> = values! {
        ":turns_made": progress.turns,
        ":model": free_text(&progress.model),
        ":stop_reason": progress.stop_reason.as_deref().map(free_text),
        ":model_usage": run_values::model_usage_value(&progress.models),
    }
    .into();
    values.extend(usage_values(&progress.usage));
    values
}

/// The columns of a run's own usage.
fn usage_values(usage: &Usage) -> [NamedValue<'static>; 8] {
    values! {
        ":input_tokens": signed(usage.tokens.input),
        ":output_tokens": signed(usage.tokens.output),
        ":cache_read_tokens": signed(usage.tokens.cache_read),
        ":cache_write_tokens": signed(usage.tokens.cache_write),
        ":model_calls": signed(usage.model_calls),
        ":tool_calls": signed(usage.tool_calls),
        ":cost": usage.cost.map(|cost| signed(cost.0)),
        ":unreported": signed(usage.unreported),
    }
}

fn finish_values(finished: &FinishedRun) -> Vec<NamedValue<'_>> {
    let (mut content, mut partial, mut error, mut reason) = (None, None, None, None);
    let mut is_structured = false;
    match &finished.outcome {
        Outcome::Completed {
            content: text,
            structured,
            ..
        } => {
            content = Some(text);
            is_structured = *structured;
        }
        Outcome::Failed {
            failure,
            partial: text,
        } => {
            partial = text.as_ref();
            error = serde_json::to_string(failure).ok();
        }
        Outcome::Cancelled {
            reason: why,
            partial: text,
        } => {
            partial = text.as_ref();
            reason = Some(why);
        }
    }
    let tree = &finished.tree_usage;
    let mut values = progress_values(&finished.progress);
    values.extend(values! {
        ":status": finished.outcome.status().as_str(),
        ":finished_at": finished.finished_at.as_millisecond(),
        ":content": free_text_or_null(content),
        ":partial_content": free_text_or_null(partial),
        ":error": error.map(free_text),
        ":cancel_reason": free_text_or_null(reason),
        ":structured": is_structured.then_some(true),
        ":completion_status": finished.completion_status,
        ":messages": finished.messages,
        ":tree_runs": signed(tree.runs),
    });
    let tree_names = [
        ":tree_input_tokens",
        ":tree_output_tokens",
        ":tree_cache_read_tokens",
        ":tree_cache_write_tokens",
        ":tree_model_calls",
        ":tree_tool_calls",
        ":tree_cost",
        ":tree_unreported",
    ];
    let tree_values = usage_values(&tree.usage).map(|(_, value)| value);
    values.extend(tree_names.into_iter().zip(tree_values));
    values
}

/// The values of [`NEW_COLUMNS`], without those of the write itself.
pub fn new_run_values(new_run: &NewRun, definition: Hash) -> Vec<NamedValue<'_>> {
    let (run, resume_state) = (&*new_run.run, &new_run.resume_state);
    let webhooks = Some(&resume_state.webhooks).filter(|webhooks| !webhooks.is_empty());
    let mut values: Vec<NamedValue<'_>> = values! {
        ":parent": run.parent_id,
        ":child": run.parent_id.is_some(),
        ":depth": run.depth.0,
        ":status": run.status.as_str(),
        ":agent": &run.agent,
        ":created_at": run.created_at.as_millisecond(),
        ":started_at": run.started_at.map(|at| at.as_millisecond()),
        ":attempt": run.attempt,
        ":turns_made": run.turns,
        ":model": free_text(&run.model),
        ":stop_reason": free_text_or_null(run.stop_reason.as_ref()),
        ":agent_version": &run.agent_version,
        ":tool_call_id": free_text_or_null(run.tool_call_id.as_ref()),
        ":label": free_text_or_null(run.label.as_ref()),
        ":completion_status": run.completion_status.as_deref(),
        ":labels": run_values::labels_value(&run.labels),
        ":cancel_reason": free_text_or_null(run.cancel_reason.as_ref()),
        ":owner": run.owner.as_deref(),
        ":session": free_text_or_null(run.session.as_ref()),
        ":messages": run.fork.as_ref().map_or(0, |fork| fork.copied_messages),
        ":fork": run.fork.as_ref().map(|fork| serde_json::to_string(fork).unwrap_or_default()),
        ":variant": run.variant.map(Variant::as_str),
        ":definition": definition,
        ":now": now().as_millisecond(),
        ":deadline_at": resume_state.deadline.map(|(at, _)| at.as_millisecond()),
        ":deadline_seconds": resume_state.deadline.map(|(_, bound)| signed(bound)),
        ":timeout": signed(resume_state.timeout),
        ":stream": resume_state.stream,
        ":webhook": webhooks.map(|webhooks| serde_json::to_string(webhooks).unwrap_or_default()),
        ":workdir_device": resume_state.workdir.map(|id| id.device.cast_signed()),
        ":workdir_inode": resume_state.workdir.map(|id| id.inode.cast_signed()),
    }
    .into();
    values.extend(usage_values(&run.usage));
    values
}

/// An input and the task of a run. Parts are JSON, as bytes.
pub fn input_values(run: &Run) -> [NamedValue<'_>; 2] {
    let input = match &run.input {
        Content::Text(text) => free_text(&**text),
        parts @ Content::Parts(_) => serde_json::to_vec(parts).unwrap_or_default().into(),
    };
    [
        (":input", input),
        (":task", free_text_or_null(run.task.as_ref())),
    ]
}
