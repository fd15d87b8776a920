//! The context of a task.

use crate::domain::run::Run;

/// The run's session. A run without one has a context of its own.
pub fn context_id(run: &Run) -> String {
    run.session.clone().unwrap_or_else(|| run.id.to_string())
}
