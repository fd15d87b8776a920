//! The writer: takes the queued jobs, commits them together, publishes their events and replies.

use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_postgres::Error;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use crate::config::cluster::Cluster;
use crate::domain::run::RunId;
use crate::instruments::Histogram;
use crate::store::StoreError;
use crate::store::cluster::DecidePermits;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::postgres::commit::{
    CommitError, Refusal, WriterState, is_duplicate, is_single_task_error,
};
use crate::store::postgres::connect::Connector;
use crate::store::postgres::connection::{Connection, Query};
use crate::store::postgres::delete::{self, DeleteProgress};
use crate::store::postgres::error::{
    describe, is_disk_full, is_read_only, is_transient, store_error,
};
use crate::store::postgres::explain::{self, Explanation, explain};
use crate::store::postgres::node::{self, NodeStatus};
use crate::store::postgres::permits;
use crate::store::postgres::statements::Sql;
use crate::store::postgres::task_plan;
use crate::store::sql::value::values;
use crate::store::write_queue::callbacks::WriterCallbacks;
use crate::store::write_queue::failed_runs::FailedRuns;
use crate::store::write_queue::job::{Job, JobResult, Reply, Task};

/// Largest number of jobs of one commit.
const MAX_BATCH_JOBS: usize = 256;
/// Most bytes that the jobs of one commit have together, if they are more than one: all is sent before the first answer.
const MAX_BATCH_BYTES: usize = 8 << 20;
/// Attempts to commit what conflicts with another transaction.
const MAX_ATTEMPTS: u32 = 5;
/// The longest pause before another attempt.
const MAX_PAUSE: Duration = Duration::from_millis(50);
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// How long it may take to connect and to read what belongs to this node, or to join again.
const MAX_OPEN_TIME: Duration = Duration::from_secs(10);

pub struct Writer<'c> {
    connector: &'c Connector,
    cluster: &'c Cluster,
    /// `None` after it was lost.
    connection: Option<Connection>,
    state: WriterState,
    status: Rc<NodeStatus>,
    /// When it tries next to connect or to join again, whatever jobs come until then.
    retry_at: Instant,
    /// Whether nothing answered the last attempt to connect.
    is_unanswered: bool,
    /// Whether the last attempt to join again failed: logged once.
    is_join_failing: bool,
    failed_runs: FailedRuns,
    callbacks: &'c WriterCallbacks,
    commits: &'c Histogram,
    /// When the transaction in progress began.
    began_at: Instant,
}

impl<'c> Writer<'c> {
    pub fn new(
        (connector, cluster): (&'c Connector, &'c Cluster),
        state: WriterState,
        status: Rc<NodeStatus>,
        callbacks: &'c WriterCallbacks,
        commits: &'c Histogram,
    ) -> Self {
        Self {
            connector,
            cluster,
            connection: None,
            state,
            status,
            retry_at: Instant::now(),
            is_unanswered: false,
            is_join_failing: false,
            failed_runs: FailedRuns::default(),
            callbacks,
            commits,
            began_at: Instant::now(),
        }
    }

    /// Connects for the first time.
    ///
    /// # Errors
    /// The database does not have the tables of this version, or does not answer.
    pub async fn connect(&mut self) -> Result<(), StoreError> {
        self.connected().await.map(drop).map_err(commit_error)
    }

    /// Serves jobs until it is closed or all senders are dropped. Then it leaves the database. Returns whom to inform.
    pub async fn run(
        &mut self,
        jobs: &mut mpsc::Receiver<Job>,
    ) -> Option<oneshot::Sender<JobResult>> {
        let mut close_reply = None;
        let mut batch = Vec::with_capacity(MAX_BATCH_JOBS);
        while self.fill_batch(jobs, &mut batch).await {
            let close = (batch.iter()).position(|job| matches!(job.task, Task::Close(_)));
            if let Some(close) = close.map(|index| batch.remove(index)) {
                // Jobs that are queued now are still done; later ones are rejected.
                jobs.close();
                close_reply = close.reply;
            }
            let writes = batch.len();
            let results = self.commit_batch(&batch).await;
            let is_notifying = std::mem::take(&mut self.state.has_new_notifications);
            self.callbacks.report(&mut batch, results, is_notifying);
            if self.state.deletions.is_due(writes) {
                self.delete_next_part().await;
            }
        }
        self.leave().await;
        close_reply
    }

