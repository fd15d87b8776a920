//! Retention: expired trees are deleted completely, beside active runs, and the file shrinks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axed::config::{Retention, RetentionLimit};
use axed::domain::run::{Outcome, RunId, Scope, Status, now};
use axed::engine::retention;
use axed::store::Change;
use axed::store::leadership::Leadership;
use axed::store::retention::NthNewestQuery;
use axed::store::run_store::RunStore;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Builder;

use crate::store::fixtures::{
    Opened, claim, closing, completing, count, failure, fresh, in_an_hour, opening, record, root,
    sqlite, sqlite_in, write,
};
use crate::support::app::TestApp;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, fails, says};

/// A run with everything that a run can have, by a definition of its own.
async fn full_run(store: &dyn RunStore, n: usize) -> Scope {
    let scope = root();
    let mut run = record(&scope, "a");
    run.input = "long ".repeat(400).into();
    run.labels.insert("k".to_owned(), n.to_string());
    let mut opening = fresh(run);
    opening.resume_state.definition = format!("{{\"name\":\"{n}\"}}").into();
    opening.claim = Some(claim(&n.to_string(), 0, in_an_hour()));
    let open = write(&scope, Change::Create(Box::new(opening)), 1);
    store.write(open).await.expect("opened");
    scope
}

async fn full_runs(store: &dyn RunStore, numbers: std::ops::Range<usize>) {
    for n in numbers {
        let scope = full_run(store, n).await;
        store
            .enqueue(completing(&scope, "done"))
            .await
            .expect("posted");
    }
    store.check().await.expect("committed");
}

fn newest(kept: usize) -> Retention {
    Retention {
        completed: RetentionLimit {
            age: None,
            count: Some(kept),
        },
        ..Retention::default()
    }
}

/// The completed root with this many newer ones.
async fn place(store: &dyn RunStore, but: usize) -> Option<RunId> {
    let query = NthNewestQuery {
        status: Status::Completed,
        before: None,
        offset: but,
    };
    store.nth_newest_ended(query).await.expect("a place")
}

/// Waits until at most this many completed roots of `from` exist, as long as they become fewer.
async fn dwindled(store: &dyn RunStore, from: usize, to: usize) {
    for goal in (to..from).rev().step_by(100).chain([to]) {
        eventually("the deletion of old runs", async || {
            place(store, goal).await.is_none().then_some(())
        })
        .await;
    }
}

async fn keeping<T>(
    store: &Arc<dyn RunStore>,
    retention: Retention,
    meanwhile: impl Future<Output = T>,
) -> T {
    let stop = CancellationToken::new();
    let limits = (retention, None);
    let leadership = Leadership::alone();
    let keeping = retention::run(store.as_ref(), limits, &leadership, stop.clone());
    let meanwhile = async {
        let done = meanwhile.await;
        stop.cancel();
        done
    };
    tokio::join!(keeping, meanwhile).1
}

