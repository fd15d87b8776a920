//! One effect for each call: keys, probes, and a person who knows what became of a call.

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use axed::config::environment::process_environment;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp};
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::http_server::serve;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::support::run::Run;
use crate::tools::approvals::find;
use crate::tools::ask_person::questions;
use crate::tools::wait::result;

/// What the shop does with a request once it is paid.
#[derive(Clone, Copy, Default, PartialEq)]
enum Mode {
    #[default]
    Answers,
    Hangs,
    /// The connection breaks in the middle of the response.
    Breaks,
    /// It breaks once, and the next request is answered.
    BreaksOnce,
}

/// A shop in which every payment has an effect, but for those with a key that was paid with before.
#[derive(Clone, Default)]
struct Shop(Arc<Mutex<Ledger>>);

#[derive(Default)]
struct Ledger {
    mode: Mode,
    /// The key of each request; empty without one.
    keys: Vec<String>,
    effects: BTreeMap<String, u32>,
    probe: Option<StatusCode>,
    probed: Vec<String>,
}

impl Shop {
    async fn start(&self) -> (String, JoinSet<()>) {
        let routes = Router::new()
            .route("/pay", any(pay))
            .route("/calls/{key}", get(probe))
            .with_state(self.clone());
        let (address, server) = serve(routes).await;
        (format!("http://{address}"), server)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().expect("a lock")
    }

    fn set(&self, mode: Mode) {
        self.ledger().mode = mode;
    }

    fn keys(&self) -> Vec<String> {
        self.ledger().keys.clone()
    }

    /// Waits until that many requests have come.
    async fn wait_for(&self, many: usize) {
        eventually(&format!("{many} requests"), async || {
            (self.keys().len() >= many).then_some(())
        })
        .await;
    }
}

async fn pay(State(shop): State<Shop>, headers: HeaderMap) -> Response {
    let key = headers.get("idempotency-key");
    let key = key.map_or("", |it| it.to_str().expect("text")).to_owned();
    let mode = {
        let mut ledger = shop.ledger();
        ledger.keys.push(key.clone());
        let effects = ledger.effects.entry(key.clone()).or_default();
        *effects += u32::from(key.is_empty() || *effects == 0);
        let mode = ledger.mode;
        if mode == Mode::BreaksOnce {
            ledger.mode = Mode::Answers;
        }
        mode
    };
    match mode {
        Mode::Answers => "paid".into_response(),
        Mode::Hangs => pending().await,
        Mode::Breaks | Mode::BreaksOnce => {
            let chunks = [Ok(Bytes::from("pa")), Err(io::Error::other("broken"))];
            let body = Body::from_stream(stream::iter(chunks));
            ([("content-type", "text/plain")], body).into_response()
        }
    }
}

async fn probe(
    State(shop): State<Shop>,
    Path(key): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let mut ledger = shop.ledger();
    ledger
        .probed
        .push(format!("{key} {}", query.unwrap_or_default()));
    (ledger.probe.expect("no probe"), "paid, says the probe").into_response()
}

fn with_shop(url: &str, settings: &str) -> Setup {
    let agent = format!(
        "[[http_tools]]\nname = \"pay\"\ndescription = \"Pays\"\nmethod = \"POST\"\nurl = \"{url}/pay\"\n{settings}\n\
         parameters = {{ type = \"object\", properties = {{ order = {{ type = \"integer\" }} }} }}\n"
    );
    TestApp::setup()
        .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
        .agent("clerk", &agent)
}

fn pays() -> ScriptedAnswer {
    calls([("pay", json!({"order": 7}))])
}

const KEYED: &str = "repeat = \"with_key\"\nidempotency_header = \"Idempotency-Key\"";
const HEADER: &str = "idempotency_header = \"Idempotency-Key\"";

/// Starts a run whose call is being performed.
async fn begun(app: &TestApp, shop: &Shop) -> String {
    let before = shop.keys().len();
    app.provider.will("clerk", [pays()]);
    let id = app.start("clerk", "go").await.id().to_owned();
    shop.wait_for(before + 1).await;
    id
}

