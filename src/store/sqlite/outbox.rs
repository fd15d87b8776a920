//! How webhook deliveries are read from their table. Writing them is the writer's.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::outbox::{Delivery, DeliveryStatus, Due, DueDelivery, DueQuery, MOST_LISTED};
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::rows;

/// The first key and host behind `?1` and `?2` that something is still to be sent of and to.
const HOST: &str = "SELECT owner, host FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND (owner, host) > (?1, ?2) ORDER BY owner, host LIMIT 1";
/// What is due of the key `?1` to the host `?2` by `?3`, but for `?4`; `?5` of it.
const DUE: &str = "SELECT next_at, id FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = ?1 AND host = ?2 AND next_at <= ?3 \
     AND lower(hex(id)) NOT IN (SELECT value FROM json_each(?4)) ORDER BY next_at LIMIT ?5";
/// When something is due of the key `?1` to the host `?2` after `?3`.
const NEXT: &str = "SELECT min(next_at) FROM deliveries INDEXED BY deliveries_due \
     WHERE next_at IS NOT NULL AND owner = ?1 AND host = ?2 AND next_at > ?3";

/// Deliveries that are due, longest due first. Steps from key to key and host to host, and looks at no more of each than may be handed
/// out: what waits for a host that hangs would else be read again for every delivery to another.
pub fn due(db: &Connection, query: &DueQuery) -> Result<Due, StoreError> {
    look(db, query).map_err(failed)
}

fn look(db: &Connection, query: &DueQuery) -> rusqlite::Result<Due> {
    let by = query.by.as_millisecond();
    let not: Vec<String> = query
        .not
        .iter()
        .map(|id| id.0.simple().to_string())
        .collect();
    let not = serde_json::to_string(&not).unwrap_or_default();
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let mut next_host = db.prepare_cached(HOST)?;
    let mut due_to = db.prepare_cached(DUE)?;
    let mut next_to = db.prepare_cached(NEXT)?;
    let mut due = Vec::new();
    // Those of one key, of which no more than `limit` are handed out.
    let mut found: Vec<(i64, [u8; 16])> = Vec::new();
    let mut next = None;
    let mut at = (String::new(), String::new());
    // What has no key and no host, because its address is none, comes first.
    loop {
        if !query.not_to.contains(&at) {
            let (owner, host) = &at;
            let rows = due_to.query_map(params![owner, host, by, not, limit], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
            for row in rows {
                found.push(row?);
            }
            found.sort_unstable();
            found.truncate(query.limit);
            let then =
                next_to.query_row(params![owner, host, by], |row| row.get::<_, Option<i64>>(0))?;
            next = next.into_iter().chain(then).min();
        }
        let behind = next_host
            .query_row(params![at.0, at.1], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let is_same_key = |behind: &(String, String)| behind.0 == at.0;
        if !behind.as_ref().is_some_and(is_same_key) {
            due.append(&mut found);
        }
        match behind {
            Some(behind) => at = behind,
            None => break,
        }
    }
    due.sort_unstable();
    let mut row_of = db.prepare_cached(
        "SELECT id, run, url, host, secret_env, body, since, tries, owner, \
         (SELECT r.agent FROM runs r WHERE r.id = run) FROM deliveries WHERE id = ?1",
    )?;
    let mut deliveries = Vec::with_capacity(due.len());
    for (_, id) in due {
        // It may have gone with its run since.
        deliveries.extend(row_of.query_row([id], due_row).optional()?);
    }
    let next = next.map(Timestamp::from_millisecond).transpose();
    Ok(Due {
        deliveries,
        // A time that is none is looked at when the longest sleep is over.
        next: next.ok().flatten(),
    })
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
        owner: row.get(8)?,
        agent: row.get::<_, Option<String>>(9)?.unwrap_or_default(),
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

#[cfg(test)]
mod tests {
    use super::{DUE, HOST, NEXT};
    use crate::config::Durability;
    use crate::store::sqlite::schema;

    #[test]
    fn what_waits_for_a_host_costs_the_others_nothing() {
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
        let along = "SEARCH deliveries USING COVERING INDEX deliveries_due";
        assert_eq!(
            plan(HOST, &["", ""]),
            format!("{along} ((owner,host)>(?,?))")
        );
        let due = format!("{along} (owner=? AND host=? AND next_at>? AND next_at<?)");
        assert_eq!(plan(DUE, &["", "", "", "[]", "1"]), due);
        assert_eq!(
            plan(NEXT, &["", "", ""]),
            format!("{along} (owner=? AND host=? AND next_at>?)")
        );
    }
}
