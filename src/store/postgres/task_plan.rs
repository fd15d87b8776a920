//! The statements of the tasks that are no writes to a tree.

use jiff::Timestamp;

use crate::domain::batch::{Batch, BatchId, BatchLine};
use crate::domain::node::NodeId;
use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::store::batches::{BatchChange, BatchKey, MAX_TRIMMED_LINES};
use crate::store::cluster::PermitChange;
use crate::store::duties::LEADER;
use crate::store::encoding::clock_skew::first_id;
use crate::store::encoding::integers::signed;
use crate::store::memories::MemoryId;
use crate::store::new_request::NewRequest;
use crate::store::outbox::{AttemptOutcome, AttemptRecord, MAX_STORED_ATTEMPTS};
use crate::store::postgres::connection::Query;
use crate::store::postgres::statements::Sql;
use crate::store::postgres::usage_rollup::UsageRollup;
use crate::store::push_configs::{MAX_PUSH_CONFIGS, PushConfig};
use crate::store::run_requests::{NO_ANSWER, RequestChange};
use crate::store::schedules::{ScheduleChange, ScheduleId};
use crate::store::sql::value::{NamedValue, free_text, values};
use crate::store::write_queue::job::Task;

/// Runs that lose their session's name in one transaction.
pub const SESSION_PART_RUNS: u32 = 256;

/// The statements of a task of this node. Writes, deletions of trees, and tasks for the writer itself have none here.
pub fn plan(task: &Task, node: NodeId) -> Vec<Query<'_>> {
    match task {
        Task::Write(_)
        | Task::Delete(_)
        | Task::Vacuum
        | Task::ClearFailed(..)
        | Task::ClaimTrees(..)
        | Task::ClaimUnserved(_)
        | Task::GivePermits(_)
        | Task::Close(_) => Vec::new(),
        Task::RecordAttempt(record) => vec![record_attempt(record)],
        Task::Resend(run, id) => vec![resend(*run, *id)],
        Task::AddPushConfig(run, config) => vec![
            upsert_push_config(*run, config),
            Query::new(Sql::EndedStatus, values! {":id": run}.into()),
        ],
        Task::DeletePushConfig(run, id) => {
            let config = values! {":run": run, ":id": free_text(id)};
            let deliveries = values! {":run": run, ":push": free_text(id)};
            vec![
                Query::new(Sql::DeletePushConfig, config.into()),
                Query::new(Sql::DeletePushDeliveries, deliveries.into()),
            ]
        }
        Task::ForgetSession(owner, name) => forget_session(owner.as_deref(), name),
        Task::TrimUsage(before) => UsageRollup::trim(*before),
        Task::AddBatchLines(id, lines) => add_batch_lines(*id, lines),
        Task::RemoveUnacceptedLines(id) => vec![remove_unaccepted_lines(*id)],
        Task::AcceptBatch(batch, key) => accept_batch(batch, key.as_ref()),
        Task::ChangeBatch(id, change) => vec![change_batch(*id, change)],
        Task::TrimBatch(id, before) => trim_batch(*id, *before),
        Task::TrimUnacceptedLines(before) => vec![trim_unaccepted_lines(*before)],
        Task::ChangeSchedule(id, change) => vec![change_schedule(id, change, node)],
        Task::AddToMemory(memory, entry) => {
            let mut insert = memory_values(memory).to_vec();
            insert.extend(values! {
                ":run": entry.run, ":entry": free_text(&entry.text), ":may_exist": entry.may_exist,
            });
            vec![
                Query::new(Sql::InsertMemoryEntry, insert),
                Query::new(Sql::CountMemory, memory_values(memory).into()),
            ]
        }
        Task::TrimMemory(memory, keep) => {
            let mut trim = memory_values(memory).to_vec();
            trim.extend(values! {":keep": signed(*keep as u64)});
            vec![
                Query::new(Sql::TrimMemory, trim),
                Query::new(Sql::CountMemory, memory_values(memory).into()),
            ]
        }
        Task::ChangeRequest(node, change) => vec![change_request(*node, change)],
        Task::HandOverTree(root, labels) => {
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            let values = values! {":root": root, ":node": node.0, ":labels": labels};
            vec![Query::new(Sql::LeaveTree, values.into())]
        }
        Task::ChangePermit(root, change) => change_permit(node, *root, *change),
        Task::TakeDuty(name, holder) => {
            let holder = holder.map(|holder| holder.0);
            let values = values! {":name": *name, ":node": node.0, ":holder": holder};
            vec![Query::new(Sql::TakeDuty, values.into())]
        }
        Task::HandOverDuty(name) => {
            let values = values! {":name": *name, ":node": node.0};
            vec![Query::new(Sql::HandOverDuty, values.into())]
        }
        Task::Check => {
            let values = values! {":now": now().as_millisecond()};
            vec![Query::new(Sql::WriteCheck, values.into())]
        }
    }
}

