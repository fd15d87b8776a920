//! Reads and writes the table of webhook deliveries.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, named_params};

use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::due_walk::{BLOCK_ROWS, DueIds, DueWalk, MAX_WAIT_MS, NextRead, Pending, Target};
use crate::store::encoding::clock_skew::MAX_RETRY_MS;
use crate::store::encoding::integers::signed;
use crate::store::outbox::{
    AttemptOutcome, AttemptRecord, Delivery, DeliveryStatus, DueDeliveries, DueDelivery, DueQuery,
    MAX_LISTED_DELIVERIES, MAX_STORED_ATTEMPTS,
};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::push_configs;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::{NewDelivery, StoreError};

/// The first pending deliveries by owner, host and time.
const FIRST_PENDING: &str = "SELECT owner, host, next_at, id FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL ORDER BY owner, host, next_at LIMIT :rows";
/// Those behind an owner and a host.
const NEXT_PENDING: &str = "SELECT owner, host, next_at, id FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND (owner, host) > (:owner, :host) ORDER BY owner, host, next_at LIMIT :rows";
/// The deliveries of one owner to one host with times in a range, without those in flight.
const DUE_DELIVERIES: &str = "SELECT next_at, id FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = :owner AND host = :host AND next_at > :after AND next_at <= :until \
     AND lower(hex(id)) NOT IN (SELECT value FROM json_each(:in_flight)) ORDER BY next_at LIMIT :limit";
/// When the next delivery of one owner to one host is due.
const NEXT_DUE_AT: &str = "SELECT min(next_at) AS next_at FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = :owner AND host = :host AND next_at > :due_by";

/// Pending deliveries whose time is further ahead than their own wait, with its jitter.
const FAR_AHEAD: &str = "SELECT next_at, id FROM deliveries INDEXED BY deliveries_due WHERE next_at IS NOT NULL AND next_at > :now + 1000 \
     + CASE tries WHEN 0 THEN 0 ELSE min(:first << min(tries - 1, 20), :max) * 6 / 5 END LIMIT :rows";

/// Deliveries that are due, longest due first, and those whose time is further ahead than any wait, because the clock was set
/// back.
pub fn due_deliveries(db: &Connection, query: &DueQuery) -> Result<DueDeliveries, StoreError> {
    query_due(db, query).map_err(store_error)
}

fn query_due(db: &Connection, query: &DueQuery) -> rusqlite::Result<DueDeliveries> {
    let due_by = query.due_by.as_millisecond();
    let latest = due_by.max(now().as_millisecond() + MAX_RETRY_MS);
    let mut walk = DueWalk::new(query, due_by, latest);
    let mut block = first_pending(db)?;
    loop {
        let after = match walk.add_block(&block) {
            NextRead::Nothing => break,
            NextRead::BlockAfter(target) => target,
            NextRead::Backlog(target) => {
                let (due, next_at) = due_of_target(db, query, &target, due_by, latest)?;
                walk.add_backlog(&target, due, next_at);
                target
            }
        };
        block = next_pending(db, &after)?;
    }
    if let Some(first_retry) = query.first_retry {
        let mut sql = db.prepare_cached(FAR_AHEAD)?;
        let rows = sql.query_map(
            named_params! {
                ":now": now().as_millisecond(),
                ":first": signed(first_retry.as_millis() as u64),
                ":max": MAX_WAIT_MS,
                ":rows": BLOCK_ROWS as i64,
            },
            |row| Ok((row.get("next_at")?, DeliveryId(rows::id(row, "id")?.0))),
        )?;
        walk.add_far_ahead(rows.collect::<Result<_, _>>()?);
    }
    let (due, next_at) = walk.finish();
    let next_at = next_at.map(Timestamp::from_millisecond).transpose();
    Ok(DueDeliveries {
        deliveries: read_due(db, &due)?,
        // A stored time that is out of range is ignored.
        next_due_at: next_at.ok().flatten(),
    })
}

fn first_pending(db: &Connection) -> rusqlite::Result<Vec<Pending>> {
    let mut sql = db.prepare_cached(FIRST_PENDING)?;
    let rows = sql.query_map(named_params! {":rows": BLOCK_ROWS as i64}, pending_row)?;
    rows.collect()
}

