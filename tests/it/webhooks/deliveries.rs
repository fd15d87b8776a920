//! Webhook deliveries: retries, resending, restarts, receivers that fail.

use crate::support::app::{ApiResponse, TestApp};
use crate::support::gate::Gate;
use crate::support::hanging_server::HangingServer;
use crate::support::provider::answer::{hangs, says};
use crate::support::webhook_receiver::{ReceiverReply, WebhookReceiver};
use crate::webhooks::messages::{SECRET, as_key, daemon, deliveries, settled, webhook};
use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn a_failed_attempt_is_retried_with_the_same_id() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([500, 404, 429].map(ReceiverReply::Status));
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;

    let reported = receiver.wait_for_messages(4).await;
    let listed = settled(&app, run.id(), "delivered").await;
    let stamps: Vec<i64> = reported
        .iter()
        .map(|it| it.header("webhook-timestamp").parse().expect("seconds"))
        .collect();
    assert!(stamps.is_sorted());
    for message in &reported {
        assert!(message.is_signed_by(SECRET));
        assert_eq!(message.header("webhook-id"), listed[0]["id"]);
        assert_eq!(message.body, reported[0].body);
    }
    let attempts = listed[0]["attempts"].as_array().expect("attempts");
    let statuses: Vec<_> = attempts.iter().map(|it| it["status"].clone()).collect();
    assert_eq!(statuses, [500, 404, 429, 200]);
    for (attempt, stamp) in attempts.iter().zip(&stamps) {
        let time: jiff::Timestamp = attempt["time"]
            .as_str()
            .and_then(|text| text.parse().ok())
            .expect("a time");
        assert_eq!(time.as_second(), *stamp, "each try is stamped anew");
    }
    assert!(
        attempts[0]["error"]
            .as_str()
            .expect("a text")
            .contains("500")
    );
    let metrics = app.get("/metrics").await.text;
    for line in ["{outcome=\"retried\"} 3\n", "{outcome=\"delivered\"} 1\n"] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[tokio::test]
async fn a_410_stops_a_delivery_until_it_is_resent() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Status(410)]);
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;
    let id = settled(&app, run.id(), "failed").await[0]["id"].clone();
    let id = id.as_str().expect("an id");
    assert_eq!(receiver.messages().len(), 1);

    let path = format!("/runs/{}/deliveries/{id}/resend", run.id());
    let again = app.post(&path, &Value::Null).await;
    assert_eq!(again.status, 202, "{}", again.text);
    assert_eq!(again.json()["id"], id);
    let reported = receiver.wait_for_messages(2).await;
    assert_eq!(reported[1].header("webhook-id"), id);
    assert!(reported[1].is_signed_by(SECRET));
    let listed = settled(&app, run.id(), "delivered").await;
    assert_eq!(listed[0]["attempts"].as_array().map(Vec::len), Some(2));
    // What has arrived can be sent once more, too.
    assert_eq!(app.post(&path, &Value::Null).await.status, 202);
    receiver.wait_for_messages(3).await;

    let other = app.run_with("solo", json!({})).await;
    for (run, id) in [
        (run.id(), "nonsense"),
        (run.id(), "whd_00000000-0000-7000-8000-000000000000"),
        (other.id(), id),
    ] {
        let path = format!("/runs/{run}/deliveries/{id}/resend");
        app.post(&path, &Value::Null).await.problem(404);
    }
}

#[tokio::test]
async fn resending_a_delivery_in_progress_sends_it_once_more() {
    let (receiver, gate) = (WebhookReceiver::start().await, Gate::closed());
    receiver.will([ReceiverReply::After(gate.clone())]);
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;
    receiver.wait_for_messages(1).await;
    let id = deliveries(&app, run.id()).await[0]["id"].clone();
    let id = id.as_str().expect("an id");
    let path = format!("/runs/{}/deliveries/{id}/resend", run.id());
    assert_eq!(app.post(&path, &Value::Null).await.status, 202);
    gate.open();
    assert_eq!(
        receiver.wait_for_messages(2).await[1].header("webhook-id"),
        id
    );
    let listed = settled(&app, run.id(), "delivered").await;
    assert_eq!(listed[0]["attempts"].as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Redirect("/elsewhere".to_owned())]);
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/here")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;
    let listed = settled(&app, run.id(), "delivered").await;
    let error = listed[0]["attempts"][0]["error"].as_str().expect("a text");
    assert!(error.contains("redirects are not followed"), "{error}");
    assert!(receiver.messages().iter().all(|it| it.uri == "/here"));
}

