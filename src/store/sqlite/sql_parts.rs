//! Parts of SQL that several queries share.

/// The ids of the run `:id` and all its descendants, as `tree`.
pub const SUBTREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (:id) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) ";

/// Leaves out trees that are being deleted, in `runs AS r`.
pub const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";