/// Tasks that are not committed together with others.
pub fn is_alone(task: &Task, is_disk_full: bool) -> bool {
    match task {
        Task::ClearFailed(..)
        | Task::Delete(_)
        | Task::Vacuum
        | Task::ClaimTrees(..)
        | Task::ClaimUnserved(_)
        | Task::GivePermits(_)
        // It resets the sums that the ends of runs add to.
        | Task::TrimUsage(_) => true,
        // It needs space then, which others may not need.
        Task::Check => is_disk_full,
        _ => false,
    }
}

fn record_attempt(record: &AttemptRecord) -> Query<'_> {
    let (status, due_in) = match record.outcome {
        AttemptOutcome::Delivered => ("delivered", None),
        AttemptOutcome::RetryIn(delay) => {
            let due_in = signed(delay.as_millis() as u64);
            ("pending", Some(due_in))
        }
        AttemptOutcome::GivenUp => ("failed", None),
    };
    let values = values! {
        ":id": record.id.0,
        ":status": status,
        ":due_in": due_in,
        ":attempt": serde_json::to_string(&record.attempt).unwrap_or_default(),
        ":max_attempts": signed(MAX_STORED_ATTEMPTS as u64),
        ":since": record.since.as_millisecond(),
    };
    Query::new(Sql::RecordAttempt, values.into())
}

fn resend(run: RunId, id: DeliveryId) -> Query<'static> {
    let values = values! {":id": id.0, ":run": run, ":now": now().as_millisecond()};
    Query::new(Sql::ResendDelivery, values.into())
}

fn upsert_push_config(run: RunId, config: &PushConfig) -> Query<'_> {
    let target = &config.target;
    let values = values! {
        ":run": run,
        ":id": free_text(&config.id),
        ":url": free_text(&config.url),
        ":context": free_text(&target.context),
        ":token": target.token.as_deref().map(free_text),
        ":scheme": target.scheme.as_deref().map(free_text),
        ":credentials": target.credentials.as_deref().map(free_text),
        ":max": signed(MAX_PUSH_CONFIGS as u64),
    };
    Query::new(Sql::UpsertPushConfig, values.into())
}

/// Removes a session's name from the oldest of its runs: the conversation is that of the last one, so it is either whole or
/// gone. The session is locked: what the statements see has all runs that other nodes have accepted in it. The last statement
/// affects as many rows as runs lost the name.
fn forget_session<'a>(owner: Option<&'a str>, name: &'a str) -> Vec<Query<'a>> {
    let limit = i64::from(SESSION_PART_RUNS);
    let free = values! {":owner": owner.unwrap_or_default(), ":session": free_text(name)};
    let runs = match owner {
        Some(owner) => {
            let values = values! {":owner": owner, ":session": free_text(name), ":limit": limit};
            Query::new(Sql::ForgetOwnedSession, values.into())
        }
        None => {
            let values = values! {":session": free_text(name), ":limit": limit};
            Query::new(Sql::ForgetSession, values.into())
        }
    };
    vec![Query::new(Sql::DeleteFreeSession, free.into()), runs]
}

