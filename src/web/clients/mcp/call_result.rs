//! The result of a tool call: what became of the run.

use rmcp::model::{CallToolResult, ContentBlock, MetaObject};
use serde_json::{Value, json};

use crate::domain::run::{Run, Status};
use crate::web::clients::mcp::rpc::problem_data;
use crate::web::clients::run_meta;
use crate::web::error::Problem;

/// The result of a run that has ended. `takes_any_json` tells whether the protocol's version allows structured content that
/// is not an object.
pub fn from_run(run: &Run, takes_any_json: bool) -> CallToolResult {
    let mut meta = run_meta(run);
    let mut result = match (&run.content, run.status) {
        (Some(content), Status::Completed) => {
            let mut result = CallToolResult::success(vec![ContentBlock::text(content.as_str())]);
            result.structured_content = Some(content.as_str())
                .filter(|_| run.structured)
                .and_then(|json| serde_json::from_str(json).ok())
                .filter(|json: &Value| takes_any_json || json.is_object());
            result
        }
        _ => CallToolResult::error(vec![ContentBlock::text(failure_text(run))]),
    };
    if let Some(failure) = &run.error {
        meta.insert(run_meta::ERROR.to_owned(), json!(failure));
    }
    result.meta = Some(meta);
    result
}

/// The result of a call whose run was not accepted, for the client's model.
pub fn from_problem(problem: &Problem) -> CallToolResult {
    let mut result = CallToolResult::error(vec![ContentBlock::text(problem.detail())]);
    let mut meta = MetaObject::new();
    meta.insert(run_meta::ERROR.to_owned(), problem_data(problem));
    result.meta = Some(meta);
    result
}

/// See [`run_meta::run_meta`].
pub fn run_meta(run: &Run) -> MetaObject {
    MetaObject(run_meta::run_meta(run))
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
