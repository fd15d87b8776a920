//! Forks of trees: at the root, and at runs below it.

use serde_json::{Value, json};

use crate::forks::{fork, start_fork};
use crate::support::app::TestApp;
use crate::support::events::{assert_complete, count, kinds};
use crate::support::provider::answer::{calls, delegates, hangs, says};
use crate::support::run::Run;
use crate::tools::approvals::{decide, find, requests};

/// A planner calls a reader and a writer at once; the writer has two turns.
async fn planned() -> (TestApp, String) {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\", \"writer\"]")
        .agent("reader", "")
        .agent("writer", "tools = [\"list_directory\"]")
        .spawn()
        .await;
    let both = delegates([("reader", "read"), ("writer", "write")]);
    app.provider.will("planner", [both, says("done")]);
    app.provider.will("reader", [says("a book")]);
    let lists = calls([("list_directory", json!({"path": "."}))]);
    app.provider.will("writer", [lists, says("a page")]);
    let id = app.run("planner", "go").await.id().to_owned();
    (app, id)
}

async fn child<'a>(run: &Run<'a>, agent: &str) -> Run<'a> {
    let children = run.children().await;
    let found = children.into_iter().find(|child| child["agent"] == agent);
    found.expect("a child")
}

#[tokio::test]
async fn finished_children_are_reused() {
    let (app, source) = planned().await;
    app.provider.will("planner", [says("another end")]);
    let forked = fork(&app, &source, &json!({"at": {"turn": 2}})).await;
    assert_eq!(forked.output(), "another end");
    assert_eq!(forked["tree"]["runs"], 1);
    assert_eq!(forked["tree"]["reused"], json!({"runs": 2, "turns": 4}));
    assert_eq!(forked.children().await.len(), 0);
    let planner = app.provider.requests_for("planner");
    assert_eq!(planner[2].body, planner[1].body);
    assert_eq!(app.provider.requests_for("reader").len(), 1);

    let reused = forked.tree().await["reused"].clone();
    let reader = child(&app.find(&source).await, "reader").await;
    assert_eq!(reused[0]["id"], reader.id());
    assert_eq!(reused[0]["agent"], "reader");
    // A fork of the fork reuses them too.
    app.provider.will("planner", [says("a third end")]);
    let again = fork(&app, forked.id(), &json!({"at": {"turn": 2}})).await;
    assert_eq!(again["tree"]["reused"]["runs"], 2);
    assert_eq!(again["forked_from"]["run"], forked.id());
}

#[tokio::test]
async fn a_child_is_forked_with_the_runs_above_it() {
    let (app, source) = planned().await;
    let writer = child(&app.find(&source).await, "writer").await;
    let (writer, call) = (writer.id().to_owned(), writer["tool_call_id"].clone());
    app.provider.will("writer", [says("a chapter")]);
    app.provider.will("planner", [says("longer")]);
    let body = json!({"at": {"run": writer, "turn": 2}, "edit": {"message": "write more"}});
    let forked = fork(&app, &source, &body).await;

    assert_eq!(forked.output(), "longer");
    assert_eq!(app.provider.requests_for("reader").len(), 1, "reused");
    let request = app.provider.wait_for_request("writer", 3).await;
    assert_eq!(request.user_messages(), ["write more"]);
    assert_eq!(request.tool_results().len(), 1);
    let request = app.provider.wait_for_request("planner", 3).await;
    assert_eq!(request.tool_results(), ["a book", "a chapter"]);

    let from = json!({"run": source, "at_run": writer, "turn": 2});
    assert_eq!(forked["forked_from"], from);
    assert_eq!(forked["tree"]["runs"], 2);
    assert_eq!(forked["tree"]["reused"], json!({"runs": 1, "turns": 3}));
    assert_eq!(forked["tree"]["model_calls"], 2);
    let copy = child(&forked, "writer").await;
    assert_ne!(copy.id(), writer);
    assert_eq!((&copy["tool_call_id"], &copy["turns"]), (&call, &json!(2)));
    assert_eq!(copy["input"], "write more");

    let events = forked.events().await;
    assert_complete(&events);
    let expected = [
        "run.queued",
        "run.forked",
        "tool.started",
        "agent.called",
        "run.queued",
        "run.started",
        "run.started",
        "turn.started",
        "turn.completed",
        "run.completed",
        "agent.returned",
        "tool.completed",
        "turn.started",
        "turn.completed",
        "run.completed",
    ];
    assert_eq!(kinds(&events), expected);
}

