//! Adds webhook deliveries.

use rusqlite::named_params;

use crate::domain::run::RunId;
use crate::ssrf;
use crate::store::NewDelivery;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

pub fn insert(
    sql: &mut Statements<'_>,
    run: RunId,
    delivery: &NewDelivery,
) -> rusqlite::Result<usize> {
    let webhook = &delivery.webhook;
    sql.insert_delivery.execute(named_params! {
        ":id": delivery.id.0.as_bytes(),
        ":run": rows::id_bytes(&run),
        ":event": delivery.event,
        ":host": ssrf::host_of(&webhook.url),
        ":url": webhook.url,
        ":secret_env": webhook.secret_env,
        ":body": delivery.body,
        ":created_at": delivery.created_at.as_millisecond(),
    })
}