/// The run, once it waits for a person who knows what became of the call.
async fn uncertain<'a>(app: &'a TestApp, id: &str) -> Run<'a> {
    let path = format!("/runs/{id}");
    let waits = |it: &Value| it["waiting_for"] == "reconcile";
    app.get_until(&path, |got| waits(&got.json())).await;
    app.find(id).await
}

fn path_of(run: &Run<'_>) -> String {
    let call = run["wait"]["call_id"].as_str().expect("a call");
    format!("/runs/{}/calls/{call}", run.id())
}

async fn say(app: &TestApp, run: &Run<'_>, body: Value) {
    let answered = app.post(&path_of(run), &body).await;
    assert_eq!(answered.status, 202, "{}", answered.text);
    assert_eq!(answered.json()["id"], run.id());
}

#[tokio::test]
async fn a_call_with_a_key_is_sent_again_with_it() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let mut app = with_shop(&url, KEYED).spawn().await;
    shop.set(Mode::Hangs);
    let id = begun(&app, &shop).await;
    // Its copy would have another key.
    let forked = app.post(&format!("/runs/{id}/fork"), &json!({})).await;
    forked.problem(409);
    // Again and again: the service may be what takes long.
    for requests in 2..4 {
        app.crash_and_restart().await;
        shop.wait_for(requests).await;
    }
    shop.set(Mode::Answers);
    app.provider.will("clerk", [says("done")]);
    app.crash_and_restart().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done", "{}", app.daemon.log());
    assert_eq!(result(&run).await, ("paid".to_owned(), false));
    let keys = shop.keys();
    assert_eq!(keys.len(), 4);
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert!((16..=64).contains(&keys[0].len()), "{keys:?}");
    assert_eq!(shop.ledger().effects[&keys[0]], 1);
    assert_eq!(count(&run.events().await, "tool.started"), 1);

    // Another call, and one of a fork, have other keys.
    app.provider.will("clerk", [pays(), says("done")]);
    app.run("clerk", "go").await;
    let body = json!({"at": {"turn": 1, "after": "reply"}});
    app.provider.will("clerk", [says("done")]);
    let forked = app.post(&format!("/runs/{id}/fork?wait=180"), &body).await;
    assert_eq!(forked.json()["status"], "completed", "{}", forked.text);
    let mut keys = shop.keys().split_off(3);
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 3, "{keys:?}");
}

#[tokio::test]
async fn a_probe_says_what_became_of_a_call() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let settings = format!("{HEADER}\nprobe = {{ url = \"{url}/calls/{{key}}?order={{order}}\" }}");
    let mut app = with_shop(&url, &settings).spawn().await;
    for (status, requests, expected) in [
        (200, 1, "paid, says the probe"),
        (404, 2, "paid"),
        (500, 1, ""),
        (202, 1, ""),
    ] {
        *shop.ledger() = Ledger {
            mode: Mode::Hangs,
            probe: StatusCode::from_u16(status).ok(),
            ..Ledger::default()
        };
        let id = begun(&app, &shop).await;
        shop.set(Mode::Answers);
        app.provider.will("clerk", [says("done")]);
        app.crash_and_restart().await;
        if expected.is_empty() {
            let run = uncertain(&app, &id).await;
            say(&app, &run, json!({"outcome": "unknown"})).await;
        }
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done", "{status}");
        let (text, is_error) = result(&run).await;
        match expected {
            "" => assert!(is_error && text.contains("not known"), "{status}: {text}"),
            _ => assert_eq!((&*text, is_error), (expected, false), "{status}"),
        }
        let keys = shop.keys();
        assert_eq!(keys.len(), requests, "{status}");
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        assert_eq!(shop.ledger().effects[&keys[0]], 1);
        assert_eq!(shop.ledger().probed, [format!("{} order=7", keys[0])]);
    }
}

