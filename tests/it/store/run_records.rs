//! Runs and their steps are written and read back.

use std::collections::BTreeMap;
use std::sync::Arc;

use axed::domain::attachment::Digest;
use axed::domain::message::{AssistantMessage, Echo, ToolCall, ToolResult};
use axed::domain::run::{Outcome, Run, RunId, Scope, Status, now};
use axed::domain::usage::{CallLimit, Cost, TreeUsage};
use axed::record::entry::{self, Entry};
use axed::store::runs::UnfinishedRun;
use axed::store::{Change, NewRun, ResumeState, StoreError};
use axed::workdirs::file_id::FileId;
use jiff::Timestamp;
use serde_json::value::RawValue;

use crate::store::fixtures::{
    Opened, child, closing, completing, failure, fresh, numbers, opening, page, postgres, progress,
    prompt, record, recorded, reply, root, starting, stored, usage, webhook, whole_log, write,
};
use crate::support::database::lock_tables;
use crate::support::eventually;

/// Many end a run at once: one of them does, and nothing happens to it afterwards.
async fn a_run_ends_once(opened: &Opened) {
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let ends = futures_util::future::join_all((0..16).map(|n| {
        let end = completing(&root, &format!("end {n}"));
        async move { (n, store.write(end).await) }
    }))
    .await;
    let won: Vec<_> = ends.iter().filter(|(_, end)| end.is_ok()).collect();
    assert_eq!(won.len(), 1);
    let lost = |end: &Result<u64, _>| matches!(end, Err(StoreError::AlreadyTerminal(id)) if *id == root.run);
    assert_eq!(ends.iter().filter(|(_, end)| lost(end)).count(), 15);
    let ended = stored(&**store, &root).await;
    assert_eq!(ended.content, Some(format!("end {}", won[0].0)));
    assert_eq!(ended.last_event, 2);

    let reason = "too late".to_owned();
    let late = store.write(write(&root, Change::RequestCancel { reason }, 1));
    assert_eq!(late.await.expect("ignored"), 0);
    for change in [
        Change::Start {
            at: now(),
            deadline: (now(), 60),
        },
        Change::Resume,
        Change::Unchanged,
        Change::Progress(progress(99)),
    ] {
        assert!(lost(&store.write(write(&root, change, 1)).await));
    }
    assert_eq!(stored(&**store, &root).await, ended);
    assert_eq!(
        store.events(whole_log(&root)).await.expect("a log").len(),
        2
    );
}

/// A queued run with every field that one can have.
fn with_every_field(child: &Scope) -> Run {
    Run {
        tool_call_id: Some("call_1".to_owned()),
        task: Some("the task ✓ ".repeat(500)),
        input: "the message\n\"quoted\" ".repeat(500).into(),
        label: Some("a label".to_owned()),
        completion_status: Some("complete".to_owned()),
        owner: Some("a key".to_owned()),
        labels: BTreeMap::from([("team".to_owned(), "x y".to_owned())]),
        ..record(child, "child")
    }
}

/// Everything that a record can hold comes back, through every stage of its life.
async fn a_record_reads_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "parent")).await.expect("opened");
    let child = child(&root);
    let mut run = with_every_field(&child);
    let open = write(&child, Change::Create(Box::new(fresh(run.clone()))), 0);
    assert_eq!(store.write(open).await.expect("opened"), 0);
    run.tree.runs = 1;
    assert_eq!(stored(store, &child).await, run);

    let begun = starting(&child);
    let Change::Start { at, .. } = begun.change else {
        unreachable!()
    };
    assert_eq!(store.write(begun).await.expect("started"), 2);
    run.status = Status::Running;
    run.started_at = Some(at);
    run.last_event = 2;
    assert_eq!(stored(store, &child).await, run);

    let further = write(&child, Change::Progress(progress(7)), 0);
    store.write(further).await.expect("further");
    run.turns = 1;
    run.model = "answered".to_owned();
    run.stop_reason = Some("end_turn".to_owned());
    run.usage = usage(7);
    run.tree.usage = usage(7);
    assert_eq!(stored(store, &child).await, run);

    let reason = "enough".to_owned();
    let stop = write(&child, Change::RequestCancel { reason }, 1);
    assert_eq!(
        store.write(stop).await.expect("a recorded cancel request"),
        3
    );
    run.status = Status::Cancelling;
    run.cancel_reason = Some("enough".to_owned());
    run.last_event = 3;
    assert_eq!(stored(store, &child).await, run);

    let end = closing(
        &child,
        Outcome::Cancelled {
            reason: "enough".to_owned(),
            partial: Some("half".to_owned()),
        },
    );
    let Change::Finish(close) = &end.change else {
        unreachable!()
    };
    run.finished_at = Some(close.finished_at);
    store.write(end).await.expect("closed");
    run.status = Status::Cancelled;
    run.partial_content = Some("half".to_owned());
    run.usage = usage(10);
    run.tree.usage = usage(10);
    run.last_event = 4;
    assert_eq!(stored(store, &child).await, run);

    let partial = None;
    let failed = Outcome::Failed {
        failure: failure(),
        partial,
    };
    store.write(closing(&root, failed)).await.expect("closed");
    let failed = stored(store, &root).await;
    assert_eq!(
        (failed.status, failed.error),
        (Status::Failed, Some(failure()))
    );
    assert_eq!(store.run(RunId::new()).await.expect("a read"), None);
}

