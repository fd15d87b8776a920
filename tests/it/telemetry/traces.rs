//! What a trace collector receives: spans with their parents, names, usage and status, the trace context of clients and of
//! provider requests, and no text of messages unless the configuration enables it.

use crate::support::app::{Setup, TestApp, send};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::provider::answer::{delegates, fails, hangs, says};
use crate::support::provider::recorded_request::Wire;
use crate::support::refusing_address;
use crate::support::run::Run;
use crate::support::within_timeout;
use crate::telemetry::collector::{Collector, Span};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// The only span with this name and this attribute.
fn one<'s>(spans: &'s [Span], name: &str, key: &str, value: &Value) -> &'s Span {
    let of = |span: &&Span| span.name == name && span.of(key) == value;
    let found: Vec<&Span> = spans.iter().filter(of).collect();
    assert_eq!(found.len(), 1, "{name} with {key} {value}: {spans:#?}");
    found[0]
}

/// A planner with two children, one of which fails, and whose first request is sent again.
fn family(collector: &Collector) -> Setup {
    TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\", \"broken\"]")
        .agent("reader", "[retry]\ninitial_delay_ms = 1\nmax_delay_ms = 2")
        .agent("broken", "")
        .config(&collector.config())
}

fn script(app: &TestApp) {
    app.provider.will(
        "planner",
        [
            delegates([("reader", "secret task"), ("broken", "y")]),
            says("done"),
        ],
    );
    let read = says("secret words")
        .with_usage(7, 3)
        .with_cached_tokens(2, 1);
    app.provider
        .will("reader", [fails(503, "oops"), read.with_model("real-1")]);
    app.provider
        .will("broken", [fails(400, "no: secret prompt")]);
}

fn has_the_runs_attributes(span: &Span, run: &Run<'_>) {
    for (key, value) in [
        ("gen_ai.operation.name", json!("invoke_agent")),
        ("gen_ai.provider.name", json!("anthropic")),
        ("gen_ai.agent.name", json!("planner")),
        ("gen_ai.conversation.id", run["id"].clone()),
        ("gen_ai.request.model", json!("planner")),
        ("gen_ai.usage.input_tokens", json!(run.usage().0)),
        ("gen_ai.usage.output_tokens", json!(run.usage().1)),
        ("axed.run.root_id", run["id"].clone()),
        ("axed.run.depth", json!(0)),
        ("error.type", Value::Null),
    ] {
        assert_eq!(*span.of(key), value, "{key}");
    }
}

fn are_the_roots_turns(spans: &[Span], planner: &Span) {
    let turns: Vec<&Span> = spans
        .iter()
        .filter(|span| span.name == "chat planner")
        .collect();
    assert_eq!(turns.len(), 2);
    for (turn, at) in turns.iter().zip(1..) {
        assert_eq!(turn.parent, planner.id);
        assert_eq!(turn.kind, SpanKind::Client);
        assert!(!turn.failed);
        assert_eq!(*turn.of("axed.turn"), json!(at));
        assert_eq!(*turn.of("gen_ai.usage.input_tokens"), json!(10));
        assert_eq!(*turn.of("gen_ai.usage.output_tokens"), json!(5));
    }
    assert_eq!(
        *turns[0].of("gen_ai.response.finish_reasons"),
        json!(["tool_use"])
    );
}

/// Checks the span of the call and that of the child that it started.
fn is_below_its_call(spans: &[Span], planner: &Span, child: &Run<'_>) {
    let name = child["agent"].as_str().expect("a name");
    let call = &child["tool_call_id"];
    let tool = one(
        spans,
        "execute_tool call_agent",
        "gen_ai.tool.call.id",
        call,
    );
    assert_eq!(tool.parent, planner.id);
    assert_eq!(tool.kind, SpanKind::Internal);
    assert_eq!(*tool.of("gen_ai.operation.name"), json!("execute_tool"));
    assert_eq!(*tool.of("gen_ai.tool.name"), json!("call_agent"));
    assert_eq!(tool.failed, name == "broken");
    let invoked = format!("invoke_agent {name}");
    let invoked = one(spans, &invoked, "axed.run.id", &child["id"]);
    assert_eq!(invoked.parent, tool.id);
    assert_eq!(invoked.failed, name == "broken");
    assert_eq!(*invoked.of("axed.run.depth"), json!(1));
    assert!(tool.to >= invoked.from && invoked.to >= invoked.from);
}

