//! The permit and the place in a session that a root run holds while it is driven.

use crate::engine::admission::sessions::SessionGuard;
use crate::engine::state::active_run::ActiveRun;
use crate::fair::admission::RunPermit;

/// What a root run gives back when it has ended, before anybody hears of that.
#[derive(Default)]
pub struct RunPermits<'s> {
    /// Its slot, once it has one.
    pub run_permit: Option<RunPermit>,
    /// Its seat in a session, which outlives a suspension.
    pub session_guard: Option<&'s mut Option<SessionGuard>>,
}

impl RunPermits<'_> {
    /// Gives everything back, unless the run's tree is suspended before it `has_ended`: then it keeps its order.
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
