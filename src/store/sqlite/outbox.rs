//! How webhook deliveries are read from their table. Writing them is the writer's.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::outbox::{
    Delivery, DeliveryStatus, DueDeliveries, DueDelivery, DueQuery, MAX_LISTED_DELIVERIES,
};
use crate::store::sqlite::reader_pool::store_error;
use crate::store::sqlite::rows;

/// The first key and host behind `?1` and `?2` that something is still to be sent of and to.
const NEXT_TARGET: &str = "SELECT owner, host FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND (owner, host) > (?1, ?2) ORDER BY owner, host LIMIT 1";
/// What is due of the key `?1` to the host `?2` by `?3`, but for `?4`; `?5` of it.
const DUE_DELIVERIES: &str = "SELECT next_at, id FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = ?1 AND host = ?2 AND next_at <= ?3 \
     AND lower(hex(id)) NOT IN (SELECT value FROM json_each(?4)) ORDER BY next_at LIMIT ?5";
/// When something is due of the key `?1` to the host `?2` after `?3`.
const NEXT_DUE_AT: &str = "SELECT min(next_at) FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = ?1 AND host = ?2 AND next_at > ?3";

/// Deliveries that are due, longest due first. Steps from key to key and host to host, and looks at no more of each than may be handed
/// out: what waits for a host that hangs would else be read again for every delivery to another.
pub fn due_deliveries(db: &Connection, query: &DueQuery) -> Result<DueDeliveries, StoreError> {
    query_due(db, query).map_err(store_error)
}

fn query_due(db: &Connection, query: &DueQuery) -> rusqlite::Result<DueDeliveries> {
    let due_by = query.due_by.as_millisecond();
    let in_flight: Vec<String> = query
        .in_flight
        .iter()
        .map(|id| id.0.simple().to_string())
        .collect();
    let in_flight = serde_json::to_string(&in_flight).unwrap_or_default();
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let mut next_target = db.prepare_cached(NEXT_TARGET)?;
    let mut due_for_target = db.prepare_cached(DUE_DELIVERIES)?;
    let mut next_due_at = db.prepare_cached(NEXT_DUE_AT)?;
    let mut due = Vec::new();
    // Those of one key, of which no more than `limit` are handed out.
    let mut found: Vec<(i64, [u8; 16])> = Vec::new();
    let mut next = None;
    let mut target = (String::new(), String::new());
    // What has no key and no host, because its address is none, comes first.
    loop {
        if !query.excluded_hosts.contains(&target) {
            let (owner, host) = &target;
            let rows = due_for_target
                .query_map(params![owner, host, due_by, in_flight, limit], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })?;
            for row in rows {
                found.push(row?);
            }
            found.sort_unstable();
            found.truncate(query.limit);
            let target_next = next_due_at.query_row(params![owner, host, due_by], |row| {
                row.get::<_, Option<i64>>(0)
            })?;
            next = next.into_iter().chain(target_next).min();
        }
        let following = next_target
            .query_row(params![target.0, target.1], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()?;
        let is_same_owner = |following: &(String, String)| following.0 == target.0;
        if !following.as_ref().is_some_and(is_same_owner) {
            due.append(&mut found);
        }
        match following {
            Some(following) => target = following,
            None => break,
        }
    }
    due.sort_unstable();
    let mut delivery_sql = db.prepare_cached(
        "SELECT id, run, url, host, secret_env, body, since, tries, owner, \
         (SELECT r.agent FROM runs r WHERE r.id = run) FROM deliveries WHERE id = ?1",
    )?;
    let mut deliveries = Vec::with_capacity(due.len());
    for (_, id) in due {
        // It may have gone with its run since.
        deliveries.extend(delivery_sql.query_row([id], due_row).optional()?);
    }
    let next = next.map(Timestamp::from_millisecond).transpose();
    Ok(DueDeliveries {
        deliveries,
        // A time that is none is looked at when the longest sleep is over.
        next_due_at: next.ok().flatten(),
    })
}

/// The newest deliveries of a run, oldest of them first.
pub fn list(db: &Connection, run: RunId) -> Result<Vec<Delivery>, StoreError> {
    let mut sql = db
        .prepare_cached(
            "SELECT id, event, url, status, created_at, attempts, next_at FROM deliveries \
             WHERE run = ?1 ORDER BY id DESC LIMIT ?2",
        )
        .map_err(store_error)?;
    let mut found: Vec<Delivery> = sql
        .query_map(
            params![rows::id_bytes(&run), MAX_LISTED_DELIVERIES as i64],
            delivery_row,
        )
        .and_then(Iterator::collect)
        .map_err(store_error)?;
    found.reverse();
    Ok(found)
}

fn due_row(row: &Row<'_>) -> rusqlite::Result<DueDelivery> {
    Ok(DueDelivery {
        id: DeliveryId(rows::id(row, 0)?.0),
        run: rows::id(row, 1)?,
        owner: row.get(8)?,
        agent: row.get::<_, Option<String>>(9)?.unwrap_or_default(),
        url: row.get(2)?,
        host: row.get(3)?,
        secret_env: row.get(4)?,
        body: row.get(5)?,
        since: rows::time(row, 6)?.unwrap_or_default(),
        attempt_count: row.get(7)?,
    })
}

fn delivery_row(row: &Row<'_>) -> rusqlite::Result<Delivery> {
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

#[cfg(test)]
mod tests {
    use super::{DUE_DELIVERIES, NEXT_DUE_AT, NEXT_TARGET};
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
                |row| row.get(3),
            )
            .expect("a plan")
        };
        let search = "SEARCH deliveries USING COVERING INDEX deliveries_due";
        assert_eq!(
            plan(NEXT_TARGET, &["", ""]),
            format!("{search} ((owner,host)>(?,?))")
        );
        let due = format!("{search} (owner=? AND host=? AND next_at>? AND next_at<?)");
        assert_eq!(plan(DUE_DELIVERIES, &["", "", "", "[]", "1"]), due);
        assert_eq!(
            plan(NEXT_DUE_AT, &["", "", ""]),
            format!("{search} (owner=? AND host=? AND next_at>?)")
        );
    }
}
