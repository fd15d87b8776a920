//! Sleeping, and waiting for events of the world outside.

use jiff::{SignedDuration, Timestamp};
use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, Setup, TestApp, key, send};
use crate::support::daemon::Daemon;
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::run::Run;
use crate::tools::approvals::find;

const SCOPES: &str = "scopes = [\"run\", \"read\"]";
const WAITS: &str = "[wait]\nenabled = true\nmax = 100000\n";

pub fn patient(more: &str) -> Setup {
    TestApp::setup()
        .agent("patient", &format!("{more}{WAITS}"))
        .agent("planner", "sub_agents = [\"patient\"]")
}

pub fn sleeps(arguments: Value) -> ScriptedAnswer {
    calls([("sleep", arguments)])
}

pub fn waits_for(key: &str) -> ScriptedAnswer {
    calls([("wait_for", json!({"event": "order.paid", "key": key}))])
}

pub async fn publish(app: &TestApp, key: &str, data: Value) -> u64 {
    let body = json!({"event": "order.paid", "key": key, "data": data});
    published(&app.post("/events", &body).await)
}

pub fn published(response: &ApiResponse) -> u64 {
    assert_eq!(response.status, 202, "{}", response.text);
    response.json()["woken"].as_u64().expect("a number")
}

/// Sets the agent to work and waits until its run waits.
pub async fn waiting(app: &TestApp, agent: &str) -> String {
    let id = app.start(agent, "go").await.id().to_owned();
    waits(app, &id).await;
    id
}

pub async fn waits(app: &TestApp, id: &str) {
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
}

/// The result of the only call of the run's first turn.
pub async fn result(run: &Run<'_>) -> (String, bool) {
    let messages = run.messages().await;
    let mut messages = messages["data"].as_array().expect("messages").iter();
    let message = messages.find(|it| it["role"] == "tool").expect("a result");
    let result = message["tool_results"].get(0).unwrap_or(message);
    let text = result["content"].as_str().expect("a text").to_owned();
    (text, result["is_error"] == true)
}

#[tokio::test]
async fn a_run_sleeps_without_a_permit_and_goes_on_at_its_time() {
    let app = patient("timeout = 20\n")
        .config("[runs]\nmax_running = 1")
        .spawn()
        .await;
    app.provider.will(
        "patient",
        [
            sleeps(json!({"seconds": 25})),
            says("rested"),
            says("quick"),
        ],
    );
    let id = waiting(&app, "patient").await;
    let run = app.find(&id).await;
    assert_eq!(run["waiting_for"], "sleep");
    let wait = run["wait"].clone();
    let until: Timestamp = wait["until"].as_str().expect("until").parse().expect("it");
    let since: Timestamp = wait["since"].as_str().expect("since").parse().expect("it");
    let length = since.duration_until(until);
    assert!(length <= SignedDuration::from_secs(25), "{wait}");
    assert_eq!(wait.get("event"), None);
    assert_eq!(run["pending_inputs"], json!([]));
    // Its permit is free, and its clock, which has less time than it sleeps, stands still.
    let run = run.wait_for_end().await;
    assert_eq!((run.status(), run.output()), ("completed", "rested"));
    assert!(Timestamp::now() >= until);
    let (text, is_error) = result(&run).await;
    assert!(!is_error && text.starts_with("It is "), "{text}");
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(find(&events, "wait.started")["until"], wait["until"]);
    assert_eq!(count(&events, "wait.ended"), 1);
    assert_eq!(run["wait"], Value::Null);
}