fn next_pending(db: &Connection, (owner, host): &Target) -> rusqlite::Result<Vec<Pending>> {
    let mut sql = db.prepare_cached(NEXT_PENDING)?;
    let rows = sql.query_map(
        named_params! {":owner": owner, ":host": host, ":rows": BLOCK_ROWS as i64},
        pending_row,
    )?;
    rows.collect()
}

fn pending_row(row: &Row<'_>) -> rusqlite::Result<Pending> {
    Ok(Pending {
        target: (row.get("owner")?, row.get("host")?),
        next_at: row.get("next_at")?,
        id: DeliveryId(rows::id(row, "id")?.0),
    })
}

/// The first due deliveries of an owner to a host, and when the next of the others is due.
fn due_of_target(
    db: &Connection,
    query: &DueQuery,
    (owner, host): &Target,
    due_by: i64,
    latest: i64,
) -> rusqlite::Result<(DueIds, Option<i64>)> {
    let in_flight = query.in_flight.iter();
    let in_flight: Vec<String> = in_flight.map(|id| id.0.simple().to_string()).collect();
    let in_flight = serde_json::to_string(&in_flight).unwrap_or_default();
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let next_at = db.prepare_cached(NEXT_DUE_AT)?.query_row(
        named_params! {":owner": owner, ":host": host, ":due_by": due_by},
        |row| row.get::<_, Option<i64>>("next_at"),
    )?;
    // Without a later one, none is far ahead.
    let far_ahead = next_at.map(|_| (latest, i64::MAX));
    let mut sql = db.prepare_cached(DUE_DELIVERIES)?;
    let mut due = Vec::new();
    for (after, until) in [(i64::MIN, due_by)].into_iter().chain(far_ahead) {
        let rows = sql.query_map(
            named_params! {
                ":owner": owner,
                ":host": host,
                ":after": after,
                ":until": until,
                ":in_flight": in_flight,
                ":limit": limit,
            },
            |row| Ok((row.get("next_at")?, DeliveryId(rows::id(row, "id")?.0))),
        )?;
        for row in rows {
            due.push(row?);
        }
    }
    Ok((due, next_at))
}

/// Reads deliveries by their ids, which are behind the times at which they are due.
fn read_due(db: &Connection, due: &[(i64, DeliveryId)]) -> rusqlite::Result<Vec<DueDelivery>> {
    let mut sql = db.prepare_cached(
        "SELECT d.id AS id, d.run AS run, d.url AS url, host, secret_env, body, event, created_at, since, tries, owner, push, \
         context, token, scheme, credentials, (SELECT r.agent FROM runs r WHERE r.id = d.run) AS agent \
         FROM deliveries d LEFT JOIN push_configs c ON c.run = d.run AND c.id = d.push \
         WHERE d.id = :id AND (d.push IS NULL OR c.id IS NOT NULL)",
    )?;
    let mut deliveries = Vec::with_capacity(due.len());
    for (_, id) in due {
        // The delivery may have been deleted with its run.
        let found = sql.query_row(named_params! {":id": id.0.as_bytes()}, due_row);
        deliveries.extend(found.optional()?);
    }
    Ok(deliveries)
}

/// The newest deliveries of a run, in the order in which they were made.
pub fn list(db: &Connection, run: RunId) -> Result<Vec<Delivery>, StoreError> {
    let mut sql = db
        .prepare_cached(
            "SELECT id, event, url, status, created_at, attempts, next_at FROM deliveries \
             WHERE run = :run ORDER BY id DESC LIMIT :limit",
        )
        .map_err(store_error)?;
    let mut found: Vec<Delivery> = sql
        .query_map(
            named_params! {":run": rows::id_bytes(&run), ":limit": MAX_LISTED_DELIVERIES as i64},
            delivery_row,
        )
        .and_then(Iterator::collect)
        .map_err(store_error)?;
    found.reverse();
    Ok(found)
}

