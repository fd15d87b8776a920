//! The same story on every wire, whole and streamed: the recorded steps are the same.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::{Event, kinds};
use crate::support::provider::answer::{calls, delegates, fails, says};
use crate::support::provider::recorded_request::Wire;

/// What a story leaves behind that must not depend on wire or streaming.
#[derive(Debug, PartialEq)]
struct Steps {
    content: String,
    usage: (u64, u64, u64),
    tree: (u64, u64, u64),
    events: Vec<String>,
    messages: Value,
    sent_request: Vec<SentRequest>,
}

/// The content of a request, on any wire.
#[derive(Debug, PartialEq)]
struct SentRequest {
    system: String,
    user: Vec<String>,
    results: Vec<String>,
    tools: Vec<Value>,
}

async fn delegation(wire: Wire, stream: bool) -> Steps {
    let name = wire.name();
    let common = format!("stream = {stream}\nsystem_prompt = \"Work.\"");
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!(
                "model = \"{name}/planner\"\nsub_agents = [\"reader\"]\n{common}\n\
                 [sub_agents_config]\nparallel = false"
            ),
        )
        .agent("reader", &format!("model = \"{name}/reader\"\n{common}"))
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "first ünd"), ("reader", "second")])
                .with_text("I shall ask twice.")
                .with_usage(100, 20),
            calls([("fly", json!({"to": "the moon"}))]).with_usage(150, 10),
            says("All is said and done.").with_usage(200, 30),
        ],
    );
    app.provider.always("reader", |seen| {
        says(format!("read: {}", seen.user_messages()[0])).with_usage(50, 5)
    });

    let run = app.run("planner", "go").await;

    for seen in app.provider.requests() {
        assert_eq!(seen.wire, wire);
        assert_eq!(seen.wants_stream(), stream, "{:?}", seen.body);
    }
    let events = run.events().await;
    Steps {
        content: run.output().to_owned(),
        usage: run.usage(),
        tree: run.tree_usage(),
        events: kinds(&events).into_iter().map(str::to_owned).collect(),
        messages: without_ids(run.messages().await),
        sent_request: app
            .provider
            .requests()
            .iter()
            .map(|seen| SentRequest {
                system: seen.system(),
                user: seen.user_messages(),
                results: seen.tool_results(),
                tools: seen.tools(),
            })
            .collect(),
    }
}

/// Takes away what a provider chooses: the ids of calls, and its own form of the messages.
fn without_ids(mut value: Value) -> Value {
    match &mut value {
        Value::Object(object) => {
            object.retain(|key, _| {
                !matches!(key.as_str(), "id" | "call_id" | "provider_id" | "echo")
            });
            for inner in object.values_mut() {
                *inner = without_ids(inner.take());
            }
        }
        Value::Array(array) => {
            for inner in array {
                *inner = without_ids(inner.take());
            }
        }
        _ => {}
    }
    value
}

#[tokio::test]
async fn the_steps_are_the_same_on_every_wire_streamed_or_not() {
    let first = delegation(Wire::Anthropic, false).await;
    assert_eq!(first.content, "All is said and done.");
    assert_eq!(first.usage, (450, 60, 3));
    assert_eq!(first.tree, (550, 70, 3));
    for (wire, stream) in [
        (Wire::Anthropic, true),
        (Wire::Openai, false),
        (Wire::Openai, true),
        (Wire::Responses, false),
        (Wire::Responses, true),
        (Wire::Ollama, false),
        (Wire::Ollama, true),
    ] {
        let other = delegation(wire, stream).await;
        assert_eq!(first, other, "{wire:?}, streamed: {stream}");
    }
}

/// One agent for each wire, after a run of two turns.
async fn a_run_on_each_wire() -> TestApp {
    let mut setup = TestApp::setup();
    for wire in Wire::ALL {
        let name = wire.name();
        setup = setup.agent(
            name,
            &format!(
                "model = \"{name}/{name}\"\nsub_agents = [\"nobody\"]\n\
                 [params]\ntemperature = 0.0\nmax_tokens = 77"
            ),
        );
    }
    let app = setup.spawn().await;
    for wire in Wire::ALL {
        app.provider.will(
            wire.name(),
            [calls([("fly", json!({"n": 1}))]), says("done")],
        );
        assert_eq!(app.run(wire.name(), "go").await.output(), "done");
    }
    app
}

