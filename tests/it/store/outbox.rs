//! Webhook deliveries in the store.

use std::sync::Arc;
use std::time::Duration;

use axed::domain::run::{RunId, Status, now};
use axed::domain::webhook::{DeliveryId, Webhook};
use axed::store::outbox::{
    AttemptOutcome, AttemptRecord, DeliveryAttempt, DeliveryStatus, DueDeliveries, DueQuery,
    MAX_STORED_ATTEMPTS,
};
use axed::store::retention::{Cutoff, ExpiredQuery};
use axed::store::run_store::RunStore;
use axed::store::{Change, NewDelivery, Write};
use jiff::{SignedDuration, Timestamp};

use crate::store::fixtures::{
    Opened, completing, in_an_hour, opening, postgres, root, webhook, write,
};
use crate::support::within_timeout;

fn with_deliveries(write: Write, ids: &[DeliveryId]) -> Write {
    with_deliveries_at(write, ids, now())
}

fn with_deliveries_at(mut write: Write, ids: &[DeliveryId], created_at: Timestamp) -> Write {
    let new = |id: &DeliveryId| NewDelivery {
        id: *id,
        webhook: webhook(),
        event: "run.completed",
        body: format!("{{\"n\":\"{id}\"}}"),
        created_at,
        alert: None,
    };
    write.deliveries = ids.iter().map(new).collect();
    write
}

async fn due(
    store: &dyn RunStore,
    by: Timestamp,
    not: &[DeliveryId],
    not_to: &[&str],
) -> DueDeliveries {
    let excluded = not_to.iter();
    let query = DueQuery {
        due_by: by,
        in_flight: not.to_vec(),
        excluded_hosts: excluded
            .map(|host| (String::new(), (*host).to_owned()))
            .collect(),
        limit: 10,
        first_retry: None,
    };
    store.due_deliveries(query).await.expect("due deliveries")
}

async fn attempt(
    store: &dyn RunStore,
    since: Timestamp,
    id: DeliveryId,
    outcome: AttemptOutcome,
    status: u16,
) {
    let attempt = DeliveryAttempt {
        time: now(),
        status: Some(status),
        error: Some("why \"so\"".to_owned()).filter(|_| outcome != AttemptOutcome::Delivered),
    };
    let record = AttemptRecord {
        id,
        since,
        attempt,
        outcome,
    };
    // The caller repeats it if it does not know whether it was recorded.
    for _ in 0..2 {
        store
            .record_attempt(record.clone())
            .await
            .expect("recorded");
    }
}

/// A delivery is in the outbox exactly if its write was committed.
async fn a_delivery_is_committed_with_its_write(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let ids = [DeliveryId::new(), DeliveryId::new()];
    store.write(opening(&root, "a")).await.expect("opened");
    let notify = store.delivery_notify();
    store
        .write(with_deliveries(completing(&root, "x"), &ids))
        .await
        .expect("closed");
    within_timeout("the notice", notify.notified()).await;
    // A rejected write delivers nothing, and neither does an ignored one.
    let late = with_deliveries(completing(&root, "y"), &[DeliveryId::new()]);
    assert!(store.write(late).await.is_err());
    let reason = String::new();
    let late = write(&root, Change::RequestCancel { reason }, 1);
    let late = store
        .write(with_deliveries(late, &[DeliveryId::new()]))
        .await;
    assert_eq!(late.expect("ignored"), 0);

    let soon = now() + Duration::from_secs(1);
    let found = due(store, soon, &[], &["other.example.com"]).await;
    let names: Vec<_> = found.deliveries.iter().map(|it| it.id).collect();
    assert_eq!(names, ids);
    let first = &found.deliveries[0];
    assert_eq!((first.run, first.attempt_count), (root.run, 0));
    assert_eq!(first.agent, "a");
    assert_eq!(first.url, webhook().url);
    assert_eq!(first.host, "hooks.example.com");
    assert_eq!(first.secret_env.as_deref(), Some("SECRET"));
    assert_eq!(first.body, format!("{{\"n\":\"{}\"}}", ids[0]));
    assert_eq!(due(store, soon, &ids[..1], &[]).await.deliveries.len(), 1);
    let shut = due(store, soon, &[], &["hooks.example.com"]).await;
    assert!(shut.deliveries.is_empty());
    let early = Timestamp::from_millisecond(1).expect("a time");
    let early = due(store, early, &[], &[]).await;
    assert!(early.deliveries.is_empty() && early.next_due_at.is_some());
    for (max, expected) in [(10, 2), (1, 1)] {
        let count = store.count_pending(max).await.expect("a count");
        assert_eq!(count, expected);
    }
}

