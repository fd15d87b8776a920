//! `[[http_tools]]` from outside, against a service of our own on this machine.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp};
use crate::support::http_server::serve;
use crate::support::provider::answer::{calls, says};
use crate::tools::call_results::call_results;

type Seen = Arc<Mutex<Vec<(Method, Uri, HeaderMap, Bytes)>>>;

struct Service {
    address: String,
    seen: Seen,
    _server: JoinSet<()>,
}

impl Service {
    async fn start() -> Self {
        let seen = Seen::default();
        let routes = Router::new()
            .fallback(respond)
            .with_state(Arc::clone(&seen));
        let (address, server) = serve(routes).await;
        let address = address.to_string();
        Self {
            address,
            seen,
            _server: server,
        }
    }

    /// The method, the address and the body of each request.
    fn requests(&self) -> Vec<String> {
        let seen = self.seen.lock().expect("a lock");
        let line = |(method, uri, _, body): &(Method, Uri, HeaderMap, Bytes)| {
            format!("{method} {uri} {}", String::from_utf8_lossy(body))
        };
        seen.iter().map(line).collect()
    }

    fn header(&self, at: usize, name: &str) -> String {
        let seen = self.seen.lock().expect("a lock");
        let value = seen[at].2.get(name).expect("a header");
        value.to_str().expect("text").to_owned()
    }

    fn setup(&self, tools: &str) -> Setup {
        let tools = tools.replace("HOST", &format!("http://{}", self.address));
        TestApp::setup()
            .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
            .environment("TICKETS_TOKEN", "token-of-tickets")
            .agent("worker", &tools)
    }
}

