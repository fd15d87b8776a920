//! Forks: new runs that continue from a part of another run's record.

mod diffs;
mod edits;
mod refusals;
mod root_runs;
mod trees;

use serde_json::Value;

use crate::support::app::TestApp;
use crate::support::run::Run;

/// Forks a run and waits for the end of the fork.
pub async fn fork<'a>(app: &'a TestApp, source: &str, body: &Value) -> Run<'a> {
    start_fork(app, source, body).await.wait_for_end().await
}

pub async fn start_fork<'a>(app: &'a TestApp, source: &str, body: &Value) -> Run<'a> {
    let response = app.post(&format!("/runs/{source}/fork"), body).await;
    assert_eq!(response.status, 202, "{}", response.text);
    let run = response.json();
    assert_eq!(response.location(), run["links"]["self"]);
    Run::new(app, run)
}

/// The texts of a run's recorded conversation, in order.
pub async fn conversation(run: &Run<'_>) -> Vec<String> {
    let messages = run.messages().await;
    let texts = messages["data"].as_array().expect("messages").iter();
    let text = |message: &Value| match &message["tool_results"] {
        Value::Array(results) => {
            let texts = results.iter().map(|result| result["content"].to_string());
            texts.collect::<Vec<_>>().join("|")
        }
        _ => message["content"].as_str().unwrap_or_default().to_owned(),
    };
    texts.map(text).collect()
}
