//! The statement of a change to a run that exists.

use crate::domain::run::{Outcome, now};
use crate::domain::usage::Usage;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::integers::signed;
use crate::store::encoding::run_values::{self, UsageValues};
use crate::store::postgres::connection::Query;
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::{NamedValue, free_text, free_text_or_null, values};
use crate::store::{Change, FinishedRun, Progress};

/// Who writes: a node, and which owner of the tree it is.
#[derive(Clone, Copy, Debug)]
pub struct Ownership {
    pub node: uuid::Uuid,
    pub epoch: i64,
}

/// The statement of a write to a run that exists. It affects no row if the tree belongs to another node, and if the run does
/// not exist, has ended, or does not allow the change.
pub fn change<'a>(write: &'a EncodedWrite, owner: Ownership) -> Query<'a> {
    let (sql, mut values) = change_values(write);
    values.extend(fence_values(write, owner));
    Query::required(sql, values)
}

/// What every write has: its tree with the owner, and its entry.
pub fn fence_values(write: &EncodedWrite, owner: Ownership) -> Vec<NamedValue<'_>> {
    let mut values = entry_values(write);
    values.extend(values! {":node": owner.node, ":epoch": owner.epoch});
    values
}

pub fn entry_values(write: &EncodedWrite) -> Vec<NamedValue<'_>> {
    let (entries, texts) = write.entry_texts();
    values! {
        ":root": write.root,
        ":run": write.run,
        ":count": signed(write.event_count()),
        ":entries": entries.map(free_text),
        ":texts": texts.map(free_text),
        ":turns": write.turns.as_ref(),
        ":has_entry": write.has_row(),
    }
    .into()
}

fn change_values(write: &EncodedWrite) -> (Sql, Vec<NamedValue<'_>>) {
    match &write.change {
        Change::Start { at, deadline } => (
            Sql::StartRun,
            values! {
                ":started_at": at.as_millisecond(),
                ":now": now().as_millisecond(),
                ":deadline_at": deadline.0.as_millisecond(),
                ":deadline_seconds": signed(deadline.1),
            }
            .into(),
        ),
        Change::Pause { since, waiting_for } => (
            Sql::PauseRun,
            values! {
                ":now": now().as_millisecond(),
                ":waiting_since": since.as_millisecond(),
                ":waiting_for": serde_json::to_string(waiting_for).ok(),
            }
            .into(),
        ),
        Change::Unpause { deadline } => (
            Sql::UnpauseRun,
            values! {
                ":now": now().as_millisecond(),
                ":deadline_at": deadline.0.as_millisecond(),
                ":deadline_seconds": signed(deadline.1),
            }
            .into(),
        ),
        Change::Resume => (Sql::ResumeRun, Vec::new()),
        // Inserted runs have a statement of their own.
        Change::Unchanged | Change::Claim(_) | Change::Create(_) => {
            (Sql::UpdateLastEvent, Vec::new())
        }
        Change::Progress(progress) => (Sql::UpdateProgress, progress_values(progress)),
        Change::CountToolCall => (Sql::CountToolCall, Vec::new()),
        Change::RequestCancel { reason } => (
            Sql::RequestCancel,
            values! {":reason": free_text(reason)}.into(),
        ),
        Change::Hold => (Sql::HoldRun, Vec::new()),
        Change::Release => (Sql::ReleaseRun, Vec::new()),
        Change::AddMessage(message) => {
            (Sql::AddMessage, values! {":number": message.number}.into())
        }
        Change::Finish(finished) => {
            let sql = match write.run == write.root {
                true => Sql::FinishRoot,
                false => Sql::FinishChild,
            };
            (sql, finish_values(finished))
        }
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
pub fn usage_values(usage: &Usage) -> [NamedValue<'static>; 8] {
    let usage = UsageValues::from(usage);
    values! {
        ":input_tokens": usage.input_tokens,
        ":output_tokens": usage.output_tokens,
        ":cache_read_tokens": usage.cache_read_tokens,
        ":cache_write_tokens": usage.cache_write_tokens,
        ":model_calls": usage.model_calls,
        ":tool_calls": usage.tool_calls,
        ":cost": usage.cost,
        ":unreported": usage.unreported,
    }
}

fn finish_values(finished: &FinishedRun) -> Vec<NamedValue<'_>> {
    let mut values = progress_values(&finished.progress);
    values.extend(outcome_values(&finished.outcome));
    let tree = UsageValues::from(&finished.tree_usage.usage);
    values.extend(values! {
        ":finished_at": finished.finished_at.as_millisecond(),
        ":tree_runs": signed(finished.tree_usage.runs),
        ":tree_input_tokens": tree.input_tokens,
        ":tree_output_tokens": tree.output_tokens,
        ":tree_cache_read_tokens": tree.cache_read_tokens,
        ":tree_cache_write_tokens": tree.cache_write_tokens,
        ":tree_model_calls": tree.model_calls,
        ":tree_tool_calls": tree.tool_calls,
        ":tree_cost": tree.cost,
        ":tree_unreported": tree.unreported,
        ":completion_status": finished.completion_status,
        ":messages": finished.messages,
    });
    values
}

fn outcome_values(outcome: &Outcome) -> [NamedValue<'_>; 6] {
    let is_structured = matches!(
        outcome,
        Outcome::Completed {
            structured: true,
            ..
        }
    );
    let (content, partial, failure, reason) = match outcome {
        Outcome::Completed { content, .. } => (Some(content), None, None, None),
        Outcome::Failed { failure, partial } => (None, partial.as_ref(), Some(failure), None),
        Outcome::Cancelled { reason, partial } => (None, partial.as_ref(), None, Some(reason)),
    };
    let error = failure.map(|failure| serde_json::to_vec(failure).unwrap_or_default());
    values! {
        ":status": outcome.status().as_str(),
        ":structured": is_structured.then_some(true),
        ":content": free_text_or_null(content),
        ":partial_content": free_text_or_null(partial),
        ":error": error,
        ":cancel_reason": free_text_or_null(reason),
    }
}
