//! Forks of runs without children.

use reqwest::Method;
use serde_json::{Value, json};

use crate::forks::{conversation, fork, start_fork};
use crate::support::app::{TestApp, send};
use crate::support::attachments::{picture_part, png_with_suffix};
use crate::support::events::{assert_complete, count, kinds};
use crate::support::provider::answer::{calls, fails, hangs, says};

/// An agent that lists its directory before it answers.
const LISTS: &str = "tools = [\"list_directory\"]\nsystem_prompt = \"Work.\"";

pub fn lists(text: &str) -> crate::support::provider::answer::ScriptedAnswer {
    calls([("list_directory", json!({"path": "."}))]).with_text(text)
}

async fn three_turns() -> (TestApp, String) {
    let app = TestApp::setup().agent("solo", LISTS).spawn().await;
    let replies = [lists("one"), lists("two"), says("three")];
    app.provider.will("solo", replies);
    let body = json!({"input": "go", "labels": {"team": "a"}});
    let id = app.run_with("solo", body).await.id().to_owned();
    (app, id)
}

#[tokio::test]
async fn a_fork_requests_the_turn_anew_with_what_came_before_it() {
    let (app, source) = three_turns().await;
    app.provider.will("solo", [says("another end")]);
    let forked = fork(&app, &source, &json!({"at": {"turn": 3}})).await;

    assert_eq!(forked.output(), "another end");
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests.len(), 4, "only the third turn is requested");
    assert_eq!(requests[3].body, requests[2].body);
    let from = json!({"run": source, "at_run": source, "turn": 3});
    assert_eq!(forked["forked_from"], from);
    assert_eq!(forked["turns"], 3);
    assert_eq!(forked["tool_calls"], 0);
    assert_eq!(forked["tree"]["model_calls"], 1);
    assert_eq!(forked["tree"]["runs"], 1);
    assert_eq!(forked["tree"]["reused"], json!({"runs": 0, "turns": 2}));
    assert_eq!(forked["labels"], json!({"team": "a"}));
    let source = app.find(&source).await;
    assert_eq!(source["forked_from"], Value::Null);
    let (whole, own) = (
        source["input_tokens"].as_u64(),
        forked["input_tokens"].as_u64(),
    );
    assert!(own < whole, "{own:?} {whole:?}");

    let events = forked.events().await;
    assert_complete(&events);
    let expected = [
        "run.queued",
        "run.forked",
        "run.started",
        "turn.started",
        "turn.completed",
        "run.completed",
    ];
    assert_eq!(kinds(&events), expected);
    assert_eq!(events[1]["forked_from"], from);
    let turns = app
        .get(&format!("/runs/{}/turns", forked.id()))
        .await
        .json();
    let copied = turns["data"].as_array().expect("turns").iter();
    let copied: Vec<&Value> = copied.map(|turn| &turn["copied"]).collect();
    assert_eq!(copied, [true, true, false]);
    let messages = conversation(&forked).await;
    assert_eq!(messages[..5], conversation(&source).await[..5]);
    assert_eq!(messages[5], "another end");
}

#[tokio::test]
async fn a_kept_reply_has_its_calls_executed_again() {
    let (app, source) = three_turns().await;
    app.write("agents/new.txt", "x");
    app.provider.will("solo", [says("done")]);
    let body = json!({"at": {"turn": 2, "after": "reply"}});
    let forked = fork(&app, &source, &body).await;

    assert_eq!(forked.output(), "done");
    assert_eq!(
        (&forked["turns"], &forked["tool_calls"]),
        (&json!(3), &json!(1))
    );
    let events = forked.events().await;
    assert_eq!(count(&events, "tool.completed"), 1);
    assert_eq!(count(&events, "turn.completed"), 1);
    assert_eq!(app.provider.requests_for("solo").len(), 4);
}