/// Checks the two requests of `reader`, the first of which failed.
fn show_the_failed_request(spans: &[Span]) {
    let reads: Vec<&Span> = spans
        .iter()
        .filter(|span| span.name == "chat reader")
        .collect();
    let [refused, read] = reads[..] else {
        panic!("{reads:#?}")
    };
    assert!(refused.failed && !read.failed);
    assert_eq!(refused.parent, read.parent);
    assert_eq!(*refused.of("error.type"), json!("server"));
    assert_eq!(*refused.of("gen_ai.usage.input_tokens"), Value::Null);
    for (key, value) in [
        ("gen_ai.request.model", json!("reader")),
        ("gen_ai.response.model", json!("real-1")),
        ("gen_ai.usage.input_tokens", json!(10)),
        ("gen_ai.usage.output_tokens", json!(3)),
        ("gen_ai.usage.cache_read.input_tokens", json!(2)),
        ("gen_ai.usage.cache_creation.input_tokens", json!(1)),
    ] {
        assert_eq!(*read.of(key), value, "{key}");
    }
}

/// Checks that every provider request has the trace context of its span.
fn have_the_context_of_their_spans<'r>(requests: impl Iterator<Item = &'r str>, spans: &[Span]) {
    let mut sent: Vec<String> = requests.map(str::to_owned).collect();
    let mut chats: Vec<String> = spans
        .iter()
        .filter(|span| span.kind == SpanKind::Client)
        .map(|span| format!("00-{}-{}-01", span.trace, span.id))
        .collect();
    sent.sort();
    chats.sort();
    assert_eq!(sent, chats);
}

#[tokio::test]
async fn a_tree_is_exported_as_spans() {
    let collector = Collector::start().await;
    let app = family(&collector).spawn().await;
    script(&app);

    let run = app.run("planner", "secret go").await;

    assert_eq!(run.output(), "done");
    // Three runs, five requests, two calls.
    let spans = collector.spans(10).await;
    let children = run.children().await;
    let planner = one(&spans, "invoke_agent planner", "axed.run.id", &run["id"]);
    // Found by the run's id.
    let id = run.id().trim_start_matches("run_").replace('-', "");
    assert!(spans.iter().all(|span| span.trace == id));
    assert_eq!(planner.parent, "");
    assert_eq!(planner.kind, SpanKind::Internal);
    assert!(!planner.failed);
    has_the_runs_attributes(planner, &run);
    are_the_roots_turns(&spans, planner);
    for child in &children {
        is_below_its_call(&spans, planner, child);
    }
    show_the_failed_request(&spans);
    let broken = one(&spans, "chat broken", "error.type", &json!("bad_request"));
    assert!(broken.failed);
    let why = &children[1]["error"]["code"];
    one(&spans, "invoke_agent broken", "error.type", why);

    let sent = app.provider.requests();
    let sent = sent.iter().map(|request| &request.headers["traceparent"]);
    have_the_context_of_their_spans(
        sent.map(|header| header.to_str().expect("a header")),
        &spans,
    );

    // No content and no key.
    let all = format!("{spans:?}");
    assert!(!all.contains("secret") && !all.contains("key-of"), "{all}");
}

