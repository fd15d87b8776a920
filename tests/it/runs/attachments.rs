//! Pictures and files of requests: the model's request, the record, and errors.

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::attachments::{PDF, PNG, base64, picture_part, png_with_suffix};
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, says};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::webhook_receiver::WebhookReceiver;
use crate::support::within_timeout;
use reqwest::Method;
use serde_json::{Value, json};
use std::fs;

/// A question about a picture.
fn about(data: &[u8], question: &str) -> Value {
    json!({"input": [{"type": "text", "text": question}, picture_part(data)]})
}

pub async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

/// The pictures and files of a request on Anthropic's wire, as Base64.
pub fn shown(seen: &RecordedRequest) -> Vec<String> {
    let contents = seen.messages().iter().map(|message| &message["content"]);
    let blocks = contents.filter_map(Value::as_array).flatten();
    let data = blocks.filter_map(|block| block["source"]["data"].as_str());
    data.map(str::to_owned).collect()
}

/// How many rows a table of the daemon's database has.
fn rows(app: &TestApp, table: &str) -> i64 {
    app.database().count(table)
}

#[tokio::test]
async fn a_picture_reaches_the_model_and_its_bytes_appear_nowhere_else() {
    let receiver = WebhookReceiver::start().await;
    let app = TestApp::setup()
        .agent("solo", "")
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"")
        .environment("HOOK_SECRET", "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0")
        .spawn()
        .await;
    app.provider.will("solo", [says("a grey pixel")]);
    let mut body = about(PNG, "What is this?");
    let file = json!({"type": "file", "name": "a.pdf", "media_type": "application/pdf", "data": base64(PDF)});
    body["input"].as_array_mut().expect("parts").push(file);
    body["context"] = json!("Be brief.");
    body["webhook"] = json!({"url": receiver.url("/hook"), "events": ["run.completed"]});

    let run = app.run_with("solo", body.clone()).await;

    assert_eq!(run.output(), "a grey pixel");
    let seen = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(shown(&seen), [base64(PNG), base64(PDF)]);
    assert_eq!(seen.user_messages(), ["What is this?Context:\nBe brief."]);
    let record = app.get(&format!("/runs/{}", run.id())).await;
    let parts = &record.json()["input"];
    assert_eq!(parts[0], json!({"type": "text", "text": "What is this?"}));
    assert_eq!(
        (
            &parts[1]["type"],
            &parts[1]["media_type"],
            &parts[1]["bytes"]
        ),
        (&json!("image"), &json!("image/png"), &json!(PNG.len()))
    );
    assert_eq!(parts[1]["sha256"].as_str().map(str::len), Some(64));
    assert_eq!(
        (&parts[2]["name"], &parts[2]["bytes"]),
        (&json!("a.pdf"), &json!(PDF.len()))
    );
    let messages = run.messages().await;
    assert_eq!(messages["data"][0]["content"][1], parts[1]);
    let delivery = receiver.wait_for_messages(1).await.remove(0);
    let events = app.get(&format!("/runs/{}/events", run.id())).await;
    let dry = app.post("/agents/solo/dry-run", &body).await;
    assert_eq!(dry.json()["message"][1], parts[1]);
    let list = app.get("/runs").await;
    for text in [
        record.text,
        messages.to_string(),
        delivery.json().to_string(),
        events.text,
        dry.text,
        list.text,
    ] {
        for data in [PNG, PDF] {
            assert!(!text.contains(&base64(data)), "{text}");
        }
    }
}