#[tokio::test]
async fn turn_zero_assembles_the_prompt_anew_and_turn_one_does_not() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "system_prompt = \"Work.\"\nfiles = [\"note.md\"]\nworkdir = \".\"",
        )
        .file("note.md", "old")
        .spawn()
        .await;
    app.provider.will("solo", [says("1"), says("2"), says("3")]);
    let source = app.run("solo", "go").await.id().to_owned();
    app.write("note.md", "new");
    for (turn, note) in [(1, "old"), (0, "new")] {
        let forked = fork(&app, &source, &json!({"at": {"turn": turn}})).await;
        assert_eq!(forked["turns"], 1);
        let request = app.provider.requests().pop().expect("a request");
        assert!(request.system().contains(note), "{}", request.system());
        assert_eq!(request.user_messages(), ["go"]);
    }
}

#[tokio::test]
async fn a_failed_run_continues_after_its_last_step() {
    let app = TestApp::setup()
        .agent("solo", &format!("{LISTS}\n[retry]\nmax_retries = 0"))
        .spawn()
        .await;
    let replies = [lists("one"), fails(400, "no"), says("done")];
    app.provider.will("solo", replies);
    let source = app.run("solo", "go").await;
    assert_eq!(source.status(), "failed");
    let forked = fork(&app, source.id(), &json!({})).await;
    assert_eq!(forked.output(), "done");
    assert_eq!(forked["turns"], 2);
    assert_eq!(forked["forked_from"]["turn"], 2);
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests[2].body, requests[1].body);
}

#[tokio::test]
async fn a_fork_takes_the_definition_that_is_asked_for() {
    let (app, source) = three_turns().await;
    app.write_agent("solo", &LISTS.replace("Work.", "Be brief."));
    let is_reloaded = |text: &str| text.contains("Be brief.");
    app.get_until("/agents/solo", |response| is_reloaded(&response.text))
        .await;
    app.provider.will("solo", [says("a"), says("b")]);
    for (definition, system) in [("recorded", "Work."), ("current", "Be brief.")] {
        let body = json!({"at": {"turn": 2}, "definition": definition});
        fork(&app, &source, &body).await;
        let request = app.provider.requests().pop().expect("a request");
        assert_eq!(request.system(), system);
        assert_eq!(request.tool_results().len(), 1, "the first turn is kept");
    }
}

#[tokio::test]
async fn the_source_may_be_deleted_while_the_fork_runs() {
    let mut app = TestApp::setup().agent("solo", LISTS).spawn().await;
    let picture = png_with_suffix("of a fork");
    app.provider
        .will("solo", [lists("one"), says("two"), hangs()]);
    let body = json!({"input": [{"type": "text", "text": "look"}, picture_part(&picture)]});
    let source = app.run_with("solo", body).await.id().to_owned();
    let forked = start_fork(&app, &source, &json!({"at": {"turn": 2}})).await;
    let id = forked.id().to_owned();
    app.provider.wait_for_request("solo", 3).await;
    assert_eq!(app.delete(&format!("/runs/{source}")).await.status, 204);
    app.provider.will("solo", [says("done")]);
    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests[3].body, requests[1].body, "with the picture");
    assert_complete(&run.events().await);
}

#[tokio::test]
async fn a_fork_of_an_active_run_takes_what_is_committed() {
    let app = TestApp::setup().agent("solo", LISTS).spawn().await;
    app.provider
        .will("solo", [lists("one"), hangs(), says("done")]);
    let source = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 2).await;
    let forked = fork(&app, &source, &json!({})).await;
    assert_eq!(forked.output(), "done");
    assert_eq!(app.find(&source).await.status(), "running");
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests[2].body, requests[1].body);
}

