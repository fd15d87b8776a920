//! The OpenAPI document: that it is one, that it has every route and no other, and that real answers are as it says.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, says};
use crate::support::within_timeout;

/// The OpenAPI Initiative's own schema of 3.1 (<https://spec.openapis.org/oas/3.1/schema/2022-10-07>, Apache-2.0).
const OPENAPI: &str = include_str!("../../openapi-3.1-schema.json");
/// An id that no run has.
const NO_RUN: &str = "run_00000000-0000-7000-8000-000000000000";

/// The document of a daemon.
struct Document(Value);

impl Document {
    async fn of(app: &TestApp) -> Self {
        let got = app.get("/openapi.json").await;
        assert_eq!(got.status, 200, "{}", got.text);
        assert_eq!(got.header("content-type"), "application/json");
        Self(got.json())
    }

    /// Path, method and what is said of it.
    fn operations(&self) -> Vec<(&str, &str, &Value)> {
        let paths = self.0["paths"].as_object().expect("paths");
        paths
            .iter()
            .flat_map(|(path, item)| {
                let item = item.as_object().expect("operations");
                item.iter()
                    .map(move |(method, reported)| (path.as_str(), method.as_str(), reported))
            })
            .collect()
    }

    /// Holds an answer against its schema; what the schema does not know is a fault, too.
    fn holds(&self, method: &str, path: &str, got: &ApiResponse) {
        let answers = &self.0["paths"][path][method]["responses"];
        let mut answer = &answers[got.status.to_string()];
        if answer.is_null() {
            answer = &answers["default"];
        }
        if answer["$ref"] == "#/components/responses/Problem" {
            answer = &self.0["components"]["responses"]["Problem"];
        }
        let kind = got.header("content-type");
        let schema = &answer["content"][kind]["schema"];
        assert!(
            schema.is_object(),
            "{method} {path}: nothing is said of {} in {kind}: {answer}",
            got.status
        );
        let mut schema = closed(schema.clone());
        let mut components = self.0["components"].clone();
        for component in components["schemas"]
            .as_object_mut()
            .expect("schemas")
            .values_mut()
        {
            *component = closed(component.take());
        }
        schema["components"] = components;
        let validator = jsonschema::options().build(&schema).expect("a schema");
        let value = got.json();
        let errors: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{method} {path}: {errors:#?}\n{value:#}");
    }
}

/// The schema of an object without fields that it does not know.
fn closed(mut schema: Value) -> Value {
    if schema["properties"].is_object() {
        schema["unevaluatedProperties"] = false.into();
    }
    schema
}

/// A path with something in its places that does not exist.
fn filled(path: &str) -> String {
    path.replace("{id}", NO_RUN).replace(['{', '}'], "")
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
    let document = Document::of(&app).await;
    let schema: Value = serde_json::from_str(OPENAPI).expect("JSON");
    let errors: Vec<String> = jsonschema::options()
        .build(&schema)
        .expect("a schema")
        .iter_errors(&document.0)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    assert_eq!(document.0["servers"], json!([{"url": "/axed"}]));
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
    let document = Document::of(&app).await;
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
            document.holds(method, path, &got);
        }
        let parameters = reported["parameters"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        for parameter in parameters.iter().filter(|it| it["in"] == "query") {
            let name = parameter["name"].as_str().expect("a name");
            let name = name.replace("label.", "label.team");
            let got = ask(&app, method, &format!("{}?{name}=%00", filled(path))).await;
            assert_ne!(code(&got), "unknown_parameter", "{method} {path}: {name}");
        }
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
    let document = Document::of(&app).await;
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
            None => assert_eq!(got.status, 200, "{path}"),
            Some(scope) => {
                assert_eq!(got.status, 401, "{method} {path}");
                document.holds(method, path, &got);
                let refused = with.status == 403;
                assert_eq!(refused, scope != "metrics", "{method} {path}");
                assert!(!refused || with.problem(403).contains(&format!("scope {scope} ")));
            }
        }
    }
}

