//! `axed usage`.

use serde_json::{Value, json};

use crate::cli::home::{Ended, ended};
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::says;

async fn axed(app: &TestApp, arguments: &[&str]) -> Ended {
    let arguments = [arguments, &["--server", &app.daemon.url]].concat();
    ended(axed_command(&app.path("."), &arguments)).await
}

#[tokio::test]
async fn usage_is_a_table_sorted_by_cost_or_json() {
    let app = TestApp::setup()
        .config("[prices.\"anthropic/dear\"]\ninput = 10.0\noutput = 50.0")
        .agent("dear", "")
        .agent("busy", "")
        .spawn()
        .await;
    let none = axed(&app, &["usage"]).await;
    assert_eq!(none.with(0), "");
    assert!(none.err.contains("no ended runs"), "{}", none.err);
    app.provider
        .always("dear", |_| says("x").with_usage(1000, 200));
    app.provider
        .always("busy", |_| says("x").with_usage(5000, 100));
    for (agent, team) in [("busy", "red"), ("busy", "blue"), ("dear", "blue")] {
        app.run_with(agent, json!({"input": "go", "labels": {"team": team}}))
            .await;
    }

    let table = axed(&app, &["usage", "--since", "7d"]).await;
    let lines: Vec<Vec<&str>> = table
        .with(0)
        .lines()
        .map(|line| line.split('\t').collect())
        .collect();
    assert_eq!(
        lines[0],
        ["agent", "runs", "failed", "in", "out", "usd", "p50", "p95"]
    );
    assert_eq!(lines[1][..6], ["dear", "1", "0", "1000", "200", "0.0200"]);
    assert_eq!(lines[2][..6], ["busy", "2", "0", "10000", "200", ""]);
    assert_eq!(lines[3][..6], ["total", "3", "0", "11000", "400", "0.0200"]);
    let wide = axed(
        &app,
        &[
            "usage",
            "--by",
            "label.team,agent",
            "--label",
            "team=red",
            "-o",
            "wide",
        ],
    )
    .await;
    let lines: Vec<Vec<&str>> = wide
        .with(0)
        .lines()
        .map(|line| line.split('\t').collect())
        .collect();
    assert_eq!(lines.len(), 2, "one group needs no total: {}", wide.out);
    assert_eq!((lines[0][0], lines[0].len()), ("label.team", 16));
    assert_eq!(lines[1][..3], ["red", "busy", "1"]);
    let parsed: Value = serde_json::from_str(
        axed(&app, &["usage", "--by", "day", "-o", "json"])
            .await
            .with(0),
    )
    .expect("JSON");
    // Two at midnight.
    let days = parsed["data"].as_array().map_or(0, Vec::len);
    assert!([1, 2].contains(&days), "{parsed}");
    assert_eq!(parsed["totals"]["runs"], 3);
    let until = axed(&app, &["usage", "--until", "2d"]).await;
    assert_eq!(until.with(0), "");

    let invalid = axed(&app, &["usage", "--by", "modle"]).await;
    invalid.with(2);
    assert!(
        invalid
            .err
            .contains("\"modle\" is not one of: agent, model"),
        "{}",
        invalid.err
    );
}
