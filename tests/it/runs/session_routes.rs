//! The routes below `/sessions`: list, conversation, deletion. And lists of runs without long texts.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::runs::sessions::{by, counts, of_ada_and_bob, solo, talk};
use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{fails, hangs, says};

fn in_session(session: &str) -> Value {
    json!({"input": "go", "session": session})
}

async fn json_at(app: &TestApp, path: &str) -> Value {
    let got = app.get(path).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()
}

async fn names(app: &TestApp, path: &str) -> Vec<String> {
    let page = json_at(app, path).await;
    let sessions = page["data"].as_array().expect("data").iter();
    let name = |session: &Value| session["name"].as_str().expect("a name").to_owned();
    sessions.map(name).collect()
}

#[tokio::test]
async fn sessions_are_listed_by_name() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 0")
        .agent("other", "")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("one"), says("two"), fails(400, "no")]);
    app.provider.will("other", [says("x")]);
    let first = app.run_with("solo", in_session("b")).await;
    let second = app.run_with("solo", in_session("b")).await;
    let failed = app.run_with("solo", in_session("c")).await;
    let other = app.run_with("other", in_session("a")).await;
    assert_eq!(second["session"], "b");

    let page = json_at(&app, "/sessions").await;
    let brief = |name: &str, runs: u64, messages: u64, last: &Value| {
        json!({"name": name, "runs": runs, "messages": messages, "last_run": last["id"], "agent": last["agent"],
            "created_at": last["created_at"], "updated_at": last["finished_at"]})
    };
    let record = |run: &crate::support::run::Run<'_>| {
        json!({"id": run["id"], "agent": run["agent"], "created_at": run["created_at"],
            "finished_at": run["finished_at"]})
    };
    let mut of_b = brief("b", 2, 4, &record(&second));
    of_b["created_at"] = first["created_at"].clone();
    let expected = json!([
        brief("a", 1, 2, &record(&other)),
        of_b,
        brief("c", 1, 0, &record(&failed))
    ]);
    assert_eq!(page, json!({"data": expected, "next_cursor": null}));

    assert_eq!(names(&app, "/sessions?limit=2").await, ["a", "b"]);
    let cursor = json_at(&app, "/sessions?limit=2").await["next_cursor"].clone();
    assert_eq!(cursor, "b");
    assert_eq!(names(&app, "/sessions?limit=2&cursor=b").await, ["c"]);
    for wrong in ["?limit=0", "?cursor=%20", "?agent=solo", "?key=%20"] {
        app.get(&format!("/sessions{wrong}")).await.problem(400);
    }
}

#[tokio::test]
async fn a_session_shows_the_conversation_that_its_next_run_continues() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"be brief\"")
        .agent("other", "")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("one"), says("two"), hangs()]);
    app.provider.will("other", [says("else")]);
    app.run_with("solo", talk("1")).await;
    let second = app.run_with("solo", talk("2")).await;
    let other = app.run_with("other", talk("x")).await;
    app.start_with("solo", talk("3")).await;

    let shown = json_at(&app, "/sessions/talk/messages?agent=solo").await;
    assert_eq!(
        (&shown["name"], &shown["agent"]),
        (&json!("talk"), &json!("solo"))
    );
    assert_eq!(shown["run"], second.id());
    assert_eq!(shown["system"], "be brief");
    assert_eq!(shown["data"], second.messages().await["data"]);
    assert_eq!(shown["data"].as_array().map(Vec::len), Some(4));
    let rest = json_at(&app, "/sessions/talk/messages?agent=solo&after=3").await;
    assert_eq!(rest["data"], json!([shown["data"][3]]));
    let last = json_at(&app, "/sessions/talk/messages").await;
    assert_eq!(last["run"], other.id());
    // The session exists, without a run of this agent.
    let none = json_at(&app, "/sessions/talk/messages?agent=nobody").await;
    assert_eq!(
        (&none["run"], &none["data"]),
        (&Value::Null, &json!([])),
        "{none}"
    );
    let none = json_at(&app, "/sessions/talk?agent=nobody").await;
    assert_eq!(
        none,
        json!({"name": "talk", "agent": null, "run": null, "messages": 0, "data": [], "next_cursor": null})
    );
    for unknown in ["nobody", "nobody?agent=solo", "nobody/messages?agent=solo"] {
        app.get(&format!("/sessions/{unknown}")).await.problem(404);
    }
}

