//! Reads webhook deliveries.

use jiff::SignedDuration;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::store::due_walk::{BLOCK_ROWS, DueIds, DueWalk, MAX_WAIT_MS, NextRead, Pending, Target};
use crate::store::encoding::clock_skew::MAX_RETRY_MS;
use crate::store::encoding::integers::signed;
use crate::store::outbox::{
    Delivery, DeliveryStatus, DueDeliveries, DueDelivery, DueQuery, MAX_LISTED_DELIVERIES,
};
use crate::store::postgres::push_configs;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::{clock, params};

/// The first pending deliveries by owner, host and time, and in how many milliseconds they are due.
macro_rules! pending {
    ($($condition:literal)?) => {
        concat!(
            "SELECT owner, host, id, next_at - ",
            clock!(),
            " AS due_in FROM deliveries WHERE next_at IS NOT NULL",
            $($condition,)?
            " ORDER BY owner, host, next_at, id LIMIT :rows"
        )
    };
}

/// The first deliveries of an owner to a host, without those in flight, whose times are as a condition says.
macro_rules! of_target {
    ($($condition:expr),+) => {
        concat!(
            "(SELECT id, next_at FROM deliveries WHERE next_at IS NOT NULL AND owner = :owner AND host = :host AND next_at ",
            $($condition,)+
            " AND id <> ALL(:in_flight::uuid[]) ORDER BY next_at LIMIT :limit)"
        )
    };
}

const FIRST_PENDING: &str = pending!();
/// Those behind an owner and a host.
const NEXT_PENDING: &str = pending!(" AND (owner, host) > (:owner, :host)");
/// The deliveries of one owner to one host that are due in so many milliseconds, and those whose time is further ahead than any wait.
const DUE_OF_TARGET: &str = concat!(
    "SELECT id, next_at - ",
    clock!(),
    " AS due_in FROM (",
    of_target!("<= ", clock!(), " + :due_in::bigint"),
    " UNION ALL ",
    of_target!("> ", clock!(), " + :max_wait::bigint"),
    ") due"
);
/// In how many milliseconds the first of the others is due.
const NEXT_OF_TARGET: &str = concat!(
    "SELECT next_at - ",
    clock!(),
    " AS due_in FROM deliveries WHERE next_at IS NOT NULL AND owner = :owner AND host = :host AND next_at > ",
    clock!(),
    " + :due_in::bigint ORDER BY next_at LIMIT 1"
);
/// Pending deliveries whose time is further ahead than their own wait, with its jitter.
const FAR_AHEAD: &str = concat!(
    "SELECT id, next_at - ",
    clock!(),
    " AS due_in FROM deliveries WHERE next_at IS NOT NULL AND next_at > ",
    clock!(),
    " + 1000 + CASE tries WHEN 0 THEN 0 ELSE \
     least(:first::bigint << least(tries - 1, 20)::int, :max::bigint) * 6 / 5 END LIMIT :rows"
);
const DUE: &str = "SELECT d.id, d.run, d.url, d.host, d.secret_env, d.body, d.event, d.created_at, d.since, d.tries, d.owner, d.push, \
     c.context, c.token, c.scheme, c.credentials, r.agent \
     FROM unnest(:ids::uuid[]) WITH ORDINALITY AS found (id, position) JOIN deliveries d ON d.id = found.id \
     LEFT JOIN push_configs c ON c.run = d.run AND c.id = d.push LEFT JOIN runs r ON r.id = d.run \
     WHERE d.push IS NULL OR c.id IS NOT NULL ORDER BY found.position";
const OF_RUN: &str = "SELECT id, event, url, status, created_at, attempts, next_at FROM deliveries \
     WHERE run = :run ORDER BY id DESC LIMIT :limit";

