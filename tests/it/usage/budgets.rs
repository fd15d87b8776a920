//! Budgets over time: they refuse new roots when they are used up, alert once, and survive kills.

use std::collections::BTreeSet;

use axed::config::key_hash::KeyHash;
use jiff::Timestamp;
use reqwest::Method;
use serde_json::{Value, json};

use crate::forks::fork;
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, says};
use crate::support::run::Run;
use crate::support::webhook_receiver::{ReceivedMessage, ReceiverReply, WebhookReceiver};

/// The secret of the alerts' receiver.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// Where it is not midnight soon.
fn zone() -> &'static str {
    match Timestamp::now().in_tz("Asia/Tokyo").expect("a zone").hour() {
        4..20 => "Asia/Tokyo",
        _ => "America/New_York",
    }
}

async fn post(app: &TestApp, agent: &str) -> ApiResponse {
    let path = format!("/agents/{agent}/runs?wait=180");
    app.post(&path, &json!({"input": "go"})).await
}

/// The budgets as `/usage` shows them.
async fn budgets(app: &TestApp) -> Vec<Value> {
    let usage = app.get("/usage").await.json();
    usage["budgets"].as_array().expect("budgets").clone()
}

#[tokio::test]
async fn a_used_up_budget_refuses_new_roots_until_its_period_ends() {
    let zone = zone();
    let mut app = TestApp::setup()
        .config(&format!(
            "[budgets.solo]\nmatch = {{ agent = \"solo\" }}\ntokens = 100\nper = \"day\"\ntimezone = \"{zone}\""
        ))
        .agent("solo", "")
        .agent("other", "sub_agents = [\"solo\"]")
        .spawn()
        .await;
    app.provider
        .always("solo", |_| says("done").with_usage(40, 20));
    app.provider
        .always("other", |seen| match seen.tool_results().len() {
            0 => delegates([("solo", "x")]),
            _ => says("done"),
        });
    let key = ("idempotency-key", "first");
    let first = app.request(Method::POST, "/agents/solo/runs?wait=180");
    let first = send(first.header(key.0, key.1).json(&json!({"input": "go"}))).await;
    assert_eq!(first.status, 200, "{}", first.text);
    assert_eq!(
        post(&app, "solo").await.status,
        200,
        "the last one may pass the limit"
    );

    let left = || {
        let now = Timestamp::now().in_tz(zone).expect("a zone");
        let midnight = now.tomorrow().and_then(|it| it.start_of_day());
        midnight.expect("a time").timestamp().as_second() - now.timestamp().as_second()
    };
    let check = async |app: &TestApp| {
        let most = left();
        let refused = post(app, "solo").await;
        let least = left();
        let problem = refused.problem(429);
        assert_eq!(refused.json()["code"], "budget_exhausted", "{problem}");
        assert!(
            problem.contains("the budget solo of this day is used up"),
            "{problem}"
        );
        let wait: i64 = refused.header("retry-after").parse().expect("seconds");
        assert!(
            (least..=most + 1).contains(&wait),
            "{wait} of {least} to {most}"
        );
        let budget = budgets(app).await.remove(0);
        assert_eq!(
            (&budget["used_tokens"], &budget["used_thousandths"]),
            (&json!(120), &json!(1200))
        );
    };
    check(&app).await;
    app.crash_and_restart().await;
    check(&app).await;

    let replayed = app.request(Method::POST, "/agents/solo/runs?wait=180");
    let replayed = send(replayed.header(key.0, key.1).json(&json!({"input": "go"}))).await;
    assert_eq!(replayed.status, 200, "{}", replayed.text);
    assert_eq!(
        app.post("/agents/solo/dry-run", &json!({})).await.status,
        200
    );
    // A child run of the agent belongs to a tree of another root.
    assert_eq!(post(&app, "other").await.json()["status"], "completed");
}

#[tokio::test]
async fn running_trees_continue_when_their_budget_is_used_up() {
    let app = TestApp::setup()
        .config("[budgets.all]\ntokens = 50\nper = \"month\"\nalert_at = []")
        .agent("root", "sub_agents = [\"leaf\"]")
        .agent("leaf", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "root",
        [
            delegates([("leaf", "x")]).with_usage(60, 10),
            says("done").with_usage(5, 5),
        ],
    );
    app.provider
        .will("leaf", [says("read").with_usage(100, 1).after_gate(&gate)]);
    let run = app.start("root", "go").await;
    app.provider.wait_for_concurrency("leaf", 1).await;

    assert_eq!(post(&app, "leaf").await.status, 429);
    gate.open();

    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(budgets(&app).await[0]["used_tokens"], 181);
}