async fn respond(
    State(seen): State<Seen>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let token = headers.get("authorization").cloned();
    seen.lock()
        .expect("a lock")
        .push((method, uri.clone(), headers, body));
    match uri.path() {
        "/missing" => (StatusCode::NOT_FOUND, "no ticket ".repeat(1000)).into_response(),
        "/moved" => (StatusCode::FOUND, [("location", "/tickets")]).into_response(),
        "/nothing" => StatusCode::NO_CONTENT.into_response(),
        // A service that shows what it was sent.
        "/echo" => {
            let token = token.expect("a token");
            token.to_str().expect("text").to_owned().into_response()
        }
        _ => ([("content-type", "application/json")], r#"{"found": 1}"#).into_response(),
    }
}

const TOOLS: &str = r#"
[[http_tools]]
name = "find"
description = "Finds tickets"
url = "HOST/{project}/tickets?q={words}"
headers = { Authorization = "Bearer ${TICKETS_TOKEN}" }
[http_tools.parameters]
type = "object"
required = ["project"]
properties = { project = { type = "string" }, words = { type = "string" } }

[[http_tools]]
name = "comment"
description = "Adds a comment"
method = "POST"
url = "HOST/tickets/{id}"
parameters = { type = "object", properties = { id = { type = "integer" }, text = { type = "string" } } }

[[http_tools]]
name = "label"
description = "Sets a label"
method = "PUT"
url = "HOST/labels"
body = '{{"set": [{label}]}}'
parameters = { type = "object", properties = { label = { type = "string" } } }
"#;

#[tokio::test]
async fn calls_become_requests() {
    let service = Service::start().await;
    let app = service.setup(TOOLS).spawn().await;
    let results = call_results(
        &app,
        &[
            (
                "find",
                json!({ "project": "a/..b?x", "words": "it's & #1" }),
            ),
            ("comment", json!({ "id": 7, "text": "Done \"so\"." })),
            ("label", json!({ "label": "x\"}, 1" })),
            ("find", json!({ "project": ".." })),
            ("find", json!({ "words": "x" })),
            ("find", json!({ "project": "a/../b" })),
            ("find", json!({ "project": "%2e%2E%2fb" })),
        ],
    )
    .await;
    assert_eq!(results[..3], [r#"{"found": 1}"#; 3]);
    assert_eq!(
        service.requests(),
        [
            "GET /a%2F..b%3Fx/tickets?q=it%27s%20%26%20%231 ",
            r#"POST /tickets/7 {"text":"Done \"so\"."}"#,
            r#"PUT /labels {"set": ["x\"}, 1"]}"#,
        ]
    );
    assert_eq!(
        service.header(0, "authorization"),
        "Bearer token-of-tickets"
    );
    assert_eq!(service.header(1, "content-type"), "application/json");
    for refused in [3, 5, 6] {
        assert!(
            results[refused].starts_with("error: An argument makes"),
            "{results:?}"
        );
    }
    assert!(results[4].contains("do not fit its schema"), "{results:?}");
    let offered = app.provider.requests().remove(0).tool_names();
    assert_eq!(offered, ["find", "comment", "label"]);
}

#[tokio::test]
async fn failures_are_results_and_secrets_stay_here() {
    let service = Service::start().await;
    let tool = |name: &str, path: &str| {
        format!(
            "[[http_tools]]\nname = \"{name}\"\ndescription = \"x\"\nurl = \"{path}\"\n\
             headers = {{ Authorization = \"Bearer ${{TICKETS_TOKEN}}\", X-Literal = \"literal-secret\" }}\n"
        )
    };
    let unset = "[[http_tools]]\nname = \"unset\"\ndescription = \"x\"\nurl = \"HOST/a\"\nheaders = { X = \"${NOT_SET}\" }\n";
    let tools = [
        tool("missing", "HOST/missing"),
        tool("moved", "HOST/moved"),
        tool("nothing", "HOST/nothing"),
        tool("echo", "HOST/echo"),
        tool("internal", "https://10.0.0.1/x"),
        unset.to_owned(),
    ];
    let app = service.setup(&tools.concat()).spawn().await;
    let names = ["missing", "moved", "nothing", "echo", "internal", "unset"];
    let sent = names.map(|name| (name, json!({})));
    let results = call_results(&app, &sent).await;
    assert!(
        results[0].starts_with("error: missing answered 404 Not Found:\n\nno ticket no"),
        "{results:?}"
    );
    assert!(results[0].len() < 2200, "{}", results[0].len());
    assert_eq!(
        results[1],
        "error: moved answered 302 Found, a redirect, which is not followed"
    );
    assert_eq!(results[2], "(204 No Content, without content)");
    assert_eq!(results[3], "***");
    assert!(
        results[4].contains("not on the public internet"),
        "{results:?}"
    );
    assert_eq!(
        results[5],
        "error: unset cannot be called: its headers.X needs the variable NOT_SET, which the daemon's environment does not have"
    );
    assert_eq!(service.requests().len(), 4);
    let agent = app.get("/agents/worker").await;
    let warning = "tool unset: the environment variable NOT_SET is not set";
    assert!(agent.text.contains(warning), "{}", agent.text);
    for secret in ["token-of-tickets", "literal-secret", "X-Literal"] {
        assert!(!agent.text.contains(secret), "{}", agent.text);
        let runs = app.get("/runs").await.json();
        let id = runs["data"][0]["id"].as_str().expect("a run").to_owned();
        for path in ["messages", "events", "turns"] {
            let shown = app.get(&format!("/runs/{id}/{path}")).await.text;
            assert!(!shown.contains(secret), "{path}: {shown}");
        }
    }
}

#[tokio::test]
async fn a_call_waits_for_approval_like_other_tools() {
    let service = Service::start().await;
    let file = format!("approve = [\"comment\"]\napprove_timeout = 1\n{TOOLS}");
    let app = service.setup(&file).spawn().await;
    let call = calls([("comment", json!({ "id": 7, "text": "x" }))]);
    app.provider.will("worker", [call, says("done")]);
    let run = app.run("worker", "go").await;
    assert_eq!(run.output(), "done");
    let seen = app.provider.wait_for_request("worker", 2).await;
    assert_eq!(
        seen.tool_result_errors(),
        [true],
        "{:?}",
        seen.tool_results()
    );
    assert_eq!(service.requests(), Vec::<String>::new());
}

#[tokio::test]
async fn errors_in_the_file_have_a_place() {
    let base = [
        ("name", "\"t\""),
        ("description", "\"x\""),
        ("url", "\"https://example.com/\""),
    ];
    let cases = [
        (
            "url",
            "\"https://{host}/\"",
            "http_tools[0].url must begin with a scheme and a host",
        ),
        (
            "url",
            "\"https://example.com{x}\"",
            "must begin with a scheme and a host",
        ),
        ("url", "\"{x}\"", "must begin with a scheme and a host"),
        (
            "url",
            "\"https://example.com/{x}\"",
            "has {x}, but the schema has no property \"x\"",
        ),
        ("url", "\"ftp://example.com/\"", "http"),
        ("url", "\"https://me:pw@example.com/\"", "user"),
        ("name", "\"read_file\"", "is a built-in tool"),
        ("name", "\"a__b\"", "without __"),
        (
            "method",
            "\"BREW\"",
            "must be one of: GET, POST, PUT, PATCH, DELETE",
        ),
        ("headers", "{ Host = \"x\" }", "cannot be set"),
        ("body", "'{{\"a\": \"{x}\"}}'", "schema has no property"),
        ("body", "'{{\"a\": '", "makes no JSON"),
        (
            "parameters",
            "{ type = \"array\" }",
            "must have type = \"object\"",
        ),
    ];
    let mut setup = TestApp::setup();
    for (at, (key, value, _)) in cases.iter().enumerate() {
        let keys = base.iter().filter(|(name, _)| name != key);
        let lines: String = keys
            .map(|(name, value)| format!("{name} = {value}\n"))
            .collect();
        let file = format!("[[http_tools]]\n{lines}{key} = {value}\n");
        setup = setup.agent(&format!("a{at}"), &file);
    }
    let app = setup.spawn().await;
    for (at, (key, value, expected)) in cases.iter().enumerate() {
        let answer = app.post(&format!("/agents/a{at}/runs"), &json!({})).await;
        let detail = answer.problem(422);
        assert!(detail.contains(expected), "{key} = {value}: {detail}");
        assert!(detail.contains("http_tools[0]."), "{detail}");
    }
    let shown: Value = app.get("/agents").await.json();
    assert_eq!(shown["data"].as_array().map(Vec::len), Some(cases.len()));
}
