//! The children that a run has started in the background: which of them work, and whose ends are not delivered to it yet.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use crate::domain::run::{Run, RunId};

pub struct BackgroundChildren {
    state: Mutex<State>,
    /// Notified when a child has ended.
    changed: Notify,
    /// One for each child that may work at a time; `None` without a limit.
    pub permits: Option<Arc<Semaphore>>,
}

#[derive(Default)]
struct State {
    children: BTreeMap<RunId, Child>,
    /// The children whose ends are to be delivered, in the order of their ends.
    ended: Vec<RunId>,
    waits: Vec<Wait>,
    next_wait: u64,
    /// Drive the children. Dropping the set aborts them.
    tasks: JoinSet<()>,
}

struct Child {
    call: String,
    progress: ChildProgress,
}

/// How far a child in the background is.
pub enum ChildProgress {
    Working,
    Ended(Arc<Run>),
    /// Its end is recorded as part of the result of this call, which is not recorded yet.
    Claimed {
        run: Arc<Run>,
        by: String,
    },
    Delivered,
}

/// A child whose end is to be delivered.
pub struct EndedChild {
    /// The call that started it.
    pub call: String,
    pub run: Arc<Run>,
}

/// The run waits for the end of all of these children, or of any.
struct Wait {
    id: u64,
    runs: Vec<RunId>,
    any: bool,
    is_over: bool,
    /// Whether the child that ended it still counts as working, so that the tree does not look as if it only waits.
    has_last: bool,
}

impl BackgroundChildren {
    /// At most `max` of them work at a time.
    pub fn new(max: Option<usize>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
            permits: max.map(|max| Arc::new(Semaphore::new(max))),
        }
    }

    /// Adds a child, which this call started.
    pub fn add(&self, child: RunId, call: &str, progress: ChildProgress) {
        let mut state = self.lock();
        if let ChildProgress::Ended(_) = progress {
            state.ended.push(child);
        }
        let call = call.to_owned();
        state.children.insert(child, Child { call, progress });
    }

    /// Starts a task that drives a child.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut state = self.lock();
        while state.tasks.try_join_next().is_some() {}
        state.tasks.spawn(task);
    }

    /// The tasks that drive the children. The owner of the run awaits or drops them.
    pub fn take_tasks(&self) -> JoinSet<()> {
        std::mem::take(&mut self.lock().tasks)
    }

    /// A child has ended; `None` if its end is not recorded. Returns whether that ends a wait, whose end then includes that
    /// the child works no more.
    pub fn end(&self, child: RunId, run: Option<Arc<Run>>) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(it) = state.children.get_mut(&child) {
            it.progress = match run {
                Some(run) => {
                    state.ended.push(child);
                    ChildProgress::Ended(run)
                }
                None => ChildProgress::Delivered,
            };
        }
        let children = &state.children;
        let mut over = state
            .waits
            .iter_mut()
            .filter(|wait| !wait.is_over && wait.is_satisfied(children));
        let first = over.next();
        let ends_wait = first.is_some();
        if let Some(wait) = first {
            (wait.is_over, wait.has_last) = (true, true);
        }
        over.for_each(|wait| wait.is_over = true);
        self.changed.notify_waiters();
        ends_wait
    }

    pub fn contains(&self, child: RunId) -> bool {
        self.lock().children.contains_key(&child)
    }

    /// Whether this call has started one of them.
    pub fn has_call(&self, call: &str) -> bool {
        self.lock().children.values().any(|it| it.call == call)
    }

    pub fn working(&self) -> Vec<RunId> {
        self.lock().select(ChildProgress::is_working)
    }

    /// The children that work, and those whose ends are not delivered.
    pub fn undelivered(&self) -> Vec<RunId> {
        let is_undelivered = |it: &ChildProgress| it.is_working() || it.is_ended();
        self.lock().select(is_undelivered)
    }

    /// Checks that the run can wait for these.
    ///
    /// # Errors
    /// Why not, for the model.
    pub fn check_undelivered(&self, runs: &[RunId]) -> Result<(), String> {
        let state = self.lock();
        for run in runs {
            match state.children.get(run).map(|it| &it.progress) {
                None => return Err(not_in_background(*run)),
                Some(ChildProgress::Claimed { .. } | ChildProgress::Delivered) => {
                    return Err(format!(
                        "{run} has ended, and you have got its result before"
                    ));
                }
                Some(ChildProgress::Working | ChildProgress::Ended(_)) => {}
            }
        }
        Ok(())
    }

    /// Takes the ends of all that have ended, in their order, to deliver them.
    pub fn take_ended(&self) -> Vec<EndedChild> {
        self.take(|_| true, |_| ChildProgress::Delivered)
    }

    /// Reverts [`BackgroundChildren::take_ended`].
    pub fn restore_ended(&self, ended: Vec<EndedChild>) {
        for EndedChild { call, run } in ended {
            self.add(run.id, &call, ChildProgress::Ended(run));
        }
    }

    /// Takes the ends of those of these children that have ended, for the result of this call.
    pub fn claim(&self, runs: &[RunId], by: &str) -> Vec<EndedChild> {
        let claimed = |run: &Arc<Run>| ChildProgress::Claimed {
            run: Arc::clone(run),
            by: by.to_owned(),
        };
        self.take(|child| runs.contains(&child), claimed)
    }

    /// The ends that a process before recorded as part of the result of this call.
    pub fn claimed(&self, by: &str) -> Vec<EndedChild> {
        let state = self.lock();
        let children = state.children.values();
        let claimed = children.filter_map(|child| match &child.progress {
            ChildProgress::Claimed { run, by: call } if call == by => Some(EndedChild {
                call: child.call.clone(),
                run: Arc::clone(run),
            }),
            _ => None,
        });
        claimed.collect()
    }

    fn take(
        &self,
        is_taken: impl Fn(RunId) -> bool,
        next: impl Fn(&Arc<Run>) -> ChildProgress,
    ) -> Vec<EndedChild> {
        let mut state = self.lock();
        let State {
            ended, children, ..
        } = &mut *state;
        let mut taken = Vec::new();
        for id in ended.extract_if(.., |id| is_taken(*id)) {
            let Some(child) = children.get_mut(&id) else {
                continue;
            };
            if let ChildProgress::Ended(run) = &child.progress {
                let run = Arc::clone(run);
                child.progress = next(&run);
                taken.push(EndedChild {
                    call: child.call.clone(),
                    run,
                });
            }
        }
        taken
    }

    /// Begins a wait for the end of all of these children, or of any.
    pub fn begin_wait(&self, runs: Vec<RunId>, any: bool) -> u64 {
        let mut state = self.lock();
        let id = state.next_wait;
        state.next_wait += 1;
        let mut wait = Wait {
            id,
            runs,
            any,
            is_over: false,
            has_last: false,
        };
        wait.is_over = wait.is_satisfied(&state.children);
        state.waits.push(wait);
        id
    }

    pub fn is_over(&self, wait: u64) -> bool {
        let state = self.lock();
        let found = state.waits.iter().find(|it| it.id == wait);
        found.is_none_or(|it| it.is_over)
    }

    pub async fn wait_until_over(&self, wait: u64) {
        loop {
            // Subscribe before looking, so that no end is missed.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.is_over(wait) {
                return;
            }
            changed.await;
        }
    }

    /// Returns whether a child that has ended still counts as working.
    pub fn end_wait(&self, wait: u64) -> bool {
        let mut state = self.lock();
        let ended = state.waits.extract_if(.., |it| it.id == wait);
        ended.into_iter().any(|it| it.has_last)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn select(&self, is_selected: impl Fn(&ChildProgress) -> bool) -> Vec<RunId> {
        let children = self.children.iter();
        let selected = children.filter(|(_, child)| is_selected(&child.progress));
        selected.map(|(id, _)| *id).collect()
    }
}

