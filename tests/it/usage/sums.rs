//! `/usage`: sums that equal those over `/runs`, for every grouping, and that outlive the runs.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, fails, hangs, says};
use crate::support::usage_sums::{all_runs, assert_equals_runs, picodollars, totals};

/// A root that delegates twice, a middle agent on another wire, and leaves. Two of the models have prices.
fn forest() -> Setup {
    TestApp::setup()
        .config("[prices.\"anthropic/root\"]\ninput = 3.0\noutput = 15.3\n[prices.\"openai/middle\"]\ninput = 0.07\noutput = 1.1")
        .agent("root", "sub_agents = [\"middle\"]\n[retry]\nmax_retries = 0")
        .agent("middle", "model = \"openai/middle\"\nsub_agents = [\"leaf\"]")
        .agent("leaf", "model = \"ollama/leaf\"")
}

/// What the models reply; the input `fail` makes the root's last request fail.
fn teach(app: &TestApp) {
    app.provider
        .always("root", |seen| match seen.tool_results().len() {
            0 => delegates([("middle", "1"), ("middle", "2")])
                .with_usage(11, 7)
                .with_cached_tokens(100, 50),
            _ if seen.user_messages()[0].contains("fail") => fails(500, "broken"),
            _ => says("done").with_usage(31, 13),
        });
    app.provider
        .always("middle", |seen| match seen.tool_results().len() {
            0 => delegates([("leaf", "a"), ("leaf", "b")]).with_usage(101, 3),
            _ => says("summary").with_usage(203, 5).with_cached_tokens(40, 0),
        });
    app.provider
        .always("leaf", |_| says("one two three").with_usage(1009, 17));
}

async fn rows(app: &TestApp, query: &str) -> Vec<Value> {
    let usage = app.get(&format!("/usage?{query}")).await;
    assert_eq!(usage.status, 200, "{}", usage.text);
    let usage = usage.json();
    for name in ["runs", "input_tokens", "tool_calls", "model_calls"] {
        let rows = usage["data"].as_array().expect("rows").iter();
        let sum: u64 = rows.map(|row| row[name].as_u64().expect("a number")).sum();
        assert_eq!(usage["totals"][name], sum, "{query}: {name}");
    }
    usage["data"].as_array().expect("rows").clone()
}

/// Checks that the groups have the sums over the runs with the same value.
fn assert_groups(rows: &[Value], runs: &[Value], by: &str, value_of: impl Fn(&Value) -> Value) {
    let mut remaining = runs.len();
    for row in rows {
        let members = || runs.iter().filter(|run| value_of(run) == row[by]);
        for name in ["input_tokens", "output_tokens", "tool_calls"] {
            let sum: u64 = members()
                .map(|run| run[name].as_u64().expect("a number"))
                .sum();
            assert_eq!(row[name], sum, "{name} of {row}");
        }
        assert_eq!(row["runs"], members().count(), "{row}");
        remaining -= members().count();
    }
    assert_eq!(remaining, 0, "every run is in a group of {by}");
}