#[tokio::test]
async fn a_session_sends_its_pictures_again() {
    let app = solo().await;
    app.provider
        .will("solo", [says("one"), says("two"), says("three")]);
    let mut first = about(PNG, "What is this?");
    first["session"] = json!("talk");
    app.run_with("solo", first).await;
    let mut second = about(&png_with_suffix("b"), "And this?");
    second["session"] = json!("talk");
    app.run_with("solo", second).await;
    let third = app
        .run_with("solo", json!({"input": "Compare them.", "session": "talk"}))
        .await;

    assert_eq!(third.output(), "three");
    let (one, two) = (
        app.provider.wait_for_request("solo", 1).await,
        app.provider.wait_for_request("solo", 2).await,
    );
    let last = app.provider.wait_for_request("solo", 3).await;
    assert_eq!(shown(&last), [base64(PNG), base64(&png_with_suffix("b"))]);
    // Byte-equal but for the marks, so that services read it from their cache.
    let unmarked =
        |message: String| message.replace(r#","cache_control":{"type":"ephemeral"}"#, "");
    assert_eq!(
        unmarked(last.messages()[0].to_string()),
        unmarked(one.messages()[0].to_string())
    );
    assert_eq!(
        unmarked(last.messages()[2].to_string()),
        unmarked(two.messages()[2].to_string())
    );

    // The last run's record has them by itself: those before it may go.
    assert_eq!(
        (rows(&app, "attachments"), rows(&app, "attachment_uses")),
        (2, 5)
    );
    let runs = app.get("/sessions/talk").await.json();
    let ids: Vec<&str> = runs["data"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|run| run["id"].as_str())
        .collect();
    for id in ids.iter().filter(|id| **id != third.id()) {
        assert_eq!(app.delete(&format!("/runs/{id}")).await.status, 204);
    }
    app.provider.will("solo", [says("four")]);
    app.run_with("solo", json!({"input": "Again.", "session": "talk"}))
        .await;
    assert_eq!(
        shown(&*app.provider.wait_for_request("solo", 4).await).len(),
        2
    );
}

#[tokio::test]
async fn attachments_are_sent_from_the_record_after_a_kill() {
    let mut app = TestApp::setup()
        .agent("solo", "")
        .config("[runs]\nmax_running = 1")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .always("solo", move |_| says("done").after_gate(&gate));
    let running = app
        .start_with("solo", about(PNG, "What is this?"))
        .await
        .id()
        .to_owned();
    let queued = app
        .start_with("solo", about(&png_with_suffix("b"), "And this?"))
        .await;
    assert_eq!(queued.status(), "queued");
    let queued = queued.id().to_owned();
    app.provider.wait_for_concurrency("solo", 1).await;
    app.provider.always("solo", |_| says("done"));

    app.crash_and_restart().await;

    assert_eq!(
        app.find(&running).await.wait_for_end().await.output(),
        "done"
    );
    assert_eq!(
        app.find(&queued).await.wait_for_end().await.output(),
        "done"
    );
    let seen = app.provider.requests_for("solo");
    let all: Vec<_> = seen.iter().map(|seen| shown(seen)).collect();
    assert_eq!(
        all,
        [
            [base64(PNG)],
            [base64(PNG)],
            [base64(&png_with_suffix("b"))]
        ]
    );
}

#[tokio::test]
async fn bytes_are_stored_once_and_deleted_with_their_last_run() {
    let app = solo().await;
    app.provider.always("solo", |_| says("done"));
    let first = app.run_with("solo", about(PNG, "a")).await;
    let mut twice = about(PNG, "b");
    twice["input"]
        .as_array_mut()
        .expect("parts")
        .push(picture_part(PNG));
    let second = app.run_with("solo", twice).await;
    app.run("solo", "without any").await;
    assert_eq!(
        (rows(&app, "attachments"), rows(&app, "attachment_uses")),
        (1, 2)
    );

    assert_eq!(
        app.delete(&format!("/runs/{}", first.id())).await.status,
        204
    );
    assert_eq!(
        (rows(&app, "attachments"), rows(&app, "attachment_uses")),
        (1, 1)
    );
    assert_eq!(
        app.delete(&format!("/runs/{}", second.id())).await.status,
        204
    );
    assert_eq!(
        (rows(&app, "attachments"), rows(&app, "attachment_uses")),
        (0, 0)
    );
}

#[tokio::test]
async fn earlier_messages_may_have_pictures() {
    let app = solo().await;
    app.provider.will("solo", [says("done")]);
    let body = json!({"input": "Go on.", "messages": [
        {"role": "user", "content": [picture_part(PNG)]},
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "shoot", "arguments": {}}]},
        {"role": "tool", "tool_results": [
            {"call_id": "c", "content": [{"type": "text", "text": "shot"}, picture_part(&png_with_suffix("b"))]},
        ]},
        {"role": "assistant", "content": "I see."},
    ]});
    let run = app.run_with("solo", body).await;
    assert_eq!(run.output(), "done");
    // The agent has no tools, so that its wire takes no results: they are the user's.
    let seen = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(shown(&seen), [base64(PNG), base64(&png_with_suffix("b"))]);
    let messages = run.messages().await;
    let result = &messages["data"][2]["tool_results"][0];
    assert_eq!(result["content"], "shot");
    assert_eq!(result["attachments"][0]["media_type"], "image/png");
}

/// A picture of this many bytes.
fn picture_of(bytes: usize) -> Value {
    picture_part(&png_with_suffix(&"x".repeat(bytes - PNG.len())))
}

fn input(parts: Value) -> Value {
    json!({"input": parts})
}

/// The bytes of a GIF as a part with this type.
fn gif(media_type: &str) -> Value {
    json!({"type": "image", "media_type": media_type, "data": base64(b"GIF89a...")})
}

