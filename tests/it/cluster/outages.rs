//! The database is away for a while: nothing moves, nothing is lost, and the log says so once.

use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::daemon::Daemon;
use crate::support::database::lock_tables;
use crate::support::events::assert_complete;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::{calls, says};

/// Alters the database, and ends its sessions if `ends_sessions`.
fn alter(url: &str, change: &str, ends_sessions: bool) {
    let (address, _) = url.split_once('?').expect("parameters");
    let (_, name) = address.rsplit_once('/').expect("a path");
    let end = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND {ends_sessions}"
    );
    let server = postgres::server().expect("a server");
    postgres::with_client(&server, async |client| {
        let alter = format!("ALTER DATABASE {name} {change}");
        client.batch_execute(&alter).await?;
        client.batch_execute(&end).await
    });
}

/// Nobody can connect to the database while it is away.
fn set_away(url: &str, is_away: bool) {
    let change = format!("ALLOW_CONNECTIONS {}", !is_away);
    alter(url, &change, is_away);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_continue_after_the_database_was_away() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "").agent("quick", "")).await
    else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    app.provider.always("quick", |_| says("quick"));
    let mut runs = Vec::new();
    for _ in 0..8 {
        runs.push(app.start("solo", "x").await.id().to_owned());
    }
    app.provider.wait_for_requests(8).await;
    set_away(&url, true);
    gate.open();
    let got = app.get_until("/readyz", |got| got.status == 503).await;
    assert_eq!(got.json()["checks"]["store"]["ok"], false, "{}", got.text);
    let refused = app.post("/agents/quick/runs", &json!({"input": "x"})).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    set_away(&url, false);
    app.get_until("/readyz", |got| got.status == 200).await;
    let log = app.daemon.log();
    assert!(log.matches("The store is not ready").count() <= 1, "{log}");
    for id in runs {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_eq!(run["tree"]["complete"], true);
        assert_complete(&run.events().await);
    }
    let requests = app.provider.requests_for("solo").len();
    assert_eq!(requests, 8, "each reply is paid once");
    assert_eq!(app.run("quick", "x").await.output(), "quick");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_came_while_the_database_was_away_is_recorded_later() {
    let careful = "workdir = \"work\"\ntools = [\"edit_file\"]\n";
    let setup = TestApp::setup().agent("careful", careful);
    let Some((app, url)) = spawn(setup.file("work/a.txt", "x")).await else {
        return;
    };
    let gate = Gate::closed();
    let edit = json!({"path": "a.txt", "old_string": "x", "new_string": "yx"});
    let replies = [
        calls([("edit_file", edit)]).after_gate(&gate),
        says("edited"),
    ];
    app.provider.will("careful", replies);
    let id = app.start("careful", "go").await.id().to_owned();
    app.provider.wait_for_request("careful", 1).await;
    set_away(&url, true);
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    set_away(&url, false);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "edited");
    assert_eq!(app.provider.requests_for("careful").len(), 2);
    let text = std::fs::read_to_string(app.path("work/a.txt")).expect("the file");
    assert_eq!(text, "yx");
    assert_complete(&run.events().await);
}

/// As after a failover, when the name of the database leads to a standby for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_does_not_stay_at_a_database_that_takes_no_writes() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    alter(&url, "SET default_transaction_read_only = on", true);
    let got = app.get_until("/readyz", |got| got.status == 503).await;
    assert_eq!(got.json()["checks"]["store"]["ok"], false, "{}", got.text);
    let request = json!({"input": "x"});
    let refused = app.post("/agents/solo/runs", &request).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    alter(&url, "RESET default_transaction_read_only", false);
    app.get_until("/readyz", |got| got.status == 200).await;
    assert_eq!(app.run("solo", "x").await.output(), "done");
}

const FULL_DISK: &str = "\
    CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS \
        $$ BEGIN RAISE EXCEPTION USING MESSAGE = 'could not extend file', ERRCODE = 'disk_full'; END $$; \
    CREATE TRIGGER full_disk BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION full_disk(); \
    CREATE TRIGGER full_disk BEFORE INSERT ON checks FOR EACH ROW WHEN (NEW.id <> 1) EXECUTE FUNCTION full_disk()";

/// What has its place in a page can still be written, and so can the row that every check writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_is_not_ready_while_the_disk_of_the_database_is_full() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let execute = |sql| postgres::with_client(&url, async |client| client.batch_execute(sql).await);
    execute(FULL_DISK);
    // The second one is refused because of the first, until it is known why that failed.
    for codes in [&["store_full"][..], &["store_unavailable", "store_full"]] {
        let request = json!({"input": "x"});
        let refused = app.post("/agents/solo/runs", &request).await;
        let code = refused.json()["code"].clone();
        assert!(codes.iter().any(|it| code == *it), "{}", refused.text);
        let is_full = |got: &ApiResponse| {
            let why = &got.json()["checks"]["store"]["detail"];
            got.status == 503 && why.as_str().is_some_and(|why| why.contains("full"))
        };
        app.get_until("/readyz", is_full).await;
    }
    let log = app.daemon.log();
    assert_eq!(log.matches("s server is full: ").count(), 1, "{log}");
    execute("DROP FUNCTION full_disk CASCADE");
    app.get_until("/readyz", |got| got.status == 200).await;
    assert_eq!(app.run("solo", "x").await.output(), "done");
}

/// A process of the server that is stopped until this is dropped.
struct Stopped(String);

impl Stopped {
    fn new(process: i32) -> Self {
        let stopped = Self(process.to_string());
        assert!(stopped.signal("-STOP"));
        stopped
    }