#[tokio::test]
async fn answers_are_as_the_document_says() {
    let gate = Gate::closed();
    let app = TestApp::setup()
        .environment("HOOK_SECRET", "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"")
        .agent(
            "planner",
            "description = \"plans\"\nsub_agents = [\"reader\"]\nworkdir = \"work\"\n\
             tools = [\"read_file\", \"write_file\"]\n\
             approve = [\"write_file\"]\n[params]\ntemperature = 0.5\nstop = [\"END\"]\n[params.response_format]\n\
             type = \"json_object\"\n[memory]\nenabled = true\n[webhook]\nurl = \"http://127.0.0.1:9/hook\"\n\
             [subagent]\nenabled = true\n[[mcp_servers]]\nname = \"none\"\n\
             transport = \"stdio\"\ncommand = \"/nowhere/at-all\"",
        )
        .agent("reader", "")
        .agent("failing", "[retry]\nmax_retries = 1\ninitial_delay_ms = 1")
        .agent("slow", "")
        .agent("broken", "max_turns = \"many\"")
        .file("work/here.txt", "here")
        .spawn()
        .await;
    let document = Document::of(&app).await;
    let get = async |path: &str, of: &str| {
        let got = app.get(path).await;
        assert_eq!(got.status, 200, "{path}: {}", got.text);
        document.holds("get", of, &got);
        got.json()
    };

    app.provider.will(
        "planner",
        [
            delegates([("reader", "read")]),
            calls([("read_file", json!({"path": "here.txt"}))]),
            calls([("write_file", json!({"path": "a", "content": "b"}))]),
            says("{\"done\": true}"),
            says("nothing to trim"),
        ],
    );
    app.provider.will("reader", [says("read")]);
    app.provider.will("slow", [says("late").after_gate(&gate)]);
    app.provider
        .will("failing", [fails(500, "no"), fails(500, "no")]);

    let body = json!({"input": "go", "labels": {"team": "blue"}, "timeout": 60, "session": "ada"});
    let accepted = app.post("/agents/planner/runs", &body).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    let request = &document.0["components"]["schemas"]["RunRequest"];
    assert!(jsonschema::is_valid(request, &body));
    assert!(!jsonschema::is_valid(request, &json!({"inptu": "go"})));
    document.holds("post", "/agents/{name}/runs", &accepted);
    let id = accepted.json()["id"].as_str().expect("an id").to_owned();
    let path = format!("/runs/{id}");
    let waiting = app
        .get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    document.holds("get", "/runs/{id}", &waiting);
    let events = get(&format!("{path}/events"), "/runs/{id}/events").await;
    let events = events["data"].as_array().expect("events");
    let request = events.iter().find(|it| it["type"] == "approval.requested");
    let call = request.expect("a request")["tool_call_id"]
        .as_str()
        .expect("an id");
    let decision = json!({"decision": "approve", "reason": "so"});
    let decided = app
        .post(&format!("{path}/approvals/{call}"), &decision)
        .await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    document.holds("post", "/runs/{id}/approvals/{call}", &decided);

    let ended = get(&format!("{path}?wait=30"), "/runs/{id}").await;
    assert_eq!(ended["structured"], json!({"done": true}), "{ended:#}");
    for below in ["tree", "children", "messages", "events"] {
        let reported = get(&format!("{path}/{below}"), &format!("/runs/{{id}}/{below}")).await;
        assert!(reported.to_string().contains("read"), "{reported:#}");
    }
    let session = get("/sessions/ada", "/sessions/{name}").await;
    assert_eq!(session["run"], id.as_str());
    let deliveries = get(&format!("{path}/deliveries"), "/runs/{id}/deliveries").await;
    let delivery = deliveries["data"][0]["id"].as_str().expect("a delivery");
    let again = app
        .post(&format!("{path}/deliveries/{delivery}/resend"), &json!({}))
        .await;
    assert_eq!(again.status, 202, "{}", again.text);
    document.holds("post", "/runs/{id}/deliveries/{delivery}/resend", &again);

    let streamed = app.request(Method::GET, &format!("{path}/events"));
    let streamed = send(streamed.header("accept", "text/event-stream")).await;
    let reported = &document.0["paths"]["/runs/{id}/events"]["get"]["responses"]["200"]["content"];
    assert!(
        reported[streamed.header("content-type")].is_object(),
        "{reported}"
    );

    let failed = app.run("failing", "go").await;
    get(&format!("/runs/{}", failed.id()), "/runs/{id}").await;
    get(
        &format!("/runs/{}/events", failed.id()),
        "/runs/{id}/events",
    )
    .await;
    let slow = app.start("slow", "go").await;
    let cancelled = app
        .post(
            &format!("/runs/{}/cancel?wait=30", slow.id()),
            &json!({"reason": "so"}),
        )
        .await;
    document.holds("post", "/runs/{id}/cancel", &cancelled);
    assert_eq!(cancelled.json()["status"], "cancelled");
    get(&format!("/runs/{}/events", slow.id()), "/runs/{id}/events").await;
    let page = get("/runs?all=true&limit=2", "/runs").await;
    assert!(page["next_cursor"].is_string(), "{page:#}");

    let dry = app.post("/agents/planner/dry-run", &body).await;
    assert_eq!(dry.status, 200, "{}", dry.text);
    document.holds("post", "/agents/{name}/dry-run", &dry);
    let agents = get("/agents", "/agents").await;
    assert_eq!(agents["data"].as_array().expect("agents").len(), 5);
    for name in ["planner", "reader", "broken"] {
        get(&format!("/agents/{name}"), "/agents/{name}").await;
    }
    let memory = get("/agents/planner/memory", "/agents/{name}/memory").await;
    assert_eq!(memory["data"].as_array().expect("entries").len(), 1);
    let gc = app
        .post("/agents/planner/gc", &json!({"dry_run": true}))
        .await;
    assert_eq!(gc.status, 200, "{}", gc.text);
    document.holds("post", "/agents/{name}/gc", &gc);
    for path in ["/livez", "/readyz", "/version", "/openapi.json"] {
        get(path, path).await;
    }
    let refused = app
        .post("/agents/reader/runs", &json!({"inptu": "x"}))
        .await;
    refused.problem(422);
    document.holds("post", "/agents/{name}/runs", &refused);
}