    /// Moves queued jobs into the batch. Waits only if nothing else is to be done. Returns false if no job will come.
    async fn fill_batch(&mut self, jobs: &mut mpsc::Receiver<Job>, batch: &mut Vec<Job>) -> bool {
        while !self.state.deletions.is_due(0) {
            let status = Rc::clone(&self.status);
            let is_replaced = status.is_replaced.get();
            tokio::select! {
                biased;
                () = status.replaced.notified() => {
                    self.retry_later();
                    self.stop_trees();
                }
                () = tokio::time::sleep_until(self.retry_at), if is_replaced => {
                    self.join_again().await;
                    // After the attempt, which may have taken long: jobs come between two of them.
                    self.retry_later();
                }
                () = tokio::time::sleep_until(self.retry_at), if !is_replaced && self.connection.is_none() => {
                    // The next task has the error.
                    let _ = self.connected().await;
                    self.retry_later();
                }
                count = jobs.recv_many(batch, MAX_BATCH_JOBS) => return count > 0,
            }
        }
        while batch.len() < MAX_BATCH_JOBS {
            match jobs.try_recv() {
                Ok(job) => batch.push(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return !batch.is_empty(),
            }
        }
        true
    }

    fn retry_later(&mut self) {
        self.retry_at = Instant::now() + RECONNECT_INTERVAL;
    }

    /// The jobs in their order: those that can be done together in one transaction.
    async fn commit_batch(&mut self, batch: &[Job]) -> Vec<JobResult> {
        let mut results = Vec::with_capacity(batch.len());
        while let Some(job) = batch.get(results.len()) {
            let rest = &batch[results.len()..];
            match &job.task {
                Task::ClearFailed(roots, owned) => {
                    results.push(self.clear_failed(roots, owned).await);
                }
                Task::Delete(_) => {
                    let roots = rest.iter().map_while(|job| match &job.task {
                        Task::Delete(root) => Some(*root),
                        _ => None,
                    });
                    let roots: Vec<RunId> = roots.take(delete::MAX_TREES).collect();
                    results.extend(self.delete(&roots).await);
                }
                Task::Vacuum => results.push(self.vacuum().await),
                Task::ClaimTrees(max, claimed) => {
                    results.push(self.claim_trees(*max, claimed).await);
                }
                Task::ClaimUnserved(root) => results.push(self.claim_unserved(*root).await),
                Task::GivePermits(decide) => results.push(self.give_permits(decide).await),
                _ => {
                    let is_full = self.state.is_disk_full;
                    let part = &rest[..part_len(rest, is_full)];
                    results.extend(self.commit_part(part).await);
                }
            }
        }
        results
    }

    /// These trees are about to be resumed. What they belong to is read again: a commit of which the outcome was unknown when this
    /// writer connected may have come after that, or may still come: it is waited for, or refused.
    async fn clear_failed(&mut self, roots: &[RunId], owned: &UnboundedSender<RunId>) -> JobResult {
        let (db, state) = self.connected().await.map_err(commit_error)?;
        let found = match state.renew_trees(db, roots).await {
            Err(error) if is_transient(&error) => state.renew_trees(db, roots).await,
            found => found,
        };
        for root in found.map_err(|error| store_error(&error))? {
            let _ = owned.send(root);
        }
        roots.iter().for_each(|root| self.failed_runs.remove(*root));
        Ok(Reply::Number(0))
    }

    async fn commit_part(&mut self, jobs: &[Job]) -> Vec<JobResult> {
        if self.status.is_replaced.get() {
            return self.reject(jobs, &StoreError::Fenced);
        }
        let is_failed = |job: &Job| match &job.task {
            Task::Write(write) => {
                let others = write.others.iter().map(|(other, _)| other.root);
                std::iter::once(write.root)
                    .chain(others)
                    .any(|root| self.failed_runs.contains(root))
            }
            _ => false,
        };
        if jobs.iter().any(is_failed) {
            return self.commit_each(jobs).await;
        }
        let tasks: Vec<&Task> = jobs.iter().map(|job| &job.task).collect();
        match self.commit(&tasks, &HashSet::new()).await {
            Ok(results) => results.into_iter().map(Ok).collect(),
            Err(CommitError::Refused(Refusal::Node)) => self.reject(jobs, &StoreError::Fenced),
            Err(CommitError::Refused(_)) => self.commit_each(jobs).await,
            Err(CommitError::Database(error))
                if self.connection.is_some() && is_single_task_error(&error) =>
            {
                self.commit_each(jobs).await
            }
            Err(CommitError::Database(error)) => self.reject(jobs, &store_error(&error)),
            Err(CommitError::Unavailable(error)) => self.reject(jobs, &error),
        }
    }

    fn reject(&mut self, jobs: &[Job], error: &StoreError) -> Vec<JobResult> {
        jobs.iter().for_each(|job| self.mark_failed(job));
        jobs.iter().map(|_| Err(error.clone())).collect()
    }

    /// Each in a transaction of its own: finds those that cannot be done, and commits the others.
    async fn commit_each(&mut self, jobs: &[Job]) -> Vec<JobResult> {
        let mut results = Vec::with_capacity(jobs.len());
        for job in jobs {
            let result = self.commit_one(&job.task).await;
            // A run that was never accepted has no record with a gap.
            if result.is_err() && !matches!(result, Err(StoreError::AlreadyClaimed(_))) {
                self.mark_failed(job);
            }
            results.push(result);
        }
        results
    }

    async fn commit_one(&mut self, task: &Task) -> JobResult {
        let mut left_out = HashSet::new();
        if let Task::Write(write) = task {
            if self.failed_runs.contains(write.root) {
                return Err(StoreError::Suspended);
            }
            for (index, (other, _)) in write.others.iter().enumerate() {
                if self.failed_runs.contains(other.root) {
                    warn_late(other, &StoreError::Suspended);
                    left_out.insert(index);
                }
            }
        }
        loop {
            let refused = match self.commit(&[task], &left_out).await {
                Ok(results) => {
                    let reply = results.into_iter().next();
                    return Ok(reply.unwrap_or(Reply::Number(0)));
                }
                Err(CommitError::Refused(refusal)) => refusal,
                Err(CommitError::Unavailable(error)) => return Err(error),
                Err(CommitError::Database(error)) => return Err(task_error(task, &error)),
            };
            let (Task::Write(write), Refusal::Write { other }) = (task, refused) else {
                return Err(StoreError::Fenced);
            };
            match other {
                None => {
                    let error = match self.explain(write).await? {
                        Explanation::Ignored => return Ok(Reply::Number(0)),
                        Explanation::TreeEnded => {
                            self.revive(write.root).await.map_err(commit_error)?;
                            continue;
                        }
                        Explanation::Rejected(error) => error,
                    };
                    if matches!(error, StoreError::Fenced) && self.is_removed().await? {
                        self.status.mark_replaced();
                    }
                    return Err(error);
                }
                Some(index) => {
                    let other = &write.others[index].0;
                    match self.explain(other).await? {
                        Explanation::Ignored => {}
                        Explanation::TreeEnded => {
                            self.revive(other.root).await.map_err(commit_error)?;
                            continue;
                        }
                        Explanation::Rejected(error) => warn_late(other, &error),
                    }
                    left_out.insert(index);
                }
            }
        }
    }

    async fn explain(&mut self, write: &EncodedWrite) -> Result<Explanation, StoreError> {
        let db = self.connection.as_ref().ok_or(StoreError::Suspended)?;
        let explained = explain(db, &self.state, write).await;
        explained.map_err(|error| store_error(&error))
    }

    /// Whether other nodes have removed this one.
    async fn is_removed(&self) -> Result<bool, StoreError> {
        let db = self.connection.as_ref().ok_or(StoreError::Suspended)?;
        let removed = explain::is_removed(db, &self.state).await;
        removed.map_err(|error| store_error(&error))
    }

    /// Commits tasks together, or rolls all back. Conflicts with other transactions are repeated.
    async fn commit(
        &mut self,
        tasks: &[&Task],
        left_out: &HashSet<usize>,
    ) -> Result<Vec<Reply>, CommitError> {
        let mut attempt = 1;
        loop {
            let (db, state) = self.connected().await?;
            let committed = state.commit(db, tasks, left_out).await;
            match self.settle(committed).await {
                Err(CommitError::Database(error))
                    if attempt < MAX_ATTEMPTS && is_transient(&error) =>
                {
                    attempt += 1;
                    // Otherwise the two would meet again.
                    tokio::time::sleep(MAX_PAUSE.mul_f64(fastrand::f64())).await;
                }
                settled => return settled,
            }
        }
    }

    /// Rolls back what was not committed.
    async fn settle<T>(&mut self, committed: Result<T, CommitError>) -> Result<T, CommitError> {
        if committed.is_ok() {
            self.commits.observe(self.began_at.elapsed());
            return committed;
        }
        match &committed {
            Err(CommitError::Refused(_)) => self.state.reset_after_refusal(),
            _ => self.state.reset(),
        }
        match &committed {
            Err(CommitError::Refused(Refusal::Node)) => self.status.mark_replaced(),
            // The next connection may find a server that takes writes.
            Err(CommitError::Database(error)) if is_read_only(error) => self.disconnect(),
            Err(CommitError::Database(error)) if is_disk_full(error) => {
                self.state.report_full_disk(error);
            }
            _ => {}
        }
        let rollback = Query::new(Sql::Rollback, Vec::new());
        if let Some(db) = &self.connection
            && let Err(error) = db.execute(&rollback).await
        {
            let error = self.connector.name.error(&error);
            warn!(error = %error, "The writer's connection is lost, connecting again: {error}");
            self.disconnect();
        }
        committed
    }

    fn disconnect(&mut self) {
        self.connection = None;
        self.status.is_cut_off.set(true);
    }

    /// The connection and what the writer knows, after the connection was opened again if it was lost.
    async fn connected(&mut self) -> Result<(&Connection, &mut WriterState), CommitError> {
        if self.connection.as_ref().is_none_or(Connection::is_closed) {
            self.disconnect();
            let name = &self.connector.name;
            if self.is_unanswered && Instant::now() < self.retry_at {
                // Each attempt takes long, and many jobs may wait.
                return Err(CommitError::Unavailable(name.no_answer()));
            }
            let opened = tokio::time::timeout(MAX_OPEN_TIME, self.open()).await;
            self.is_unanswered = opened.is_err();
            if self.is_unanswered {
                self.connector.unanswered.notify_waiters();
                self.retry_later();
            }
            self.connection = Some(name.in_time(opened).map_err(CommitError::Unavailable)?);
            self.status.is_cut_off.set(false);
        }
        self.began_at = Instant::now();
        let lost = || CommitError::Unavailable(StoreError::Closed);
        let db = self.connection.as_ref().ok_or_else(lost)?;
        Ok((db, &mut self.state))
    }

    /// The outcome of the last commit may be unknown: the trees are read again.
    async fn open(&mut self) -> Result<Connection, Error> {
        let db = Connection::open(self.connector).await?;
        let owned = self.state.read_trees(&db).await?;
        let mut lost = std::mem::replace(&mut self.state.trees, owned);
        lost.retain(|root, _| !self.state.trees.contains_key(root));
        self.stop(lost.into_keys());
        Ok(db)
    }

    /// Marks the tree of a failed fire-and-forget write: later writes to it are rejected.
    fn mark_failed(&mut self, job: &Job) {
        if let (Task::Write(write), None) = (&job.task, &job.reply) {
            self.failed_runs.insert(write.root);
        }
    }

    /// Other nodes have all trees now.
    fn stop_trees(&mut self) {
        let trees = std::mem::take(&mut self.state.trees);
        self.stop(trees.into_keys());
    }

    /// Another node has these trees now, or they have ended.
    fn stop(&mut self, roots: impl Iterator<Item = RunId>) {
        for root in roots {
            self.failed_runs.insert(root);
            if let Some(on_write_failed) = self.callbacks.on_write_failed.get() {
                on_write_failed(root);
            }
        }
    }

    /// Joins as a new node without trees.
    async fn join_again(&mut self) {
        let name = &self.connector.name;
        let joined = async {
            let (mut client, driver) = self.connector.connect_driven().await?;
            // A server that hangs would keep the connection.
            let _driver = AbortOnDropHandle::new(driver);
            node::join_again(&mut client, self.cluster).await
        };
        let joined = tokio::time::timeout(MAX_OPEN_TIME, joined).await;
        match name.in_time(joined) {
            Ok(node) => {
                info!("This node has joined again");
                self.is_join_failing = false;
                self.state.node = node;
                self.state.reset();
                self.status.node.set(node);
                self.status.is_replaced.set(false);
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_join_failing, true) {
                    warn!(error = %error, "This node could not join again, trying on: {error}");
                }
            }
        }
    }

