//! The OpenAPI document: that it is one, that it has every route and no other, and that real answers are as it says.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};

use crate::http::openapi_document::Document;
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, says};
use crate::support::within_timeout;

/// The OpenAPI Initiative's own schema of 3.1 (<https://spec.openapis.org/oas/3.1/schema/2022-10-07>, Apache-2.0).
const OPENAPI: &str = include_str!("../../openapi-3.1-schema.json");
/// An id that no run has.
const NO_RUN: &str = "run_00000000-0000-7000-8000-000000000000";

/// Load balancers, scrapers and senders of webhooks add parameters of their own.
const PATHS_WITH_ANY_QUERY: [&str; 4] =
    ["/livez", "/readyz", "/metrics", "/triggers/{agent}/{name}"];

/// A path with something in its places that does not exist.
fn filled(path: &str) -> String {
    let path = path.replace("{id}", NO_RUN).replace("{other}", NO_RUN);
    path.replace(['{', '}'], "")
}

fn code(got: &ApiResponse) -> String {
    let body: Value = serde_json::from_str(&got.text).unwrap_or_default();
    body["code"].as_str().unwrap_or_default().to_owned()
}

async fn ask(app: &TestApp, method: &str, path: &str) -> ApiResponse {
    let method: Method = method.to_uppercase().parse().expect("a method");
    send(app.request(method, path)).await
}

#[tokio::test]
async fn it_is_openapi_3_1_and_the_command_prints_the_same() {
    let app = TestApp::setup().prefix("/axed").spawn().await;
    let served = app.get("/openapi.json").await;
    let document = Document::fetch(&app).await;
    let schema: Value = serde_json::from_str(OPENAPI).expect("JSON");
    let errors: Vec<String> = jsonschema::options()
        .build(&schema)
        .expect("a schema")
        .iter_errors(&document.0)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    assert_eq!(document.0["servers"][0]["url"], "/axed");
    for (name, schema) in document.0["components"]["schemas"]
        .as_object()
        .expect("schemas")
    {
        // A number is put behind the name of a second type: it wants a name of its own.
        assert!(!name.ends_with(char::is_numeric), "{name}");
        let why = jsonschema::meta::validate(schema);
        assert!(why.is_ok(), "{name}: {why:?}");
    }
    refers_within(&document.0, &document.0);

    let mut command = axed_command(&app.path(""), &["openapi", "--config", "config/axed.toml"]);
    let printed = within_timeout("the command", command.output())
        .await
        .expect("an end");
    assert!(printed.status.success(), "{printed:?}");
    assert!(printed.stdout == served.text.as_bytes());
}

/// Every reference leads somewhere.
fn refers_within(document: &Value, value: &Value) {
    if let Some(to) = value["$ref"].as_str() {
        let pointer = to.strip_prefix('#').expect(to);
        assert!(document.pointer(pointer).is_some(), "{to}");
    }
    match value {
        Value::Object(fields) => fields.values().for_each(|it| refers_within(document, it)),
        Value::Array(items) => items.iter().for_each(|it| refers_within(document, it)),
        _ => {}
    }
}

#[tokio::test]
async fn every_route_is_told_as_it_answers_and_no_other() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let mut names = BTreeSet::new();
    let operations = document.operations();
    assert!(operations.len() > 20, "{operations:?}");
    for (path, method, reported) in &operations {
        let name = reported["operationId"].as_str().expect("a name");
        assert!(names.insert(name), "{name} is listed twice");
        let got = ask(&app, method, &filled(path)).await;
        assert_ne!(code(&got), "route_not_found", "{method} {path}");
        assert_ne!(got.status, 405, "{method} {path}");
        if got.status >= 400 {
            document.check(method, path, &got);
        }
        let parameters = reported["parameters"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        for parameter in parameters.iter().filter(|it| it["in"] == "query") {
            let name = parameter["name"].as_str().expect("a name");
            let name = name.replace("label.", "label.team");
            let name = name.replace("score.", "score.good");
            let got = ask(&app, method, &format!("{}?{name}=%00", filled(path))).await;
            assert_ne!(code(&got), "unknown_parameter", "{method} {path}: {name}");
        }
        let takes_any = PATHS_WITH_ANY_QUERY.contains(path);
        let got = ask(&app, method, &format!("{}?unheard_of=1", filled(path))).await;
        let is_refused = code(&got) == "unknown_parameter";
        assert_ne!(is_refused, takes_any, "{method} {path}: {}", got.text);
    }
    for (path, item) in document.0["paths"].as_object().expect("paths") {
        for method in ["get", "post", "put", "patch", "delete"] {
            if item[method].is_null() {
                assert_eq!(
                    ask(&app, method, &filled(path)).await.status,
                    405,
                    "{method} {path}"
                );
            }
        }
    }
}

