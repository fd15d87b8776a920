//! What each kind of sender gets, and what strangers get.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};
use crate::support::run::Run;
use crate::triggers::{app_with_triggers, hex_mac, send_event, send_standard};

const ISSUE: &str = r#"{"type":"issue.opened","id":"evt_1","data":{"title":"It fails","number":7},"issue":{"title":"It fails"}}"#;

/// The run that an accepted event has started, at its end.
async fn started<'a>(app: &'a TestApp, response: &ApiResponse) -> Run<'a> {
    assert_eq!(response.status, 202, "{}", response.text);
    let id = response.json()["run"].as_str().expect("a run").to_owned();
    assert_eq!(response.header("x-run-id"), id);
    app.find(&id).await.wait_for_end().await
}

async fn run_count(app: &TestApp) -> usize {
    let page = app.get("/runs").await.json();
    page["data"].as_array().expect("runs").len()
}

#[tokio::test]
async fn a_standard_webhook_starts_one_run_however_often_it_is_sent() {
    let mut app = app_with_triggers().await;
    let first = send_standard(&app, "msg_1", 0, ISSUE).await;
    let run = started(&app, &first).await;
    assert_eq!(run["input"], "issue.opened: It fails (7)");
    assert_eq!(run["labels"], json!({"source": "standard"}));
    drop(run);
    for age in [240, -290] {
        let again = send_standard(&app, "msg_1", age, ISSUE).await;
        assert_eq!(again.status, 200, "{}", again.text);
        assert_eq!(again.header("idempotency-replayed"), "true");
        assert_eq!(again.json(), first.json());
        app.crash_and_restart().await;
    }
    started(&app, &send_standard(&app, "msg_2", 0, ISSUE).await).await;
    assert_eq!(run_count(&app).await, 2);
}

#[tokio::test]
async fn signatures_that_are_wrong_or_old_start_nothing() {
    let app = app_with_triggers().await;
    for age in [302, -330, 86_400] {
        let refused = send_standard(&app, "msg_1", age, ISSUE).await;
        refused.problem(401);
    }
    let now = Timestamp::now().as_second().to_string();
    let headers = |signature| {
        [
            ("webhook-id", "msg_1"),
            ("webhook-timestamp", now.as_str()),
            ("webhook-signature", signature),
        ]
    };
    for signature in [
        "",
        "v1,",
        "v1,AAAA",
        "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    ] {
        let refused = send_event(&app, "standard", &headers(signature), ISSUE).await;
        assert!(
            refused
                .problem(401)
                .starts_with("the signature is missing or wrong")
        );
    }
    send_event(&app, "standard", &[], ISSUE).await.problem(401);
    send_event(&app, "github", &[], ISSUE).await.problem(401);
    assert_eq!(run_count(&app).await, 0);
}

#[tokio::test]
async fn github_signs_the_body_and_its_ping_starts_nothing() {
    let app = app_with_triggers().await;
    let signature = format!("sha256={}", hex_mac(&[ISSUE]));
    let headers = |event| {
        [
            ("x-github-delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958"),
            ("x-github-event", event),
            ("x-hub-signature-256", signature.as_str()),
        ]
    };
    let ping = send_event(&app, "github", &headers("ping"), ISSUE).await;
    assert_eq!((ping.status, ping.json()), (200, json!({"run": null})));
    let run = started(
        &app,
        &send_event(&app, "github", &headers("issues"), ISSUE).await,
    )
    .await;
    assert_eq!(run["input"], "It fails");
    let again = send_event(&app, "github", &headers("issues"), ISSUE).await;
    assert_eq!(again.status, 200);
    let changed = ISSUE.replace("fails", "works");
    let refused = send_event(&app, "github", &headers("issues"), &changed).await;
    refused.problem(401);
    assert_eq!(run_count(&app).await, 1);
}

#[tokio::test]
async fn github_may_send_a_form() {
    let app = app_with_triggers().await;
    let send = async |delivery: &str, content_type: &str, form: &str| {
        let signature = format!("sha256={}", hex_mac(&[form]));
        let headers = [
            ("content-type", content_type),
            ("x-github-delivery", delivery),
            ("x-github-event", "issues"),
            ("x-hub-signature-256", signature.as_str()),
        ];
        send_event(&app, "github", &headers, form).await
    };
    let mut form = url::form_urlencoded::Serializer::new(String::new());
    let form = form.append_pair("payload", ISSUE).finish();
    for content_type in [
        "application/x-www-form-urlencoded",
        "Application/X-WWW-Form-Urlencoded; charset=utf-8",
    ] {
        let delivery = content_type.len().to_string();
        let run = send(&delivery, content_type, &form).await;
        assert_eq!(started(&app, &run).await["input"], "It fails");
    }
    let again = send("d1", "application/x-www-form-urlencoded", "a=b").await;
    let why = again.problem(400);
    assert!(why.contains("no field payload"), "{why}");
}

#[tokio::test]
async fn stripe_signs_the_time_and_the_body_with_any_of_several_secrets() {
    let app = app_with_triggers().await;
    let sign = |age: i64| {
        let time = (Timestamp::now().as_second() - age).to_string();
        let signature = hex_mac(&[&time, ".", ISSUE]);
        format!("t={time},v1={},v1={signature},v0=x", "0".repeat(64))
    };
    let run = send_event(&app, "stripe", &[("stripe-signature", &sign(0))], ISSUE).await;
    let run = started(&app, &run).await;
    assert_eq!(run["input"], ISSUE, "the whole body, without a template");
    let again = send_event(&app, "stripe", &[("stripe-signature", &sign(60))], ISSUE).await;
    assert_eq!((again.status, &again.json()["run"]), (200, &run["id"]));
    let old = send_event(&app, "stripe", &[("stripe-signature", &sign(302))], ISSUE).await;
    old.problem(401);
}

#[tokio::test]
async fn unknown_and_misconfigured_triggers_look_the_same() {
    let app = app_with_triggers().await;
    let mut problems = Vec::new();
    for trigger in ["unknown", "without-secret"] {
        let refused = send_event(&app, trigger, &[], ISSUE).await;
        refused.problem(404);
        let mut problem = refused.json();
        for key in ["request_id", "instance"] {
            problem[key] = Value::Null;
        }
        problems.push(problem);
    }
    assert_eq!(problems[0], problems[1]);
    app.daemon.wait_for_log("MISSING_SECRET is not set").await;
}

#[tokio::test]
async fn bodies_are_bounded_and_have_to_be_json() {
    let app = app_with_triggers().await;
    let large = format!(r#"{{"type":"x","data":"{}"}}"#, "x".repeat(5000));
    send_standard(&app, "msg_1", 0, &large).await.problem(413);
    send_standard(&app, "msg_1", 0, "no json")
        .await
        .problem(400);
    let stripe = |body: &str| {
        let time = Timestamp::now().as_second().to_string();
        format!("t={time},v1={}", hex_mac(&[&time, ".", body]))
    };
    let body = r#"{"object":"event"}"#;
    let refused = send_event(&app, "stripe", &[("stripe-signature", &stripe(body))], body).await;
    assert_eq!(refused.problem(400), "the event has no id");
    assert_eq!(run_count(&app).await, 0);
}
