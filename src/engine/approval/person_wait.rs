//! Waits until a run does nothing more before a person decides.

use std::pin::pin;
use std::sync::Arc;

use crate::domain::run::{PendingApproval, Run, RunId};
use crate::engine::context::Engine;

/// The record of a run that has come to wait for a person. `seen` is a record in which it waits for one already: then the
/// record in which it waits no more, or for other calls. Never resolves if this process does not drive the run.
pub async fn wait_for_person(engine: &Engine, id: RunId, seen: Option<&Run>) -> Arc<Run> {
    loop {
        // Subscribe before looking, so that no change is missed.
        let mut resumed = pin!(engine.suspension.changed.notified());
        resumed.as_mut().enable();
        let Some(active_run) = engine.active_runs.get(id) else {
            match engine.orphans.contains(id) {
                // Its parent has not reached it yet.
                true => resumed.await,
                false => std::future::pending().await,
            }
            continue;
        };
        let mut changed = pin!(active_run.tree.root_permit.changed.notified());
        changed.as_mut().enable();
        // The record is read only if it may have changed.
        if (seen.is_some() || active_run.is_waiting())
            && let Ok(Some(run)) = engine.journal.store().run(id).await
            && has_changed(&run, seen)
        {
            return Arc::new(run);
        }
        tokio::select! {
            () = changed => {}
            () = resumed => {}
        }
    }
}

/// Whether a record is what somebody waits for who has `seen` another.
pub fn has_changed(run: &Run, seen: Option<&Run>) -> bool {
    match seen {
        None => run.waits_for_person(),
        Some(seen) => {
            !run.waits_for_person() || run.turns != seen.turns || !calls(run).eq(calls(seen))
        }
    }
}

fn calls(run: &Run) -> impl Iterator<Item = (RunId, &str)> {
    let pending: &[PendingApproval] = &run.pending_approvals;
    pending
        .iter()
        .map(|it| (it.run_id, it.request.tool_call_id.as_str()))
}
