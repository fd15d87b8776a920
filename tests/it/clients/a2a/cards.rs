//! Agent cards, and the version that a client speaks.

use reqwest::Method;
use serde_json::json;

use crate::clients::a2a::{error, get, message, post};
use crate::support::app::{TestApp, send};

#[tokio::test]
async fn a_card_says_how_to_reach_an_agent_and_what_it_does() {
    let app = TestApp::setup()
        .agent("planner", "description = \"Plans a journey.\"")
        .agent("form", "[input_schema]\ntype = \"object\"")
        .agent("broken", "max_turns = \"many\"")
        .prefix("/gw")
        .spawn()
        .await;
    let got = app.get("/a2a/planner/.well-known/agent-card.json").await;
    let mut card = got.json();
    let url = card["supportedInterfaces"][0]["url"].take();
    let url = url.as_str().expect("a URL").to_owned();
    assert!(
        url.starts_with("http://127.0.0.1:") && url.ends_with("/gw/a2a/planner"),
        "{url}"
    );
    assert_eq!(card["supportedInterfaces"][1]["url"].take(), url);
    card["version"].take();
    insta::assert_json_snapshot!(card);
    // A client that has it is not sent it again.
    let request = app.request(Method::GET, "/a2a/planner/.well-known/agent-card.json");
    let again = send(request.header("if-none-match", got.header("etag"))).await;
    assert_eq!(again.status, 304);
    let extended = get(&app, "planner/extendedAgentCard").await;
    assert_eq!(extended.json(), got.json());

    let all = app.get("/.well-known/agent-card.json").await.json();
    let names = all["skills"].as_array().expect("skills").iter();
    let names: Vec<_> = names.map(|skill| &skill["name"]).collect();
    assert_eq!(names, ["form", "planner"]);
    let urls = all["supportedInterfaces"].as_array().expect("interfaces");
    assert!(urls.iter().any(|it| it["url"] == url), "{all:#}");
    assert_eq!(all["skills"][0]["inputModes"], json!(["application/json"]));

    let got = get(&app, "nobody/.well-known/agent-card.json").await;
    assert_eq!(
        error(&got),
        (404, "AGENT_NOT_FOUND".into(), "agent_not_found".into())
    );
}

#[tokio::test]
async fn clients_of_another_version_are_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    for version in [None, Some("0.3"), Some("2.0")] {
        let mut request = app.request(Method::POST, "/a2a/solo/message:send");
        if let Some(version) = version {
            request = request.header("a2a-version", version);
        }
        let got = send(request.json(&message("m1", "go"))).await;
        let expected = (
            400,
            "VERSION_NOT_SUPPORTED".into(),
            "unsupported_version".into(),
        );
        assert_eq!(error(&got), expected, "{version:?}");
    }
    app.provider
        .will("solo", [crate::support::provider::answer::says("done")]);
    let request = app.request(Method::POST, "/a2a/solo/message:send?A2A-Version=1.0");
    let got = send(request.json(&message("m1", "go"))).await;
    assert_eq!(got.status, 200, "{}", got.text);
}

#[tokio::test]
async fn the_configuration_turns_it_off() {
    let app = TestApp::setup()
        .agent("solo", "")
        .config("[clients]\na2a = false")
        .spawn()
        .await;
    assert_eq!(
        post(&app, "solo/message:send", &message("m1", "go"))
            .await
            .status,
        404
    );
    assert_eq!(app.get("/.well-known/agent-card.json").await.status, 404);
}