    async fn claim_trees(&mut self, max: usize, claimed: &UnboundedSender<RunId>) -> JobResult {
        if self.status.is_replaced.get() {
            return Err(StoreError::Fenced);
        }
        let (db, state) = self.connected().await.map_err(commit_error)?;
        let roots = state.claim_trees(db, max).await;
        let roots = self.settle(roots).await.map_err(commit_error)?;
        for root in &roots {
            // The caller may have given up: the next one that looks for its trees finds them.
            let _ = claimed.send(*root);
        }
        Ok(Reply::Number(roots.len() as u64))
    }

    async fn claim_unserved(&mut self, root: RunId) -> JobResult {
        if self.status.is_replaced.get() {
            return Err(StoreError::Fenced);
        }
        let (db, state) = self.connected().await.map_err(commit_error)?;
        let claimed = state.claim_unserved(db, root).await;
        let is_claimed = self.settle(claimed).await.map_err(commit_error)?;
        if is_claimed {
            // Nothing here drives it, so that nobody else says that its writes are to be accepted again.
            self.failed_runs.remove(root);
        }
        Ok(Reply::Number(u64::from(is_claimed)))
    }

    async fn give_permits(&mut self, decide: &DecidePermits) -> JobResult {
        if self.status.is_replaced.get() {
            return Err(StoreError::Fenced);
        }
        let (db, state) = self.connected().await.map_err(commit_error)?;
        let given = permits::give(state, db, decide).await;
        let given = self.settle(given).await.map_err(commit_error)?;
        Ok(Reply::Number(given))
    }

