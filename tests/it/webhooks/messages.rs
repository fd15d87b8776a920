//! Webhooks: receivers, messages, signatures, retries, and what no receiver can do to the daemon.

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::provider::answer::{delegates, fails, hangs, says};
use crate::support::webhook_receiver::{ReceiverReply, WebhookReceiver};
use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// `whsec_` and the base64 of 32 bytes.
pub const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

const OTHER_SECRET: &str = "whsec_/////////////////////////////////////////w==";

/// A daemon that may deliver to a receiver on this machine, and retries at once.
pub fn daemon() -> Setup {
    TestApp::setup()
        .environment("HOOK_SECRET", SECRET)
        .environment("OTHER_SECRET", OTHER_SECRET)
        .config(
            "[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"\nfirst_retry_ms = 1",
        )
}

pub fn webhook(url: &str) -> String {
    format!("[webhook]\nurl = \"{url}\"")
}

pub async fn deliveries(app: &TestApp, run: &str) -> Vec<Value> {
    let got = app.get(&format!("/runs/{run}/deliveries")).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()["data"].as_array().expect("data").clone()
}

/// Waits until all deliveries of the run have this status.
pub async fn settled(app: &TestApp, run: &str, status: &str) -> Vec<Value> {
    let path = format!("/runs/{run}/deliveries");
    let wish = |got: &ApiResponse| {
        let json = got.json();
        let data = json["data"].as_array().expect("data");
        !data.is_empty() && data.iter().all(|delivery| delivery["status"] == status)
    };
    let got = app.get_until(&path, wish).await;
    got.json()["data"].as_array().expect("data").clone()
}

#[tokio::test]
async fn the_end_of_a_run_is_delivered_signed_without_texts() {
    let receiver = WebhookReceiver::start().await;
    let app = daemon()
        .agent(
            "planner",
            &format!(
                "sub_agents = [\"reader\"]\n{}",
                webhook(&receiver.url("/hook?token=hush"))
            ),
        )
        .agent("reader", &webhook(&receiver.url("/reader")))
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("the plan")]);
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "a question").await;

    let reported = &receiver.wait_for_messages(1).await[0];
    assert!(reported.is_signed_by(SECRET) && !reported.is_signed_by(OTHER_SECRET));
    assert_eq!(reported.uri, "/hook?token=hush");
    assert_eq!(reported.header("content-type"), "application/json");
    let body = reported.json();
    assert_eq!(body["type"], "run.completed");
    assert_eq!(body["timestamp"], run["finished_at"]);
    let data = &body["data"];
    assert_eq!(data["id"], run.id());
    assert_eq!(data["agent"], "planner");
    assert_eq!(data["status"], "completed");
    assert_eq!(data["error"], Value::Null);
    for key in ["input_tokens", "output_tokens", "tool_calls", "tree"] {
        assert_eq!(data[key], run[key], "{key}");
    }
    for text in ["the plan", "a question"] {
        assert!(!body.to_string().contains(text), "{body}");
    }

    let listed = settled(&app, run.id(), "delivered").await;
    assert_eq!(listed.len(), 1);
    let id = listed[0]["id"].as_str().expect("an id");
    assert_eq!(reported.header("webhook-id"), id);
    assert_eq!(listed[0]["event"], "run.completed");
    assert_eq!(listed[0]["url"], receiver.url("/hook"));
    assert_eq!(listed[0]["next_attempt_at"], Value::Null);
    let attempts = listed[0]["attempts"].as_array().expect("attempts");
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0]["status"], 200);
    assert_eq!(attempts[0]["error"], Value::Null);
    // Only the root run sends webhooks.
    assert_eq!(receiver.messages().len(), 1);
    let child = run.children().await;
    assert!(deliveries(&app, child[0].id()).await.is_empty());

    let metrics = app.get("/metrics").await.text;
    let counted = "axed_webhook_deliveries_total{outcome=\"delivered\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
    let gone = app.delete(&format!("/runs/{}", run.id())).await;
    assert_eq!(gone.status, 204);
    let path = format!("/runs/{}/deliveries", run.id());
    app.get(&path).await.problem(404);
}

#[tokio::test]
async fn failures_and_cancels_are_delivered_without_their_messages() {
    let receiver = WebhookReceiver::start().await;
    let hook = webhook(&receiver.url("/"));
    let app = daemon()
        .agent("broken", &format!("{hook}\n[retry]\nmax_retries = 0"))
        .agent("slow", &hook)
        .spawn()
        .await;
    app.provider.will("broken", [fails(400, "words of it")]);
    app.provider.will("slow", [hangs()]);
    let failed = app.run("broken", "go").await;
    let reported = receiver.wait_for_messages(1).await[0].json();
    assert_eq!(reported["type"], "run.failed");
    assert_eq!(reported["data"]["error"]["code"], failed.failure().0);
    assert!(!reported.to_string().contains("words of it"), "{reported}");

    let slow = app.start("slow", "go").await;
    app.provider.wait_for_request("slow", 1).await;
    slow.cancel("enough").await;
    let reported = receiver.wait_for_messages(2).await[1].json();
    assert_eq!(reported["type"], "run.cancelled");
    assert_eq!(reported["data"]["status"], "cancelled");
}

