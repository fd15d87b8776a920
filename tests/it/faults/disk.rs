//! Faults of the disk beneath a daemon: full, taken away, damaged, half there; and the copy that mends them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use futures_util::future::join_all;
use rusqlite::Connection;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::daemon::axed_command;
use crate::support::eventually;
use crate::support::provider::answer::{hangs, says};

/// A run's input that takes space.
const LARGE: usize = 1 << 20;

/// A separate file system of this size.
struct Disk {
    point: TempDir,
}

impl Disk {
    /// `None` if this user may not mount.
    fn of(megabytes: u32) -> Option<Self> {
        let point = tempfile::tempdir().expect("a directory");
        let size = format!("size={megabytes}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(point.path())
            .stderr(Stdio::null())
            .status();
        let is_mounted = mounted.is_ok_and(|status| status.success());
        is_mounted.then_some(Self { point })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.point.path().join(name)
    }

    /// Takes all the space that is left.
    fn fill(&self) {
        use std::io::Write;
        let mut file = fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("filler"))
            .expect("a file");
        for size in [1 << 20, 1 << 16, 1 << 12, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A process that has a file open keeps it.
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.point.path())
            .status();
    }
}

/// A daemon with its data on this disk.
fn setup_on(disk: &Disk) -> Setup {
    let data = disk.path("data");
    TestApp::setup()
        .sqlite()
        .agent("solo", "")
        .argument("--data")
        .argument(data.to_str().expect("a path"))
}

fn code(got: &ApiResponse) -> (u16, String) {
    let code = got.json()["code"].as_str().map(str::to_owned);
    (got.status, code.unwrap_or_default())
}

fn is_ready(got: &ApiResponse) -> bool {
    got.status == 200
}

fn large() -> Value {
    json!({"input": "x".repeat(LARGE)})
}

#[tokio::test]
async fn runs_can_be_read_and_deleted_on_a_full_disk_also_after_a_restart() {
    let Some(disk) = Disk::of(128) else {
        eprintln!("skipped: this machine mounts no file system for a test");
        return;
    };
    let data = disk.path("data");
    let mut app = setup_on(&disk).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let mut ids = Vec::new();
    for _ in 0..12 {
        ids.push(app.run_with("solo", large()).await.id().to_owned());
    }
    let reserve = || fs::metadata(data.join("reserve")).map_or(0, |file| file.len());
    app.get_until("/readyz", |_| reserve() == 8 << 20).await;
    assert!(is_ready(&app.get("/readyz").await));
    disk.fill();

    // Something is refused before long, and the daemon is not ready from then on.
    let mut refused = app.post("/agents/solo/runs", &large()).await;
    for _ in 0..20 {
        if refused.status == 503 {
            break;
        }
        refused = app.post("/agents/solo/runs", &large()).await;
    }
    // Active runs are suspended then, so the store need not have been used.
    let codes = ["store_full", "store_unavailable"];
    assert!(codes.contains(&&*code(&refused).1), "{refused:?}");
    assert_eq!(refused.status, 503);
    assert_eq!(app.get("/readyz").await.status, 503);
    assert_eq!(app.find(&ids[0]).await.output(), "done");
    eventually("a refusal that names the disk", async || {
        let refused = app.post("/agents/solo/runs", &json!({"input": "x"})).await;
        (code(&refused).1 == "store_full").then_some(())
    })
    .await;
    let again = app.post("/agents/solo/runs", &json!({"input": "x"})).await;
    assert_eq!(code(&again).1, "store_full", "{}", again.text);

    app.crash_and_restart().await;
    assert_eq!(app.get("/readyz").await.status, 503);
    assert_eq!(app.find(&ids[0]).await.output(), "done");
    // A stopped daemon leaves space that others take.
    for _ in 0..2 {
        disk.fill();
        app.restart().await;
        assert_eq!(app.get("/readyz").await.status, 503);
    }
    for id in &ids[..10] {
        let gone = app.delete(&format!("/runs/{id}")).await;
        assert_eq!(gone.status, 204, "{}", gone.text);
    }
    assert_eq!(app.find(&ids[11]).await.output(), "done");

    // With space it takes runs again, without a restart.
    fs::remove_file(disk.path("filler")).expect("removed");
    app.get_until("/readyz", is_ready).await;
    assert_eq!(app.run("solo", "go").await.output(), "done");
    assert_eq!(reserve(), 8 << 20);
}

/// Waits for the end of a run, or until nothing can be written any more.
async fn completes(app: &TestApp, id: &str) -> bool {
    eventually("an end or a full disk", async || {
        let run = app.get(&format!("/runs/{id}")).await;
        match run.json()["status"] == "completed" {
            true => Some(true),
            false => (app.get("/readyz").await.status == 503).then_some(false),
        }
    })
    .await
}