#[tokio::test]
async fn a_run_waits_for_a_person_who_knows() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let mut app = with_shop(&url, "").spawn().await;
    shop.set(Mode::Hangs);
    let id = begun(&app, &shop).await;
    app.crash_and_restart().await;
    let run = uncertain(&app, &id).await;
    let wait = run["wait"].clone();
    assert_eq!(
        (&wait["reason"], &wait["tool"], &wait["arguments"]),
        (&json!("reconcile"), &json!("pay"), &json!({"order": 7}))
    );
    assert!(
        wait["began_at"].is_string() && wait["since"].is_string(),
        "{wait}"
    );
    assert_eq!(wait.get("until"), None);
    let question = questions(&app, 1).await.remove(0);
    assert_eq!(question["run_id"], id);
    assert_eq!(
        (
            &question["call_id"],
            &question["tool"],
            &question["arguments"]
        ),
        (&wait["call_id"], &wait["tool"], &wait["arguments"])
    );
    assert_eq!(run["pending_inputs"], json!([question]));
    // A client that waits for the run learns that a person has to do something.
    let waited = app.get(&format!("/runs/{id}?wait=1")).await;
    assert_eq!(waited.json()["status"], "waiting");
    let requested = find(&run.events().await, "input.requested").clone();
    assert_eq!(requested["begun"]["tool"], "pay");

    let path = path_of(&run);
    for (body, pointer) in [
        (json!({}), "/outcome"),
        (json!({"outcome": "perhaps"}), "/outcome"),
        (json!({"outcome": "done"}), "/result"),
        (json!({"outcome": "not_done", "result": "x"}), "/result"),
        (
            json!({"outcome": "done", "result": "x".repeat(20_000)}),
            "/result",
        ),
        (json!({"outcome": "unknown", "why": "x"}), "/why"),
    ] {
        let refused = app.post(&path, &body).await;
        refused.problem(422);
        assert_eq!(refused.json()["errors"][0]["pointer"], pointer, "{body}");
    }
    let unknown = json!({"outcome": "unknown"});
    let other = app.post(&format!("/runs/{id}/calls/none"), &unknown).await;
    other.problem(404);
    assert_eq!(other.json()["code"], "call_not_found");
    let invalid = app.post(&path, &json!([])).await;
    assert!([400, 422].contains(&invalid.status), "{}", invalid.text);

    // Another restart changes nothing, however many there are.
    for _ in 0..2 {
        app.crash_and_restart().await;
        let run = uncertain(&app, &id).await;
        assert_eq!(run["wait"], wait);
    }
    let run = app.find(&id).await;
    app.provider.will("clerk", [says("done")]);
    say(
        &app,
        &run,
        json!({"outcome": "done", "result": {"receipt": 17}}),
    )
    .await;
    let again = app.post(&path, &json!({"outcome": "not_done"})).await;
    again.problem(409);
    assert_eq!(again.json()["code"], "nothing_waits");
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(result(&run).await, (r#"{"receipt":17}"#.to_owned(), false));
    assert_eq!(shop.keys(), [""]);
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "input.requested"), 1);
    assert_eq!(find(&events, "input.answered")["answer"]["outcome"], "done");
    assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
}

/// The second attempt has the key of the first, needs no approval, and may be interrupted, too.
#[tokio::test]
async fn a_call_that_was_not_done_is_performed_again() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let file = format!(
        "approve = [\"pay\"]\n[[http_tools]]\nname = \"pay\"\ndescription = \"Pays\"\nmethod = \"POST\"\nurl = \"{url}/pay\"\n\
         {HEADER}\n"
    );
    let setup = with_shop(&url, HEADER).agent("careful", &file);
    let mut app = setup.spawn().await;
    shop.set(Mode::Hangs);
    app.provider.will("careful", [calls([("pay", json!({}))])]);
    let id = app.start("careful", "go").await.id().to_owned();
    let path = format!("/runs/{id}");
    let is_pending = |run: &Value| run["pending_approvals"][0].is_object();
    let waiting = app.get_until(&path, |got| is_pending(&got.json())).await;
    let call = waiting.json()["pending_approvals"][0]["tool_call_id"].clone();
    let approve = format!("{path}/approvals/{}", call.as_str().expect("an id"));
    app.post(&approve, &json!({"decision": "approve"})).await;
    shop.wait_for(1).await;
    for attempt in 2..4 {
        app.crash_and_restart().await;
        let run = uncertain(&app, &id).await;
        assert_eq!(run["pending_inputs"].as_array().map(Vec::len), Some(1));
        if attempt == 3 {
            shop.set(Mode::Answers);
            app.provider.will("careful", [says("done")]);
        }
        say(&app, &run, json!({"outcome": "not_done"})).await;
        shop.wait_for(attempt).await;
    }
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(result(&run).await, ("paid".to_owned(), false));
    let keys = shop.keys();
    assert!(
        keys.len() == 3 && keys.iter().all(|it| *it == keys[0]),
        "{keys:?}"
    );
    let events = run.events().await;
    assert_eq!(
        [
            "approval.requested",
            "input.requested",
            "tool.started",
            "tool.completed"
        ]
        .map(|kind| count(&events, kind)),
        [1, 2, 3, 1]
    );
    assert_eq!(run["tree"]["tool_calls"], 1);
}