#[tokio::test]
async fn a_request_adds_a_receiver_with_its_events() {
    let (files, own) = (
        WebhookReceiver::start().await,
        WebhookReceiver::start().await,
    );
    let file = format!(
        "{}\nsecret_env = \"OTHER_SECRET\"\nevents = [\"run.started\"]",
        webhook(&files.url("/file"))
    );
    let app = daemon()
        .agent("solo", &file)
        .agent("plain", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("plain", |_| says("done"));

    let run = app.run("solo", "go").await;
    let reported = &files.wait_for_messages(1).await[0];
    assert!(reported.is_signed_by(OTHER_SECRET));
    assert_eq!(reported.json()["type"], "run.started");
    assert_eq!(reported.json()["data"]["status"], "running");
    settled(&app, run.id(), "delivered").await;

    // The file's receiver gets its events as before, and the request's those that it names.
    let body = json!({"input": "go", "webhook": {"url": own.url("/own")}});
    let run = app.run_with("solo", body).await;
    let reported = &own.wait_for_messages(1).await[0];
    assert!(reported.is_signed_by(OTHER_SECRET));
    assert_eq!(reported.json()["type"], "run.completed");
    assert_eq!(
        files.wait_for_messages(2).await[1].json()["type"],
        "run.started"
    );
    assert_eq!(settled(&app, run.id(), "delivered").await.len(), 2);

    let events = ["turn.completed", "run.completed", "run.queued"];
    let body = json!({"webhook": {"url": own.url("/plain"), "events": events}});
    let run = app.run_with("plain", body).await;
    let listed = settled(&app, run.id(), "delivered").await;
    let reported: Vec<_> = listed.iter().map(|it| it["event"].clone()).collect();
    assert_eq!(reported, ["run.queued", "turn.completed", "run.completed"]);
    let all = own.wait_for_messages(4).await;
    assert!(all[1..].iter().all(|it| it.is_signed_by(SECRET)));
    let ids: BTreeSet<_> = all.iter().map(|it| it.header("webhook-id")).collect();
    assert_eq!(ids.len(), 4);
    assert_eq!(files.messages().len(), 2);

    // A run whose agent and request name no receiver has no deliveries.
    let run = app.run("plain", "go").await;
    assert!(deliveries(&app, run.id()).await.is_empty());
}

/// Two keys with all rights, of which only Ada's has a secret for webhooks.
fn of_ada_and_bob(more: &str) -> Setup {
    let key = |name: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"admin\"]\n")
    };
    let (ada, bob) = (key("ada"), key("bob"));
    daemon().config(&format!(
        "{ada}webhook_secret_env = \"OTHER_SECRET\"\n{more}{bob}"
    ))
}

pub async fn as_key(
    app: &TestApp,
    key: &str,
    method: Method,
    path: &str,
    body: &Value,
) -> ApiResponse {
    send(app.request(method, path).bearer_auth(key).json(body)).await
}

