//! Commits a batch of tasks in one transaction: all their statements in one round trip, and what depends on their outcomes
//! with the commit in another one. If one of them cannot be done, none is, and the caller does them one by one.

use std::collections::{HashMap, HashSet};

use tokio_postgres::{Error, Row};
use tracing::{error, info};
use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::domain::run::{RunId, now};
use crate::store::cluster::PermitChange;
use crate::store::encoding::clock_skew;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::integers::signed;
use crate::store::postgres::connection::{Connection, Outcome, Query};
use crate::store::postgres::error::describe;
use crate::store::postgres::run_changes::Ownership;
use crate::store::postgres::run_inserts;
use crate::store::postgres::statements::Sql;
use crate::store::postgres::usage_rollup::{self, UsageRollup};
use crate::store::postgres::write_plan::{self, WriteMemory, WriteQueries};
use crate::store::postgres::{delete, task_plan};
use crate::store::sql::value::values;
use crate::store::write_queue::deletions::Deletions;
use crate::store::write_queue::job::{ForgetProgress, Reply, Task};
use crate::store::{Change, StoreError};

/// What the writer knows about the database besides its connection.
pub struct WriterState {
    /// This process among those that use the database.
    pub node: NodeId,
    /// The trees that belong to this node, with the number of their owner; read when the writer connects.
    pub trees: HashMap<RunId, i64>,
    /// The roots of the trees that the transaction creates.
    new_roots: HashSet<RunId>,
    pub memory: WriteMemory,
    pub usage: UsageRollup,
    pub deletions: Deletions,
    /// Whether events made push notifications due since the last report.
    pub has_new_notifications: bool,
    /// Whether a statement found no space on the server's disk, and no check has found some since.
    pub is_disk_full: bool,
}

/// Why a transaction was not committed.
#[derive(Debug)]
pub enum CommitError {
    /// A statement that must affect a row affects none.
    Refused(Refusal),
    Database(Error),
    /// There is no connection.
    Unavailable(StoreError),
}

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The node was replaced.
    Node,
    /// A write: the one of the task, or one of its others.
    Write { other: Option<usize> },
}

impl From<Error> for CommitError {
    fn from(error: Error) -> Self {
        Self::Database(error)
    }
}

/// A task with its statements.
struct PlannedTask<'a> {
    task: &'a Task,
    /// The first of its statements, and the one after them.
    start: usize,
    end: usize,
    /// The write of the task first, then its others by their index.
    writes: Vec<(Option<usize>, &'a EncodedWrite, WriteQueries)>,
}

impl WriterState {
    pub fn new(node: NodeId, deletions: Deletions) -> Self {
        Self {
            node,
            trees: HashMap::new(),
            new_roots: HashSet::new(),
            memory: WriteMemory::new(node.0),
            usage: UsageRollup::default(),
            deletions,
            has_new_notifications: false,
            is_disk_full: false,
        }
    }

    /// Discards what is remembered of a transaction that was refused. It had counted no usage yet.
    pub fn reset_after_refusal(&mut self) {
        self.memory.reset();
    }

    /// Discards what is remembered of a transaction that was rolled back, or may have been.
    pub fn reset(&mut self) {
        self.memory.reset();
        self.usage.reset();
    }