#[tokio::test]
async fn a_run_is_interrupted_if_nobody_answers_or_is_asked() {
    for config in ["reconcile = \"fail\"", "reconcile_timeout = 1"] {
        let shop = Shop::default();
        let (url, _server) = shop.start().await;
        let setup = with_shop(&url, "").config(&format!("[runs]\n{config}"));
        let mut app = setup.spawn().await;
        shop.set(Mode::Hangs);
        let id = begun(&app, &shop).await;
        app.crash_and_restart().await;
        let run = app.find(&id).await.wait_for_end().await;
        let (code, message) = run.failure();
        assert_eq!(code, "interrupted", "{config}");
        assert!(message.contains("\"pay\""), "{message}");
        assert_eq!(shop.keys().len(), 1);
        let events = run.events().await;
        assert_complete(&events);
        assert_eq!(
            count(&events, "input.requested"),
            usize::from(config.contains("timeout"))
        );
    }
}

#[tokio::test]
async fn a_waiting_run_can_be_cancelled() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let mut app = with_shop(&url, "").spawn().await;
    shop.set(Mode::Hangs);
    let id = begun(&app, &shop).await;
    app.crash_and_restart().await;
    let run = uncertain(&app, &id).await;
    let run = run.cancel("enough").await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_broken_connection_leaves_the_end_open_as_a_crash_does() {
    for (settings, requests) in [(KEYED, 2), ("repeat = \"safe\"", 2), ("", 1)] {
        let shop = Shop::default();
        let (url, _server) = shop.start().await;
        let app = with_shop(&url, settings).spawn().await;
        shop.set(Mode::BreaksOnce);
        let id = begun(&app, &shop).await;
        app.provider.will("clerk", [says("done")]);
        if requests == 1 {
            let run = uncertain(&app, &id).await;
            assert_eq!(run["wait"]["tool"], "pay");
            let question = questions(&app, 1).await.remove(0);
            let text = question["question"].as_str().expect("a text");
            assert!(text.contains("127.0.0.1"), "{text}");
            // As every question, it can be answered by the schema.
            let path = format!(
                "/runs/{id}/inputs/{}",
                question["id"].as_str().expect("an id")
            );
            let wrong = app
                .post(&path, &json!({"answer": {"outcome": "perhaps"}}))
                .await;
            wrong.problem(422);
            let body = json!({"answer": {"outcome": "done", "result": "paid"}});
            assert_eq!(app.post(&path, &body).await.status, 202);
        }
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_eq!(result(&run).await, ("paid".to_owned(), false), "{settings}");
        let keys = shop.keys();
        assert_eq!(keys.len(), requests, "{settings}");
        assert_eq!(keys[0], keys[requests - 1]);
    }
}

#[tokio::test]
async fn a_connection_that_stays_broken_is_given_up() {
    let shop = Shop::default();
    let (url, _server) = shop.start().await;
    let app = with_shop(&url, "repeat = \"safe\"").spawn().await;
    shop.set(Mode::Breaks);
    app.provider.will("clerk", [pays(), says("done")]);
    let run = app.run("clerk", "go").await;
    assert_eq!(run.output(), "done");
    let (text, is_error) = result(&run).await;
    assert!(is_error && text.contains("127.0.0.1"), "{text}");
    assert_eq!(shop.keys().len(), 4);
}

