//! Children in the background: how they start, how their ends reach their parent, and what happens at its end.

use std::time::Instant;

use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, fails, hangs, says};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::run::Run;

/// A planner that may call `a`, `b` and `c` in the background.
fn planner(settings: &str, more: &str) -> Setup {
    let toml = format!(
        "sub_agents = [\"a\", \"b\", \"c\"]\n{more}[sub_agents_config]\nbackground = true\n{settings}"
    );
    TestApp::setup()
        .agent("planner", &toml)
        .agent("a", "")
        .agent("b", "")
        .agent("c", "")
}

/// Starts these agents in the background.
fn starts(agents: &[&str]) -> ScriptedAnswer {
    calls(agents.iter().map(|agent| {
        let arguments = json!({"agent": agent, "task": format!("be {agent}"), "background": true});
        ("call_agent", arguments)
    }))
}

fn awaits(arguments: Value) -> ScriptedAnswer {
    calls([("await_agents", arguments)])
}

/// The run that the result of a call names.
fn started(result: &str) -> String {
    let result: Value = serde_json::from_str(result).expect("JSON");
    result["run"].as_str().expect("an id").to_owned()
}

/// The messages of a request that have ends of children.
fn ends(seen: &RecordedRequest) -> Vec<String> {
    let mut messages = seen.user_messages();
    messages.retain(|text| text.contains("Background agent"));
    messages
}

async fn waits_for(app: &TestApp, run: &Run<'_>, reason: &str) {
    let path = format!("/runs/{}", run.id());
    let is_reached = |got: &Value| got["status"] == "waiting" && got["waiting_for"] == reason;
    app.get_until(&path, |got| is_reached(&got.json())).await;
}

async fn has_ended(app: &TestApp, child: &str) {
    app.find(child).await.wait_for_end().await;
}

/// What the end of this child is in a message.
fn end(agent: &str, run: &str, text: &str) -> String {
    format!("Background agent {agent} ({run}) ended:\n{text}")
}

#[tokio::test]
async fn the_result_is_there_at_once_and_the_end_is_a_message() {
    let app = planner("", "").spawn().await;
    let slow = app.provider.always_later("a", "all is read");
    let quick = app.provider.always_later("b", "quick");
    app.provider.will(
        "planner",
        [starts(&["a"]), delegates([("b", "be quick")]), says("done")],
    );
    let run = app.start("planner", "go").await;

    let second = app.provider.wait_for_request("planner", 2).await;
    let result: Value = serde_json::from_str(&second.tool_results()[0]).expect("JSON");
    assert_eq!(result["agent"], "a");
    let child = started(&second.tool_results()[0]);
    assert_eq!(app.find(&child).await.status(), "running");
    assert_eq!(run.reload().await.status(), "running");
    assert_eq!(ends(&second), [""; 0]);
    slow.open();
    has_ended(&app, &child).await;
    quick.open();

    let third = app.provider.wait_for_request("planner", 3).await;
    assert_eq!(ends(&third), [end("a", &child, "all is read")]);
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "done");
    assert_eq!(ended["tree"]["runs"], 3);
    let children = ended.children().await;
    assert_eq!(children.len(), 2);
    assert_eq!(children[0]["parent_id"], run["id"]);
    let events = ended.events().await;
    assert_complete(&events);
    let of = |kind: &str| {
        let events = events.iter().filter(|it| it.kind() == kind);
        events.collect::<Vec<_>>()
    };
    let called = of("agent.called");
    assert_eq!(called[0]["background"], true);
    assert_eq!(called[1]["background"], Value::Null);
    let returned = of("agent.returned");
    let returned = returned
        .iter()
        .find(|it| it["child_id"] == json!(child))
        .expect("its end");
    assert_eq!(returned["message"], 1);
    assert_eq!(count(&events, "message.added"), 1);
}

#[tokio::test]
async fn the_tools_are_offered_where_the_file_says_so() {
    let app = planner("", "[subagent]\nenabled = true\n")
        .agent("plain", "sub_agents = [\"a\"]")
        .spawn()
        .await;
    app.provider.will("planner", [says("done")]);
    app.provider.will("plain", [starts(&["a"]), says("done")]);
    app.provider.always("a", |_| says("read"));

    app.run("planner", "go").await;
    let offered = app.provider.wait_for_request("planner", 1).await;
    let names = ["await_agents", "cancel_agent", "call_agent", "subagent"];
    assert_eq!(offered.tool_names(), names);
    for tool in &offered.tools()[2..] {
        let argument = &tool["parameters"]["properties"]["background"];
        assert_eq!(argument["type"], "boolean", "{tool}");
    }
    app.run("plain", "go").await;
    let offered = app.provider.wait_for_request("plain", 2).await;
    assert_eq!(offered.tool_names(), ["call_agent"]);
    assert_eq!(offered.tool_results(), ["read"]);
}

