//! Executes the writer's tasks, inside of the transaction that the writer has begun.

use std::collections::HashMap;

use rusqlite::{Connection, named_params};
use tracing::warn;

use crate::domain::run::RunId;
use crate::store::changes::{Changes, Statement};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::integers;
use crate::store::sqlite::delete::{self, DeleteProgress};
use crate::store::sqlite::error::WriteError;
use crate::store::sqlite::joined_writes::JoinedWrites;
use crate::store::sqlite::run_inserts::RunInserts;
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::usage_rollup::UsageRollup;
use crate::store::sqlite::vacuum::Vacuum;
use crate::store::sqlite::{
    attachments, budgets, inputs, outbox, push_configs, rows, run_changes, run_inserts, sessions,
};
use crate::store::write_queue::deletions::Deletions;
use crate::store::write_queue::failed_runs::FailedRuns;
use crate::store::write_queue::job::{Reply, Task};
use crate::store::{Change, StoreError};

/// Trees whose last event number is cached. The number of another tree is read from its log.
const MAX_CACHED_SEQS: usize = 16_384;

pub struct Executor<'c> {
    connection: &'c Connection,
    pub sql: Statements<'c>,
    pub deletions: Deletions,
    pub failed_runs: FailedRuns,
    pub vacuum: Vacuum,
    /// The number of the last event, by root.
    last_seqs: HashMap<RunId, u64>,
    inserts: RunInserts,
    usage: UsageRollup,
    /// Whether an input was ever requested. Without one, no run's end has any to remove.
    has_inputs: bool,
    /// Whether any run may have a configuration of push notifications.
    has_push_configs: bool,
    /// Whether events made push notifications due since [`Executor::take_new_notifications`].
    has_new_notifications: bool,
}