#[tokio::test]
async fn a_deleted_session_begins_anew_and_its_runs_stay() {
    let mut app = solo().await;
    let gate = Gate::closed();
    gate.open();
    app.provider.always("solo", counts(&gate));
    let first = app.run_with("solo", talk("1")).await.id().to_owned();
    let second = app.run_with("solo", talk("2")).await;
    assert_eq!(second.output(), "got 2");
    let second = second.id().to_owned();
    app.run_with("solo", in_session("stays")).await;

    let deleted = app.delete("/sessions/talk").await;
    assert_eq!((deleted.status, deleted.text.as_str()), (204, ""));

    app.crash_and_restart().await;
    assert_eq!(names(&app, "/sessions").await, ["stays"]);
    for path in ["/sessions/talk", "/sessions/talk/messages"] {
        app.get(path).await.problem(404);
    }
    app.delete("/sessions/talk").await.problem(404);
    let listed = json_at(&app, "/runs?session=talk").await;
    assert_eq!(listed["data"], json!([]));
    for id in [&first, &second] {
        assert_eq!(app.find(id).await["session"], Value::Null);
    }
    let anew = app.run_with("solo", talk("3")).await;
    assert_eq!(anew.output(), "got 1");
    assert_eq!(anew["session"], "talk");
}

#[tokio::test]
async fn a_session_of_more_runs_than_one_part_is_deleted_whole() {
    let app = solo().await;
    app.provider.always("solo", |_| says("done"));
    for _ in 0..260 {
        app.run_with("solo", json!({"session": "long"})).await;
    }
    assert_eq!(json_at(&app, "/sessions").await["data"][0]["runs"], 260);
    assert_eq!(app.delete("/sessions/long").await.status, 204);
    assert_eq!(json_at(&app, "/sessions").await["data"], json!([]));
    assert_eq!(json_at(&app, "/runs?session=long").await["data"], json!([]));
}

#[tokio::test]
async fn a_session_with_an_unfinished_run_is_not_deleted() {
    let mut app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    let first = app.start_with("solo", talk("1")).await.id().to_owned();
    let second = app.start_with("solo", talk("2")).await.id().to_owned();
    for _ in 0..2 {
        let busy = app.delete("/sessions/talk").await;
        assert!(
            busy.problem(409).contains("talk has not ended"),
            "{}",
            busy.text
        );
        assert_eq!(busy.json()["code"], "session_busy");
        app.crash_and_restart().await;
    }
    gate.open();
    for id in [&first, &second] {
        assert_eq!(
            app.find(id).await.wait_for_end().await.status(),
            "completed"
        );
    }
    app.get_until("/sessions/talk", |got| got.json()["messages"] == 4)
        .await;
    assert_eq!(app.delete("/sessions/talk").await.status, 204);
}

#[tokio::test]
async fn a_key_lists_and_deletes_its_own_sessions() {
    let app = of_ada_and_bob().spawn().await;
    app.provider.always("solo", |_| says("done"));
    for key in ["ada", "bob"] {
        let path = "/agents/solo/runs?wait=180";
        let run = by(&app, key, Method::POST, path, Some(&talk("1"))).await;
        assert_eq!(run.status, 200, "{}", run.text);
    }
    let get = |key: &'static str, path: &'static str| by(&app, key, Method::GET, path, None);
    let delete = |key: &'static str, path: &'static str| by(&app, key, Method::DELETE, path, None);
    let runs = |page: Value| page["data"][0]["runs"].clone();
    assert_eq!(runs(get("ada", "/sessions").await.json()), 1);
    assert_eq!(get("root", "/sessions").await.json()["data"], json!([]));
    assert_eq!(runs(get("root", "/sessions?key=bob").await.json()), 1);
    get("ada", "/sessions?key=bob").await.problem(403);
    get("ada", "/sessions/talk?key=bob").await.problem(403);
    get("root", "/sessions/talk/messages").await.problem(404);
    let shown = get("root", "/sessions/talk/messages?key=ada").await.json();
    assert_eq!(shown["data"].as_array().map(Vec::len), Some(2));

    // Without the scope `cancel` a key cannot delete its session.
    delete("ada", "/sessions/talk").await.problem(403);
    delete("root", "/sessions/talk").await.problem(404);
    assert_eq!(delete("root", "/sessions/talk?key=ada").await.status, 204);
    assert_eq!(get("ada", "/sessions").await.json()["data"], json!([]));
    assert_eq!(runs(get("bob", "/sessions").await.json()), 1);
}