#[tokio::test]
async fn a_fork_waits_streams_and_repeats_like_a_new_run() {
    let (app, source) = three_turns().await;
    let replies = [says("waited"), says("streamed"), says("once")];
    app.provider.will("solo", replies);
    let body = json!({"at": {"turn": 3}});
    let path = format!("/runs/{source}/fork");
    let waited = app.post(&format!("{path}?wait=180"), &body).await;
    assert_eq!(
        (waited.status, &waited.json()["content"]),
        (200, &json!("waited"))
    );

    let request = app.request(Method::POST, &path);
    let streamed = send(request.header("accept", "text/event-stream").json(&body)).await;
    assert!(
        streamed.text.contains("id: 1\nevent: run.queued\n"),
        "{}",
        streamed.text
    );
    assert!(
        streamed.text.contains("event: text.delta"),
        "{}",
        streamed.text
    );
    assert!(streamed.text.contains("event: run.completed"));

    let keyed = || {
        let request = app.request(Method::POST, &format!("{path}?wait=180"));
        send(request.header("idempotency-key", "k1").json(&body))
    };
    let (first, second) = (keyed().await, keyed().await);
    assert_eq!(first.json()["content"], "once");
    assert_eq!(first.json()["id"], second.json()["id"]);
    assert_eq!(second.header("idempotency-replayed"), "true");
}

#[tokio::test]
async fn only_a_fork_that_says_so_adds_to_memory() {
    let app = TestApp::setup()
        .agent("solo", "[memory]\nenabled = true")
        .spawn()
        .await;
    app.provider.will("solo", [says("1"), says("2"), says("3")]);
    let source = app.run("solo", "go").await.id().to_owned();
    for (memory, entries) in [(false, 1), (true, 2)] {
        fork(&app, &source, &json!({"at": {"turn": 1}, "memory": memory})).await;
        let recorded = app.get("/agents/solo/memory").await.json();
        assert_eq!(recorded["data"].as_array().map(Vec::len), Some(entries));
    }
}

#[tokio::test]
async fn a_fork_is_in_the_session_that_it_names_and_in_no_other() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("ok"));
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    app.run_with("solo", talk("1")).await;
    let second = app.run_with("solo", talk("2")).await.id().to_owned();
    let forked = fork(&app, &second, &json!({"at": {"turn": 1}})).await;
    assert_eq!(forked["session"], Value::Null);
    let body = json!({"at": {"turn": 0}, "session": "other"});
    let forked = fork(&app, &second, &body).await;
    assert_eq!(forked["session"], "other");
    app.run_with("solo", json!({"input": "3", "session": "other"}))
        .await;
    let request = app.provider.requests().pop().expect("a request");
    assert_eq!(request.user_messages(), ["1", "2", "3"]);
}

#[tokio::test]
async fn a_fork_that_is_accepted_survives_a_kill_before_its_first_request() {
    let mut app = TestApp::setup()
        .agent("solo", LISTS)
        .agent("other", "")
        .config("[runs]\nmax_running = 1")
        .spawn()
        .await;
    app.provider.will("solo", [lists("one"), says("two")]);
    let source = app.run("solo", "go").await.id().to_owned();
    app.provider.will("other", [hangs(), says("done")]);
    // It has the only slot, so that the fork is recorded and sends nothing.
    let other = app.start("other", "go").await.id().to_owned();
    app.provider.wait_for_request("other", 1).await;
    let body = json!({"at": {"turn": 2}});
    let forked = start_fork(&app, &source, &body).await.id().to_owned();
    app.delete(&format!("/runs/{source}")).await;

    app.provider.will("solo", [says("three")]);
    app.crash_and_restart().await;
    assert_eq!(app.find(&other).await.wait_for_end().await.output(), "done");
    let run = app.find(&forked).await.wait_for_end().await;
    assert_eq!(run.output(), "three");
    assert_eq!(
        (&run["turns"], &run["tree"]["model_calls"]),
        (&json!(2), &json!(1))
    );
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests.len(), 3, "the first turn is not requested again");
    assert_eq!(requests[2].body, requests[1].body);
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.forked"), 1);
}
