//! MCP servers that ask people before they end a call: in requests on the open connection, and in results.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard};

use axed::config::environment::process_environment;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::stream;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp};
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::http_server::serve;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::tools::approvals::find;
use crate::tools::ask_person::{answer, asks, questions, waiting};
use crate::tools::asleep::asleep;
use crate::tools::wait::result;

/// A daemon with the agent `a`, whose server `s` asks in requests of its own.
fn on_pipes(server: &str, settings: &str) -> Setup {
    let agent = format!(
        "{settings}[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"asking.py\"]\n\
         env = {{ TOKEN = \"${{STORY_TOKEN}}\" }}\nopen_timeout = 120\n{server}"
    );
    let path = process_environment().remove("PATH").expect("a PATH");
    TestApp::setup()
        .file("asking.py", include_str!("mcp/asking.py"))
        .agent("a", &agent)
        .environment("PATH", &path)
        .environment("STORY_TOKEN", "s3cret-of-the-story")
}

fn uses(tool: &str) -> ScriptedAnswer {
    calls([(format!("s__{tool}"), json!({}))])
}

/// The question that waits, once it is another than these.
async fn next_question(app: &TestApp, seen: &[Value]) -> Value {
    let is_new = |it: &Value| !seen.iter().any(|seen| seen["id"] == it["id"]);
    eventually("the next question", async || {
        let page = app.get("/inputs").await.json();
        let next = page["data"].get(0)?.clone();
        is_new(&next).then_some(next)
    })
    .await
}

/// Calls the tool, and waits for the server's question.
async fn suspended_at(app: &TestApp, tool: &str) -> (String, Value) {
    app.provider.will("a", [uses(tool), says("done")]);
    waiting(app, "a").await
}

/// Answers, and returns the result of the call.
async fn answered(app: &TestApp, id: &str, question: &Value, body: Value) -> (String, bool) {
    let given = answer(app, question, body).await;
    assert_eq!(given.status, 202, "{}", given.text);
    let run = app.find(id).await.wait_for_end().await;
    assert_eq!(run.output(), "done", "{}", app.daemon.log());
    assert_complete(&run.events().await);
    result(&run).await
}

