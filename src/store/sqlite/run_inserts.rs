//! Inserts new runs, with their definition, labels and idempotency key.

use std::sync::Arc;

use rusqlite::{Connection, ErrorCode, named_params};

use crate::domain::run::{Run, RunId, now};
use crate::store::encoding::clock_skew::{self, ClockSkew};
use crate::store::encoding::definition_cache::{self, DefinitionCache, Hash};
use crate::store::encoding::run_values;
use crate::store::row_changes;
use crate::store::sql::value::values;
use crate::store::sqlite::error::WriteError;
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::{clock, rows};
use crate::store::{IdempotencyClaim, NewRun, StoreError};

/// What the writer remembers from one new run to the next, so that most of them write neither a definition nor a skew.
pub struct RunInserts {
    pub definition_cache: DefinitionCache,
    clock_skew: ClockSkew,
}

impl RunInserts {
    pub fn new(connection: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            definition_cache: DefinitionCache::default(),
            clock_skew: clock::read(connection)?,
        })
    }

    /// Forgets everything after a rollback: what was written may not be in the tables.
    pub fn reset(&mut self) {
        self.definition_cache.clear();
        self.clock_skew = ClockSkew { lead: 0, lag: 0 };
    }

    pub fn insert(
        &mut self,
        connection: &Connection,
        sql: &mut Statements<'_>,
        new_run: &NewRun,
        last_event: i64,
    ) -> Result<(), WriteError> {
        if let Some(claim) = &new_run.claim {
            check_unclaimed(sql, claim)?;
        }
        let run = &new_run.run;
        if let Some(source) = run.fork.as_ref().and_then(|fork| fork.from) {
            check_exists(sql, source.run)?;
        }
        let definition = &new_run.resume_state.definition;
        let definition = self.store_definition(sql, definition, run.id)?;
        insert_row(sql, new_run, definition, last_event)?;
        if let Some(pinned_agents) = &new_run.pinned_agents {
            self.store_definition(sql, pinned_agents, run.id)?;
        }
        let id = rows::id_bytes(&run.id);
        if !run_values::is_inline_input(run) {
            let [input, task] = row_changes::input_values(run);
            let values = [(":run", run.id.into()), input, task];
            sql.insert_text.change(&values)?;
        }
        for (key, value) in &run.labels {
            let label = named_params! {":key": key, ":value": value, ":run": id};
            sql.insert_label.execute(label)?;
        }
        if let Some(claim) = &new_run.claim {
            insert_claim(sql, claim, run.id, None)?;
        }
        self.update_clock_skew(connection, run)
    }

    /// Stores the skew of the run's id if it is the largest so far.
    fn update_clock_skew(&mut self, connection: &Connection, run: &Run) -> Result<(), WriteError> {
        let created_ms = run.created_at.as_millisecond();
        let skew = self
            .clock_skew
            .including(clock_skew::created_ms(run.id), created_ms);
        if skew != self.clock_skew {
            // After a rollback the stored skew is unknown, and it must not shrink.
            let stored = clock::read(connection)?;
            self.clock_skew = stored.max(skew);
            clock::write(connection, self.clock_skew)?;
        }
        Ok(())
    }

    /// Returns the hash of a definition, or of another text that runs share, after the table says that this run uses it.
    pub fn store_definition(
        &mut self,
        sql: &mut Statements<'_>,
        text: &Arc<str>,
        run: RunId,
    ) -> rusqlite::Result<Hash> {
        let accepted_ms = clock_skew::created_ms(run);
        if let Some(hash) = self.definition_cache.get(text, accepted_ms) {
            return Ok(hash);
        }
        let hash = definition_cache::hash(text);
        sql.upsert_definition.execute(named_params! {
            ":hash": hash,
            ":body": text,
            ":used_until": DefinitionCache::used_until(accepted_ms),
            ":run": rows::id_bytes(&run),
        })?;
        self.definition_cache.insert(text, hash, accepted_ms);
        Ok(hash)
    }
}

fn insert_row(
    sql: &mut Statements<'_>,
    new_run: &NewRun,
    definition: Hash,
    last_event: i64,
) -> Result<(), WriteError> {
    let run = &new_run.run;
    let mut values = row_changes::new_run_values(new_run, definition);
    values.extend(values! {":run": run.id, ":root": run.root_id, ":last_event": last_event});
    values.extend(match run_values::is_inline_input(run) {
        true => row_changes::input_values(run),
        false => values! {":input": None::<&str>, ":task": None::<&str>},
    });
    let inserted = sql.insert_run.change(&values);
    match inserted {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
            let message = format!("{} is in the store already", run.id);
            Err(WriteError::Rejected(StoreError::Backend(message)))
        }
        other => Ok(other.map(drop)?),
    }
}

/// Fails if the key has accepted a run and has not expired.
pub fn check_unclaimed(
    sql: &mut Statements<'_>,
    claim: &IdempotencyClaim,
) -> Result<(), WriteError> {
    let key = &claim.key;
    let params = named_params! {
        ":credential": key.credential,
        ":route": key.route,
        ":key": key.key,
        ":now": now().as_millisecond(),
    };
    match sql.find_claim.query_row(params, rows::claimed_run)? {
        Some(claimed) => Err(WriteError::Rejected(StoreError::AlreadyClaimed(claimed))),
        None => Ok(()),
    }
}

/// Fails if the run was deleted, if only in part: a copy of its record may have gaps.
fn check_exists(sql: &mut Statements<'_>, source: RunId) -> Result<(), WriteError> {
    let id = rows::id_bytes(&source);
    let exists = sql.has_root.exists(named_params! {":id": id})?
        && !sql.has_deletion.exists(named_params! {":root": id})?;
    match exists {
        true => Ok(()),
        false => Err(WriteError::Rejected(StoreError::SourceDeleted(source))),
    }
}

/// `message` is what the request of the key gave the run; `None` if it started it.
pub fn insert_claim(
    sql: &mut Statements<'_>,
    claim: &IdempotencyClaim,
    run: RunId,
    message: Option<u32>,
) -> rusqlite::Result<()> {
    sql.delete_expired_claims
        .execute(named_params! {":now": now().as_millisecond()})?;
    let key = &claim.key;
    sql.upsert_claim
        .execute(named_params! {
            ":credential": key.credential,
            ":route": key.route,
            ":key": key.key,
            ":run": rows::id_bytes(&run),
            ":body": claim.body_hash,
            ":expires": claim.expires_at.as_millisecond(),
            ":message": message,
        })
        .map(drop)
}