#[tokio::test]
async fn a_keys_receiver_is_signed_with_its_own_secret() {
    let (operators, own) = (
        WebhookReceiver::start().await,
        WebhookReceiver::start().await,
    );
    let mut app = of_ada_and_bob("")
        .agent("solo", &webhook(&operators.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [hangs(), says("done")]);
    let body = json!({"webhook": {"url": own.url("/")}});
    let path = "/agents/solo/runs";
    let refused = as_key(&app, "bob", Method::POST, path, &body).await;
    let why = refused.problem(422);
    assert!(
        why.contains("webhook_secret_env in [auth.keys.bob]"),
        "{why}"
    );
    let accepted = as_key(&app, "ada", Method::POST, path, &body).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    app.provider.wait_for_request("solo", 1).await;

    // The process that resumes the run keeps both.
    app.crash_and_restart().await;

    let (to_operator, to_ada) = (
        operators.wait_for_messages(1).await,
        own.wait_for_messages(1).await,
    );
    assert!(to_operator[0].is_signed_by(SECRET) && !to_operator[0].is_signed_by(OTHER_SECRET));
    assert!(to_ada[0].is_signed_by(OTHER_SECRET) && !to_ada[0].is_signed_by(SECRET));
    assert_eq!(to_operator[0].json(), to_ada[0].json());
    assert_eq!((operators.messages().len(), own.messages().len()), (1, 1));
    // Without a webhook of its own a request needs no secret.
    app.provider.will("solo", [says("done")]);
    let accepted = as_key(&app, "bob", Method::POST, path, &json!({})).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    operators.wait_for_messages(2).await;
}

#[tokio::test]
async fn an_invalid_webhook_is_refused_by_its_field() {
    let app = daemon().agent("solo", "").spawn().await;
    for (webhook, pointer, words) in [
        (json!({}), "/webhook/url", "is required"),
        (json!({"url": "nonsense"}), "/webhook/url", "is not a URL"),
        (json!({"url": "ftp://a"}), "/webhook/url", "https"),
        (
            json!({"url": "http://example.com/?t=hush"}),
            "/webhook/url",
            "https",
        ),
        (
            json!({"url": "https://me:hush@example.com/"}),
            "/webhook/url",
            "password",
        ),
        (
            json!({"url": "https://10.0.0.1/?t=hush"}),
            "/webhook/url",
            "10.0.0.1",
        ),
        (
            json!({"url": "https://[::ffff:169.254.169.254]/"}),
            "/webhook/url",
            "allow_hosts",
        ),
        (
            json!({"url": "https://example.com", "events": ["run.completed", "run.finished"]}),
            "/webhook/events",
            "run.finished",
        ),
        (
            json!({"url": "https://example.com", "secret": "x"}),
            "/webhook/secret",
            "unknown",
        ),
        (json!("https://example.com"), "/webhook", "object"),
    ] {
        for path in ["/agents/solo/runs", "/agents/solo/dry-run"] {
            let got = app.post(path, &json!({"webhook": webhook})).await;
            got.problem(422);
            let error = &got.json()["errors"][0];
            assert_eq!(error["pointer"], pointer, "{webhook}: {}", got.text);
            let detail = error["detail"].as_str().expect("a text");
            assert!(detail.contains(words), "{webhook}: {detail}");
            assert!(!got.text.contains("hush"), "{}", got.text);
        }
    }
    assert!(app.provider.requests().is_empty());

    let unsigned = TestApp::setup().agent("solo", "").spawn().await;
    let body = json!({"webhook": {"url": "https://example.com"}});
    let got = unsigned.post("/agents/solo/runs", &body).await;
    assert!(got.problem(422).contains("secret_env"), "{}", got.text);
    assert_eq!(got.json()["errors"][0]["pointer"], "/webhook");
}

#[tokio::test]
async fn a_private_address_is_refused_in_every_spelling() {
    let receiver = WebhookReceiver::start().await;
    let port = receiver.address.port();
    let app = TestApp::setup()
        .environment("HOOK_SECRET", SECRET)
        .config("[webhooks]\nsecret_env = \"HOOK_SECRET\"")
        .agent("literal", &webhook(&format!("https://127.0.0.1:{port}/")))
        .agent(
            "mapped",
            &webhook(&format!("https://[::ffff:127.0.0.1]:{port}/")),
        )
        .agent("name", &webhook(&format!("https://localhost:{port}/")))
        .agent("plain", &webhook(&receiver.url("/?t=hush")))
        .spawn()
        .await;
    for agent in ["literal", "mapped", "name", "plain"] {
        app.provider.will(agent, [says("done")]);
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done");
        let path = format!("/runs/{}/deliveries", run.id());
        let tried = |got: &ApiResponse| !got.json()["data"][0]["attempts"][0].is_null();
        let got = app.get_until(&path, tried).await;
        let delivery = got.json()["data"][0].clone();
        assert_eq!(delivery["status"], "pending");
        assert!(delivery["next_attempt_at"].is_string());
        let error = delivery["attempts"][0]["error"].as_str().expect("a text");
        assert!(error.contains("[webhooks] allow_hosts"), "{agent}: {error}");
        assert!(!got.text.contains("hush"), "{}", got.text);
    }
    assert!(receiver.messages().is_empty());
    assert!(!app.daemon.log().contains("hush"));
}

#[tokio::test]
async fn the_secret_and_the_query_appear_in_no_response_and_no_log() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Status(500)]);
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/hook?token=hush")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;
    settled(&app, run.id(), "delivered").await;
    let id = run.id();
    for path in [
        format!("/runs/{id}"),
        format!("/runs/{id}/deliveries"),
        format!("/runs/{id}/events"),
        format!("/runs/{id}/messages"),
        "/agents/solo".to_owned(),
        "/metrics".to_owned(),
    ] {
        let got = app.get(&path).await;
        assert_eq!(got.status, 200, "{path}");
        for secret in ["hush", &SECRET["whsec_".len()..]] {
            assert!(!got.text.contains(secret), "{path}: {}", got.text);
        }
    }
    app.daemon.wait_for_log("failed, trying again").await;
    let log = app.daemon.log();
    assert!(!log.contains("hush") && !log.contains(&SECRET["whsec_".len()..]));
}