#[tokio::test]
async fn a_run_awaits_the_first_of_its_children_and_then_the_others() {
    let app = planner("", "").spawn().await;
    let a = app.provider.always_later("a", "text of a");
    let b = app.provider.always_later("b", "text of b");
    let c = Gate::closed();
    app.provider.will("c", [fails(400, "no").after_gate(&c)]);
    app.provider.always("planner", |seen| {
        let results = seen.tool_results();
        match seen.turn() {
            1 => starts(&["a", "b", "c"]),
            2 => awaits(json!({"any": true})),
            3 => awaits(json!({})),
            4 => calls([
                ("await_agents", json!({"runs": [started(&results[1])]})),
                ("await_agents", json!({"runs": ["x"]})),
                ("await_agents", json!({})),
                ("cancel_agent", json!({"run": started(&results[0])})),
                (
                    "await_agents",
                    json!({"runs": ["run_00000000-0000-0000-0000-000000000000"]}),
                ),
            ]),
            _ => says("done"),
        }
    });
    let run = app.start("planner", "go").await;
    waits_for(&app, &run, "agents").await;
    let waiting = run.reload().await;
    assert_eq!(waiting["wait"]["reason"], "agents");
    b.open();
    let third = app.provider.wait_for_request("planner", 3).await;
    let runs: Vec<String> = third.tool_results()[..3]
        .iter()
        .map(|it| started(it))
        .collect();
    let first: Value = serde_json::from_str(&third.tool_results()[3]).expect("JSON");
    let of_b = json!({"run": runs[1], "agent": "b", "status": "completed", "text": "text of b"});
    assert_eq!(first, json!([of_b]));

    waits_for(&app, &run, "agents").await;
    c.open();
    has_ended(&app, &runs[2]).await;
    a.open();
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "done");
    let last = app.provider.wait_for_request("planner", 5).await;
    let results = last.tool_results();
    let rest: Value = serde_json::from_str(&results[4]).expect("JSON");
    assert_eq!(rest[0]["agent"], "c");
    assert_eq!(
        (&rest[0]["status"], rest[0].get("text")),
        (&json!("failed"), None)
    );
    assert!(
        rest[0]["error"]
            .as_str()
            .is_some_and(|it| it.contains("no")),
        "{rest}"
    );
    assert_eq!(rest[1]["text"], "text of a");
    assert_eq!(rest.as_array().map(Vec::len), Some(2));
    assert!(
        results[5].contains("you have got its result before"),
        "{results:?}"
    );
    assert!(results[6].contains("\"x\" is not the id"), "{results:?}");
    assert!(
        results[7].contains("there is no agent in the background"),
        "{results:?}"
    );
    assert!(results[8].contains("has ended already"), "{results:?}");
    assert!(results[9].contains("is none of your agents"), "{results:?}");
    assert_eq!(last.tool_result_errors()[5..], [true; 5]);
    let events = ended.events().await;
    assert_complete(&events);
    assert_eq!(
        (
            count(&events, "message.added"),
            count(&events, "agent.returned")
        ),
        (0, 3)
    );
    assert_eq!(app.provider.requests_for("planner").len(), 5);
}

#[tokio::test]
async fn a_child_is_cancelled_by_its_parent() {
    let app = planner("", "").spawn().await;
    app.provider.always("a", |_| hangs());
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a"]),
        2 => calls([(
            "cancel_agent",
            json!({"run": started(&seen.tool_results()[0])}),
        )]),
        turn => says(format!("turn {turn}")),
    });
    let run = app.start("planner", "go").await;
    let third = app.provider.wait_for_request("planner", 3).await;
    let child = started(&third.tool_results()[0]);
    assert_eq!(third.tool_results()[1], format!("{child} is cancelled."));
    run.wait_for_end().await;
    let seen = app.provider.requests_for("planner");
    let delivered = ends(seen.last().expect("a request"));
    let expected = end("a", &child, "Error: cancelled: cancelled by its caller");
    assert_eq!(delivered, [expected]);
    assert_eq!(app.find(&child).await.status(), "cancelled");
}