#[tokio::test]
async fn the_document_is_open_and_names_the_scopes() {
    let sha256 = axed::config::key_hash::KeyHash::digest(b"a-key-for-metrics-only");
    let app = TestApp::setup()
        .config(&format!(
            "[auth.keys.scraper]\nsha256 = \"{sha256}\"\nscopes = [\"metrics\"]"
        ))
        .spawn()
        .await;
    let document = Document::fetch(&app).await;
    for (path, method, reported) in document.operations() {
        let got = ask(&app, method, &filled(path)).await;
        let with = app
            .request(
                method.to_uppercase().parse().expect("a method"),
                &filled(path),
            )
            .bearer_auth("a-key-for-metrics-only");
        let with = send(with).await;
        match reported["security"][0]["key"][0].as_str() {
            // Signatures, and signed links, take the place of keys.
            None if path.starts_with("/triggers/") || path.starts_with("/feedback/") => {
                assert_eq!(got.status, 404, "{path}");
            }
            None => assert_eq!(got.status, 200, "{path}"),
            Some(scope) => {
                assert_eq!(got.status, 401, "{method} {path}");
                document.check(method, path, &got);
                let refused = with.status == 403;
                assert_eq!(refused, scope != "metrics", "{method} {path}");
                assert!(!refused || with.problem(403).contains(&format!("scope {scope} ")));
            }
        }
    }
}

/// Requests a route, and checks its response against the document.
struct Checker {
    app: TestApp,
    document: Document,
}

impl Checker {
    async fn new(app: TestApp) -> Self {
        let document = Document::fetch(&app).await;
        Self { app, document }
    }

    /// `route` is the path in the document.
    async fn get(&self, path: &str, route: &str) -> Value {
        let response = self.app.get(path).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        self.document.check("get", route, &response);
        response.json()
    }

    async fn post(&self, path: &str, route: &str, body: &Value, status: u16) -> Value {
        let response = self.app.post(path, body).await;
        assert_eq!(response.status, status, "{path}: {}", response.text);
        self.document.check("post", route, &response);
        response.json()
    }
}

const PLANNER: &str = r#"
description = "plans"
sub_agents = ["reader"]
workdir = "work"
tools = ["read_file", "write_file"]
approve = ["write_file"]
[params]
temperature = 0.5
stop = ["END"]
[params.response_format]
type = "json_object"
[memory]
enabled = true
[webhook]
url = "http://127.0.0.1:9/hook"
[subagent]
enabled = true
[ask]
enabled = true
[[mcp_servers]]
name = "none"
transport = "stdio"
command = "/nowhere/at-all"
"#;

/// A planner that delegates, reads a file, waits for approval and an answer, and remembers its runs.
async fn planner_app() -> Checker {
    let app = TestApp::setup()
        .environment(
            "HOOK_SECRET",
            "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        )
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"")
        .agent("planner", PLANNER)
        .agent("reader", "")
        .agent("broken", "max_turns = \"many\"")
        .file("work/here.txt", "here")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "read")]),
            calls([("read_file", json!({"path": "here.txt"}))]),
            calls([("write_file", json!({"path": "a", "content": "b"}))]),
            calls([(
                "ask_person",
                json!({"question": "Which?", "schema": {"type": "integer"}, "options": ["1"]}),
            )]),
            says("{\"done\": true}"),
            says("nothing to trim"),
        ],
    );
    app.provider.will("reader", [says("read")]);
    Checker::new(app).await
}

fn planner_request() -> Value {
    json!({"input": "go", "labels": {"team": "blue"}, "timeout": 600, "session": "ada"})
}

/// Starts a run of the planner, approves its tool call once it waits, and answers its question.
async fn approved_run(checker: &Checker) -> String {
    let route = "/agents/{name}/runs";
    let accepted = checker
        .post("/agents/planner/runs", route, &planner_request(), 202)
        .await;
    let path = format!("/runs/{}", accepted["id"].as_str().expect("an id"));
    let is_waiting = |response: &ApiResponse| response.json()["status"] == "waiting";
    let waiting = checker.app.get_until(&path, is_waiting).await;
    checker.document.check("get", "/runs/{id}", &waiting);
    let approvals = checker.get("/approvals", "/approvals").await;
    let call = approvals["data"][0]["tool_call_id"]
        .as_str()
        .expect("a call");
    let decision = json!({"decision": "approve", "reason": "so"});
    let decide = "/runs/{id}/approvals/{tool_call_id}";
    checker
        .post(&format!("{path}/approvals/{call}"), decide, &decision, 202)
        .await;
    let asks = |response: &ApiResponse| response.json()["waiting_for"] == "input";
    let waiting = checker.app.get_until(&path, asks).await;
    checker.document.check("get", "/runs/{id}", &waiting);
    let questions = checker.get("/inputs", "/inputs").await;
    let question = questions["data"][0]["id"].as_str().expect("a question");
    let (route, body) = ("/runs/{id}/inputs/{input_id}", json!({"answer": 1}));
    checker
        .post(&format!("{path}/inputs/{question}"), route, &body, 202)
        .await;
    let ended = checker.get(&format!("{path}?wait=180"), "/runs/{id}").await;
    assert_eq!(ended["structured"], json!({"done": true}), "{ended:#}");
    path
}

