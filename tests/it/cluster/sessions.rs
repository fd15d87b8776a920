//! Sessions whose runs several daemons accept.

use futures_util::future::join_all;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::cluster::following::wait_at;
use crate::cluster::pair;
use crate::support::app::{TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

const RUNS: usize = 24;

fn time(run: &Value, key: &str) -> Timestamp {
    let text = run[key].as_str().expect("a time");
    text.parse().expect("a time")
}

/// Sends so many requests to two daemons at the same time; the ids of the accepted runs in their order.
async fn accepted_at_once(
    app: &TestApp,
    second: &Daemon,
    count: usize,
    body: impl Fn(usize) -> Value,
) -> Vec<String> {
    let requests = (0..count).map(|number| {
        let daemon = [&app.daemon, second][number % 2];
        let url = format!("{}/agents/solo/runs", daemon.url);
        send(app.client.post(url).json(&body(number)))
    });
    let mut ids = Vec::new();
    for got in within_timeout("all answers", join_all(requests)).await {
        assert_eq!(got.status, 202, "{}", got.text);
        ids.push(got.json()["id"].as_str().expect("an id").to_owned());
    }
    ids.sort();
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_once_are_all_accepted_and_follow_each_other_without_a_pause() {
    let Some((app, second, _)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let body = |_| json!({"input": "x", "session": "s"});
    let ids = accepted_at_once(&app, &second, RUNS, body).await;
    let runs = join_all(ids.iter().map(|id| wait_at(&second, id))).await;
    let mut pauses = Vec::new();
    for (run, next) in runs.iter().zip(&runs[1..]) {
        assert_eq!(run["status"], "completed", "{run}");
        let pause = time(run, "finished_at").duration_until(time(next, "started_at"));
        assert!(!pause.is_negative(), "{run} {next}");
        pauses.push(pause.as_millis());
    }
    // It was up to a second for each of them when the next one was only found by looking for it. On a busy machine both what
    // a run does and what follows it take longer.
    let duration = median(runs.iter().map(|run| {
        let duration = time(run, "started_at").duration_until(time(run, "finished_at"));
        duration.as_millis()
    }));
    let pause = median(pauses);
    assert!(pause < 300 + 8 * duration, "{pause} {duration}");
}

fn median(values: impl IntoIterator<Item = i128>) -> i128 {
    let mut values = Vec::from_iter(values);
    values.sort_unstable();
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_cancels_all_that_were_accepted_before_it_in_its_session() {
    let Some((app, second, _)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let mut last_ids = Vec::new();
    for session in ["a", "b", "c"] {
        let body = |_| json!({"input": "x", "session": session, "on_busy": "cancel_previous"});
        let mut ids = accepted_at_once(&app, &second, 6, body).await;
        last_ids.extend(ids.pop());
        for run in join_all(ids.iter().map(|id| wait_at(&second, id))).await {
            assert_eq!(run["status"], "cancelled", "{run}");
        }
    }
    gate.open();
    for run in join_all(last_ids.iter().map(|id| wait_at(&second, id))).await {
        assert_eq!(run["status"], "completed", "{run}");
    }
}

/// Each daemon commits many runs together, and their sessions are locked until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_that_enter_the_same_sessions_do_not_wait_for_each_other() {
    let setup = TestApp::setup()
        .config("[runs]\nmax_queued = 2000")
        .agent("solo", "");
    let Some((app, second, url)) = pair(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    // The second one enters them in the opposite order.
    let body = |number| {
        let (at_second, session) = (number % 2 == 1, number / 2 % 5);
        let session = if at_second { 4 - session } else { session };
        json!({"input": "x", "session": format!("s{session}")})
    };
    for _ in 0..2 {
        let ids = accepted_at_once(&app, &second, 200, body).await;
        join_all(ids.iter().map(|id| wait_at(&second, id))).await;
    }
    // A server process counts what has happened to it at the end of a transaction, at most once a second.
    postgres::with_client(&url, async |client| {
        client.execute("SELECT pg_sleep(1.1)", &[]).await
    });
    accepted_at_once(&app, &second, 2, body).await;
    let deadlocks: i64 = postgres::with_client(&url, async |client| {
        let counted = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        client.query_one(counted, &[]).await?.try_get(0)
    });
    assert_eq!(deadlocks, 0);
}
