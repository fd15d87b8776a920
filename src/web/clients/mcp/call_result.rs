//! The result of a tool call: what became of the run.

use rmcp::model::{CallToolResult, ContentBlock, MetaObject};
use serde_json::value::to_value;
use serde_json::{Value, json};

use crate::domain::run::{Run, Status};
use crate::domain::structured;
use crate::web::clients::mcp::rpc::problem_data;
use crate::web::error::Problem;
use crate::web::response::run::UsageView;

const RUN_ID: &str = "axed/run_id";
const STATUS: &str = "axed/status";
const USAGE: &str = "axed/usage";
const COST_USD: &str = "axed/cost_usd";
const ERROR: &str = "axed/error";

/// The result of a run that has ended. `takes_any_json` tells whether the protocol's version allows structured content that
/// is not an object.
pub fn from_run(run: &Run, takes_any_json: bool) -> CallToolResult {
    let mut meta = run_meta(run);
    let mut result = match (&run.content, run.status) {
        (Some(content), Status::Completed) => {
            let mut result = CallToolResult::success(vec![ContentBlock::text(content.as_str())]);
            result.structured_content = Some(content.as_str())
                .filter(|_| run.structured)
                .and_then(structured::extract_json)
                .and_then(|json| to_value(json).ok())
                .filter(|json: &Value| takes_any_json || json.is_object());
            result
        }
        _ => CallToolResult::error(vec![ContentBlock::text(failure_text(run))]),
    };
    if let Some(failure) = &run.error {
        meta.insert(ERROR.to_owned(), json!(failure));
    }
    result.meta = Some(meta);
    result
}

/// The result of a call whose run was not accepted, for the client's model.
pub fn from_problem(problem: &Problem) -> CallToolResult {
    let mut result = CallToolResult::error(vec![ContentBlock::text(problem.detail())]);
    let mut meta = MetaObject::new();
    meta.insert(ERROR.to_owned(), problem_data(problem));
    result.meta = Some(meta);
    result
}

/// The run's id, status, usage and cost, its descendants included.
pub fn run_meta(run: &Run) -> MetaObject {
    let usage = &run.tree.usage;
    let mut meta = MetaObject::new();
    meta.insert(RUN_ID.to_owned(), json!(run.id));
    meta.insert(STATUS.to_owned(), json!(run.status));
    meta.insert(USAGE.to_owned(), json!(UsageView::from(usage)));
    let cost = usage.cost.map(|cost| cost.to_usd());
    meta.insert(COST_USD.to_owned(), json!(cost));
    meta
}

fn failure_text(run: &Run) -> String {
    let why = match (&run.error, &run.cancel_reason) {
        (Some(failure), _) => format!("The agent {} failed: {}", run.agent, failure.message),
        (None, Some(reason)) => format!("The run of {} was cancelled: {reason}", run.agent),
        (None, None) => format!("The run of {} was cancelled", run.agent),
    };
    match &run.partial_content {
        Some(partial) if !partial.is_empty() => format!("{why}\n\nIts last text:\n{partial}"),
        _ => why,
    }
}
