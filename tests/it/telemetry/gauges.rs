//! What `/metrics` says of the state of things: what waits, what is suspended, budgets, the store, MCP servers, deliveries.

use axed::config::environment::process_environment;
use serde_json::json;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::axed_command;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, hangs, says};
use crate::support::webhook_receiver::{ReceiverReply, WebhookReceiver};
use crate::support::within_timeout;
use crate::telemetry::metrics::{Page, scrape};
use crate::tools::approvals;
use crate::webhooks::messages;

/// A server with the tools `echo` and `fail`.
const MCP_SERVER: &str = include_str!("../tools/mcp/server.py");

#[tokio::test]
async fn calls_that_wait_for_approval_are_counted_with_the_age_of_the_oldest() {
    let app = approvals::careful("").spawn().await;
    let writes = || approvals::writes("a.txt");
    app.provider
        .will("careful", [writes(), writes(), says("done")]);
    let before = scrape(&app).await;
    assert_eq!(before.of("axed_approvals_pending"), 0.0);
    assert_eq!(before.of("axed_approvals_oldest_age_seconds"), 0.0);
    let (_, first) = approvals::sent(&app, "careful").await;
    approvals::sent(&app, "careful").await;
    let are_old = |got: &ApiResponse| {
        let page = Page::read(got);
        let is_old = page.of("axed_approvals_oldest_age_seconds") > 0.01;
        is_old && page.of("axed_approvals_pending") == 2.0
    };
    let page = Page::read(&app.get_until("/metrics", are_old).await);
    assert_eq!(page.of("axed_inputs_pending"), 0.0);
    approvals::approve(&app, &first).await;
    let is_one = |got: &ApiResponse| Page::read(got).of("axed_approvals_pending") == 1.0;
    app.get_until("/metrics", is_one).await;
}

#[tokio::test]
async fn a_restart_does_not_make_an_approval_younger() {
    let mut app = approvals::careful("").spawn().await;
    app.provider.will("careful", [approvals::writes("a.txt")]);
    approvals::sent(&app, "careful").await;
    let list = app.get("/approvals").await.json();
    let requested_at = list["data"][0]["requested_at"].as_str();
    let requested_at: jiff::Timestamp =
        requested_at.and_then(|at| at.parse().ok()).expect("a time");
    app.crash_and_restart().await;
    let waits = |got: &ApiResponse| Page::read(got).of("axed_approvals_pending") == 1.0;
    app.get_until("/metrics", waits).await;

    let waited = jiff::Timestamp::now().duration_since(requested_at);
    let age = scrape(&app).await.of("axed_approvals_oldest_age_seconds");
    assert!(age >= waited.as_secs_f64() - 0.001, "{age} {waited:?}");
}

/// The store takes no writes for a while.
#[tokio::test]
async fn a_suspended_run_is_seen_wherever_somebody_looks() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    assert_eq!(run.reload().await["suspended"], json!(null));
    eventually("axed health", async || {
        let got = health(&app).await;
        (got == (Some(0), String::new())).then_some(())
    })
    .await;

    let lock = app.database().lock();
    gate.open();
    app.daemon.wait_for_log("runs stay suspended").await;

    assert_eq!(run.reload().await["suspended"], "store_failed");
    let list = app.get("/runs").await.json();
    assert_eq!(list["data"][0]["suspended"], "store_failed");
    for page in ["/ui/".to_owned(), format!("/ui/runs/{}", run.id())] {
        let page = app.get(&page).await.text;
        assert!(page.contains("suspended until the store works"), "{page}");
    }
    let is_known = |got: &ApiResponse| Page::read(got).of("axed_store_writable") == 0.0;
    let page = Page::read(&app.get_until("/metrics", is_known).await);
    assert_eq!(page.of("axed_runs_suspended"), 1.0);
    assert_eq!(page.of("axed_ready"), 0.0);
    eventually("axed health", async || {
        let (code, text) = health(&app).await;
        let why = "axed: the daemon is not ready: store: ";
        (code == Some(1) && text.starts_with(why)).then_some(())
    })
    .await;

    lock.release();
    assert_eq!(run.wait_for_end().await["suspended"], json!(null));
    let is_well = |got: &ApiResponse| Page::read(got).of("axed_ready") == 1.0;
    let page = Page::read(&app.get_until("/metrics", is_well).await);
    assert_eq!(page.of("axed_runs_suspended"), 0.0);
    assert_eq!(page.of("axed_store_writable"), 1.0);
}

/// The exit code of `axed health`, and what it says.
async fn health(app: &TestApp) -> (Option<i32>, String) {
    let args = ["health", "--server", &app.daemon.url];
    let mut command = axed_command(&app.path(""), &args);
    let ended = within_timeout("axed health", command.output())
        .await
        .expect("axed");
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended.status.code(), text)
}

