//! Events of the world outside and the waits for them. An event is recorded with the waits that it ends; a node that drives a run
//! finds such a wait here, and lets the call go on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::changes::Changes;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::ReadMode;
use crate::store::sql::row::{Row, StoreResult, damaged};
use crate::store::sql::value::{free_text, params, values};

/// How long an event with an id of its client is known.
const ID_RETENTION: SignedDuration = SignedDuration::from_hours(24);
/// Waits that [`WorldEvents::ended_waits`] returns at once.
const PAGE: u32 = 1_000;
/// Rows of `event_locks`.
const LOCKS: u128 = 64;

pub trait WorldEvents: Send + Sync + 'static {
    /// Records an event with the waits that it ends: one of each run of the owner that waits for it.
    fn publish_event(&self, event: NewWorldEvent) -> BoxFuture<'_, StoreResult<Published>>;

    /// Ends a wait by an event that came since then and that the run has not received.
    fn receive_earlier(
        &self,
        wait: EventWait,
        since: Timestamp,
    ) -> BoxFuture<'_, StoreResult<bool>>;

    /// The waits of this node's runs that an event has ended, at most 1,000.
    fn ended_waits(&self) -> BoxFuture<'_, StoreResult<Vec<EndedWait>>>;
}

#[derive(Clone, Debug)]
pub struct NewWorldEvent {
    pub id: Uuid,
    /// Empty without keys.
    pub owner: String,
    /// See [`crate::domain::world_event::wake_key`].
    pub wake: String,
    pub client_id: Option<String>,
    pub data: Arc<RawValue>,
    pub at: Timestamp,
    /// How long it counts for waits that begin later.
    pub lookback: Duration,
    /// The most events of the owner that are kept.
    pub max_kept: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// This many waits ended.
    Woken(u64),
    /// It was recorded before under the id of its client, and ended so many.
    Repeated(u64),
    /// The client has used the id for another event.
    OtherEvent,
    /// The owner has as many events as may be kept.
    Full,
}

/// A call that waits for an event.
#[derive(Clone, Debug)]
pub struct EventWait {
    pub run: RunId,
    pub call: String,
    /// Empty without keys.
    pub owner: String,
    pub wake: String,
}

#[derive(Clone, Debug)]
pub struct EndedWait {
    pub run: RunId,
    pub call: String,
    pub data: Arc<RawValue>,
}

/// To record an event, or to begin a wait for it, its key is locked first, so that neither misses the other.
const LOCK: &str = "{UPDATE inputs SET received = received WHERE false|UPDATE event_locks SET id = id WHERE id = :lock}";
const TRIM_RECEIPTS: &str = "DELETE FROM event_receipts WHERE event IN (SELECT e.id FROM world_events e WHERE e.owner = :owner \
     AND e.at < :before AND (e.client_id IS NULL OR e.at < :ids_before) \
     AND NOT EXISTS (SELECT 1 FROM inputs a WHERE a.received = e.id))";
const TRIM: &str = "DELETE FROM world_events WHERE owner = :owner AND at < :before AND (client_id IS NULL OR at < :ids_before) \
     AND NOT EXISTS (SELECT 1 FROM inputs a WHERE a.received = world_events.id)";
const INSERT: &str = "INSERT INTO world_events (id, owner, wake, client_id, data, at, woken) \
     SELECT :id, :owner, :wake, :client_id, :data, :at, 0 WHERE (SELECT count(*) FROM world_events WHERE owner = :owner) < :max \
     ON CONFLICT DO NOTHING";
/// The first wait of each run.
const END_WAITS: &str = "UPDATE inputs SET received = :id WHERE wake = :wake AND coalesce(owner, '') = :owner AND received IS NULL \
     AND EXISTS (SELECT 1 FROM world_events WHERE id = :id) AND seq = (SELECT min(a.seq) FROM inputs a \
     WHERE a.run = inputs.run AND a.wake = :wake AND a.received IS NULL)";
const INSERT_RECEIPTS: &str = "INSERT INTO event_receipts (event, run) SELECT DISTINCT :id{|::uuid}, run FROM inputs WHERE received = :id";
const COUNT: &str = "UPDATE world_events SET woken = (SELECT count(*) FROM inputs a WHERE a.received = :id) WHERE id = :id";
const WOKEN: &str =
    "SELECT woken, wake FROM world_events WHERE owner = :owner AND client_id = :client_id";