#[tokio::test]
async fn sums_equal_those_over_the_runs_for_every_grouping() {
    let app = forest().spawn().await;
    teach(&app);
    for (input, team, session) in [
        ("go", Some("blue"), Some("ada")),
        ("go on", Some("red"), None),
        ("fail", Some("blue"), Some("eve")),
        ("again", None, Some("bob")),
    ] {
        let mut body = json!({"input": input, "labels": {}});
        if let Some(team) = team {
            body["labels"]["team"] = team.into();
        }
        if let Some(session) = session {
            body["session"] = session.into();
        }
        app.run_with("root", body).await;
    }
    app.provider.always("leaf", |_| hangs());
    let cancelled = app.start("leaf", "wait").await;
    app.provider.wait_for_concurrency("leaf", 1).await;
    cancelled.cancel("enough").await.wait_for_end().await;

    assert_equals_runs(&app).await;
    let runs = all_runs(&app).await;
    let root_of = |run: &Value| {
        let root = runs.iter().find(|root| root["id"] == run["root_id"]);
        root.expect("a root").clone()
    };
    assert_groups(&rows(&app, "by=agent").await, &runs, "agent", |run| {
        run["agent"].clone()
    });
    assert_groups(&rows(&app, "by=model").await, &runs, "model", |run| {
        run["model"].clone()
    });
    assert_groups(&rows(&app, "by=session").await, &runs, "session", |run| {
        root_of(run)["session"].clone()
    });
    assert_groups(
        &rows(&app, "by=label.team").await,
        &runs,
        "label.team",
        |run| root_of(run)["labels"]["team"].clone(),
    );
    assert_groups(
        &rows(&app, "by=day&tz=Asia/Kathmandu").await,
        &runs,
        "day",
        |run| {
            let time: jiff::Timestamp = root_of(run)["created_at"]
                .as_str()
                .expect("a time")
                .parse()
                .expect("a time");
            time.in_tz("Asia/Kathmandu")
                .expect("a zone")
                .date()
                .to_string()
                .into()
        },
    );
    let both = rows(&app, "by=label.team,agent&label.team=blue").await;
    let agents: Vec<_> = both
        .iter()
        .map(|row| row["agent"].as_str().expect("a name"))
        .collect();
    assert_eq!(agents, ["leaf", "middle", "root"]);
    assert_eq!(both[0]["runs"], 8);
    assert_eq!(both[0]["cost_usd"], Value::Null, "it has no price");
    assert_eq!(rows(&app, "by=agent&agent=middle").await.len(), 1);
    assert!(rows(&app, "until=2020-01-01").await.is_empty());
}

#[tokio::test]
async fn percentiles_are_within_two_percent_of_the_runs_durations() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    for n in 0..20 {
        app.run("solo", &n.to_string()).await;
    }
    let mut durations: Vec<_> = all_runs(&app)
        .await
        .iter()
        .map(|run| run["duration_ms"].as_f64().expect("a duration"))
        .collect();
    durations.sort_by(f64::total_cmp);
    let totals = totals(&app, "").await;
    for (name, rank) in [("duration_p50_ms", 10), ("duration_p95_ms", 19)] {
        let (expected, found) = (
            durations[rank - 1],
            totals[name].as_f64().expect("a percentile"),
        );
        assert!(
            (found - expected).abs() <= expected * 0.02,
            "{name}: {found} for {expected}"
        );
    }
}

#[tokio::test]
async fn usage_outlives_its_runs_and_the_daemon() {
    let mut app = forest().spawn().await;
    teach(&app);
    let id = app.run("root", "go").await.id().to_owned();
    assert_equals_runs(&app).await;
    let before = totals(&app, "").await;

    app.crash_and_restart().await;
    assert_eq!(totals(&app, "").await, before);
    assert_eq!(app.delete(&format!("/runs/{id}")).await.status, 204);

    assert!(all_runs(&app).await.is_empty());
    assert_eq!(totals(&app, "").await, before);
    assert_ne!(picodollars(&before["cost_usd"]), 0);
}