#[tokio::test]
async fn budgets_show_what_is_used_and_their_limits() {
    let app = TestApp::setup()
        .config(
            "[prices.\"anthropic/solo\"]\ninput = 3.0\noutput = 15.0\n[budgets.money]\nusd = 2.5\nper = \"month\"\n\
             [budgets.tokens]\ntokens = 1000\nper = \"month\"",
        )
        .agent("solo", "")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("done").with_usage(100, 20)]);
    app.run("solo", "go").await;

    let page = scrape(&app).await;
    for (series, value) in [
        ("axed_budget_used{budget=\"money\",unit=\"usd\"}", 0.0006),
        ("axed_budget_limit{budget=\"money\",unit=\"usd\"}", 2.5),
        ("axed_budget_used{budget=\"tokens\",unit=\"tokens\"}", 120.0),
        (
            "axed_budget_limit{budget=\"tokens\",unit=\"tokens\"}",
            1000.0,
        ),
    ] {
        assert_eq!(page.of(series), value, "{series}");
    }
}

#[tokio::test]
async fn mcp_servers_are_up_or_not_and_their_calls_are_counted() {
    let server = |name: &str, file: &str| {
        format!(
            "[[mcp_servers]]\nname = \"{name}\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"{file}\"]\n"
        )
    };
    let path = process_environment().remove("PATH").expect("a PATH");
    let app = TestApp::setup()
        .file("server.py", MCP_SERVER)
        .environment("PATH", &path)
        .agent(
            "a",
            &(server("good", "server.py") + "open_timeout = 180\n" + &server("bad", "missing.py")),
        )
        .agent("unused", &server("idle", "server.py"))
        .spawn()
        .await;
    let answer = [
        ("good__echo", json!({"text": "hello"})),
        ("good__fail", json!({})),
    ];
    app.provider.will("a", [calls(answer), says("done")]);
    assert_eq!(app.run("a", "go").await.output(), "done");

    let page = scrape(&app).await;
    let up = page.all("axed_mcp_server_up");
    let expected = [
        ("axed_mcp_server_up{server=\"bad\"}", 0.0),
        ("axed_mcp_server_up{server=\"good\"}", 1.0),
    ];
    assert_eq!(up, expected.into());
    assert_eq!(page.of("axed_mcp_calls_total{server=\"good\"}"), 2.0);
    assert_eq!(page.of("axed_mcp_call_errors_total{server=\"good\"}"), 1.0);
}

#[tokio::test]
async fn deliveries_that_are_retried_later_are_a_backlog() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([500; 3].map(ReceiverReply::Status));
    let app = TestApp::setup()
        .environment("HOOK_SECRET", messages::SECRET)
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"\nfirst_retry_ms = 3600000")
        .agent("solo", &messages::webhook(&receiver.url("/")))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    assert_eq!(
        scrape(&app).await.of("axed_webhook_deliveries_pending"),
        0.0
    );
    app.run("solo", "go").await;
    app.run("solo", "go").await;
    receiver.wait_for_messages(2).await;

    let is_backlog =
        |got: &ApiResponse| Page::read(got).of("axed_webhook_deliveries_pending") == 2.0;
    app.get_until("/metrics", is_backlog).await;
}

#[tokio::test]
async fn runs_fail_by_code_and_providers_by_category() {
    let app = TestApp::setup()
        .agent("solo", "[limits]\nmax_turns = 1\n[retry]\nmax_retries = 0")
        .agent("hasty", "timeout = 15")
        .spawn()
        .await;
    app.provider.will("solo", [fails(529, "overloaded")]);
    app.provider.will("hasty", [hangs()]);
    app.run("solo", "go").await;
    app.run("hasty", "go").await;

    let page = scrape(&app).await;
    for series in [
        "axed_runs_failed_total{agent=\"solo\",code=\"provider_overloaded\"}",
        "axed_runs_failed_total{agent=\"hasty\",code=\"timeout\"}",
        "axed_provider_errors_total{provider=\"anthropic\",category=\"overloaded\"}",
        "axed_provider_errors_total{provider=\"anthropic\",category=\"timeout\"}",
    ] {
        assert_eq!(page.of(series), 1.0, "{series}");
    }
    let requests = "axed_provider_requests_total{provider=\"anthropic\"}";
    assert_eq!(page.of(requests), 2.0);
    assert!(page.all("axed_retries_total").is_empty());
}

#[tokio::test]
async fn a_tool_that_a_model_makes_up_gets_no_series() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let made_up = [("made_up_tool", json!({}))];
    app.provider.will("solo", [calls(made_up), says("done")]);
    app.run("solo", "go").await;

    let got = send(app.request(reqwest::Method::GET, "/metrics")).await;
    assert!(!got.text.contains("made_up_tool"), "{}", got.text);
}
