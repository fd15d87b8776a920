//! Records webhook deliveries, and finds those that are due.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::SignedDuration;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::store::changes::Changes;
use crate::store::due_walk::{BLOCK_ROWS, DueIds, DueWalk, MAX_WAIT_MS, NextRead, Pending, Target};
use crate::store::encoding::clock_skew::MAX_RETRY_MS;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::outbox::{
    AttemptOutcome, AttemptRecord, Delivery, DeliveryStatus, DueDeliveries, DueDelivery, DueQuery,
    MAX_LISTED_DELIVERIES, MAX_STORED_ATTEMPTS, Outbox,
};
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::clock::clock;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{params, values};
use crate::store::{StoreError, push_configs};

const OF_RUN: &str = "SELECT id, event, url, status, created_at, next_at, \
     {attempts|'[' || array_to_string(attempts, ',') || ']'} AS attempts FROM deliveries \
     WHERE run = :run ORDER BY id DESC LIMIT :limit";
/// Adds an attempt, unless it is there: the commit may have succeeded although its answer was lost. The delivery stays due if it was
/// resent since the attempt began, and as it is if another attempt ended it, unless this one delivered.
const RECORD_ATTEMPT: &str = concat!(
    "UPDATE deliveries SET \
     status = CASE WHEN since = :since AND (status = 'pending' OR :status = 'delivered') THEN :status ELSE status END, \
     next_at = CASE WHEN since = :since AND (status = 'pending' OR :status = 'delivered') THEN ",
    clock!(),
    " + :due_in ELSE next_at END, \
     tries = CASE WHEN since = :since THEN tries + 1 ELSE tries END, \
     attempts = {json_insert(CASE WHEN json_array_length(attempts) < :max_attempts THEN attempts \
     ELSE json_remove(attempts, '$[0]') END, '$[#]', json(:attempt))\
     |(attempts || :attempt::text)[greatest(1, cardinality(attempts) + 2 - :max_attempts::bigint):]} \
     WHERE id = :id AND {instr(attempts, :attempt) = 0|:attempt::text <> ALL (attempts)}"
);
const RESEND: &str = concat!(
    "UPDATE deliveries SET status = 'pending', next_at = ",
    clock!(),
    ", since = :now, tries = 0 WHERE id = :id AND run = :run"
);

/// Pending deliveries.
macro_rules! pending {
    () => {
        "FROM deliveries {INDEXED BY deliveries_due|} WHERE next_at IS NOT NULL"
    };
}

/// The first pending deliveries by owner, host and time, and in how many milliseconds they are due.
macro_rules! block {
    ($condition:literal) => {
        concat!(
            "SELECT owner, host, id, next_at - ",
            clock!(),
            " AS due_in ",
            pending!(),
            $condition,
            " ORDER BY owner, host, next_at, id LIMIT :rows"
        )
    };
}

/// The first deliveries of an owner to a host, without those in flight, whose times are as a condition says.
macro_rules! of_target {
    ($($condition:expr),+) => {
        concat!(
            "SELECT * FROM (SELECT id, next_at ",
            pending!(),
            " AND owner = :owner AND host = :host AND next_at ",
            $($condition,)+
            " AND {lower(hex(id)) NOT IN (SELECT value FROM json_each(:in_flight))|id <> ALL(:in_flight::uuid[])} \
             ORDER BY next_at LIMIT :limit) "
        )
    };
}

const COUNT_PENDING: &str = concat!(
    "SELECT count(*) AS pending FROM (SELECT id ",
    pending!(),
    " LIMIT :max) counted"
);
const FIRST_PENDING: &str = block!("");
/// Those behind an owner and a host.
const NEXT_PENDING: &str = block!(" AND (owner, host) > (:owner, :host)");
/// The deliveries of one owner to one host that are due in so many milliseconds, and those whose time is further ahead than any wait.
const DUE_OF_TARGET: &str = concat!(
    "SELECT id, next_at - ",
    clock!(),
    " AS due_in FROM (",
    of_target!("<= ", clock!(), " + :due_in::bigint"),
    "a UNION ALL ",
    of_target!("> ", clock!(), " + :max_wait::bigint"),
    "b) due"
);
/// In how many milliseconds the first of the others is due.
const NEXT_OF_TARGET: &str = concat!(
    "SELECT next_at - ",
    clock!(),
    " AS due_in ",
    pending!(),
    " AND owner = :owner AND host = :host AND next_at > ",
    clock!(),
    " + :due_in::bigint ORDER BY next_at LIMIT 1"
);
/// Pending deliveries whose time is further ahead than their own wait, with its jitter.
const FAR_AHEAD: &str = concat!(
    "SELECT id, next_at - ",
    clock!(),
    " AS due_in ",
    pending!(),
    " AND next_at > ",
    clock!(),
    " + 1000 + CASE tries WHEN 0 THEN 0 ELSE \
     {min|least}(:first::bigint << {min|least}(tries - 1, 20)::int, :max::bigint) * 6 / 5 END LIMIT :rows"
);
const DUE: &str = "SELECT d.id, d.run, d.url, d.host, d.secret_env, d.body, d.event, d.created_at, d.since, d.tries, d.owner, d.push, \
     c.context, c.token, c.scheme, c.credentials, r.agent \
     FROM {json_each(:ids) AS found CROSS JOIN deliveries d ON d.id = unhex(found.value)\
     |unnest(:ids::uuid[]) WITH ORDINALITY AS found (id, key) JOIN deliveries d ON d.id = found.id} \
     LEFT JOIN push_configs c ON c.run = d.run AND c.id = d.push LEFT JOIN runs r ON r.id = d.run \
     WHERE d.push IS NULL OR c.id IS NOT NULL ORDER BY found.key";