const RECEIVE: &str = "UPDATE inputs SET received = (SELECT e.id FROM world_events e WHERE e.wake = :wake AND e.owner = :owner \
     AND e.at >= :since AND NOT EXISTS (SELECT 1 FROM event_receipts r WHERE r.event = e.id AND r.run = :run) \
     ORDER BY e.at, e.id LIMIT 1) WHERE run = :run AND call = :call AND received IS NULL";
const INSERT_RECEIPT: &str = "INSERT INTO event_receipts (event, run) SELECT received, run FROM inputs WHERE run = :run AND call = :call \
     AND received IS NOT NULL ON CONFLICT DO NOTHING";
const ENDED: &str = "SELECT a.run, a.call, e.data FROM inputs a JOIN world_events e ON e.id = a.received \
     {|JOIN trees t ON t.root = a.root AND t.node = :node }WHERE a.received IS NOT NULL LIMIT :limit";

impl<E: Engine> WorldEvents for E {
    fn publish_event(&self, event: NewWorldEvent) -> BoxFuture<'_, StoreResult<Published>> {
        Box::pin(async move {
            let (owner, client_id) = (event.owner.clone(), event.client_id.clone());
            let wake = event.wake.clone();
            let ago = |time: SignedDuration| event.at.saturating_sub(time).unwrap_or(event.at);
            let lookback = SignedDuration::try_from(event.lookback).unwrap_or(SignedDuration::MAX);
            let all = values! {
                ":id": event.id, ":owner": event.owner.clone(), ":wake": free_text(event.wake.clone()),
                ":client_id": event.client_id.clone().map(free_text), ":data": free_text(event.data.get().to_owned()),
                ":at": event.at.as_millisecond(), ":max": signed(event.max_kept),
                ":before": ago(lookback).as_millisecond(), ":ids_before": ago(ID_RETENTION.max(lookback)).as_millisecond(),
                ":lock": lock(&event.wake),
            };
            let statements = [
                LOCK,
                TRIM_RECEIPTS,
                TRIM,
                INSERT,
                END_WAITS,
                INSERT_RECEIPTS,
                COUNT,
            ];
            let changes = statements
                .into_iter()
                .fold(Changes::default(), |changes, sql| {
                    changes.and(sql, all.clone())
                });
            let changed = self.commit(changes).await?;
            let rows = |statement: usize| changed.get(statement).copied().unwrap_or_default();
            if rows(3) > 0 {
                return Ok(Published::Woken(rows(4)));
            }
            let repeated = self.read(ReadMode::Statement, move |db| {
                Box::pin(async move {
                    let Some(client_id) = client_id else {
                        return Ok(None);
                    };
                    let params = params! {":owner": &owner, ":client_id": free_text(&client_id)};
                    db.first(WOKEN, params, |row: &Row<'_>| {
                        Ok(match row.get::<String>("wake")? == wake {
                            true => Published::Repeated(row.get("woken")?),
                            false => Published::OtherEvent,
                        })
                    })
                    .await
                })
            });
            Ok(repeated.await?.unwrap_or(Published::Full))
        })
    }

    fn receive_earlier(
        &self,
        wait: EventWait,
        since: Timestamp,
    ) -> BoxFuture<'_, StoreResult<bool>> {
        let lock = lock(&wait.wake);
        let all = values! {
            ":run": wait.run, ":call": free_text(wait.call), ":owner": wait.owner, ":wake": free_text(wait.wake),
            ":since": since.as_millisecond(), ":lock": lock,
        };
        let changes = Changes::one(LOCK, all.clone())
            .and(RECEIVE, all.clone())
            .and(INSERT_RECEIPT, all);
        self.changes_row(changes, 2)
    }

    fn ended_waits(&self) -> BoxFuture<'_, StoreResult<Vec<EndedWait>>> {
        let node = self.writer_id();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                db.query(ENDED, params! {":node": node, ":limit": PAGE}, ended_wait)
                    .await
            })
        })
    }
}

fn lock(wake: &str) -> i64 {
    let digest = wake
        .bytes()
        .fold(0_u128, |sum, byte| sum.wrapping_mul(31) + u128::from(byte));
    (digest % LOCKS) as i64
}

fn ended_wait(row: &Row<'_>) -> StoreResult<EndedWait> {
    let data: Option<Box<RawValue>> = row.json("data")?;
    Ok(EndedWait {
        run: row.get("run")?,
        call: row.get("call")?,
        data: data.ok_or_else(|| damaged("an event has no data"))?.into(),
    })
}