#[tokio::test]
async fn content_is_exported_only_if_configured() {
    let collector = Collector::start().await;
    let app = family(&collector)
        .config("trace_content = true")
        .spawn()
        .await;
    script(&app);

    let run = app.run("planner", "secret go").await;

    let spans = collector.spans(10).await;
    let planner = one(&spans, "invoke_agent planner", "axed.run.id", &run["id"]);
    let said = |span: &Span, key: &str| -> Value {
        let text = span.of(key).as_str().expect("a text");
        serde_json::from_str(text).expect("JSON")
    };
    let words = |role: &str, text: &str| json!([{"role": role, "parts": [{"type": "text", "content": text}]}]);
    assert_eq!(
        said(planner, "gen_ai.input.messages"),
        words("user", "secret go")
    );
    let ended = |mut output: Value, reason: &str| {
        output[0]["finish_reason"] = json!(reason);
        output
    };
    let done = ended(words("assistant", "done"), "stop");
    assert_eq!(said(planner, "gen_ai.output.messages"), done);
    let first = one(&spans, "chat planner", "axed.turn", &json!(1));
    let called = said(first, "gen_ai.output.messages");
    assert_eq!(called[0]["finish_reason"], "tool_call");
    let second = one(&spans, "chat planner", "axed.turn", &json!(2));
    let input = said(second, "gen_ai.input.messages");
    assert_eq!(input[0], words("user", "secret go")[0]);
    let sent_request = &input[1]["parts"][0];
    assert_eq!(sent_request["type"], "tool_call");
    assert_eq!(sent_request["arguments"]["task"], "secret task");
    assert_eq!(input[2]["parts"][0]["response"], "secret words");
    assert!(second.of("gen_ai.system_instructions").is_string());
    let call = &run.children().await[0]["tool_call_id"];
    let tool = one(
        &spans,
        "execute_tool call_agent",
        "gen_ai.tool.call.id",
        call,
    );
    assert_eq!(
        said(tool, "gen_ai.tool.call.arguments")["task"],
        "secret task"
    );
    assert_eq!(*tool.of("gen_ai.tool.call.result"), json!("secret words"));
}

/// As readers want it: one conversation for a session, and what was requested of the model.
#[tokio::test]
async fn spans_name_the_session_the_parameters_and_the_daemon() {
    let collector = Collector::start().await;
    let toml = "[params]\ntemperature = 0.5\ntop_p = 0.25\nmax_tokens = 77\nstop = [\"END\"]\nextra = { seed = 7 }";
    let app = TestApp::setup()
        .agent("solo", toml)
        .config(&collector.config())
        .environment(
            "OTEL_RESOURCE_ATTRIBUTES",
            "deployment.environment.name=test%20bed, service.name=agents,=x,junk",
        )
        .spawn()
        .await;
    app.provider.will("solo", [says("one").with_usage(5, 2)]);

    let run = app
        .run_with("solo", json!({"input": "go", "session": "talk"}))
        .await;

    let spans = collector.spans(2).await;
    for name in ["chat solo", "invoke_agent solo"] {
        let span = one(&spans, name, "axed.run.id", &run["id"]);
        for (key, value) in [
            ("gen_ai.conversation.id", json!("talk")),
            ("gen_ai.request.temperature", json!(0.5)),
            ("gen_ai.request.top_p", json!(0.25)),
            ("gen_ai.request.max_tokens", json!(77)),
            ("gen_ai.request.stop_sequences", json!(["END"])),
            ("gen_ai.request.seed", json!(7)),
            ("gen_ai.output.type", json!("text")),
            ("gen_ai.usage.cache_read.input_tokens", json!(0)),
        ] {
            assert_eq!(*span.of(key), value, "{name} {key}");
        }
    }
    let reported = collector.until("a resource", |it| !it.resources.is_empty());
    let about = &reported.await.resources[0];
    assert_eq!(about["deployment.environment.name"], "test bed");
    assert_eq!(about["service.name"], "agents");
}

