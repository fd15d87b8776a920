//! Loads the recorded results that a tree plays, once, within a bound on the memory of all of them.

use std::sync::LazyLock;

use tokio::sync::Semaphore;

use crate::domain::ignore::Ignore;
use crate::domain::recording::MAX_BYTES;
use crate::domain::run::RunId;
use crate::engine::backtest::recorded_calls::{self, RecordedCall};
use crate::engine::context::RunContext;
use crate::engine::state::evaluated_tree::{EvaluatedTree, PlayedResults};
use crate::store::StoreError;
use crate::store::run_store::RunStore;

/// Trees that are read at the same time.
const MAX_CONCURRENT: usize = 2;
/// How much memory the recorded results of all trees have together, in KiB: 64 MiB.
const MAX_KIB: usize = 64 << 10;

static READS: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(MAX_CONCURRENT));
static SPACE: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(MAX_KIB));

/// Why there are no results to play.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("the recorded run {0}, which is played again, is gone")]
    Gone(RunId),
    #[error("the results of the recorded run {source_run} have over {} MiB", MAX_BYTES >> 20)]
    TooLarge { source_run: RunId },
    #[error("a pattern to ignore is invalid: {0}")]
    Ignore(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What the tree has left to play.
pub async fn results<'t>(
    context: &RunContext,
    evaluation: &'t EvaluatedTree,
) -> Result<&'t PlayedResults, LoadError> {
    let load = || load(context, evaluation);
    evaluation.results.get_or_try_init(load).await
}

async fn load(
    context: &RunContext,
    evaluation: &EvaluatedTree,
) -> Result<PlayedResults, LoadError> {
    let ignore = Ignore::new(&evaluation.settings.ignore);
    let ignore = ignore.map_err(|(_, error)| LoadError::Ignore(error.to_string()))?;
    let Some(source) = evaluation.source else {
        return Ok(PlayedResults::default());
    };
    // Nothing closes the semaphores.
    let _read = READS.acquire().await.ok();
    let store = context.engine.journal.store().as_ref();
    let (calls, bytes) = recorded(store, source).await?;
    let mut results = PlayedResults::new(ignore);
    for call in calls {
        let key = recorded_calls::key(&call.call, &results.ignore);
        if let Some(played) = call.into_played() {
            results.add(key, played);
        }
    }
    let run = &context.run;
    if run.tree.is_recovered {
        discard_used(store, run.scope.root, &results).await?;
    }
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
    results.space = SPACE.acquire_many(kib).await.ok();
    Ok(results)
}

/// The calls of the tree, in the order in which they were made, and the bytes of their results.
async fn recorded(
    store: &dyn RunStore,
    source: RunId,
) -> Result<(Vec<RecordedCall>, usize), LoadError> {
    let runs = store.tree(source).await?;
    if runs.is_empty() {
        return Err(LoadError::Gone(source));
    }
    let (mut calls, mut bytes) = (Vec::new(), 0);
    for run in runs {
        let of_run = recorded_calls::of_run(store.entries(run.id).await?);
        bytes += of_run.iter().map(RecordedCall::bytes).sum::<usize>();
        if bytes > MAX_BYTES {
            return Err(LoadError::TooLarge { source_run: source });
        }
        calls.extend(of_run);
    }
    // Stable: calls of one reply keep their order.
    calls.sort_by_key(|call| call.time);
    Ok((calls, bytes))
}

/// Removes what earlier processes have given to the tree of this root.
async fn discard_used(
    store: &dyn RunStore,
    root: RunId,
    results: &PlayedResults,
) -> Result<(), StoreError> {
    for run in store.tree(root).await? {
        for call in recorded_calls::of_run(store.entries(run.id).await?) {
            results.discard(
                recorded_calls::key(&call.call, &results.ignore),
                &call.result,
            );
        }
    }
    Ok(())
}