/// The log has more pages that are new to the database than the reserve has space for, unless it is copied in time.
#[tokio::test]
async fn every_run_can_be_deleted_on_a_disk_that_large_runs_fill() {
    let Some(disk) = Disk::of(80) else {
        eprintln!("skipped: this machine mounts no file system for a test");
        return;
    };
    // The space of deleted runs is returned each second.
    let retention = "[data.retention]\nfailed = {age = \"10s\"}";
    let app = setup_on(&disk).config(retention).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let mut ids = Vec::new();
    'filled: loop {
        let posts = (0..6).map(|_| async { app.post("/agents/solo/runs?wait=2", &large()).await });
        for got in join_all(posts).await {
            match got.status {
                200 => ids.push(got.json()["id"].as_str().expect("an id").to_owned()),
                202 => {
                    let id = got.json()["id"].as_str().expect("an id").to_owned();
                    match completes(&app, &id).await {
                        true => ids.push(id),
                        false => break 'filled,
                    }
                }
                503 => break 'filled,
                status => panic!("{status}: {}", got.text),
            }
        }
    }
    app.get_until("/readyz", |got| got.status == 503).await;
    assert!(ids.len() > 10, "{} runs", ids.len());
    for id in &ids {
        let gone = app.delete(&format!("/runs/{id}")).await;
        assert_eq!(gone.status, 204, "{}", gone.text);
    }
    app.get_until("/readyz", is_ready).await;
}

#[tokio::test]
async fn a_removed_data_directory_makes_the_daemon_unready() {
    for path in ["data", "data/axed.db", "data/axed.db-wal"] {
        let app = TestApp::setup().sqlite().agent("solo", "").spawn().await;
        app.provider.always("solo", |_| says("done"));
        app.run("solo", "go").await;
        fs::rename(app.path(path), app.path("aside")).expect("moved");
        app.get_until("/readyz", |got| got.status == 503).await;
        let refused = app.post("/agents/solo/runs", &json!({})).await;
        assert_eq!(
            code(&refused),
            (503, "store_unavailable".to_owned()),
            "{path}"
        );
        // Another one in its place is another one.
        let aside = app.path("aside");
        match aside.is_dir() {
            true => fs::create_dir(app.path(path)).expect("made"),
            false => drop(fs::copy(&aside, app.path(path)).expect("copied")),
        }
        assert_eq!(app.get("/readyz").await.status, 503, "{path}");
        if aside.is_dir() {
            fs::remove_dir_all(app.path(path)).expect("removed");
        }
        fs::rename(&aside, app.path(path)).expect("put back");
        app.get_until("/readyz", is_ready).await;
        assert_eq!(app.run("solo", "go").await.output(), "done", "{path}");
    }
}

#[tokio::test]
async fn a_log_without_its_database_is_refused_at_the_start() {
    let mut app = TestApp::setup().sqlite().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    app.run("solo", "go").await;
    app.daemon.kill().await;
    fs::remove_file(app.path("data/axed.db")).expect("removed");
    let (ended, reported) = command(&app, &["serve"]);
    assert_eq!(ended, Some(1), "{reported}");
    assert!(
        reported.contains("axed.db is missing") && reported.contains("axed.db-wal"),
        "{reported}"
    );
    assert!(
        !app.path("data/axed.db").exists(),
        "nothing is made in its place"
    );
}

#[tokio::test]
async fn a_database_with_other_tables_is_refused_before_the_daemon_listens() {
    for (damage, cause) in [
        ("DROP TABLE labels", "the table labels is missing"),
        (
            "ALTER TABLE runs RENAME COLUMN agent TO name",
            "the table runs",
        ),
        (
            "DROP TABLE checks; CREATE TABLE checks (name TEXT)",
            "the table checks",
        ),
    ] {
        let mut app = TestApp::setup().sqlite().agent("solo", "").spawn().await;
        app.daemon.kill().await;
        let file = app.path("data/axed.db");
        let connection = Connection::open(&file).expect("a database");
        connection.execute_batch(damage).expect(damage);
        drop(connection);
        let (ended, reported) = command(&app, &["serve"]);
        assert_eq!(ended, Some(1), "{damage}: {reported}");
        assert!(reported.contains(cause), "{damage}: {reported}");
        for promise in ["axed listening", "resumes"] {
            assert!(!reported.contains(promise), "{damage}: {reported}");
        }
    }
}