    /// A statement failed for want of space: from now on checks need some too.
    pub fn report_full_disk(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.is_disk_full, true) {
            let error = describe(error);
            error!(
                error,
                "The disk of the database's server is full: until there is space again most writes are refused: {error}"
            );
        }
    }

    /// Commits these tasks, without the writes of `left_out` among the others of the first task. Returns their results.
    pub async fn commit(
        &mut self,
        db: &Connection,
        tasks: &[&Task],
        left_out: &HashSet<usize>,
    ) -> Result<Vec<Reply>, CommitError> {
        self.new_roots.clear();
        let mut queries = vec![Query::new(Sql::Begin, Vec::new())];
        let is_write = |task: &&&Task| matches!(task, Task::Write(_));
        if tasks.iter().filter(is_write).count() < tasks.len() {
            queries.push(self.guard());
        }
        queries.extend(run_inserts::lock_sessions(tasks));
        let planned: Vec<_> = tasks
            .iter()
            .map(|task| self.plan(task, left_out, &mut queries))
            .collect();
        let outcomes = db.execute_all(&queries).await?;
        if let Some(refusal) = refusal(&queries, &outcomes, &planned) {
            return Err(CommitError::Refused(refusal));
        }
        let mut last = self.follow_up(db, &planned, &outcomes).await?;
        last.push(Query::new(Sql::Commit, Vec::new()));
        db.execute_all(&last).await?;
        self.has_new_notifications |= last.len() > 1 && has_notifications(&planned, &outcomes);
        self.usage.shrink();
        let results = planned.iter().map(|task| self.finish(task, &outcomes));
        Ok(results.collect::<Result<_, Error>>()?)
    }

    /// Refuses what a replaced node would write besides its trees.
    pub fn guard(&self) -> Query<'static> {
        Query::required(Sql::GuardNode, values! {":node": self.node.0}.into())
    }

    fn plan<'a>(
        &mut self,
        task: &'a Task,
        left_out: &HashSet<usize>,
        queries: &mut Vec<Query<'a>>,
    ) -> PlannedTask<'a> {
        let start = queries.len();
        let mut writes = Vec::new();
        if let Task::Write(write) = task {
            let others = write.others.iter().enumerate();
            let others = others.filter(|(index, _)| !left_out.contains(index));
            let others = others.map(|(index, (other, _))| (Some(index), other));
            for (index, write) in std::iter::once((None, write)).chain(others) {
                if write.run == write.root && matches!(write.change, Change::Create(_)) {
                    self.new_roots.insert(write.root);
                }
                let owner = self.owner(write.root);
                writes.push((index, write, self.memory.plan(write, owner, queries)));
            }
        } else {
            queries.extend(task_plan::plan(task, self.node));
            if self.is_disk_full && matches!(task, Task::Check) {
                queries.push(Query::new(Sql::TakeSpace, Vec::new()));
                queries.push(Query::new(Sql::ReturnSpace, Vec::new()));
            }
        }
        PlannedTask {
            task,
            start,
            end: queries.len(),
            writes,
        }
    }

    /// A tree that does not belong to this node has no owner with the number 0.
    fn owner(&self, root: RunId) -> Ownership {
        Ownership {
            node: self.node.0,
            epoch: match self.new_roots.contains(&root) {
                true => FIRST_EPOCH,
                false => self.trees.get(&root).copied().unwrap_or(0),
            },
        }
    }

    /// What depends on the outcomes: sums of usage, and push notifications.
    async fn follow_up<'a>(
        &mut self,
        db: &Connection,
        planned: &[PlannedTask<'a>],
        outcomes: &[Outcome],
    ) -> Result<Vec<Query<'a>>, Error> {
        let mut queries = Vec::new();
        for task in planned {
            for (_, write, at) in &task.writes {
                if let Change::Finish(finished) = &write.change {
                    for row in &outcomes[at.main].rows {
                        let ended = usage_rollup::ended_run(row, finished)?;
                        self.usage.count(db, ended).await?;
                    }
                }
                if let (Some(targets), Some(event)) = (at.push_targets, write.notified_event) {
                    for row in &outcomes[targets].rows {
                        let (id, url) = (row.try_get("id")?, row.try_get("url")?);
                        queries.push(write_plan::insert_notification(write.root, id, url, event));
                    }
                }
            }
            match task.task {
                // What was removed may be cached.
                Task::TrimUsage(_) if affected(task, outcomes) > 0 => self.usage.reset(),
                _ => {}
            }
        }
        queries.extend(self.usage.changes());
        Ok(queries)
    }

    /// The result of a committed task.
    fn finish(&mut self, task: &PlannedTask<'_>, outcomes: &[Outcome]) -> Result<Reply, Error> {
        if let Task::Change(_) = task.task {
            let outcomes = &outcomes[task.start..task.end];
            let rows = outcomes.iter().map(|outcome| outcome.affected);
            return Ok(Reply::Changed(rows.collect()));
        }
        let mut result = 0;
        for (index, write, at) in &task.writes {
            let row = outcomes[at.main].rows.first();
            let last_event: i64 = row.map_or(Ok(0), |row| row.try_get("last_event"))?;
            let last_seq = match write.event_count() {
                0 => 0,
                _ => last_event.unsigned_abs(),
            };
            match (index, task.task) {
                (Some(index), Task::Write(write)) => write.others[*index].1.set(last_seq),
                _ => result = last_seq,
            }
            if write.run == write.root {
                match &write.change {
                    Change::Create(new_run) if new_run.entry.is_here => {
                        self.trees.insert(write.root, FIRST_EPOCH);
                    }
                    Change::Finish(_) => drop(self.trees.remove(&write.root)),
                    _ => {}
                }
            }
        }
        let affected = affected(task, outcomes);
        Ok(Reply::Number(match task.task {
            Task::Write(_) => result,
            Task::ChangeRequest(..) => affected,
            Task::TrimUsage(_) => u64::from(affected > 0),
            Task::ForgetSession(..) => match outcomes[task.end - 1].affected {
                0 => ForgetProgress::NotFound as u64,
                runs if runs >= task_plan::SESSION_PART_RUNS.into() => ForgetProgress::More as u64,
                _ => ForgetProgress::Done as u64,
            },
            Task::HandOverTree(root, _) | Task::ChangePermit(root, PermitChange::HandOver) => {
                if affected > 0 {
                    self.trees.remove(root);
                }
                0
            }
            Task::ChangePermit(root, PermitChange::GiveUp) => {
                if outcomes[task.end - 1].affected > 0 {
                    self.trees.remove(root);
                }
                0
            }
            Task::Check => {
                if std::mem::take(&mut self.is_disk_full) {
                    info!("The disk of the database's server has space again");
                }
                0
            }
            _ => 0,
        }))
    }

    /// Removes small trees in one transaction; see [`delete::delete_small`].
    pub async fn delete_small(
        &mut self,
        db: &Connection,
        roots: &[RunId],
    ) -> Result<Vec<Option<delete::DeleteProgress>>, CommitError> {
        let begin = [Query::new(Sql::Begin, Vec::new()), self.guard()];
        if db.execute_all(&begin).await?[1].affected == 0 {
            return Err(CommitError::Refused(Refusal::Node));
        }
        let progress = delete::delete_small(db, roots).await?;
        db.execute(&Query::new(Sql::Commit, Vec::new())).await?;
        for root in roots {
            self.trees.remove(root);
        }
        self.memory.inserts.reset();
        Ok(progress)
    }

    /// Removes the next part of a tree, in a transaction of its own; true if there is more. `is_new` if its deletion begins:
    /// then there may be no such root.
    pub async fn delete_part(
        &mut self,
        db: &Connection,
        root: RunId,
        is_new: bool,
    ) -> Result<Option<delete::DeleteProgress>, CommitError> {
        let begin = [
            Query::new(Sql::Begin, Vec::new()),
            self.guard(),
            Query::new(Sql::HasRoot, values! {":id": root}.into()),
        ];
        let outcomes = db.execute_all(&begin).await?;
        if outcomes[1].affected == 0 {
            return Err(CommitError::Refused(Refusal::Node));
        }
        if is_new && outcomes[2].affected == 0 {
            db.execute(&Query::new(Sql::Rollback, Vec::new())).await?;
            return Ok(None);
        }
        let progress = delete::delete_part(db, root).await?;
        let mark = match progress {
            delete::DeleteProgress::More => Sql::MarkDeletion,
            delete::DeleteProgress::Done => Sql::UnmarkDeletion,
        };
        let end = [
            Query::new(mark, values! {":root": root}.into()),
            Query::new(Sql::Commit, Vec::new()),
        ];
        db.execute_all(&end).await?;
        self.trees.remove(&root);
        self.memory.inserts.reset();
        Ok(Some(progress))
    }

    /// Takes a tree whose root has ended, but not all of its runs, unless another node is quicker or the root is deleted.
    pub async fn revive(&mut self, db: &Connection, root: RunId) -> Result<(), CommitError> {
        let queries = [
            Query::new(Sql::Begin, Vec::new()),
            self.guard(),
            Query::new(
                Sql::ReviveTree,
                values! {":root": root, ":node": self.node.0}.into(),
            ),
            Query::new(Sql::Commit, Vec::new()),
        ];
        let outcomes = db.execute_all(&queries).await?;
        if outcomes[1].affected == 0 {
            return Err(CommitError::Refused(Refusal::Node));
        }
        if outcomes[2].affected > 0 {
            self.trees.insert(root, FIRST_EPOCH);
        }
        Ok(())
    }

    /// Takes trees that nobody owns, at most `max`, and returns their roots.
    pub async fn claim_trees(
        &mut self,
        db: &Connection,
        max: usize,
    ) -> Result<Vec<RunId>, CommitError> {
        let values = values! {":node": self.node.0, ":max": signed(max as u64)};
        let claimed = db
            .execute(&Query::new(Sql::ClaimTrees, values.into()))
            .await?;
        let mut roots = Vec::with_capacity(claimed.rows.len());
        for row in &claimed.rows {
            roots.push(self.take_tree(row)?);
        }
        Ok(roots)
    }

    /// The root of a tree that this node has from now on.
    fn take_tree(&mut self, row: &Row) -> Result<RunId, Error> {
        let (root, epoch) = tree(row)?;
        self.trees.insert(root, epoch);
        Ok(root)
    }

    /// The trees of this node.
    pub async fn read_trees(&self, db: &Connection) -> Result<HashMap<RunId, i64>, Error> {
        let values = values! {":node": self.node.0};
        let found = db
            .execute(&Query::new(Sql::OwnTrees, values.into()))
            .await?;
        found.rows.iter().map(tree).collect()
    }

    /// Takes a new number for those of these trees that belong to this node, and returns those of them that it owns.
    pub async fn renew_trees(
        &mut self,
        db: &Connection,
        roots: &[RunId],
    ) -> Result<Vec<RunId>, Error> {
        let ids: Vec<_> = roots.iter().map(|root| root.0).collect();
        let values = values! {":node": self.node.0, ":roots": ids};
        let renewed = db
            .execute(&Query::new(Sql::OwnTreesOf, values.into()))
            .await?;
        let mut owned = Vec::with_capacity(renewed.rows.len());
        for row in &renewed.rows {
            let root = self.take_tree(row)?;
            if row.try_get("is_owner")? {
                owned.push(root);
            }
        }
        Ok(owned)
    }

    /// Takes a tree whose labels no node has; false if that is not so.
    pub async fn claim_unserved(
        &mut self,
        db: &Connection,
        root: RunId,
    ) -> Result<bool, CommitError> {
        let values = values! {":root": root, ":node": self.node.0};
        let queries = [
            Query::new(Sql::Begin, Vec::new()),
            self.guard(),
            Query::new(Sql::LockTree, values! {":root": root}.into()),
            Query::new(Sql::ClaimUnserved, values.into()),
            Query::new(Sql::Commit, Vec::new()),
        ];
        let outcomes = db.execute_all(&queries).await?;
        if outcomes[1].affected == 0 {
            return Err(CommitError::Refused(Refusal::Node));
        }
        let Some(row) = outcomes[3].rows.first() else {
            return Ok(false);
        };
        self.trees.insert(root, row.try_get("epoch")?);
        Ok(true)
    }

    /// Removes a few definitions that were last used before the oldest run was accepted; true if there may be more.
    pub async fn delete_unused_definitions(
        &mut self,
        db: &Connection,
    ) -> Result<bool, CommitError> {
        let begin = [
            Query::new(Sql::Begin, Vec::new()),
            self.guard(),
            Query::new(Sql::OldestRun, Vec::new()),
        ];
        let outcomes = db.execute_all(&begin).await?;
        if outcomes[1].affected == 0 {
            return Err(CommitError::Refused(Refusal::Node));
        }
        let oldest = outcomes[2].rows.first();
        let oldest: Option<Uuid> = oldest.map(|row| row.try_get("id")).transpose()?;
        // Another node may be about to commit a run that uses a definition.
        let recent = now().as_millisecond() - MAX_COMMIT_MS;
        let unused_before =
            oldest.map_or(recent, |id| clock_skew::created_ms(RunId(id)).min(recent));
        let values = values! {":unused_before": unused_before};
        let end = [
            Query::new(Sql::DeleteOldDefinitions, values.into()),
            Query::new(Sql::Commit, Vec::new()),
        ];
        let outcomes = db.execute_all(&end).await?;
        self.memory.inserts.reset();
        Ok(outcomes[0].affected > 0)
    }
}

