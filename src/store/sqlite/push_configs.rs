//! The deliveries that configurations of push notifications cause.

use rusqlite::{Connection, named_params};

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::encoding::notified_event::NotifiedEvent;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

/// Whether any run has a configuration.
pub fn exist(db: &Connection) -> rusqlite::Result<bool> {
    db.prepare("SELECT 1 FROM push_configs LIMIT 1")?.exists([])
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
    sql.insert_push_delivery.execute(named_params! {
        ":id": DeliveryId::new().0.as_bytes(),
        ":run": rows::id_bytes(&run),
        ":event": event.name.as_str(),
        ":host": ssrf::host_of(url),
        ":url": url,
        ":created_at": event.time.as_millisecond(),
        ":push": config,
    })
}