fn bytes(dir: &Path) -> u64 {
    let file = std::fs::metadata(dir.join("axed.db")).expect("a file");
    file.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_runs_expire_while_others_start() {
    let Opened {
        store,
        place: home,
        published: _published,
        ..
    } = sqlite();
    full_runs(store.as_ref(), 0..10_000).await;
    let before = store.commits().count();

    // One process begins it …
    keeping(&store, newest(100), dwindled(store.as_ref(), 10_000, 9_000)).await;
    store.close().await;
    assert!(
        bytes(home.path()) > 20 << 20,
        "{} bytes",
        bytes(home.path())
    );
    drop(store);
    let (store, _published) = sqlite_in(home.path()).expect("opened again");
    assert!(
        place(store.as_ref(), 1_000).await.is_some(),
        "stopped halfway"
    );

    // … and the next process finishes it, beside new runs.
    let at_work = keeping(&store, newest(100), async {
        let mut at_work = Vec::new();
        for n in 10_000..10_200 {
            at_work.push(full_run(store.as_ref(), n).await);
        }
        dwindled(store.as_ref(), 9_000, 100).await;
        eventually("a smaller file", async || {
            (bytes(home.path()) <= 4 << 20).then_some(())
        })
        .await;
        at_work
    })
    .await;

    assert!(place(store.as_ref(), 99).await.is_some(), "a hundred stay");
    for scope in &at_work {
        let run = store.run(scope.run).await.expect("a read");
        assert_eq!(run.map(|run| run.status), Some(Status::Queued));
    }
    for table in ["runs", "texts", "labels", "claims", "definitions"] {
        assert_eq!(count(home.path(), table), 300, "{table}");
    }
    assert!(before > 0);
}

/// A root run whose id is so many days old, and that has ended just now.
async fn ended_run(store: &dyn RunStore, (hours, number): (u64, u8), outcome: Outcome) -> RunId {
    let created = now() - Duration::from_secs(hours * 3600);
    let millis = created.as_millisecond().unsigned_abs();
    let id = Builder::from_unix_timestamp_millis(millis, &[number; 10]).into_uuid();
    let scope = Scope::root(RunId(id), Some(5));
    let opening = opening(&scope, "a");
    store.write(opening).await.expect("opened");
    let end = closing(&scope, outcome);
    store.write(end).await.expect("closed");
    scope.run
}

/// A daemon that starts with a clock that is far ahead deletes nothing that is not old. What `count` allows is not a matter of time.
#[tokio::test]
async fn a_clock_far_after_the_newest_run_deletes_nothing_by_age() {
    let opened = sqlite();
    let (store, failed) = (&opened.store, || Outcome::Failed {
        failure: failure(),
        partial: None,
    });
    let completed = || Outcome::Completed {
        content: "done".to_owned(),
        structured: false,
    };
    let aged = ended_run(store.as_ref(), (9000, 1), completed()).await;
    let first = ended_run(store.as_ref(), (9000, 2), failed()).await;
    ended_run(store.as_ref(), (9000, 3), failed()).await;
    let retention = Retention {
        completed: RetentionLimit {
            age: Some(Duration::from_millis(1)),
            count: None,
        },
        failed: RetentionLimit {
            age: None,
            count: Some(1),
        },
        ..Retention::default()
    };
    let is_gone = async |run: RunId| store.run(run).await.expect("a read").is_none();
    let gone = async |run: RunId| {
        eventually("the deletion of a run", async || {
            is_gone(run).await.then_some(())
        })
        .await;
    };
    // A clock that is wrong has made it.
    ended_run(store.as_ref(), (0, 5), completed()).await;
    // A pass deletes completed runs before failed ones.
    keeping(store, retention, gone(first)).await;
    assert!(!is_gone(aged).await, "its time is not known");

    ended_run(store.as_ref(), (2, 4), completed()).await;
    keeping(store, retention, gone(aged)).await;
}

/// A definition that many runs share is deleted once every run is newer than its last use.
#[tokio::test]
async fn a_shared_definition_is_deleted_after_its_runs() {
    let opened = sqlite();
    let (store, dir) = (&opened.store, opened.place.path());
    let shared = async || {
        let scope = root();
        let opening = Change::Create(Box::new(fresh(record(&scope, "a"))));
        store
            .write(write(&scope, opening, 1))
            .await
            .expect("opened");
        let done = completing(&scope, "done");
        store.write(done).await.expect("closed");
        scope
    };
    let (first, second, third) = (shared().await, shared().await, shared().await);
    assert_eq!(count(dir, "definitions"), 1);
    for gone in [first, second] {
        assert!(store.delete(gone.run).await.expect("deleted"));
        while store.vacuum().await.expect("tidied") {}
        assert_eq!(count(dir, "definitions"), 1, "the third has it");
    }
    assert!(store.delete(third.run).await.expect("deleted"));
    while store.vacuum().await.expect("tidied") {}
    assert_eq!(count(dir, "definitions"), 0);
    shared().await;
    assert_eq!(count(dir, "definitions"), 1, "it comes back with a run");
}

#[tokio::test]
async fn runs_expire_by_age_and_active_runs_stay() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("broken", "")
        .agent("slow", "")
        .config("[data.retention]\ncompleted = { age = 5 }")
        .spawn()
        .await;
    let gates = [Gate::closed(), Gate::closed()];
    app.provider
        .will("slow", [says("late").after_gate(&gates[0])]);
    app.provider.will("broken", [fails(400, "no")]);
    let done = says("done").after_gate(&gates[1]);
    app.provider
        .will("planner", [delegates([("reader", "x")]), done]);
    app.provider.will("reader", [says("read")]);
    let slow = app.start("slow", "go").await;
    let broken = app.run("broken", "go").await;
    assert_eq!(broken.status(), "failed");
    let key = |key| {
        let request = app.request(reqwest::Method::POST, "/agents/planner/runs");
        request
            .header("idempotency-key", key)
            .json(&json!({"input": "go"}))
    };
    let planner = crate::support::app::send(key("k")).await.json();
    let id = planner["id"].as_str().expect("an id");
    app.provider.wait_for_request("planner", 2).await;
    let child = app.find(id).await.children().await;
    let child = child.first().map(|child| child.id().to_owned());
    let page = app.get(&format!("/runs/{id}/events?limit=1")).await;
    gates[1].open();

    let gone = app
        .get_until(&format!("/runs/{id}"), |got| got.status == 404)
        .await;
    gone.problem(404);
    // Readers of the log get 404, and the idempotency key is free again.
    assert_eq!(page.status, 200);
    let next = app.get(&format!("/runs/{id}/events?after=1")).await;
    next.problem(404);
    let child = child.expect("a child");
    app.get(&format!("/runs/{child}")).await.problem(404);
    app.provider.will("planner", [says("again")]);
    let again = crate::support::app::send(key("k")).await.json();
    assert_ne!(again["id"], planner["id"]);

    assert_eq!(broken.reload().await.status(), "failed");
    assert_eq!(slow.reload().await.status(), "running");
    // It may be deleted before it is read.
    let mut events = app.events(&slow).await;
    gates[0].open();
    events.until("run.completed").await;
}

