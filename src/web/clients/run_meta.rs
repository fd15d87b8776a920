//! What the answers of other protocols say about a run beside its result.

use serde_json::{Map, Value, json};

use crate::domain::run::Run;
use crate::web::response::run::UsageView;

pub const ERROR: &str = "axed/error";
const RUN_ID: &str = "axed/run_id";
const STATUS: &str = "axed/status";
const USAGE: &str = "axed/usage";
const COST_USD: &str = "axed/cost_usd";

/// The run's id, status, usage and cost, its descendants included.
pub fn run_meta(run: &Run) -> Map<String, Value> {
    let usage = &run.tree.usage;
    let cost = usage.cost.map(|cost| cost.to_usd());
    let mut meta = Map::new();
    meta.insert(RUN_ID.to_owned(), json!(run.id));
    meta.insert(STATUS.to_owned(), json!(run.status));
    meta.insert(USAGE.to_owned(), json!(UsageView::from(usage)));
    meta.insert(COST_USD.to_owned(), json!(cost));
    meta
}
