//! Checks and copies a database, while a daemon uses it or not.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;
use rusqlite::backup::{Backup, StepResult};

use crate::domain::attachment::Digest;
use crate::record::stored;
use crate::store::encoding::definition_cache::{self, Hash};
use crate::store::encoding::turns;
use crate::store::sql::dialect::Dialect;
use crate::store::sql::row::{Row, damaged};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::files::DATABASE_FILE;
use crate::store::sqlite::rows;
use crate::store::sqlite::{files, schema};
use crate::store::{StoreError, run_rows};

/// A check ends after this many findings.
const MAX_FINDINGS: usize = 100;
/// A database up to this size is checked at the start after an unclean stop: that takes a moment.
const MAX_STARTUP_CHECK_BYTES: u64 = 32 << 20;

/// Checks the whole database of a data directory; returns one sentence for each problem.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    let db = open_existing(dir)?;
    let mut findings = check_pages(&db, "integrity_check")?;
    let mut report = |finding: String| {
        if findings.len() < MAX_FINDINGS {
            findings.push(finding);
        }
    };
    match schema::differences(&db) {
        Ok(differences) => differences.into_iter().for_each(&mut report),
        Err(error) => report(store_error(error).to_string()),
    }
    let results = [
        check_runs(&db, &mut report),
        check_entries(&db, &mut report),
        check_turns(&db, &mut report),
        check_definitions(&db, &mut report),
        check_attachments(&db, &mut report),
    ];
    for error in results.into_iter().filter_map(Result::err) {
        report(store_error(error).to_string());
    }
    Ok(findings)
}

/// Copies a consistent snapshot of the database to a file, without blocking writers. Fails if the file exists, unless it is a
/// regular file that is to be overwritten. Returns the number of bytes.
pub fn backup(dir: &Path, target: &Path, overwrite: bool) -> Result<u64, StoreError> {
    let source = open_existing(dir)?;
    let write_error = |error: &dyn std::fmt::Display| {
        StoreError::Backend(format!("could not write {}: {error}", target.display()))
    };
    let is_same = |other: &Path| match (fs::canonicalize(other), fs::canonicalize(target)) {
        (Ok(other), Ok(to)) => other == to,
        _ => false,
    };
    let file = dir.join(DATABASE_FILE);
    if is_same(&file) || is_same(&files::wal_path(&file)) {
        return Err(write_error(
            &"it is the database itself; choose another file",
        ));
    }
    match fs::symlink_metadata(target) {
        // A rename would replace the link or the device itself.
        Ok(existing) if !existing.is_file() => {
            return Err(write_error(
                &"it exists and is not a regular file; choose another file",
            ));
        }
        Ok(_) if !overwrite => return Err(write_error(&"it exists; --force replaces it")),
        _ => {}
    }
    let partial = partial_path(target);
    let copied = copy_database(&source, &partial)
        .map_err(|error| match error {
            StoreError::Backend(why) | StoreError::Refused(why) => write_error(&why),
            StoreError::DiskFull => write_error(&"its disk is full"),
            other => other,
        })
        .and_then(|()| fs::rename(&partial, target).map_err(|error| write_error(&error)));
    if let Err(error) = copied {
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    Ok(files::file_size(target).unwrap_or_default())
}

/// Checks a small database that was not closed cleanly.
pub fn check_after_crash(db: &Connection, file: &Path, is_unclean: bool) -> Result<(), StoreError> {
    if !is_unclean {
        return Ok(());
    }
    let bytes = [file.to_owned(), files::wal_path(file)];
    let bytes: u64 = bytes.iter().filter_map(|path| files::file_size(path)).sum();
    if bytes > MAX_STARTUP_CHECK_BYTES {
        tracing::info!(
            "{} was not closed cleanly and is too large for a check at the start; run axed data check",
            file.display()
        );
        return Ok(());
    }
    match check_pages(db, "quick_check")?.first() {
        None => Ok(()),
        Some(finding) => Err(StoreError::Corrupt(format!(
            "{}: {finding}",
            file.display()
        ))),
    }
}

fn open_existing(dir: &Path) -> Result<Connection, StoreError> {
    let file = dir.join(DATABASE_FILE);
    files::check_wal_has_database(&file)?;
    if files::file_size(&file).is_none() {
        return Err(StoreError::NoDatabase(file.display().to_string()));
    }
    let db = schema::open_reader(&file)?;
    schema::check_version(&db, &file)?;
    Ok(db)
}

/// `integrity_check` also compares the indexes with their tables, which takes longer than `quick_check`.
fn check_pages(db: &Connection, pragma: &str) -> Result<Vec<String>, StoreError> {
    let found = db
        .prepare(&format!("PRAGMA {pragma}({MAX_FINDINGS})"))
        .and_then(|mut sql| {
            sql.query_map([], |row| row.get::<_, String>(pragma))?
                .collect::<rusqlite::Result<Vec<_>>>()
        })
        .map_err(store_error)?;
    Ok(found
        .into_iter()
        .filter(|finding| finding != "ok")
        .collect())
}

fn check_runs(db: &Connection, report: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let sql = run_rows::select("true");
    let mut sql = db.prepare(sql.of(Dialect::Sqlite))?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        let row = Row::Sqlite(row);
        if let Err(error) = run_rows::run(&row).map_err(reason) {
            match run_rows::run_id(&row) {
                Ok(id) => report(format!("the record of {id} cannot be read: {error}")),
                Err(_) => report(format!("a run's record cannot be read: {error}")),
            }
        }
    }
    Ok(())
}

