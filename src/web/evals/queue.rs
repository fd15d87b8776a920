//! The runs of an evaluation that have no end yet.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::domain::evaluation::{EvalCase, EvalRun, EvalSlot, Evaluation};
use crate::domain::run::RunId;
use crate::engine::evals::plan;
use crate::store::run_store::RunStore;
use crate::web::batches::feeder::retried;

/// Cases that one look at the store finds.
const PAGE_CASES: u32 = 16;

/// A run that has to start, or to end.
pub struct Pending {
    pub slot: EvalSlot,
    pub case: Arc<EvalCase>,
    /// The one that an earlier driver has started.
    pub run: Option<RunId>,
}

/// The runs that have no end yet, in order. Reads their cases a few at a time.
pub struct Queue<'d> {
    store: &'d dyn RunStore,
    eval: &'d Evaluation,
    /// Those that earlier drivers have started.
    known: BTreeMap<EvalSlot, EvalRun>,
    pending: VecDeque<Pending>,
    next_case: u32,
    cases: u32,
}

impl<'d> Queue<'d> {
    pub async fn new(store: &'d dyn RunStore, eval: &'d Evaluation) -> Self {
        let runs = retried(|| store.eval_runs(eval.id, 0..u32::MAX)).await;
        let known = runs.into_iter().map(|run| (run.slot, run));
        let runs_of_case = eval.request.versions.len() as u64 * u64::from(eval.request.repeat);
        Self {
            store,
            eval,
            known: known.collect(),
            pending: VecDeque::new(),
            next_case: 0,
            cases: u32::try_from(eval.planned / runs_of_case.max(1)).unwrap_or(u32::MAX),
        }
    }

    /// The next one; `None` after the last.
    pub async fn peek(&mut self) -> Option<&Pending> {
        while self.pending.is_empty() && self.next_case < self.cases {
            let numbers = self.next_case..self.next_case.saturating_add(PAGE_CASES).min(self.cases);
            self.next_case = numbers.end;
            let store = self.store;
            let cases = retried(|| store.eval_cases(self.eval.id, numbers.clone())).await;
            let request = &self.eval.request;
            let versions = u8::try_from(request.versions.len()).unwrap_or(u8::MAX);
            for case in cases.into_iter().map(Arc::new) {
                for slot in plan::slots(case.number, versions, request.repeat) {
                    let known = self.known.remove(&slot);
                    if known.as_ref().is_none_or(|run| run.end.is_none()) {
                        self.pending.push_back(Pending {
                            slot,
                            case: Arc::clone(&case),
                            run: known.and_then(|run| run.run),
                        });
                    }
                }
            }
        }
        self.pending.front()
    }

    pub fn pop(&mut self) -> Option<Pending> {
        self.pending.pop_front()
    }
}