impl<'c> Executor<'c> {
    pub fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            connection,
            sql: Statements::new(connection)?,
            deletions: delete::load_deletions(connection)?,
            failed_runs: FailedRuns::default(),
            vacuum: Vacuum::new(connection)?,
            last_seqs: HashMap::new(),
            inserts: RunInserts::new(connection)?,
            usage: UsageRollup::default(),
            has_inputs: inputs::exist(connection)?,
            has_push_configs: push_configs::exist(connection)?,
            has_new_notifications: false,
        })
    }

    pub fn take_new_notifications(&mut self) -> bool {
        std::mem::take(&mut self.has_new_notifications)
    }

    /// Discards what is cached of a transaction that was rolled back.
    pub fn reset(&mut self) {
        self.last_seqs.clear();
        self.inserts.reset();
        self.usage.reset();
        self.deletions = delete::load_deletions(self.connection).unwrap_or_default();
    }

    /// Writes what the tasks of the transaction have added up. Called before its commit.
    pub fn flush(&mut self) -> rusqlite::Result<()> {
        self.usage.flush(&mut self.sql)
    }

    /// On a full disk only tasks that free space are executed.
    pub fn execute(&mut self, task: &Task, is_disk_full: bool) -> Result<Reply, WriteError> {
        if is_disk_full && !frees_space(task) {
            return Err(WriteError::Rejected(StoreError::DiskFull));
        }
        if let Task::Change(changes) = task {
            return self.change(changes);
        }
        let number = match task {
            Task::Change(_) => Ok(0),
            Task::Write(write) => self.apply_all(write),
            Task::Delete(root) => self.delete(*root),
            Task::ForgetSession(owner, name) => {
                let progress = sessions::forget_part(&mut self.sql, owner.as_deref(), name)?;
                Ok(progress as u64)
            }
            Task::Vacuum => self.vacuum_step(is_disk_full),
            Task::TrimUsage(before) => {
                let has_more = self.usage.trim(&mut self.sql, *before)?;
                Ok(u64::from(has_more))
            }
            Task::ClearFailed(roots, owned) => {
                for root in roots {
                    self.failed_runs.remove(*root);
                    let _ = owned.send(*root);
                }
                Ok(0)
            }
            Task::Check => {
                self.sql.write_check.execute(&[])?;
                Ok(0)
            }
            // Only one process uses the database.
            Task::ClaimTrees(..)
            | Task::ClaimUnserved(_)
            | Task::HandOverTree(..)
            | Task::ChangeRequest(..)
            | Task::GivePermits(_)
            | Task::ChangePermit(..)
            | Task::Close(_) => Ok(0),
        };
        number.map(Reply::Number)
    }

    fn change(&mut self, changes: &Changes) -> Result<Reply, WriteError> {
        // It may be a configuration of push notifications.
        self.has_push_configs |= changes.makes_deliveries_due;
        if let Some(root) = changes.root {
            self.last_seqs.remove(&root);
        }
        let mut rows = Vec::with_capacity(changes.statements.len());
        for Statement { sql, params } in &changes.statements {
            rows.push(self.sql.by_text(self.connection, sql)?.change(params)? as u64);
        }
        Ok(Reply::Changed(rows))
    }

    /// Removes the next part of a tree. Its root stays marked while there is more.
    pub fn delete_part(&mut self, root: RunId) -> rusqlite::Result<DeleteProgress> {
        let cache = &mut self.inserts.definition_cache;
        let progress = delete::delete_part(&mut self.sql, cache, root)?;
        let params = named_params! {":root": rows::id_bytes(&root)};
        match progress {
            DeleteProgress::More => self.sql.mark_deletion.execute(params)?,
            DeleteProgress::Done => self.sql.unmark_deletion.execute(params)?,
        };
        Ok(progress)
    }

    /// Applies a write, and the writes that are committed with it.
    fn apply_all(&mut self, write: &EncodedWrite) -> Result<u64, WriteError> {
        let last_seq = self.apply(write)?;
        for (other, other_last_seq) in &write.others {
            match self.apply(other) {
                Ok(last_seq) => other_last_seq.set(last_seq),
                Err(WriteError::Rejected(error)) => {
                    warn!(run.id = %other.run, run.root = %other.root, error = %error, "A write to {} came too late: {error}", other.run);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(last_seq)
    }

    /// A rejected write modifies nothing.
    fn apply(&mut self, write: &EncodedWrite) -> Result<u64, WriteError> {
        if self.failed_runs.contains(write.root) {
            return Err(WriteError::Rejected(StoreError::Suspended));
        }
        let creates_root = write.run == write.root && matches!(write.change, Change::Create(_));
        let previous_seq = if creates_root {
            0
        } else {
            self.last_seq(write.root)?
        };
        let last_seq = previous_seq + write.event_count();
        // 0 does not change the last event of the run's row.
        let run_seq = if write.event_count() > 0 { last_seq } else { 0 };
        if !self.update_run(write, run_seq)? {
            return Ok(0);
        }
        budgets::charge(&mut self.sql, &write.change)?;
        if let Some(warnings) = &write.warnings {
            let id = rows::id_bytes(&write.run);
            let params = named_params! {":id": id, ":warnings": warnings};
            self.sql.update_warnings.execute(params)?;
        }
        if write.has_row() {
            let (entries, texts) = write.entry_texts();
            self.sql.insert_entry.execute(named_params! {
                ":root": rows::id_bytes(&write.root),
                ":last_seq": integers::signed(last_seq),
                ":run": rows::id_bytes(&write.run),
                ":count": integers::signed(write.event_count()),
                ":entries": entries,
                ":texts": texts,
                ":turns": write.turns,
            })?;
        }
        for shared in &write.shared_texts {
            let inserts = &mut self.inserts;
            inserts.store_definition(&mut self.sql, &shared.text, write.run)?;
        }
        self.has_inputs |= !write.inputs.is_empty();
        inputs::apply(&mut self.sql, write.run, &write.inputs, previous_seq + 1)?;
        if self.has_inputs && matches!(write.change, Change::Finish(_)) {
            let params = named_params! {":run": rows::id_bytes(&write.run)};
            self.sql.delete_inputs.execute(params)?;
        }
        for attachment in &write.attachments {
            attachments::insert(&mut self.sql, write.run, attachment)?;
        }
        for delivery in &write.deliveries {
            outbox::insert(&mut self.sql, write.run, delivery)?;
        }
        if let Some(event) = write.notified_event.filter(|_| self.has_push_configs) {
            let has_targets = push_configs::notify(&mut self.sql, write.root, event)?;
            self.has_new_notifications |= has_targets;
        }
        self.cache_last_seq(write, last_seq);
        Ok(run_seq)
    }

    /// Applies several writes of a run at once, and returns what each of them returns.
    pub fn apply_joined(&mut self, joined: &JoinedWrites<'_>) -> Result<Vec<u64>, WriteError> {
        if self.failed_runs.contains(joined.root) {
            return Err(WriteError::Rejected(StoreError::Suspended));
        }
        let previous_seq = self.last_seq(joined.root)?;
        let last_seq = previous_seq + joined.event_count();
        let run_seq = if last_seq > previous_seq { last_seq } else { 0 };
        let (id, last_event) = (rows::id_bytes(&joined.run), integers::signed(run_seq));
        let is_changed = match joined.tool_calls() {
            0 if joined.run == joined.root => {
                self.sql.has_unfinished_run.exists(&[(":id", &id)])?
            }
            calls => {
                let write = joined.first();
                run_changes::add_events(&mut self.sql, write, last_event, calls)? > 0
            }
        };
        if !is_changed {
            self.explain_unchanged(joined.first())?;
            return Ok(vec![0; joined.count()]);
        }
        self.sql.insert_entry.execute(named_params! {
            ":root": rows::id_bytes(&joined.root),
            ":last_seq": integers::signed(last_seq),
            ":run": id,
            ":count": integers::signed(joined.event_count()),
            ":entries": joined.entries(),
            ":texts": None::<&str>,
            ":turns": None::<&[u8]>,
        })?;
        self.cache_last_seq(joined.first(), last_seq);
        Ok(joined.last_seqs(previous_seq))
    }

    /// Returns false if the write is to be ignored with its events.
    fn update_run(&mut self, write: &EncodedWrite, last_seq: u64) -> Result<bool, WriteError> {
        let last_event = integers::signed(last_seq);
        if let Change::Create(new_run) = &write.change {
            let (connection, sql) = (self.connection, &mut self.sql);
            self.inserts.insert(connection, sql, new_run, last_event)?;
            return Ok(true);
        }
        let claim = write.change.request_claim();
        if let Some((claim, _)) = claim {
            run_inserts::check_unclaimed(&mut self.sql, claim)?;
        }
        let is_changed = match write.change {
            // Readers take the last event of a root from the log.
            Change::Unchanged if write.run == write.root => {
                let id = rows::id_bytes(&write.run);
                self.sql.has_unfinished_run.exists(&[(":id", &id)])?
            }
            _ => run_changes::update(&mut self.sql, write, last_event)? > 0,
        };
        if !is_changed {
            return self.explain_unchanged(write);
        }
        if let Some((claim, number)) = claim {
            run_inserts::insert_claim(&mut self.sql, claim, write.run, Some(number))?;
        }
        if let Change::Finish(finished) = &write.change {
            for scorer in &finished.scorers {
                let run = rows::id_bytes(&write.run);
                self.sql
                    .insert_scoring
                    .execute(named_params! {":run": run, ":scorer": scorer})?;
            }
        }
        if let Change::Finish(finished) = &write.change
            && let Some(ended) = run_changes::ended(&mut self.sql, write, finished)?
        {
            self.usage.count(&mut self.sql, write.root, ended)?;
        }
        Ok(true)
    }

    /// Why a write changed no row: false if it is to be ignored.
    fn explain_unchanged(&mut self, write: &EncodedWrite) -> Result<bool, WriteError> {
        let params = named_params! {":id": rows::id_bytes(&write.run)};
        if !self.sql.has_run.exists(params)? {
            return Err(WriteError::Rejected(StoreError::RunNotFound(write.run)));
        }
        let error = match write.change {
            Change::RequestCancel { .. } => return Ok(false),
            Change::Hold | Change::Release if self.sql.is_changeable.exists(params)? => {
                return Ok(false);
            }
            Change::AddMessage(_) if self.sql.is_changeable.exists(params)? => {
                StoreError::MessagesChanged(write.run)
            }
            Change::Finish(_) if self.sql.has_unfinished_run.exists(params)? => {
                StoreError::MessagesChanged(write.run)
            }
            _ => StoreError::AlreadyTerminal(write.run),
        };
        Err(WriteError::Rejected(error))
    }

    fn delete(&mut self, root: RunId) -> Result<u64, WriteError> {
        let id = rows::id_bytes(&root);
        if !self.sql.has_root.exists(named_params! {":id": id})?
            || self.sql.has_deletion.exists(named_params! {":root": id})?
        {
            return Ok(0);
        }
        self.last_seqs.remove(&root);
        if let DeleteProgress::More = self.delete_part(root)? {
            self.deletions.add(root);
        }
        Ok(1)
    }

    fn vacuum_step(&mut self, is_disk_full: bool) -> Result<u64, WriteError> {
        let cache = &mut self.inserts.definition_cache;
        let has_more = delete::delete_unused_definitions(&mut self.sql, cache)?;
        let has_more = has_more || self.deletions.is_due(1);
        let has_more = self.vacuum.step(self.connection, is_disk_full)? || has_more;
        Ok(u64::from(has_more))
    }

    /// The number of a tree's last event.
    fn last_seq(&mut self, root: RunId) -> Result<u64, WriteError> {
        if let Some(last_seq) = self.last_seqs.get(&root) {
            return Ok(*last_seq);
        }
        let params = named_params! {":root": rows::id_bytes(&root)};
        let found = self
            .sql
            .last_seq
            .query_row(params, |row| row.get("last_seq"))?;
        found
            .map(integers::unsigned)
            .ok_or(WriteError::Rejected(StoreError::RunNotFound(root)))
    }

    fn cache_last_seq(&mut self, write: &EncodedWrite, last_seq: u64) {
        if write.run == write.root && matches!(write.change, Change::Finish(_)) {
            self.last_seqs.remove(&write.root);
            return;
        }
        if self.last_seqs.len() >= MAX_CACHED_SEQS {
            self.last_seqs.clear();
        }
        self.last_seqs.insert(write.root, last_seq);
    }
}

fn frees_space(task: &Task) -> bool {
    matches!(
        task,
        Task::Delete(_) | Task::Vacuum | Task::TrimUsage(_) | Task::Close(_)
    ) || matches!(task, Task::Change(changes) if changes.frees_space)
}
