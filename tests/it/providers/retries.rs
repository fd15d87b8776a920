//! Providers that falter: waits, second tries, other models, and texts taken back.

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};

use crate::support::app::TestApp;
use crate::support::events::{Event, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{fails, raw, says};

/// A retry policy that does not make stories wait.
const QUICK: &str = "[retry]\ninitial_delay_ms = 1\nmax_delay_ms = 2";

fn retries(events: &[Event]) -> Vec<&Event> {
    events
        .iter()
        .filter(|event| event.kind() == "retry.scheduled")
        .collect()
}

#[tokio::test]
async fn a_temporary_failure_is_retried_with_an_event() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    app.provider.will(
        "solo",
        [fails(500, "oops"), fails(529, "busy"), says("done")],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run["turns"], 1);
    let events = run.events().await;
    let retries = retries(&events);
    assert_eq!(retries.len(), 2, "{events:?}");
    let reason = |at: usize| retries[at]["reason"].as_str().expect("a reason");
    assert!(reason(0).contains("server: oops"), "{}", reason(0));
    assert!(reason(1).contains("overloaded: busy"), "{}", reason(1));
}

#[tokio::test]
async fn retry_after_is_respected() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    app.provider.will(
        "solo",
        [
            fails(429, "slow down").header("retry-after", "1"),
            says("done"),
        ],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let events = run.events().await;
    let waited = retries(&events)[0]["wait_ms"].as_u64().expect("a wait");
    assert!((1000..5000).contains(&waited), "{waited}");
    assert!(run["duration_ms"].as_u64() >= Some(1000), "{run:?}");
}

#[tokio::test]
async fn retry_after_may_be_a_date_in_any_format() {
    for form in [
        "%a, %d %b %Y %H:%M:%S GMT",
        "%A, %d-%b-%y %H:%M:%S GMT",
        "%a %b %e %H:%M:%S %Y",
    ] {
        let app = TestApp::setup().agent("solo", QUICK).spawn().await;
        let date = Zoned::now().with_time_zone(TimeZone::UTC) + 1000.seconds();
        let text = date.strftime(form).to_string();
        let refusal = fails(429, "slow down").header("retry-after", text);
        app.provider.will("solo", [refusal]);
        let left = || date.timestamp().as_second() - Timestamp::now().as_second();
        let most = left();
        let run = app.start("solo", "go").await;

        let events = app.events(&run).await.until("retry.scheduled").await;
        let waits = retries(&events)[0]["wait_ms"].as_i64().expect("a wait");
        assert!((left()..=most).contains(&(waits / 1000)), "{form}: {waits}");
    }
}

#[tokio::test]
async fn temporary_statuses_are_retried() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    app.provider.will(
        "solo",
        [
            fails(409, "busy with another"),
            fails(425, "too early"),
            says("done"),
        ],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let events = run.events().await;
    let reasons: Vec<_> = retries(&events)
        .iter()
        .map(|retry| retry["reason"].clone())
        .collect();
    assert_eq!(reasons, ["server: busy with another", "server: too early"]);
}

#[tokio::test]
async fn one_large_chunk_of_a_stream_is_accepted() {
    let text = "x".repeat(9 << 20);
    for model in ["anthropic/solo", "openai/solo", "ollama/solo"] {
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!("model = \"{model}\"\nstream = true\n{QUICK}"),
            )
            .spawn()
            .await;
        app.provider.will("solo", [says(text.as_str())]);

        let run = app.run("solo", "go").await;

        assert!(run.output() == text, "{model}");
    }
}

#[tokio::test]
async fn permanent_failures_are_not_retried() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    for status in [400, 401, 403, 404, 422] {
        app.provider.will("solo", [fails(status, "no")]);
        let before = app.provider.requests().len();
        assert_eq!(app.run("solo", "go").await.status(), "failed");
        assert_eq!(app.provider.requests().len(), before + 1, "{status}");
    }
}

