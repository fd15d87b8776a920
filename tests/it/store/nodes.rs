//! What several nodes with one database do at the same time.

use std::collections::HashSet;

use axed::store::cluster::TreeOwner;
use axed::store::new_request::{NewRequest, RequestContent, RequestId};
use axed::store::run_requests::OpenRequest;

use crate::store::fixtures::{beside, opening, postgres, root, starting};
use crate::support::database::lock_tables;
use crate::support::eventually;
use crate::support::postgres::with_client;

/// A node adds a request again if it does not know whether it is there, and none performs one that it has given up.
#[tokio::test]
async fn a_request_that_is_void_is_not_added_later() {
    let Some(opened) = postgres() else {
        return;
    };
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let cluster = opened.store.cluster().expect("a cluster");
    let request = || NewRequest {
        id: RequestId(root.run.0),
        run: root.run,
        root: root.run,
        kind: "set_held",
        content: RequestContent {
            body: b"{}".to_vec(),
            blobs: Vec::new(),
        },
    };
    for _ in 0..2 {
        cluster.add_request(request()).await.expect("added");
    }
    let open = cluster.open_requests().await.expect("requests");
    assert_eq!(open.len(), 1);
    cluster.void_request(open[0].clone()).await.expect("void");
    cluster.add_request(request()).await.expect("ignored");
    let open_now = cluster.open_requests().await.expect("requests");
    assert!(open_now.is_empty(), "{open_now:?}");

    // It may be void before it is there.
    let later = NewRequest {
        id: RequestId::new(),
        ..request()
    };
    let open = OpenRequest {
        id: later.id,
        ..open[0].clone()
    };
    cluster.void_request(open).await.expect("void");
    cluster.add_request(later).await.expect("ignored");
    let open_now = cluster.open_requests().await.expect("requests");
    assert!(open_now.is_empty(), "{open_now:?}");
}

/// A claim that begins before another one commits does not take the same tree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_do_not_claim_a_tree_both() {
    let Some(opened) = postgres() else {
        return;
    };
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let other = beside(&opened);
    let (one, two) = (store.cluster(), other.cluster());
    let (one, two) = (one.expect("a cluster"), two.expect("a cluster"));
    let url = &opened.postgres.as_ref().expect("PostgreSQL").url;
    let free = "UPDATE trees SET node = gen_random_uuid(), epoch = epoch + 1";
    with_client(url, async |client| client.batch_execute(free).await);

    let node = one.node().0;
    let row = format!(
        "nodes IN ROW SHARE MODE; SELECT FROM nodes WHERE incarnation = '{node}' FOR UPDATE"
    );
    let late = lock_tables(url, &row);
    let mut claiming = one.claim_trees(16);
    let database = opened.database();
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
        AND wait_event_type = 'Lock' AND query LIKE '%alive AS MATERIALIZED%'";
    let is_waited_for = eventually("a claim that waits", async || {
        database.number(waits).filter(|count| *count > 0)
    });
    tokio::select! {
        claimed = &mut claiming => panic!("it did not wait: {claimed:?}"),
        _ = is_waited_for => {}
    }
    assert_eq!(two.claim_trees(16).await.expect("claimed"), [root.run]);
    late.release();
    assert_eq!(claiming.await.expect("nothing"), []);
    assert_eq!(
        two.tree_owner(root.run).await.expect("an owner"),
        TreeOwner::ThisNode
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_learns_which_of_the_trees_to_resume_it_owns() {
    let Some(opened) = postgres() else {
        return;
    };
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let other = beside(&opened);
    let cleared = other.clear_failed(vec![root.run]).await.expect("cleared");
    assert!(cleared.is_empty(), "another node's: {cleared:?}");
    let cleared = store.clear_failed(vec![root.run]).await.expect("cleared");
    assert_eq!(cleared, HashSet::from([root.run]));

    // It only holds the tree until a node with the labels comes.
    let url = &opened.postgres.as_ref().expect("PostgreSQL").url;
    let needs = "UPDATE trees SET labels = '{gpu}'";
    with_client(url, async |client| client.batch_execute(needs).await);
    let cleared = store.clear_failed(vec![root.run]).await.expect("cleared");
    assert!(cleared.is_empty(), "without its labels: {cleared:?}");
    store.write(starting(&root)).await.expect("it can write");
}