#[tokio::test]
async fn children_that_had_not_ended_continue_in_the_fork() {
    for is_killed in [false, true] {
        let mut app = TestApp::setup()
            .agent("planner", "sub_agents = [\"reader\", \"writer\"]")
            .agent("reader", "")
            .agent("writer", "tools = [\"list_directory\"]")
            .spawn()
            .await;
        let both = delegates([("reader", "read"), ("writer", "write")]);
        app.provider.will("planner", [both]);
        app.provider.will("reader", [says("a book")]);
        let lists = calls([("list_directory", json!({"path": "."}))]);
        app.provider.will("writer", [lists, hangs()]);
        let source = app.start("planner", "go").await;
        let mut events = app.events(&source).await;
        events
            .until_matches(|events| {
                count(events, "agent.returned") == 1 && count(events, "turn.started") == 4
            })
            .await;
        app.provider.wait_for_request("writer", 2).await;
        let source = source.id().to_owned();
        let forked = match is_killed {
            false => {
                app.provider.will("writer", [says("a page")]);
                app.provider.will("planner", [says("done")]);
                fork(&app, &source, &json!({})).await
            }
            true => {
                app.provider.will("writer", [hangs()]);
                let id = start_fork(&app, &source, &json!({})).await.id().to_owned();
                app.provider.wait_for_request("writer", 3).await;
                app.post(&format!("/runs/{source}/cancel?wait=180"), &json!({}))
                    .await;
                app.provider.will("writer", [says("a page")]);
                app.provider.will("planner", [says("done")]);
                app.crash_and_restart().await;
                app.find(&id).await.wait_for_end().await
            }
        };
        assert_eq!(forked.output(), "done");
        assert_eq!(forked["tree"]["runs"], 2);
        assert_eq!(app.provider.requests_for("reader").len(), 1, "reused");
        let writer = child(&forked, "writer").await;
        assert_eq!(
            (&writer["turns"], writer.status()),
            (&json!(2), "completed")
        );
        let requests = app.provider.requests_for("writer");
        assert!(requests[2..].iter().all(|it| it.body == requests[1].body));
        let planner = app.provider.requests_for("planner");
        let last = planner.last().expect("a request");
        assert_eq!(last.tool_results(), ["a book", "a page"]);
        assert_complete(&forked.events().await);
    }
}

#[tokio::test]
async fn an_approved_delegation_continues_and_calls_after_it_need_approval() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"writer\"]\napprove = [\"call_agent\"]",
        )
        .agent("writer", "")
        .spawn()
        .await;
    let once = || delegates([("writer", "write")]);
    app.provider.will("planner", [once(), says("done")]);
    app.provider.will("writer", [says("a page")]);
    let approve = async |id: &str| {
        let waits = format!("/approvals?root={id}");
        let page = app.get_until(&waits, |page| page.text.contains("tool_call_id"));
        let call = page.await.json()["data"][0]["tool_call_id"].clone();
        let path = format!("/runs/{id}/approvals/{}", call.as_str().expect("a call"));
        let decided = app.post(&path, &json!({"decision": "approve"})).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    };
    let source = app.start("planner", "go").await;
    approve(source.id()).await;
    let source = source.wait_for_end().await;

    let writer = child(&source, "writer").await.id().to_owned();
    app.provider
        .will("writer", [says("a chapter"), says("a book")]);
    app.provider.will("planner", [once(), says("longer")]);
    let body = json!({"at": {"run": writer, "turn": 1}});
    let forked = start_fork(&app, source.id(), &body).await;
    approve(forked.id()).await;
    let forked = forked.wait_for_end().await;
    assert_eq!(forked.output(), "longer");
    let events = forked.events().await;
    assert_eq!(
        count(&events, "approval.requested"),
        1,
        "only of the new call"
    );
    let request = app.provider.requests_for("planner").pop();
    let request = request.expect("a request");
    assert_eq!(request.tool_results(), ["a chapter", "a book"]);
}

