//! Files of earlier versions are migrated.

use axed::domain::approval::ArgumentsHash;
use axed::domain::event::{Decision, EventKind};
use axed::domain::message::empty_arguments;
use axed::domain::run::now;
use axed::domain::waiting_for::WaitingFor;
use axed::store::Change;

use crate::store::fixtures::{
    count, opening, root, sql, sqlite, sqlite_in, stored, webhook, write,
};

/// Undoes the steps from 15 on, one after another: a newer step adds its own line.
pub const STEPS_FROM_15: [&str; 10] = [
    "ALTER TABLE entries DROP COLUMN turns;",
    "ALTER TABLE runs DROP COLUMN messages; ALTER TABLE claims DROP COLUMN message;",
    "ALTER TABLE runs DROP COLUMN model_usage; DROP TABLE usage_series; DROP TABLE usage_values; \
     DROP TABLE usage_quarters; DROP TABLE usage_days;",
    "ALTER TABLE runs DROP COLUMN held;",
    "ALTER TABLE runs DROP COLUMN fork;",
    "DROP TABLE budget_usage; DROP TABLE budget_alerts;",
    "DROP INDEX definitions_only_run;",
    "DROP TABLE schedules;",
    "DROP TABLE batches; DROP TABLE batch_lines;",
    "DROP TABLE push_configs; ALTER TABLE deliveries DROP COLUMN push;",
];

/// A file from before webhooks keeps its runs, and can hold deliveries from then on.
#[tokio::test]
async fn a_file_from_before_webhooks_is_migrated() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    opened
        .store
        .write(opening(&root, "a"))
        .await
        .expect("opened");
    let before = stored(&*opened.store, &root).await;
    opened.store.close().await;
    sql(
        dir,
        &(STEPS_FROM_15.concat()
            + "ALTER TABLE runs DROP COLUMN warnings; DROP INDEX runs_session_names; DROP TABLE approvals; ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; ALTER TABLE runs DROP COLUMN workdir_device; ALTER TABLE runs DROP COLUMN workdir_inode; ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN waiting_since; DROP INDEX runs_session; ALTER TABLE runs DROP COLUMN session; DROP TABLE deliveries; ALTER TABLE runs DROP COLUMN webhook; ALTER TABLE runs DROP COLUMN structured; \
         DROP INDEX definitions_used; ALTER TABLE definitions DROP COLUMN used_until; \
         ALTER TABLE definitions DROP COLUMN only_run; PRAGMA user_version = 1"),
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    assert_eq!(stored(&*store, &root).await, before);
    let found = store.unfinished_runs().await.expect("unfinished");
    let kept = found[0].resume_state.as_ref().expect("known");
    assert_eq!(kept.webhooks, []);
    assert_eq!(count(dir, "deliveries"), 0);
}

/// A run from when it had one webhook keeps it.
#[tokio::test]
async fn a_file_from_before_several_webhooks_is_migrated() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    let mut write = opening(&root, "a");
    let Change::Create(opens) = &mut write.change else {
        panic!("no opening");
    };
    opens.resume_state.webhooks = vec![webhook()];
    opened.store.write(write).await.expect("opened");
    opened.store.close().await;
    sql(
        dir,
        &(STEPS_FROM_15.concat()
            + "UPDATE runs SET webhook = json_extract(webhook, '$[0]'); \
         ALTER TABLE runs DROP COLUMN warnings; DROP INDEX runs_session_names; DROP TABLE approvals; ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; \
         ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN workdir_device; \
          ALTER TABLE runs DROP COLUMN workdir_inode; DROP INDEX deliveries_due; \
          ALTER TABLE deliveries DROP COLUMN owner; CREATE INDEX deliveries_due ON deliveries (host); \
          PRAGMA user_version = 6"),
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    let found = store.unfinished_runs().await.expect("unfinished");
    let kept = found[0].resume_state.as_ref().expect("known");
    assert_eq!(kept.webhooks, [webhook()]);
}

/// A run that waits for approval in a file from before the table of pending approvals is in that table.
#[tokio::test]
async fn a_file_from_before_pending_approvals_is_migrated() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    let store = &opened.store;
    store.write(opening(&root, "a")).await.expect("opened");
    let start = Change::Start {
        at: now(),
        deadline: (now(), 60),
    };
    store.write(write(&root, start, 0)).await.expect("started");
    let requested = |call: &str| EventKind::ApprovalRequested {
        turn: 1,
        tool_call_id: call.to_owned(),
        tool: "write_file".to_owned(),
        arguments: empty_arguments(),
        arguments_hash: ArgumentsHash::compute(&empty_arguments()),
        truncated: false,
        deadline: None,
    };
    let decided = EventKind::ApprovalDecided {
        tool_call_id: "c1".to_owned(),
        decision: Decision::Denied,
        arguments: None,
        truncated: false,
        reason: None,
        by: None,
    };
    for kind in [requested("c1"), requested("c2"), decided] {
        let mut write = write(&root, Change::Unchanged, 1);
        write.events[0].kind = kind;
        store.write(write).await.expect("written");
    }
    let before = stored(&**store, &root).await;
    assert_eq!(before.pending_approvals[0].request.tool_call_id, "c2");
    store.close().await;
    sql(
        dir,
        &(STEPS_FROM_15.concat()
            + "ALTER TABLE runs DROP COLUMN warnings; DROP INDEX runs_session_names; DROP TABLE approvals; PRAGMA user_version = 12"),
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    assert_eq!(stored(&*store, &root).await, before);
}

/// What a run waits for was an object with a reason.
#[tokio::test]
async fn a_file_from_before_waiting_words_is_migrated() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    let store = &opened.store;
    store.write(opening(&root, "a")).await.expect("opened");
    let start = Change::Start {
        at: now(),
        deadline: (now(), 60),
    };
    store.write(write(&root, start, 0)).await.expect("started");
    let waits = Change::Pause {
        since: now(),
        waiting_for: WaitingFor::Batch,
    };
    store.write(write(&root, waits, 0)).await.expect("waits");
    store.close().await;
    sql(
        dir,
        "DROP TABLE push_configs; ALTER TABLE deliveries DROP COLUMN push; DROP TABLE schedules; DROP TABLE batches; DROP TABLE batch_lines; UPDATE runs SET waiting_for = '{\"reason\":\"batch\"}'; DROP INDEX definitions_only_run; PRAGMA user_version = 21",
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    let run = stored(&*store, &root).await;
    assert_eq!(run.waiting_for, Some(WaitingFor::Batch));
}
