//! Parts of SQL that several queries share.

/// What is counted of an ended run, in the order that `EndedRow` and, for the first ones, `RootRow` read.
pub const ENDED_COLUMNS: &str = "r.created_at, r.owner, r.session, r.labels, r.child, r.agent, r.model, r.model_usage, r.started_at";
