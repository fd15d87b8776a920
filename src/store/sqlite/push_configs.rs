//! Configurations of push notifications, and the deliveries that they cause.

use rusqlite::{Connection, Row, named_params};

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::StoreError;
use crate::store::encoding::notified_event::NotifiedEvent;
use crate::store::push_configs::{MAX_PUSH_CONFIGS, PushConfig, PushTarget};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

pub fn list(db: &Connection, run: RunId) -> Result<Vec<PushConfig>, StoreError> {
    let read = || {
        let mut sql = db.prepare_cached(
            "SELECT id, url, context, token, scheme, credentials FROM push_configs WHERE run = :run ORDER BY id",
        )?;
        let configs = sql.query_map(named_params! {":run": rows::id_bytes(&run)}, config)?;
        configs.collect::<rusqlite::Result<_>>()
    };
    read().map_err(store_error)
}

fn config(row: &Row<'_>) -> rusqlite::Result<PushConfig> {
    Ok(PushConfig {
        id: row.get("id")?,
        url: row.get("url")?,
        target: target(row)?,
    })
}

pub fn target(row: &Row<'_>) -> rusqlite::Result<PushTarget> {
    Ok(PushTarget {
        context: row.get("context")?,
        token: row.get("token")?,
        scheme: row.get("scheme")?,
        credentials: row.get("credentials")?,
    })
}

/// Whether any run has a configuration.
pub fn exist(db: &Connection) -> rusqlite::Result<bool> {
    db.prepare("SELECT 1 FROM push_configs LIMIT 1")?.exists([])
}

/// Returns false if the run has too many others, or does not exist.
pub fn add(sql: &mut Statements<'_>, run: RunId, config: &PushConfig) -> rusqlite::Result<bool> {
    let PushTarget {
        context,
        token,
        scheme,
        credentials,
    } = &config.target;
    let added = sql.upsert_push_config.execute(named_params! {
        ":run": rows::id_bytes(&run),
        ":id": config.id,
        ":url": config.url,
        ":context": context,
        ":token": token,
        ":scheme": scheme,
        ":credentials": credentials,
        ":max": MAX_PUSH_CONFIGS as i64,
    })?;
    if added == 0 {
        return Ok(false);
    }
    let params = named_params! {":id": rows::id_bytes(&run)};
    let ended = sql
        .ended_status
        .query_row(params, |row| row.get::<_, String>("status"))?;
    if let Some(event) = ended.as_deref().and_then(NotifiedEvent::of_end) {
        insert_delivery(sql, run, &config.id, &config.url, event)?;
    }
    Ok(true)
}

pub fn delete(sql: &mut Statements<'_>, run: RunId, id: &str) -> rusqlite::Result<()> {
    let run = rows::id_bytes(&run);
    sql.delete_push_config
        .execute(named_params! {":run": run, ":id": id})?;
    sql.delete_push_deliveries
        .execute(named_params! {":run": run, ":push": id})?;
    Ok(())
}

/// Makes the deliveries of an event, and returns whether there are any.
pub fn notify(
    sql: &mut Statements<'_>,
    root: RunId,
    event: NotifiedEvent,
) -> rusqlite::Result<bool> {
    let targets: Vec<(String, String)> = sql
        .push_targets
        .query(named_params! {":run": rows::id_bytes(&root)})?
        .mapped(|row| Ok((row.get("id")?, row.get("url")?)))
        .collect::<rusqlite::Result<_>>()?;
    for (id, url) in &targets {
        insert_delivery(sql, root, id, url, event)?;
    }
    Ok(!targets.is_empty())
}

/// The body is made when it is sent: it says nothing but the state.
fn insert_delivery(
    sql: &mut Statements<'_>,
    run: RunId,
    config: &str,
    url: &str,
    event: NotifiedEvent,
) -> rusqlite::Result<usize> {
    let parsed = ssrf::parse_url(url).ok();
    let host = parsed.as_ref().and_then(|url| url.host_str());
    sql.insert_push_delivery.execute(named_params! {
        ":id": DeliveryId::new().0.as_bytes(),
        ":run": rows::id_bytes(&run),
        ":event": event.name.as_str(),
        ":host": ssrf::normalize_host(host.unwrap_or_default()),
        ":url": url,
        ":created_at": event.time.as_millisecond(),
        ":push": config,
    })
}