    /// Removes these trees: the small ones at once, and a part of each that is large.
    async fn delete(&mut self, roots: &[RunId]) -> Vec<JobResult> {
        let mut results = Vec::with_capacity(roots.len());
        for (root, deleted) in roots.iter().zip(self.delete_small(roots).await) {
            results.push(match deleted {
                Some(count) => Ok(Reply::Number(count)),
                // Also if another tree is the one that cannot be removed.
                None => self.delete_large(*root).await,
            });
        }
        results
    }

    /// What became of each tree; `None` if nothing.
    async fn delete_small(&mut self, roots: &[RunId]) -> Vec<Option<u64>> {
        let deleted = match self.connected().await {
            Ok((db, state)) => state.delete_small(db, roots).await,
            Err(error) => Err(error),
        };
        match self.settle(deleted).await {
            Ok(progress) => {
                let result = |progress| match progress {
                    None => Some(0),
                    Some(DeleteProgress::Done) => Some(1),
                    Some(DeleteProgress::More) => None,
                };
                progress.into_iter().map(result).collect()
            }
            Err(_) => vec![None; roots.len()],
        }
    }

    async fn delete_large(&mut self, root: RunId) -> JobResult {
        match self.delete_part(root, true).await.map_err(commit_error)? {
            None => Ok(Reply::Number(0)),
            Some(progress) => {
                if progress == DeleteProgress::More {
                    self.state.deletions.add(root);
                }
                Ok(Reply::Number(1))
            }
        }
    }

