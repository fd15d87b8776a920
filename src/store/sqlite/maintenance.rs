//! What an operator does to a database, beside a daemon that works on it or without one: look for damage, and copy it.
//! Knows no writer.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;
use rusqlite::backup::{Backup, StepResult};

use crate::store::StoreError;
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::rows::{self, RUN_COLUMNS};
use crate::store::sqlite::{FILE, files, schema};

/// Findings after which a check ends.
const MAX_FINDINGS: usize = 100;
/// A database up to this size is looked through at the start after an unclean stop: that takes a moment.
const MAX_CHECKED_BYTES: u64 = 32 << 20;

/// Looks through the whole database of a data directory; what is wrong with it, a sentence each.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    let db = open(dir)?;
    let mut findings = quick_check(&db)?;
    let mut note = |what: String| {
        if findings.len() < MAX_FINDINGS {
            findings.push(what);
        }
    };
    let looks = [look_at_runs(&db, &mut note), look_at_steps(&db, &mut note)];
    for error in looks.into_iter().filter_map(Result::err) {
        note(failed(error).to_string());
    }
    Ok(findings)
}

/// Copies the database of a data directory to a file, as it is at one moment, without holding up whoever writes it.
/// What is at the file's path is replaced where that is wanted, else nothing is done.
pub fn backup(dir: &Path, to: &Path, replaces: bool) -> Result<u64, StoreError> {
    let source = open(dir)?;
    let unwritable = |error: &dyn std::fmt::Display| {
        StoreError::Engine(format!("could not write {}: {error}", to.display()))
    };
    let is_same = |other: &Path| match (fs::canonicalize(other), fs::canonicalize(to)) {
        (Ok(other), Ok(to)) => other == to,
        _ => false,
    };
    let file = dir.join(FILE);
    if is_same(&file) || is_same(&files::log_of(&file)) {
        return Err(unwritable(
            &"it is the database itself; choose another file",
        ));
    }
    if !replaces && fs::symlink_metadata(to).is_ok() {
        return Err(unwritable(&"it exists; --force replaces it"));
    }
    let part = part_of(to);
    let copied = copy(&source, &part)
        .and_then(|()| fs::rename(&part, to).map_err(|error| unwritable(&error)));
    if let Err(error) = copied {
        let _ = fs::remove_file(&part);
        return Err(unwritable(&error));
    }
    Ok(files::size(to).unwrap_or_default())
}

/// Looks through a small database that was not closed.
pub fn check_after_crash(db: &Connection, file: &Path, is_unclean: bool) -> Result<(), StoreError> {
    if !is_unclean {
        return Ok(());
    }
    let bytes = [file.to_owned(), files::log_of(file)];
    let bytes: u64 = bytes.iter().filter_map(|path| files::size(path)).sum();
    if bytes > MAX_CHECKED_BYTES {
        tracing::info!(
            "{} was not closed by the daemon before and is too large to be checked at the start; axed data check does",
            file.display()
        );
        return Ok(());
    }
    match quick_check(db)?.first() {
        None => Ok(()),
        Some(finding) => Err(StoreError::Damaged(format!(
            "{}: {finding}",
            file.display()
        ))),
    }
}

fn open(dir: &Path) -> Result<Connection, StoreError> {
    let file = dir.join(FILE);
    files::check_whole(&file)?;
    if files::size(&file).is_none() {
        return Err(StoreError::Engine(format!(
            "there is no database {}; --data names the data directory",
            file.display()
        )));
    }
    let db = schema::open_reader(&file)?;
    schema::check_version(&db, &file)?;
    Ok(db)
}

fn quick_check(db: &Connection) -> Result<Vec<String>, StoreError> {
    let found = db
        .prepare(&format!("PRAGMA quick_check({MAX_FINDINGS})"))
        .and_then(|mut sql| {
            sql.query_map([], |row| row.get::<_, String>(0))?
                .collect::<rusqlite::Result<Vec<_>>>()
        })
        .map_err(failed)?;
    Ok(found
        .into_iter()
        .filter(|finding| finding != "ok")
        .collect())
}

fn look_at_runs(db: &Connection, note: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare(&format!("SELECT {RUN_COLUMNS} FROM runs r"))?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        if let Err(error) = rows::run(row) {
            match rows::id(row, 0) {
                Ok(id) => note(format!("the record of {id} cannot be read: {error}")),
                Err(_) => note(format!("a run's record cannot be read: {error}")),
            }
        }
    }
    Ok(())
}

fn look_at_steps(db: &Connection, note: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let mut sql = db.prepare("SELECT run, steps FROM entries WHERE steps IS NOT NULL")?;
    let mut found = sql.query([])?;
    while let Some(row) = found.next()? {
        let read = row.get_ref(1)?.as_str().map_err(|error| error.to_string());
        let read = read.and_then(|text| rows::steps(text).map_err(|error| error.to_string()));
        if let Err(error) = read {
            match rows::id(row, 0) {
                Ok(id) => note(format!("a step of {id} cannot be read: {error}")),
                Err(_) => note(format!("a step cannot be read: {error}")),
            }
        }
    }
    Ok(())
}

/// All pages in one step, over one state of the source: a copy in several steps begins anew whenever somebody writes.
fn copy(source: &Connection, to: &Path) -> Result<(), StoreError> {
    let made = |error: std::io::Error| StoreError::Engine(error.to_string());
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(to)
        .map_err(made)?;
    let mut target = Connection::open(to).map_err(failed)?;
    let step = Backup::new(source, &mut target).and_then(|backup| backup.step(-1));
    match step.map_err(failed)? {
        StepResult::Done => {}
        other => {
            return Err(StoreError::Engine(format!(
                "the database could not be copied now ({other:?}); try again"
            )));
        }
    }
    // One file, whole by itself: the log of the copy is folded in.
    target
        .pragma_update_and_check(None, "journal_mode", "delete", |_| Ok(()))
        .map_err(failed)?;
    target.close().map_err(|(_, error)| failed(error))?;
    File::open(to)
        .and_then(|file| file.sync_all())
        .map_err(made)
}

fn part_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    name.into()
}
