//! Hostile clients and providers: each gets a clear error, and other runs continue.

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::{Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, raw, says};
use crate::support::provider::recorded_request::Wire;
use crate::support::within_timeout;

/// A run that is active during an attack, and must not be affected.
struct Bystander<'a> {
    app: &'a TestApp,
    id: String,
    gate: Gate,
}

impl<'a> Bystander<'a> {
    async fn start(app: &'a TestApp) -> Self {
        let gate = Gate::closed();
        app.provider
            .will("bystander", [says("untouched").after_gate(&gate)]);
        let id = app.start("bystander", "go").await.id().to_owned();
        app.provider.wait_for_concurrency("bystander", 1).await;
        Self { app, id, gate }
    }

    /// Lets it end as it should, and looks whether anything in the daemon broke.
    async fn ends_untouched(self) {
        self.gate.open();
        let run = self.app.find(&self.id).await.wait_for_end().await;
        assert_eq!(run.output(), "untouched");
        let log = self.app.daemon.log();
        assert!(!log.contains("panicked"), "{log}");
    }
}

fn setup() -> Setup {
    TestApp::setup().agent("solo", "").agent("bystander", "")
}

#[tokio::test]
async fn a_body_that_is_not_text() {
    let app = setup().spawn().await;
    let bystander = Bystander::start(&app).await;
    let post = |kind: &str, body: &'static [u8]| {
        app.request(Method::POST, "/agents/solo/runs")
            .header("content-type", kind)
            .body(body)
    };
    send(post("application/json", b"{\"input\": \"\xff\xfe\"}"))
        .await
        .problem(400);
    send(post("text/plain", b"caf\xe9")).await.problem(400);
    bystander.ends_untouched().await;
}

#[tokio::test]
async fn a_body_that_is_very_deep() {
    let app = setup().spawn().await;
    let bystander = Bystander::start(&app).await;
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    for body in [
        deep.clone(),
        format!("{{\"input\": {deep}}}"),
        format!("{{\"labels\": {deep}}}"),
        format!("{{\"response_format\": {{\"type\": \"json_schema\", \"schema\": {deep}}}}}"),
        "{\"input\":".repeat(10_000),
    ] {
        let request = app
            .request(Method::POST, "/agents/solo/runs")
            .header("content-type", "application/json")
            .body(body);
        let got = send(request).await;
        assert!([400, 422].contains(&got.status), "{}", got.text);
        got.problem(got.status);
    }
    bystander.ends_untouched().await;
}

#[tokio::test]
async fn too_many_and_too_long_labels() {
    let app = setup().spawn().await;
    let bystander = Bystander::start(&app).await;
    let many: Value = (0..100_000)
        .map(|n| (format!("k{n}"), json!("v")))
        .collect();
    for labels in [
        many,
        json!({"k": "v".repeat(257)}),
        json!({"k".repeat(65): "v"}),
        json!({"k": 7}),
    ] {
        app.post("/agents/solo/runs", &json!({"labels": labels}))
            .await
            .problem(422);
    }
    let most: Value = (0..64)
        .map(|n| (format!("k{n}"), json!("ä".repeat(256))))
        .collect();
    let got = app
        .post("/agents/solo/runs", &json!({"labels": most}))
        .await;
    assert_eq!(got.status, 202, "{}", got.text);
    bystander.ends_untouched().await;
}

#[tokio::test]
async fn a_header_of_a_mebibyte() {
    let app = setup().spawn().await;
    let bystander = Bystander::start(&app).await;
    let address = app.daemon.url.strip_prefix("http://").expect("a URL");
    let stream = TcpStream::connect(address).await.expect("connect");
    let (mut reading, mut writing) = stream.into_split();
    let request = format!(
        "GET /agents HTTP/1.1\r\nhost: axed\r\nx-long: {}\r\n\r\n",
        "a".repeat(1 << 20)
    );
    let mut head = [0; 12];
    let (_, read) = within_timeout("an answer to a long header", async {
        // The daemon may hang up before it has read everything: only its answer counts.
        tokio::join!(
            writing.write_all(request.as_bytes()),
            reading.read_exact(&mut head)
        )
    })
    .await;
    read.expect("an answer");
    assert_eq!(String::from_utf8_lossy(&head), "HTTP/1.1 431");
    bystander.ends_untouched().await;
}

#[tokio::test]
async fn names_with_path_traversal() {
    let app = setup()
        .file("secret.toml", "name = \"secret\"")
        .spawn()
        .await;
    let bystander = Bystander::start(&app).await;
    for name in [
        "solo%00",
        "%00",
        "..%2Fsecret",
        "%2e%2e%2fsecret",
        "solo.toml%00",
        "%2Fetc%2Fpasswd",
        "solo%5C..",
        "%C3%A4",
        "%FF",
        ".solo",
        &"a".repeat(65),
    ] {
        for path in [format!("/agents/{name}"), format!("/agents/{name}/memory")] {
            let got = app.get(&path).await;
            assert!([400, 404].contains(&got.status), "{path}: {}", got.text);
            got.problem(got.status);
        }
        let got = app.post(&format!("/agents/{name}/runs"), &json!({})).await;
        assert!([400, 404].contains(&got.status), "{name}: {}", got.text);
        let got = app.get(&format!("/runs/{name}")).await;
        assert!([400, 404].contains(&got.status), "{name}: {}", got.text);
    }
    bystander.ends_untouched().await;
}