    async fn delete_part(
        &mut self,
        root: RunId,
        is_new: bool,
    ) -> Result<Option<DeleteProgress>, CommitError> {
        let (db, state) = self.connected().await?;
        let deleted = state.delete_part(db, root, is_new).await;
        self.settle(deleted).await
    }

    /// Removes the next part of a tree that is being deleted, in a transaction of its own.
    async fn delete_next_part(&mut self) {
        let Some(root) = self.state.deletions.next_root() else {
            return;
        };
        match self.delete_part(root, false).await.map_err(commit_error) {
            Ok(Some(DeleteProgress::More)) => {}
            Ok(Some(DeleteProgress::Done) | None) => self.state.deletions.remove(root),
            Err(error) => {
                self.state.deletions.pause();
                warn!(run.id = %root, run.root = %root, error = %error, "The deletion of {root} failed, trying again after the next write: {error}");
            }
        }
    }

    /// Removes a few definitions that no run uses. The server returns unused space by itself.
    async fn vacuum(&mut self) -> JobResult {
        let (db, state) = self.connected().await.map_err(commit_error)?;
        let deleted = state.delete_unused_definitions(db).await;
        let has_more = self.settle(deleted).await.map_err(commit_error)?;
        self.adopt_deletions().await.map_err(commit_error)?;
        let has_more = has_more || self.state.deletions.is_due(1);
        Ok(Reply::Number(u64::from(has_more)))
    }