/// Requests above the limits, with the field and the limit that the error names.
fn oversized() -> Vec<(Value, &'static str, &'static str)> {
    vec![
        (
            input(json!([picture_of(1001)])),
            "/input/0/data",
            "limits.attachment_bytes",
        ),
        (
            input(json!([picture_of(760), picture_of(760)])),
            "",
            "limits.conversation_bytes",
        ),
        (
            input(json!([picture_of(90), picture_of(90), picture_of(90)])),
            "/input/2/data",
            "limits.attachments",
        ),
    ]
}

/// Invalid requests, with the field that the error points to and a part of its text.
fn invalid() -> Vec<(Value, &'static str, &'static str)> {
    let mut odd = picture_part(PNG);
    odd["data"] = json!("not Base64!");
    vec![
        (
            input(json!([gif("image/svg+xml")])),
            "/input/0/media_type",
            "image/webp or image/gif",
        ),
        (
            input(json!([gif("application/pdf")])),
            "/input/0/media_type",
            "a part of type image is",
        ),
        (input(json!([odd])), "/input/0/data", "is not Base64"),
        (
            input(json!([{"type": "image", "media_type": "image/png", "data": base64(b"hello")}])),
            "/input/0/media_type",
            "the type of the bytes is not supported",
        ),
        (
            input(json!([{"type": "image", "media_type": "image/png"}])),
            "/input/0/data",
            "url is required",
        ),
        (
            input(json!([{"type": "file", "media_type": "text/csv", "data": ""}])),
            "/input/0/media_type",
            "application/pdf",
        ),
        (
            input(json!([{"type": "text", "data": ""}])),
            "/input/0/data",
            "is not for a part of type text",
        ),
        (input(json!([])), "/input", "at least one part"),
        (input(json!([{"type": "video"}])), "/input/0/type", "video"),
        (
            input(json!([{"type": "text", "text": "a", "colour": 1}])),
            "/input/0/colour",
            "unknown field",
        ),
        (
            input(json!(1)),
            "/input",
            "a text, a list of parts, or an object",
        ),
        (
            json!({"messages": [{"role": "user", "content": [gif("image/svg+xml")]}]}),
            "/messages/0/content/0/media_type",
            "image/webp or image/gif",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [picture_part(PNG)]}]}),
            "/messages/1",
            "is a text",
        ),
    ]
}

#[tokio::test]
async fn oversized_and_invalid_attachments_are_refused_by_field() {
    let app = TestApp::setup()
        .agent("solo", "")
        .server("max_body = 600")
        .config("[limits]\nattachments = 2\nattachment_bytes = 1000\nconversation_bytes = 1500")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let oversized = oversized().into_iter().map(|case| (413, case));
    let invalid = invalid().into_iter().map(|case| (422, case));
    for (status, (body, pointer, why)) in oversized.chain(invalid) {
        let refused = app.post("/agents/solo/runs", &body).await;
        let problem = refused.problem(status);
        assert_eq!(refused.json()["errors"][0]["pointer"], pointer, "{problem}");
        assert!(problem.contains(why), "{problem}");
    }
    // What is not the data of pictures is held to the usual bound, however it comes.
    let text = app
        .post("/agents/solo/runs", &input(json!("x".repeat(601))))
        .await;
    assert!(text.problem(413).contains("server.max_body"));
    let endless = |start: &str| {
        let start = start.to_owned().into_bytes();
        let more = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1000]));
        let start = futures_util::stream::once(async move { Ok(start) });
        let body = futures_util::StreamExt::chain(start, more);
        app.request(Method::POST, "/agents/solo/runs")
            .header("content-type", "application/json")
            .body(reqwest::Body::wrap_stream(body))
    };
    for start in ["{\"input\": \"", "{\"input\": [{\"data\": \""] {
        let refused: ApiResponse = send(endless(start)).await;
        refused.problem(413);
    }
    assert_eq!(app.provider.requests().len(), 0);
    // A body above the usual bound is taken for its pictures' sake.
    let run = app
        .run_with(
            "solo",
            input(json!([{"type": "text", "text": "both"}, picture_of(990), picture_of(500)])),
        )
        .await;
    assert_eq!(run.output(), "done");
    assert_eq!(
        shown(&*app.provider.wait_for_request("solo", 1).await).len(),
        2
    );
}

/// A field of a form: its name with more headers, and its content.
pub type Field<'a> = (&'a str, &'a [u8]);

/// Fields with the status and a part of the error.
pub type Case<'a> = (&'a [Field<'a>], u16, &'a str);