#[tokio::test]
async fn each_wire_has_its_own_headers_and_format() {
    let app = a_run_on_each_wire().await;

    let anthropic = app.provider.wait_for_request("anthropic", 2).await;
    assert_eq!(anthropic.headers["x-api-key"], "key-of-anthropic");
    assert_eq!(anthropic.headers["anthropic-version"], "2023-06-01");
    assert_eq!(anthropic.headers["content-type"], "application/json");
    assert_eq!(anthropic.body["max_tokens"], 77);
    let last = &anthropic.body["messages"][2];
    assert_eq!(last["role"], "user");
    assert_eq!(last["content"][0]["tool_use_id"], "call_0_0");
    assert_eq!(
        anthropic.body["messages"][1]["content"][0]["input"],
        json!({"n": 1})
    );

    let openai = app.provider.wait_for_request("openai", 2).await;
    assert_eq!(openai.headers["authorization"], "Bearer key-of-openai");
    assert_eq!(
        openai.body["max_tokens"], 77,
        "another base than the service's own"
    );
    assert_eq!(openai.body["temperature"], 0.0);
    let said = &openai.body["messages"][1];
    assert_eq!(said["tool_calls"][0]["function"]["arguments"], "{\"n\":1}");
    assert_eq!(
        openai.body["messages"][2]["tool_call_id"],
        said["tool_calls"][0]["id"]
    );

    let responses = app.provider.wait_for_request("responses", 2).await;
    assert_eq!(
        responses.headers["authorization"],
        "Bearer key-of-responses"
    );
    assert_eq!(responses.body["max_output_tokens"], 77);
    assert_eq!(responses.body["temperature"], 0.0);
    assert_eq!(responses.body["store"], false);
    assert_eq!(
        responses.body["include"],
        json!(["reasoning.encrypted_content"])
    );
    let key = responses.body["prompt_cache_key"].as_str().expect("a key");
    let agents = app.get("/agents/responses").await.json();
    assert_eq!(agents["version"], format!("sha256:{key}"));
    let input = &responses.body["input"];
    assert_eq!(
        (&input[1]["type"], &input[1]["arguments"]),
        (&json!("function_call"), &json!("{\"n\":1}"))
    );
    assert_eq!(
        (&input[2]["type"], &input[2]["call_id"]),
        (&json!("function_call_output"), &input[1]["call_id"])
    );
    assert_eq!(responses.body["tools"][0]["strict"], false);

    let ollama = app.provider.wait_for_request("ollama", 2).await;
    assert!(ollama.headers.get("authorization").is_none());
    assert_eq!(ollama.body["stream"], false);
    assert_eq!(ollama.body["options"]["num_predict"], 77);
    assert_eq!(ollama.body["options"]["temperature"], 0.0);
    assert_eq!(
        ollama.body["messages"][1]["tool_calls"][0]["function"]["arguments"],
        json!({"n": 1})
    );
    let result = &ollama.body["messages"][2];
    assert_eq!(
        (&result["role"], &result["tool_name"]),
        (&json!("tool"), &json!("fly"))
    );
}