#[tokio::test]
async fn damaged_records_are_reported_as_damaged() {
    let mut app = TestApp::setup().sqlite().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(app.run("solo", "go").await.id().to_owned());
    }
    let [bad, good, quiet] = &ids[..] else {
        panic!("three runs");
    };
    assert_eq!(command(&app, &["data", "check"]).0, Some(0));
    let hex = |id: &str| id.trim_start_matches("run_").replace('-', "");
    let db = Connection::open(app.path("data/axed.db")).expect("the store");
    db.busy_timeout(std::time::Duration::from_secs(10))
        .expect("a timeout");
    db.execute_batch(&format!(
        "UPDATE runs SET labels = '{{' WHERE id = x'{bad}'; UPDATE entries SET entries = '[{{' WHERE run = x'{bad}' AND entries IS NOT NULL; \
         UPDATE entries SET entries = 'garbage' WHERE run = x'{quiet}'; UPDATE definitions SET body = body || ' '",
        bad = hex(bad),
        quiet = hex(quiet),
    ))
    .expect("damaged");
    drop(db);

    let reported = app.get(&format!("/runs/{bad}")).await;
    assert_eq!(code(&reported), (500, "store_damaged".to_owned()));
    assert!(
        reported.text.contains("axed data check"),
        "{}",
        reported.text
    );
    app.daemon
        .wait_for_log(&format!("the record of {bad}"))
        .await;
    let reported = app.get(&format!("/runs/{quiet}/events")).await;
    assert_eq!(code(&reported), (500, "store_damaged".to_owned()));
    assert_eq!(app.find(good).await.output(), "done");
    let (ended, findings) = command(&app, &["data", "check"]);
    assert_eq!(ended, Some(1), "{findings}");
    for finding in [
        format!("the record of {bad} cannot be read"),
        format!("an entry of {bad} cannot be read"),
        format!("an entry of {quiet} cannot be read"),
        "the recorded definition of an agent is not what was written".to_owned(),
    ] {
        assert!(findings.contains(&finding), "{findings}");
    }

    // Pages that are none are found at the start after a kill.
    app.daemon.kill().await;
    let file = app.path("data/axed.db");
    Connection::open(&file)
        .and_then(|db| db.execute_batch("PRAGMA wal_checkpoint(truncate)"))
        .expect("copied");
    fs::write(app.path("data/axed.db-wal"), "x").expect("written");
    let mut bytes = fs::read(&file).expect("read");
    for page in bytes.chunks_mut(4096).skip(3) {
        page[..16].fill(0xff);
    }
    fs::write(&file, bytes).expect("written");
    let (ended, reported) = command(&app, &["serve"]);
    assert_eq!(ended, Some(1), "{reported}");
    assert!(
        reported.contains("is damaged") && reported.contains("axed data check"),
        "{reported}"
    );
    assert_eq!(command(&app, &["data", "check"]).0, Some(1));
}

#[tokio::test]
async fn a_backup_of_a_running_daemon_can_be_restored() {
    let mut app = TestApp::setup()
        .sqlite()
        .agent("solo", "")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider
        .will("slow", [hangs(), hangs(), says("in the end")]);
    let kept = app.run("solo", "go").await.id().to_owned();
    let slow = app.start("slow", "go").await.id().to_owned();
    app.provider.wait_for_request("slow", 1).await;
    let copy = app.path("copy.db");
    let backup = ["data", "backup", copy.to_str().expect("a path")];
    let (ended, reported) = command(&app, &backup);
    assert_eq!(ended, Some(0), "{reported}");
    let after = app.run("solo", "go").await.id().to_owned();
    let (ended, reported) = command(&app, &backup);
    assert!(
        ended == Some(1) && reported.contains("--force"),
        "{reported}"
    );
    let own = app.path("data/axed.db");
    let own = ["data", "backup", "--force", own.to_str().expect("a path")];
    assert_eq!(command(&app, &own).0, Some(1));
    let link = app.path("link.db");
    symlink("copy.db", &link).expect("a link");
    let linked = ["data", "backup", "--force", link.to_str().expect("a path")];
    let (ended, reported) = command(&app, &linked);
    assert!(
        ended == Some(1) && reported.contains("not a regular file"),
        "{reported}"
    );
    assert!(link.is_symlink());

    // Stop, copy, start.
    app.daemon.kill().await;
    for name in ["axed.db", "axed.db-wal", "axed.db-shm"] {
        let _ = fs::remove_file(app.path("data").join(name));
    }
    fs::copy(&copy, app.path("data/axed.db")).expect("copied");
    app.restart_after_end().await;
    assert_eq!(app.find(&kept).await.output(), "done");
    app.get(&format!("/runs/{after}")).await.problem(404);
    // A run that was active when the copy was made resumes.
    app.provider.wait_for_request("slow", 2).await;
    app.daemon.kill().await;
    app.restart_after_end().await;
    assert_eq!(
        app.find(&slow).await.wait_for_end().await.output(),
        "in the end"
    );
    assert_eq!(
        command(
            &app,
            &["data", "backup", "--force", copy.to_str().expect("a path")]
        )
        .0,
        Some(0)
    );
}

/// Runs a command of axed's in the daemon's directory: its exit code, and what it printed.
fn command(app: &TestApp, arguments: &[&str]) -> (Option<i32>, String) {
    let home = app.path("");
    let output = run(&home, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout) + &text(&output.stderr),
    )
}

fn run(home: &Path, arguments: &[&str]) -> std::process::Output {
    axed_command(home, arguments)
        .as_std_mut()
        .output()
        .expect("it runs")
}
