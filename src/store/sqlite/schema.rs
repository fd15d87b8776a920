//! Opens the database file and migrates it to the tables of this version.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};
use std::collections::BTreeMap;

use crate::config::Durability;
use crate::store::StoreError;
use crate::store::sqlite::error::{is_damage, is_disk_full};
use crate::store::sqlite::{approvals, clock, usage_fill};

/// Step `n` migrates a file of version `n` to version `n + 1`. Shipped steps are never edited.
const MIGRATIONS: &[&str] = &[
    INITIAL,
    WEBHOOKS,
    STRUCTURED,
    RETENTION,
    WAITING,
    SESSIONS,
    LISTS,
    SEVERAL_WEBHOOKS,
    WORKDIRS,
    OWNERS,
    ATTACHMENTS,
    WAITING_FOR,
    APPROVALS,
    SESSION_NAMES,
    WARNINGS,
    TURNS,
    MESSAGES,
    USAGE,
    HOLDS,
    FORKS,
    BUDGETS,
    WAITING_WORDS,
    SHARED_TEXTS,
    SCHEDULES,
    BATCHES,
    crate::store::sqlite::push_configs::SCHEMA,
    clock::SMALL_SKEW,
];

/// `axed`, in the file's header: tells our database from that of another program.
const APPLICATION_ID: i32 = 0x6178_6564;

/// How long a connection waits while another process has the database locked.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The log is truncated to this many bytes after a peak.
const MAX_WAL_BYTES: i64 = 64 << 20;
/// Page caches in KiB, filled on use. Larger ones are not faster, because the system caches the file.
const WRITER_CACHE_KIB: i32 = 4 << 10;
const READER_CACHE_KIB: i32 = 2 << 10;

