//! Trees are deleted, and old ones are found.

use std::time::Instant;

use axed::domain::run::{Outcome, RunId, Scope, Status};
use axed::store::retention::{Cutoff, ExpiredQuery, NthNewestQuery};
use axed::store::run_store::RunStore;
use axed::store::runs::{RunFilter, SessionQuery};
use axed::store::{Change, NewRun, StoreError};
use futures_util::future::join_all;
use jiff::Timestamp;

use crate::store::fixtures::{
    Opened, child, claim, claiming, closing, completing, count, failure, fresh, in_an_hour, listed,
    opening, opening_of, page, prompt, record, recorded, root, sql, sqlite, sqlite_in, starting,
    stored, whole_log, write,
};

/// A root is deleted with its descendants, and nothing else is.
async fn a_tree_is_deleted(opened: &Opened) {
    let (store, root, other) = (&*opened.store, root(), root());
    let child = child(&root);
    for scope in [&root, &child, &other] {
        let mut run = record(scope, "a");
        run.labels.insert("k".to_owned(), "v".to_owned());
        run.input = "long ".repeat(1000).into();
        let mut open = write(scope, Change::Create(Box::new(fresh(run))), 1);
        open.entries.push(recorded(prompt("m")));
        store.write(open).await.expect("opened");
    }
    assert!(!store.delete(child.run).await.expect("no root"));
    assert!(!store.delete(RunId::new()).await.expect("no run"));
    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(!store.delete(root.run).await.expect("gone"));
    for scope in [&root, &child] {
        assert_eq!(store.run(scope.run).await.expect("a read"), None);
        assert!(store.entries(scope.run).await.expect("entries").is_empty());
        let late = store.write(write(scope, Change::Unchanged, 1)).await;
        assert!(matches!(late, Err(StoreError::RunNotFound(_))), "{late:?}");
    }
    assert!(
        store
            .events(whole_log(&root))
            .await
            .expect("events")
            .is_empty()
    );
    let labels = vec![("k".to_owned(), "v".to_owned())];
    let marked = RunFilter {
        labels,
        include_children: true,
        ..page()
    };
    assert_eq!(listed(store, marked).await, [other.run]);
    assert_eq!(store.entries(other.run).await.expect("entries").len(), 2);
    assert_eq!(stored(store, &other).await.input.text_bytes(), 5000);
}

/// A tree that takes several transactions is deleted like one that takes one.
async fn a_large_tree_is_deleted(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let mut below = Vec::new();
    for _ in 0..150 {
        let child = child(&root);
        let grandchild = self::child(&child);
        for scope in [&child, &grandchild] {
            store.write(opening(scope, "b")).await.expect("opened");
            store.enqueue(starting(scope)).await.expect("posted");
        }
        below.extend([child, grandchild]);
    }
    let before = store.commits().count();
    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(!store.delete(root.run).await.expect("gone"));
    for scope in below.iter().chain([&root]) {
        assert_eq!(store.run(scope.run).await.expect("a read"), None);
    }
    let left = store.events(whole_log(&root)).await.expect("events");
    assert!(left.is_empty());
    let still_busy = store.unfinished_runs().await.expect("unfinished");
    assert!(still_busy.is_empty());
    while store.vacuum().await.expect("tidied") {}
    assert!(store.commits().count() > before + 2, "in parts");
}

/// Many trees that are deleted at once share commits; a large one among them, one that is gone and one that never was have
/// their own results.
async fn many_trees_are_deleted_at_once(opened: &Opened) {
    let store = &*opened.store;
    let mut roots = Vec::new();
    for n in 0..300 {
        let scope = root();
        let mut run = record(&scope, "a");
        run.labels.insert("k".to_owned(), n.to_string());
        run.session = Some(format!("s{n}"));
        let mut opening = fresh(run);
        opening.resume_state.definition = format!("{{\"name\":\"{n}\"}}").into();
        opening.claim = Some(claim(&n.to_string(), 0, in_an_hour()));
        let open = write(&scope, Change::Create(Box::new(opening)), 1);
        store.write(open).await.expect("opened");
        let below = child(&scope);
        for _ in 0..if n == 7 { 1200 } else { 1 } {
            store.enqueue(starting(&scope)).await.expect("posted");
        }
        store
            .write(self::opening(&below, "b"))
            .await
            .expect("opened");
        for scope in [&below, &scope] {
            store.write(completing(scope, "x")).await.expect("closed");
        }
        roots.push((scope, below));
    }
    let kept = roots.pop().expect("a root");
    let before = store.commits().count();
    let repeated = roots[3].0.run;
    let ids: Vec<RunId> = roots.iter().map(|(root, _)| root.run).collect();
    let all = ids.iter().copied().chain([repeated, RunId::new()]);
    let started = Instant::now();
    let deleted = join_all(all.map(|root| store.delete(root))).await;
    let rate = ids.len() as f64 / started.elapsed().as_secs_f64();
    let commits = store.commits().count() - before;
    eprintln!("{rate:.0} trees a second in {commits} commits");
    assert!(commits < 30, "{commits} commits");
    let deleted = deleted
        .into_iter()
        .filter(|it| *it.as_ref().expect("an answer"));
    assert_eq!(deleted.count(), ids.len());
    while store.vacuum().await.expect("tidied") {}
    for (root, below) in &roots {
        for scope in [root, below] {
            assert_eq!(store.run(scope.run).await.expect("a read"), None);
        }
        assert!(
            store
                .events(whole_log(root))
                .await
                .expect("events")
                .is_empty()
        );
    }
    assert_eq!(stored(store, &kept.0).await.status, Status::Completed);
    let again = claim("3", 0, in_an_hour());
    store
        .write(claiming(&root(), again))
        .await
        .expect("the key is free again");
}