/// PostgreSQL's times are those of its own clock.
fn is_about(found: Option<Timestamp>, expected: Timestamp) -> bool {
    found.is_some_and(|it| it.duration_since(expected).abs() < SignedDuration::from_secs(5))
}

/// Attempts change the status of a delivery until it has succeeded or was given up; a resend restarts it.
async fn attempts_change_the_status_of_a_delivery(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let ids = [DeliveryId::new(), DeliveryId::new()];
    store.write(opening(&root, "a")).await.expect("opened");
    store
        .write(with_deliveries(completing(&root, "x"), &ids))
        .await
        .expect("closed");
    let soon = now() + Duration::from_secs(1);
    let since = due(store, soon, &[], &[]).await.deliveries[0].since;
    // Retention keeps a run while a delivery is pending.
    let old = || async {
        let query = ExpiredQuery {
            status: Status::Completed,
            cutoff: Cutoff::CreatedBefore(RunId::new()),
            after: None,
        };
        let mut found = store.expired_roots(query).await.expect("a page").roots;
        found.retain(|id| *id == root.run);
        found
    };
    assert!(old().await.is_empty());
    let delay = Duration::from_secs(3600);
    let later = now() + delay;
    attempt(store, since, ids[0], AttemptOutcome::RetryIn(delay), 500).await;
    attempt(store, since, ids[1], AttemptOutcome::Delivered, 200).await;
    let found = due(store, soon, &[], &[]).await;
    assert!(found.deliveries.is_empty());
    assert!(is_about(found.next_due_at, later));
    let listed = store.deliveries(root.run).await.expect("listed");
    let statuses: Vec<_> = listed
        .iter()
        .map(|it| (it.id, it.status, it.attempts.len()))
        .collect();
    assert_eq!(
        statuses,
        [
            (ids[0], DeliveryStatus::Pending, 1),
            (ids[1], DeliveryStatus::Delivered, 1)
        ]
    );
    assert!(is_about(listed[0].next_attempt_at, later));
    assert_eq!(listed[1].next_attempt_at, None);
    assert_eq!(listed[0].attempts[0].error.as_deref(), Some("why \"so\""));
    assert_eq!(listed[1].attempts[0].status, Some(200));

    for status in (400..).take(MAX_STORED_ATTEMPTS + 5) {
        attempt(store, since, ids[0], AttemptOutcome::GivenUp, status).await;
    }
    let listed = store.deliveries(root.run).await.expect("listed");
    assert_eq!(listed[0].status, DeliveryStatus::Failed);
    assert_eq!(listed[0].attempts.len(), MAX_STORED_ATTEMPTS);
    assert_eq!(old().await, [root.run]);
    assert!(!store.resend(RunId::new(), ids[0]).await.expect("no run"));
    assert!(
        !store
            .resend(root.run, DeliveryId::new())
            .await
            .expect("none")
    );
    assert!(store.resend(root.run, ids[0]).await.expect("again"));
    let again = due(store, now() + Duration::from_secs(1), &[], &[]).await;
    assert_eq!(again.deliveries.len(), 1);
    assert_eq!(again.deliveries[0].attempt_count, 0);
    // An attempt that began before the resend does not change the status.
    attempt(store, since, ids[0], AttemptOutcome::GivenUp, 404).await;
    let again = due(store, now() + Duration::from_secs(1), &[], &[]).await;
    assert_eq!(again.deliveries.len(), 1);
    assert_eq!(again.deliveries[0].attempt_count, 0);

    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(store.deliveries(root.run).await.expect("none").is_empty());
    let gone = due(store, now() + Duration::from_secs(1), &[], &[]).await;
    assert!(gone.deliveries.is_empty() && gone.next_due_at.is_none());
    attempt(store, since, ids[0], AttemptOutcome::Delivered, 200).await;
}

/// A delivery that has arrived stays so, whatever another process records later of its own attempt.
async fn a_late_outcome_makes_no_delivered_one_due(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let id = DeliveryId::new();
    store.write(opening(&root, "a")).await.expect("opened");
    let ended = with_deliveries(completing(&root, "x"), &[id]);
    store.write(ended).await.expect("closed");
    let soon = now() + Duration::from_secs(1);
    let since = due(store, soon, &[], &[]).await.deliveries[0].since;
    attempt(store, since, id, AttemptOutcome::Delivered, 200).await;
    let late = AttemptOutcome::RetryIn(Duration::ZERO);
    attempt(store, since, id, late, 500).await;
    let found = due(store, soon, &[], &[]).await;
    assert!(found.deliveries.is_empty() && found.next_due_at.is_none());
    let listed = store.deliveries(root.run).await.expect("listed");
    assert_eq!(listed[0].status, DeliveryStatus::Delivered);
    assert_eq!(listed[0].attempts.len(), 2);
}