/// How long a run may take to be committed after it was accepted, with the difference of the nodes' clocks.
const MAX_COMMIT_MS: i64 = 600_000;
/// Of the node that has accepted the tree.
const FIRST_EPOCH: i64 = 1;

/// A tree with its number.
fn tree(row: &Row) -> Result<(RunId, i64), Error> {
    Ok((RunId(row.try_get("root")?), row.try_get("epoch")?))
}

fn affected(task: &PlannedTask<'_>, outcomes: &[Outcome]) -> u64 {
    let outcomes = &outcomes[task.start..task.end];
    outcomes.iter().map(|outcome| outcome.affected).sum()
}

fn has_notifications(planned: &[PlannedTask<'_>], outcomes: &[Outcome]) -> bool {
    let mut writes = planned.iter().flat_map(|task| &task.writes);
    writes.any(|(_, _, at)| {
        at.push_targets
            .is_some_and(|targets| !outcomes[targets].rows.is_empty())
    })
}

/// The first statement that must affect a row and affects none.
fn refusal(
    queries: &[Query<'_>],
    outcomes: &[Outcome],
    planned: &[PlannedTask<'_>],
) -> Option<Refusal> {
    let mut results = queries.iter().zip(outcomes);
    let at = results.position(|(query, outcome)| query.must_affect && outcome.affected == 0)?;
    let task = planned
        .iter()
        .find(|task| (task.start..task.end).contains(&at));
    let writes = task.map(|task| task.writes.iter().rev());
    let write = writes.and_then(|mut writes| writes.find(|(_, _, queries)| queries.main <= at));
    Some(match write {
        Some((other, _, _)) => Refusal::Write { other: *other },
        None => Refusal::Node,
    })
}

/// Whether another attempt may succeed although this one failed, or a part of the batch alone causes the error.
pub fn is_single_task_error(error: &Error) -> bool {
    // Data, constraints, limits of the program, and triggers of the operator.
    let classes = ["22", "23", "54", "P0"];
    let code = error.code().map(|code| code.code());
    // Without a code a value could not be encoded or decoded.
    code.is_none_or(|code| classes.iter().any(|class| code.starts_with(class)))
        && !error.is_closed()
}

/// The run's row exists already.
pub fn is_duplicate(error: &Error) -> bool {
    error.code() == Some(&tokio_postgres::error::SqlState::UNIQUE_VIOLATION)
}