#[tokio::test]
async fn a_question_on_the_connection_waits_for_a_person() {
    // Far longer than the call may take.
    let app = on_pipes("timeout = 15\n", "").spawn().await;
    let (id, question) = suspended_at(&app, "book").await;
    let run = app.find(&id).await;
    assert_eq!(run["waiting_for"], "input");
    assert_eq!(run["pending_inputs"], json!([question]));
    assert_eq!(question["server"], "s");
    assert_eq!(question["schema"]["required"], json!(["name"]));
    assert_ne!(question["id"], question["call_id"]);
    let text = question["question"].as_str().expect("a text");
    assert!(
        text.starts_with("For whom?") && !text.contains("s3cret"),
        "{text}"
    );
    let announced = fs::read_to_string(app.path("capabilities")).expect("a file");
    assert_eq!(
        announced.trim(),
        r#"{"elicitation": {"form": {}, "url": {}}}"#
    );

    answer(&app, &question, json!({"answer": "Ada"}))
        .await
        .problem(422);
    let long = json!({"answer": {"name": "Ada Lovelace"}});
    answer(&app, &question, long).await.problem(422);
    let since: Timestamp = question["since"]
        .as_str()
        .expect("a time")
        .parse()
        .expect("a time");
    eventually("more time than the call has", async || {
        (Timestamp::now().duration_since(since) > SignedDuration::from_secs(16)).then_some(())
    })
    .await;
    let (text, is_error) = answered(&app, &id, &question, json!({"answer": {"name": "Ada"}})).await;
    assert_eq!(text, r#"{"action": "accept", "content": {"name": "Ada"}}"#);
    assert!(!is_error);
    let events = app.find(&id).await.events().await;
    assert_eq!(find(&events, "input.requested")["server"], "s");
    assert_eq!(count(&events, "tool.started"), 1);
}

#[tokio::test]
async fn a_question_on_the_connection_keeps_its_run_in_memory() {
    let app = on_pipes("", "")
        .agent("curious", "[ask]\nenabled = true\n")
        .spawn()
        .await;
    let (id, question) = suspended_at(&app, "book").await;
    // One that waits later is asleep.
    app.provider
        .will("curious", [asks(json!({"question": "Now?"}))]);
    app.start("curious", "go").await;
    asleep(&app, 1.0).await;
    let (text, _) = answered(&app, &id, &question, json!({"answer": {"name": "Ada"}})).await;
    assert!(text.contains("Ada"), "{text}");
    let events = app.find(&id).await.events().await;
    assert_eq!(count(&events, "tool.started"), 1);
}

#[tokio::test]
async fn each_end_of_a_question_has_its_action() {
    let app = on_pipes("", "").spawn().await;
    let (id, question) = suspended_at(&app, "book").await;
    let (text, _) = answered(&app, &id, &question, json!({"decline": "not mine"})).await;
    assert_eq!(text, r#"{"action": "decline"}"#);

    // A page of another site: what is typed there never comes here.
    let (id, question) = suspended_at(&app, "page").await;
    let text = question["question"].as_str().expect("a text");
    assert!(text.contains("https://login.example/e1"), "{text}");
    answer(&app, &question, json!({"answer": false}))
        .await
        .problem(422);
    let (text, _) = answered(&app, &id, &question, json!({"answer": true})).await;
    assert_eq!(text, r#"{"action": "accept"}"#);

    // One after another, each with an id of its own.
    let (id, first) = suspended_at(&app, "twice").await;
    answer(&app, &first, json!({"answer": {"name": "Ada"}})).await;
    let second = next_question(&app, std::slice::from_ref(&first)).await;
    assert_eq!(second["question"], "And who pays?");
    assert_eq!(second["call_id"], first["call_id"]);
    let (text, _) = answered(&app, &id, &second, json!({"answer": {"name": "Bob"}})).await;
    assert!(text.contains("Bob"), "{text}");

    // Pages that an error requires: the call is made again.
    let (id, question) = suspended_at(&app, "pages").await;
    let text = question["question"].as_str().expect("a text");
    assert!(text.contains("https://login.example/e2"), "{text}");
    let (text, _) = answered(&app, &id, &question, json!({"answer": true})).await;
    assert_eq!(text, "done");
    let calls = fs::read_to_string(app.path("calls")).expect("a file");
    let last: Value = serde_json::from_str(calls.lines().last().expect("a call")).expect("JSON");
    assert_eq!(last.get("inputResponses"), None, "{last}");
}

#[tokio::test]
async fn nobody_waits_for_ever_if_the_file_says_so() {
    for (default, expected) in [
        ("", r#"{"action": "cancel"}"#),
        (
            "ask_default = '{\"name\": \"Eve\"}'\n",
            r#"{"action": "accept", "content": {"name": "Eve"}}"#,
        ),
    ] {
        let app = on_pipes("", &format!("ask_timeout = 1\n{default}"))
            .spawn()
            .await;
        app.provider.will("a", [uses("book"), says("done")]);
        let run = app.run("a", "go").await;
        assert_eq!(run.output(), "done");
        assert_eq!(result(&run).await, (expected.to_owned(), false));
    }
}

#[tokio::test]
async fn a_question_ends_with_the_servers_wait() {
    let app = on_pipes("", "").spawn().await;
    for tool in ["leave", "withdraw"] {
        app.provider.will("a", [uses(tool), says("done")]);
        let run = app.run("a", "go").await;
        assert_eq!(run.output(), "done", "{tool}: {}", app.daemon.log());
        assert_eq!(
            result(&run).await,
            ("never mind".to_owned(), false),
            "{tool}"
        );
        assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
        let events = run.events().await;
        assert_eq!(
            count(&events, "input.requested"),
            count(&events, "input.answered")
        );
    }
    // The server learns that a run is cancelled.
    let (id, _) = suspended_at(&app, "book").await;
    let run = app.find(&id).await.cancel("enough").await;
    assert_eq!(run.wait_for_end().await.status(), "cancelled");
    assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
    eventually("the end of the call at the server", async || {
        app.path("cancelled").exists().then_some(())
    })
    .await;
}

#[tokio::test]
async fn calls_at_once_on_pipes_do_not_get_each_others_questions() {
    let app = on_pipes("", "").spawn().await;
    app.provider.will("a", [uses("book")]);
    app.start("a", "go").await;
    questions(&app, 1).await;
    for _ in 0..2 {
        app.provider.will("a", [uses("book")]);
        app.start("a", "go").await;
    }
    let open = questions(&app, 3).await;
    app.provider
        .will("a", [says("done"), says("done"), says("done")]);
    for question in open.iter().rev() {
        let name = question["run_id"].as_str().expect("an id");
        let name = &name[name.len() - 9..];
        let id = question["run_id"].as_str().expect("an id");
        let given = json!({"answer": {"name": name}});
        let (text, _) = answered(&app, id, question, given).await;
        assert!(text.contains(name), "{text}");
    }
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused() {
    let app = on_pipes("", "").spawn().await;
    for (tool, why) in [("odd", "the form of its question"), ("sample", "-32601")] {
        app.provider.will("a", [uses(tool), says("done")]);
        let run = app.run("a", "go").await;
        assert_eq!(run.output(), "done");
        let (text, _) = result(&run).await;
        assert!(text.contains(why), "{tool}: {text}");
    }
}

#[tokio::test]
async fn a_question_on_a_lost_connection_becomes_a_call_that_had_begun() {
    let mut app = on_pipes("", "").spawn().await;
    let (id, question) = suspended_at(&app, "book").await;
    app.crash_and_restart().await;
    app.get_until(&format!("/runs/{id}"), |got| {
        got.json()["waiting_for"] == "reconcile"
    })
    .await;
    let uncertain = questions(&app, 1).await.remove(0);
    assert_ne!(uncertain["id"], question["id"]);
    let late = answer(&app, &question, json!({"answer": {"name": "Ada"}})).await;
    late.problem(409);
    // It is made again, and the server asks again.
    app.provider.will("a", [says("done")]);
    let outcome = json!({"answer": {"outcome": "not_done"}});
    assert_eq!(answer(&app, &uncertain, outcome).await.status, 202);
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["waiting_for"] == "input")
        .await;
    let next = questions(&app, 1).await.remove(0);
    assert_ne!(next["id"], question["id"]);
    let (text, _) = answered(&app, &id, &next, json!({"answer": {"name": "Bob"}})).await;
    assert!(text.contains("Bob"), "{text}");
}

/// What the server does with a call that has the answers.
#[derive(Clone, Copy, Default, PartialEq)]
enum Mode {
    #[default]
    Ends,
    /// Asks once more.
    AsksAgain,
    Hangs,
}

/// A server over HTTP. With a handshake it asks on the stream of each call, without one in results.
#[derive(Clone, Default)]
struct Web(Arc<Mutex<WebState>>);

#[derive(Default)]
struct WebState {
    has_handshake: bool,
    mode: Mode,
    /// The parameters of each call.
    calls: Vec<Value>,
    /// What waits for the answer to a request of the server, by its id.
    waiting: HashMap<String, oneshot::Sender<Value>>,
}

impl Web {
    fn state(&self) -> MutexGuard<'_, WebState> {
        self.0.lock().expect("a lock")
    }

    async fn start(&self) -> (Setup, JoinSet<()>) {
        let routes = Router::new()
            .route("/mcp", post(speak))
            .with_state(self.clone());
        let (address, server) = serve(routes).await;
        let agent = format!(
            "[[mcp_servers]]\nname = \"s\"\ntransport = \"streamable-http\"\nurl = \"http://{address}/mcp\"\n"
        );
        (TestApp::setup().agent("a", &agent), server)
    }

    /// The parameters of the calls, once there are that many.
    async fn calls(&self, many: usize) -> Vec<Value> {
        eventually(&format!("{many} calls"), async || {
            let calls = self.state().calls.clone();
            (calls.len() >= many).then_some(calls)
        })
        .await
    }
}

async fn speak(State(web): State<Web>, _: HeaderMap, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let (id, params) = (message["id"].clone(), &message["params"]);
    let has_handshake = web.state().has_handshake;
    let result = match message["method"].as_str() {
        Some("initialize") if !has_handshake => {
            let error = json!({"code": -32601, "message": "no handshake here"});
            return answer_with(json!({"jsonrpc": "2.0", "id": id, "error": error}));
        }
        Some("initialize") => json!({
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "web", "version": "1"},
        }),
        Some("server/discover") => json!({
            "resultType": "complete",
            "supportedVersions": ["2026-07-28"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "web", "version": "1"},
            "ttlMs": 0,
            "cacheScope": "private",
        }),
        Some("tools/list") => {
            json!({"tools": [{"name": "book", "inputSchema": {"type": "object"}}]})
        }
        Some("tools/call") => {
            web.state().calls.push(params.clone());
            match has_handshake {
                true => return ask_on_stream(&web, id),
                false if params.get("inputResponses").is_none() => required("first"),
                false => match web.state().mode {
                    Mode::Ends => text(&params["inputResponses"].to_string()),
                    Mode::AsksAgain if params["requestState"] == "first" => required("second"),
                    Mode::AsksAgain => text("after two rounds"),
                    Mode::Hangs => {
                        return Body::from_stream(stream::pending::<Result<Bytes, Infallible>>())
                            .into_response();
                    }
                },
            }
        }
        None => {
            let key = id.as_str().unwrap_or_default();
            let waiting = web.state().waiting.remove(key);
            let _ = waiting.expect("a question").send(message["result"].clone());
            return StatusCode::ACCEPTED.into_response();
        }
        Some(_) => return StatusCode::ACCEPTED.into_response(),
    };
    answer_with(json!({"jsonrpc": "2.0", "id": id, "result": result}))
}

fn answer_with(message: Value) -> Response {
    ([("content-type", "application/json")], message.to_string()).into_response()
}

fn text(text: &str) -> Value {
    json!({"content": [{"type": "text", "text": text}]})
}

fn form(message: &str) -> Value {
    json!({"message": message, "mode": "form", "requestedSchema": {
        "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
    }})
}

fn required(state: &str) -> Value {
    let request = |message: &str| json!({"method": "elicitation/create", "params": form(message)});
    let requests =
        json!({"pays": request("And who pays?"), "whom": request(&format!("For whom, {state}?"))});
    json!({"resultType": "input_required", "requestState": state, "inputRequests": requests})
}

/// Asks on the stream of the call, which has the answer as its result.
fn ask_on_stream(web: &Web, id: Value) -> Response {
    let (sender, answer) = oneshot::channel();
    let question = format!("q{id}");
    web.state().waiting.insert(question.clone(), sender);
    let event = |message: Value| Ok::<_, Infallible>(format!("data: {message}\n\n"));
    let asks = json!({"jsonrpc": "2.0", "id": question, "method": "elicitation/create", "params": form(&question)});
    let events = stream::once(async move { event(asks) });
    let ends = stream::once(async move {
        let answer = answer.await.expect("an answer");
        event(json!({"jsonrpc": "2.0", "id": id, "result": text(&answer.to_string())}))
    });
    let events = futures_util::StreamExt::chain(events, ends);
    (
        [("content-type", "text/event-stream")],
        Body::from_stream(events),
    )
        .into_response()
}

#[tokio::test]
async fn questions_in_a_result_survive_restarts() {
    let web = Web::default();
    let (setup, _server) = web.start().await;
    // Nothing is uncertain about a call that has ended with questions.
    let mut app = setup.config("[runs]\nreconcile = \"fail\"").spawn().await;
    let (id, first) = suspended_at(&app, "book").await;
    assert_eq!(
        (&first["server"], &first["question"]),
        (&json!("s"), &json!("And who pays?"))
    );
    app.crash_and_restart().await;
    assert_eq!(questions(&app, 1).await, std::slice::from_ref(&first));
    assert_eq!(
        answer(&app, &first, json!({"answer": {"name": "Bob"}}))
            .await
            .status,
        202
    );
    let second = next_question(&app, std::slice::from_ref(&first)).await;
    // More often than a call may be started again.
    for _ in 0..9 {
        app.crash_and_restart().await;
    }
    app.provider.will("a", [says("done")]);
    let (text, _) = answered(&app, &id, &second, json!({"decline": "no"})).await;
    let answers: Value = serde_json::from_str(&text).expect("JSON");
    let expected = json!({
        "pays": {"action": "accept", "content": {"name": "Bob"}},
        "whom": {"action": "decline"},
    });
    assert_eq!(answers, expected);
    let calls = web.calls(2).await;
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[1]["requestState"], "first");
    let key = |call: &Value| call["_meta"]["axed/idempotencyKey"].clone();
    assert_eq!(key(&calls[0]), key(&calls[1]));
    let announced = &calls[0]["_meta"]["io.modelcontextprotocol/clientCapabilities"];
    assert_eq!(announced["elicitation"], json!({"form": {}, "url": {}}));
}

#[tokio::test]
async fn a_server_may_ask_again_and_a_crash_after_the_answers_needs_a_person_who_knows() {
    let web = Web::default();
    let (setup, _server) = web.start().await;
    let mut app = setup.spawn().await;
    web.state().mode = Mode::AsksAgain;
    app.provider.will("a", [uses("book"), says("done")]);
    let id = app.start("a", "go").await.id().to_owned();
    let mut seen = Vec::new();
    for _ in 0..4 {
        let question = next_question(&app, &seen).await;
        seen.push(question.clone());
        if seen.len() % 2 == 1 {
            app.crash_and_restart().await;
        }
        answer(&app, &question, json!({"answer": {"name": "Ada"}})).await;
    }
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(result(&run).await.0, "after two rounds");
    assert_eq!(web.calls(3).await[2]["requestState"], "second");

    *web.state() = WebState {
        mode: Mode::Hangs,
        ..WebState::default()
    };
    let (id, first) = suspended_at(&app, "book").await;
    answer(&app, &first, json!({"answer": {"name": "Bob"}})).await;
    let second = next_question(&app, std::slice::from_ref(&first)).await;
    answer(&app, &second, json!({"answer": {"name": "Ada"}})).await;
    web.calls(2).await;
    app.crash_and_restart().await;
    app.get_until(&format!("/runs/{id}"), |got| {
        got.json()["waiting_for"] == "reconcile"
    })
    .await;
    web.state().mode = Mode::Ends;
    app.provider.will("a", [says("done")]);
    let uncertain = questions(&app, 1).await.remove(0);
    let outcome = json!({"answer": {"outcome": "not_done"}});
    let (text, _) = answered(&app, &id, &uncertain, outcome).await;
    assert!(text.contains("Bob") && text.contains("Ada"), "{text}");
    let mut calls = web.calls(3).await;
    for call in &mut calls {
        call["_meta"]["progressToken"] = Value::Null;
    }
    assert_eq!(calls[1], calls[2], "the same request again");
}

#[tokio::test]
async fn questions_of_calls_at_once_reach_the_runs_that_made_them() {
    let web = Web::default();
    web.state().has_handshake = true;
    let (setup, _server) = web.start().await;
    let app = setup.spawn().await;
    let mut runs = Vec::new();
    for number in 0..3 {
        app.provider.will("a", [uses("book")]);
        runs.push(app.start("a", "go").await.id().to_owned());
        web.calls(number + 1).await;
    }
    let required = questions(&app, 3).await;
    app.provider
        .will("a", [says("done"), says("done"), says("done")]);
    for question in &required {
        let name = question["run_id"].clone();
        let given = answer(&app, question, json!({"answer": {"name": name}})).await;
        assert_eq!(given.status, 202, "{}", given.text);
    }
    for id in &runs {
        let run = app.find(id).await.wait_for_end().await;
        let (text, _) = result(&run).await;
        assert!(text.contains(id.as_str()), "{id}: {text}");
    }
}
