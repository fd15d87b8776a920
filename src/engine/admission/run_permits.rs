//! The permit and the place in a session that a root run holds while it is driven.

use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::sessions::SessionGuard;
use crate::fair::admission::RunPermit;

/// What a root run releases when it has ended, before anyone is notified.
#[derive(Default)]
pub struct RunPermits<'s> {
    pub run_permit: Option<RunPermit>,
    /// Kept while the run is suspended.
    pub session_guard: Option<&'s mut Option<SessionGuard>>,
}

impl RunPermits<'_> {
    /// Releases everything, unless the run's tree was suspended before it ended: it then keeps its permit and its
    /// place.
    pub fn release(self, run: &ActiveRun, has_ended: bool) {
        if run.is_suspended() && !has_ended {
            if let Some(permit) = self.run_permit {
                run.tree.root_permit.set(permit);
            }
            return;
        }
        if run.parent.is_none() {
            drop(run.tree.root_permit.take());
        }
        drop(self.run_permit);
        if let Some(guard) = self.session_guard {
            drop(guard.take());
        }
    }
}