#[tokio::test]
async fn times_that_are_past_or_too_far_away_do_not_wait() {
    let app = patient("").spawn().await;
    for (arguments, expected) in [
        (json!({"until": "2020-01-01T00:00:00Z"}), "is past already"),
        (json!({"seconds": 0}), "is past already"),
        (json!({"seconds": 100_001}), "at most 100000 seconds"),
        (json!({"seconds": -1}), "0"),
        (json!({"until": "tomorrow"}), "must be a time"),
        (json!({}), "either seconds or until"),
        (
            json!({"seconds": 1, "until": "2020-01-01T00:00:00Z"}),
            "either seconds or until",
        ),
    ] {
        app.provider
            .will("patient", [sleeps(arguments.clone()), says("done")]);
        let run = app.start("patient", "go").await;
        let run = app.find(run.id()).await.wait_for_end().await;
        let (text, _) = result(&run).await;
        assert!(text.contains(expected), "{arguments}: {text}");
        assert_eq!(count(&run.events().await, "wait.started"), 0);
    }
}

#[tokio::test]
async fn a_sleep_goes_on_over_a_kill_and_ends_at_its_time() {
    let mut app = patient("").spawn().await;
    app.provider
        .will("patient", [sleeps(json!({"seconds": 20}))]);
    let id = waiting(&app, "patient").await;
    let until = app.find(&id).await["wait"]["until"].clone();
    app.daemon.kill().await;
    app.provider.will("patient", [says("rested")]);
    app.restart_after_end().await;
    let run = app.find(&id).await;
    if run.status() == "waiting" {
        assert_eq!(run["wait"]["until"], until);
    }
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "rested");
    let events = run.events().await;
    assert_eq!(
        (count(&events, "wait.started"), count(&events, "wait.ended")),
        (1, 1)
    );
    let until: Timestamp = until.as_str().expect("a time").parse().expect("it");
    let ended: Timestamp = find(&events, "wait.ended")["time"]
        .as_str()
        .expect("a time")
        .parse()
        .expect("it");
    assert!(ended >= until, "{ended} {until}");
    // One whose time has passed while no daemon ran ends at once.
    let mut app = patient("").spawn().await;
    app.provider
        .will("patient", [sleeps(json!({"seconds": 20}))]);
    let id = waiting(&app, "patient").await;
    let until = app.find(&id).await["wait"]["until"].clone();
    app.daemon.kill().await;
    app.provider.will("patient", [says("late")]);
    let until: Timestamp = until.as_str().expect("a time").parse().expect("it");
    eventually("the time", async || {
        (Timestamp::now() > until).then_some(())
    })
    .await;
    app.restart_after_end().await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "late");
}

