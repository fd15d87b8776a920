//! Reads webhook deliveries.

use jiff::SignedDuration;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::store::encoding::clock_skew::MAX_RETRY_MS;
use crate::store::encoding::integers::signed;
use crate::store::outbox::{
    Delivery, DeliveryStatus, DueDeliveries, DueDelivery, DueQuery, MAX_LISTED_DELIVERIES,
};
use crate::store::postgres::push_configs;
use crate::store::postgres::reader_pool::Reader;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::postgres::sql::{clock, params};

/// The owners and hosts with pending deliveries, without those that are left out, found by skipping along the index.
macro_rules! targets {
    () => {
        "WITH RECURSIVE every AS (\
         (SELECT owner, host FROM deliveries WHERE next_at IS NOT NULL ORDER BY owner, host LIMIT 1) \
         UNION ALL SELECT n.owner, n.host FROM every CROSS JOIN LATERAL (SELECT d.owner, d.host FROM deliveries d \
         WHERE d.next_at IS NOT NULL AND (d.owner, d.host) > (every.owner, every.host) \
         ORDER BY d.owner, d.host LIMIT 1) n), \
         targets AS (SELECT owner, host FROM every WHERE (owner, host) NOT IN \
         (SELECT * FROM unnest(:owners::text[], :hosts::text[]))) "
    };
}

/// The first deliveries of a target, without those in flight, whose times are as a condition says.
macro_rules! of_target {
    ($($condition:expr),+) => {
        concat!(
            "(SELECT d.id, d.next_at FROM deliveries d WHERE d.next_at IS NOT NULL \
             AND d.owner = targets.owner AND d.host = targets.host AND d.next_at ",
            $($condition,)+
            " AND d.id <> ALL(:in_flight::uuid[]) ORDER BY d.next_at LIMIT :limit)"
        )
    };
}

/// The deliveries that are due in so many milliseconds, longest due first, and those whose time is further ahead than any wait,
/// because the clock was set back. Reads at most the limit of each owner and host: otherwise the backlog of a host that hangs would
/// be read again for every delivery to another host.
const DUE: &str = concat!(
    targets!(),
    "SELECT d.id, d.run, d.url, d.host, d.secret_env, d.body, d.event, d.created_at, d.since, d.tries, d.owner, d.push, \
     c.context, c.token, c.scheme, c.credentials, r.agent FROM \
     (SELECT due.id, due.next_at, row_number() OVER (PARTITION BY targets.owner ORDER BY due.next_at, due.id) AS number \
     FROM targets CROSS JOIN LATERAL (",
    of_target!("<= ", clock!(), " + :due_in::bigint"),
    " UNION ALL ",
    of_target!("> ", clock!(), " + :max_wait::bigint"),
    ") due) found \
     JOIN deliveries d ON d.id = found.id LEFT JOIN push_configs c ON c.run = d.run AND c.id = d.push \
     LEFT JOIN runs r ON r.id = d.run \
     WHERE found.number <= :limit AND (d.push IS NULL OR c.id IS NOT NULL) ORDER BY found.next_at, found.id"
);
/// In how many milliseconds the first of the others is due.
const NEXT_DUE_IN: &str = concat!(
    targets!(),
    "SELECT min(n.next_at) - ",
    clock!(),
    " AS due_in FROM targets CROSS JOIN LATERAL (SELECT d.next_at FROM deliveries d \
     WHERE d.next_at IS NOT NULL AND d.owner = targets.owner AND d.host = targets.host AND d.next_at > ",
    clock!(),
    " + :due_in::bigint \
     ORDER BY d.next_at LIMIT 1) n"
);
const OF_RUN: &str = "SELECT id, event, url, status, created_at, attempts, next_at FROM deliveries \
     WHERE run = :run ORDER BY id DESC LIMIT :limit";

pub async fn due_deliveries(db: &Reader, query: &DueQuery) -> StoreResult<DueDeliveries> {
    let now = now();
    let due_in = query.due_by.as_millisecond() - now.as_millisecond();
    let excluded = query.excluded_hosts.iter();
    let (owners, hosts): (Vec<&str>, Vec<&str>) =
        excluded.map(|(owner, host)| (&**owner, &**host)).unzip();
    let in_flight: Vec<Uuid> = query.in_flight.iter().map(|id| id.0).collect();
    let params = params! {
        ":due_in": due_in,
        ":max_wait": due_in.max(MAX_RETRY_MS),
        ":owners": owners.clone(),
        ":hosts": hosts.clone(),
        ":in_flight": in_flight,
        ":limit": signed(query.limit as u64),
    };
    let found = db.rows(DUE, params).await?;
    let params = params! {":due_in": due_in, ":owners": owners, ":hosts": hosts};
    let next = db.row(NEXT_DUE_IN, params).await?;
    let next: Option<i64> = next.map_or(Ok(None), |row| rows::get(&row, "due_in"))?;
    Ok(DueDeliveries {
        deliveries: found.iter().map(due_delivery).collect::<StoreResult<_>>()?,
        // A stored time that is out of range is ignored.
        next_due_at: next
            .and_then(|due_in| now.checked_add(SignedDuration::from_millis(due_in)).ok()),
    })
}

/// The newest deliveries of a run, in the order in which they were made.
pub async fn deliveries(db: &Reader, run: RunId) -> StoreResult<Vec<Delivery>> {
    let params = params! {":run": run, ":limit": MAX_LISTED_DELIVERIES as i64};
    let found = db.rows(OF_RUN, params).await?;
    found.iter().rev().map(delivery).collect()
}

fn due_delivery(row: &Row) -> StoreResult<DueDelivery> {
    Ok(DueDelivery {
        id: DeliveryId(rows::get(row, "id")?),
        run: rows::id(row, "run")?,
        owner: rows::required_text(row, "owner")?,
        agent: rows::text(row, "agent")?.unwrap_or_default(),
        url: rows::required_text(row, "url")?,
        host: rows::required_text(row, "host")?,
        secret_env: rows::text(row, "secret_env")?,
        body: rows::required_text(row, "body")?,
        event: rows::required_text(row, "event")?,
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        push: match rows::str(row, "push")? {
            Some(_) => Some(push_configs::target(row)?),
            None => None,
        },
        since: rows::time(row, "since")?.unwrap_or_default(),
        attempt_count: rows::small(row, "tries")?,
    })
}

fn delivery(row: &Row) -> StoreResult<Delivery> {
    let attempts: Vec<&str> = rows::get(row, "attempts")?;
    Ok(Delivery {
        id: DeliveryId(rows::get(row, "id")?),
        event: rows::required_text(row, "event")?,
        url: rows::required_text(row, "url")?,
        status: match rows::str(row, "status")? {
            Some("delivered") => DeliveryStatus::Delivered,
            Some("failed") => DeliveryStatus::Failed,
            _ => DeliveryStatus::Pending,
        },
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        attempts: attempts
            .into_iter()
            .filter_map(|attempt| serde_json::from_str(attempt).ok())
            .collect(),
        next_attempt_at: rows::time(row, "next_at")?,
    })
}