const METER: &str = r#"
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method, result = request["method"], {}
    if method == "initialize":
        result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "meter", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "key", "inputSchema": {"type": "object"}}, {"name": "die", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        if request["params"]["name"] == "die":
            os._exit(3)
        result = {"content": [{"type": "text", "text": request["params"]["_meta"]["axed/idempotencyKey"]}]}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"#;

#[tokio::test]
async fn mcp_servers_and_commands_get_the_key_too() {
    let path = process_environment().remove("PATH").expect("a PATH");
    let agent = "workdir = \"work\"\ntools = [\"run_command\"]\n[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\n\
                 command = \"python3\"\nargs = [\"meter.py\"]\nopen_timeout = 120\n";
    let app = TestApp::setup()
        .config("[tools]\nallow_commands = true\nallow_unconfined = true")
        .file("meter.py", METER)
        .file("work/x", "")
        .environment("PATH", &path)
        .agent("clerk", agent)
        .spawn()
        .await;
    let command = json!({"command": "echo \"key: $AXED_CALL_KEY\""});
    for (tool, arguments) in [("s__key", json!({})), ("run_command", command)] {
        app.provider
            .will("clerk", [calls([(tool, arguments)]), says("done")]);
        let run = app.run("clerk", "go").await;
        let (text, is_error) = result(&run).await;
        let key = text.trim().trim_start_matches("key: ");
        let is_key = key.len() == 32 && key.chars().all(|it| it.is_ascii_hexdigit());
        assert!(is_key && !is_error, "{tool}: {text}");
    }
    // A server that ends during a call leaves its end open.
    app.provider
        .will("clerk", [calls([("s__die", json!({}))]), says("done")]);
    let id = app.start("clerk", "go").await.id().to_owned();
    let run = uncertain(&app, &id).await;
    say(&app, &run, json!({"outcome": "unknown"})).await;
    let run = run.wait_for_end().await;
    let (text, is_error) = result(&run).await;
    assert!(is_error && text.contains("s__die"), "{text}");
}

#[tokio::test]
async fn errors_in_the_file_name_the_key() {
    let cases = [
        (
            "repeat = \"with_key\"",
            "http_tools[0].repeat is \"with_key\", which needs idempotency_header",
        ),
        (
            "repeat = \"often\"",
            "must be one of: never, safe, with_key",
        ),
        ("safe_to_repeat = true", "safe_to_repeat"),
        (
            "idempotency_header = \"Host\"",
            "http_tools[0].idempotency_header cannot be set",
        ),
        ("idempotency_header = \"a b\"", "is no header's name"),
        ("probe = {}", "http_tools[0].probe.url is required"),
        (
            "probe = { url = \"https://h/{kee}\" }",
            "has {kee}, but the schema has no property \"kee\"",
        ),
        (
            "probe = { url = \"https://{key}/\" }",
            "must begin with a scheme and a host",
        ),
        (
            "probe = { url = \"https://h/{key}\" }",
            "has {key}, which the service gets only with idempotency_header",
        ),
        (
            "probe = { url = \"https://h/\", body = \"x\" }",
            "probe.body",
        ),
    ];
    let mut setup = TestApp::setup();
    for (at, (settings, _)) in cases.iter().enumerate() {
        let file = format!(
            "[[http_tools]]\nname = \"t\"\ndescription = \"x\"\nurl = \"https://h/\"\n{settings}\n"
        );
        setup = setup.agent(&format!("a{at}"), &file);
    }
    let app = setup.spawn().await;
    for (at, (settings, expected)) in cases.iter().enumerate() {
        let answer = app.post(&format!("/agents/a{at}/runs"), &json!({})).await;
        let detail = answer.problem(422);
        assert!(detail.contains(expected), "{settings}: {detail}");
    }
}
