//! Reads configurations of push notifications.

use tokio_postgres::Row;

use crate::domain::run::RunId;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::push_configs::{PushConfig, PushTarget};
use crate::store::reader::Reader;
use crate::store::sql::value::params;

pub async fn list(db: &Reader, run: RunId) -> StoreResult<Vec<PushConfig>> {
    let sql = "SELECT id, url, context, token, scheme, credentials FROM push_configs WHERE run = :run ORDER BY id";
    let found = db.rows(sql, params! {":run": run}).await?;
    found.iter().map(config).collect()
}

fn config(row: &Row) -> StoreResult<PushConfig> {
    Ok(PushConfig {
        id: rows::required_text(row, "id")?,
        url: rows::required_text(row, "url")?,
        target: target(row)?,
    })
}

pub fn target(row: &Row) -> StoreResult<PushTarget> {
    Ok(PushTarget {
        context: rows::required_text(row, "context")?,
        token: rows::text(row, "token")?,
        scheme: rows::text(row, "scheme")?,
        credentials: rows::text(row, "credentials")?,
    })
}