// `runs` has one row a run. Its indexes are partial, so that a run changes each of them once: `runs_unfinished` is small and
// a run leaves it when it ends; a run enters the `runs_finished` ones when it ends, with its final status. `child` is 0 for
// a root and 1 for other runs: a list has either the roots only or all runs. The index by owner is empty without API keys.
// It contains `finished_at`: otherwise SQLite checks the index's condition in the row of every run that a filter skips.
// Inputs that are not small are in `texts`, because an update writes the whole row again.
// `definitions` has one row for each content that a run was accepted with; the key is the content's SHA-256. Turns keep
// texts there that several runs send.
// `claims` has one row for each idempotency key. It is searched by key, by expiry and by run.
// `entries` has one row a write: the events that it added to the log of its tree, one a line, and the steps that it added
// to its run, a JSON array. `last_seq` is the number of the tree's last event after the write. The table is append-only with
// a separate index, because SQLite is slow with rows of this size in a clustered table: a third more runs a second.
const INITIAL: &str = "
CREATE TABLE runs (
  id BLOB NOT NULL PRIMARY KEY,
  root BLOB NOT NULL,
  parent BLOB,
  owner TEXT,
  child INTEGER NOT NULL,
  depth INTEGER NOT NULL,
  status TEXT NOT NULL,
  agent TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  started_at INTEGER,
  finished_at INTEGER,
  last_event INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  turns INTEGER NOT NULL,
  input_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  cache_read_tokens INTEGER NOT NULL,
  cache_write_tokens INTEGER NOT NULL,
  model_calls INTEGER NOT NULL,
  tool_calls INTEGER NOT NULL,
  cost INTEGER,
  unreported INTEGER NOT NULL,
  tree_runs INTEGER,
  tree_input_tokens INTEGER,
  tree_output_tokens INTEGER,
  tree_cache_read_tokens INTEGER,
  tree_cache_write_tokens INTEGER,
  tree_model_calls INTEGER,
  tree_tool_calls INTEGER,
  tree_cost INTEGER,
  tree_unreported INTEGER,
  model TEXT NOT NULL,
  stop_reason TEXT,
  agent_version TEXT NOT NULL,
  tool_call_id TEXT,
  label TEXT,
  completion_status TEXT,
  labels TEXT,
  definition BLOB,
  deadline_at INTEGER,
  deadline_seconds INTEGER,
  timeout INTEGER,
  stream INTEGER,
  error TEXT,
  cancel_reason TEXT,
  input TEXT,
  task TEXT,
  partial_content TEXT,
  content TEXT
) WITHOUT ROWID;
CREATE INDEX runs_children ON runs (parent, id) WHERE parent IS NOT NULL;
CREATE INDEX runs_unfinished ON runs (id) WHERE finished_at IS NULL;
CREATE INDEX runs_finished ON runs (status, child, id, created_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_finished_by_agent ON runs (agent, status, child, id, created_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_finished_by_owner ON runs (owner, status, child, id, created_at, agent, finished_at)
  WHERE finished_at IS NOT NULL AND owner IS NOT NULL;
CREATE TABLE definitions (
  hash BLOB NOT NULL PRIMARY KEY,
  body TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE claims (
  id INTEGER PRIMARY KEY,
  credential TEXT NOT NULL,
  route TEXT NOT NULL,
  key TEXT NOT NULL,
  run BLOB NOT NULL,
  body BLOB NOT NULL,
  expires INTEGER NOT NULL,
  UNIQUE (credential, route, key)
);
CREATE INDEX claims_expiry ON claims (expires);
CREATE INDEX claims_run ON claims (run);
CREATE TABLE texts (
  run BLOB NOT NULL PRIMARY KEY,
  input TEXT NOT NULL,
  task TEXT
) WITHOUT ROWID;
CREATE TABLE labels (
  key TEXT NOT NULL,
  value TEXT NOT NULL,
  run BLOB NOT NULL,
  PRIMARY KEY (key, value, run)
) WITHOUT ROWID;
CREATE TABLE entries (
  id INTEGER PRIMARY KEY,
  root BLOB NOT NULL,
  last_seq INTEGER NOT NULL,
  run BLOB NOT NULL,
  count INTEGER NOT NULL,
  events TEXT,
  steps TEXT
);
CREATE INDEX entries_log ON entries (root, last_seq, run);
CREATE TABLE checks (id INTEGER PRIMARY KEY, at INTEGER NOT NULL);
";

/// Whether a run's content is JSON that matches the requested schema.
const STRUCTURED: &str = "ALTER TABLE runs ADD COLUMN structured INTEGER;";
// `deliveries` has one row for each event that is sent to a webhook. The index `deliveries_due` has only pending ones:
// `next_at` is null after a delivery has succeeded or was given up. `attempts` is a JSON array.
const WEBHOOKS: &str = "
ALTER TABLE runs ADD COLUMN webhook TEXT;
CREATE TABLE deliveries (
  id BLOB NOT NULL PRIMARY KEY,
  run BLOB NOT NULL,
  event TEXT NOT NULL,
  host TEXT NOT NULL,
  url TEXT NOT NULL,
  secret_env TEXT,
  body TEXT NOT NULL,
  status TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  since INTEGER NOT NULL,
  tries INTEGER NOT NULL,
  next_at INTEGER,
  attempts TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX deliveries_run ON deliveries (run, id);
CREATE INDEX deliveries_due ON deliveries (host, next_at) WHERE next_at IS NOT NULL;
";

// For retention. `runs_finished` gets `finished_at`, so that a scan of it reads no rows. `used_until` of a definition is
// the latest time at which a run was accepted with it (milliseconds, as in the ids of runs); `only_run` is the run that uses
// it while there is only one. An index of the runs by definition would slow down every accepted run.
const RETENTION: &str = "
DROP INDEX runs_finished;
CREATE INDEX runs_finished ON runs (status, child, id, created_at, finished_at) WHERE finished_at IS NOT NULL;
ALTER TABLE definitions ADD COLUMN used_until INTEGER NOT NULL DEFAULT 0;
ALTER TABLE definitions ADD COLUMN only_run BLOB;
UPDATE definitions SET used_until = unixepoch() * 1000 + 60000;
CREATE INDEX definitions_used ON definitions (used_until);
";

/// What a run waits for, as JSON; null for a run that began to wait before this migration.
const WAITING_FOR: &str = "ALTER TABLE runs ADD COLUMN waiting_for TEXT;";
/// What went wrong in a run, a JSON array; null without warnings.
const WARNINGS: &str = "ALTER TABLE runs ADD COLUMN warnings TEXT;";
/// What a write adds to the turns of its run: see the module `turns`. Null for a write without a reply.
const TURNS: &str = "ALTER TABLE entries ADD COLUMN turns BLOB;";
/// Since when a run waits for approval.
const WAITING: &str = "ALTER TABLE runs ADD COLUMN waiting_since INTEGER;";
// The session of a root run. The index has only runs of sessions; it alone tells which run the next one of a session
// continues.
const SESSIONS: &str = "
ALTER TABLE runs ADD COLUMN session TEXT;
CREATE INDEX runs_session ON runs (session, owner, id, agent, status) WHERE session IS NOT NULL;
";

// `clock` has the skew of the ids, see the module `clock`. It starts with one second, so that hardly any run has to write it.
// `waited` is how many milliseconds a run was paused. `deletions` has the roots whose trees are being deleted.
// `runs_finished_by_agent` gets `finished_at` for the same reason as the index by owner.
const LISTS: &str = "
CREATE TABLE clock (id INTEGER PRIMARY KEY, lead INTEGER NOT NULL, lag INTEGER NOT NULL);
INSERT INTO clock (id, lead, lag) VALUES (1, 1000, 1000);
ALTER TABLE runs ADD COLUMN waited INTEGER;
CREATE TABLE deletions (root BLOB NOT NULL PRIMARY KEY) WITHOUT ROWID;
DROP INDEX runs_finished_by_agent;
CREATE INDEX runs_finished_by_agent ON runs (agent, status, child, id, created_at, finished_at)
  WHERE finished_at IS NOT NULL;
";

/// A run's webhooks become a JSON array: those of its agent and of its request. Those of ended runs are not read.
const SEVERAL_WEBHOOKS: &str = "
UPDATE runs SET webhook = '[' || webhook || ']' WHERE webhook IS NOT NULL AND finished_at IS NULL;
";

/// The directory of a run's files, which another process opens again. Unsigned 64-bit numbers, stored as signed ones.
const WORKDIRS: &str = "
ALTER TABLE runs ADD COLUMN workdir_device INTEGER;
ALTER TABLE runs ADD COLUMN workdir_inode INTEGER;
";

// The owner of a delivery's run, empty without an API key: owners take turns.
const OWNERS: &str = "
ALTER TABLE deliveries ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE deliveries SET owner = coalesce((SELECT r.owner FROM runs r WHERE r.id = run), '') WHERE next_at IS NOT NULL;
DROP INDEX deliveries_due;
CREATE INDEX deliveries_due ON deliveries (owner, host, next_at) WHERE next_at IS NOT NULL;
";

// The bytes of pictures and files, once for each digest, and which runs refer to them: the bytes are deleted with the last
// of these. The table has an integer key, because SQLite stores large values well in such tables.
const ATTACHMENTS: &str = "
CREATE TABLE attachments (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE attachment_uses (run BLOB NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (run, hash)) WITHOUT ROWID;
CREATE INDEX attachment_users ON attachment_uses (hash);
";

// The calls that wait for approval, with the number of the event that requested it. A call is removed with its decision, or
// with the end of its run.
const APPROVALS: &str = "
CREATE TABLE approvals (
  run BLOB NOT NULL,
  seq INTEGER NOT NULL,
  root BLOB NOT NULL,
  owner TEXT,
  call TEXT NOT NULL,
  request TEXT NOT NULL,
  PRIMARY KEY (run, seq)
) WITHOUT ROWID;
CREATE INDEX approvals_root ON approvals (root);
CREATE INDEX approvals_owner ON approvals (owner) WHERE owner IS NOT NULL;
";

// How many messages were added to a run, and which of them an idempotency key belongs to.
const MESSAGES: &str = "
ALTER TABLE runs ADD COLUMN messages INTEGER NOT NULL DEFAULT 0;
ALTER TABLE claims ADD COLUMN message INTEGER;
";

/// Whether a client has paused a run. Parents do not wait for `children` any more, but for what these wait for.
const HOLDS: &str = "
ALTER TABLE runs ADD COLUMN held INTEGER;
UPDATE runs SET waiting_for = '{\"reason\":\"approval\"}' WHERE waiting_for = '{\"reason\":\"children\"}';
";

/// Sorts the sessions of a key by name.
const SESSION_NAMES: &str =
    "CREATE INDEX runs_session_names ON runs (owner, session, id) WHERE session IS NOT NULL;";

// The usage of ended runs. `usage_series` has the values that runs are counted under: empty texts stand for absent ones,
// `last_day` is the last day (of 1970) on which a run had them. `usage_quarters` has one row for each series and quarter hour
// in which roots were accepted, `usage_days` the same sums by day in UTC, so that a long period is read quickly.
// `usage_values` has the distinct values of each owner, whose number is limited. `model_usage` is the usage of a run by model,
// if that is not all of its last model's.
const USAGE: &str = "
ALTER TABLE runs ADD COLUMN model_usage TEXT;
CREATE TABLE usage_series (
  id INTEGER PRIMARY KEY,
  owner TEXT NOT NULL,
  session TEXT NOT NULL,
  labels TEXT NOT NULL,
  agent TEXT NOT NULL,
  model TEXT NOT NULL,
  last_day INTEGER NOT NULL,
  UNIQUE (owner, session, labels, agent, model)
);
CREATE INDEX usage_series_days ON usage_series (last_day);
CREATE TABLE usage_values (
  owner TEXT NOT NULL,
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  last_day INTEGER NOT NULL,
  PRIMARY KEY (owner, name, value)
) WITHOUT ROWID;
CREATE INDEX usage_values_days ON usage_values (last_day);
CREATE TABLE usage_quarters (start INTEGER NOT NULL, series INTEGER NOT NULL, sums BLOB NOT NULL, PRIMARY KEY (start, series)) WITHOUT ROWID;
CREATE TABLE usage_days (start INTEGER NOT NULL, series INTEGER NOT NULL, sums BLOB NOT NULL, PRIMARY KEY (start, series)) WITHOUT ROWID;
";
/// What a run took over from the run that it was forked from, as JSON; null for other runs.
const FORKS: &str = "ALTER TABLE runs ADD COLUMN fork TEXT;";

// What was charged to budgets over time, by the quarter hour in which replies were recorded, and the alerts that are
// recorded: `period` is the first quarter hour of a budget's period, `share` is in thousandths.
const BUDGETS: &str = "
CREATE TABLE budget_usage (
  budget TEXT NOT NULL,
  quarter INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  cost INTEGER NOT NULL,
  PRIMARY KEY (budget, quarter)
) WITHOUT ROWID;
CREATE TABLE budget_alerts (
  budget TEXT NOT NULL,
  period INTEGER NOT NULL,
  share INTEGER NOT NULL,
  PRIMARY KEY (budget, period, share)
) WITHOUT ROWID;
";

/// What a run waits for becomes a word.
const WAITING_WORDS: &str = "
UPDATE runs SET waiting_for = json_quote(json_extract(waiting_for, '$.reason')) WHERE json_type(waiting_for) = 'object';
";

/// The definitions, and the texts that turns of several runs share, which only one run uses.
const SHARED_TEXTS: &str = "
CREATE INDEX definitions_only_run ON definitions (only_run) WHERE only_run IS NOT NULL;
";

// What is known of the schedules of agents. `times` is the cron and the zone that it is about; times in seconds.
const SCHEDULES: &str = "
CREATE TABLE schedules (
  agent TEXT NOT NULL,
  name TEXT NOT NULL,
  times TEXT NOT NULL,
  handled_at INTEGER NOT NULL,
  held_at INTEGER,
  is_paused INTEGER NOT NULL,
  last_at INTEGER,
  last_run BLOB,
  error TEXT,
  PRIMARY KEY (agent, name)
) WITHOUT ROWID;
";

// Batches of runs and their lines. A line has its request until its run starts, or until a problem is known.
const BATCHES: &str = "
CREATE TABLE batches (
  id BLOB NOT NULL PRIMARY KEY,
  agent TEXT NOT NULL,
  owner TEXT,
  lines INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  finished_at INTEGER,
  cancel_reason TEXT,
  body_hash BLOB NOT NULL,
  key_owner TEXT,
  key TEXT,
  key_expires INTEGER
) WITHOUT ROWID;
CREATE UNIQUE INDEX batches_key ON batches (key_owner, agent, key) WHERE key IS NOT NULL;
CREATE INDEX batches_unfinished ON batches (id) WHERE finished_at IS NULL;
CREATE TABLE batch_lines (
  id INTEGER PRIMARY KEY,
  batch BLOB NOT NULL,
  line INTEGER NOT NULL,
  body TEXT,
  run BLOB,
  problem TEXT,
  UNIQUE (batch, line)
);
";

/// A file of a version that could not shrink it is rebuilt at the start if it is at most this large: that takes a moment.
const MAX_REBUILD_BYTES: i64 = 64 << 20;

/// Opens the file for the writer and migrates it.
pub fn open_writer(file: &Path, durability: Durability) -> Result<Connection, StoreError> {
    let mut connection = connect(file, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    configure_writer(&mut connection, durability).map_err(|error| open_error(file, &error))?;
    migrate(&mut connection, file)?;
    let differences = differences(&connection).map_err(|error| open_error(file, &error))?;
    if !differences.is_empty() {
        return Err(StoreError::Unusable(format!(
            "{} does not have the tables of this version of axed: {}; put a backup in its place, or choose another directory with --data",
            file.display(),
            differences.join("; ")
        )));
    }
    enable_incremental_vacuum(&connection, file);
    Ok(connection)
}

/// Opens the file for copying the log; the writer has migrated it.
pub fn open_for_checkpoints(file: &Path) -> Result<Connection, StoreError> {
    connect(file, OpenFlags::SQLITE_OPEN_READ_WRITE)
}

pub fn open_reader(file: &Path) -> Result<Connection, StoreError> {
    let connection = connect(file, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let prepared = connection
        .pragma_update(None, "cache_size", -READER_CACHE_KIB)
        .and_then(|()| connection.pragma_update(None, "temp_store", "memory"));
    connection.set_prepared_statement_cache_capacity(64);
    prepared.map_err(|error| open_error(file, &error))?;
    Ok(connection)
}

fn connect(file: &Path, flags: OpenFlags) -> Result<Connection, StoreError> {
    let connection = Connection::open_with_flags(file, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
        .map_err(|error| open_error(file, &error))?;
    connection
        .busy_timeout(LOCK_TIMEOUT)
        .map_err(|error| open_error(file, &error))?;
    Ok(connection)
}

fn configure_writer(connection: &mut Connection, durability: Durability) -> rusqlite::Result<()> {
    let synchronous = match durability {
        Durability::Process => "normal",
        Durability::Power => "full",
    };
    // Takes effect on an empty file only: see `enable_incremental_vacuum`.
    connection.pragma_update(None, "auto_vacuum", "incremental")?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", synchronous)?;
    connection.pragma_update(None, "cache_size", -WRITER_CACHE_KIB)?;
    connection.pragma_update(None, "temp_store", "memory")?;
    connection.pragma_update(None, "foreign_keys", false)?;
    // A separate thread copies the log: see `checkpoint`.
    connection.pragma_update_and_check(None, "wal_autocheckpoint", 0, |_| Ok(()))?;
    connection.pragma_update_and_check(None, "journal_size_limit", MAX_WAL_BYTES, |_| Ok(()))
}

fn migrate(connection: &mut Connection, file: &Path) -> Result<(), StoreError> {
    let to_store_error = |error: rusqlite::Error| open_error(file, &error);
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(to_store_error)?;
    let version: u32 = transaction
        .pragma_query_value(None, "user_version", |row| row.get("user_version"))
        .map_err(to_store_error)?;
    let application: i32 = transaction
        .pragma_query_value(None, "application_id", |row| row.get("application_id"))
        .map_err(to_store_error)?;
    let tables: u32 = transaction
        .query_row("SELECT count(*) AS tables FROM sqlite_master", [], |row| {
            row.get("tables")
        })
        .map_err(to_store_error)?;
    if application != APPLICATION_ID && (version, tables) != (0, 0) {
        return Err(StoreError::Unusable(format!(
            "{} is a database of another program; choose another directory with --data",
            file.display()
        )));
    }
    let Some(pending) = MIGRATIONS.get(version as usize..) else {
        return Err(StoreError::Unusable(format!(
            "{} was written by a newer version of axed (its tables are version {version}, this one knows {}); \
             start that version, or choose another directory with --data",
            file.display(),
            current_version()
        )));
    };
    if pending.is_empty() {
        return Ok(());
    }
    for sql in pending {
        transaction.execute_batch(sql).map_err(to_store_error)?;
    }
    if pending.contains(&LISTS) {
        clock::measure(&transaction).map_err(to_store_error)?;
    }
    if pending.contains(&APPROVALS) {
        approvals::collect(&transaction).map_err(to_store_error)?;
    }
    if pending.contains(&USAGE) {
        usage_fill::fill(&transaction).map_err(to_store_error)?;
    }
    transaction
        .pragma_update(None, "application_id", APPLICATION_ID)
        .and_then(|()| transaction.pragma_update(None, "user_version", current_version()))
        .and_then(|()| transaction.commit())
        .map_err(to_store_error)
}

/// What of the tables and indexes of this version a migrated file does not have as they are written.
pub fn differences(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    let expected = Connection::open_in_memory()?;
    for sql in MIGRATIONS {
        expected.execute_batch(sql)?;
    }
    let found = objects(connection)?;
    let differences = objects(&expected)?
        .into_iter()
        .filter_map(
            |((kind, name), expected)| match found.get(&(kind.clone(), name.clone())) {
                None => Some(format!("the {kind} {name} is missing")),
                Some(found) if *found != expected => Some(format!(
                    "the {kind} {name} is ({found}) instead of ({expected})"
                )),
                Some(_) => None,
            },
        );
    Ok(differences.collect())
}

/// Tables with their columns, and indexes with what they are of, by kind and name.
fn objects(connection: &Connection) -> rusqlite::Result<BTreeMap<(String, String), String>> {
    let mut sql = connection.prepare(
        "SELECT type, name, CASE type WHEN 'index' THEN substr(sql, instr(sql, ' ON ') + 4) ELSE (SELECT \
         group_concat(concat_ws(' ', c.name, c.type), ', ') FROM pragma_table_xinfo(m.name) c) END AS parts \
         FROM sqlite_master m WHERE type IN ('table', 'index') AND name NOT LIKE 'sqlite_%' ORDER BY name",
    )?;
    let row =
        |row: &rusqlite::Row<'_>| Ok(((row.get("type")?, row.get("name")?), row.get("parts")?));
    sql.query_map([], row)?.collect()
}

/// Whether unused pages can be returned to the file system.
pub fn has_incremental_vacuum(connection: &Connection) -> rusqlite::Result<bool> {
    let mode: u32 =
        connection.pragma_query_value(None, "auto_vacuum", |row| row.get("auto_vacuum"))?;
    Ok(mode == 2)
}

/// Rebuilds a small file of an older version, so that it can shrink from now on. A large file is not rebuilt: it reuses its
/// free pages, and the operator can rebuild it when there is time and disk space.
fn enable_incremental_vacuum(connection: &Connection, file: &Path) {
    let rebuild = || {
        if has_incremental_vacuum(connection)? {
            return Ok(());
        }
        let count =
            |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(name));
        if count("page_count")? * count("page_size")? > MAX_REBUILD_BYTES {
            tracing::info!(
                "{} was made by an older version and does not shrink when runs are deleted; to \
                 change that, stop axed and run: sqlite3 {0} 'PRAGMA auto_vacuum=incremental; VACUUM'",
                file.display()
            );
            return Ok(());
        }
        connection.pragma_update(None, "auto_vacuum", "incremental")?;
        connection.execute_batch("VACUUM")
    };
    let rebuilt: rusqlite::Result<()> = rebuild();
    if let Err(error) = rebuilt {
        tracing::warn!(error = %error, "{} could not be rebuilt so that it can shrink, the next start tries again: {error}", file.display());
    }
}

fn current_version() -> u32 {
    u32::try_from(MIGRATIONS.len()).unwrap_or(u32::MAX)
}

/// Fails if the tables are not those of this version: a reader cannot migrate them.
pub fn check_version(connection: &Connection, file: &Path) -> Result<(), StoreError> {
    let read =
        |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(name));
    let (application, version) = read("application_id")
        .and_then(|application| Ok((application, read("user_version")?)))
        .map_err(|error| open_error(file, &error))?;
    if (application, version) == (APPLICATION_ID.into(), current_version().into()) {
        return Ok(());
    }
    Err(StoreError::Backend(format!(
        "{} is no database of this version of axed (its tables are version {version}, this one knows {}); axed serve \
         migrates an older one when it starts",
        file.display(),
        current_version()
    )))
}

fn open_error(file: &Path, error: &rusqlite::Error) -> StoreError {
    if is_disk_full(error) {
        return StoreError::DiskFull;
    }
    if is_damage(error) {
        return StoreError::Malformed(format!("{}: {error}", file.display()));
    }
    StoreError::Backend(format!(
        "could not open the database {}: {error}; make it readable and writable, put a backup in its place, \
         or choose another directory with --data",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::{APPLICATION_ID, INITIAL, has_incremental_vacuum, open_writer};
    use crate::config::Durability;

    #[test]
    fn an_initial_version_file_is_migrated() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        let old = Connection::open(&file).expect("a file");
        old.execute_batch(INITIAL).expect("its tables");
        old.pragma_update(None, "application_id", APPLICATION_ID)
            .and_then(|()| old.pragma_update(None, "user_version", 1))
            .expect("its version");
        old.execute_batch("INSERT INTO definitions VALUES (x'00', '{}')")
            .expect("a row");
        assert!(!has_incremental_vacuum(&old).expect("a mode"));
        drop(old);
        for _ in 0..2 {
            let new = open_writer(&file, Durability::Process).expect("opened");
            assert!(has_incremental_vacuum(&new).expect("a mode"));
            let used: bool = new
                .query_row(
                    "SELECT used_until > unixepoch() * 1000 AS is_used FROM definitions WHERE body = '{}'",
                    [],
                    |row| row.get("is_used"),
                )
                .expect("the row");
            assert!(used, "a run may still use it");
        }
    }
}