#[tokio::test]
async fn retries_end() {
    let app = TestApp::setup()
        .agent("twice", QUICK)
        .agent("never", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    app.provider.always("twice", |_| fails(503, "down"));
    app.provider.always("never", |_| fails(503, "down"));

    let run = app.run("twice", "go").await;
    assert_eq!(
        run.failure(),
        ("provider_server", "server: down (anthropic/twice)")
    );
    assert_eq!(app.provider.requests_for("twice").len(), 3);

    let run = app.run("never", "go").await;
    assert_eq!(run.failure().0, "provider_server");
    assert_eq!(app.provider.requests_for("never").len(), 1);
}

#[tokio::test]
async fn a_fallback_model_replies_if_the_first_is_down() {
    let app = TestApp::setup()
        .agent(
            "solo",
            &format!("fallback_models = [\"openai/second\", \"ollama/third\"]\n{QUICK}"),
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| fails(529, "busy"));
    app.provider.always("second", |_| fails(429, "slow down"));
    app.provider
        .will("third", [says("here I am").with_model("third-1")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "here I am");
    assert_eq!(run["model"], "third-1");
    assert_eq!(app.provider.requests_for("solo").len(), 3);
    assert_eq!(app.provider.requests_for("second").len(), 3);
    assert_eq!(
        app.provider
            .wait_for_request("third", 1)
            .await
            .user_messages(),
        ["go"]
    );
}

#[tokio::test]
async fn a_fallback_without_a_provider_is_skipped() {
    let app = TestApp::setup()
        .agent(
            "solo",
            &format!("fallback_models = [\"nowhere/second\", \"openai/third\"]\n{QUICK}"),
        )
        .agent(
            "alone",
            &format!("fallback_models = [\"nowhere/second\"]\n{QUICK}"),
        )
        .spawn()
        .await;
    for model in ["solo", "alone"] {
        app.provider.always(model, |_| fails(529, "busy"));
    }
    app.provider.will("third", [says("here I am")]);

    assert_eq!(app.run("solo", "go").await.output(), "here I am");
    assert_eq!(
        app.run("alone", "go").await.failure(),
        ("provider_overloaded", "overloaded: busy (anthropic/alone)")
    );
}

#[tokio::test]
async fn a_rejected_request_does_not_fall_back() {
    let app = TestApp::setup()
        .agent(
            "solo",
            &format!("fallback_models = [\"openai/second\"]\n{QUICK}"),
        )
        .spawn()
        .await;
    app.provider.will("solo", [fails(401, "no such key")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.failure().0, "provider_auth");
    assert!(app.provider.requests_for("second").is_empty());
}

#[tokio::test]
async fn a_broken_stream_withdraws_its_text_and_is_retried() {
    let app = TestApp::setup()
        .agent("solo", &format!("stream = true\n{QUICK}"))
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "solo",
        [
            says("first words that break").pausing_at(&gate).cut(),
            says("the whole story").with_usage(3, 4),
        ],
    );

    let run = app.start("solo", "go").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    let mut events = app.events(&run).await;
    // A subscriber that has the stored events gets the live ones.
    let mut received = events.until("run.queued").await;
    gate.open();
    received.extend(events.rest().await);

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "the whole story");
    // With what the broken reply had reported.
    assert_eq!(run.usage(), (10 + 3, 1 + 4, 0));
    let withdrawn = received
        .iter()
        .position(|event| event.kind() == "text.withdrawn");
    assert!(withdrawn.is_some(), "{received:?}");
    let reports_seen: String = received[withdrawn.unwrap_or_default()..]
        .iter()
        .filter(|event| event.kind() == "text.delta")
        .map(|event| event["text"].as_str().expect("a text"))
        .collect();
    assert_eq!(reports_seen, "the whole story");
    assert!(
        kinds(&received).contains(&"retry.scheduled"),
        "{received:?}"
    );
    assert!(run.events().await.iter().all(|event| event.seq() > 0));
}

#[tokio::test]
async fn an_unreadable_body_is_retried() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    app.provider.will(
        "solo",
        [
            raw(200, "text/html", "<html>Bad gateway</html>"),
            raw(200, "application/json", &b"{\"content\": \"\xff\xfe\"}"[..]),
            says("done"),
        ],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let events = run.events().await;
    for retry in retries(&events) {
        let reason = retry["reason"].as_str().expect("a reason");
        assert!(reason.contains("server: "), "{reason}");
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [fails(307, "over there").header("location", "/v1/messages")],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.failure().0, "provider_server");
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn no_wait_exceeds_the_deadline() {
    let app = TestApp::setup()
        .agent("solo", &format!("timeout = 1\n{QUICK}"))
        .spawn()
        .await;
    app.provider.always("solo", |_| {
        fails(429, "slow down").header("retry-after", "3600")
    });

    let run = app.run("solo", "go").await;

    let (code, _) = run.failure();
    assert!(
        ["timeout", "provider_rate_limit"].contains(&code),
        "{run:?}"
    );
    assert!(run["duration_ms"].as_u64() < Some(180_000), "{run:?}");
}