/// Starts an agent with these headers and waits for its end.
async fn run_with(app: &TestApp, agent: &str, headers: &[&str]) -> Value {
    let path = format!("/agents/{agent}/runs?wait=180");
    let mut request = app.request(reqwest::Method::POST, &path);
    for header in headers {
        request = request.header("traceparent", *header);
    }
    let got = send(request.json(&json!({"input": "x"}))).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()
}

#[tokio::test]
async fn a_clients_trace_is_continued() {
    let collector = Collector::start().await;
    let app = TestApp::setup()
        .agent("solo", "")
        .config(&collector.config())
        .config("trace_sampling = 0.0")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let last = || {
        let seen = app.provider.requests();
        let header = seen.last().expect("a request").headers.get("traceparent");
        header.map(|value| value.to_str().expect("text").to_owned())
    };

    // It wants its spans kept, whatever our share of our own traces is.
    run_with(&app, "solo", &[CALLER]).await;
    let spans = collector.spans(2).await;
    let run = spans.iter().find(|span| span.name == "invoke_agent solo");
    let run = run.expect("the run's span");
    assert_eq!(run.trace, &CALLER[3..35]);
    assert_eq!(run.parent, &CALLER[36..52]);
    let chat = one(&spans, "chat solo", "axed.turn", &json!(1));
    assert_eq!(last(), Some(format!("00-{}-{}-01", run.trace, chat.id)));

    // An unsampled trace is forwarded unchanged; an invalid one is ignored.
    let unkept = CALLER.replace("-01", "-00");
    run_with(&app, "solo", &[&unkept]).await;
    assert_eq!(last(), Some(unkept));
    run_with(&app, "solo", &["00-junk"]).await;
    assert_eq!(last(), None);
    run_with(&app, "solo", &[CALLER, CALLER]).await;
    assert_eq!(last(), None);
    run_with(&app, "solo", &[]).await;
    assert_eq!(last(), None);
    // None of those was exported: the next span is the next one.
    run_with(&app, "solo", &[CALLER]).await;
    collector.spans(4).await;
}

#[tokio::test]
async fn every_wire_forwards_a_trace_also_without_a_collector() {
    let mut setup = TestApp::setup();
    for wire in Wire::ALL {
        let model = format!("model = \"{0}/{0}\"", wire.name());
        setup = setup.agent(wire.name(), &model);
    }
    let app = setup.spawn().await;
    for wire in Wire::ALL {
        app.provider.will(wire.name(), [says("done"), says("done")]);
        run_with(&app, wire.name(), &[CALLER]).await;
        run_with(&app, wire.name(), &[]).await;
    }

    let seen = app.provider.requests();
    let reported: Vec<Option<&str>> = seen
        .iter()
        .map(|seen| Some(seen.headers.get("traceparent")?.to_str().expect("text")))
        .collect();
    assert_eq!(reported, [Some(CALLER), None].repeat(Wire::ALL.len()));
}

#[tokio::test]
async fn a_resumed_run_stays_in_its_trace() {
    let collector = Collector::start().await;
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .config(&collector.config())
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [hangs(), says("read")]);
    let run = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("reader", 1).await;
    // The first turn was exported by the process that ran it.
    collector.spans(1).await;
    app.crash_and_restart().await;

    let run = app.find(&run).await.wait_for_end().await;

    assert_eq!(run.output(), "done");
    let spans = collector.spans(6).await;
    assert!(spans.iter().all(|span| span.trace == spans[0].trace));
    // No parent is missing, but the root's.
    let ids: Vec<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    let alone: Vec<&str> = spans
        .iter()
        .filter(|span| !ids.contains(&span.parent.as_str()))
        .map(|span| span.name.as_str())
        .collect();
    assert_eq!(alone, ["invoke_agent planner"]);
    let planner = one(&spans, "invoke_agent planner", "axed.run.id", &run["id"]);
    assert_eq!(*planner.of("axed.run.attempt"), json!(2));
    let first = one(&spans, "chat planner", "axed.turn", &json!(1));
    assert_eq!(first.parent, planner.id);
    assert!(planner.from <= first.from && first.to <= planner.to);
}