#[tokio::test]
async fn a_run_that_cannot_be_deleted_keeps_no_other() {
    let app = TestApp::setup()
        .sqlite()
        .agent("solo", "")
        .agent("broken", "")
        .agent("stuck", "")
        .config("[data.retention]\nage = 1")
        .spawn()
        .await;
    app.provider.will("broken", [fails(400, "no")]);
    app.provider.always("solo", |_| says("done"));
    app.provider.always("stuck", |_| says("done"));
    app.database().execute(
        "CREATE TRIGGER stuck BEFORE DELETE ON runs WHEN old.agent = 'stuck' \
         BEGIN SELECT RAISE(ABORT, 'stuck'); END",
    );
    let stuck = app.run("stuck", "go").await.id().to_owned();
    let ids = [
        app.start("solo", "go").await.id().to_owned(),
        app.start("broken", "go").await.id().to_owned(),
    ];
    for id in &ids {
        app.get_until(&format!("/runs/{id}"), |got| got.status == 404)
            .await;
    }
    app.daemon
        .wait_for_log("Retention could not remove everything")
        .await;
    assert_eq!(app.find(&stuck).await.output(), "done");
}

#[tokio::test]
async fn the_newest_runs_stay_and_the_next_start_deletes_the_rest() {
    let mut app = TestApp::setup()
        .agent("solo", "")
        .environment("AXED_DATA__RETENTION__COMPLETED__COUNT", "2")
        .spawn()
        .await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        app.provider.will("solo", [says("done")]);
        ids.push(app.run("solo", "go").await.id().to_owned());
    }
    app.restart().await;
    let left = app
        .get_until("/runs", |got| {
            got.json()["data"]
                .as_array()
                .is_some_and(|runs| runs.len() == 2)
        })
        .await
        .json();
    assert_eq!(left["data"][0]["id"], ids[4]);
    assert_eq!(left["data"][1]["id"], ids[3]);
}