/// The clock was ahead when an attempt was recorded, and was set back since.
async fn a_delivery_that_waits_for_a_far_time_is_due(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let ids = [DeliveryId::new(), DeliveryId::new(), DeliveryId::new()];
    store.write(opening(&root, "a")).await.expect("opened");
    let ended = with_deliveries(completing(&root, "x"), &ids);
    store.write(ended).await.expect("closed");
    let soon = now() + Duration::from_secs(1);
    let since = due(store, soon, &[], &[]).await.deliveries[0].since;
    for (id, hours) in [(ids[0], 48), (ids[1], 1)] {
        let delay = Duration::from_secs(hours * 3600);
        attempt(store, since, id, AttemptOutcome::RetryIn(delay), 500).await;
    }
    let found = due(store, soon, &[], &[]).await;
    let found: Vec<_> = found.deliveries.iter().map(|it| it.id).collect();
    assert_eq!(found, [ids[2], ids[0]], "those that are due come first");
    let found = due(store, soon, &[ids[0]], &[]).await;
    assert_eq!(found.deliveries.len(), 1, "one is in flight");
    let excluded = due(store, soon, &[], &["hooks.example.com"]).await;
    assert!(excluded.deliveries.is_empty());
}

/// More hosts than are read at once, and one of them with more deliveries than that.
async fn due_deliveries_are_found_among_those_of_many_hosts(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let mut ids: Vec<DeliveryId> = (0..900).map(|_| DeliveryId::new()).collect();
    ids.sort_unstable();
    let (backlog, others) = ids.split_at(300);
    let hosts = (0..others.len()).rev().map(|n| format!("h{n:03}"));
    let hosts = std::iter::repeat_n("backlog".to_owned(), backlog.len()).chain(hosts);
    let created_at = now();
    let delivery = |(id, host): (&DeliveryId, String)| NewDelivery {
        id: *id,
        webhook: Arc::new(Webhook {
            url: format!("https://{host}.example.com"),
            ..Webhook::clone(&webhook())
        }),
        event: "run.completed",
        body: "{}".to_owned(),
        created_at,
        alert: None,
    };
    store.write(opening(&root, "a")).await.expect("opened");
    let mut ended = completing(&root, "x");
    ended.deliveries = ids.iter().zip(hosts).map(delivery).collect();
    store.write(ended).await.expect("closed");

    let soon = now() + Duration::from_secs(1);
    let first = async |in_flight: &[DeliveryId], excluded: &[&str]| {
        let found = due(store, soon, in_flight, excluded).await;
        assert_eq!(found.next_due_at, None);
        let ids = found.deliveries.iter().map(|it| it.id);
        ids.collect::<Vec<_>>()
    };
    assert_eq!(first(&[], &[]).await, backlog[..10]);
    assert_eq!(first(&backlog[..10], &[]).await, backlog[10..20]);
    let full = ["backlog.example.com"];
    assert_eq!(first(&backlog[..8], &full).await, others[..10]);

    let delay = Duration::from_secs(3600);
    let since = due(store, soon, &[], &[]).await.deliveries[0].since;
    attempt(store, since, others[0], AttemptOutcome::RetryIn(delay), 500).await;
    let found = due(store, soon, &[], &full).await;
    assert_eq!(found.deliveries[0].id, others[1]);
    assert!(is_about(found.next_due_at, now() + delay));
}

/// The clock of the node that makes a delivery may be ahead of that of the node that sends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delivery_of_a_node_with_another_clock_is_due_at_once() {
    let Some(opened) = postgres() else {
        return;
    };
    let (store, root) = (&*opened.store, root());
    let id = DeliveryId::new();
    store.write(opening(&root, "a")).await.expect("opened");
    let ended = with_deliveries_at(completing(&root, "x"), &[id], in_an_hour());
    store.write(ended).await.expect("closed");
    let soon = now() + Duration::from_secs(1);
    let found = due(store, soon, &[], &[]).await;
    assert_eq!(found.deliveries.len(), 1);
    let since = found.deliveries[0].since;
    let delay = Duration::from_secs(30);
    let later = now() + delay;
    attempt(store, since, id, AttemptOutcome::RetryIn(delay), 500).await;
    let found = due(store, soon, &[], &[]).await;
    assert!(found.deliveries.is_empty() && is_about(found.next_due_at, later));
}

shared_stories!(
    a_delivery_is_committed_with_its_write,
    attempts_change_the_status_of_a_delivery,
    a_late_outcome_makes_no_delivered_one_due,
    a_delivery_that_waits_for_a_far_time_is_due,
    due_deliveries_are_found_among_those_of_many_hosts,
);