#[tokio::test]
async fn errors_of_every_wire_keep_the_services_message() {
    let mut setup = TestApp::setup();
    for wire in Wire::ALL {
        let name = wire.name();
        setup = setup.agent(
            name,
            &format!("model = \"{name}/{name}\"\n[retry]\nmax_retries = 0"),
        );
    }
    let app = setup.spawn().await;
    let table = [
        (400, "bad_request", "provider_bad_request", false),
        (401, "auth", "provider_auth", false),
        (403, "auth", "provider_auth", false),
        (404, "bad_request", "provider_bad_request", false),
        (408, "timeout", "timeout", true),
        (422, "bad_request", "provider_bad_request", false),
        (429, "rate_limit", "provider_rate_limit", true),
        (500, "server", "provider_server", true),
        (502, "server", "provider_server", true),
        (529, "overloaded", "provider_overloaded", true),
    ];
    for wire in Wire::ALL {
        for (status, category, code, retryable) in table {
            app.provider
                .will(wire.name(), [fails(status, "in its own words")]);
            let run = app.run(wire.name(), "go").await;
            let name = wire.name();
            let message = format!("{category}: in its own words ({name}/{name})");
            assert_eq!(run.failure(), (code, message.as_str()), "{wire:?} {status}");
            assert_eq!(run["error"]["category"], category);
            assert_eq!(run["error"]["retryable"], retryable, "{wire:?} {status}");
        }
    }
}

#[tokio::test]
async fn an_unreachable_provider_is_a_server_error() {
    let app = TestApp::setup()
        .config("[providers.gone]\nkind = \"ollama\"\nbase_url = \"http://127.0.0.1:9\"")
        .agent("solo", "model = \"gone/model\"\n[retry]\nmax_retries = 0")
        .spawn()
        .await;

    let run = app.run("solo", "go").await;

    assert_eq!(
        run.failure(),
        (
            "provider_server",
            "server: connection refused: is Ollama running? (expected at http://127.0.0.1:9) (gone/model)"
        )
    );
}

#[tokio::test]
async fn calls_without_ids_get_unique_ids_over_the_turns() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "model = \"ollama/planner\"\nsub_agents = [\"reader\"]",
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "a"), ("reader", "b")]),
            delegates([("reader", "c")]),
            says("done"),
        ],
    );
    app.provider.always("reader", |_| says("read"));

    let run = app.run("planner", "go").await;

    let children = run.children().await;
    let ids: std::collections::BTreeSet<_> = children
        .iter()
        .map(|child| child["tool_call_id"].as_str().expect("an id"))
        .collect();
    assert_eq!(ids.len(), 3, "{ids:?}");
    assert!(
        ids.contains("ollama_0") && ids.contains("ollama_1"),
        "{ids:?}"
    );
}

#[tokio::test]
async fn unsupported_parameters_are_left_out_with_a_warning() {
    let stop = "[params]\nstop = [\"END\"]";
    let app = TestApp::setup()
        .agent(
            "new",
            &format!("model = \"responses/gpt-9-mini\"\nsub_agents = [\"x\"]\n{stop}"),
        )
        .agent("old", &format!("model = \"responses/gpt-4-mini\"\n{stop}"))
        .spawn()
        .await;
    app.provider
        .will("gpt-9-mini", [calls([("fly", json!({}))]), says("done")]);
    app.provider.will("gpt-4-mini", [says("done")]);

    let new = app.run("new", "go").await;
    let old = app.run("old", "go").await;

    assert_eq!((new.output(), old.output()), ("done", "done"));
    let sent_request = app.provider.wait_for_request("gpt-9-mini", 2).await;
    assert_eq!(sent_request.wire, Wire::Responses);
    assert_eq!(sent_request.body.get("stop"), None);
    let sent_request = app.provider.wait_for_request("gpt-4-mini", 1).await;
    assert_eq!(sent_request.wire, Wire::Openai);
    assert_eq!(sent_request.body["stop"], json!(["END"]));
    let warnings = |events: &[Event]| {
        let warnings = events
            .iter()
            .filter(|event| event.kind() == "model.warning");
        let reported =
            warnings.map(|event| event["message"].as_str().unwrap_or_default().to_owned());
        reported.collect::<Vec<_>>()
    };
    let reported = warnings(&new.events().await);
    assert_eq!(reported.len(), 1, "once for a run: {reported:?}");
    assert!(
        reported[0].starts_with("`stop` is not sent: gpt-9-mini"),
        "{reported:?}"
    );
    assert!(warnings(&old.events().await).is_empty());
}