impl ChildProgress {
    fn is_working(&self) -> bool {
        matches!(self, Self::Working)
    }

    fn is_ended(&self) -> bool {
        matches!(self, Self::Ended(_))
    }
}

impl Wait {
    fn is_satisfied(&self, children: &BTreeMap<RunId, Child>) -> bool {
        let has_ended = |run: &RunId| {
            let child = children.get(run);
            child.is_none_or(|child| !child.progress.is_working())
        };
        match self.any {
            true => self.runs.is_empty() || self.runs.iter().any(has_ended),
            false => self.runs.iter().all(has_ended),
        }
    }
}

/// What a model gets that names another run.
pub fn not_in_background(run: RunId) -> String {
    format!("{run} is none of your agents in the background")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{BackgroundChildren, ChildProgress};
    use crate::domain::run::{Run, RunId, Scope};

    fn ended(id: RunId) -> Arc<Run> {
        Arc::new(Run::queued(&Scope::root(id, None), "a".to_owned()))
    }

    fn working(count: usize) -> (BackgroundChildren, Vec<RunId>) {
        let (children, ids) = (
            BackgroundChildren::new(None),
            (0..count).map(|_| RunId::new()).collect::<Vec<_>>(),
        );
        for (call, id) in ids.iter().enumerate() {
            children.add(*id, &format!("c{call}"), ChildProgress::Working);
        }
        (children, ids)
    }

    fn calls(ended: &[super::EndedChild]) -> Vec<&str> {
        ended.iter().map(|it| it.call.as_str()).collect()
    }

    #[test]
    fn an_end_is_taken_once_and_in_the_order_of_the_ends() {
        let (children, ids) = working(3);
        for id in [ids[2], ids[0], ids[1]] {
            children.end(id, Some(ended(id)));
        }
        assert_eq!(calls(&children.claim(&[ids[0]], "w")), ["c0"]);
        assert!(children.claim(&[ids[0]], "v").is_empty());
        assert_eq!(calls(&children.claimed("w")), ["c0"]);
        let taken = children.take_ended();
        assert_eq!(calls(&taken), ["c2", "c1"]);
        children.restore_ended(taken);
        assert_eq!(children.undelivered().len(), 2);
        assert_eq!(calls(&children.take_ended()), ["c2", "c1"]);
        assert!(children.take_ended().is_empty() && children.undelivered().is_empty());
        assert!(children.check_undelivered(&ids).is_err());
    }

    #[test]
    fn the_last_child_of_a_wait_counts_as_working_until_the_wait_ends() {
        let (children, ids) = working(3);
        let all = children.begin_wait(ids.clone(), false);
        let any = children.begin_wait(ids.clone(), true);
        assert!(children.end(ids[0], Some(ended(ids[0]))));
        assert!(children.is_over(any) && !children.is_over(all));
        assert!(!children.end(ids[1], Some(ended(ids[1]))));
        assert!(children.end(ids[2], None));
        assert!(children.end_wait(any) && children.end_wait(all));
        assert!(children.is_over(children.begin_wait(ids, false)));
        assert!(children.is_over(children.begin_wait(Vec::new(), true)));
    }
}