impl<E: Engine> Outbox for E {
    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
        self.read(ReadMode::Snapshot, move |db| {
            Box::pin(async move { due_deliveries(db, &query).await })
        })
    }

    fn record_attempt(&self, record: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
        let (status, due_in) = match record.outcome {
            AttemptOutcome::Delivered => ("delivered", None),
            AttemptOutcome::RetryIn(delay) => ("pending", Some(signed(delay.as_millis() as u64))),
            AttemptOutcome::GivenUp => ("failed", None),
        };
        let attempt = values! {
            ":id": record.id.0,
            ":status": status,
            ":due_in": due_in,
            ":attempt": serde_json::to_string(&record.attempt).unwrap_or_default(),
            ":max_attempts": signed(MAX_STORED_ATTEMPTS as u64),
            ":since": record.since.as_millisecond(),
            ":now": now().as_millisecond(),
        };
        self.apply(Changes::one(RECORD_ATTEMPT, attempt))
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":run": run, ":limit": MAX_LISTED_DELIVERIES as i64};
                let mut newest_first = db.query(OF_RUN, params, delivery).await?;
                newest_first.reverse();
                Ok(newest_first)
            })
        })
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        let of_delivery = values! {":id": id.0, ":run": run, ":now": now().as_millisecond()};
        self.changes_row(Changes::one(RESEND, of_delivery).with_deliveries(), 0)
    }

    fn count_pending(&self, max: usize) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":max": signed(max as u64)};
                let count = db.first(COUNT_PENDING, params, |row| row.get("pending"));
                Ok(count.await?.unwrap_or_default())
            })
        })
    }

    fn delivery_notify(&self) -> Arc<Notify> {
        self.queue().delivery_notify()
    }
}

fn delivery(row: &Row<'_>) -> StoreResult<Delivery> {
    Ok(Delivery {
        id: DeliveryId(row.get("id")?),
        event: row.get("event")?,
        url: row.get("url")?,
        status: match row.get("status")? {
            "delivered" => DeliveryStatus::Delivered,
            "failed" => DeliveryStatus::Failed,
            _ => DeliveryStatus::Pending,
        },
        created_at: row.get("created_at")?,
        attempts: serde_json::from_str(row.get("attempts")?).unwrap_or_default(),
        next_attempt_at: row.get("next_at")?,
    })
}

/// Deliveries that are due, longest due first, and those whose time is further ahead than any wait, because the clock was set
/// back. To be read from a snapshot: the times are in milliseconds from its beginning.
async fn due_deliveries(db: &Reader, query: &DueQuery) -> StoreResult<DueDeliveries> {
    let time = now();
    let now = time.as_millisecond();
    let due_in = query.due_by.as_millisecond() - now;
    let max_wait = due_in.max(MAX_RETRY_MS);
    let mut walk = DueWalk::new(query, due_in, max_wait);
    let first = params! {":rows": BLOCK_ROWS as i64, ":now": now};
    let mut block = db.query(FIRST_PENDING, first, pending).await?;
    loop {
        let after = match walk.add_block(&block) {
            NextRead::Nothing => break,
            NextRead::BlockAfter(target) => target,
            NextRead::Backlog(target) => {
                let (due, next) =
                    due_of_target(db, query, &target, (now, due_in, max_wait)).await?;
                walk.add_backlog(&target, due, next);
                target
            }
        };
        let (owner, host) = &after;
        let params =
            params! {":owner": owner, ":host": host, ":rows": BLOCK_ROWS as i64, ":now": now};
        block = db.query(NEXT_PENDING, params, pending).await?;
    }
    if let Some(first_retry) = query.first_retry {
        let params = params! {
            ":first": signed(first_retry.as_millis() as u64),
            ":max": MAX_WAIT_MS,
            ":rows": BLOCK_ROWS as i64,
            ":now": now,
        };
        walk.add_far_ahead(db.query(FAR_AHEAD, params, due_id).await?);
    }
    let (due, next) = walk.finish();
    let next = next.map(SignedDuration::from_millis);
    Ok(DueDeliveries {
        deliveries: read_due(db, &due).await?,
        // A stored time that is out of range is ignored.
        next_due_at: next.and_then(|due_in| time.checked_add(due_in).ok()),
    })
}

