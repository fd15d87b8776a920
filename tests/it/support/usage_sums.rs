//! Compares the sums of `/usage` with the runs that `/runs` lists.

use serde_json::{Value, json};

use crate::support::app::TestApp;

/// The numbers of a group that are sums.
const SUMS: [&str; 12] = [
    "runs",
    "roots",
    "failed",
    "cancelled",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "model_calls",
    "tool_calls",
    "cost",
    "complete",
];

/// Every run, with its texts.
pub async fn all_runs(app: &TestApp) -> Vec<Value> {
    let mut runs = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("/runs?all=true&full=true&limit=200{cursor}");
        let page = app.get(&path).await.json();
        runs.extend(page["data"].as_array().expect("runs").iter().cloned());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return runs,
        }
    }
}

/// The sums of `/usage` with this query, which has no `by`.
pub async fn totals(app: &TestApp, query: &str) -> Value {
    let usage = app.get(&format!("/usage{query}")).await;
    assert_eq!(usage.status, 200, "{}", usage.text);
    usage.json()["totals"].clone()
}

/// Picodollars: sums of floating-point numbers differ in their last digits.
pub fn picodollars(usd: &Value) -> u64 {
    (usd.as_f64().unwrap_or(0.0) * 1e12).round() as u64
}

/// Checks that the totals are the sums over all trees, none of which is at work.
pub async fn assert_equals_runs(app: &TestApp) {
    let mut expected = json!({"complete": true});
    let mut add = |name: &str, more: u64| {
        let sum = expected[name].as_u64().unwrap_or(0) + more;
        expected[name] = sum.into();
    };
    let mut is_complete = true;
    for run in all_runs(app).await {
        for status in ["failed", "cancelled"] {
            add(status, u64::from(run["status"] == status));
        }
        if run["parent_id"].is_null() {
            let tree = &run["tree"];
            add("roots", 1);
            for name in &SUMS[..10] {
                add(name, tree[*name].as_u64().unwrap_or(0));
            }
            add("cost", picodollars(&tree["cost_usd"]));
            is_complete &= tree["complete"] == true;
        }
    }
    expected["complete"] = is_complete.into();
    let mut totals = totals(app, "").await;
    totals["cost"] = picodollars(&totals["cost_usd"]).into();
    for name in SUMS {
        assert_eq!(totals[name], expected[name], "{name} of {totals}");
    }
}
