//! Files of earlier versions are migrated.

use axed::store::Change;

use crate::store::fixtures::{count, opening, root, sql, sqlite, sqlite_in, stored, webhook};

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
        "ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; ALTER TABLE runs DROP COLUMN workdir_device; ALTER TABLE runs DROP COLUMN workdir_inode; ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN waiting_since; DROP INDEX runs_session; ALTER TABLE runs DROP COLUMN session; DROP TABLE deliveries; ALTER TABLE runs DROP COLUMN webhook; ALTER TABLE runs DROP COLUMN structured; \
         DROP INDEX definitions_used; ALTER TABLE definitions DROP COLUMN used_until; \
         ALTER TABLE definitions DROP COLUMN only_run; PRAGMA user_version = 1",
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
        "UPDATE runs SET webhook = json_extract(webhook, '$[0]'); \
         ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; \
         ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN workdir_device; \
          ALTER TABLE runs DROP COLUMN workdir_inode; DROP INDEX deliveries_due; \
          ALTER TABLE deliveries DROP COLUMN owner; CREATE INDEX deliveries_due ON deliveries (host); \
          PRAGMA user_version = 6",
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    let found = store.unfinished_runs().await.expect("unfinished");
    let kept = found[0].resume_state.as_ref().expect("known");
    assert_eq!(kept.webhooks, [webhook()]);
}
