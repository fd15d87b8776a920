//! Forks that are refused, and what the answer names.

use reqwest::Method;
use serde_json::{Value, json};

use crate::forks::root_runs::lists;
use crate::support::app::{ApiResponse, TestApp, key, send};
use crate::support::provider::answer::{calls, delegates, says};
use crate::support::within_timeout;

async fn refuse(app: &TestApp, source: &str, body: &Value) -> Value {
    let response = app.post(&format!("/runs/{source}/fork"), body).await;
    assert!(response.status >= 400, "{}", response.text);
    response.json()
}

#[tokio::test]
async fn an_error_points_to_the_field() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]")
        .agent("costly", "[budget]\nmax_cost_usd = 1")
        .config("[prices.\"anthropic/costly\"]\ninput = 1\noutput = 1")
        .spawn()
        .await;
    app.provider.will("solo", [lists("one"), says("two")]);
    app.provider.will("costly", [says("one")]);
    let source = app.run("solo", "go").await.id().to_owned();
    let costly = app.run("costly", "go").await.id().to_owned();
    let elsewhere = json!({"at": {"run": costly}});
    for (body, pointer) in [
        (json!({"at": {"turn": 3}}), "/at/turn"),
        (json!({"at": {"turn": 3, "after": "reply"}}), "/at/turn"),
        (json!({"at": {"turn": 0, "after": "reply"}}), "/at/turn"),
        (json!({"at": {"after": "reply"}}), "/at/turn"),
        (json!({"at": {"turn": -1}}), "/at/turn"),
        (json!({"at": {"after": "call"}}), "/at/after"),
        (json!({"at": {"run": "x"}}), "/at/run"),
        (elsewhere, "/at/run"),
        (
            json!({"edit": {"tool_results": {"a/b": "x"}}}),
            "/edit/tool_results/a~1b",
        ),
        (json!({"edit": {"model": "x"}}), "/edit/model"),
        (json!({"edit": {"max_turns": 51}}), "/edit/max_turns"),
        (json!({"edit": {"message": " "}}), "/edit/message"),
        (
            json!({"edit": {"params": {"top_p": 2}}}),
            "/edit/params/top_p",
        ),
        (json!({"edit": {"reply": {"content": "x"}}}), "/edit/reply"),
        (json!({"edit": {"reply": {}}}), "/edit/reply"),
        (json!({"edit": {"prompt": "x"}}), "/edit/prompt"),
        (json!({"definition": "old"}), "/definition"),
        (json!({"timeout": 1_000_000_000}), "/timeout"),
        (json!({"session": "a/b"}), "/session"),
        (json!({"labels": {"": "x"}}), "/labels"),
        (json!({"webhook": {}}), "/webhook/url"),
        (json!({"input": "go"}), "/input"),
    ] {
        let problem = refuse(&app, &source, &body).await;
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{body} {problem}");
        assert_eq!(problem["status"], 422, "{problem}");
    }
    let body = json!({"at": {"turn": 1}, "edit": {"model": "anthropic/unpriced"}});
    let problem = refuse(&app, &costly, &body).await;
    assert_eq!(problem["errors"][0]["pointer"], "/edit/model");
    assert_eq!(problem["code"], "unpriced_model");
    let body = json!({"edit": {"model": "x"}});
    let problem = refuse(&app, &source, &body).await;
    assert_eq!(problem["code"], "invalid_model");
    assert_eq!(
        app.get("/runs").await.json()["data"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
}

/// A key's section; the key itself is its name.
#[tokio::test]
async fn a_key_forks_its_own_runs_only_and_what_an_operator_wrote_is_for_admins() {
    let keys = key("ada", "scopes = [\"run\", \"read\"]")
        + &key("bob", "scopes = [\"run\", \"read\"]")
        + &key("eve", "scopes = [\"read\"]")
        + &key("root", "scopes = [\"admin\", \"run\", \"read\"]");
    let app = TestApp::setup()
        .config(&keys)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("ok"));
    let post = async |key: &str, path: &str, body: Value| -> ApiResponse {
        let request = app.request(Method::POST, path);
        send(request.bearer_auth(key).json(&body)).await
    };
    let run = post("ada", "/agents/solo/runs?wait=180", json!({"input": "go"})).await;
    let run = run.json();
    let path = format!("/runs/{}/fork?wait=180", run["id"].as_str().expect("an id"));
    let at = json!({"turn": 1});
    let plain = || json!({"at": at});
    let system = || json!({"at": at, "edit": {"system": "Obey."}});
    let reply =
        || json!({"at": {"turn": 1, "after": "reply"}, "edit": {"reply": {"content": "x"}}});
    for (key, body, status) in [
        ("ada", plain(), 200),
        ("ada", system(), 403),
        ("ada", reply(), 403),
        ("bob", plain(), 404),
        ("eve", plain(), 403),
        ("root", system(), 200),
        ("root", reply(), 200),
    ] {
        let response = post(key, &path, body).await;
        assert_eq!(response.status, status, "{key} {}", response.text);
    }
    let id = run["id"].as_str().expect("an id");
    for path in ["turns", "turns/1", "recording"] {
        for (key, status) in [("ada", 200), ("eve", 404), ("root", 200)] {
            let request = app.request(Method::GET, &format!("/runs/{id}/{path}"));
            let response = send(request.bearer_auth(key)).await;
            assert_eq!(response.status, status, "{key} {path} {}", response.text);
        }
    }
}

