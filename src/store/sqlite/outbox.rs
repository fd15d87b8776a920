//! How webhook deliveries are read from their table. Writing them is the writer's.

use rusqlite::{Connection, Row, params};

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::outbox::{Delivery, DeliveryStatus, Due, DueDelivery, DueQuery, MOST_LISTED};
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::rows;

/// Deliveries that are due, longest due first.
pub fn due(db: &Connection, query: &DueQuery) -> Result<Due, StoreError> {
    let by = query.by.as_millisecond();
    let not: Vec<String> = query
        .not
        .iter()
        .map(|id| id.0.simple().to_string())
        .collect();
    let list = |texts: &[String]| serde_json::to_string(texts).unwrap_or_default();
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let mut sql = db
        .prepare_cached(
            "SELECT id, run, url, host, secret_env, body, since, tries, \
             (SELECT r.agent FROM runs r WHERE r.id = run) FROM deliveries \
             WHERE next_at <= ?1 AND lower(hex(id)) NOT IN (SELECT value FROM json_each(?2)) \
             AND host NOT IN (SELECT value FROM json_each(?3)) ORDER BY next_at, id LIMIT ?4",
        )
        .map_err(failed)?;
    let deliveries = sql
        .query_map(params![by, list(&not), list(&query.not_to), limit], due_row)
        .and_then(Iterator::collect)
        .map_err(failed)?;
    let next = db
        .prepare_cached("SELECT min(next_at) FROM deliveries WHERE next_at > ?1")
        .and_then(|mut sql| sql.query_row([by], |row| rows::time(row, 0)))
        .map_err(failed)?;
    Ok(Due { deliveries, next })
}

/// The newest deliveries of a run, oldest of them first.
pub fn of_run(db: &Connection, run: RunId) -> Result<Vec<Delivery>, StoreError> {
    let mut sql = db
        .prepare_cached(
            "SELECT id, event, url, status, created_at, attempts, next_at FROM deliveries \
             WHERE run = ?1 ORDER BY id DESC LIMIT ?2",
        )
        .map_err(failed)?;
    let mut found: Vec<Delivery> = sql
        .query_map(params![rows::bytes(&run), MOST_LISTED as i64], listed_row)
        .and_then(Iterator::collect)
        .map_err(failed)?;
    found.reverse();
    Ok(found)
}

fn due_row(row: &Row<'_>) -> rusqlite::Result<DueDelivery> {
    Ok(DueDelivery {
        id: DeliveryId(rows::id(row, 0)?.0),
        run: rows::id(row, 1)?,
        agent: row.get::<_, Option<String>>(8)?.unwrap_or_default(),
        url: row.get(2)?,
        host: row.get(3)?,
        secret_env: row.get(4)?,
        body: row.get(5)?,
        since: rows::time(row, 6)?.unwrap_or_default(),
        tries: row.get(7)?,
    })
}

fn listed_row(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    let status: String = row.get(3)?;
    let attempts: String = row.get(5)?;
    Ok(Delivery {
        id: DeliveryId(rows::id(row, 0)?.0),
        event: row.get(1)?,
        url: row.get(2)?,
        status: match status.as_str() {
            "delivered" => DeliveryStatus::Delivered,
            "failed" => DeliveryStatus::Failed,
            _ => DeliveryStatus::Pending,
        },
        created_at: rows::time(row, 4)?.unwrap_or_default(),
        attempts: serde_json::from_str(&attempts).unwrap_or_default(),
        next_attempt_at: rows::time(row, 6)?,
    })
}
