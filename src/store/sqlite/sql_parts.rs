//! Parts of SQL that several queries share.

/// The ids of the run `:id` and all its descendants, as `tree`.
pub const SUBTREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (:id) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) ";

/// Leaves out trees that are being deleted, in `runs AS r`.
pub const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

/// What is counted of an ended run, in the order that `EndedRow` and, for the first ones, `RootRow` read.
pub const ENDED_COLUMNS: &str = "r.created_at, r.owner, r.session, r.labels, r.child, r.agent, r.model, r.model_usage, r.started_at";
