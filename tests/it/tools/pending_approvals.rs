//! Pending approvals in run objects and in `GET /approvals`, and what `?wait` returns for a run that waits for one.

use std::time::Instant;

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::TEST_TIMEOUT;
use crate::support::app::{TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, says};
use crate::tools::approvals::{approve, careful, decide, requests, sent, writes};

/// The ids of the calls that an object's `pending_approvals` or a page's `data` has.
fn call_ids(list: &Value) -> Vec<&str> {
    let approvals = list.as_array().expect("a list").iter();
    approvals
        .map(|approval| approval["tool_call_id"].as_str().expect("an id"))
        .collect()
}

async fn listed(app: &TestApp, query: &str) -> Value {
    let got = app.get(&format!("/approvals{query}")).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()
}

fn two_writes() -> ScriptedAnswer {
    let file = |path: &str| ("write_file", json!({"path": path, "content": "new"}));
    calls([file("a"), file("b")])
}

#[tokio::test]
async fn a_root_shows_the_pending_approvals_of_its_whole_tree() {
    let app = careful("approve_timeout = 600").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    app.provider
        .will("careful", [two_writes(), says("written")]);
    let id = app.start("planner", "go").await.id().to_owned();
    let requests = requests(&app, &id, 2).await;
    let child = requests[0]["run_id"].as_str().expect("an id");
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;

    let root = app.find(&id).await;
    let pending = &root["pending_approvals"];
    assert_eq!(call_ids(pending).len(), 2);
    let first = &pending[0];
    assert_eq!(first["run_id"], child);
    assert_eq!(
        (&first["root_id"], &first["agent"]),
        (&json!(id), &json!("careful"))
    );
    assert_eq!(first["tool"], "write_file");
    assert_eq!(first["arguments"], requests[0]["arguments"]);
    assert_eq!(first["deadline"], requests[0]["deadline"]);
    assert_eq!(first.get("truncated"), None);
    assert_eq!(root["waiting_for"], "approval");
    let child = app.find(child).await;
    assert_eq!(&child["pending_approvals"], pending);
    assert_eq!(child["waiting_for"], "approval");
    assert_eq!(
        listed(&app, "").await,
        json!({"data": pending, "next_cursor": null})
    );
    let in_list = app.get("/runs?status=waiting").await.json();
    assert_eq!(&in_list["data"][0]["pending_approvals"], pending);

    approve(&app, &requests[0]).await;
    let left = requests[1]["tool_call_id"].as_str().expect("an id");
    assert_eq!(call_ids(&app.find(&id).await["pending_approvals"]), [left]);
    assert_eq!(call_ids(&listed(&app, "").await["data"]), [left]);
    approve(&app, &requests[1]).await;
    let ended = root.wait_for_end().await;
    assert_eq!(ended.output(), "done");
    assert_eq!(ended["pending_approvals"], json!([]));
    assert_eq!(listed(&app, "").await["data"], json!([]));
}

#[tokio::test]
async fn long_arguments_are_shown_as_the_beginning_of_their_text() {
    let app = careful("").spawn().await;
    let large = json!({"path": "a", "content": "ä".repeat(20_000)});
    app.provider
        .will("careful", [calls([("write_file", large)])]);
    sent(&app, "careful").await;
    let pending = &listed(&app, "").await["data"][0];
    let shown = pending["arguments"].as_str().expect("a text");
    assert!(
        shown.starts_with("{\"path\":\"a\",\"content\":\"ä"),
        "{shown}"
    );
    assert!(shown.len() <= 2048, "{}", shown.len());
    assert_eq!(pending["truncated"], true);
}