#[tokio::test]
async fn an_alert_is_sent_once_for_each_share_also_over_restarts() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Status(500)]);
    let mut app = TestApp::setup()
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nfirst_retry_ms = 10")
        .config("[prices.\"anthropic/solo\"]\ninput = 1.0\noutput = 2.0")
        .config(&format!(
            "[budgets.money]\nusd = 0.001\nper = \"month\"\nalert_at = [0.5, 0.8, 1]\nwebhook = {{ url = \"{}\", secret_env = \"ALERT_SECRET\" }}",
            receiver.url("/alerts")
        ))
        .environment("ALERT_SECRET", SECRET)
        .agent("solo", "")
        .spawn()
        .await;
    // A run costs 100 µUSD, a tenth of the budget.
    app.provider
        .always("solo", |_| says("done").with_usage(60, 20));
    let mut events = Vec::new();
    for n in 0..10 {
        let run = app.run("solo", &n.to_string()).await;
        let names: Vec<_> = run
            .events()
            .await
            .into_iter()
            .map(|event| event.kind().to_owned())
            .collect();
        assert_eq!(names.last().map(String::as_str), Some("run.completed"));
        events.push(names.iter().filter(|name| *name == "budget.alert").count());
        if n % 3 == 1 {
            app.crash_and_restart().await;
        }
    }
    assert_eq!(events, [0, 0, 0, 0, 1, 0, 0, 1, 0, 1]);
    let alerts = distinct_alerts(&receiver, 3).await;
    assert!(alerts.iter().all(|alert| alert.is_signed_by(SECRET)));
    let data: Vec<_> = alerts
        .iter()
        .map(|alert| alert.json()["data"].clone())
        .collect();
    let shares: Vec<_> = data.iter().map(|data| data["share"].clone()).collect();
    assert_eq!(shares, [json!(0.5), json!(0.8), json!(1.0)]);
    assert_eq!(alerts[0].json()["type"], "budget.alert");
    assert_eq!(
        (&data[1]["budget"], &data[1]["used_usd"]),
        (&json!("money"), &json!(0.0008))
    );
    assert_eq!(post(&app, "solo").await.status, 429);
    assert_eq!(distinct_alerts(&receiver, 3).await.len(), 3);
}

/// The alerts in the order of their shares. A failed attempt, and one that a kill interrupted, is sent again with the same id.
async fn distinct_alerts(receiver: &WebhookReceiver, count: usize) -> Vec<ReceivedMessage> {
    let mut received = count;
    loop {
        let mut alerts = receiver.wait_for_messages(received).await;
        received = alerts.len() + 1;
        let mut ids = BTreeSet::new();
        alerts.retain(|alert| ids.insert(alert.header("webhook-id").to_owned()));
        if alerts.len() >= count {
            let share = |alert: &ReceivedMessage| alert.json()["data"]["share"].as_f64();
            alerts.sort_by(|a, b| share(a).partial_cmp(&share(b)).expect("shares"));
            return alerts;
        }
    }
}