fn check_entries(db: &Connection, report: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare(
        "SELECT run, last_seq, count, entries, texts FROM entries WHERE entries IS NOT NULL OR count > 0",
    )?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        if let Err(error) = check_entry(row) {
            let finding = unreadable("an entry", row);
            report(format!("{finding}: {error}"));
        }
    }
    Ok(())
}

fn check_entry(row: &rusqlite::Row<'_>) -> Result<(), String> {
    let read = || {
        let row = Row::Sqlite(row);
        let (entries, texts) = (row.get("entries")?, row.get("texts")?);
        stored::decode(entries, texts, row.get("count")?).map_err(damaged)
    };
    read().map(drop).map_err(reason)
}

fn reason(error: StoreError) -> String {
    match error {
        StoreError::Corrupt(why) => why,
        error => error.to_string(),
    }
}

/// What cannot be read, with its run if the row has it.
fn unreadable(what: &str, row: &rusqlite::Row<'_>) -> String {
    match rows::id(row, "run") {
        Ok(id) => format!("{what} of {id} cannot be read"),
        Err(_) => format!("{what} cannot be read"),
    }
}

/// The key of a definition is the hash of its content.
fn check_definitions(db: &Connection, report: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare("SELECT hash, body FROM definitions")?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        let body = row.get_ref("body")?.as_str();
        let is_unchanged = body.is_ok_and(|body| {
            let hash = row.get::<_, Hash>("hash");
            hash.is_ok_and(|hash| hash == definition_cache::hash(body))
        });
        if !is_unchanged {
            report("the recorded definition of an agent is not what was written".to_owned());
        }
    }
    Ok(())
}

/// The key of an attachment is the hash of its bytes. They exist while a run uses them.
fn check_attachments(db: &Connection, report: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare("SELECT hash, data FROM attachments")?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        let digest = row.get("hash").map(Digest);
        let is_unchanged = row.get_ref("data")?.as_blob().is_ok_and(|data| {
            let computed = Digest::compute(data);
            digest.as_ref().is_ok_and(|digest| *digest == computed)
        });
        match digest {
            _ if is_unchanged => {}
            Ok(digest) => report(format!("the attachment {digest} is not what was written")),
            Err(_) => report("an attachment is not what was written".to_owned()),
        }
    }
    let mut sql = db.prepare(
        "SELECT u.run FROM attachment_uses u \
         WHERE NOT EXISTS (SELECT 1 FROM attachments a WHERE a.hash = u.hash)",
    )?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        report(unreadable("an attachment", row));
    }
    Ok(())
}

fn check_turns(db: &Connection, report: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare("SELECT run, turns FROM entries WHERE turns IS NOT NULL")?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        let value = row.get_ref("turns")?.as_blob();
        if !value.is_ok_and(turns::is_readable) {
            report(unreadable("a turn", row));
        }
    }
    Ok(())
}

/// Copies all pages in one step: a copy in several steps starts again after every write of another process.
fn copy_database(source: &Connection, target_path: &Path) -> Result<(), StoreError> {
    let io_error = |error: std::io::Error| StoreError::Backend(error.to_string());
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(target_path)
        .map_err(io_error)?;
    let mut target = Connection::open(target_path).map_err(store_error)?;
    let step = Backup::new(source, &mut target).and_then(|backup| backup.step(-1));
    match step.map_err(store_error)? {
        StepResult::Done => {}
        other => {
            return Err(StoreError::Backend(format!(
                "the database could not be copied now ({other:?}); try again"
            )));
        }
    }
    // Makes the copy a single file without a log.
    target
        .pragma_update_and_check(None, "journal_mode", "delete", |_| Ok(()))
        .map_err(store_error)?;
    target.close().map_err(|(_, error)| store_error(error))?;
    File::open(target_path)
        .and_then(|file| file.sync_all())
        .map_err(io_error)
}

fn partial_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    name.into()
}