#[tokio::test]
async fn pending_approvals_are_there_after_a_kill_and_gone_after_a_cancel() {
    let mut app = careful("").config("[runs]\nmax_running = 1").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")])]);
    app.provider.will("careful", [writes("a"), writes("b")]);
    let (planner, _) = sent(&app, "planner").await;
    let (solo, _) = sent(&app, "careful").await;
    let path = format!("/runs/{planner}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    let before = listed(&app, "").await;
    assert_eq!(call_ids(&before["data"]).len(), 2);

    app.crash_and_restart().await;

    assert_eq!(listed(&app, "").await, before);
    let root = app.find(&planner).await;
    assert_eq!(root["pending_approvals"][0], before["data"][0]);
    let of_solo = listed(&app, &format!("?root={solo}")).await;
    assert_eq!(of_solo["data"], json!([before["data"][1]]));
    assert_eq!(root.cancel("enough").await.status(), "cancelled");
    assert_eq!(listed(&app, "").await["data"], of_solo["data"]);
    let run = app.find(&solo).await;
    assert_eq!(run.cancel("enough").await["pending_approvals"], json!([]));
    assert_eq!(listed(&app, "").await["data"], json!([]));
}

#[tokio::test]
async fn the_list_has_pages_of_whole_runs() {
    let app = careful("").spawn().await;
    let replies = [two_writes(), two_writes(), two_writes()];
    app.provider.will("careful", replies);
    for _ in 0..3 {
        let id = app.start("careful", "go").await.id().to_owned();
        requests(&app, &id, 2).await;
    }
    let whole = listed(&app, "").await;
    let mut collected = Vec::new();
    let mut cursor = String::new();
    for expected in [2, 2, 2] {
        let page = listed(&app, &format!("?limit=1{cursor}")).await;
        let data = page["data"].as_array().expect("data");
        assert_eq!(data.len(), expected);
        collected.extend(data.iter().cloned());
        cursor = match page["next_cursor"].as_str() {
            Some(next) => format!("&cursor={next}"),
            None => String::new(),
        };
    }
    assert_eq!(cursor, "", "more than three pages");
    assert_eq!(json!(collected), whole["data"]);
    for wrong in ["?limit=0", "?cursor=x", "?root=x", "?status=waiting"] {
        app.get(&format!("/approvals{wrong}")).await.problem(400);
    }
}

#[tokio::test]
async fn a_key_sees_the_approvals_of_its_own_runs() {
    let key = |name: &str, scopes: &str, more: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [{scopes}]\n{more}\n")
    };
    let usual = "\"run\", \"read\"";
    let config = [
        key("ada", usual, ""),
        key("bob", usual, ""),
        key("root", "\"admin\"", ""),
        key("limited", "\"admin\"", "agents = [\"solo\"]"),
    ];
    let app = careful("").config(&config.concat()).spawn().await;
    app.provider.will("careful", [writes("a")]);
    let by = |key: &'static str, method: Method, path: String| {
        send(app.request(method, &path).bearer_auth(key))
    };
    let path = format!("/agents/careful/runs?wait={}", TEST_TIMEOUT.as_secs());
    let run = by("ada", Method::POST, path).await;
    assert_eq!(run.status, 202, "{}", run.text);
    let id = run.json()["id"].as_str().expect("an id").to_owned();
    for (key, calls) in [("ada", 1), ("bob", 0), ("root", 1), ("limited", 0)] {
        for query in [String::new(), format!("?root={id}")] {
            let got = by(key, Method::GET, format!("/approvals{query}")).await;
            assert_eq!(got.status, 200, "{}", got.text);
            assert_eq!(call_ids(&got.json()["data"]).len(), calls, "{key}{query}");
        }
    }
    app.get("/approvals").await.problem(401);
}

