//! The statements of the tasks that are no writes to a tree.

use crate::domain::node::NodeId;
use crate::domain::run::{RunId, now};
use crate::store::cluster::PermitChange;
use crate::store::new_request::NewRequest;
use crate::store::postgres::connection::Query;
use crate::store::postgres::statements::Sql;
use crate::store::postgres::usage_rollup::UsageRollup;
use crate::store::run_requests::{NO_ANSWER, RequestChange};
use crate::store::sql::value::{free_text, values};
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
        Task::Change(changes) => changes.statements.iter().map(Query::of).collect(),
        Task::ForgetSession(owner, name) => forget_session(owner.as_deref(), name),
        Task::TrimUsage(before) => UsageRollup::trim(*before),
        Task::ChangeRequest(node, change) => vec![change_request(*node, change)],
        Task::HandOverTree(root, labels) => {
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            let values = values! {":root": root, ":node": node.0, ":labels": labels};
            vec![Query::new(Sql::LeaveTree, values.into())]
        }
        Task::ChangePermit(root, change) => change_permit(node, *root, *change),
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