fn add_batch_lines(id: BatchId, lines: &[BatchLine]) -> Vec<Query<'_>> {
    lines.iter().map(|line| batch_line(id, line)).collect()
}

fn batch_line(id: BatchId, line: &BatchLine) -> Query<'_> {
    let values = values! {
        ":batch": id.0,
        ":line": line.index,
        ":body": line.body.as_deref().map(free_text),
        ":problem": line.problem.as_deref().map(free_text),
    };
    Query::new(Sql::InsertBatchLine, values.into())
}

fn remove_unaccepted_lines(id: BatchId) -> Query<'static> {
    let values = values! {":batch": id.0};
    Query::new(Sql::DeleteLinesWithoutBatch, values.into())
}

/// The second statement affects no row if the batch has more lines, or a run.
fn trim_batch(id: BatchId, before: Timestamp) -> Vec<Query<'static>> {
    let before = before.as_millisecond();
    let lines = values! {":batch": id.0, ":before": before, ":limit": i64::from(MAX_TRIMMED_LINES)};
    let batch = values! {":batch": id.0, ":before": before};
    vec![
        Query::new(Sql::DeleteBatchLines, lines.into()),
        Query::new(Sql::DeleteBatch, batch.into()),
    ]
}

fn trim_unaccepted_lines(before: Timestamp) -> Query<'static> {
    let values = values! {":before": first_id(before)};
    Query::new(Sql::DeleteUnacceptedLines, values.into())
}

/// The last statement affects no row if the key has accepted another batch.
fn accept_batch<'a>(batch: &'a Batch, key: Option<&'a BatchKey>) -> Vec<Query<'a>> {
    let owner = key.map(|key| key.owner.as_deref().unwrap_or_default());
    let forget = key.zip(owner).map(|(key, owner)| {
        let values = values! {
            ":owner": owner, ":agent": &key.agent, ":key": free_text(&key.key), ":now": now().as_millisecond(),
        };
        Query::new(Sql::ForgetBatchKey, values.into())
    });
    let values = values! {
        ":id": batch.id.0,
        ":agent": &batch.agent,
        ":owner": batch.owner.as_deref(),
        ":lines": signed(batch.lines),
        ":created_at": batch.created_at.as_millisecond(),
        ":body_hash": &batch.body_hash,
        ":key_owner": owner,
        ":key": key.map(|key| free_text(&key.key)),
        ":key_expires": key.map(|key| key.expires_at.as_millisecond()),
    };
    let insert = Query::new(Sql::InsertBatch, values.into());
    forget.into_iter().chain([insert]).collect()
}

fn change_batch(id: BatchId, change: &BatchChange) -> Query<'_> {
    match change {
        BatchChange::Started { index, run } => {
            let values = values! {":batch": id.0, ":line": *index, ":run": run};
            Query::new(Sql::StartBatchLine, values.into())
        }
        BatchChange::Rejected { index, problem } => {
            let values = values! {
                ":batch": id.0, ":line": *index, ":problem": free_text(problem),
            };
            Query::new(Sql::RejectBatchLine, values.into())
        }
        BatchChange::Cancel { reason } => {
            let values = values! {":id": id.0, ":reason": free_text(reason)};
            Query::new(Sql::CancelBatch, values.into())
        }
        BatchChange::Finish { at } => {
            let values = values! {":id": id.0, ":at": at.as_millisecond()};
            Query::new(Sql::FinishBatch, values.into())
        }
    }
}

fn memory_values(memory: &MemoryId) -> [NamedValue<'_>; 2] {
    values! {":agent": &memory.agent, ":owner": memory.owner.as_deref().unwrap_or_default()}
}