#[tokio::test]
async fn a_waiting_client_is_answered_when_a_run_comes_to_wait_for_a_person() {
    let app = careful("").spawn().await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [
            delegates([("careful", "write"), ("solo", "think")]),
            says("done").after_gate(&gate),
        ],
    );
    app.provider.will("careful", [writes("a"), says("written")]);
    app.provider.will("solo", [says("thought")]);
    let wait = TEST_TIMEOUT.as_secs();
    let post = || {
        let path = format!("/agents/planner/runs?wait={wait}");
        let request = app.request(Method::POST, &path);
        send(request.header("idempotency-key", "k"))
    };
    let posted = post().await;
    assert_eq!(posted.status, 202, "{}", posted.text);
    let run = posted.json();
    assert_eq!(run["status"], "waiting");
    assert_eq!(run["pending_approvals"][0]["tool"], "write_file");
    // A repeated request finds it waiting.
    let again = post().await;
    assert_eq!((again.status, &again.json()["id"]), (202, &run["id"]));

    // A GET knows that it waits, and is answered when that changes.
    let path = format!("/runs/{}", run["id"].as_str().expect("an id"));
    let waiting_path = format!("{path}?wait={wait}");
    let started = Instant::now();
    let (changed, ()) = tokio::join!(app.get(&waiting_path), async {
        // A wait for a run that waits already ends with its time. The longer wait has begun by then.
        let unchanged = app.get(&format!("{path}?wait=10")).await;
        assert_eq!(unchanged.json()["status"], "waiting");
        let pending = &run["pending_approvals"][0];
        let field = |key: &str| pending[key].as_str().expect("a text");
        let approval = format!(
            "/runs/{}/approvals/{}",
            field("run_id"),
            field("tool_call_id")
        );
        let decided = app.post(&approval, &json!({"decision": "approve"})).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    });
    assert!(
        started.elapsed() < TEST_TIMEOUT / 2,
        "only its time ended it"
    );
    assert_eq!(changed.status, 202, "{}", changed.text);
    let changed = changed.json();
    assert_eq!(changed["pending_approvals"], json!([]));
    assert_eq!(
        (&changed["status"], &changed["waiting_for"]),
        (&json!("running"), &Value::Null)
    );
    gate.open();
    let ended = app.get(&waiting_path).await;
    assert_eq!(ended.json()["content"], "done");
}

#[tokio::test]
async fn a_wait_after_a_restart_ends_with_the_decision() {
    let mut app = careful("").spawn().await;
    app.provider.will(
        "careful",
        [writes("a"), says("done").after_gate(&Gate::closed())],
    );
    let (id, request) = sent(&app, "careful").await;
    app.crash_and_restart().await;
    let path = format!("/runs/{id}?wait={}", TEST_TIMEOUT.as_secs());
    let started = Instant::now();
    let (changed, ()) = tokio::join!(app.get(&path), async {
        // The longer wait has begun once this one ends.
        let short = app.get(&format!("/runs/{id}?wait=10")).await;
        assert_eq!(
            (short.status, &short.json()["status"]),
            (202, &json!("waiting"))
        );
        let decided = decide(&app, &request, json!({"decision": "deny"})).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    });
    assert!(
        started.elapsed() < TEST_TIMEOUT / 2,
        "only its time ended it"
    );
    assert_eq!(changed.status, 202, "{}", changed.text);
    let changed = changed.json();
    assert_eq!(changed["pending_approvals"], json!([]));
    assert_eq!(
        (&changed["status"], &changed["waiting_for"]),
        (&json!("running"), &Value::Null)
    );
}

#[tokio::test]
async fn a_run_whose_other_calls_work_is_not_answered_as_waiting() {
    let app = careful("").spawn().await;
    app.provider.will(
        "planner",
        [delegates([("careful", "write"), ("solo", "think")])],
    );
    app.provider.will("careful", [writes("a")]);
    app.provider.will("solo", [hangs()]);
    let (id, _) = sent(&app, "planner").await;
    app.provider.wait_for_request("solo", 1).await;
    let got = app.get(&format!("/runs/{id}?wait=0.2")).await.json();
    assert_eq!(got["status"], "running");
    assert_eq!(call_ids(&got["pending_approvals"]).len(), 1);
}