#[tokio::test]
async fn responses_about_a_run_match_the_document() {
    let checker = planner_app().await;
    let path = approved_run(&checker).await;
    for below in ["tree", "children", "messages", "events"] {
        let route = format!("/runs/{{id}}/{below}");
        let found = checker.get(&format!("{path}/{below}"), &route).await;
        assert!(found.to_string().contains("read"), "{found:#}");
    }
    let session = checker.get("/sessions/ada", "/sessions/{name}").await;
    assert!(
        path.ends_with(session["run"].as_str().expect("a run")),
        "{session:#}"
    );
    let page = checker.get("/runs?all=true&limit=1", "/runs").await;
    assert!(page["next_cursor"].is_string(), "{page:#}");

    let deliveries = checker
        .get(&format!("{path}/deliveries"), "/runs/{id}/deliveries")
        .await;
    let delivery = deliveries["data"][0]["id"].as_str().expect("a delivery");
    let resend = format!("{path}/deliveries/{delivery}/resend");
    let route = "/runs/{id}/deliveries/{delivery}/resend";
    checker.post(&resend, route, &json!({}), 202).await;

    let memory = checker
        .get("/agents/planner/memory", "/agents/{name}/memory")
        .await;
    assert_eq!(memory["data"].as_array().map(Vec::len), Some(1));
    let route = "/agents/{name}/gc";
    checker
        .post("/agents/planner/gc", route, &json!({"dry_run": true}), 200)
        .await;
}

#[tokio::test]
async fn responses_about_agents_and_the_daemon_match_the_document() {
    let checker = planner_app().await;
    let agents = checker.get("/agents", "/agents").await;
    assert_eq!(agents["data"].as_array().map(Vec::len), Some(3));
    for name in ["planner", "reader", "broken"] {
        checker
            .get(&format!("/agents/{name}"), "/agents/{name}")
            .await;
    }
    let route = "/agents/{name}/dry-run";
    checker
        .post("/agents/planner/dry-run", route, &planner_request(), 200)
        .await;
    for path in ["/livez", "/readyz", "/version", "/openapi.json"] {
        checker.get(path, path).await;
    }
}

#[tokio::test]
async fn responses_about_failed_and_cancelled_runs_match_the_document() {
    let gate = Gate::closed();
    let app = TestApp::setup()
        .agent("failing", "[retry]\nmax_retries = 1\ninitial_delay_ms = 1")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.will("slow", [says("late").after_gate(&gate)]);
    app.provider
        .will("failing", [fails(500, "no"), fails(500, "no")]);
    let checker = Checker::new(app).await;

    let failed = checker.app.run("failing", "go").await;
    let slow = checker.app.start("slow", "go").await;
    let cancel = format!("/runs/{}/cancel?wait=180", slow.id());
    let route = "/runs/{id}/cancel";
    let cancelled = checker
        .post(&cancel, route, &json!({"reason": "so"}), 200)
        .await;
    assert_eq!(cancelled["status"], "cancelled");
    for id in [failed.id(), slow.id()] {
        checker.get(&format!("/runs/{id}"), "/runs/{id}").await;
        checker
            .get(&format!("/runs/{id}/events"), "/runs/{id}/events")
            .await;
    }
}

#[tokio::test]
async fn streams_and_repeated_requests_match_the_document() {
    let app = TestApp::setup().agent("reader", "").spawn().await;
    app.provider.will("reader", [says("read")]);
    let checker = Checker::new(app).await;
    let create = || {
        let request = checker
            .app
            .request(Method::POST, "/agents/reader/runs?wait=180");
        request
            .header("idempotency-key", "one")
            .json(&json!({"input": "go"}))
    };
    for _ in 0..2 {
        let response = send(create()).await;
        assert_eq!(response.status, 200, "{}", response.text);
        checker
            .document
            .check("post", "/agents/{name}/runs", &response);
    }
    let repeated = send(create()).await;
    assert_eq!(repeated.header("idempotency-replayed"), "true");

    let path = format!("{}/events", repeated.location());
    let stream = checker.app.request(Method::GET, &path);
    let stream = send(stream.header("accept", "text/event-stream")).await;
    let content =
        &checker.document.0["paths"]["/runs/{id}/events"]["get"]["responses"]["200"]["content"];
    assert!(
        content[stream.header("content-type")].is_object(),
        "{content}"
    );
}

#[tokio::test]
async fn refused_bodies_match_the_document() {
    let app = TestApp::setup().agent("reader", "").spawn().await;
    let checker = Checker::new(app).await;
    let request = &checker.document.0["components"]["schemas"]["RunRequest"];
    assert_eq!(
        checker.document.errors(request, &planner_request()),
        [""; 0]
    );
    let mistyped = json!({"inptu": "go"});
    assert!(!checker.document.errors(request, &mistyped).is_empty());
    let problem = checker
        .post("/agents/reader/runs", "/agents/{name}/runs", &mistyped, 422)
        .await;
    assert_eq!(problem["code"], "unknown_field");
}