#[tokio::test]
async fn an_admin_of_some_agents_deletes_only_their_sessions() {
    let sha256 = KeyHash::digest(b"narrow");
    let key = format!(
        "[auth.keys.narrow]\nsha256 = \"{sha256}\"\nscopes = [\"admin\"]\nagents = [\"other\"]\n"
    );
    let setup = of_ada_and_bob().config(&key).agent("other", "");
    let app = setup.spawn().await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("other", |_| says("done"));
    for (agent, session) in [("solo", "talk"), ("other", "talk"), ("other", "own")] {
        let path = format!("/agents/{agent}/runs?wait=180");
        let body = in_session(session);
        let run = by(&app, "ada", Method::POST, &path, Some(&body)).await;
        assert_eq!(run.status, 200, "{}", run.text);
    }
    let delete = |path: &'static str| by(&app, "narrow", Method::DELETE, path, None);
    delete("/sessions/talk?key=ada").await.problem(404);
    assert_eq!(delete("/sessions/own?key=ada").await.status, 204);
    let sessions = by(&app, "ada", Method::GET, "/sessions", None).await.json();
    assert_eq!(sessions["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(sessions["data"][0]["name"], "talk");
}

#[tokio::test]
async fn a_page_of_runs_with_long_texts_is_small() {
    let app = TestApp::setup()
        .agent("solo", "[params.response_format]\ntype = \"json_object\"")
        .spawn()
        .await;
    let long = "ä".repeat(20_000);
    let answer = json!({"text": long}).to_string();
    let reply = answer.clone();
    app.provider.always("solo", move |_| says(&reply));
    for _ in 0..50 {
        app.run_with(
            "solo",
            json!({"input": long, "session": "talk", "on_busy": "reject"}),
        )
        .await;
    }
    for path in ["/runs", "/sessions/talk"] {
        let page = app.get(path).await;
        assert!(page.text.len() < 100_000, "{} bytes", page.text.len());
        let page = page.json();
        assert_eq!(page["data"].as_array().map(Vec::len), Some(50), "{path}");
        let run = &page["data"][0];
        assert_eq!(run["truncated"], true);
        assert_eq!(run["structured"], Value::Null);
        let input = run["input"].as_str().expect("a text");
        assert!(long.starts_with(input) && input.len() == 256, "{input}");
    }

    let full = json_at(&app, "/runs?full=true&limit=1").await["data"][0].clone();
    assert_eq!(
        (&full["input"], &full["content"]),
        (&json!(long), &json!(answer))
    );
    assert_eq!(full.get("truncated"), None);
    let path = format!("/runs/{}", full["id"].as_str().expect("an id"));
    assert_eq!(json_at(&app, &path).await, full);
    let fields = json_at(&app, &format!("{path}?fields=status,structured")).await;
    assert_eq!(
        fields,
        json!({"status": "completed", "structured": {"text": long}})
    );
    let unknown = app.get(&format!("{path}?fields=id,stauts")).await;
    let detail = unknown.problem(400);
    assert!(detail.contains("did you mean \"status\"?"), "{detail}");
    app.get("/runs?full=perhaps").await.problem(400);
}

#[tokio::test]
async fn short_texts_are_listed_whole() {
    let app = solo().await;
    app.provider.will("solo", [says("y".repeat(1024))]);
    let run = app.run("solo", &"x".repeat(1024)).await;
    let listed = json_at(&app, "/runs").await["data"][0].clone();
    assert_eq!(listed, json_at(&app, &format!("/runs/{}", run.id())).await);
}