#[tokio::test]
async fn a_final_text_waits_for_the_children_again_and_again() {
    let app = planner("", "").spawn().await;
    let a = app.provider.always_later("a", "text of a");
    let b = app.provider.always_later("b", "text of b");
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a"]),
        3 => starts(&["b"]),
        turn => says(format!("turn {turn}")),
    });
    let run = app.start("planner", "go").await;
    waits_for(&app, &run, "agents").await;
    assert_eq!(app.provider.requests_for("planner").len(), 2);
    a.open();
    app.provider.wait_for_request("planner", 4).await;
    waits_for(&app, &run, "agents").await;
    // A message does not wait for them.
    let message = json!({"content": "hurry"});
    let added = app
        .post(&format!("/runs/{}/messages", run.id()), &message)
        .await;
    assert_eq!(added.status, 202, "{}", added.text);
    let fifth = app.provider.wait_for_request("planner", 5).await;
    assert_eq!(
        fifth.user_messages().last().map(String::as_str),
        Some("hurry")
    );
    waits_for(&app, &run, "agents").await;
    b.open();
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "turn 6");
    let last = app.provider.wait_for_request("planner", 6).await;
    assert_eq!(ends(&last).len(), 2);
    assert!(ends(&last)[1].ends_with("ended:\ntext of b"));
}

#[tokio::test]
async fn a_final_text_cancels_the_children_if_the_file_says_so() {
    let app = planner("on_end = \"cancel\"", "").spawn().await;
    app.provider.always("a", |_| hangs());
    app.provider.will("planner", [starts(&["a"]), says("done")]);
    let run = app.run("planner", "go").await;
    assert_eq!(run.output(), "done");
    let child = &run.children().await[0];
    assert_eq!(child.status(), "cancelled");
    assert_eq!(child["cancel_reason"], "its caller has ended");
    assert_eq!(run["warnings"], json!([]));
}

#[tokio::test]
async fn a_run_without_a_turn_left_ends_after_its_children_with_a_warning() {
    let app = planner("", "[limits]\nmax_turns = 2\n").spawn().await;
    let a = app.provider.always_later("a", "text of a");
    app.provider.will("planner", [starts(&["a"]), says("done")]);
    let run = app.start("planner", "go").await;
    waits_for(&app, &run, "agents").await;
    a.open();
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "done");
    assert_eq!(ended.children().await[0].status(), "completed");
    assert_eq!(ended["warnings"][0]["code"], "message_unread");
}

#[tokio::test]
async fn a_run_that_fails_cancels_its_children() {
    let app = planner("", "").spawn().await;
    app.provider.always("a", |_| hangs());
    app.provider
        .will("planner", [starts(&["a"]), fails(400, "no")]);
    let run = app.run("planner", "go").await;
    assert_eq!(run.status(), "failed");
    assert_eq!(run.children().await[0].status(), "cancelled");
}

#[tokio::test]
async fn what_a_child_waits_for_is_shown_while_nothing_works() {
    let app = planner("", "")
        .config("[runs]\nmax_running = 1")
        .agent(
            "a",
            "tools = [\"list_directory\"]\napprove = [\"list_directory\"]",
        )
        .agent("other", "")
        .spawn()
        .await;
    app.provider.always("other", |_| says("other"));
    let b = app.provider.always_later("b", "text of b");
    app.provider.always("a", |seen| match seen.turn() {
        1 => calls([("list_directory", json!({"path": "."}))]),
        _ => says("text of a"),
    });
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a", "b"]),
        2 => awaits(json!({})),
        _ => says("done"),
    });
    let run = app.start("planner", "go").await;
    let path = format!("/runs/{}", run.id());
    let asks = app
        .get_until(&path, |got| {
            let got = got.json();
            got["waiting_for"] == "agents" && got["pending_approvals"][0].is_object()
        })
        .await;
    let pending = asks.json()["pending_approvals"][0].clone();
    b.open();
    waits_for(&app, &run, "approval").await;
    // Its permit is free.
    assert_eq!(app.run("other", "go").await.output(), "other");
    let child = pending["run_id"].as_str().expect("a run");
    let call = pending["tool_call_id"].as_str().expect("a call");
    let path = format!("/runs/{child}/approvals/{call}");
    let decided = app.post(&path, &json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    assert_eq!(run.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn limits_hold_for_children_in_the_background() {
    let app = planner("max_concurrent = 1\nparallel = false", "")
        .config("[runs]\nmax_tree = 2")
        .agent(
            "wide",
            "sub_agents = [\"b\"]\n[sub_agents_config]\nbackground = true",
        )
        .spawn()
        .await;
    let a = app.provider.always_later("a", "text of a");
    app.provider.always("b", |_| says("text of b"));
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a", "b"]),
        _ => says("done"),
    });
    let run = app.start("planner", "go").await;
    // The second call waits for the end of the first child.
    waits_for(&app, &run, "agents").await;
    assert_eq!(run.reload().await["tree"]["runs"], 2);
    a.open();
    let ended = run.wait_for_end().await;
    assert_eq!(ended["tree"]["runs"], 2);
    let second = app.provider.wait_for_request("planner", 2).await;
    let refused = &second.tool_results()[1];
    assert!(refused.contains("has had 2 runs, the maximum"), "{refused}");

    app.provider.always("wide", |seen| match seen.turn() {
        1 => starts(&["b", "b"]),
        _ => says("done"),
    });
    let ended = app.run("wide", "go").await;
    assert_eq!(ended["tree"]["runs"], 2);
}