/// Entries come back in their order, with a provider's own JSON as it was, whether or not events came with them.
async fn steps_read_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let raw = |text: &str| Arc::from(RawValue::from_string(text.to_owned()).expect("JSON"));
    let reply = reply(
        1,
        AssistantMessage {
            content: "line\nline\u{2028}".to_owned(),
            tool_calls: vec![ToolCall {
                id: "1".to_owned(),
                provider_id: String::new(),
                name: "read".to_owned(),
                arguments: raw("{\"n\": 1.0,\n \"a\":2}"),
                invalid_arguments: None,
            }],
            echo: Some(Echo {
                wire: "anthropic".to_owned(),
                body: raw("[1,\n2]"),
                prefix: u64::MAX,
            }),
        },
    );
    let result = |position| Entry::CallCompleted {
        turn: 1,
        position,
        tool: "read".to_owned(),
        duration_ms: 7,
        result: ToolResult::text("1", "found", false),
        refused_by: vec![CallLimit::Runs(3); position as usize],
    };
    let wanted = vec![prompt("message"), reply, result(0), result(1), result(2)];
    for (steps, events, numbered) in [(0..1, 2, 2), (1..2, 0, 1), (2..3, 0, 1), (3..5, 1, 3)] {
        let mut some = write(&root, Change::Unchanged, events);
        let before = stored(store, &root).await.last_event;
        some.entries
            .extend(wanted[steps].iter().cloned().map(recorded));
        let number = store.write(some).await.expect("written");
        assert_eq!(number, before + numbered);
    }
    let found = entry::steps(store.entries(root.run).await.expect("entries"));
    assert_eq!(format!("{found:?}"), format!("{wanted:?}"));
    let log = store.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), (1..=8).collect::<Vec<_>>());
}

/// The usage of a tree is known while it is active, and recorded once it has ended.
async fn a_trees_usage_is_summed(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let child = child(&root);
    let below = child
        .child(RunId::new(), None, child.max_depth)
        .expect("a child within the depth limit");
    for scope in [&root, &child, &below] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    for (scope, tokens) in [(&root, 1), (&child, 10), (&below, 100)] {
        let further = write(scope, Change::Progress(progress(tokens)), 0);
        store.write(further).await.expect("further");
    }
    let tree = stored(store, &root).await.tree;
    assert_eq!((tree.runs, tree.usage.tokens.input), (3, 111));
    assert_eq!(tree.usage.cost, Some(Cost(111)));
    assert_eq!((tree.usage.tool_calls, tree.usage.model_calls), (9, 3));
    let tree = stored(store, &child).await.tree;
    assert_eq!((tree.runs, tree.usage.tokens.input), (2, 110));
    let page = store.list(page()).await.expect("a page");
    assert_eq!(page.runs[0].tree.usage.tokens.input, 111);

    let open = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(open[1].run.tree, stored(store, &child).await.tree);
    let open: Vec<_> = open.iter().map(|found| found.run.id).collect();
    assert_eq!(open, [root.run, child.run, below.run]);
    let whole = store.tree(root.run).await.expect("a tree");
    let whole: Vec<_> = whole.iter().map(|run| run.id).collect();
    assert_eq!(whole, [root.run, child.run, below.run]);
    let part = store.tree(child.run).await.expect("a tree");
    assert_eq!(part.len(), 2);
    let children = store.children(root.run).await.expect("children");
    assert_eq!(children.len(), 1);
    assert_eq!(children[0].id, child.run);

    for scope in [&below, &child] {
        store.write(completing(scope, "x")).await.expect("closed");
    }
    let mut end = completing(&root, "x");
    let Change::Finish(close) = &mut end.change else {
        unreachable!()
    };
    let mut sum = usage(500);
    sum.cost = None;
    close.tree_usage = TreeUsage {
        runs: 3,
        usage: sum,
    };
    store.write(end).await.expect("closed");
    let tree = stored(store, &root).await.tree;
    assert_eq!((tree.runs, tree.usage), (3, sum));
    assert!(
        store
            .unfinished_runs()
            .await
            .expect("unfinished")
            .is_empty()
    );
}

