//! Runs are searched over HTTP.

use serde_json::Value;

use crate::support::app::TestApp;
use crate::support::provider::answer::{delegates, fails, says};

/// The runs that a search finds, of all its pages: on a slow machine they are short.
pub async fn found(app: &TestApp, query: &str) -> Vec<Value> {
    let mut runs = Vec::new();
    let mut path = format!("/runs?{query}");
    loop {
        let page = app.get(&path).await.json();
        runs.extend_from_slice(page["data"].as_array().expect("runs"));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/runs?{query}&cursor={cursor}"),
            None => return runs,
        }
    }
}

pub fn ids(runs: &[Value]) -> Vec<&str> {
    let ids = runs.iter().map(|run| run["id"].as_str());
    ids.map(|id| id.expect("an id")).collect()
}

#[tokio::test]
async fn runs_are_searched() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("solo", "")
        .spawn()
        .await;
    let reads = delegates([("reader", "read the Ärztebrief")]);
    app.provider.will("planner", [reads, says("All is well.")]);
    app.provider.will("reader", [says("It is long.")]);
    app.provider.will("solo", [fails(400, "no")]);
    let planner = app.run("planner", "Prüfe die Straße").await;
    let failed = app.run("solo", "go").await;
    let (planner, failed) = (planner.id().to_owned(), failed.id().to_owned());

    for (query, wanted) in [
        ("q=PR%C3%9CFE+DIE", &[&planner][..]),
        ("q=all+IS+well", &[&planner]),
        ("q=strasse", &[]),
        ("q=%C3%84RZTEBRIEF", &[]),
        ("q=+go+&error_code=provider_bad_request", &[&failed]),
        ("q=go&error_code=timeout", &[]),
        ("error_code=provider_bad_request&status=failed", &[&failed]),
        ("error_code=provider_bad_request&status=completed", &[]),
        ("max_cost_usd=0&q=well&agent=planner", &[]),
        ("min_cost_usd=1000", &[]),
    ] {
        assert_eq!(ids(&found(&app, query).await), wanted, "{query}");
    }
    let read = found(&app, "all=true&q=%C3%A4rztebrief").await;
    assert_eq!(read.len(), 1, "{read:?}");
    assert_eq!(read[0]["agent"], "reader");
    let end = &planner[planner.len() - 12..];
    for part in [end, &*planner] {
        assert_eq!(ids(&found(&app, &format!("q={part}")).await), [&planner]);
    }

    let long = "a".repeat(201);
    for (query, why) in [
        ("q=", "\"q\": \"\" is not a text of at most 200 characters"),
        ("q=+%09", "is not a text of at most 200 characters"),
        (&*format!("q={long}"), "is not a text of at most 200"),
        (
            "error_code=broken",
            "\"error_code\": \"broken\" is not one of",
        ),
        ("min_cost_usd=-1", "\"-1\" is not an amount in US dollars"),
        (
            "max_cost_usd=much",
            "\"much\" is not an amount in US dollars",
        ),
    ] {
        let got = app.get(&format!("/runs?{query}")).await;
        let detail = got.problem(400);
        assert!(detail.contains(why), "{query}: {detail}");
    }
}
