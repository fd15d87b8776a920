//! The log's line about the end of a run.

use crate::domain::run::{Run, now};

/// One line for each run that ended, without any text of a client or a model.
pub fn log_end(run: &Run) {
    let status = run.status.as_str();
    let usage = &run.usage;
    let duration_ms = run.duration_ms(now());
    tracing::info!(
        run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0, status,
        error = run.error.as_ref().map(|error| error.code.to_string()),
        duration_ms, turns = run.turns, input_tokens = usage.tokens.input, output_tokens = usage.tokens.output,
        tool_calls = usage.tool_calls, cost_usd = usage.cost.map(|cost| cost.to_usd()),
        "{} of agent {} is {status} after {duration_ms} ms", run.id, run.agent
    );
}
