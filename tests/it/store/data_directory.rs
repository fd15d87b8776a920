//! The SQLite file and its directory.

use std::path::Path;
use std::sync::{Arc, Mutex};

use axed::domain::run::{RunId, Status};
use axed::store::open::check;
use axed::store::{Change, ClaimedRun, StoreError};

use crate::store::fixtures::{
    Opened, claim, claiming, completing, count, fresh, in_an_hour, numbers, opening, record, root,
    sql, sqlite, sqlite_in, starting, stored, whole_log, write,
};

#[tokio::test]
async fn a_reopened_file_has_every_record() {
    let Opened { store, place, .. } = sqlite();
    let (ended, at_work) = (root(), root());
    let key = claim("k", 1, in_an_hour());
    let open = claiming(&ended, key.clone());
    store.write(open).await.expect("opened");
    store.write(opening(&at_work, "a")).await.expect("opened");
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    store
        .write(completing(&ended, "done"))
        .await
        .expect("closed");
    let before = (
        stored(&*store, &ended).await,
        stored(&*store, &at_work).await,
    );
    store.close().await;
    assert!(
        !place.path().join("axed.db-wal").exists(),
        "the log is folded in"
    );

    // Closed and not yet dropped: the lock is free.
    let (again, _) = sqlite_in(place.path()).expect("opened again");
    let after = (
        stored(&*again, &ended).await,
        stored(&*again, &at_work).await,
    );
    assert_eq!(before, after);
    let left = again.unfinished_runs().await.expect("unfinished");
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].resume_state, unfinished[1].resume_state);
    assert!(left[0].resume_state.is_some());
    let claimed = ClaimedRun {
        run: ended.run,
        body_hash: [1; 32],
        number: None,
    };
    let found = again.claimed_run(key.key.clone()).await;
    assert_eq!(found.expect("a read"), Some(claimed));
    let refused = again.write(claiming(&root(), key)).await;
    assert!(matches!(refused, Err(StoreError::AlreadyClaimed(by)) if by == claimed));
    let next = again.write(completing(&at_work, "done")).await;
    assert_eq!(next.expect("closed"), 2, "the tree's log counts on");
}

#[tokio::test]
async fn a_dropped_store_has_committed_queued_writes() {
    let Opened { store, place, .. } = sqlite();
    let root = root();
    store.write(opening(&root, "a")).await.expect("opened");
    for _ in 0..100 {
        let some = write(&root, Change::Unchanged, 1);
        store.enqueue(some).await.expect("posted");
    }
    drop(store);
    let (store, _) = sqlite_in(place.path()).expect("opened again");
    assert_eq!(stored(&*store, &root).await.last_event, 101);
}

#[tokio::test]
async fn a_killed_process_has_committed_acknowledged_writes() {
    let Opened { store, place, .. } = sqlite();
    let root = root();
    store.write(opening(&root, "a")).await.expect("opened");
    store
        .write(completing(&root, "done"))
        .await
        .expect("closed");
    // The files as a dead process leaves them, with the log not yet copied into the database.
    let left = tempfile::tempdir().expect("a directory");
    for name in ["axed.db", "axed.db-wal", "lock"] {
        std::fs::copy(place.path().join(name), left.path().join(name)).expect("a copy");
    }
    let (found, _) = sqlite_in(left.path()).expect("opened");
    assert_eq!(stored(&*found, &root).await, stored(&*store, &root).await);
    let log = found.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), [1, 2]);
}

#[tokio::test]
async fn a_second_process_gets_the_lock_holder() {
    let opened = sqlite();
    let dir = opened.place.path();
    let error = sqlite_in(dir).err().expect("refused");
    let StoreError::Locked { dir: named, holder } = &error else {
        panic!("{error}");
    };
    assert_eq!(*named, dir.display().to_string());
    let us = format!("(process {})", std::process::id());
    assert!(
        holder.starts_with("it") && holder.ends_with(&us),
        "{holder}"
    );
    // The one that was refused has taken nothing away.
    let root = root();
    opened
        .store
        .write(opening(&root, "a"))
        .await
        .expect("opened");
    drop(opened.store);
    sqlite_in(dir).expect("free again");
}

#[tokio::test]
async fn a_directory_is_private_to_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path().join("a/b");
    let (store, _) = sqlite_in(&dir).expect("opened");
    store.check().await.expect("in order");
    for (path, mode) in [
        ("", 0o700),
        ("lock", 0o600),
        ("axed.db", 0o600),
        ("axed.db-wal", 0o600),
    ] {
        let found = std::fs::metadata(dir.join(path)).expect(path);
        assert_eq!(found.permissions().mode() & 0o777, mode, "{path}");
    }
}

#[tokio::test]
async fn a_foreign_file_is_rejected_by_name() {
    type Damage = fn(&Path);
    let cases: [(Damage, &str); 4] = [
        (
            |dir| sql(dir, "PRAGMA user_version = 99"),
            "axed.db was written by a newer version of axed",
        ),
        (
            |dir| sql(dir, "PRAGMA application_id = 1"),
            "axed.db is a database of another program",
        ),
        (
            |dir| std::fs::write(dir.join("axed.db"), [7; 5000]).expect("written"),
            "axed.db: file is not a database",
        ),
        (
            |dir| {
                std::fs::remove_file(dir.join("axed.db")).expect("removed");
                std::fs::create_dir(dir.join("axed.db")).expect("made");
            },
            "axed.db: Is a directory",
        ),
    ];
    for (damage, wanted) in cases {
        let Opened { store, place, .. } = sqlite();
        store.close().await;
        damage(place.path());
        let error = sqlite_in(place.path()).err().expect("refused").to_string();
        assert!(error.contains(wanted), "{error}");
        assert!(
            error.contains(&place.path().display().to_string()),
            "{error}"
        );
    }
    let place = tempfile::NamedTempFile::new().expect("a file");
    let error = sqlite_in(place.path()).err().expect("refused").to_string();
    assert!(
        error.contains("could not make the data directory"),
        "{error}"
    );
}