/// The first due deliveries of an owner to a host, and in how many milliseconds the next of the others is due.
async fn due_of_target(
    db: &Reader,
    query: &DueQuery,
    (owner, host): &Target,
    (now, due_in, max_wait): (i64, i64, i64),
) -> StoreResult<(DueIds, Option<i64>)> {
    let in_flight: Vec<Uuid> = query.in_flight.iter().map(|id| id.0).collect();
    let params = params! {
        ":owner": owner,
        ":host": host,
        ":now": now,
        ":due_in": due_in,
        ":max_wait": max_wait,
        ":in_flight": in_flight,
        ":limit": signed(query.limit as u64),
    };
    let due = db.query(DUE_OF_TARGET, params, due_id).await?;
    let params = params! {":owner": owner, ":host": host, ":now": now, ":due_in": due_in};
    let next = db.first(NEXT_OF_TARGET, params, |row| row.get("due_in"));
    Ok((due, next.await?))
}

fn due_id(row: &Row<'_>) -> StoreResult<(i64, DeliveryId)> {
    Ok((row.get("due_in")?, DeliveryId(row.get("id")?)))
}

fn pending(row: &Row<'_>) -> StoreResult<Pending> {
    Ok(Pending {
        target: (row.get("owner")?, row.get("host")?),
        next_at: row.get("due_in")?,
        id: DeliveryId(row.get("id")?),
    })
}

/// Reads deliveries by their ids. One may have been deleted with its run.
async fn read_due(db: &Reader, due: &[(i64, DeliveryId)]) -> StoreResult<Vec<DueDelivery>> {
    if due.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = due.iter().map(|(_, id)| id.0).collect();
    db.query(DUE, params! {":ids": ids}, due_delivery).await
}

fn due_delivery(row: &Row<'_>) -> StoreResult<DueDelivery> {
    let push: Option<&str> = row.get("push")?;
    Ok(DueDelivery {
        id: DeliveryId(row.get("id")?),
        run: row.get("run")?,
        owner: row.get("owner")?,
        agent: row.get::<Option<String>>("agent")?.unwrap_or_default(),
        url: row.get("url")?,
        host: row.get("host")?,
        secret_env: row.get("secret_env")?,
        body: row.get("body")?,
        event: row.get("event")?,
        created_at: row.get("created_at")?,
        push: push.map(|_| push_configs::target(row)).transpose()?,
        since: row.get("since")?,
        attempt_count: row.get("tries")?,
    })
}

#[cfg(test)]
mod tests {
    use super::{FAR_AHEAD, FIRST_PENDING, NEXT_OF_TARGET, NEXT_PENDING};
    use crate::config::Durability;
    use crate::store::sql::dialect::Dialect;
    use crate::store::sqlite::schema;

    #[test]
    fn due_deliveries_are_found_by_index_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        let plan = |sql: &str| -> String {
            let explain = format!("EXPLAIN QUERY PLAN {}", Dialect::Sqlite.text(sql));
            let mut explain = db.prepare(&explain).expect("a statement");
            let mut rows = explain.raw_query();
            let row = rows.next().expect("a plan").expect("a plan");
            row.get("detail").expect("a plan")
        };
        let search = "SEARCH deliveries USING COVERING INDEX deliveries_due";
        assert_eq!(
            plan(FIRST_PENDING),
            "SCAN deliveries USING COVERING INDEX deliveries_due"
        );
        assert_eq!(plan(NEXT_PENDING), format!("{search} ((owner,host)>(?,?))"));
        assert_eq!(
            plan(NEXT_OF_TARGET),
            format!("{search} (owner=? AND host=? AND next_at>?)")
        );
        let far_ahead = plan(FAR_AHEAD);
        assert!(far_ahead.contains("INDEX deliveries_due"), "{far_ahead}");
    }
}