/// Agents on every wire, streaming and not, by the same bounded provider.
fn on_every_wire() -> (Setup, Vec<String>) {
    let mut setup = setup();
    let mut agents = Vec::new();
    for wire in Wire::ALL {
        let kind = wire.name();
        setup = setup.config(&format!(
            "[providers.small-{kind}]\n{}\nbase_url = \"{{provider}}\"\napi_key = \"k\"\n\
             max_reply = 65536",
            wire.config_toml()
        ));
        for stream in [false, true] {
            let agent = format!("{kind}-{stream}");
            setup = setup.agent(
                &agent,
                &format!(
                    "model = \"small-{kind}/{agent}\"\nstream = {stream}\nsub_agents = [\"solo\"]\n\
                     [retry]\nmax_retries = 0"
                ),
            );
            agents.push(agent);
        }
    }
    (setup, agents)
}

/// Lets every wire give this answer, and returns the messages of the failures.
async fn failures(answer: ScriptedAnswer) -> Vec<String> {
    let (setup, agents) = on_every_wire();
    let app = setup.spawn().await;
    let bystander = Bystander::start(&app).await;
    let mut messages = Vec::new();
    for agent in agents {
        app.provider.will(&agent, [answer.clone()]);
        let run = app.run(&agent, "go").await;
        let (code, message) = run.failure();
        assert_eq!(code, "provider_server", "{agent}: {message}");
        assert!(message.len() < 2000, "{agent}: {message}");
        messages.push(message.to_owned());
    }
    bystander.ends_untouched().await;
    messages
}

#[tokio::test]
async fn a_provider_that_replies_with_a_web_page() {
    let page = "<!doctype html><html><body>Sign in to the hotel's network</body></html>";
    for message in failures(raw(200, "text/html", page)).await {
        assert!(message.starts_with("server: "), "{message}");
    }
}

#[tokio::test]
async fn a_provider_that_breaks_off() {
    for message in failures(says("this will not be finished").cut()).await {
        assert!(message.starts_with("server: "), "{message}");
    }
}

#[tokio::test]
async fn a_provider_with_an_endless_reply() {
    for message in failures(says("on").endless()).await {
        assert!(
            message.starts_with("server: response too large ("),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_provider_that_sends_an_endless_line() {
    for message in failures(raw(200, "text/event-stream", "data: {\"a").endless()).await {
        assert!(message.starts_with("server: "), "{message}");
    }
}

#[tokio::test]
async fn a_provider_that_sends_invalid_utf_8() {
    for message in failures(raw(
        200,
        "application/json",
        &b"data: \xff\xfe\n\n{\"\xff\"}"[..],
    ))
    .await
    {
        assert!(message.starts_with("server: "), "{message}");
    }
}

#[tokio::test]
async fn a_provider_that_sends_nothing() {
    for message in failures(raw(200, "application/json", "{}")).await {
        assert!(message.starts_with("server: "), "{message}");
    }
}

#[tokio::test]
async fn a_tool_call_with_a_name_of_ten_kilobytes() {
    let (setup, agents) = on_every_wire();
    let app = setup.spawn().await;
    let bystander = Bystander::start(&app).await;
    for agent in agents {
        app.provider.will(
            &agent,
            [calls([("x".repeat(10_000), json!({}))]), says("done")],
        );
        let run = app.run(&agent, "go").await;
        match run.status() {
            "completed" => {
                let reported = app
                    .provider
                    .wait_for_request(&agent, 2)
                    .await
                    .tool_results();
                assert!(
                    reported[0].starts_with("Unknown tool: \"x"),
                    "{}",
                    reported[0]
                );
            }
            _ => assert_eq!(run.failure().0, "provider_server"),
        }
    }
    bystander.ends_untouched().await;
}

#[tokio::test]
async fn a_tool_call_with_very_deep_arguments() {
    let (setup, agents) = on_every_wire();
    let app = setup.spawn().await;
    let bystander = Bystander::start(&app).await;
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    let call = format!(
        "{{\"id\":\"m\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"stop_reason\":\"tool_use\",\
         \"content\":[{{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"call_agent\",\
         \"input\":{{\"agent\":\"solo\",\"task\":{deep}}}}}],\"usage\":{{\"input_tokens\":1,\"output_tokens\":1}}}}"
    );
    let agent = agents.first().expect("an agent");
    app.provider
        .will(agent, [raw(200, "application/json", call), says("done")]);
    app.provider.always("solo", |_| says("read"));

    let run = app.run(agent, "go").await;

    assert!(["completed", "failed"].contains(&run.status()), "{run:?}");
    bystander.ends_untouched().await;
}
