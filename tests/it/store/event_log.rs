//! The event log of a tree.

use std::sync::Arc;

use axed::domain::message::ToolResult;
use axed::domain::run::Scope;
use axed::record::entry::{self, Entry};
use axed::store::events::EventQuery;
use axed::store::{Change, StoreError};

use crate::store::fixtures::{
    Opened, child, completing, fresh, numbers, opening, record, recorded, result, root, stored,
    whole_log, write,
};

/// A root and eight children write at once; the log's numbers have no gap, and events are published in order.
async fn a_log_has_no_gaps(opened: &Opened) {
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "writer")).await.expect("opened");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, root) = (Arc::clone(store), root);
        tasks.spawn(async move {
            let child = child(&root);
            store
                .write(opening(&child, "writer"))
                .await
                .expect("opened");
            for round in 0..20 {
                let scope = if round % 4 == 0 { &root } else { &child };
                let some = write(scope, Change::Unchanged, round % 3);
                if round % 2 == 0 {
                    store.enqueue(some).await.expect("posted");
                } else {
                    store.write(some).await.expect("written");
                }
            }
            let last = store.write(completing(&child, "done")).await;
            (child, last.expect("closed"))
        });
    }
    let children = tasks.join_all().await;
    let last = store
        .write(completing(&root, "done"))
        .await
        .expect("closed");

    let log = store.events(whole_log(&root)).await.expect("the log");
    assert_eq!(numbers(&log), (1..=last).collect::<Vec<_>>());
    for event in &log {
        let data: serde_json::Value = serde_json::from_str(&event.data).expect("JSON");
        assert_eq!(data["seq"], event.seq);
        assert_eq!(data["run_id"], event.run_id.to_string());
        assert_eq!(data["type"], event.name.as_str());
    }
    let published = opened.published.lock().expect("no panic").clone();
    assert!(published.iter().all(|(of, _)| *of == root.run));
    let events: Vec<_> = published
        .into_iter()
        .flat_map(|(_, events)| events)
        .collect();
    assert_eq!(events, log);
    assert_eq!(stored(&**store, &root).await.last_event, last);
    for (child, last) in children {
        assert_eq!(stored(&**store, &child).await.last_event, last);
        let own = log.iter().rev().find(|event| event.run_id == child.run);
        assert_eq!(own.map(|event| event.seq), Some(last));
    }
}

/// A page of a log begins after a number, ends with a write, and shows a subtree or one run alone.
async fn a_log_is_read_in_parts(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let (left, right) = (child(&root), child(&root));
    let below = child(&left);
    for (scope, events) in [(&root, 2), (&left, 1), (&right, 1), (&below, 3), (&left, 2)] {
        let change = match store.run(scope.run).await.expect("a read") {
            Some(_) => Change::Unchanged,
            None => Change::Create(Box::new(fresh(record(scope, "a")))),
        };
        store
            .write(write(scope, change, events))
            .await
            .expect("written");
    }
    let part = |of: &Scope, only, after, limit| EventQuery {
        root: root.run,
        run: of.run,
        exclude_descendants: only,
        after,
        limit,
    };
    for (query, wanted) in [
        (part(&root, false, 0, 100), vec![1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (part(&root, false, 5, 100), vec![6, 7, 8, 9]),
        (part(&root, false, 9, 100), vec![]),
        (part(&root, false, 99, 100), vec![]),
        (part(&root, false, 2, 3), vec![3, 4, 5, 6, 7]),
        (part(&root, false, 0, 0), vec![]),
        (part(&root, true, 0, 100), vec![1, 2]),
        (part(&left, false, 0, 100), vec![3, 5, 6, 7, 8, 9]),
        (part(&left, true, 0, 100), vec![3, 8, 9]),
        (part(&left, false, 6, 1), vec![7]),
        (part(&below, false, 0, 100), vec![5, 6, 7]),
        (part(&right, false, 4, 100), vec![]),
    ] {
        let found = store.events(query).await.expect("events");
        assert_eq!(numbers(&found), wanted, "{query:?}");
    }
}

/// Results that are posted faster than they are committed share entries: each is read back, in its order.
async fn posted_results_are_read_back(opened: &Opened) {
    let (store, roots) = (&*opened.store, [root(), root()]);
    for root in &roots {
        store.write(opening(root, "a")).await.expect("opened");
    }
    let found = |position: u32| {
        let text = format!("found {position}");
        result(1, position, ToolResult::text("1", text, false))
    };
    for position in 0..60 {
        let root = &roots[position as usize / 20 % 2];
        store
            .enqueue(write(root, Change::Unchanged, position % 3))
            .await
            .expect("posted");
        let mut some = write(root, Change::CountToolCall, position % 2);
        some.entries.push(recorded(found(position)));
        store.enqueue(some).await.expect("posted");
    }
    for (index, root) in (0..).zip(&roots) {
        let positions: Vec<u32> = (0..60).filter(|it| it / 20 % 2 == index).collect();
        let wanted: Vec<Entry> = positions.iter().copied().map(found).collect();
        let events: u32 = positions.iter().map(|it| it % 3 + it % 2 + 1).sum();
        let last = store.write(completing(root, "done")).await.expect("closed");
        assert_eq!(last, u64::from(events) + 2);
        let steps = entry::steps(store.entries(root.run).await.expect("entries"));
        assert_eq!(format!("{steps:?}"), format!("{wanted:?}"));
        let log = store.events(whole_log(root)).await.expect("the log");
        assert_eq!(numbers(&log), (1..=last).collect::<Vec<_>>());
        let late = store.write(write(root, Change::CountToolCall, 1)).await;
        assert!(matches!(late, Err(StoreError::AlreadyTerminal(_))));
    }
}

/// Neighbouring posted writes of a run that has ended are refused, and stop nothing else.
async fn posted_writes_of_an_ended_run_are_refused(opened: &Opened) {
    let (store, ended, other) = (&*opened.store, root(), root());
    for root in [&ended, &other] {
        store.write(opening(root, "a")).await.expect("opened");
    }
    store.write(completing(&ended, "x")).await.expect("closed");
    for _ in 0..10 {
        for change in [Change::Unchanged, Change::CountToolCall] {
            let some = write(&ended, change, 1);
            store.enqueue(some).await.expect("posted");
        }
    }
    let number = store.write(write(&other, Change::CountToolCall, 1)).await;
    assert_eq!(number.expect("written"), 2);
    let log = store.events(whole_log(&ended)).await.expect("the log");
    assert_eq!(numbers(&log), [1, 2]);
}

shared_stories!(
    a_log_has_no_gaps,
    a_log_is_read_in_parts,
    posted_results_are_read_back,
    posted_writes_of_an_ended_run_are_refused,
);
