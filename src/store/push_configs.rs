//! Push notifications of A2A: who is notified of a task's states. The notifications are deliveries of the
//! outbox, committed with the write that they report.

use std::fmt;

use futures_util::future::BoxFuture;

use crate::domain::run::{RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::ReadMode;
use crate::store::sql::clock::clock;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{free_text, params, values};

/// Largest number of configurations of one run.
pub const MAX_PUSH_CONFIGS: usize = 16;

pub trait PushConfigs: Send + Sync + 'static {
    /// The configurations of a root run, by id.
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>>;

    /// Adds a configuration, or replaces the one with its id. A run that has ended is reported at once. Returns false if the
    /// run has [`MAX_PUSH_CONFIGS`] others.
    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes a configuration with what is not delivered yet.
    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// A receiver of notifications.
#[derive(Clone)]
pub struct PushConfig {
    pub id: String,
    pub url: String,
    pub target: PushTarget,
}

/// What a notification has beside its state.
#[derive(Clone, Default)]
pub struct PushTarget {
    /// The id of the task's context.
    pub context: String,
    /// Sent in a header of its own.
    pub token: Option<String>,
    /// A scheme of HTTP authentication, such as `Bearer`.
    pub scheme: Option<String>,
    pub credentials: Option<String>,
}

impl fmt::Debug for PushConfig {
    /// Without the URL and the rest, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushConfig")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

const LIST: &str = "SELECT id, url, context, token, scheme, credentials FROM push_configs WHERE run = :run ORDER BY id";
/// Only for a root run with at most so many others. Waits for a write that ends the run, or makes it wait.
const UPSERT: &str = "INSERT INTO push_configs (run, id, url, context, token, scheme, credentials) \
     SELECT r.id, :id, :url, :context, :token, :scheme, :credentials FROM runs r \
     WHERE r.id = :run AND r.parent IS NULL \
     AND (SELECT count(*) FROM push_configs c WHERE c.run = :run AND c.id <> :id) < :max {|FOR SHARE OF r} \
     ON CONFLICT (run, id) DO UPDATE SET url = excluded.url, context = excluded.context, token = excluded.token, \
     scheme = excluded.scheme, credentials = excluded.credentials";
/// The notification of a run that has ended already, unless the configuration was not added.
const INSERT_ENDED: &str = concat!(
    "INSERT INTO deliveries (id, run, event, host, url, body, status, created_at, since, tries, next_at, attempts, owner, push) \
     SELECT :delivery, r.id, 'run.' || r.status, :host, :url, '', 'pending', :now, :now, 0, ",
    clock!(),
    ", {'[]'|'{}'}, coalesce(r.owner, ''), :id FROM runs r WHERE r.id = :run AND r.finished_at IS NOT NULL \
     AND EXISTS (SELECT 1 FROM push_configs c WHERE c.run = r.id AND c.id = :id)"
);
const DELETE: &str = "DELETE FROM push_configs WHERE run = :run AND id = :id";
const DELETE_DELIVERIES: &str =
    "DELETE FROM deliveries WHERE run = :run AND push = :id AND next_at IS NOT NULL";

impl<E: Engine> PushConfigs for E {
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>> {
        let config = |row: &Row<'_>| {
            Ok(PushConfig {
                id: row.get("id")?,
                url: row.get("url")?,
                target: target(row)?,
            })
        };
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { db.query(LIST, params! {":run": run}, config).await })
        })
    }

    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let ended = values! {
            ":delivery": DeliveryId::new().0,
            ":host": ssrf::host_of(&config.url),
            ":url": free_text(config.url.clone()),
            ":id": free_text(config.id.clone()),
            ":run": run,
            ":now": now().as_millisecond(),
        };
        let target = config.target;
        let config = values! {
            ":run": run,
            ":id": free_text(config.id),
            ":url": free_text(config.url),
            ":context": free_text(target.context),
            ":token": target.token.map(free_text),
            ":scheme": target.scheme.map(free_text),
            ":credentials": target.credentials.map(free_text),
            ":max": signed(MAX_PUSH_CONFIGS as u64),
        };
        let changes = Changes::one(UPSERT, config).and(INSERT_ENDED, ended);
        self.changes_row(changes.with_deliveries(), 0)
    }

    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>> {
        let of_config = values! {":run": run, ":id": free_text(id)};
        self.apply(Changes::one(DELETE, of_config.clone()).and(DELETE_DELIVERIES, of_config))
    }
}

/// What a notification to a configuration has.
pub fn target(row: &Row<'_>) -> StoreResult<PushTarget> {
    Ok(PushTarget {
        context: row.get("context")?,
        token: row.get("token")?,
        scheme: row.get("scheme")?,
        credentials: row.get("credentials")?,
    })
}

#[cfg(test)]
mod tests {
    use super::INSERT_ENDED;
    use crate::domain::event::EventName;
    use crate::domain::run::Status;

    /// [`INSERT_ENDED`] makes them of statuses.
    #[test]
    fn the_end_of_a_run_is_an_event_with_its_status() {
        assert!(INSERT_ENDED.contains("'run.' || r.status"));
        for status in Status::ALL.into_iter().filter(|it| it.is_terminal()) {
            let name = EventName::parse(&format!("run.{}", status.as_str()));
            assert!(name.is_some_and(EventName::is_terminal), "{status:?}");
        }
    }
}