#[tokio::test]
async fn a_call_that_had_begun_and_is_not_safe_to_repeat_is_not_forked() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"run_command\"]\nworkdir = \"work\"")
        .file("work/x", "")
        .config("[tools]\nallow_commands = true")
        .spawn()
        .await;
    let sleeps = calls([(
        "run_command",
        json!({"command": "sleep 600", "timeout": 600}),
    )]);
    app.provider.will("solo", [sleeps, says("other")]);
    let source = app.start("solo", "go").await;
    let mut events = app.events(&source).await;
    events.until("tool.started").await;
    let problem = refuse(&app, source.id(), &json!({})).await;
    assert_eq!(
        (&problem["status"], &problem["code"]),
        (&json!(409), &json!("not_forkable"))
    );
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("run_command"), "{detail}");
    // Its result can be given, and an earlier turn can be requested anew.
    let forked = crate::forks::fork(&app, source.id(), &json!({"at": {"turn": 1}})).await;
    assert_eq!(forked.output(), "other");
    source.cancel("enough").await.wait_for_end().await;
}

#[tokio::test]
async fn a_deleted_run_cannot_be_forked() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one")]);
    let run = app.run("solo", "go").await;
    app.delete(&format!("/runs/{}", run.id())).await;
    assert_eq!(refuse(&app, run.id(), &json!({})).await["status"], 404);
}

#[tokio::test]
async fn a_used_up_budget_refuses_forks() {
    let app = TestApp::setup()
        .config("[budgets.all]\ntokens = 50\nper = \"month\"\nalert_at = []")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("one").with_usage(40, 20)]);
    let run = app.run("solo", "go").await;
    let path = format!("/runs/{}/fork", run.id());
    let response = app.post(&path, &json!({"at": {"turn": 1}})).await;
    response.problem(429);
    assert_eq!(response.json()["code"], "budget_exhausted");
    let wait: u64 = response.header("retry-after").parse().expect("seconds");
    assert!(wait > 0);
    assert_eq!(app.provider.requests().len(), 1);
}

async fn post_by(app: &TestApp, key: &str, path: &str, body: &Value) -> ApiResponse {
    let request = app.request(Method::POST, path);
    send(request.bearer_auth(key).json(body)).await
}

async fn get_by_root(app: &TestApp, path: &str) -> ApiResponse {
    send(app.request(Method::GET, path).bearer_auth("root")).await
}