#[tokio::test]
async fn a_failed_commit_modifies_nothing() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let gaps = Arc::<Mutex<Vec<RunId>>>::default();
    let failed_roots = Arc::clone(&gaps);
    store.on_write_failed(Box::new(move |root| {
        failed_roots.lock().expect("roots").push(root);
    }));
    let (root, posted) = (root(), root());
    for scope in [&root, &posted] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    sql(
        dir,
        "CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk full'); END",
    );
    let error = store.write(starting(&root)).await.expect_err("full");
    assert!(error.to_string().contains("disk full"), "{error}");
    store.enqueue(starting(&posted)).await.expect("posted");
    assert!(store.write(starting(&root)).await.is_err());
    assert_eq!(stored(store, &root).await.status, Status::Queued);
    sql(dir, "DROP TRIGGER full");
    assert_eq!(store.write(starting(&root)).await.expect("started"), 2);
    let gap = store.write(starting(&posted)).await.expect_err("a gap");
    assert!(matches!(gap, StoreError::Suspended), "{gap}");
    assert_eq!(*gaps.lock().expect("roots"), [posted.run]);
    store.clear_failed(vec![posted.run]).await.expect("mended");
    assert_eq!(store.write(starting(&posted)).await.expect("started"), 2);
}

/// Definitions with the same content are stored once, also from different callers and after a rollback.
#[tokio::test]
async fn a_definition_is_stored_once() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let text: Arc<str> = "{\"name\":\"shared\"}".into();
    let running_by = |definition: &Arc<str>| {
        let scope = root();
        let mut opening = fresh(record(&scope, "a"));
        opening.resume_state.definition = Arc::clone(definition);
        write(&scope, Change::Create(Box::new(opening)), 1)
    };
    sql(
        dir,
        "CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk full'); END",
    );
    let full = store.write(running_by(&text)).await;
    assert!(full.is_err());
    sql(dir, "DROP TRIGGER full");
    store.write(running_by(&text)).await.expect("opened");
    assert_eq!(count(dir, "definitions"), 1);
    let again: Arc<str> = Arc::from(&*text);
    for text in [&text, &again, &Arc::from("{}")] {
        store.write(running_by(text)).await.expect("opened");
    }
    assert_eq!(count(dir, "definitions"), 2);
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    let texts: Vec<_> = unfinished
        .iter()
        .map(|found| &*found.resume_state.as_ref().expect("known").definition)
        .collect();
    assert_eq!(texts, [&*text, &*text, &*text, "{}"]);

    sql(dir, "DELETE FROM definitions WHERE body = '{}'");
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    assert!(unfinished[3].resume_state.is_none());
}

/// Leaves the names of sessions of all runs out of the index of sessions.
fn damage_index(dir: &Path) {
    let open = || {
        let db = rusqlite::Connection::open(dir.join("axed.db")).expect("opened");
        db.execute_batch("PRAGMA writable_schema = ON")
            .expect("writable");
        db
    };
    let columns = "type, name, tbl_name, rootpage, sql";
    let of_index = "FROM sqlite_master WHERE name = 'runs_session'";
    let db = open();
    let index = db.query_row(&format!("SELECT {columns} {of_index}"), [], |row| {
        let text = |at: usize| row.get::<_, String>(at);
        let root: i64 = row.get(3)?;
        Ok((text(0)?, text(1)?, text(2)?, root, text(4)?))
    });
    let index = index.expect("the index");
    db.execute(&format!("DELETE {of_index}"), [])
        .expect("hidden");
    drop(db);
    sql(dir, "UPDATE runs SET session = 'talk'");
    let sql = format!("INSERT INTO sqlite_master ({columns}) VALUES (?, ?, ?, ?, ?)");
    open().execute(&sql, index).expect("visible");
}

#[tokio::test]
async fn a_check_finds_damaged_indexes_and_attachments() {
    let Opened { store, place, .. } = sqlite();
    let dir = place.path();
    store.write(opening(&root(), "a")).await.expect("opened");
    store.close().await;
    let findings = || check(dir).expect("checked").join("\n");
    // The hash of no bytes.
    let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let insert = format!("INSERT INTO attachments (hash, data) VALUES (x'{digest}', x'')");
    sql(dir, &insert);
    sql(
        dir,
        "INSERT INTO attachment_uses (run, hash) SELECT r.id, a.hash FROM runs r, attachments a",
    );
    assert_eq!(findings(), "");

    sql(dir, "UPDATE attachments SET data = x'00'");
    let changed = format!("the attachment {digest} is not what was written");
    assert_eq!(findings(), changed);
    sql(dir, "DELETE FROM attachments");
    let missing = findings();
    assert!(missing.starts_with("an attachment of run_"), "{missing}");
    sql(dir, "DELETE FROM attachment_uses");
    assert_eq!(findings(), "");

    damage_index(dir);
    let damaged = findings();
    assert!(
        damaged.contains("missing from index runs_session"),
        "{damaged}"
    );
}