#[tokio::test]
async fn the_command_line_sends_files() {
    let app = solo().await;
    app.provider.always("solo", |_| says("a grey pixel"));
    fs::write(app.path("photo.png"), PNG).expect("a picture");
    fs::write(app.path("notes.txt"), "some notes").expect("a text");
    let run = async |more: &[&str]| {
        let arguments = ["run", "solo", "What is this?", "--file", "photo.png"];
        let mut command = axed_command(&app.path("."), &[&arguments[..], more].concat());
        let output = within_timeout("the command's end", command.output()).await;
        output.expect("run axed")
    };
    for more in [&["--server", app.daemon.url.as_str()][..], &[]] {
        let output = run(more).await;
        let said = String::from_utf8_lossy(&output.stdout);
        let reported = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, "a grey pixel\n", "{reported}");
    }
    for number in 1..=2 {
        assert_eq!(
            shown(&*app.provider.wait_for_request("solo", number).await),
            [base64(PNG)]
        );
    }
    let refused = run(&["--file", "notes.txt"]).await;
    assert_eq!(refused.status.code(), Some(2));
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(
        why.contains("notes.txt is not of a supported type"),
        "{why}"
    );
}

#[tokio::test]
async fn read_file_shows_a_picture() {
    let app = TestApp::setup()
        .agent("solo", "workdir = \"work\"\ntools = [\"read_file\"]")
        .config("[limits]\nattachment_bytes = 1000")
        .file("work/a.txt", "text")
        .spawn()
        .await;
    fs::write(app.path("work/photo.png"), PNG).expect("a picture");
    let large = png_with_suffix(&"x".repeat(1000));
    fs::write(app.path("work/large.png"), &large).expect("a picture");
    fs::write(app.path("work/zeros"), [0; 9]).expect("a file");
    let read = |path: &str| ("read_file", json!({"path": path}));
    app.provider.will(
        "solo",
        [
            calls([read("photo.png"), read("large.png"), read("zeros")]),
            says("done"),
        ],
    );
    let run = app.run("solo", "Look.").await;
    assert_eq!(run.output(), "done");
    let seen = app.provider.wait_for_request("solo", 2).await;
    let results = &seen.messages()[2]["content"];
    assert_eq!(
        results[0]["content"][0]["text"],
        format!("photo.png: image/png, {} bytes", PNG.len())
    );
    assert_eq!(results[0]["content"][1]["source"]["data"], base64(PNG));
    assert_eq!(seen.tool_result_errors(), [false, true, true]);
    assert!(seen.tool_results()[1].contains("at most 1000 are shown"));
    assert!(seen.tool_results()[2].contains("binary file"));
    // The record holds it once, and shows what it is known by.
    assert_eq!(rows(&app, "attachments"), 1);
    let result = &run.messages().await["data"][2]["tool_results"][0];
    assert_eq!(result["attachments"][0]["bytes"], PNG.len());
}

#[tokio::test]
async fn an_idempotency_key_distinguishes_pictures() {
    let app = solo().await;
    app.provider
        .will("solo", [says("done"), fails(500, "requested twice")]);
    let post = |body: Value| {
        let request = app.request(Method::POST, "/agents/solo/runs?wait=180");
        send(request.header("idempotency-key", "k").json(&body))
    };
    let first = post(about(PNG, "What is this?")).await;
    let again = post(about(PNG, "What is this?")).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(first.json()["id"], again.json()["id"]);
    post(about(&png_with_suffix("b"), "What is this?"))
        .await
        .problem(422);
}

#[tokio::test]
async fn a_model_without_pictures_gets_a_text_and_the_run_a_warning() {
    let app = TestApp::setup()
        .agent("solo", "")
        // The picture does not count: it would not fit the window.
        .config("[providers.anthropic.models.solo]\nimages = false\ncontext_window = 1000")
        .spawn()
        .await;
    app.provider.will("solo", [says("I cannot see it.")]);
    let run = app.run_with("solo", about(PNG, "What is this?")).await;
    let seen = app.provider.wait_for_request("solo", 1).await;
    assert!(seen.user_messages()[0].contains("left out: this model takes no images"));
    let events = run.events().await;
    let warning = events.iter().find(|event| event.kind() == "model.warning");
    let message = warning.expect("a warning")["message"].clone();
    assert!(
        message
            .as_str()
            .is_some_and(|it| it.contains("takes no images")),
        "{message}"
    );
}

#[tokio::test]
async fn a_provider_error_about_a_file_names_the_setting() {
    let app = TestApp::setup()
        .agent("solo", "model = \"openai/solo\"")
        .spawn()
        .await;
    app.provider
        .will("solo", [fails(400, "unsupported type"), fails(400, "no")]);
    let file = json!({"type": "file", "name": "a.pdf", "media_type": "application/pdf", "data": base64(PDF)});

    let failed = app.run_with("solo", json!({"input": [file]})).await;

    assert_eq!(
        failed.failure(),
        (
            "provider_bad_request",
            "bad_request: unsupported type (the request has PDF files; if the model takes none, set pdf = false in \
             [providers.openai.models.\"solo\"]) (openai/solo)"
        )
    );
    let failed = app.run("solo", "no file").await;
    assert_eq!(failed.failure().1, "bad_request: no (openai/solo)");
}
