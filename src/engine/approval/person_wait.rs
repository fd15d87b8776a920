//! Waits until a run does nothing more before a person decides.

use std::pin::pin;
use std::sync::Arc;

use crate::domain::run::{PendingInput, Run, RunId, Status};
use crate::domain::waiting_for::WaitingFor;
use crate::engine::context::{Driven, Engine};

/// The record of a run that has come to wait for a person. `seen` is a record in which it waits for one already: then the
/// record in which it waits no more, or for other calls. Never resolves if this process does not drive the run.
pub async fn wait_for_person(engine: &Engine, id: RunId, seen: Option<&Run>) -> Arc<Run> {
    loop {
        // Subscribe before looking, so that no change is missed.
        let mut resumed = pin!(engine.suspension.changed.notified());
        resumed.as_mut().enable();
        let active_run = match engine.driven_here(id).await {
            Driven::Now(active_run) => active_run,
            Driven::Later => {
                if let Some(run) = changed_record(engine, id, seen).await {
                    return run;
                }
                resumed.await;
                continue;
            }
            Driven::No => std::future::pending().await,
        };
        let mut changed = pin!(active_run.tree.root_permit.changed.notified());
        changed.as_mut().enable();
        // The record is read only if it may have changed.
        if (seen.is_some() || active_run.is_waiting())
            && let Some(run) = changed_record(engine, id, seen).await
        {
            return run;
        }
        tokio::select! {
            () = changed => {}
            () = resumed => {}
        }
    }
}

async fn changed_record(engine: &Engine, id: RunId, seen: Option<&Run>) -> Option<Arc<Run>> {
    let run = engine.journal.store().run(id).await.ok().flatten()?;
    has_changed(&run, seen).then(|| Arc::new(run))
}

/// Whether a record is what somebody waits for who has `seen` another.
pub fn has_changed(run: &Run, seen: Option<&Run>) -> bool {
    match seen {
        None => run.waits_for_person(),
        Some(_) if is_decided(run) => false,
        Some(seen) => {
            !run.waits_for_person() || run.turns != seen.turns || !calls(run).eq(calls(seen))
        }
    }
}

/// Whether all inputs that the run waited for are answered. The end of its wait is recorded next, once its tree has a permit.
fn is_decided(run: &Run) -> bool {
    run.status == Status::Waiting
        && run.waiting_for.is_some_and(WaitingFor::is_input)
        && run.pending_inputs.is_empty()
}

fn calls(run: &Run) -> impl Iterator<Item = (RunId, &str)> {
    let pending: &[PendingInput] = &run.pending_inputs;
    pending
        .iter()
        .map(|it| (it.run_id, it.request.tool_call_id.as_str()))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::value::RawValue;

    use super::has_changed;
    use crate::domain::input::{ArgumentsHash, InputRequest};
    use crate::domain::run::{PendingInput, Run, RunId, Scope, Status};
    use crate::domain::waiting_for::WaitingFor;

    /// A run that waits for approval of these calls.
    fn waiting(id: RunId, calls: &[&str]) -> Run {
        let pending = |call: &&str| PendingInput {
            run_id: id,
            root_id: id,
            agent: "a".to_owned(),
            request: InputRequest {
                tool_call_id: (*call).to_owned(),
                tool: "t".to_owned(),
                arguments: RawValue::NULL.to_owned().into(),
                arguments_hash: ArgumentsHash::compute(RawValue::NULL),
                truncated: false,
                requested_at: Timestamp::UNIX_EPOCH,
                deadline: None,
                question: None,
            },
        };
        Run {
            status: Status::Waiting,
            waiting_for: Some(WaitingFor::Approval),
            pending_inputs: calls.iter().map(pending).collect(),
            ..Run::queued(&Scope::root(id, None), "a".to_owned())
        }
    }

    #[test]
    fn a_run_has_changed_once_it_waits_no_more_or_for_other_calls() {
        let id = RunId::new();
        let seen = waiting(id, &["one", "two"]);
        let changed = |run: &Run| has_changed(run, Some(&seen));
        assert!(!changed(&seen));
        assert!(changed(&waiting(id, &["two"])));
        let decided = waiting(id, &[]);
        assert!(!changed(&decided), "the end of its wait follows");
        assert!(!has_changed(&decided, None));
        for (status, waiting_for) in [
            (Status::Running, None),
            (Status::Cancelling, None),
            (Status::Waiting, Some(WaitingFor::Resume)),
        ] {
            let next = Run {
                status,
                waiting_for,
                ..decided.clone()
            };
            assert!(changed(&next), "{status:?}");
        }
    }
}