#[tokio::test]
async fn pending_deliveries_are_sent_by_the_next_process() {
    let receiver = WebhookReceiver::start().await;
    let gate = Gate::closed();
    receiver.will([ReceiverReply::After(gate.clone())]);
    let mut app = daemon().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("done"), hangs(), says("done")]);
    let body = json!({"webhook": {"url": receiver.url("/")}});
    let ended = app.run_with("solo", body.clone()).await.id().to_owned();
    receiver.wait_for_messages(1).await;
    let running = app.start_with("solo", body).await.id().to_owned();
    app.provider.wait_for_request("solo", 2).await;

    app.crash_and_restart().await;

    // The one had ended before; the other keeps its receiver when it resumes.
    settled(&app, &ended, "delivered").await;
    settled(&app, &running, "delivered").await;
    let reported = receiver.messages();
    let of = |run: &str| -> Vec<_> {
        let of = |it: &&_| {
            crate::support::webhook_receiver::ReceivedMessage::json(it)["data"]["id"] == run
        };
        reported.iter().filter(of).collect()
    };
    let twice = of(&ended);
    assert_eq!(twice.len(), 2);
    assert_eq!(twice[0].header("webhook-id"), twice[1].header("webhook-id"));
    assert_eq!(twice[0].body, twice[1].body);
    assert_eq!(of(&running).len(), 1);
    assert!(reported.iter().all(|it| it.is_signed_by(SECRET)));
}

#[tokio::test]
async fn a_hanging_receiver_delays_neither_runs_nor_other_receivers() {
    let (slow, quick) = (
        WebhookReceiver::start().await,
        WebhookReceiver::start().await,
    );
    let gate = Gate::closed();
    slow.will((0..20).map(|_| ReceiverReply::After(gate.clone())));
    let quick_host = format!("http://localhost:{}", quick.address.port());
    let app = TestApp::setup()
        .environment("HOOK_SECRET", SECRET)
        .config(
            "[webhooks]\nallow_hosts = [\"127.0.0.1\", \"localhost\"]\nsecret_env = \"HOOK_SECRET\"",
        )
        .agent("slow", &webhook(&slow.url("/")))
        .agent("quick", &webhook(&quick_host))
        .spawn()
        .await;
    app.provider.always("slow", |_| says("done"));
    app.provider.will("quick", [says("done")]);
    for _ in 0..20 {
        assert_eq!(app.run("slow", "go").await.output(), "done");
    }
    // As many as may be in progress for one host.
    assert!(
        slow.wait_for_messages(8)
            .await
            .iter()
            .all(|it| it.is_signed_by(SECRET))
    );

    let run = app.run("quick", "go").await;
    settled(&app, run.id(), "delivered").await;
    assert_eq!(quick.messages().len(), 1);
    // A ninth only takes the place of one that ended after its 15 seconds.
    let sent = slow.messages();
    let times = sent.iter().map(|it| it.header("webhook-timestamp").parse());
    let mut times: Vec<i64> = times.map(|time| time.expect("seconds")).collect();
    times.sort_unstable();
    let mut nines = times.windows(9);
    assert!(nines.all(|it| it[8] >= it[0] + 15), "{times:?}");
    gate.open();
    slow.wait_for_messages(20).await;
}

#[tokio::test]
async fn ends_during_a_drain_are_delivered_by_this_process_or_the_next() {
    let receiver = WebhookReceiver::start().await;
    let gate = Gate::closed();
    let mut app = daemon()
        .server("drain_timeout = 180")
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let run = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("solo", 1).await;
    app.daemon.signal("TERM");
    app.get_until("/readyz", |got| got.status == 503).await;
    gate.open();
    let status = app.daemon.wait_for_exit().await;
    assert_eq!(status.code(), Some(0), "{}", app.daemon.log());
    app.restart_after_end().await;
    settled(&app, &run, "delivered").await;
    receiver.wait_for_messages(1).await;
}

#[tokio::test]
async fn a_missing_secret_fails_the_delivery_unsent() {
    let receiver = WebhookReceiver::start().await;
    let hook = webhook(&receiver.url("/"));
    let app = daemon()
        .environment("BAD_SECRET", "whsec_no base64")
        .agent("unset", &format!("{hook}\nsecret_env = \"NO_SECRET\""))
        .agent("bad", &format!("{hook}\nsecret_env = \"BAD_SECRET\""))
        .spawn()
        .await;
    for (agent, variable) in [("unset", "NO_SECRET"), ("bad", "BAD_SECRET")] {
        app.provider.will(agent, [says("done")]);
        let run = app.run(agent, "go").await;
        let path = format!("/runs/{}/deliveries", run.id());
        let tried = |got: &ApiResponse| !got.json()["data"][0]["attempts"][0].is_null();
        let got = app.get_until(&path, tried).await;
        let error = got.json()["data"][0]["attempts"][0]["error"].clone();
        assert!(
            error.as_str().expect("a text").contains(variable),
            "{error}"
        );
    }
    assert!(receiver.messages().is_empty());
    assert!(!app.daemon.log().contains("no base64"));
}