#[tokio::test]
async fn an_ad_hoc_sub_agent_works_in_the_background() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "[subagent]\nenabled = true\noutput_max_size = 1024\n[sub_agents_config]\nbackground = true",
        )
        .spawn()
        .await;
    let gate = Gate::closed();
    let child_gate = gate.clone();
    app.provider.always("solo", move |seen| {
        match (seen.user_messages()[0].as_str(), seen.turn()) {
            ("look it up", _) => says("x".repeat(3000)).after_gate(&child_gate),
            (_, 1) => calls([(
                "subagent",
                json!({"label": "look up", "task_prompt": "look it up", "background": true}),
            )]),
            (_, turn) => says(format!("turn {turn}")),
        }
    });
    let run = app.start("solo", "go").await;
    waits_for(&app, &run, "agents").await;
    gate.open();
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "turn 3");
    let messages = ended.messages().await.to_string();
    assert!(
        messages.contains("Background agent look up (run_"),
        "{messages}"
    );
    assert!(messages.contains("x... (truncated)"), "{messages}");
}

#[tokio::test]
async fn a_fork_needs_the_ends() {
    let app = planner("", "").spawn().await;
    let a = app.provider.always_later("a", "text of a");
    let b = app.provider.always_later("b", "text of b");
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a", "b"]),
        2 => awaits(json!({"any": false})),
        3 => starts(&["c"]),
        turn => says(format!("turn {turn}")),
    });
    let c = app.provider.always_later("c", "text of c");
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("planner", 2).await;
    a.open();
    b.open();
    app.provider.wait_for_request("planner", 4).await;
    c.open();
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "turn 5");
    let fork = async |turn: u32| {
        let body = json!({"at": {"turn": turn}});
        let path = format!("/runs/{}/fork?wait=180", run.id());
        app.post(&path, &body).await
    };
    for turn in [2, 4] {
        let refused = fork(turn).await;
        assert_eq!(refused.status, 422, "{}", refused.text);
        assert_eq!(refused.json()["errors"][0]["pointer"], "/at/turn");
    }
    for turn in [1, 3, 5] {
        let forked = fork(turn).await;
        assert_eq!(forked.status, 200, "{turn} {}", forked.text);
        let text = forked.json()["content"].to_string();
        // The child may end before or after the next request.
        assert!(text.starts_with("\"turn "), "{turn} {text}");
    }
}

#[tokio::test]
async fn a_kill_loses_and_repeats_nothing() {
    let mut app = planner("", "").spawn().await;
    let [a, second, third] = [Gate::closed(), Gate::closed(), Gate::closed()];
    let (of_a, of_second, of_third) = (a.clone(), second.clone(), third.clone());
    app.provider
        .always("a", move |_| says("text of a").after_gate(&of_a));
    app.provider.always("b", |_| says("text of b"));
    app.provider
        .always("planner", move |seen| match seen.turn() {
            1 => starts(&["a"]),
            2 => delegates([("b", "be quick")]).after_gate(&of_second),
            3 => says("for now").after_gate(&of_third),
            turn => says(format!("turn {turn}")),
        });
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("planner", 2).await;
    app.provider.wait_for_request("a", 1).await;
    // The child works.
    app.crash_and_restart().await;
    app.provider.wait_for_request("a", 2).await;
    let child = app.find(&id).await.children().await[0].id().to_owned();
    a.open();
    has_ended(&app, &child).await;
    // It has ended, and its parent does not know.
    app.crash_and_restart().await;
    second.open();
    eventually("the end in a request", async || {
        let seen = app.provider.requests_for("planner");
        seen.iter().any(|it| !ends(it).is_empty()).then_some(())
    })
    .await;
    // It is delivered, and the request has no reply.
    app.crash_and_restart().await;
    third.open();
    let ended = app.find(&id).await.wait_for_end().await;
    assert_eq!(ended.output(), "for now");
    let seen = app.provider.requests_for("planner");
    let delivered = ends(seen.last().expect("a request"));
    assert_eq!(delivered, [end("a", &child, "text of a")]);
    let events = ended.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "message.added"), 1);
    assert_eq!(count(&events, "agent.returned"), 2);
    assert_eq!(ended["tree"]["runs"], 3);
}