#[tokio::test]
async fn an_event_wakes_the_runs_that_wait_for_it_with_its_data() {
    let app = patient("").spawn().await;
    app.provider.always("patient", |request| {
        let input = request.user_messages().concat();
        match request.tool_results().is_empty() {
            true => waits_for(&input),
            false => says("done"),
        }
    });
    let start = async |key: &str| {
        let id = app.start("patient", key).await.id().to_owned();
        waits(&app, &id).await;
        id
    };
    let (one, two, other) = (start("17").await, start("17").await, start("18").await);
    let wait = app.find(&one).await["wait"].clone();
    assert_eq!(
        (&wait["reason"], &wait["event"], &wait["key"]),
        (&json!("event"), &json!("order.paid"), &json!("17"))
    );
    assert!(wait["until"].is_string(), "{wait}");
    assert_eq!(publish(&app, "19", json!(1)).await, 0);
    assert_eq!(publish(&app, "17", json!({"amount": 12.5})).await, 2);
    for id in [&one, &two] {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(result(&run).await, (r#"{"amount":12.5}"#.to_owned(), false));
        let events = run.events().await;
        assert_complete(&events);
        assert_eq!(find(&events, "wait.ended")["data"], json!({"amount": 12.5}));
    }
    assert_eq!(publish(&app, "17", json!(2)).await, 0);
    assert_eq!(app.find(&other).await.status(), "waiting");
    app.post(&format!("/runs/{other}/cancel"), &json!({})).await;
    app.find(&other).await.wait_for_end().await;
    assert_eq!(publish(&app, "18", json!(3)).await, 0);
    assert_eq!(app.database().count("inputs"), 0);
}

#[tokio::test]
async fn an_event_shortly_before_the_wait_counts_once_for_each_run() {
    let app = patient("").spawn().await;
    app.provider
        .will("patient", [waits_for("17"), waits_for("17"), says("done")]);
    assert_eq!(publish(&app, "17", json!("first")).await, 0);
    let id = app.start("patient", "go").await.id().to_owned();
    // The first wait has the event; the second one does not get it again.
    let second = |got: &ApiResponse| got.json()["status"] == "waiting" && got.json()["turns"] == 2;
    app.get_until(&format!("/runs/{id}"), second).await;
    assert_eq!(publish(&app, "17", json!("second")).await, 1);
    let run = app.find(&id).await.wait_for_end().await;
    let messages = run.messages().await;
    let results: Vec<&Value> = messages["data"]
        .as_array()
        .expect("messages")
        .iter()
        .filter(|it| it["role"] == "tool")
        .map(|it| it["tool_results"].get(0).unwrap_or(it))
        .collect();
    let texts: Vec<_> = results.iter().map(|it| &it["content"]).collect();
    assert_eq!(texts, [&json!("\"first\""), &json!("\"second\"")]);

    let app = patient("").config("[wait]\nlookback = 0").spawn().await;
    app.provider
        .will("patient", [waits_for("17"), says("done")]);
    assert_eq!(publish(&app, "17", json!("early")).await, 0);
    waiting(&app, "patient").await;
    assert_eq!(publish(&app, "17", json!("late")).await, 1);
}

#[tokio::test]
async fn no_event_within_the_time_is_an_error_of_the_call() {
    let app = patient("").spawn().await;
    let call = calls([(
        "wait_for",
        json!({"event": "order.paid", "key": "17", "timeout": 1}),
    )]);
    app.provider.will("patient", [call, says("gave up")]);
    let run = app.start("patient", "go").await;
    let run = app.find(run.id()).await.wait_for_end().await;
    assert_eq!(run.output(), "gave up");
    let (text, is_error) = result(&run).await;
    assert!(
        is_error && text.contains("order.paid 17 did not come within 1s"),
        "{text}"
    );
}

#[tokio::test]
async fn an_event_of_a_client_counts_once_and_the_owner_has_a_limit() {
    let app = patient("").config("[wait]\nmax_events = 3").spawn().await;
    app.provider
        .will("patient", [waits_for("17"), says("done")]);
    let id = waiting(&app, "patient").await;
    let body = json!({"event": "order.paid", "key": "17", "data": 1, "id": "evt_1"});
    assert_eq!(published(&app.post("/events", &body).await), 1);
    let again = json!({"event": "order.paid", "key": "17", "data": 2, "id": "evt_1"});
    assert_eq!(published(&app.post("/events", &again).await), 1);
    let other = json!({"event": "order.paid", "key": "18", "id": "evt_1"});
    let refused = app.post("/events", &other).await;
    refused.problem(422);
    assert_eq!(refused.json()["errors"][0]["pointer"], "/id");
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(result(&run).await.0, "1");
    assert_eq!(publish(&app, "x", json!(null)).await, 0);
    assert_eq!(publish(&app, "x", json!(null)).await, 0);
    let full = app
        .post("/events", &json!({"event": "a", "key": "b"}))
        .await;
    full.problem(429);
    assert_eq!(full.json()["code"], "queue_full");
    for wrong in [
        json!({"key": "b"}),
        json!({"event": "a"}),
        json!({"event": "a b", "key": "b"}),
        json!({"event": "a", "key": "b\n"}),
        json!({"event": "a", "key": "x".repeat(201)}),
        json!({"event": "a", "key": "b", "id": ""}),
        json!({"event": "a", "key": "b", "data": "x".repeat(300_000)}),
        json!({"event": "a", "key": "b", "what": 1}),
    ] {
        let refused = app.post("/events", &wrong).await;
        assert_eq!(refused.status, 422, "{}", refused.text);
    }
}

#[tokio::test]
async fn an_event_wakes_only_runs_of_its_owner() {
    let keys = format!("{}{}", key("ada", SCOPES), key("bob", SCOPES));
    let app = patient("").config(&keys).spawn().await;
    app.provider
        .will("patient", [waits_for("17"), says("done")]);
    let started = send(
        app.request(Method::POST, "/agents/patient/runs")
            .bearer_auth("ada")
            .json(&json!({"input": "go"})),
    )
    .await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    let get = async || {
        let path = format!("/runs/{id}");
        let got = app.request(Method::GET, &path).bearer_auth("ada");
        send(got).await.json()
    };
    eventually("a wait", async || {
        (get().await["status"] == "waiting").then_some(())
    })
    .await;
    let event = json!({"event": "order.paid", "key": "17"});
    let publish = async |key: &str| {
        let request = app
            .request(Method::POST, "/events")
            .bearer_auth(key)
            .json(&event);
        published(&send(request).await)
    };
    assert_eq!(publish("bob").await, 0);
    assert_eq!(publish("ada").await, 1);
    eventually("the end", async || {
        (get().await["status"] == "completed").then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_event_that_was_accepted_before_a_kill_wakes_the_run_after_it() {
    let mut app = patient("").spawn().await;
    app.provider.will(
        "planner",
        [delegates([("patient", "go")]), says("both done")],
    );
    app.provider
        .will("patient", [waits_for("17"), says("paid")]);
    let id = app.start("planner", "go").await.id().to_owned();
    waits(&app, &id).await;
    // The root shows what its child waits for.
    assert_eq!(app.find(&id).await["wait"]["key"], "17");
    let body = json!({"event": "order.paid", "key": "17", "data": {"n": 1}});
    let (answered, ()) = tokio::join!(
        app.post("/events", &body),
        app.daemon.wait_for_log("The event order.paid wakes")
    );
    assert_eq!(published(&answered), 1);
    app.daemon.kill().await;
    app.provider.always("patient", |_| says("paid"));
    app.provider.always("planner", |_| says("both done"));
    app.restart_after_end().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "completed");
    let events = run.events().await;
    assert_eq!(count(&events, "wait.ended"), 1);
    assert_eq!(find(&events, "wait.ended")["data"], json!({"n": 1}));
}

#[tokio::test]
async fn a_run_that_sleeps_is_cancelled_at_once_and_a_message_does_not_wake_it() {
    let app = patient("").spawn().await;
    app.provider
        .will("patient", [sleeps(json!({"seconds": 1000}))]);
    let id = waiting(&app, "patient").await;
    let message = app
        .post(
            &format!("/runs/{id}/messages"),
            &json!({"content": "hello"}),
        )
        .await;
    assert_eq!(message.status, 202, "{}", message.text);
    assert_eq!(app.find(&id).await.status(), "waiting");
    // Nobody can answer it as if it were a question.
    let events = app.find(&id).await.events().await;
    let call = find(&events, "wait.started")["tool_call_id"].clone();
    let path = format!("/runs/{id}/inputs/{}", call.as_str().expect("an id"));
    app.post(&path, &json!({"answer": "wake up"}))
        .await
        .problem(409);
    app.post(&format!("/runs/{id}/cancel"), &json!({})).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
}

#[tokio::test]
async fn events_reach_runs_of_other_nodes() {
    let Some((app, url)) = spawn(patient("")).await else {
        return;
    };
    let second = Daemon::start(other(&app, &url, "second")).await;
    app.provider.always("patient", |request| {
        match request.tool_results().is_empty() {
            true => waits_for("17"),
            false => says("done"),
        }
    });
    let ids = [
        waiting(&app, "patient").await,
        waiting(&app, "patient").await,
    ];
    let body = json!({"event": "order.paid", "key": "17", "data": 1});
    let request = app
        .client
        .post(format!("{}/events", second.url))
        .json(&body);
    assert_eq!(published(&send(request).await), 2);
    for id in ids {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(count(&run.events().await, "wait.ended"), 1);
    }
}