    /// Continues the deletions of nodes that are gone. It does not matter if another node continues them too.
    async fn adopt_deletions(&mut self) -> Result<(), CommitError> {
        let (db, state) = self.connected().await?;
        let found = db.execute(&Query::new(Sql::Deletions, Vec::new())).await?;
        for row in &found.rows {
            state.deletions.add(RunId(row.try_get("root")?));
        }
        Ok(())
    }

    async fn revive(&mut self, root: RunId) -> Result<(), CommitError> {
        let (db, state) = self.connected().await?;
        let revived = state.revive(db, root).await;
        self.settle(revived).await
    }

    async fn leave(&mut self) {
        let node = self.state.node;
        if let Ok((db, _)) = self.connected().await {
            let leave = Query::new(Sql::LeaveNode, values! {":node": node.0}.into());
            if let Err(error) = db.execute(&leave).await {
                warn!(error = %error, "This node could not leave the database, the next start waits a few seconds: {error}");
            }
        }
    }
}

/// How many of the first jobs are committed together.
fn part_len(jobs: &[Job], is_disk_full: bool) -> usize {
    let mut bytes = 0;
    let ends_part = |job: &Job| {
        bytes += job.task.bytes();
        bytes > MAX_BATCH_BYTES || task_plan::is_alone(&job.task, is_disk_full)
    };
    let len = jobs.iter().position(ends_part).unwrap_or(jobs.len());
    len.max(1)
}

fn commit_error(error: CommitError) -> StoreError {
    match error {
        CommitError::Refused(_) => StoreError::Fenced,
        CommitError::Database(error) => store_error(&error),
        CommitError::Unavailable(error) => error,
    }
}

/// Why one task could not be committed.
fn task_error(task: &Task, error: &Error) -> StoreError {
    match task {
        Task::Write(write) if is_duplicate(error) => {
            StoreError::Backend(format!("{} is in the store already", write.run))
        }
        _ if error.code().is_some() && is_single_task_error(error) => {
            StoreError::Refused(describe(error))
        }
        _ => store_error(error),
    }
}

fn warn_late(other: &EncodedWrite, error: &StoreError) {
    warn!(run.id = %other.run, run.root = %other.root, error = %error, "A write to {} came too late: {error}", other.run);
}