#[tokio::test]
async fn cancelled_and_stopped_runs_export_their_spans() {
    let collector = Collector::start().await;
    let mut app = TestApp::setup()
        .agent("slow", "")
        .environment("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url)
        .environment("OTEL_EXPORTER_OTLP_HEADERS", "x-token=a%20token")
        .environment("OTEL_SERVICE_NAME", "agents")
        .spawn()
        .await;
    app.provider.will("slow", [hangs()]);
    let run = app.start("slow", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;
    run.cancel("enough").await;
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());

    // The process has exited, so its spans are exported.
    let reported = collector.reported.borrow().clone();
    assert_eq!(reported.spans.len(), 2, "{reported:#?}");
    for span in &reported.spans {
        assert!(span.failed);
        assert_eq!(*span.of("error.type"), json!("cancelled"));
    }
    assert_eq!(reported.headers[0]["x-token"], "a token");
    assert_eq!(
        reported.headers[0]["content-type"],
        "application/x-protobuf"
    );
    assert_eq!(reported.services, ["agents"]);
}

#[tokio::test]
async fn an_unreachable_collector_only_logs_a_warning() {
    let (_socket, address) = refusing_address();
    let mut app = TestApp::setup()
        .agent("solo", "")
        .config(&format!(
            "[telemetry]\notlp_endpoint = \"http://{address}\""
        ))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));

    app.run("solo", "go").await;
    app.daemon.wait_for_log("Traces cannot be sent").await;
    for _ in 0..20 {
        assert_eq!(app.run("solo", "go").await.output(), "done");
    }
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
    let log = app.daemon.log();
    assert_eq!(log.matches("Traces cannot be sent").count(), 1, "{log}");
}

#[tokio::test]
async fn a_collector_that_fails_temporarily_gets_the_spans_later() {
    let collector = Collector::start().await;
    collector
        .reported
        .send_modify(|reported| reported.refusals = 1);
    let app = TestApp::setup()
        .agent("solo", "")
        .config(&collector.config())
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);

    app.run("solo", "go").await;

    collector.spans(2).await;
    assert_eq!(collector.reported.borrow().refused, 1);
    app.daemon.wait_for_log("Traces are sent again").await;
}

#[tokio::test]
async fn an_invalid_address_is_named() {
    let home = tempfile::tempdir().expect("a directory");
    for (config, environment, says) in [
        (
            "[telemetry]\notlp_endpoint = \"localhost:4317\"",
            "",
            "axed.toml:2:1: telemetry.otlp_endpoint must be a URL such as http://localhost:4318",
        ),
        (
            "",
            "http://me:secret@collector",
            "OTEL_EXPORTER_OTLP_ENDPOINT: it must not hold a user or password",
        ),
        (
            "[telemetry]\ntrace_sampling = 1.5",
            "",
            "telemetry.trace_sampling cannot exceed 1",
        ),
        (
            "[telemetry]\notlp_endpoint = \"http://a\"\notlp_headers = { \"a b\" = \"secret\" }",
            "",
            "telemetry.otlp_headers.a b is not a header's name",
        ),
    ] {
        std::fs::write(home.path().join("axed.toml"), config).expect("a file");
        let mut command = axed_command(
            home.path(),
            &["serve", "--config", "axed.toml", "--listen", "127.0.0.1:0"],
        );
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", environment);
        let ended = within_timeout("the refusal", command.output())
            .await
            .expect("axed");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{said}");
        assert!(said.contains(says) && !said.contains("secret"), "{said}");
    }
    // Switched off by the environment.
    std::fs::write(home.path().join("axed.toml"), "").expect("a file");
    let mut command = axed_command(
        home.path(),
        &["serve", "--config", "axed.toml", "--listen", "127.0.0.1:0"],
    );
    command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        .env("OTEL_SDK_DISABLED", "true");
    Daemon::start(command).await;
}