    fn signal(&self, signal: &str) -> bool {
        let sent = Command::new("kill").args([signal, &self.0]).status();
        sent.expect("kill").success()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal("-CONT");
    }
}

/// A statement that reads a run.
const READS: &str = "query LIKE 'SELECT r.%'";

/// Stops the process of the server that waits for a lock, of those for which the condition `which` holds.
async fn stop_waiting(url: &str, which: &str) -> Stopped {
    let waiting = format!(
        "SELECT min(pid) FROM pg_stat_activity \
         WHERE datname = current_database() AND wait_event_type = 'Lock' AND {which}"
    );
    let process = eventually("a statement that waits", async || {
        postgres::with_client(url, async |client| {
            client.query_one(&waiting, &[]).await?.try_get(0)
        })
    });
    Stopped::new(process.await)
}

/// Its connection is open, and nothing answers: a server whose disk hangs, or a proxy that has forgotten it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_gets_no_answer_connects_again() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let lock = app.database().lock();
    let request = json!({"input": "x"});
    let refused = app.post("/agents/solo/runs", &request);
    let stopped = async {
        let stopped = stop_waiting(&url, "true").await;
        lock.release();
        stopped
    };
    let (refused, _stopped) = tokio::join!(refused, stopped);
    assert_eq!(refused.status, 503, "{}", refused.text);
    app.daemon
        .wait_for_log("did not answer the writer within 20s")
        .await;
    app.get_until("/readyz", |got| got.status == 200).await;
    assert_eq!(app.run("solo", "x").await.output(), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_gets_no_answer_gives_up() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let id = app.run("solo", "x").await.id().to_owned();
    // The server ends a statement after this time. A process that is stopped does not.
    let limited = format!("{url}&options=-c%20statement_timeout%3D9000");
    app.daemon = Daemon::start(other(&app, &limited, "second")).await;
    let path = format!("/runs/{id}");
    let lock = lock_tables(&url, "runs");
    let stopped = async {
        let stopped = stop_waiting(&url, READS).await;
        lock.release();
        stopped
    };
    let (refused, _stopped) = tokio::join!(app.get(&path), stopped);
    assert_eq!(refused.status, 503, "{}", refused.text);
    app.daemon.wait_for_log("did not answer in time").await;
    assert_eq!(app.get(&path).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_gives_up_when_the_writer_does() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let id = app.run("solo", "x").await.id().to_owned();
    // Alone, a reader would wait for longer than this story.
    let patient = format!("{url}&options=-c%20statement_timeout%3D600000%20-c%20lock_timeout%3D0");
    app.daemon = Daemon::start(other(&app, &patient, "second")).await;
    let path = format!("/runs/{id}");
    let request = json!({"input": "x"});
    let lock = lock_tables(&url, "runs");
    let stopped = async {
        let reader = stop_waiting(&url, READS).await;
        let writer = stop_waiting(&url, &format!("NOT {READS}")).await;
        lock.release();
        (reader, writer)
    };
    let requests = async { tokio::join!(app.get(&path), app.post("/agents/solo/runs", &request)) };
    let ((read, written), _stopped) = tokio::join!(requests, stopped);
    assert_eq!((read.status, written.status), (503, 503));
    app.daemon
        .wait_for_log("did not answer the writer within 20s")
        .await;
    app.get_until("/readyz", |got| got.status == 200).await;
    assert_eq!(app.get(&path).await.status, 200);
}

/// What a load balancer does must not keep a node out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_others_have_removed_joins_again_while_it_is_probed() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    // It joins again soon: what a load balancer asks comes before.
    let is_out = app.get_until("/readyz", |got| got.status == 503);
    let removed = async {
        app.get_until("/readyz", |_| true).await;
        postgres::with_client(&url, async |client| {
            client.batch_execute("DELETE FROM nodes").await
        });
    };
    tokio::join!(is_out, removed);
    app.get_until("/readyz", |got| got.status == 200).await;
    assert_eq!(app.run("solo", "x").await.output(), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_the_database_is_logged_once() {
    let setup = TestApp::setup()
        .config("[telemetry]\nlog = \"info,axed::store::leadership=debug\"")
        .agent("solo", "");
    let Some((app, url)) = spawn(setup).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    for has_run in [false, true] {
        let mut run = None;
        if has_run {
            run = Some(app.start("solo", "x").await);
            app.provider.wait_for_request("solo", 1).await;
        }
        let before = app.daemon.log().len();
        let logs = async |text: &str, count: usize| {
            let look = async || {
                let log = app.daemon.log();
                (log[before..].matches(text).count() >= count).then_some(())
            };
            eventually(text, look).await;
        };
        set_away(&url, true);
        if has_run {
            gate.open();
        }
        // It looks once a second.
        logs("It is not known whether this node leads", 6).await;
        set_away(&url, false);
        logs("listening to the other nodes again", 1).await;
        match run {
            Some(run) => assert_eq!(run.wait_for_end().await.output(), "done"),
            None => {
                logs("Taking over runs works again", 1).await;
                logs("Giving permits to runs works again", 1).await;
            }
        }
        let log = app.daemon.log();
        let lines = log[before..].lines();
        let lines = lines.map(|line| serde_json::from_str(line).expect("JSON"));
        let mut warnings: Vec<String> = lines
            .filter(|line: &Value| line["level"] == "WARN")
            .map(|line| line["message"].as_str().expect("a message").to_owned())
            .collect();
        let count = warnings.len();
        // What follows is the error.
        let subject = |text: &String| text.split(": ").next().unwrap_or_default().to_owned();
        warnings.sort();
        warnings.dedup_by_key(|text| subject(text));
        assert_eq!(warnings.len(), count, "{log}");
        assert!(count > 0, "{log}");
    }
}
