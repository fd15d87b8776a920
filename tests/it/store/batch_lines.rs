//! Lines of batches in the store.

use std::time::Duration;

use axed::config::Retention;
use axed::domain::batch::{Batch, BatchId, BatchLine};
use axed::domain::run::now;
use axed::engine::retention;
use axed::store::batches::{BatchChange, LineQuery};
use axed::store::leadership::Leadership;
use axed::store::run_store::RunStore;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::store::fixtures::{Opened, opening, root};
use crate::support::eventually;

/// The id of a batch from long ago.
fn old(number: u8) -> BatchId {
    let id = format!("batch_00000000-0000-7000-8000-00000000000{number}");
    id.parse().expect("an id")
}

async fn add_lines(store: &dyn RunStore, batch: BatchId) {
    let line = |index| BatchLine {
        index,
        body: Some("{}".to_owned()),
        run: None,
        problem: None,
    };
    let added = store.add_batch_lines(batch, vec![line(0), line(1)]).await;
    added.expect("added");
}

async fn accept(store: &dyn RunStore, id: BatchId) {
    let batch = Batch {
        id,
        agent: "solo".to_owned(),
        owner: None,
        lines: 2,
        created_at: now(),
        finished_at: None,
        cancel_reason: None,
        body_hash: [0; 32],
    };
    assert!(store.accept_batch(batch, None).await.expect("accepted"));
}

async fn count_lines(store: &dyn RunStore, batch: BatchId) -> usize {
    let query = LineQuery {
        batch,
        from: 0,
        limit: 5_000,
        only_open: false,
    };
    store.batch_lines(query).await.expect("lines").len()
}

/// Lines of a batch that is not accepted can be removed, and are removed when it is old; those of others stay.
async fn lines_of_batches_that_are_not_accepted_are_removed(opened: &Opened) {
    let store = &*opened.store;
    let (orphaned, accepted, refused, new) = (old(1), old(2), old(3), BatchId::new());
    for batch in [orphaned, accepted, refused, new] {
        add_lines(store, batch).await;
    }
    accept(store, accepted).await;
    for batch in [accepted, refused] {
        let removed = store.remove_unaccepted_lines(batch).await;
        removed.expect("removed");
    }
    let lines = async |batch| count_lines(store, batch).await;
    assert_eq!((lines(accepted).await, lines(refused).await), (2, 0));
    assert_eq!((lines(orphaned).await, lines(new).await), (2, 2));

    let before = now().checked_sub(Duration::from_secs(3600));
    let trimmed = store.trim_unaccepted_lines(before.expect("a time")).await;
    trimmed.expect("trimmed");
    assert_eq!((lines(accepted).await, lines(orphaned).await), (2, 0));
    assert_eq!(lines(new).await, 2);
}

/// A new batch that ended at this time.
async fn ended(store: &dyn RunStore, at: Timestamp) -> BatchId {
    let id = BatchId::new();
    accept(store, id).await;
    let finished = store.change_batch(id, BatchChange::Finish { at }).await;
    finished.expect("finished");
    id
}

/// All that can be removed, page by page.
async fn unused(store: &dyn RunStore, before: Timestamp) -> Vec<BatchId> {
    let (mut ids, mut after) = (Vec::new(), None);
    loop {
        let page = store.unused_batches(before, after).await.expect("a page");
        ids.extend(page.ids);
        after = page.next;
        if after.is_none() {
            return ids;
        }
    }
}

/// The batch itself is the last that is removed: what is left is found again.
async fn an_old_batch_without_runs_is_removed_in_parts(opened: &Opened) {
    let store = &*opened.store;
    let hours_ago = |hours: u64| now() - Duration::from_secs(hours * 3600);
    let before = hours_ago(24);
    let (used, large) = (
        ended(store, hours_ago(25)).await,
        ended(store, hours_ago(25)).await,
    );
    let mut old = vec![large];
    for _ in 0..40 {
        old.push(ended(store, hours_ago(25)).await);
    }
    old.sort();
    let new = ended(store, hours_ago(23)).await;
    let scope = root();
    let run = store.write(opening(&scope, "solo")).await;
    run.expect("a run");
    add_lines(store, used).await;
    let (index, run) = (1, scope.run);
    let started = store.change_batch(used, BatchChange::Started { index, run });
    started.await.expect("started");
    let rejected = |index| BatchLine {
        index,
        body: None,
        run: None,
        problem: Some("no agent".to_owned()),
    };
    let lines: Vec<_> = (0..1_500).map(rejected).collect();
    store.add_batch_lines(large, lines).await.expect("added");
    assert_eq!(unused(store, before).await, old);

    for id in [used, new] {
        assert!(!store.trim_batch(id, before).await.expect("nothing"));
        assert!(store.batch(id).await.expect("a read").is_some());
    }
    assert_eq!(count_lines(store, used).await, 2);
    assert!(store.trim_batch(large, before).await.expect("a part"));
    assert_eq!(count_lines(store, large).await, 500);
    assert!(unused(store, before).await.contains(&large));
    assert!(!store.trim_batch(large, before).await.expect("the rest"));
    assert_eq!(count_lines(store, large).await, 0);
    assert!(store.batch(large).await.expect("a read").is_none());
}

/// Nobody has to restart the daemon for it.
async fn retention_removes_old_batches_and_lines(opened: &Opened) {
    let store = &*opened.store;
    let new = BatchId::new();
    add_lines(store, old(1)).await;
    add_lines(store, new).await;
    let two_days_ago = now() - Duration::from_secs(48 * 3600);
    let unused = ended(store, two_days_ago).await;
    let stop = CancellationToken::new();
    let limits = (Retention::default(), None);
    let leadership = Leadership::alone();
    let passes = retention::run(store, limits, &leadership, stop.clone());
    let removed = async {
        eventually("the removal of the batches", async || {
            let is_removed = store.batch(unused).await.expect("a read").is_none();
            (is_removed && count_lines(store, old(1)).await == 0).then_some(())
        })
        .await;
        stop.cancel();
    };
    tokio::join!(passes, removed);
    assert_eq!(count_lines(store, new).await, 2);
}

shared_stories!(
    lines_of_batches_that_are_not_accepted_are_removed,
    an_old_batch_without_runs_is_removed_in_parts,
    retention_removes_old_batches_and_lines,
);