fn change_schedule<'a>(id: &'a ScheduleId, change: &'a ScheduleChange, node: NodeId) -> Query<'a> {
    let sql = match change {
        ScheduleChange::Seen { .. } => Sql::UpsertSchedule,
        ScheduleChange::Removed => Sql::MarkScheduleRemoved,
        ScheduleChange::Started { .. } => Sql::RecordScheduledRun,
        ScheduleChange::Triggered { .. } => Sql::RecordTriggeredRun,
        ScheduleChange::Skipped { .. } => Sql::SkipScheduledTime,
        ScheduleChange::Paused { .. } => Sql::PauseSchedule,
    };
    let mut values = values! {
        ":agent": &id.agent, ":name": &id.name, ":node": node.0, ":leader": LEADER,
    }
    .to_vec();
    match change {
        ScheduleChange::Seen { times, at } => {
            values.extend(values! {":times": times, ":at": at.as_second()});
        }
        ScheduleChange::Removed => {}
        ScheduleChange::Started {
            at,
            handled_at,
            run,
        } => values.extend(values! {
            ":at": at.as_second(), ":handled_at": handled_at.as_second(), ":run": run,
        }),
        ScheduleChange::Triggered { at, run } => {
            values.extend(values! {":at": at.as_second(), ":run": run});
        }
        ScheduleChange::Skipped { at, held_at, error } => values.extend(values! {
            ":at": at.as_second(),
            ":held_at": held_at.map(|at| at.as_second()),
            ":error": error.as_deref().map(free_text),
        }),
        ScheduleChange::Paused { is_paused, at } => {
            values.extend(values! {":is_paused": *is_paused, ":at": at.as_second()});
        }
    }
    Query::new(sql, values)
}

/// The statements of a change to the permit of a tree of this node.
fn change_permit(node: NodeId, root: RunId, change: PermitChange) -> Vec<Query<'static>> {
    let sql = match change {
        PermitChange::Release => Sql::ReleasePermit,
        PermitChange::Return => Sql::ReturnToQueue,
        PermitChange::GiveUp => Sql::GiveUpTree,
        PermitChange::HandOver => Sql::HandOverTree,
    };
    let query = |sql| Query::new(sql, values! {":root": root, ":node": node.0}.into());
    match change {
        PermitChange::GiveUp => vec![query(sql), query(Sql::RemoveEndedTree)],
        _ => vec![query(sql)],
    }
}

/// The statement of a change that `node` makes.
fn change_request(node: NodeId, change: &RequestChange) -> Query<'_> {
    match change {
        RequestChange::Add(request) => insert_request(node, request),
        RequestChange::Void(request) => Query::new(
            Sql::VoidRequest,
            values! {
                ":id": request.id.0,
                ":root": request.root,
                ":run": request.run,
                ":asker": node.0,
                ":kind": &request.kind,
                ":answer": NO_ANSWER,
            }
            .into(),
        ),
        RequestChange::Take(id) => {
            let values = values! {":id": id.0, ":node": node.0};
            Query::new(Sql::TakeRequest, values.into())
        }
        RequestChange::Answer(id, answer) => {
            let values = values! {":id": id.0, ":node": node.0, ":answer": answer};
            Query::new(Sql::AnswerRequest, values.into())
        }
        RequestChange::Withdraw(id) => {
            Query::new(Sql::WithdrawRequest, values! {":id": id.0}.into())
        }
        RequestChange::Delete(id) => Query::new(Sql::DeleteRequest, values! {":id": id.0}.into()),
        RequestChange::Trim => Query::new(Sql::TrimRequests, Vec::new()),
    }
}

/// The statement that adds a request of `node`.
pub fn insert_request(node: NodeId, request: &NewRequest) -> Query<'_> {
    let blobs = request.content.blobs.iter();
    let values = values! {
        ":id": request.id.0,
        ":root": request.root,
        ":run": request.run,
        ":asker": node.0,
        ":kind": request.kind,
        ":body": &request.content.body,
        ":blobs": blobs.map(|blob| &blob[..]).collect::<Vec<_>>(),
    };
    Query::new(Sql::InsertRequest, values.into())
}
