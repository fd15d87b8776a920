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
