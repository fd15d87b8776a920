//! Opens the database file and migrates it to the tables of this version.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};
use std::collections::BTreeMap;

use crate::config::Durability;
use crate::store::StoreError;
use crate::store::sqlite::error::{is_damage, is_disk_full};

/// The tables of the first release, then a step for each later version. Released ones are never edited.
const MIGRATIONS: &[&str] = &[include_str!("schema.sql")];

/// `Axed`, in the file's header: tells our database from that of another program.
const APPLICATION_ID: i32 = 0x4178_6564;
/// What versions before the first release wrote there.
const DEVELOPMENT_ID: i32 = 0x6178_6564;

/// How long a connection waits while another process has the database locked.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The log is truncated to this many bytes after a peak.
const MAX_WAL_BYTES: i64 = 64 << 20;
/// Page caches in KiB, filled on use. Larger ones are not faster, because the system caches the file.
const WRITER_CACHE_KIB: i32 = 4 << 10;
const READER_CACHE_KIB: i32 = 2 << 10;

/// Opens the file for the writer and migrates it.
pub fn open_writer(file: &Path, durability: Durability) -> Result<Connection, StoreError> {
    let mut connection = connect(file, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    configure_writer(&mut connection, durability).map_err(|error| open_error(file, &error))?;
    migrate(&mut connection, file, MIGRATIONS)?;
    let differences = differences(&connection).map_err(|error| open_error(file, &error))?;
    if !differences.is_empty() {
        return Err(StoreError::Unusable(format!(
            "{} does not have the tables of this version of axed: {}; put a backup in its place, or choose another directory with --data",
            file.display(),
            differences.join("; ")
        )));
    }
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
    // Takes effect on an empty file only.
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

fn migrate(
    connection: &mut Connection,
    file: &Path,
    migrations: &[&str],
) -> Result<(), StoreError> {
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
    if application == DEVELOPMENT_ID {
        return Err(StoreError::Unusable(format!(
            "{} is a database of a development version of axed, from before the first release, which this version does not \
             read; choose another directory with --data",
            file.display()
        )));
    }
    if application != APPLICATION_ID && (version, tables) != (0, 0) {
        return Err(StoreError::Unusable(format!(
            "{} is a database of another program; choose another directory with --data",
            file.display()
        )));
    }
    let Some(pending) = migrations.get(version as usize..) else {
        return Err(StoreError::Unusable(format!(
            "{} was written by a newer version of axed (its tables are version {version}, this one knows {}); \
             start that version, or choose another directory with --data",
            file.display(),
            migrations.len()
        )));
    };
    if pending.is_empty() {
        return Ok(());
    }
    for sql in pending {
        transaction.execute_batch(sql).map_err(to_store_error)?;
    }
    transaction
        .pragma_update(None, "application_id", APPLICATION_ID)
        .and_then(|()| transaction.pragma_update(None, "user_version", version_of(migrations)))
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

fn version_of(migrations: &[&str]) -> u32 {
    u32::try_from(migrations.len()).unwrap_or(u32::MAX)
}

/// Fails if the tables are not those of this version: a reader cannot migrate them.
pub fn check_version(connection: &Connection, file: &Path) -> Result<(), StoreError> {
    let read =
        |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(name));
    let (application, version) = read("application_id")
        .and_then(|application| Ok((application, read("user_version")?)))
        .map_err(|error| open_error(file, &error))?;
    if (application, version) == (APPLICATION_ID.into(), version_of(MIGRATIONS).into()) {
        return Ok(());
    }
    Err(StoreError::Backend(format!(
        "{} is no database of this version of axed (its tables are version {version}, this one knows {}); axed serve \
         migrates one of an earlier version when it starts",
        file.display(),
        version_of(MIGRATIONS)
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

    use super::{APPLICATION_ID, DEVELOPMENT_ID, MIGRATIONS, migrate, open_writer};
    use crate::config::Durability;

    fn rows(connection: &Connection, sql: &str) -> i64 {
        let read = connection.query_row(sql, [], |row| row.get("count"));
        read.expect("a count")
    }

    #[test]
    fn a_file_of_the_version_before_is_migrated_once() {
        let place = tempfile::NamedTempFile::new().expect("a file");
        let file = place.path();
        let connection = open_writer(file, Durability::Process).expect("a file");
        connection
            .execute_batch("INSERT INTO checks (id, at) VALUES (1, 7)")
            .expect("a row");
        drop(connection);
        let next = [
            MIGRATIONS,
            &["ALTER TABLE checks ADD COLUMN node TEXT; UPDATE checks SET node = 'a'"],
        ]
        .concat();
        let mut connection = Connection::open(file).expect("a file");
        for _ in 0..2 {
            migrate(&mut connection, file, &next).expect("migrated");
            let sql = "SELECT count(*) AS count FROM checks WHERE at = 7 AND node = 'a'";
            assert_eq!(rows(&connection, sql), 1);
        }
        let error = migrate(&mut connection, file, MIGRATIONS).expect_err("a newer file");
        let text = error.to_string();
        assert!(
            text.contains("newer version of axed (its tables are version 2, this one knows 1)"),
            "{text}"
        );
    }

    #[test]
    fn a_migration_that_fails_changes_nothing() {
        let place = tempfile::NamedTempFile::new().expect("a file");
        let file = place.path();
        drop(open_writer(file, Durability::Process).expect("a file"));
        let next = [
            MIGRATIONS,
            &["CREATE TABLE later (id); INSERT INTO nowhere VALUES (1)"],
        ]
        .concat();
        let mut connection = Connection::open(file).expect("a file");
        migrate(&mut connection, file, &next).expect_err("it fails");
        migrate(&mut connection, file, MIGRATIONS).expect("as it was");
        let sql = "SELECT count(*) AS count FROM sqlite_master WHERE name = 'later'";
        assert_eq!(rows(&connection, sql), 0);
    }

    #[test]
    fn a_file_of_a_development_version_is_refused() {
        let place = tempfile::NamedTempFile::new().expect("a file");
        let file = place.path();
        let connection = open_writer(file, Durability::Process).expect("a file");
        connection
            .pragma_update(None, "application_id", DEVELOPMENT_ID)
            .expect("another id");
        drop(connection);
        let error = open_writer(file, Durability::Process).expect_err("refused");
        let text = error.to_string();
        assert!(text.contains("development version of axed"), "{text}");
        assert_ne!(APPLICATION_ID, DEVELOPMENT_ID);
    }
}