/// The clock of a database may differ a little.
fn with_whole_minutes(found: &UnfinishedRun) -> Option<ResumeState> {
    let mut found = found.resume_state.clone()?;
    let deadline = found.deadline.as_mut().map(|(at, _)| at);
    for at in deadline.into_iter().chain(&mut found.waiting_since) {
        let minutes = (at.as_millisecond() + 30_000) / 60_000;
        *at = Timestamp::from_millisecond(minutes * 60_000).expect("a time");
    }
    Some(found)
}

/// What a run needs to be continued comes back, a queued run's and a started one's, and only those that have not ended.
async fn a_resume_state_reads_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let child = child(&root);
    let deadline =
        |minutes: i64| Timestamp::from_second(1_900_000_020 + minutes * 60).expect("a time");
    let kept = |definition: &str, deadline| ResumeState {
        definition: definition.into(),
        deadline,
        timeout: 300,
        stream: deadline.is_none(),
        webhooks: deadline.is_none().then(webhook).into_iter().collect(),
        waiting_since: None,
        is_held: false,
        workdir: Some(FileId {
            device: u64::MAX,
            inode: 7,
        }),
    };
    let of_child = kept("{\"name\":\"child\"}", Some((deadline(1), 40)));
    let of_root = kept("{\"name\":\"é\"}", None);
    for (scope, continuation) in [(&root, &of_root), (&child, &of_child)] {
        let opening = NewRun {
            resume_state: continuation.clone(),
            ..fresh(record(scope, "a"))
        };
        let open = write(scope, Change::Create(Box::new(opening)), 1);
        store.write(open).await.expect("opened");
    }
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run, stored(store, &root).await);
    assert_eq!(with_whole_minutes(&found[0]), Some(of_root.clone()));
    assert_eq!(found[1].run, stored(store, &child).await);
    assert_eq!(with_whole_minutes(&found[1]), Some(of_child));

    let start = Change::Start {
        at: now(),
        deadline: (deadline(2), 50),
    };
    store.write(write(&root, start, 1)).await.expect("started");
    store.write(completing(&child, "x")).await.expect("closed");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found.len(), 1);
    let started = ResumeState {
        deadline: Some((deadline(2), 50)),
        ..of_root
    };
    assert_eq!(with_whole_minutes(&found[0]), Some(started.clone()));

    // Its time limit is paused while it waits; afterwards it has a new deadline.
    let since = deadline(0);
    let waiting = Change::Pause {
        since,
        waiting_for: axed::domain::waiting_for::WaitingFor::Approval,
    };
    store.write(write(&root, waiting, 1)).await.expect("waits");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run.status, Status::Waiting);
    let waits = ResumeState {
        waiting_since: Some(since),
        ..started.clone()
    };
    assert_eq!(with_whole_minutes(&found[0]), Some(waits));
    let going = Change::Unpause {
        deadline: (deadline(9), 50),
    };
    store.write(write(&root, going, 0)).await.expect("goes on");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run.status, Status::Running);
    let goes = ResumeState {
        deadline: Some((deadline(9), 50)),
        ..started
    };
    assert_eq!(with_whole_minutes(&found[0]), Some(goes));
}

/// Every process that resumes a run increases its attempt; its state does not change.
async fn resuming_counts_as_an_attempt(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let resume = |events| store.write(write(&root, Change::Resume, events));
    resume(0).await.expect("resumed");
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (2, Status::Queued));
    store.write(starting(&root)).await.expect("started");
    assert_eq!(resume(1).await.expect("resumed"), 3);
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (3, Status::Running));
    let reason = String::new();
    let stop = write(&root, Change::RequestCancel { reason }, 1);
    store.write(stop).await.expect("a recorded cancel request");
    resume(0).await.expect("resumed");
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (4, Status::Cancelling));
    store.write(completing(&root, "x")).await.expect("closed");
    let late = resume(1).await;
    assert!(matches!(late, Err(StoreError::AlreadyTerminal(id)) if id == root.run));
    let nobody = store.write(write(&self::root(), Change::Resume, 1)).await;
    assert!(matches!(nobody, Err(StoreError::RunNotFound(_))));
}