fn due_row(row: &Row<'_>) -> rusqlite::Result<DueDelivery> {
    Ok(DueDelivery {
        id: DeliveryId(rows::id(row, "id")?.0),
        run: rows::id(row, "run")?,
        owner: row.get("owner")?,
        agent: row.get::<_, Option<String>>("agent")?.unwrap_or_default(),
        url: row.get("url")?,
        host: row.get("host")?,
        secret_env: row.get("secret_env")?,
        body: row.get("body")?,
        event: row.get("event")?,
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        push: match row.get::<_, Option<String>>("push")? {
            Some(_) => Some(push_configs::target(row)?),
            None => None,
        },
        since: rows::time(row, "since")?.unwrap_or_default(),
        attempt_count: row.get("tries")?,
    })
}

fn delivery_row(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    let status: String = row.get("status")?;
    let attempts: String = row.get("attempts")?;
    Ok(Delivery {
        id: DeliveryId(rows::id(row, "id")?.0),
        event: row.get("event")?,
        url: row.get("url")?,
        status: match status.as_str() {
            "delivered" => DeliveryStatus::Delivered,
            "failed" => DeliveryStatus::Failed,
            _ => DeliveryStatus::Pending,
        },
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        attempts: serde_json::from_str(&attempts).unwrap_or_default(),
        next_attempt_at: rows::time(row, "next_at")?,
    })
}

pub fn insert(
    sql: &mut Statements<'_>,
    run: RunId,
    delivery: &NewDelivery,
) -> rusqlite::Result<usize> {
    let webhook = &delivery.webhook;
    let url = ssrf::parse_url(&webhook.url).ok();
    let host = url.as_ref().and_then(|url| url.host_str());
    sql.insert_delivery.execute(named_params! {
        ":id": delivery.id.0.as_bytes(),
        ":run": rows::id_bytes(&run),
        ":event": delivery.event,
        ":host": ssrf::normalize_host(host.unwrap_or_default()),
        ":url": webhook.url,
        ":secret_env": webhook.secret_env,
        ":body": delivery.body,
        ":created_at": delivery.created_at.as_millisecond(),
    })
}

pub fn record_attempt(sql: &mut Statements<'_>, record: &AttemptRecord) -> rusqlite::Result<usize> {
    let (status, next_at) = match record.outcome {
        AttemptOutcome::Delivered => ("delivered", None),
        AttemptOutcome::RetryIn(delay) => ("pending", Some((now() + delay).as_millisecond())),
        AttemptOutcome::GivenUp => ("failed", None),
    };
    sql.record_attempt.execute(named_params! {
        ":id": record.id.0.as_bytes(),
        ":status": status,
        ":next_at": next_at,
        ":attempt": serde_json::to_string(&record.attempt).unwrap_or_default(),
        ":max_attempts": MAX_STORED_ATTEMPTS as i64,
        ":since": record.since.as_millisecond(),
    })
}

/// Returns 0 if the run has no such delivery.
pub fn resend(sql: &mut Statements<'_>, run: RunId, id: DeliveryId) -> rusqlite::Result<usize> {
    sql.resend_delivery.execute(named_params! {
        ":id": id.0.as_bytes(),
        ":run": rows::id_bytes(&run),
        ":now": now().as_millisecond(),
    })
}

#[cfg(test)]
mod tests {
    use super::{DUE_DELIVERIES, FIRST_PENDING, NEXT_DUE_AT, NEXT_PENDING};
    use crate::config::Durability;
    use crate::store::sqlite::schema;

    #[test]
    fn due_deliveries_are_found_by_index_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        let plan = |sql: &str, values: &[&str]| -> String {
            db.query_row(
                &format!("EXPLAIN QUERY PLAN {sql}"),
                rusqlite::params_from_iter(values),
                |row| row.get("detail"),
            )
            .expect("a plan")
        };
        let search = "SEARCH deliveries USING COVERING INDEX deliveries_due";
        assert_eq!(
            plan(FIRST_PENDING, &["1"]),
            "SCAN deliveries USING COVERING INDEX deliveries_due"
        );
        assert_eq!(
            plan(NEXT_PENDING, &["", "", "1"]),
            format!("{search} ((owner,host)>(?,?))")
        );
        let due = format!("{search} (owner=? AND host=? AND next_at>? AND next_at<?)");
        assert_eq!(plan(DUE_DELIVERIES, &["", "", "", "", "[]", "1"]), due);
        assert_eq!(
            plan(NEXT_DUE_AT, &["", "", ""]),
            format!("{search} (owner=? AND host=? AND next_at>?)")
        );
    }
}