/// Deliveries that are due, longest due first, and those whose time is further ahead than any wait, because the clock was set
/// back. To be read from a snapshot: the times are in milliseconds from its beginning.
pub async fn due_deliveries(db: &Reader, query: &DueQuery) -> StoreResult<DueDeliveries> {
    let now = now();
    let due_in = query.due_by.as_millisecond() - now.as_millisecond();
    let max_wait = due_in.max(MAX_RETRY_MS);
    let mut walk = DueWalk::new(query, due_in, max_wait);
    let mut found = db
        .rows(FIRST_PENDING, params! {":rows": BLOCK_ROWS as i64})
        .await?;
    loop {
        let block: Vec<Pending> = found.iter().map(pending).collect::<StoreResult<_>>()?;
        let after = match walk.add_block(&block) {
            NextRead::Nothing => break,
            NextRead::BlockAfter(target) => target,
            NextRead::Backlog(target) => {
                let (due, next) = due_of_target(db, query, &target, due_in, max_wait).await?;
                walk.add_backlog(&target, due, next);
                target
            }
        };
        let (owner, host) = &after;
        let params = params! {":owner": owner, ":host": host, ":rows": BLOCK_ROWS as i64};
        found = db.rows(NEXT_PENDING, params).await?;
    }
    if let Some(first_retry) = query.first_retry {
        let params = params! {
            ":first": signed(first_retry.as_millis() as u64),
            ":max": MAX_WAIT_MS,
            ":rows": BLOCK_ROWS as i64,
        };
        walk.add_far_ahead(due_ids(&db.rows(FAR_AHEAD, params).await?)?);
    }
    let (due, next) = walk.finish();
    Ok(DueDeliveries {
        deliveries: read_due(db, &due).await?,
        // A stored time that is out of range is ignored.
        next_due_at: next
            .and_then(|due_in| now.checked_add(SignedDuration::from_millis(due_in)).ok()),
    })
}

/// The first due deliveries of an owner to a host, and in how many milliseconds the next of the others is due.
async fn due_of_target(
    db: &Reader,
    query: &DueQuery,
    (owner, host): &Target,
    due_in: i64,
    max_wait: i64,
) -> StoreResult<(DueIds, Option<i64>)> {
    let in_flight: Vec<Uuid> = query.in_flight.iter().map(|id| id.0).collect();
    let params = params! {
        ":owner": owner,
        ":host": host,
        ":due_in": due_in,
        ":max_wait": max_wait,
        ":in_flight": in_flight,
        ":limit": signed(query.limit as u64),
    };
    let found = db.rows(DUE_OF_TARGET, params).await?;
    let params = params! {":owner": owner, ":host": host, ":due_in": due_in};
    let next = db.row(NEXT_OF_TARGET, params).await?;
    let next: Option<i64> = next.map_or(Ok(None), |row| rows::get(&row, "due_in"))?;
    Ok((due_ids(&found)?, next))
}

fn due_ids(found: &[Row]) -> StoreResult<DueIds> {
    let due = |row| Ok((rows::get(row, "due_in")?, DeliveryId(rows::get(row, "id")?)));
    found.iter().map(due).collect()
}

async fn read_due(db: &Reader, due: &[(i64, DeliveryId)]) -> StoreResult<Vec<DueDelivery>> {
    if due.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = due.iter().map(|(_, id)| id.0).collect();
    let found = db.rows(DUE, params! {":ids": ids}).await?;
    found.iter().map(due_delivery).collect()
}

/// The newest deliveries of a run, in the order in which they were made.
pub async fn deliveries(db: &Reader, run: RunId) -> StoreResult<Vec<Delivery>> {
    let params = params! {":run": run, ":limit": MAX_LISTED_DELIVERIES as i64};
    let found = db.rows(OF_RUN, params).await?;
    found.iter().rev().map(delivery).collect()
}

fn pending(row: &Row) -> StoreResult<Pending> {
    Ok(Pending {
        target: (
            rows::required_text(row, "owner")?,
            rows::required_text(row, "host")?,
        ),
        next_at: rows::get(row, "due_in")?,
        id: DeliveryId(rows::get(row, "id")?),
    })
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