#[tokio::test]
async fn waits_survive_kills() {
    let mut app = planner("", "").spawn().await;
    let (a, b) = (Gate::closed(), Gate::closed());
    let gates = (a.clone(), b.clone());
    app.provider
        .always("a", move |_| says("text of a").after_gate(&gates.0));
    app.provider
        .always("b", move |_| says("text of b").after_gate(&gates.1));
    app.provider.always("planner", |seen| match seen.turn() {
        1 => starts(&["a", "b"]),
        2 => awaits(json!({"any": true})),
        turn => says(format!("turn {turn}")),
    });
    let id = app.start("planner", "go").await.id().to_owned();
    waits_for(&app, &app.find(&id).await, "agents").await;
    for child in ["a", "b"] {
        app.provider.wait_for_request(child, 1).await;
    }
    app.crash_and_restart().await;
    for child in ["a", "b"] {
        app.provider.wait_for_request(child, 2).await;
    }
    assert_eq!(app.find(&id).await["waiting_for"], "agents");
    b.open();
    app.provider.wait_for_request("planner", 3).await;
    waits_for(&app, &app.find(&id).await, "agents").await;
    app.crash_and_restart().await;
    app.provider.wait_for_request("a", 3).await;
    a.open();
    let ended = app.find(&id).await.wait_for_end().await;
    assert_eq!(ended.output(), "turn 4");
    let messages = ended.messages().await.to_string();
    for text in ["text of a", "text of b"] {
        assert_eq!(messages.matches(text).count(), 1, "{messages}");
    }
    assert_eq!(app.provider.requests_for("planner").len(), 4);
}

/// Starts a thousand children, 50 in a turn.
fn crowd(seen: &RecordedRequest) -> Option<ScriptedAnswer> {
    (seen.turn() <= 20).then(|| starts(&["a"; 50]))
}

#[tokio::test]
async fn a_thousand_children_work_in_the_background() {
    let app = planner("", "")
        .config("[runs]\nmax_tree = 2000")
        .spawn()
        .await;
    app.provider.always("a", |_| says("read"));
    app.provider.always("planner", |seen| {
        crowd(seen).unwrap_or_else(|| match seen.turn() {
            21 => awaits(json!({})),
            _ => says("done"),
        })
    });
    let start = Instant::now();
    let run = app.run("planner", "go").await;
    let took = start.elapsed();
    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["runs"], 1001);
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "agent.returned"), 1000);
    let messages = run.messages().await.to_string();
    assert_eq!(messages.matches("read").count(), 1000, "each once");
    eprintln!("1,000 children in the background: {took:?}");
}

#[tokio::test]
async fn a_cancel_ends_a_thousand_children() {
    let app = planner("", "")
        .config("[runs]\nmax_tree = 2000")
        .spawn()
        .await;
    app.provider.always("a", |_| hangs());
    app.provider.always("planner", |seen| {
        crowd(seen).unwrap_or_else(|| says("done"))
    });
    let run = app.start("planner", "go").await;
    waits_for(&app, &run, "agents").await;
    assert_eq!(run.reload().await["tree"]["runs"], 1001);
    let start = Instant::now();
    let cancelled = run.cancel("enough").await;
    eprintln!("cancelled after {:?}", start.elapsed());
    assert_eq!(cancelled.status(), "cancelled");
    let database = app.database();
    let others = "SELECT count(*) FROM runs WHERE status <> 'cancelled'";
    assert_eq!(database.number(others), Some(0));
    assert_eq!(database.count("runs"), 1001);
}