/// Ended roots are found by status, by end and by position, but not while a descendant is unfinished.
async fn expired_roots_are_found(opened: &Opened) {
    let store = &*opened.store;
    let mut completed = Vec::new();
    for n in 0..200 {
        let scope = root();
        store.write(opening(&scope, "a")).await.expect("opened");
        if n == 100 {
            let below = child(&scope);
            store.write(opening(&below, "a")).await.expect("opened");
        } else {
            completed.push(scope.run);
        }
        store.write(completing(&scope, "x")).await.expect("closed");
    }
    let failed = root();
    store.write(opening(&failed, "a")).await.expect("opened");
    let close = closing(
        &failed,
        Outcome::Failed {
            failure: failure(),
            partial: None,
        },
    );
    store.write(close).await.expect("closed");
    store.write(opening(&root(), "a")).await.expect("opened");

    let all = async |status, before| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let query = ExpiredQuery {
                status,
                cutoff: before,
                after,
            };
            let page = store.expired_roots(query).await.expect("a page");
            found.extend(page.roots);
            after = page.next;
            if after.is_none() {
                return found;
            }
        }
    };
    let future = Cutoff::EndedBefore(in_an_hour());
    assert_eq!(all(Status::Completed, future).await, completed);
    assert_eq!(all(Status::Failed, future).await, [failed.run]);
    assert!(all(Status::Cancelled, future).await.is_empty());
    let past = Timestamp::from_second(1_000_000_000).expect("a time");
    let past = Cutoff::EndedBefore(past);
    assert!(all(Status::Completed, past).await.is_empty());
    let oldest = Cutoff::CreatedBefore(completed[150]);
    assert_eq!(all(Status::Completed, oldest).await, completed[..150]);

    let newest = async |before, but| {
        let status = Status::Completed;
        let query = NthNewestQuery {
            status,
            before,
            offset: but,
        };
        store.nth_newest_ended(query).await.expect("a place")
    };
    assert_eq!(newest(None, 0).await, Some(completed[198]));
    assert_eq!(newest(Some(completed[198]), 1).await, Some(completed[196]));
    assert_eq!(newest(None, 200).await, None);
}

shared_stories!(
    a_tree_is_deleted,
    a_large_tree_is_deleted,
    many_trees_are_deleted_at_once,
    expired_roots_are_found,
);

/// Writes an ended tree with 20 children, a session and an idempotency key.
async fn write_tree(store: &dyn RunStore, scope: &Scope, key: &str, text: &str) {
    let mut run = record(scope, "a");
    run.session = Some("talk".to_owned());
    run.input = text.into();
    let opening = NewRun {
        claim: Some(claim(key, 0, in_an_hour())),
        ..fresh(run)
    };
    let open = write(scope, Change::Create(Box::new(opening)), 1);
    store.write(open).await.expect("opened");
    for _ in 0..20 {
        let child = child(scope);
        let open = opening_of(&child, text);
        store.write(open).await.expect("opened");
        store.write(completing(&child, "x")).await.expect("closed");
    }
    store.write(completing(scope, "x")).await.expect("closed");
}

/// Readers do not see a tree whose deletion a kill has interrupted, and the next start finishes it.
#[tokio::test]
async fn a_deletion_is_finished_after_a_kill() {
    let opened = sqlite();
    let (dir, root, other) = (opened.place.path(), root(), root());
    let text = "x".repeat(5000);
    for (scope, key) in [(&root, "k"), (&other, "l")] {
        write_tree(&*opened.store, scope, key, &text).await;
    }
    let children = opened.store.children(root.run).await.expect("children");
    opened.store.close().await;
    // The state after a part of the tree was removed.
    let hex = root.run.0.simple();
    sql(
        dir,
        &format!(
            "INSERT INTO deletions VALUES (x'{hex}'); DELETE FROM entries WHERE root = x'{hex}' AND last_seq > 30; \
             DELETE FROM runs WHERE id = x'{}'",
            children[19].id.0.simple()
        ),
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    // The writer may have finished the deletion or not; readers see no difference.
    let seen = listed(
        &*store,
        RunFilter {
            include_children: true,
            ..page()
        },
    )
    .await;
    assert!(!seen.contains(&root.run) && seen.len() == 21, "{seen:?}");
    for id in [root.run, children[0].id] {
        assert_eq!(store.run(id).await.expect("a read"), None);
        assert!(store.tree(id).await.expect("a tree").is_empty());
        assert!(store.entries(id).await.expect("entries").is_empty());
    }
    assert!(
        store
            .events(whole_log(&root))
            .await
            .expect("events")
            .is_empty()
    );
    assert!(!store.delete(root.run).await.expect("gone"));
    let session = SessionQuery {
        name: "talk".to_owned(),
        limit: 1,
        before: Some(root.run),
        ..SessionQuery::default()
    };
    assert!(
        store
            .session_runs(session)
            .await
            .expect("a page")
            .is_empty()
    );
    let again = store.claimed_run(claim("k", 0, in_an_hour()).key).await;
    assert_eq!(again.expect("a read"), None);
    while store.vacuum().await.expect("tidied") {}
    assert_eq!((count(dir, "runs"), count(dir, "deletions")), (21, 0));
    assert_eq!(count(dir, "entries"), 21 + 21);
    assert_eq!(count(dir, "claims"), 1);
}