#[tokio::test]
async fn a_delegation_continues_with_the_arguments_that_a_person_approved() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\", \"writer\"]\napprove = [\"call_agent\"]",
        )
        .agent("reader", "")
        .agent("writer", "")
        .spawn()
        .await;
    let both = delegates([("reader", "read"), ("reader", "add up")]);
    app.provider.will("planner", [both, says("done")]);
    app.provider.will("writer", [says("a page")]);
    app.provider.will("reader", [says("a sum")]);
    let source = app.start("planner", "go").await;
    let write = json!({"agent": "writer", "task": "write"});
    let count_up = json!({"agent": "reader", "task": "count"});
    for request in requests(&app, source.id(), 2).await {
        let arguments = match request["arguments"]["task"] == "read" {
            true => &write,
            false => &count_up,
        };
        let body = json!({"decision": "approve", "arguments": arguments});
        let decided = decide(&app, &request, body).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    }
    let source = source.wait_for_end().await;

    let writer = child(&source, "writer").await.id().to_owned();
    app.provider.will("writer", [says("a chapter")]);
    app.provider.will("planner", [says("longer")]);
    let body = json!({"at": {"run": writer, "turn": 1}});
    let forked = fork(&app, source.id(), &body).await;
    assert_eq!(forked.output(), "longer");
    let result = |arguments: &Value, text: &str| {
        format!("Note: a person changed the arguments of this call to {arguments}.\n{text}")
    };
    let request = app.provider.requests_for("planner").pop();
    let results = [result(&write, "a chapter"), result(&count_up, "a sum")];
    assert_eq!(request.expect("a request").tool_results(), results);
    let events = forked.events().await;
    assert_complete(&events);
    assert_eq!(find(&events, "tool.started")["arguments"], write);
}

#[tokio::test]
async fn only_what_the_fork_did_itself_counts_in_its_budget() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\n[budget]\nmax_runs = 2",
        )
        .agent("reader", "")
        .spawn()
        .await;
    let once = || delegates([("reader", "read")]);
    app.provider.will("planner", [once(), says("done")]);
    app.provider.always("reader", |_| says("a book"));
    let source = app.run("planner", "go").await.id().to_owned();
    app.provider.will("planner", [once(), says("twice")]);
    let forked = fork(&app, &source, &json!({"at": {"turn": 2}})).await;
    assert_eq!(forked.output(), "twice");
    assert_eq!(forked["tree"]["runs"], 2);
    assert_eq!(forked["tool_calls"], 1);
}

#[tokio::test]
async fn a_fork_that_is_cancelled_in_the_queue_cancels_its_children() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("solo", "")
        .config("[runs]\nmax_running = 1")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [says("a book")]);
    let source = app.run("planner", "go").await;
    let reader = child(&source, "reader").await.id().to_owned();
    app.provider.will("solo", [hangs()]);
    app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    let body = json!({"at": {"run": reader, "turn": 1}});
    let forked = start_fork(&app, source.id(), &body).await;
    assert_eq!(forked.status(), "queued");
    let forked = forked.cancel("enough").await.wait_for_end().await;
    assert_eq!(forked.status(), "cancelled");
    assert_eq!(child(&forked, "reader").await.status(), "cancelled");
    assert_eq!(app.provider.requests_for("reader").len(), 1);
}