/// The reply of a fallback counts under the fallback, also after the daemon was killed in between.
#[tokio::test]
async fn a_reply_counts_once_under_the_model_that_gave_it() {
    let mut app = TestApp::setup()
        .agent(
            "solo",
            "model = \"anthropic/first\"\nfallback_models = [\"openai/second\"]\nsub_agents = [\"leaf\"]\n[retry]\nmax_retries = 0",
        )
        .agent("leaf", "")
        .spawn()
        .await;
    app.provider
        .always("leaf", |_| says("read").with_usage(1, 1));
    app.provider.will(
        "first",
        [
            delegates([("leaf", "x")]).with_usage(100, 10),
            fails(529, "overloaded"),
            fails(529, "overloaded"),
        ],
    );
    let gate = Gate::closed();
    app.provider.will(
        "second",
        [
            delegates([("leaf", "y")]).with_usage(200, 20),
            says("late").after_gate(&gate),
        ],
    );
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("second", 2).await;
    app.provider
        .always("first", |_| says("done").with_usage(400, 40));
    app.crash_and_restart().await;
    gate.open();

    let run = app.find(&id).await.wait_for_end().await;

    assert_eq!(run.output(), "done");
    let by_model = rows(&app, "by=model&agent=solo").await;
    let tokens: Vec<_> = by_model
        .iter()
        .map(|row| {
            (
                row["model"].as_str().expect("a model"),
                row["input_tokens"].as_u64().expect("tokens"),
                row["runs"].as_u64().expect("runs"),
            )
        })
        .collect();
    assert_eq!(tokens, [("first", 500, 1), ("second", 200, 0)]);
    assert_equals_runs(&app).await;
}

#[tokio::test]
async fn a_key_sees_its_own_usage_and_an_admin_all() {
    let key = |name: &str, scopes: &str| {
        let hash = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{hash}\"\nscopes = [{scopes}]\n")
    };
    let app = TestApp::setup()
        .config(&key("ada", "\"run\", \"read\""))
        .config(&key("bob", "\"run\", \"read\""))
        .config(&key("root", "\"admin\""))
        .agent("solo", "")
        .spawn()
        .await;
    app.provider
        .always("solo", |_| says("done").with_usage(7, 2));
    let request = |method, path: &str, key: &str| app.request(method, path).bearer_auth(key);
    for (name, runs) in [("ada", 2), ("bob", 3)] {
        for _ in 0..runs {
            let body = json!({"input": name, "session": name, "on_busy": "queue"});
            let run =
                send(request(Method::POST, "/agents/solo/runs?wait=180", name).json(&body)).await;
            assert_eq!(run.status, 200, "{}", run.text);
        }
    }
    let seen = async |name: &str| {
        let usage = send(request(Method::GET, "/usage?by=key,session", name)).await;
        assert_eq!(usage.status, 200, "{}", usage.text);
        let data = usage.json()["data"].as_array().expect("rows").clone();
        let row = |row: &Value| {
            (
                row["key"].clone(),
                row["session"].clone(),
                row["runs"].clone(),
            )
        };
        data.iter().map(row).collect::<Vec<_>>()
    };
    let row = |name: &str, runs: u64| (json!(name), json!(name), json!(runs));
    assert_eq!(seen("ada").await, [row("ada", 2)]);
    assert_eq!(seen("bob").await, [row("bob", 3)]);
    assert_eq!(seen("root").await, [row("ada", 2), row("bob", 3)]);
}

#[tokio::test]
async fn an_invalid_parameter_of_usage_is_named() {
    let app = TestApp::spawn().await;
    for (query, expected) in [
        ("by=agent,modle", "\"by\": \"modle\" is not one of"),
        ("by=label.", "\"by\": \"label.\" is not one of"),
        ("by=day,day", "\"by\": \"day\" is given twice"),
        (
            "tz=Mars/Olympus",
            "\"tz\": \"Mars/Olympus\" is not a time zone",
        ),
        (
            "since=yesterday",
            "\"since\": \"yesterday\" is not an RFC 3339 time",
        ),
        (
            "since=2026-02-01&until=2026-01-01",
            "\"until\": is before since",
        ),
        ("gruop=agent", "unknown query parameter \"gruop\""),
    ] {
        let refused = app.get(&format!("/usage?{query}")).await;
        let detail = refused.json()["detail"]
            .as_str()
            .expect("a detail")
            .to_owned();
        assert_eq!(refused.status, 400, "{query}: {detail}");
        assert!(detail.contains(expected), "{query}: {detail}");
    }
    let empty = app.get("/usage?by=agent").await.json();
    assert_eq!(
        (&empty["data"], &empty["totals"]["runs"]),
        (&json!([]), &json!(0))
    );
}
