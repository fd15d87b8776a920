//! Lines of batches in the store.

use std::time::Duration;

use axed::config::Retention;
use axed::domain::batch::{Batch, BatchId, BatchLine};
use axed::domain::run::now;
use axed::engine::retention;
use axed::store::batches::LineQuery;
use axed::store::leadership::Leadership;
use axed::store::run_store::RunStore;
use tokio_util::sync::CancellationToken;

use crate::store::fixtures::Opened;
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

async fn count_lines(store: &dyn RunStore, batch: BatchId) -> usize {
    let query = LineQuery {
        batch,
        from: 0,
        limit: 9,
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
    let batch = Batch {
        id: accepted,
        agent: "solo".to_owned(),
        owner: None,
        lines: 2,
        created_at: now(),
        finished_at: None,
        cancel_reason: None,
        body_hash: [0; 32],
    };
    assert!(store.accept_batch(batch, None).await.expect("accepted"));
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

/// Nobody has to restart the daemon for it.
async fn retention_removes_lines_of_old_batches(opened: &Opened) {
    let store = &*opened.store;
    let new = BatchId::new();
    add_lines(store, old(1)).await;
    add_lines(store, new).await;
    let stop = CancellationToken::new();
    let limits = (Retention::default(), None);
    let leadership = Leadership::alone();
    let passes = retention::run(store, limits, &leadership, stop.clone());
    let removed = async {
        eventually("the removal of the lines", async || {
            (count_lines(store, old(1)).await == 0).then_some(())
        })
        .await;
        stop.cancel();
    };
    tokio::join!(passes, removed);
    assert_eq!(count_lines(store, new).await, 2);
}

shared_stories!(
    lines_of_batches_that_are_not_accepted_are_removed,
    retention_removes_lines_of_old_batches,
);
