//! The results that a model gets of its tool calls.

use serde_json::Value;

use crate::support::app::TestApp;
use crate::support::provider::answer::{calls, says};

/// The results that the agent `worker` gets of these calls, made one after another; errors begin with `error: `.
pub async fn call_results(app: &TestApp, sent: &[(&str, Value)]) -> Vec<String> {
    let before = app.provider.requests_for("worker").len();
    for call in sent {
        app.provider.will("worker", [calls([call.clone()])]);
    }
    app.provider.will("worker", [says("done")]);
    assert_eq!(app.run("worker", "go").await.output(), "done");
    let seen = app
        .provider
        .wait_for_request("worker", before + sent.len() + 1)
        .await;
    let results = seen.tool_results().into_iter();
    results
        .zip(seen.tool_result_errors())
        .map(|(text, is_error)| {
            if is_error {
                format!("error: {text}")
            } else {
                text
            }
        })
        .collect()
}