#[tokio::test]
async fn one_keys_hanging_receivers_leave_other_keys_their_share() {
    let (hanging, receiver) = (HangingServer::start().await, WebhookReceiver::start().await);
    let hosts: Vec<String> = (2..12).map(|n| format!("127.0.0.{n}")).collect();
    let mut allowed = hosts.clone();
    allowed.push("127.0.0.1".to_owned());
    let key = |name: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!(
            "[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"admin\"]\nwebhook_secret_env = \"HOOK_SECRET\"\n"
        )
    };
    let app = TestApp::setup()
        .environment("HOOK_SECRET", SECRET)
        .config(&format!(
            "[webhooks]\nallow_hosts = {allowed:?}\n{}{}",
            key("ada"),
            key("bob")
        ))
        .agent("solo", "")
        .spawn()
        .await;
    let gate = app.provider.always_later("solo", "done");
    // More than may be in progress in total, to enough hosts for one key to take every slot.
    for host in hosts.iter().flat_map(|host| [host; 8]) {
        let body = json!({"webhook": {"url": hanging.url(host)}});
        let accepted = as_key(&app, "ada", Method::POST, "/agents/solo/runs", &body).await;
        assert_eq!(accepted.status, 202, "{}", accepted.text);
    }
    // All end now: an attempt hangs for 15 seconds only.
    gate.open();
    // Half of 64, and half of the other half.
    hanging.wait_for_connections(48).await;

    let body = json!({"webhook": {"url": receiver.url("/")}});
    as_key(&app, "bob", Method::POST, "/agents/solo/runs", &body).await;
    receiver.wait_for_messages(1).await;
    assert!(
        hanging.open_connections() <= 48,
        "{}",
        hanging.open_connections()
    );
}

#[tokio::test]
async fn a_message_is_sent_once_while_its_outcome_cannot_be_recorded() {
    let receiver = WebhookReceiver::start().await;
    let app = daemon()
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    app.database().refuse_attempts();
    let run = app.run("solo", "go").await;
    app.daemon
        .wait_for_log("Could not record the outcome of webhook delivery")
        .await;
    assert_eq!(deliveries(&app, run.id()).await[0]["status"], "pending");
    app.database().accept_attempts();

    let listed = settled(&app, run.id(), "delivered").await;
    assert_eq!(listed[0]["attempts"].as_array().map(Vec::len), Some(1));
    assert_eq!(receiver.messages().len(), 1);
    let metrics = app.get("/metrics").await.text;
    let counted = "axed_webhook_deliveries_total{outcome=\"delivered\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
}

#[tokio::test]
async fn a_delivery_waits_for_no_time_of_a_clock_that_was_ahead() {
    // Two days are further ahead than any wait; half an hour is further ahead than this one.
    let (days, half_an_hour) = (2 * 24 * 3_600_000, 1_800_000);
    for (first_retry, ahead) in [(3_600_000, days), (600_000, half_an_hour)] {
        is_sent_although_the_clock_was_ahead(first_retry, ahead).await;
    }
}

/// The attempt was recorded while the clock was so many milliseconds ahead.
async fn is_sent_although_the_clock_was_ahead(first_retry: u32, ahead: u32) {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Status(500)]);
    let app = TestApp::setup()
        .environment("HOOK_SECRET", SECRET)
        .config(&format!(
            "[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"\nfirst_retry_ms = {first_retry}",
        ))
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let path = format!("/runs/{}/deliveries", run.id());
    let is_tried = |got: &ApiResponse| !got.json()["data"][0]["attempts"][0].is_null();
    app.get_until(&path, is_tried).await;
    let move_ahead = format!("UPDATE deliveries SET next_at = next_at + {ahead}");
    app.database().execute(&move_ahead);

    // The sender looks again.
    app.run("solo", "go").await;
    settled(&app, run.id(), "delivered").await;
}

#[tokio::test]
async fn a_clock_that_jumps_ahead_gives_up_no_delivery() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([
        ReceiverReply::After(Gate::closed()),
        ReceiverReply::Status(500),
    ]);
    let mut app = daemon()
        .agent("solo", &webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await.id().to_owned();
    receiver.wait_for_messages(1).await;
    app.daemon.kill().await;
    let days = 2 * 24 * 3_600_000;
    let move_back = format!(
        "UPDATE deliveries SET since = since - {days}, created_at = created_at - {days}, next_at = next_at - {days}"
    );
    app.database().execute(&move_back);
    app.restart_after_end().await;

    let listed = settled(&app, &run, "delivered").await;
    let attempts = listed[0]["attempts"].as_array().expect("attempts");
    // On a slow machine the first attempt hangs for long enough to end without a status.
    let statuses = attempts.iter().map(|it| it["status"].clone());
    let statuses: Vec<_> = statuses.skip_while(Value::is_null).collect();
    assert_eq!(statuses, [500, 200]);
}