/// Waits until the planner and the reader have this text in their files.
async fn until_reloaded(app: &TestApp, text: &str) {
    for agent in ["planner", "reader"] {
        let path = format!("/agents/{agent}");
        let is_reloaded = async || get_by_root(app, &path).await.text.contains(text);
        within_timeout("the reload", async {
            while !is_reloaded().await {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_fork_has_at_most_what_todays_file_allows() {
    let keys = key("ada", "scopes = [\"run\", \"read\"]") + &key("root", "scopes = [\"admin\"]");
    let app = TestApp::setup()
        .config(&keys)
        .agent(
            "planner",
            "tools = [\"list_directory\", \"write_file\"]\nsub_agents = [\"reader\"]\n[limits]\nmax_turns = 9",
        )
        .agent("reader", "tools = [\"list_directory\", \"write_file\"]")
        .spawn()
        .await;
    app.provider.always("planner", |_| says("ok"));
    let post = async |key: &str, path: &str, body: Value| post_by(&app, key, path, &body).await;
    let started = post(
        "ada",
        "/agents/planner/runs?wait=180",
        json!({"input": "go"}),
    )
    .await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    let path = format!("/runs/{id}/fork?wait=180");
    app.write_agent(
        "planner",
        "description = \"today\"\ntools = [\"list_directory\", \"read_file\"]\napprove = [\"list_directory\"]\n\
         sub_agents = [\"reader\"]\n[limits]\nmax_turns = 3",
    );
    app.write_agent(
        "reader",
        "description = \"today\"\ntools = [\"list_directory\"]",
    );
    until_reloaded(&app, "today").await;
    let at = json!({"turn": 1});
    let tools_of = |agent: &str| {
        let requests = app.provider.requests_for(agent);
        let mut names = requests.last().expect("a request").tool_names();
        names.sort();
        names
    };
    let forked = post("ada", &path, json!({"at": at})).await;
    assert_eq!(forked.status, 200, "{}", forked.text);
    assert_eq!(tools_of("planner"), ["call_agent", "list_directory"]);
    let forked = post("root", &path, json!({"at": at})).await;
    assert_eq!(forked.status, 200, "{}", forked.text);
    assert!(tools_of("planner").contains(&"write_file".to_owned()));
    for (key, status) in [("ada", 422), ("root", 200)] {
        let more = post(key, &path, json!({"at": at, "edit": {"max_turns": 4}})).await;
        assert_eq!(more.status, status, "{key} {}", more.text);
    }
    // What it calls is cut as well.
    app.write_agent(
        "planner",
        "description = \"later\"\nsub_agents = [\"reader\"]",
    );
    app.write_agent(
        "reader",
        "description = \"later\"\ntools = [\"list_directory\"]",
    );
    until_reloaded(&app, "later").await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [says("a book")]);
    let forked = post("ada", &path, json!({"at": at})).await;
    assert_eq!(forked.json()["content"], "done", "{}", forked.text);
    assert_eq!(tools_of("planner"), ["call_agent"]);
    assert_eq!(tools_of("reader"), ["list_directory"]);

    std::fs::remove_file(app.path("agents/planner.toml")).expect("a file");
    let is_gone = async || get_by_root(&app, "/agents/planner").await.status == 404;
    within_timeout("the reload", async {
        while !is_gone().await {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let refused = post("ada", &path, json!({"at": at})).await;
    assert_eq!(
        (refused.status, &refused.json()["code"]),
        (404, &json!("agent_not_found"))
    );
    let forked = post("root", &path, json!({"at": at})).await;
    assert_eq!(forked.status, 200, "{}", forked.text);
}

#[tokio::test]
async fn children_that_continue_have_at_most_what_todays_files_allow() {
    let keys = key("ada", "scopes = [\"run\", \"read\"]") + &key("root", "scopes = [\"admin\"]");
    let app = TestApp::setup()
        .config(&keys)
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "tools = [\"list_directory\", \"write_file\"]")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.always("planner", |_| says("done"));
    app.provider.always("reader", |_| says("a book"));
    let input = json!({"input": "go"});
    let started = post_by(&app, "ada", "/agents/planner/runs?wait=180", &input).await;
    let id = started.json()["id"].as_str().expect("an id").to_owned();
    let children = get_by_root(&app, &format!("/runs/{id}/children")).await;
    let child = children.json()["data"][0]["id"].clone();
    let path = format!("/runs/{id}/fork?wait=180");
    let at_child = json!({"at": {"run": child, "turn": 1}});

    app.write_agent(
        "planner",
        "description = \"today\"\nsub_agents = [\"reader\"]",
    );
    app.write_agent(
        "reader",
        "description = \"today\"\ntools = [\"list_directory\"]",
    );
    until_reloaded(&app, "today").await;
    for (key, can_write) in [("ada", false), ("root", true)] {
        let forked = post_by(&app, key, &path, &at_child).await;
        assert_eq!(forked.json()["content"], "done", "{key}: {}", forked.text);
        let requests = app.provider.requests_for("reader");
        let tools = requests.last().expect("a request").tool_names();
        assert!(
            tools.contains(&"list_directory".to_owned()),
            "{key}: {tools:?}"
        );
        assert_eq!(
            tools.contains(&"write_file".to_owned()),
            can_write,
            "{key}: {tools:?}"
        );
    }

    app.write_agent("planner", "description = \"later\"");
    app.write_agent("reader", "description = \"later\"");
    until_reloaded(&app, "later").await;
    let refused = post_by(&app, "ada", &path, &at_child).await;
    refused.problem(422);
    assert_eq!(refused.json()["errors"][0]["pointer"], "/definition");
}
