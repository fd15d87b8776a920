//! Schemas that cost far more than their size: they delay no other run, fail their own, and do not return after a restart.

use std::pin::pin;

use axed::config::environment::process_environment;
use futures_util::future::{Either, join_all, select};
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::count;
use crate::support::provider::answer::{calls, says};

/// The same subschema, tried twice as often with each of 24 references.
fn doubled(inner: &Value) -> Value {
    let mut definitions = serde_json::Map::new();
    for step in 0..24 {
        let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
        let never = |n: u32| json!({"minProperties": n, "minItems": n, "minLength": n});
        let twice = json!({"anyOf": [
            {"allOf": [next, never(1_000_000)]},
            {"allOf": [next, never(2_000_000)]},
        ]});
        definitions.insert(step.to_string(), twice);
    }
    definitions.insert("24".to_owned(), inner.clone());
    json!({"type": "object", "$defs": definitions, "properties": {"n": {"$ref": "#/$defs/0"}}})
}

/// One whose constant is deep in the value: what is compared was not counted.
fn compares() -> (Value, Value) {
    let numbers: Value = (0..3_000).collect();
    let deep = json!([[numbers]]);
    (doubled(&json!({"const": deep})), json!({"n": deep}))
}

/// One whose patterns go through the value from each of its bytes.
fn matches() -> (Value, Value) {
    let value = json!({"n": "xab".repeat(20_000)});
    (doubled(&json!({"pattern": "(x|.)*x[a-y]{400}z"})), value)
}

fn request(schema: &Value) -> Value {
    json!({"input": "go", "response_format": {"type": "json_schema", "schema": schema}})
}

/// Looks at `/livez` until `work` is done, which makes this many checks: more than one answer comes during each.
async fn answers_during<T>(app: &TestApp, checks: usize, work: impl Future<Output = T>) -> T {
    let mut answers = 0;
    tokio::pin!(work);
    loop {
        assert_eq!(app.get("/livez").await.status, 200);
        answers += 1;
        tokio::select! {
            done = &mut work => {
                assert!(answers > 2 * checks, "{answers} answers");
                return done;
            }
            () = tokio::task::yield_now() => {}
        }
    }
}

#[tokio::test]
async fn a_hostile_schema_fails_its_run_and_delays_no_other() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.always("other", |_| says("done"));
    for (schema, value) in [compares(), matches()] {
        app.provider
            .always("solo", move |_| says(value.to_string()));
        let before = app.provider.requests_for("solo").len();

        let work = async {
            let hostile = join_all((0..3).map(|_| app.run_with("solo", request(&schema))));
            match select(pin!(hostile), pin!(app.run("other", "go"))).await {
                Either::Left(_) => panic!("another run waits for the checks"),
                Either::Right((other, hostile)) => {
                    assert_eq!(other.output(), "done");
                    hostile.await
                }
            }
        };
        let hostile = answers_during(&app, 6, work).await;

        for run in hostile {
            let (code, message) = run.failure();
            assert_eq!(code, "output_invalid");
            assert!(message.contains("takes too long"), "{message}");
        }
        assert_eq!(
            app.provider.requests_for("solo").len() - before,
            6,
            "one repair each"
        );
    }
}

#[tokio::test]
async fn references_do_not_overflow_the_stack() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let chain = |length: usize| {
        let mut definitions = serde_json::Map::new();
        for step in 0..length {
            let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
            definitions.insert(step.to_string(), next);
        }
        definitions.insert(length.to_string(), json!({"items": {"$ref": "#/$defs/0"}}));
        json!({"$defs": definitions, "$ref": "#/$defs/0"})
    };
    let value = (0..100).fold(json!([]), |inner, _| json!([inner]));
    app.provider
        .always("solo", move |_| says(value.to_string()));

    let run = app.run_with("solo", request(&chain(1_500))).await;
    assert!(["completed", "failed"].contains(&run.status()));
    let got = app.post("/agents/solo/runs", &request(&chain(3_000))).await;
    let detail = got.problem(422);
    assert!(detail.contains("more than 10000"), "{detail}");
    assert_eq!(
        got.json()["errors"][0]["pointer"],
        "/response_format/schema"
    );
    assert_eq!(app.get("/livez").await.status, 200);
}

#[tokio::test]
async fn a_check_that_kills_the_daemon_is_eventually_abandoned() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let (schema, value) = compares();
    app.provider
        .always("solo", move |_| says(value.to_string()));
    let id = app
        .start_with("solo", request(&schema))
        .await
        .id()
        .to_owned();
    let mut kills = 0;
    // The reply is in the record before its check begins. However often the daemon is killed there, the run ends.
    while kills < 5 {
        let run = app.find(&id).await;
        let mut events = app.events(&run).await;
        events
            .until_matches(|events| {
                count(events, "turn.completed") > 0 && count(events, "run.resumed") == kills
                    || events
                        .last()
                        .is_some_and(|event| event.kind() == "run.failed")
            })
            .await;
        app.crash_and_restart().await;
        kills += 1;
    }

    let run = app.find(&id).await.wait_for_end().await;

    assert_eq!(run.failure().0, "output_invalid");
    let replies = count(&run.events().await, "turn.completed");
    assert!(replies <= 2, "no more than the reply and one repair");
    // The reply that was recorded is not requested again.
    let requests = app.provider.requests_for("solo");
    let first = requests.iter().filter(|request| request.turn() == 1);
    assert_eq!(first.count(), 1);
}

const SERVER: &str = r#"
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message.get("method")
    if method == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        with open(os.path.join(os.environ["HOME"], "schema.json")) as file:
            result = {"tools": [{"name": "tool", "inputSchema": json.load(file)}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "performed"}]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}), flush=True)
"#;

#[tokio::test]
async fn a_tools_hostile_schema_fails_the_call() {
    let (schema, arguments) = compares();
    let path = process_environment().remove("PATH").expect("a PATH");
    let app = TestApp::setup()
        .file("server.py", SERVER)
        .file("schema.json", &schema.to_string())
        .agent(
            "a",
            "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"server.py\"]\n",
        )
        .environment("PATH", &path)
        .spawn()
        .await;
    app.provider.will(
        "a",
        [
            calls([("s__tool", arguments)]),
            calls([("s__tool", json!({}))]),
            says("done"),
        ],
    );

    let run = answers_during(&app, 1, app.run("a", "go")).await;

    assert_eq!(run.output(), "done", "{}", app.daemon.log());
    let last = app.provider.requests_for("a").pop().expect("a request");
    let results = last.tool_results();
    assert!(results[0].contains("takes too long"), "{}", results[0]);
    assert_eq!(
        (results[1].as_str(), last.tool_result_errors()),
        ("performed", vec![true, false])
    );
}
