//! Runs are searched over HTTP.

use serde_json::Value;

use crate::support::app::TestApp;
use crate::support::provider::answer::{delegates, fails, says};

fn ids(page: &Value) -> Vec<&str> {
    let data = page["data"].as_array().expect("runs").iter();
    data.map(|run| run["id"].as_str().expect("an id")).collect()
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
        let page = app.get(&format!("/runs?{query}")).await.json();
        assert_eq!(ids(&page), wanted, "{query}");
        assert_eq!(page["next_cursor"], Value::Null, "{query}");
    }
    let page = app.get("/runs?all=true&q=%C3%A4rztebrief").await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(1), "{page}");
    assert_eq!(page["data"][0]["agent"], "reader");
    let end = &planner[planner.len() - 12..];
    for part in [end, &*planner] {
        let page = app.get(&format!("/runs?q={part}")).await.json();
        assert_eq!(ids(&page), [&planner]);
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
