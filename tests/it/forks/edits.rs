//! What a fork changes of what it takes over.

use serde_json::{Value, json};

use crate::forks::root_runs::lists;
use crate::forks::{conversation, fork};
use crate::support::app::TestApp;
use crate::support::provider::answer::{calls, says};

async fn listed() -> (TestApp, String, String) {
    let app = TestApp::setup()
        .agent(
            "solo",
            "tools = [\"list_directory\"]\nsystem_prompt = \"Work.\"",
        )
        .spawn()
        .await;
    app.provider.will("solo", [lists("one"), says("two")]);
    let run = app.run("solo", "go").await;
    let messages = run.messages().await;
    let call = messages["data"][1]["tool_calls"][0]["id"].as_str();
    let call = call.expect("a call").to_owned();
    let id = run.id().to_owned();
    (app, id, call)
}

#[tokio::test]
async fn messages_results_and_the_system_prompt_are_replaced() {
    let (app, source, call) = listed().await;
    app.provider.will("solo", [says("three")]);
    let body = json!({"at": {"turn": 2}, "edit": {
        "message": "stay", "system": "Rest.", "tool_results": {&call: "an empty directory"},
    }});
    let forked = fork(&app, &source, &body).await;
    assert_eq!(forked.output(), "three");
    assert_eq!(forked["input"], "stay");
    let request = app.provider.requests().pop().expect("a request");
    assert_eq!(request.system(), "Rest.");
    assert_eq!(request.user_messages(), ["stay"]);
    assert_eq!(request.tool_results(), ["an empty directory"]);
    let expected = ["stay", "one", "\"an empty directory\"", "three"];
    assert_eq!(conversation(&forked).await, expected);
    let edited = forked.events().await[1]["edited"].clone();
    assert_eq!(edited, json!(["message", "tool_results", "system"]));
}

#[tokio::test]
async fn the_model_and_its_parameters_are_replaced() {
    let (app, source, _) = listed().await;
    app.provider.will("other", [says("three")]);
    let body = json!({"at": {"turn": 2}, "edit": {
        "model": "openai/other", "params": {"temperature": 0.5}, "max_turns": 2,
    }});
    let forked = fork(&app, &source, &body).await;
    assert_eq!(forked.output(), "three");
    assert_eq!(forked["model"], "other");
    let request = app.provider.requests_for("other").remove(0);
    assert_eq!(request.body["temperature"], 0.5);
    assert_eq!(request.tool_results().len(), 1);
}

#[tokio::test]
async fn a_replaced_reply_has_its_own_calls_executed() {
    let (app, source, _) = listed().await;
    app.write("agents/wanted.txt", "wanted");
    app.provider.will("solo", [says("three")]);
    let call = json!({"id": "mine", "name": "list_directory", "arguments": {"path": "agents"}});
    let reply = json!({"content": "other", "tool_calls": [call]});
    let at = json!({"turn": 1, "after": "reply"});
    let forked = fork(&app, &source, &json!({"at": at, "edit": {"reply": reply}})).await;
    assert_eq!(forked.output(), "three");
    let request = app.provider.requests().pop().expect("a request");
    assert_eq!(request.tool_results().len(), 1);

    // A given result is not computed.
    app.provider.will("solo", [says("four")]);
    let edit = json!({"reply": reply, "tool_results": {"mine": "given"}});
    let forked = fork(&app, &source, &json!({"at": at, "edit": edit})).await;
    assert_eq!(forked["tool_calls"], 0);
    let request = app.provider.requests().pop().expect("a request");
    assert_eq!(request.tool_results(), ["given"]);

    // A text ends the run without a request.
    let edit = json!({"reply": {"content": "the end"}});
    let forked = fork(&app, &source, &json!({"at": at, "edit": edit})).await;
    assert_eq!(forked.output(), "the end");
    assert_eq!(forked["tree"]["model_calls"], 0);
}

#[tokio::test]
async fn thinking_is_not_sent_after_a_change_before_it() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "tools = [\"list_directory\"]\nmodel = \"anthropic/solo\"",
        )
        .spawn()
        .await;
    let thinks = |text: &str| lists(text).with_thought("hm");
    app.provider
        .will("solo", [thinks("one"), thinks("two"), says("three")]);
    let source = app.run("solo", "go").await.id().to_owned();
    let has_thinking = |request: &Value| request.to_string().contains("\"thinking\"");
    app.provider.will("solo", [says("a"), says("b")]);
    for (edit, expected) in [(json!({}), true), (json!({"message": "stay"}), false)] {
        fork(&app, &source, &json!({"at": {"turn": 3}, "edit": edit})).await;
        let request = app.provider.requests().pop().expect("a request");
        assert_eq!(has_thinking(&request.body["messages"]), expected);
    }
}

#[tokio::test]
async fn a_run_that_was_out_of_turns_continues_with_more_of_them() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "tools = [\"list_directory\"]\n[limits]\nmax_turns = 1",
        )
        .spawn()
        .await;
    let more = calls([("list_directory", json!({"path": "."}))]);
    app.provider.will("solo", [more, says("done")]);
    let source = app.run("solo", "go").await;
    assert_eq!(source.failure().0, "max_turns");
    let path = format!("/runs/{}/fork", source.id());
    let problem = app.post(&path, &json!({})).await.json();
    assert_eq!(problem["errors"][0]["pointer"], "/edit/max_turns");
    let forked = fork(&app, source.id(), &json!({"edit": {"max_turns": 2}})).await;
    assert_eq!(forked.output(), "done");
    assert_eq!(
        (&forked["turns"], &forked["tool_calls"]),
        (&json!(2), &json!(1))
    );
}