#[tokio::test]
async fn all_budgets_that_match_a_root_hold() {
    let key = |name: &str| {
        let hash = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{hash}\"\nscopes = [\"run\", \"read\"]\n")
    };
    let app = TestApp::setup()
        .config(&key("ada"))
        .config(&key("bob"))
        .config(&format!("[budgets.ada]\nmatch = {{ key = \"ada\" }}\ntokens = 100\nper = \"day\"\ntimezone = \"{}\"", zone()))
        .config(&format!("[budgets.blue]\nmatch = {{ label.team = \"blue\" }}\ntokens = 50\nper = \"day\"\ntimezone = \"{}\"", zone()))
        .agent("solo", "")
        .spawn()
        .await;
    app.provider
        .always("solo", |_| says("done").with_usage(40, 20));
    let start = async |key: &str, team: &str| {
        let body = json!({"input": "go", "labels": {"team": team}});
        let request = app.request(Method::POST, "/agents/solo/runs?wait=180");
        send(request.bearer_auth(key).json(&body)).await.status
    };
    assert_eq!(start("ada", "red").await, 200);
    assert_eq!(start("ada", "blue").await, 200);
    assert_eq!(start("ada", "red").await, 429, "by the budget of the key");
    assert_eq!(
        start("bob", "blue").await,
        429,
        "by the budget of the label"
    );
    assert_eq!(start("bob", "red").await, 200);
    let seen = async |key: &str| {
        let usage = send(app.request(Method::GET, "/usage").bearer_auth(key))
            .await
            .json();
        let names = usage["budgets"].as_array().expect("budgets").iter();
        names
            .map(|it| it["name"].as_str().expect("a name").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(seen("ada").await, ["ada"], "not what others use");
    assert!(seen("bob").await.is_empty());
}

#[tokio::test]
async fn a_budget_in_usd_warns_of_models_without_a_price() {
    let app = TestApp::setup()
        .config("[budgets.money]\nusd = 1\nper = \"day\"")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let warning = &run["warnings"][0];
    assert_eq!(warning["code"], "price_unknown");
    let message = warning["message"].as_str().expect("a message");
    assert!(
        message.starts_with("money counts in USD, but the price of anthropic/solo"),
        "{message}"
    );
    let agent = app.get("/agents/solo").await.text;
    assert!(agent.contains("[budgets] money counts in USD"), "{agent}");
}

#[tokio::test]
async fn a_clients_unpriced_model_cannot_bypass_a_budget_in_usd() {
    let app = TestApp::setup()
        .config("[budgets.money]\nmatch = { label.team = \"blue\" }\nusd = 1\nper = \"day\"")
        .config("[prices.\"anthropic/priced\"]\ninput = 1\noutput = 1")
        .agent("solo", "")
        .spawn()
        .await;
    for model in ["priceless", "priced"] {
        app.provider.always(model, |_| says("done"));
    }
    let blue = |model: &str| json!({"input": "go", "model": model, "labels": {"team": "blue"}});
    for path in ["/agents/solo/runs", "/agents/solo/dry-run"] {
        let refused = app.post(path, &blue("anthropic/priceless")).await;
        let problem = refused.problem(422);
        assert_eq!(refused.json()["code"], "unpriced_model", "{problem}");
        assert!(
            problem.contains("the price of anthropic/priceless is not known"),
            "{problem}"
        );
    }
    assert!(app.provider.requests().is_empty(), "no model was requested");

    let priced = app.run_with("solo", blue("anthropic/priced")).await;
    assert_eq!(priced.output(), "done");
    // The budget does not hold for other labels.
    let unmatched = json!({"input": "go", "model": "anthropic/priceless"});
    let unmatched = app.run_with("solo", unmatched).await;
    assert_eq!(unmatched.output(), "done");

    // Nor does a fork get around it.
    let fork = |source: &str| format!("/runs/{source}/fork");
    let edit = json!({"at": {"turn": 1}, "edit": {"model": "anthropic/priceless"}});
    app.post(&fork(priced.id()), &edit).await.problem(422);
    let labels = json!({"at": {"turn": 1}, "labels": {"team": "blue"}});
    app.post(&fork(unmatched.id()), &labels).await.problem(422);
    let again = app
        .post(&fork(unmatched.id()), &json!({"at": {"turn": 1}}))
        .await;
    assert_eq!(again.status, 202, "{}", again.text);
}

#[tokio::test]
async fn a_fork_of_a_fork_cannot_bypass_a_budget_in_usd() {
    let app = TestApp::setup()
        .config("[budgets.money]\nmatch = { label.team = \"blue\" }\nusd = 1\nper = \"day\"")
        .config("[prices.\"anthropic/priced\"]\ninput = 1\noutput = 1")
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\n[subagent]\nenabled = true",
        )
        .agent("reader", "")
        .spawn()
        .await;
    for model in ["reader", "priceless", "priced"] {
        app.provider.always(model, |_| says("a book"));
    }
    let ad_hoc = calls([("subagent", json!({"label": "l", "task_prompt": "read"}))]);
    app.provider
        .will("planner", [delegates([("reader", "read")]), ad_hoc]);
    app.provider.always("planner", |_| says("done"));
    let source = app.run("planner", "go").await;
    let blue = json!({"team": "blue"});
    let at = |child: &Run<'_>| json!({"run": child.id(), "turn": 1});
    let children = source.children().await;
    assert_eq!(children.len(), 2);
    for child in children {
        // What the operator's files name is not refused.
        let body = json!({"at": at(&child), "labels": blue});
        fork(&app, source.id(), &body).await;

        let body = json!({"at": at(&child), "edit": {"model": "anthropic/priceless"}});
        let unmatched = fork(&app, source.id(), &body).await;
        let requests = app.provider.requests_for("priceless").len();
        let copies = unmatched.children().await;
        let body = json!({"at": at(&copies[0]), "labels": blue});
        let path = format!("/runs/{}/fork", unmatched.id());
        let refused = app.post(&path, &body).await;
        let problem = refused.problem(422);
        assert_eq!(refused.json()["code"], "unpriced_model", "{problem}");
        assert_eq!(app.provider.requests_for("priceless").len(), requests);
        // A budget of the root alone holds for its children too.
        let budget = json!({"at": at(&copies[0]), "budget": {"max_cost_usd": 1}});
        app.post(&path, &budget).await.problem(422);

        let edit =
            json!({"at": at(&copies[0]), "labels": blue, "edit": {"model": "anthropic/priced"}});
        fork(&app, unmatched.id(), &edit).await;
    }
}