/// A rejected write does not affect the other writes of its commit.
async fn a_rejected_write_affects_no_other(opened: &Opened) {
    let (store, root, nobody) = (&*opened.store, root(), root());
    store.write(opening(&root, "a")).await.expect("opened");
    let results = futures_util::future::join_all((0..60).map(|n| {
        store.write(match n % 3 {
            0 => write(&root, Change::Unchanged, 1),
            1 => starting(&nobody),
            _ => opening(&root, "again"),
        })
    }))
    .await;
    let mut number = 1;
    for (n, result) in results.into_iter().enumerate() {
        if n % 3 == 0 {
            number += 1;
            assert_eq!(result.expect("written"), number);
        } else {
            let error = result.expect_err("refused");
            let unknown = matches!(error, StoreError::RunNotFound(id) if id == nobody.run);
            assert_eq!(unknown, n % 3 == 1, "{error}");
        }
    }
    let orphan = child(&nobody);
    let orphan = store.write(opening(&orphan, "a")).await;
    assert!(matches!(orphan, Err(StoreError::RunNotFound(id)) if id == nobody.run));
    let log = store.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), (1..=number).collect::<Vec<_>>());
    // Also if only events were added since it was opened.
    assert_eq!(stored(store, &root).await.last_event, number);
}

/// Nobody waits for a posted write; when it fails its run takes no further one, and other runs are as before.
async fn a_failed_queued_write_stops_its_run(opened: &Opened) {
    let (store, broken, whole) = (&*opened.store, root(), root());
    for scope in [&broken, &whole] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    store
        .enqueue(opening(&broken, "again"))
        .await
        .expect("posted");
    store.enqueue(starting(&whole)).await.expect("posted");
    let later = store.write(starting(&broken)).await.expect_err("a gap");
    assert!(matches!(later, StoreError::Suspended), "{later}");
    let later = store.write(completing(&broken, "x")).await;
    assert!(matches!(later, Err(StoreError::Suspended)));
    store.write(completing(&whole, "x")).await.expect("closed");
    assert_eq!(stored(store, &broken).await.status, Status::Queued);
    assert_eq!(stored(store, &whole).await.status, Status::Completed);
    // Its owner continues from the last commit.
    store.clear_failed(vec![broken.run]).await.expect("mended");
    store.write(completing(&broken, "x")).await.expect("closed");
}

/// Writes before the close are kept; later ones are rejected.
async fn a_closed_store_rejects_calls(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.check().await.expect("in order");
    store.write(opening(&root, "a")).await.expect("opened");
    for _ in 0..500 {
        let some = write(&root, Change::Unchanged, 1);
        store.enqueue(some).await.expect("posted");
    }
    store.close().await;
    assert_eq!(opened.published.lock().expect("no panic").len(), 501);
    store.close().await;
    let closed = |error| matches!(error, StoreError::Closed);
    assert!(store.write(starting(&root)).await.is_err_and(closed));
    assert!(store.enqueue(starting(&root)).await.is_err_and(closed));
    assert!(store.run(root.run).await.is_err_and(closed));
    assert!(store.delete(root.run).await.is_err_and(closed));
    assert!(store.check().await.is_err_and(closed));
}

/// Roots of equal content share the definitions of the agents that they call, until none of them is left.
async fn pinned_agents_read_back(opened: &Opened) {
    let store = &*opened.store;
    let digest = Digest::compute(b"[{}]");
    let found = async || store.pinned_agents(digest).await.expect("a read");
    assert_eq!(found().await, None);
    let root = root();
    let opening = NewRun {
        pinned_agents: Some("[{}]".into()),
        ..fresh(record(&root, "a"))
    };
    let open = write(&root, Change::Create(Box::new(opening)), 1);
    store.write(open).await.expect("opened");
    assert_eq!(found().await.as_deref(), Some("[{}]"));
    store.write(completing(&root, "x")).await.expect("closed");
    assert!(store.delete(root.run).await.expect("deleted"));
    assert_eq!(found().await, None);
}

shared_stories!(
    a_run_ends_once,
    a_record_reads_back,
    steps_read_back,
    a_trees_usage_is_summed,
    a_resume_state_reads_back,
    pinned_agents_read_back,
    resuming_counts_as_an_attempt,
    a_rejected_write_affects_no_other,
    a_failed_queued_write_stops_its_run,
    a_closed_store_rejects_calls,
);

/// A server may still commit what it got before its connection broke: the record is read after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_is_resumed_after_a_commit_that_comes_late() {
    let Some(opened) = postgres() else {
        return;
    };
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let url = &opened.postgres.as_ref().expect("PostgreSQL").url;
    let late = lock_tables(url, "trees IN ROW SHARE MODE; SELECT FROM trees FOR UPDATE");
    let database = opened.database();
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let is_waited_for = eventually("a lock that is waited for", async || {
        database.number(waits).filter(|count| *count > 0)
    });
    let mut cleared = store.clear_failed(vec![root.run]);
    tokio::select! {
        cleared = &mut cleared => panic!("it did not wait: {cleared:?}"),
        _ = is_waited_for => {}
    }
    late.release();
    cleared.await.expect("mended");
}
