//! How long a client has paused a run, from the events of its tree.

use std::collections::HashSet;

use jiff::{SignedDuration, Timestamp};

use crate::domain::event::{Event, EventKind, ResumeCause};
use crate::domain::run::{RunId, now};
use crate::engine::context::RunContext;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};

/// How long the run, or one above it, was paused since then. Until now, if it is.
pub async fn since(context: &RunContext, start: Timestamp) -> Result<SignedDuration, StoreError> {
    let runs = context.run.self_and_ancestors().map(|run| run.scope.run);
    let mut pauses = Pauses {
        runs: runs.collect(),
        ..Pauses::default()
    };
    let store = context.engine.journal.store();
    let mut pages = EventPages::of_tree(&**store, context.run.scope.root);
    while let Some(page) = pages.next().await? {
        for event in page {
            pauses.apply(&events::recorded(&event)?);
        }
    }
    Ok(pauses.total(start, now()))
}

#[derive(Default)]
struct Pauses {
    runs: HashSet<RunId>,
    paused: HashSet<RunId>,
    /// When the first of the paused runs was paused.
    since: Option<Timestamp>,
    ended: Vec<(Timestamp, Timestamp)>,
}

impl Pauses {
    fn apply(&mut self, event: &Event) {
        if !self.runs.contains(&event.run_id) {
            return;
        }
        match event.kind {
            EventKind::RunPaused { .. } => {
                self.paused.insert(event.run_id);
                self.since.get_or_insert(event.time);
            }
            EventKind::RunResumed {
                cause: ResumeCause::Request,
                ..
            } if self.paused.remove(&event.run_id) && self.paused.is_empty() => {
                let since = self.since.take().unwrap_or(event.time);
                self.ended.push((since, event.time));
            }
            _ => {}
        }
    }

    fn total(&self, start: Timestamp, end: Timestamp) -> SignedDuration {
        let open = self.since.map(|since| (since, end));
        let pauses = self.ended.iter().copied().chain(open);
        pauses
            .map(|(from, to)| from.max(start).duration_until(to))
            .filter(SignedDuration::is_positive)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};

    use super::Pauses;
    use crate::domain::event::{Event, EventKind, ResumeCause};
    use crate::domain::run::RunId;

    #[test]
    fn pauses_of_a_run_and_of_those_above_it_count_once() {
        let [run, parent, other] = [RunId::new(), RunId::new(), RunId::new()];
        let mut pauses = Pauses {
            runs: [run, parent].into(),
            ..Pauses::default()
        };
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        let mut apply = |kind: EventKind, run_id: RunId, second: i64| {
            pauses.apply(&Event {
                run_id,
                root_id: parent,
                depth: 0,
                agent: "solo".into(),
                time: at(second),
                kind,
            });
        };
        let paused = || EventKind::RunPaused { by: None };
        let resumed = |cause| EventKind::RunResumed {
            attempt: 1,
            cause,
            by: None,
        };
        apply(paused(), parent, 10);
        apply(paused(), run, 20);
        apply(paused(), other, 21);
        apply(resumed(ResumeCause::Restart), run, 25);
        apply(resumed(ResumeCause::Request), parent, 30);
        apply(resumed(ResumeCause::Request), run, 40);
        apply(paused(), run, 60);
        let total = |start: i64| pauses.total(at(start), at(65));
        assert_eq!(total(0), SignedDuration::from_secs(35));
        assert_eq!(total(35), SignedDuration::from_secs(10));
        assert_eq!(total(50), SignedDuration::from_secs(5));
    }
}
